"""What stands between an operator's K and V and the tensors that it could take instead: repeat_kv, and a cache by Concat."""

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import Facts, inputs_at, integer, permutation
from attnquant.patterns.sizes import times
from attnquant.rewrite.views import View, passes_whole, peeled

_PLAIN = (0, 1, 2, 3)
_TURNED = (0, 1, 3, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """K and V as past and new tokens; `present` are the outputs of the Concats, which the operator's outputs replace."""

    past: tuple[ir.Value, ir.Value]
    new: tuple[View, View]
    present: tuple[ir.Value, ir.Value]


def ungrouped(facts: Facts, view: View) -> tuple[View, int] | None:
    """(the operand in front of repeat_kv, how often its heads are repeated); None where no such repeat is plain to see."""
    copies = _copies(facts, view)
    expand = None if copies is None else copies.producer()
    room = _whole(facts, inputs_at(expand, 0)) if expand is not None and is_onnx(expand, "Expand") else None
    maker = None if room is None else room.producer()
    source = inputs_at(maker, 0) if maker is not None and is_onnx(maker, "Unsqueeze", "Reshape") else None
    if source is None or facts.rank(source) != 4 or facts.rank(copies) != 5 or facts.rank(room) != 5:
        return None
    heads, count = facts.axis_size(source, 1), facts.axis_size(copies, 2)
    if not isinstance(count, int) or heads is None or facts.axis_size(copies, 1) != heads or facts.axis_size(room, 2) != 1:
        return None
    if facts.axis_size(view.value, 1) != times(heads, count):
        return None
    return peeled(facts, View(value=source, order=_PLAIN, factor=view.factor)), count


def _copies(facts: Facts, view: View) -> ir.Value | None:
    """The five axes (batch, heads, copies, positions, channels) that a Reshape merges into the view.

    With the channels in front of the positions, they are merged into three axes, transposed and parted again.
    """
    part = view.value.producer()
    if part is None or not is_onnx(part, "Reshape"):
        return None
    if view.plain:
        return _whole(facts, inputs_at(part, 0))
    turned = inputs_at(part, 0)
    turn = None if turned is None else turned.producer()
    merged = inputs_at(turn, 0) if turn is not None and is_onnx(turn, "Transpose") else None
    merge = None if merged is None else merged.producer()
    if view.order != _TURNED or turn is None or merge is None or not is_onnx(merge, "Reshape"):
        return None
    copies = _whole(facts, inputs_at(merge, 0))
    kept = [facts.axis_size(value, axis) for value, axis in ((copies, 4), (merged, 2), (view.value, 2)) if value is not None]
    if facts.rank(merged) != 3 or permutation(turn, 3) != (0, 2, 1) or None in kept or len(set(kept)) != 1:
        return None
    return copies


def _whole(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """The tensor behind copies and slices of all of it."""
    while value is not None and (node := value.producer()) is not None and passes_whole(facts, node):
        value = inputs_at(node, 0)
    return value


def cache(facts: Facts, key: View, value: View) -> Cache | None:
    """The caches in front of K and V, where both are Concats of (batch, heads, length, size) along the length."""
    found = [_joined(facts, view) for view in (key, value)]
    first, second = found
    if first is None or second is None or key.value is value.value:
        return None
    return Cache(past=(first[0], second[0]), new=(first[1], second[1]), present=(key.value, value.value))


def _joined(facts: Facts, view: View) -> tuple[ir.Value, View] | None:
    node = view.value.producer()
    if node is None or not view.plain or view.rank != 4 or not is_onnx(node, "Concat") or len(node.inputs) != 2:
        return None
    past, new = node.inputs
    if past is None or new is None or integer(node, "axis", 0) not in (2, -2):
        return None
    whole = View(value=new, order=_PLAIN)
    behind = peeled(facts, whole)
    return past, behind if behind.factor == 1.0 else whole


def length(facts: Facts, past: ir.Value | None) -> object:
    """How long a cache is: 0 for none, the name that an input's length is declared by, or its size; None for unknown.

    Caches of one name are as long as each other: a model that declares so is given no others.
    """
    if past is None:
        return 0
    named = past.shape[2] if past.shape is not None and past.is_graph_input() else None
    return named.value if isinstance(named, ir.SymbolicDim) and named.value else facts.axis_size(past, 2)


def depend(values: Iterable[ir.Value | None], present: Iterable[ir.Value]) -> bool:
    """True where one of these tensors is computed from one of `present`: the operator would wait for itself."""
    stops, waiting, seen = set(present), [value for value in values if value is not None], set()
    while waiting:
        value = waiting.pop()
        if value in stops:
            return True
        node = value.producer()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(item for item in node.inputs if item is not None)
    return False
