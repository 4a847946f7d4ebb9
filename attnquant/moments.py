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
    powers = {name: np.zeros((size, size), np.float32) for name, size in read.items()}
    counts = dict.fromkeys(read, 0)
    with runtime.session(made, spare=True, spinning=False) as session:
        for sample in samples:
            found = {**runtime.run_session(session, sample), **sample}
            for name, size in read.items():
                rows = np.asarray(found[name], np.float32).reshape(-1, size)
                powers[name] += rows.T @ rows
                counts[name] += len(rows)
    roots: dict[str, Moments] = {}
    result = {}
    for node, weight in weights.items():
        name = tensor_name(node.inputs[0])
        if counts.get(name) and np.isfinite(powers[name]).all():
            if name not in roots:
                roots[name] = Moments.of(powers[name] / counts[name], weight)
            result[node.name or ""] = replace(roots[name], sizes=norms(weight))
    return result
