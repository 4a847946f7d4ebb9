"""From the output of a softmax forward to the product with V: guards, casts, masks, slices, reshapes, head mixing."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns import moves
from attnquant.patterns.anchors import Anchor
from attnquant.patterns.facts import Facts, Level, inputs_at, integer
from attnquant.patterns.products import Product, as_product
from attnquant.patterns.scores import Failure

BUDGET = 96
"""Nodes that one walk may visit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuePath:
    """The product with V: probabilities come in at input `side`; `nodes` lie between the softmax and it."""

    product: Product
    side: int
    nodes: tuple[ir.Node, ...]


def find_values(facts: Facts, anchor: Anchor) -> list[ValuePath] | Failure:
    """Every product that sums probabilities over the normalised axis, or how far the search came."""
    assert anchor.axis is not None
    queue: deque[tuple[ir.Value, tuple[int, ...], tuple[ir.Node, ...]]] = deque([(anchor.probabilities, (anchor.axis,), ())])
    seen: set[ir.Value] = {anchor.probabilities}
    found: list[ValuePath] = []
    failure = Failure(reason="no product with V behind the softmax", nodes=anchor.nodes, progress=4)
    visits = 0
    while queue and visits < BUDGET:
        value, tracked, path = queue.popleft()
        for node, index in facts.uses(value):
            visits += 1
            facts.steps += 1
            product = as_product(facts, node)
            if product is not None and index < 2:
                outcome = _at_product(facts, product, index, tracked, (*path, node))
                if isinstance(outcome, ValuePath):
                    found.append(ValuePath(product=product, side=index, nodes=path))
                    continue
                if isinstance(outcome, Failure):
                    failure = outcome if outcome.progress > failure.progress else failure
                    continue
                moves_on: Iterator[tuple[ir.Value, tuple[int, ...]]] = iter([(node.outputs[0], outcome)])
            else:
                moves_on = _next(facts, node, index, tracked)
            for result, moved in moves_on:
                if result not in seen:
                    seen.add(result)
                    queue.append((result, moved, (*path, node)))
    return found or failure


def _at_product(
    facts: Facts, product: Product, side: int, tracked: tuple[int, ...], nodes: tuple[ir.Node, ...]
) -> ValuePath | Failure | tuple[int, ...]:
    """A product with V, a failure, or the axes behind a linear layer over other axes (talking heads)."""
    other = product.value(1 - side)
    if tracked[0] in product.contracted[side]:
        if other is product.value(side):
            return Failure(reason="the probabilities are multiplied with themselves", nodes=nodes, progress=5)
        if facts.level(other) < Level.LEARNED:
            reason = "the other operand of the product behind the softmax is a constant: a linear layer, not P V"
            return Failure(reason=reason, nodes=nodes, progress=5)
        return ValuePath(product=product, side=side, nodes=nodes)
    if facts.level(other) >= Level.LEARNED or set(product.contracted[side]) & set(tracked):
        reason = "the product behind the softmax does not sum over the normalised axis"
        return Failure(reason=reason, nodes=nodes, progress=5)
    moved = tuple(next((axis for axis, pair in _sources(product, tracked) if pair[side] == old), None) for old in tracked)
    if None in moved:
        return Failure(reason="the normalised axis is lost in a linear layer", nodes=nodes, progress=4)
    return tuple(axis for axis in moved if axis is not None)


def _sources(product: Product, tracked: tuple[int, ...]) -> list[tuple[int, tuple[int | None, int | None]]]:
    listed = {axis: product.source(axis) for axis in (*product.sources, *tracked)}
    return list(listed.items())


def _next(facts: Facts, node: ir.Node, index: int, tracked: tuple[int, ...]) -> Iterator[tuple[ir.Value, tuple[int, ...]]]:
    """Where probabilities go on to from input `index` of a node, with the tracked axes there."""
    if (
        is_onnx(node, "Mul", "Add", "Max", "Min")
        or (is_onnx(node, "Div", "Sub") and index == 0)
        or (is_onnx(node, "Where") and index > 0)
        or (is_onnx(node, "Concat") and len(node.inputs) == 1)
    ):
        yield node.outputs[0], tracked
    elif is_onnx(node, "Conv") and index == 0:
        weight = facts.axes_of(inputs_at(node, 1))
        if weight is not None and not any(weight[2:]) and integer(node, "group", 1) == 1 and 1 - len(weight) not in tracked:
            yield node.outputs[0], tracked
    elif index == 0 and moves.is_transparent(node):
        for result in node.outputs:
            moved = tuple(moves.forward(facts, node, axis, result) for axis in tracked)
            if None not in moved:
                yield result, tuple(axis for axis in moved if axis is not None)
