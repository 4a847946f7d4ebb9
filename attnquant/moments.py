"""How the inputs of a model's linears go together, from running it on samples: what `emission.compensated` rounds by."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import runtime
from attnquant.emission.compensated import Moments, norms
from attnquant.graph import tensor_name, weight_matrix

_MOST = 1 << 28
"""Elements of all matrices together: a gigabyte of them. Linears behind that many are rounded to the nearest."""
_ROWS = 1024
"""Inputs of a linear that are multiplied with themselves at once."""


def moments(model: ir.Model, linears: Iterable[str], samples: Iterable[Mapping[str, np.ndarray]]) -> dict[str, Moments]:
    """{linear: moments of its input over all samples} for those with a constant float32 matrix on the right.

    :param model: A float model, every tensor named; it is not changed.
    :raises ModelError: it does not run on a sample.
    """
    wanted = set(linears)
    weights = {node: weight for node in model.graph if node.name in wanted and (weight := weight_matrix(node)) is not None}
    read: dict[str, int] = {}
    for node, weight in weights.items():
        if sum(size**2 for size in read.values()) + weight.shape[0] ** 2 <= _MOST:
            read[tensor_name(node.inputs[0])] = weight.shape[0]
    made = models.copy(model)
    values = {tensor_name(value): value for node in made.graph for value in node.outputs}
    inner = [values[name] for name in read if name in values]
    made.graph.outputs[:] = inner or list(made.graph.outputs)  # a session has one at least
    powers = {name: _Power(size) for name, size in read.items()}
    with runtime.session(made, spare=True, spinning=False) as session:
        for sample in samples:
            found = {**runtime.run_session(session, sample), **sample}
            for name, power in powers.items():
                power.add(np.asarray(found[name], np.float32))
    roots: dict[str, Moments] = {}
    result = {}
    for node, weight in weights.items():
        name = tensor_name(node.inputs[0])
        mean = powers.pop(name).mean() if name in powers else None
        if mean is not None and np.isfinite(mean).all():
            roots[name] = Moments.of(mean, weight)
        if name in roots:
            result[node.name or ""] = replace(roots[name], sizes=norms(weight))
    return result


class _Power:
    """Mean of x x' over rows x, of which many are multiplied at once: a product of few rows takes several times as long."""

    def __init__(self, size: int) -> None:
        self._sum, self._count = np.zeros((size, size), np.float32), 0
        self._waiting: list[np.ndarray] = []

    def add(self, array: np.ndarray) -> None:
        self._waiting.append(array.reshape(-1, len(self._sum)))
        if sum(map(len, self._waiting)) >= _ROWS:
            self._multiply()

    def _multiply(self) -> None:
        if not self._waiting:
            return
        rows = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        self._sum += rows.T @ rows
        self._count += len(rows)
        self._waiting.clear()

    def mean(self) -> np.ndarray | None:
        """None where there was no row."""
        self._multiply()
        return self._sum / self._count if self._count else None
