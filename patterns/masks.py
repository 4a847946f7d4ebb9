"""What a mask says: causal where a constant, or a triangle computed from sizes alone, proves it."""

import numpy as np
import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns import triangles
from attnquant.patterns.elements import tensor_of
from attnquant.patterns.facts import Facts, Level, inputs_at
from attnquant.patterns.scores import ScoresPath, Step

LIMIT = 1 << 22
"""Largest constant mask that is read, in elements."""


def mask_steps(path: ScoresPath) -> list[Step]:
    """Steps that mask or bias the scores, from the product on."""
    return [step for step in path.steps if step.kind == "mask" and step.other is not None]


def causal(facts: Facts, path: ScoresPath) -> bool | None:
    """True where a mask, constant or computed from sizes, hides exactly what comes after each position, else False or None.

    False where no mask can hide that, None where it is not known.
    """
    steps = mask_steps(path)
    unknown = path.product.addend is not None
    for step in steps:
        hidden = _hidden(facts, step, path)
        if hidden is None:
            unknown = True
        elif _is_causal(hidden):
            return True
    return None if unknown else False


def _hidden(facts: Facts, step: Step, path: ScoresPath) -> np.ndarray | None:
    """Boolean array, True where a constant mask hides a position; rows are queries, columns keys."""
    other = inputs_at(step.node, step.other or 0)
    if other is None or facts.level(other) > Level.SHAPE:
        return None
    array = _read(other) if facts.level(other) == Level.CONSTANT else None
    array = triangles.square(facts, other) if array is None else array
    if array is None or path.axis not in (-1, -2):
        return None
    if is_onnx(step.node, "Where"):
        fill = _read(inputs_at(step.node, 3 - step.index))
        if fill is None or array.dtype != bool or not _hides(fill).all():
            return None
        hidden = array if step.index == 2 else ~array
    else:
        hidden = _hides(-array if is_onnx(step.node, "Sub") and step.index == 0 and array.dtype.kind == "f" else array)
    return hidden if path.axis == -1 or hidden.ndim < 2 else np.swapaxes(hidden, -1, -2)


def _hides(array: np.ndarray) -> np.ndarray:
    """Additive masks hide with minus infinity or anything as large as the common substitutes for it."""
    return np.asarray(array <= -1e4) if array.dtype.kind == "f" else np.zeros(array.shape, bool)


def _read(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant, behind copies and Q/DQ; None where it is computed or too large."""
    while value is not None and (maker := value.producer()) is not None:
        if is_onnx(maker, "Constant"):
            return _array(tensor_of(maker))
        if not is_onnx(maker, "Identity", "Cast", "QuantizeLinear", "DequantizeLinear"):
            return None
        value = inputs_at(maker, 0)
    return None if value is None else _array(value.const_value)


def _array(tensor: ir.TensorProtocol | None) -> np.ndarray | None:
    return None if tensor is None or tensor.size > LIMIT else tensor.numpy()


def _is_causal(hidden: np.ndarray) -> bool:
    if hidden.ndim < 2 or hidden.shape[-2] < 2 or hidden.shape[-1] < 2:
        return False
    rows, columns = hidden.shape[-2:]
    expected = np.triu(np.ones((rows, columns), bool), 1 + columns - rows)
    return bool((hidden == expected).all())
