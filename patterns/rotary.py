"""Rotary position embedding written out: the tensor that was rotated, from the result.

Any form counts in which the result is put together from one tensor by slices, concatenation, negation and products with
tables: x * cos + rotate_half(x) * sin, the halves rotated one by one, interleaved pairs, a rotated part next to one left
alone.
"""

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import Facts, Level
from attnquant.patterns.sizes import sizes_of

_WITHIN = [
    "Add",
    "Sub",
    "Mul",
    "Neg",
    "Concat",
    "Slice",
    "Split",
    "Reshape",
    "Transpose",
    "Unsqueeze",
    "Squeeze",
    "Cast",
    "Identity",
    "Gather",
    "QuantizeLinear",
    "DequantizeLinear",
]
LIMIT = 24
"""Nodes looked at behind one operand of the outermost Add or Concat."""


def rotated(facts: Facts, value: ir.Value) -> ir.Value | None:
    """The tensor that rotary embedding made `value` from, None where `value` is no rotation."""
    node = value.producer()
    if node is None or not is_onnx(node, "Add", "Concat") or len(node.inputs) < 2:
        return None
    sides = [_behind(facts, one) for one in node.inputs]
    if not all(sides):
        return None
    shared = [one for one in sides[0] if all(one in side for side in sides[1:])]
    if not any(_multiplied(side) for side in sides):
        return None
    return max(shared, key=lambda one: _likeness(facts, one, value), default=None)


def _likeness(facts: Facts, one: ir.Value, whole: ir.Value) -> tuple[int, int]:
    """How much a candidate looks like the rotated tensor: equal sizes first (a cosine table is broadcast), then depth."""
    axes, wanted = facts.axes_of(one), facts.axes_of(whole)
    same = 0
    if axes is not None and wanted is not None and len(axes) == len(wanted):
        same = sum(left == right for left, right in zip(sizes_of(axes), sizes_of(wanted), strict=True))
    return same, facts.depths.get(one, 0)


def _multiplied(side: dict[ir.Value, None]) -> bool:
    return any(is_onnx(value.producer(), "Mul") for value in side)


def _behind(facts: Facts, value: ir.Value | None) -> dict[ir.Value, None]:
    """Tensors behind one operand, within the operators of a rotation."""
    found: dict[ir.Value, None] = {}
    waiting = [value]
    visits = 0
    while waiting and visits < LIMIT:
        one = waiting.pop(0)
        if one is None or one in found or facts.level(one) < Level.LEARNED:
            continue
        found[one] = None
        node = one.producer()
        if node is None or not is_onnx(node, *_WITHIN):
            continue
        visits += 1
        facts.steps += 1
        waiting.extend(node.inputs[:1] if not is_onnx(node, "Add", "Sub", "Mul", "Concat") else node.inputs)
    return found
