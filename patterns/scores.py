"""From the input of a softmax back to the product Q K^T: scales, masks, softcap, sinks, clamps, reshapes, head mixing.

Every operand that could carry the scores is tried; the path with the fewest detours wins, then the deepest product; a
constant query loses against any other. The normalised axis is followed all the way, because it tells key from query.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns import moves
from attnquant.patterns.anchors import Anchor, from_end
from attnquant.patterns.facts import Elements, Facts, Level, inputs_at, integer
from attnquant.patterns.products import Product, as_product

StepKind = Literal["layout", "scale", "mask", "guard", "cap", "sinks", "mixing", "maximum", "clamp"]

BUDGET = 96
"""Nodes that one walk may visit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One node between the product and the softmax; the scores come in at input `index`."""

    node: ir.Node
    index: int
    kind: StepKind
    other: int | None = None
    """Input with the other operand: the factor, the mask, the condition."""
    factor: float | None = 1.0
    """What the scores are multiplied by, None where that can't be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresPath:
    """A product and the steps from it to the softmax, in that order; `axis` of the product's result is normalised."""

    product: Product
    steps: tuple[Step, ...]
    axis: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How far a walk came: `progress` as in NearMiss."""

    reason: str
    nodes: tuple[ir.Node, ...]
    progress: int


@dataclass(slots=True)
class _Walk:
    facts: Facts
    visits: int = 0
    failure: Failure | None = None

    def fail(self, reason: str, nodes: tuple[ir.Node, ...], progress: int) -> None:
        if self.failure is None or progress > self.failure.progress:
            self.failure = Failure(reason=reason, nodes=nodes, progress=progress)


def find_product(facts: Facts, anchor: Anchor) -> ScoresPath | Failure:
    """The product behind a softmax, or how far the search came."""
    if anchor.axis is None:
        return Failure(
            reason="which axis is normalised can't be told, or it is more than one", nodes=anchor.nodes, progress=1
        )
    walk = _Walk(facts=facts)
    found = list(_search(walk, anchor.scores, (anchor.axis,), ()))
    if not found:
        reason = "no product of two activations behind the softmax"
        return walk.failure or Failure(reason=reason, nodes=anchor.nodes, progress=1)
    return min(found, key=lambda path: _preference(facts, path))


def _preference(facts: Facts, path: ScoresPath) -> tuple[bool, int, int, int]:
    """Activations before a constant: beside Q K^T, a constant times the key is its bias (relative positions)."""
    constant = any(facts.level(path.product.value(side)) < Level.LEARNED for side in (0, 1))
    detours = sum(
        is_onnx(step.node, *moves.CUTS) or (is_onnx(step.node, "Concat") and step.kind == "layout") for step in path.steps
    )
    return constant, detours, -facts.depths.get(path.product.node.outputs[0], 0), len(path.steps)


def _search(walk: _Walk, value: ir.Value | None, tracked: tuple[int, ...], steps: tuple[Step, ...]) -> Iterator[ScoresPath]:
    """Every product reachable from `value`; tracked[0] is the normalised axis, the others are axes mixed along."""
    facts = walk.facts
    node = None if value is None else value.producer()
    if node is None or walk.visits >= BUDGET or facts.level(value) < Level.LEARNED:
        return
    walk.visits += 1
    facts.steps += 1
    product = as_product(facts, node)
    if product is not None:
        yield from _at_product(walk, product, tracked, steps)
        return
    for step, moved in _steps(facts, node, value, tracked):
        yield from _search(walk, inputs_at(node, step.index), moved, (step, *steps))


def _at_product(walk: _Walk, product: Product, tracked: tuple[int, ...], steps: tuple[Step, ...]) -> Iterator[ScoresPath]:
    facts, node = walk.facts, product.node
    levels = facts.level(product.value(0)), facts.level(product.value(1))
    nodes = (node, *(step.node for step in steps))
    if min(levels) < Level.LEARNED:
        yield from _at_constant(walk, product, levels.index(max(levels)), tracked, steps)
        return
    left, right = product.source(tracked[0])
    if (left is None) == (right is None):
        walk.fail("the normalised axis is not an axis of the key: it belongs to both operands of the product", nodes, 3)
        return
    if set(tracked[1:]) & {*product.free(0), *product.free(1)}:
        walk.fail("a linear layer over positions lies between the product and the softmax", nodes, 3)
        return
    yield ScoresPath(product=product, steps=steps, axis=tracked[0])


def _at_constant(
    walk: _Walk, product: Product, side: int, tracked: tuple[int, ...], steps: tuple[Step, ...]
) -> Iterator[ScoresPath]:
    """A product of a constant and operand `side`: heads mixed, where a product lies behind it; else a constant query."""
    facts, node = walk.facts, product.node
    moved = tuple(product.source(axis)[side] for axis in tracked)
    contracted = product.contracted[side]
    found = False
    constant = facts.level(product.value(1 - side)) < Level.LEARNED
    mixes = constant and None not in moved and not set(contracted) & set(moved)
    if mixes:
        step = Step(node=node, index=side, kind="mixing")
        plain = tuple(axis for axis in moved if axis is not None)
        for path in _search(walk, product.value(side), (*plain, *contracted), (step, *steps)):
            found = True
            yield path
    if not found and is_constant_query(facts, product, 1 - side, tracked):
        yield ScoresPath(product=product, steps=steps, axis=tracked[0])
        return
    if mixes:
        return
    reason = "an operand of the product behind the softmax is a constant, and no query: a linear layer, not Q K^T"
    walk.fail(reason, (node, *(one.node for one in steps)), 2)


def is_constant_query(facts: Facts, product: Product, side: int, tracked: tuple[int, ...]) -> bool:
    """Whether constant operand `side` is a query: learned, of the model's own, folded with its projection or not projected.

    The normalised axis belongs to the other operand, whose channels are summed, and no axis is mixed. A matrix on the right
    is how a linear layer is written, softmax pooling too: no query.
    """
    query, key = product.value(side), product.value(1 - side)
    rank, axes = facts.rank(query), facts.axes_of(key)
    if rank is None or rank < 2 or (rank == 2 and side == 1) or facts.level(key) < Level.LEARNED:
        return False
    sources = product.source(tracked[0])
    if sources[side] is not None or sources[1 - side] is None or set(tracked[1:]) & {*product.free(0), *product.free(1)}:
        return False
    places = [] if axes is None else [place for place in product.contracted[1 - side] if -place <= len(axes)]
    return all(factor.origin != "token" for place in places for factor in (axes or ())[place])


def _steps(
    facts: Facts, node: ir.Node, value: ir.Value | None, tracked: tuple[int, ...]
) -> Iterator[tuple[Step, tuple[int, ...]]]:
    """The ways the scores may come into a node, with the tracked axes there."""
    carrier = _CARRIERS.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if carrier is not None:
        yield from ((step, tracked) for step in carrier(facts, node, tracked))
    elif is_onnx(node, "Conv"):
        yield from _convolved(facts, node, tracked)
    elif moves.is_transparent(node):
        moved = tuple(moves.back(facts, node, axis, value) for axis in tracked)
        if None not in moved:
            written = is_onnx(node, "ScatterND", "ScatterElements")
            step = Step(node=node, index=0, kind="mask" if written else "layout", other=2 if written else None)
            yield step, tuple(axis for axis in moved if axis is not None)


def _added(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    for index in range(len(node.inputs)):
        other = 1 - index if len(node.inputs) == 2 else None
        yield Step(node=node, index=index, kind=_added_kind(facts, node, other, tracked), other=other)


def _selected(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    for index in (1, 2):
        yield Step(node=node, index=index, kind="guard" if _is_guard(facts, node) else "mask", other=0)


def _capped(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    yield Step(node=node, index=0, kind="cap")


def _negated(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    yield Step(node=node, index=0, kind="scale", factor=-1.0)


def _clamped(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    for index in range(len(node.inputs)):
        yield Step(node=node, index=index, kind="clamp")


def _multiplied(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    for index in (0,) if is_onnx(node, "Div") else (0, 1):
        other = inputs_at(node, 1 - index)
        if other is None:
            continue
        elements = facts.elements_of(other)
        if elements is not None or spread_over(facts, other, (tracked[0],)) is False:
            yield Step(node=node, index=index, kind="scale", other=1 - index, factor=factor_of(node, elements))
        else:
            yield Step(node=node, index=index, kind="mask", other=1 - index)


def spread_over(facts: Facts, value: ir.Value, axes: tuple[int, ...]) -> bool | None:
    """Whether a tensor has more than one element along any of these axes; None where its rank is not known."""
    own = facts.axes_of(value)
    if own is None:
        return None
    return any(-len(own) <= axis and own[axis] for axis in axes)


def factor_of(node: ir.Node, elements: Elements | None) -> float | None:
    """What a Mul or Div by these elements multiplies with; None where they differ or are not known."""
    if elements is None or not elements.items:
        return None
    first = elements.items[0]
    if not isinstance(first, int | float) or any(item != first for item in elements.items):
        return None
    if is_onnx(node, "Div"):
        return 1.0 / first if first else None
    return float(first)


def _added_kind(facts: Facts, node: ir.Node, other: int | None, tracked: tuple[int, ...]) -> StepKind:
    """What is the same for all positions of the key is no mask: the bias of a head mixing, an epsilon."""
    value = None if other is None else inputs_at(node, other)
    if value is None or facts.level(value) >= Level.LEARNED:
        return "mask"
    return "clamp" if spread_over(facts, value, tracked[:1]) is False else "mask"


def _subtracted(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    """The maximum of a softmax written out, or a mask; on the left of the scores these turn their sign (DANet)."""
    for index in (0, 1):
        below = moves.without_round_trips(facts, inputs_at(node, 1 - index))
        maker = None if below is None else below.producer()
        if maker is not None and is_onnx(maker, "Expand"):
            below = moves.without_round_trips(facts, inputs_at(maker, 0))
            maker = None if below is None else below.producer()
        kind: StepKind = "maximum" if is_onnx(maker, "ReduceMax") else "mask"
        yield Step(node=node, index=index, kind=kind, other=1 - index, factor=-1.0 if index else 1.0)


def _is_guard(facts: Facts, node: ir.Node) -> bool:
    condition = moves.without_round_trips(facts, inputs_at(node, 0))
    return condition is not None and is_onnx(condition.producer(), "IsNaN", "IsInf")


def _joined(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[Step]:
    """Scores with something appended: along the normalised axis an attention sink."""
    axis = from_end(facts, node.outputs[0], integer(node, "axis", 0))
    appended = len(node.inputs) > 1 and axis == tracked[0]
    for index, value in enumerate(node.inputs):
        if facts.level(value) >= Level.LEARNED:
            yield Step(node=node, index=index, kind="sinks" if appended else "layout")


def _convolved(facts: Facts, node: ir.Node, tracked: tuple[int, ...]) -> Iterator[tuple[Step, tuple[int, ...]]]:
    """A 1x1 convolution over the heads (talking heads)."""
    weight = facts.axes_of(inputs_at(node, 1))
    if weight is None or any(weight[2:]) or integer(node, "group", 1) != 1:
        return
    channels = 1 - len(weight)
    if channels not in tracked:
        yield Step(node=node, index=0, kind="mixing"), (*tracked, channels)


_CARRIERS: dict[str, Callable[[Facts, ir.Node, tuple[int, ...]], Iterator[Step]]] = {
    "Mul": _multiplied,
    "Div": _multiplied,
    "Add": _added,
    "Sum": _added,
    "Sub": _subtracted,
    "Where": _selected,
    "Tanh": _capped,
    "Neg": _negated,
    "Max": _clamped,
    "Min": _clamped,
    "Concat": _joined,
}
"""Operators that are no mere layout, by what they do to scores."""
