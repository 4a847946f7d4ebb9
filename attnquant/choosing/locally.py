"""A strength of SmoothQuant for each linear, from the error that rounding makes in it alone.

With the activation x / f and the weight W f, rounding noise of a step d has variance d^2 / 12 (Bennett 1948, "Spectra of
quantized signals"). Of one output row that is, summed over output channels n and input channels k,

    sum_k min(E[x_k^2], (d f_k)^2 / 12) |W_k|^2   +   sum_k E[x_k^2] / f_k^2  sum_n d_n^2 / 12

d from the range of x / f, d_n from the largest |W_kn f_k|; what is smaller than a step is rounded away, not disturbed.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnquant.choosing.search import OFF
from attnquant.graph import tensor_name, weight_matrix
from attnquant.host.known import SHAPE, Key, Reduction
from attnquant.host.memory import HostMemory

STRENGTHS = (OFF, 0.15, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def powers(asked: Iterable[Key]) -> list[Key]:
    """What to ask in addition: the sum of squares of each channel whose extremes are asked for."""
    fewest: dict[str, tuple[int, ...]] = {}
    for name, wanted in asked:
        if wanted.op_type == "ReduceMax" and wanted.axes and wanted.keepdims and not wanted.absolute:
            fewest[name] = min(fewest.get(name, wanted.axes), wanted.axes, key=len)
    return [(name, Reduction(op_type="ReduceSumSquare", axes=axes)) for name, axes in fewest.items()]


def strengths(model: ir.Model, linears: Iterable[str], memory: HostMemory) -> dict[str, float]:
    """{linear: the strength of the least error}; the same for linears that share an input, none where nothing is known.

    :param model: The float model.
    :param linears: Names of the linears to look at.
    """
    wanted = set(linears)
    groups: dict[str, list[tuple[str, np.ndarray]]] = {}
    for node in model.graph:
        if node.name in wanted and (weight := weight_matrix(node)) is not None:
            groups.setdefault(tensor_name(node.inputs[0]), []).append((node.name or "", weight))
    axes = dict(powers(memory.asked))
    found: dict[str, float] = {}
    for name, members in groups.items():
        if name not in axes or (channels := _channels(memory, name, axes[name])) is None:
            continue
        best = _best([weight for _, weight in members], *channels)
        found |= {linear: best for linear, _ in members}
    return found


def _channels(memory: HostMemory, name: str, power: Reduction) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """(minimum, maximum, mean square) of each channel over the samples seen."""
    kinds = [Reduction(op_type=kind, axes=power.axes) for kind in ("ReduceMin", "ReduceMax")]
    known = memory.together([(name, one) for one in (*kinds, power, SHAPE)])
    if not known:
        return None
    low, high, squares, shapes = zip(*known, strict=True)
    count = sum(float(shape.prod()) for shape in shapes) / squares[0].size
    mean = np.sum([one.reshape(-1).astype(np.float64) for one in squares], axis=0) / count
    return np.min([one.reshape(-1) for one in low], axis=0), np.max([one.reshape(-1) for one in high], axis=0), mean


def _best(weights: Sequence[np.ndarray], low: np.ndarray, high: np.ndarray, power: np.ndarray) -> float:
    from attnquant.host.strengths import factor

    if any(weight.shape[0] != power.size for weight in weights):
        return OFF
    sizes = [np.abs(weight) for weight in weights]
    largest, tops = np.maximum(-low, high), [size.max(axis=1) for size in sizes]
    norms = sum(np.square(weight, dtype=np.float64).sum(axis=1) for weight in weights)
    errors: Mapping[float, float] = {
        strength: _error(sizes, norms, low, high, power, factor(largest, tops, strength)) for strength in STRENGTHS
    }
    return min(errors, key=lambda strength: errors[strength])


def _error(
    sizes: Sequence[np.ndarray], norms: np.ndarray, low: np.ndarray, high: np.ndarray, power: np.ndarray,
    scale: np.ndarray | None,
) -> float:  # fmt: skip
    """The formula above."""
    spread = np.ones(power.size, np.float32) if scale is None else scale.reshape(-1)
    step = (max(float((high / spread).max()), 0.0) - min(float((low / spread).min()), 0.0)) / 255
    activation = (np.minimum(power, np.square(step * spread.astype(np.float64)) / 12) * norms).sum()
    shares = (power / np.square(spread.astype(np.float64))).sum() / 12
    steps = sum(np.square((size * spread[:, None]).max(axis=0).astype(np.float64) / 127).sum() for size in sizes)
    return float(activation + shares * steps)
