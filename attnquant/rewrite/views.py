"""An operand of a product seen through transposes and constant factors: where to read it in the layout that is wanted."""

from dataclasses import dataclass, replace

import onnx_ir as ir

from attnquant.graph import constant, is_onnx
from attnquant.patterns.facts import Facts, Level, inputs_at, permutation
from attnquant.patterns.products import Pair, Product
from attnquant.patterns.scores import factor_of
from attnquant.patterns.sizes import Size, times
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.result import Refused

_LIMIT = 32
_BEYOND = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """factor * transpose(value, order) is (batch axes ..., positions, channels)."""

    value: ir.Value
    order: tuple[int, ...]
    factor: float = 1.0

    @property
    def rank(self) -> int:
        return len(self.order)

    @property
    def plain(self) -> bool:
        """The value lies in this layout already."""
        return self.order == tuple(range(len(self.order)))


def operand(facts: Facts, product: Product, side: int, *, channels_summed: bool) -> View:
    """One operand of a product with its positions and channels last.

    :param channels_summed: True for Q and K, whose channels the product sums over; False for V, whose positions it does.
    :raises Refused: an operand without all of the batch axes, or products over several axes.
    """
    value, rank = product.value(side), facts.rank(product.value(side))
    result = facts.rank(product.node.outputs[0])
    free, summed = product.free(side), product.contracted[side]
    if rank is None or result is None:
        raise Refused("the graph does not say how many axes the product has: pass one set of inputs as feeds")
    own = [product.source(axis)[side] for axis in free]
    if len(own) != 1 or len(summed) != 1 or own[0] is None:
        raise Refused("a product over several axes at once")
    batch = [product.source(axis) for axis in range(-result, 0) if None not in product.source(axis)]
    axes = [pair[side] for pair in batch]
    last = (own[0], summed[0]) if channels_summed else (summed[0], own[0])
    order = tuple(axis + rank for axis in (*axes, *last) if axis is not None)
    if min(order) < 0 or sorted(order) != list(range(rank)) or _is_spread(facts, product, side, batch):
        raise Refused("operands that are broadcast against each other in the product")
    return peeled(facts, View(value=value, order=order))


def _is_spread(facts: Facts, product: Product, side: int, batch: list[Pair]) -> bool:
    """A constant operand whose batch axes are not those of the other: one query for all samples. Operators want one each."""
    if facts.level(product.value(side)) >= Level.LEARNED:
        return False
    sizes = [
        tuple(None if axis is None else facts.axis_size(product.value(one), axis) for one, axis in enumerate(pair))
        for pair in batch
    ]
    return any(None in pair or pair[0] != pair[1] for pair in sizes)


def peeled(facts: Facts, view: View) -> View:
    """The view from as far back as only transposes, constant factors and copies lie between."""
    for _ in range(_LIMIT):
        node = view.value.producer()
        back = None if node is None else _back(facts, node, view)
        if back is None:
            return view
        view = back
    return view


def _back(facts: Facts, node: ir.Node, view: View) -> View | None:
    first = inputs_at(node, 0)
    if first is None or facts.rank(first) is None:
        return None
    if passes_whole(facts, node):
        return replace(view, value=first)
    if is_onnx(node, "Transpose"):
        turned = permutation(node, view.rank)
        return None if turned is None else replace(view, value=first, order=tuple(turned[axis] for axis in view.order))
    if is_onnx(node, "Mul", "Div"):
        return _scaled(facts, node, view)
    return _round_trip(facts, node, view) if is_onnx(node, "Reshape") else None


def passes_whole(facts: Facts, node: ir.Node) -> bool:
    """A copy, or a Slice that cuts nothing: from 0 to beyond any length."""
    if is_onnx(node, "Identity"):
        return True
    if not is_onnx(node, "Slice") or len(node.inputs) < 3:
        return False
    starts, ends, steps = (_integers(facts, inputs_at(node, index)) for index in (1, 2, 4))
    if starts is None or ends is None or (steps is None and inputs_at(node, 4) is not None):
        return False
    return not any(starts) and all(end >= _BEYOND for end in ends) and all(step == 1 for step in steps or ())


def _integers(facts: Facts, value: ir.Value | None) -> list[int] | None:
    array, elements = constant(value), facts.elements_of(value)
    items = array.ravel().tolist() if array is not None else () if elements is None else elements.items
    known = [item for item in items if isinstance(item, int)]
    return known if known and len(known) == len(items) else None


def _scaled(facts: Facts, node: ir.Node, view: View) -> View | None:
    for index in (0,) if is_onnx(node, "Div") else (0, 1):
        data, other = inputs_at(node, index), inputs_at(node, 1 - index)
        array = constant(other)
        elements = facts.elements_of(other)
        single = (array is not None and array.size == 1) or (elements is not None and len(elements.items) == 1)
        factor = factor_of(node, elements) if single else None
        if array is not None and array.size == 1 and factor is None:
            number = float(array.reshape(()))
            factor = number if is_onnx(node, "Mul") else 1.0 / number if number else None
        if data is not None and factor is not None and factor > 0 and facts.rank(data) == view.rank:
            return replace(view, value=data, factor=view.factor * factor)
    return None


