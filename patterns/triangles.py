"""Masks that a graph computes from sizes alone, as they are for a square of `SIDE` positions: causal whatever the length is.

`torch.full((s, s), -inf).triu(1)`, `torch.ones(s, s).tril()` and comparisons of two ranges become ConstantOfShape, Expand,
Trilu, Range and elementwise operators. They are computed here with SIDE in place of the unknown length.
"""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnquant.graph import constant
from attnquant.patterns import moves
from attnquant.patterns.facts import Facts, Level, axes_argument, inputs_at, integer

SIDE = 5
LIMIT = 48
"""Nodes behind one mask."""

_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "Add": np.add, "And": np.logical_and, "Equal": np.equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal,
    "Less": np.less, "LessOrEqual": np.less_equal, "Max": np.maximum, "Min": np.minimum, "Mul": np.multiply,
    "Neg": np.negative, "Not": np.logical_not, "Or": np.logical_or, "Sub": np.subtract, "Where": np.where,
}  # fmt: skip


def square(facts: Facts, value: ir.Value) -> np.ndarray | None:
    """The mask as (SIDE, SIDE); None where it is not square, depends on values of inputs, or is not understood."""
    rows, columns = facts.axis_size(value, -2), facts.axis_size(value, -1)
    if rows is None or rows != columns or facts.level(value) > Level.SHAPE:
        return None
    with np.errstate(all="ignore"):
        found = _value(facts, value, [LIMIT])
    return found if found is not None and found.shape == (SIDE, SIDE) else None


def _value(facts: Facts, value: ir.Value | None, budget: list[int]) -> np.ndarray | None:
    array = constant(value)
    if array is not None:
        return array.reshape(()) if array.size == 1 else None
    node = None if value is None else value.producer()
    budget[0] -= 1
    if node is None or budget[0] < 0 or node.domain not in ("", "ai.onnx"):
        return None
    facts.steps += 1
    if node.op_type in _ELEMENTWISE:
        operands = [_value(facts, one, budget) for one in node.inputs]
        return None if any(one is None for one in operands) else np.asarray(_ELEMENTWISE[node.op_type](*operands))
    maker = _MAKERS.get(node.op_type)
    return None if maker is None else maker(facts, node, budget)


def _filled(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    given = node.attributes.get("value")
    fill = np.float32(0) if given is None else given.as_tensor().numpy().reshape(())
    return np.full((SIDE, SIDE), fill) if facts.rank(node.outputs[0]) != 1 else None


def _expanded(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    found = _value(facts, inputs_at(node, 0), budget)
    return None if found is None else np.broadcast_to(found, (SIDE, SIDE))


def _triangle(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    found, offset = _value(facts, inputs_at(node, 0), budget), inputs_at(node, 1)
    shift = np.int64(0) if offset is None else constant(offset)
    if found is None or found.shape != (SIDE, SIDE) or shift is None:
        return None
    return (np.triu if integer(node, "upper", 1) else np.tril)(found, int(shift.reshape(())))


def _range(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    start, step = constant(inputs_at(node, 0)), constant(inputs_at(node, 2))
    if start is None or step is None or start.size != 1 or step.size != 1:
        return None
    return np.arange(SIDE) if float(start.item()) == 0 and float(step.item()) == 1 else None


def _unsqueezed(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    """A vector becomes a column or a row; axes in front of a square are left out, it is broadcast anyway."""
    found, axes = _value(facts, inputs_at(node, 0), budget), axes_argument(facts, node)
    if found is None or axes is None or found.ndim != 1:
        return found
    column = [axis for axis in axes if axis == -1 or axis == len(axes)]
    return found[:, None] if column else found[None, :]


def _same(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    return _value(facts, inputs_at(node, 0), budget)


def _turned(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    """Transposes that undo each other."""
    behind = moves.without_round_trips(facts, node.outputs[0])
    return None if behind is node.outputs[0] else _value(facts, behind, budget)


def _cast(facts: Facts, node: ir.Node, budget: list[int]) -> np.ndarray | None:
    found, kind = _value(facts, inputs_at(node, 0), budget), ir.DataType(integer(node, "to", 1))
    return None if found is None else found.astype(np.bool_ if kind == ir.DataType.BOOL else np.float64)


_MAKERS: dict[str, Callable[[Facts, ir.Node, list[int]], np.ndarray | None]] = {
    "Cast": _cast,
    "ConstantOfShape": _filled,
    "DequantizeLinear": _same,
    "Expand": _expanded,
    "Identity": _same,
    "QuantizeLinear": _same,
    "Range": _range,
    "Transpose": _turned,
    "Trilu": _triangle,
    "Unsqueeze": _unsqueezed,
}
