"""Weights as integers of which each makes up for the rounding of those before it.

Of a linear with inputs x (K) the error of the integers Q in place of the weights W, in steps, is E = W - Q, and what comes
of it E[|x' E|^2] = tr(E' H E), H = E[x x']. With H = A D A', A upper triangular with ones on its diagonal and D diagonal,
that is the sum of D_k |E_k + sum_{j<k} A_jk E_j|^2: input by input, rounding what is inside to the nearest leaves half a
step of it (OPTQ, Frantar et al. 2023, as Chee et al. 2023, QuIP, section 3, write it). Inputs of most power come first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.emission.weights import fold_one, scales_of
from attnquant.graph import constant, is_onnx, weight_axis

_BLOCK = 64
"""Inputs whose errors go to all later ones together."""
_DAMPING = 0.01
"""Share of its own power added to each input: few samples say little about how inputs go together."""
_PAIR = 128.0
"""Largest sum of two neighbours of one sign that no kernel overflows (`emission.weights`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What calibration says of the inputs of a linear."""

    order: np.ndarray
    """Of the inputs, (K,): the largest first."""
    root: np.ndarray
    """R of H = R R', upper triangular in that order, float32 (K, K)."""
    sizes: np.ndarray
    """Norm of the float model's weights of each input, (K,): what is quantized may be scaled by input."""

    @staticmethod
    def of(power: np.ndarray, weight: np.ndarray) -> "Moments":
        """From H (K, K), which may be singular, and the float weight (K, N)."""
        order = np.argsort(-np.diag(power), kind="stable")
        damped = np.array(power[np.ix_(order, order)], np.float64)
        own = np.diag(damped).copy()
        damped[np.diag_indices_from(damped)] += _DAMPING * np.maximum(own, own.max() * 1e-6) + np.finfo(np.float32).tiny
        root = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        return Moments(order=order, root=root.astype(np.float32), sizes=norms(weight))

    def factors(self, weight: np.ndarray) -> np.ndarray:
        """By what each input is divided where the linear has this weight (K, N); 1 where nothing reads it."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = norms(weight) / self.sizes
        return np.where(np.isfinite(found) & (found > 0), found, 1.0).astype(np.float32)


def norms(weight: np.ndarray) -> np.ndarray:
    """Of the rows of a matrix."""
    return np.asarray(np.sqrt(np.square(weight, dtype=np.float64).sum(axis=1)))


def compensated(weight: np.ndarray, root: np.ndarray, order: np.ndarray, *, pairs: bool) -> np.ndarray:
    """int8 integers (K, N) for a weight in steps.

    :param root: R of H = R R', upper triangular with the inputs in `order`.
    :param pairs: Keep neighbours (0, 1), (2, 3), ... of one sign within what no kernel overflows.
    """
    inputs = len(weight)
    shares, sorted_weight = root / np.diag(root), weight[order]
    found, errors = np.zeros((inputs + 1, weight.shape[1]), np.float32), np.zeros(weight.shape, np.float32)
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        wanted = sorted_weight[start:end] + shares[:start, start:end].T @ errors[:start]
        for row in range(start, end):
            own = wanted[row - start] + shares[start:row, row] @ errors[start:row]
            partner = found[order[row] ^ 1] if pairs else np.float32(0)  # 0 where it is not yet rounded
            low, high = -_PAIR - np.minimum(partner, 0), _PAIR - np.maximum(partner, 0)
            rounded = np.clip(np.rint(own), np.maximum(low, -127), np.minimum(high, 127))
            found[order[row]], errors[row] = rounded, sorted_weight[row] - rounded
    return found[:inputs].astype(np.int8)


def round_weights(model: ir.Model, known: Mapping[str, Moments], *, overflow_safe: bool) -> int:
    """Fold the quantizers of the weights of the linears in `known` (by name), in place; returns how many.

    Takes weights of one reader, a constant behind a QuantizeLinear with a scale for each output or for all; leaves others.

    :param overflow_safe: As `emission.weights.fold_weights` has it, whose scales are taken.
    """
    changes = 0
    for node in list(model.graph):
        moments = known.get(node.name or "")
        quantize = None if moments is None else _quantizer(node)
        scales = None if quantize is None else scales_of(quantize, overflow_safe=overflow_safe)
        if moments is None or quantize is None or scales is None:
            continue
        weight, scale = scales.weight, scales.safe
        axis = weight_axis(node)
        if scales.axis not in (None, axis):
            continue
        own = weight if axis == 1 else weight.T
        if len(own) != len(moments.sizes):
            continue
        factors = moments.factors(own)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.where(scale > 0, own / scale, 0).astype(np.float32)
        integers = compensated(steps, moments.root / factors[moments.order, None], moments.order, pairs=overflow_safe)
        fold_one(model, quantize, np.ascontiguousarray(integers if axis == 1 else integers.T), scale)
        changes += 1
    return changes


def _quantizer(node: ir.Node) -> ir.Node | None:
    """The QuantizeLinear of a linear's weight, which nothing else reads."""
    if not is_onnx(node, "MatMul", "Gemm"):
        return None
    value = node.inputs[1]
    for kind in ("DequantizeLinear", "QuantizeLinear"):
        maker = None if value is None or len(value.uses()) != 1 else value.producer()
        if maker is None or not is_onnx(maker, kind):
            return None
        value = maker.inputs[0]
    return maker if constant(value) is not None else None