def _round_trip(facts: Facts, node: ir.Node, view: View) -> View | None:
    """(a, b, c, d) -> (a b, c, d) -> (a b, d, c) -> (a, b, d, c) is a transpose."""
    inner = inputs_at(node, 0)
    turn = None if inner is None else inner.producer()
    merged = inputs_at(turn, 0) if turn is not None and is_onnx(turn, "Transpose") else None
    merge = None if merged is None else merged.producer()
    source = inputs_at(merge, 0) if merge is not None and is_onnx(merge, "Reshape") else None
    if turn is None or source is None or view.rank != 4 or facts.rank(source) != 4 or facts.rank(inner) != 3:
        return None
    if permutation(turn, 3) != (0, 2, 1) or not _same(facts, view.value, source, (0, 1, 3, 2)):
        return None
    return replace(view, value=source, order=tuple((0, 1, 3, 2)[axis] for axis in view.order))


def _same(facts: Facts, value: ir.Value, source: ir.Value, order: tuple[int, ...]) -> bool:
    """The sizes of `value` are those of `source` in this order."""
    pairs = [(facts.axis_size(value, axis), facts.axis_size(source, place)) for axis, place in enumerate(order)]
    unequal = [(one, other) for one, other in pairs if one is None or one != other]
    return len(unequal) <= 1  # with equal totals one size follows from the others


def lifted(facts: Facts, view: View) -> View | None:
    """A view of three axes whose first was merged from batch and heads, with four; None where it was not."""
    node = view.value.producer()
    source = inputs_at(node, 0) if node is not None and is_onnx(node, "Reshape") else None
    if view.rank != 3 or view.order[0] != 0 or source is None or facts.rank(source) != 4:
        return None
    kept = [(facts.axis_size(view.value, axis), facts.axis_size(source, axis + 1)) for axis in (1, 2)]
    sizes = facts.axis_size(source, 0), facts.axis_size(source, 1)
    merged = None if None in sizes else times(*_both(sizes))
    if any(one is None or one != other for one, other in kept) and merged != facts.axis_size(view.value, 0):
        return None
    if merged is None and any(one is None or one != other for one, other in kept):
        return None
    return peeled(facts, View(value=source, order=(0, 1, view.order[1] + 1, view.order[2] + 1), factor=view.factor))


def _both(sizes: tuple[Size | None, Size | None]) -> tuple[Size, Size]:
    first, second = sizes
    assert first is not None
    assert second is not None
    return first, second


def flat(facts: Facts, view: View) -> ir.Value | None:
    """The tensor (batch, positions, heads * channels) behind a view of four axes, None where there is none."""
    node = view.value.producer()
    source = inputs_at(node, 0) if node is not None and is_onnx(node, "Reshape") else None
    if view.order != (0, 2, 1, 3) or source is None or facts.rank(source) != 3:
        return None
    width, sizes = facts.axis_size(source, 2), (facts.axis_size(view.value, 2), facts.axis_size(view.value, 3))
    length = facts.axis_size(source, 1)
    if width is None or None in sizes or times(*_both(sizes)) != width:
        return None
    same = length is not None and length == facts.axis_size(view.value, 1)
    batch = facts.axis_size(source, 0)
    return source if same or (batch is not None and batch == facts.axis_size(view.value, 0)) else None


def heads_first(draft: Draft, view: View, label: str) -> ir.Value:
    """(batch, heads, positions, channels), without the factor."""
    value = view.value if view.plain else draft.transpose(view.value, view.order, f"{label}_heads_first")
    if view.rank == 5:
        shape = draft.op("Shape", [value], f"{label}_shape")
        tail = draft.op("Slice", [shape, draft.ints([2], "two"), draft.ints([5], "five")], f"{label}_tail")
        merged = draft.op("Concat", [draft.ints([-1], "rest"), tail], f"{label}_merged_shape", axis=0)
        return draft.op("Reshape", [value, merged], f"{label}_merged")
    if view.rank == 4:
        return value
    return draft.unsqueeze(value, [1] if view.rank == 3 else [0, 1], f"{label}_with_heads")


def heads_last(draft: Draft, facts: Facts, view: View, label: str) -> ir.Value:
    """(batch, positions, heads * channels), without the factor."""
    if view.rank == 4:
        found = flat(facts, view)
        if found is not None:
            return found
        batch, heads, rows, channels = view.order
        order = (batch, rows, heads, channels)
        turned = view.value if order == (0, 1, 2, 3) else draft.transpose(view.value, order, f"{label}_heads_last")
        return draft.reshape(turned, [0, 0, -1], f"{label}_flat")
    if view.rank == 5:
        merged = draft.transpose(heads_first(draft, view, label), [0, 2, 1, 3], f"{label}_heads_last")
        return draft.reshape(merged, [0, 0, -1], f"{label}_flat")
    value = view.value if view.plain else draft.transpose(view.value, view.order, f"{label}_turned")
    return value if view.rank == 3 else draft.unsqueeze(value, [0], f"{label}_batch")
