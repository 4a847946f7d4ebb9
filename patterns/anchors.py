"""Where the search starts: every normalisation of scores, a Softmax or one written out by hand.

Written out (each with or without subtraction of the maximum, which the walk backwards skips):
`Exp(x) / ReduceSum(Exp(x))`, the same with Mul and Reciprocal, with a mask, an epsilon or a sink in between, and
`Exp(x - ReduceLogSumExp(x))`; `Exp(LogSoftmax(x))` too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import Body, is_onnx
from attnquant.patterns import moves
from attnquant.patterns.facts import Facts, axes_argument, inputs_at, integer
from attnquant.patterns.products import as_product

_THROUGH = ("Clip", "Expand", "Max", "Unsqueeze")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One normalisation: probabilities = normalise(scores) over `axis` (counted from the end)."""

    node: ir.Node
    scores: ir.Value
    probabilities: ir.Value
    axis: int | None
    """None: more than one axis is normalised together, or it can't be told which."""
    nodes: tuple[ir.Node, ...]
    sinks: bool | None = False


def anchors(facts: Facts, body: Body) -> Iterator[Anchor]:
    """Every normalisation of one graph, in graph order."""
    for node in body:
        form = _FORMS.get(node.op_type)
        if form is not None and is_onnx(node, node.op_type) and (found := form(facts, node)) is not None:
            yield found


def from_end(facts: Facts, value: ir.Value | None, axis: int) -> int | None:
    """An axis counted from the end; None for a positive one of a tensor of unknown rank, unless it can only be the last."""
    if axis < 0:
        return axis
    rank = facts.rank(value)
    return axis - rank if rank is not None and axis < rank else None


def _softmax(facts: Facts, node: ir.Node) -> Anchor | None:
    value = inputs_at(node, 0)
    if value is None or not node.outputs:
        return None
    return Anchor(
        node=node,
        scores=value,
        probabilities=node.outputs[0],
        axis=_softmax_axis(facts, node),
        nodes=(node,),
    )


def _softmax_axis(facts: Facts, node: ir.Node) -> int | None:
    """Before opset 13 a Softmax normalised all axes from `axis` on together (operator specification, Softmax-11)."""
    old = 0 < facts.opset < 13
    axis = integer(node, "axis", 1 if old else -1)
    place = from_end(facts, inputs_at(node, 0), axis)
    if place is None and axis >= 2:
        return -1
    if old and place is not None and place < -1:
        sizes = [facts.axis_size(inputs_at(node, 0), index) for index in range(place + 1, 0)]
        return place if all(size == 1 for size in sizes) else None
    return place


def _stripped(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """Back through operators that keep every element, or only guard against zero."""
    while (value := moves.without_round_trips(facts, value)) is not None:
        node = value.producer()
        if node is None or not is_onnx(node, *_THROUGH):
            break
        value = inputs_at(node, 0)
    return value


def _quotient(facts: Facts, node: ir.Node) -> Anchor | None:
    """numerator / ReduceSum(numerator), the numerator an Exp."""
    if len(node.inputs) < 2:
        return None
    for top in (0,) if is_onnx(node, "Div") else (0, 1):
        below = _stripped(facts, inputs_at(node, 1 - top))
        if is_onnx(node, "Mul"):
            inverse = None if below is None else below.producer()
            if not is_onnx(inverse, "Reciprocal") or inverse is None:
                continue
            below = _stripped(facts, inputs_at(inverse, 0))
        total, sinks, between = _sum_of(facts, below)
        if total is None:
            continue
        exponential = _exponential(facts, inputs_at(node, top), total)
        if exponential is None:
            return _deferred(facts, node, top, total)
        axes = axes_argument(facts, total)
        place = from_end(facts, inputs_at(total, 0), axes[0]) if axes is not None and len(axes) == 1 else None
        chain, leaf = exponential
        value = inputs_at(leaf, 0)
        if value is None:
            continue
        return Anchor(
            node=node,
            scores=value,
            probabilities=node.outputs[0],
            axis=place,
            nodes=(*chain, *between, total, node),
            sinks=sinks,
        )
    return None


def _deferred(facts: Facts, node: ir.Node, top: int, total: ir.Node) -> Anchor | None:
    """exp(s) V / sum exp(s): the numerator is a product already; what it weights with are the powers."""
    above = _stripped(facts, inputs_at(node, top))
    product = as_product(facts, None if above is None else above.producer())
    if product is None:
        return None
    for side in (0, 1):
        exponential = _exponential(facts, product.value(side), total)
        scores = None if exponential is None else inputs_at(exponential[1], 0)
        if exponential is None or scores is None:
            continue
        axes = axes_argument(facts, total)
        return Anchor(
            node=node,
            scores=scores,
            probabilities=exponential[0][-1].outputs[0],
            axis=from_end(facts, inputs_at(total, 0), axes[0]) if axes is not None and len(axes) == 1 else None,
            nodes=(*exponential[0], total, node),
        )
    return None


def _sum_of(facts: Facts, value: ir.Value | None) -> tuple[ir.Node | None, bool | None, tuple[ir.Node, ...]]:
    """(the ReduceSum behind a denominator, whether something else was added to it, the nodes in between)."""
    node = None if value is None else value.producer()
    if is_onnx(node, "ReduceSum", "ReduceL1"):
        return node, False, ()
    if node is None or not is_onnx(node, "Add"):
        return None, False, ()
    for side in (0, 1):
        inner = _stripped(facts, inputs_at(node, side))
        total = None if inner is None else inner.producer()
        if is_onnx(total, "ReduceSum", "ReduceL1"):
            other = facts.elements_of(inputs_at(node, 1 - side))
            epsilon = other is not None and all(isinstance(item, int | float) and abs(item) < 1e-3 for item in other.items)
            return total, not epsilon, (node,)
    return None, False, ()


def _exponential(facts: Facts, value: ir.Value | None, total: ir.Node) -> tuple[tuple[ir.Node, ...], ir.Node] | None:
    """The nodes from the Exp to the numerator, and the Exp, where the sum in the denominator is over the same numerator."""
    summed = _stripped(facts, inputs_at(total, 0))
    top = _stripped(facts, value)
    first, second = _to_exp(facts, top), _to_exp(facts, summed)
    if first is None or second is None:
        return None
    same = top is summed or (first[1] is second[1]) or inputs_at(first[1], 0) is inputs_at(second[1], 0)
    return first if same else None


def _to_exp(facts: Facts, value: ir.Value | None) -> tuple[tuple[ir.Node, ...], ir.Node] | None:
    """Back from a numerator to its Exp, through masks (Mul, Where) and casts."""
    chain: list[ir.Node] = []
    for _ in range(6):
        value = _stripped(facts, value)
        node = None if value is None else value.producer()
        if node is None:
            return None
        facts.steps += 1
        if is_onnx(node, "Exp"):
            return (node, *reversed(chain)), node
        if not is_onnx(node, "Mul", "Where"):
            return None
        inputs = [_stripped(facts, one) for one in (node.inputs[1:] if is_onnx(node, "Where") else node.inputs)]
        value = next((one for one in inputs if one is not None and is_onnx(one.producer(), "Exp")), None)
        chain.append(node)
    return None


def _log_form(facts: Facts, node: ir.Node) -> Anchor | None:
    """Exp(LogSoftmax(x)) and Exp(x - ReduceLogSumExp(x))."""
    inner = _stripped(facts, inputs_at(node, 0))
    maker = None if inner is None else inner.producer()
    if maker is None:
        return None
    place: int | None
    if is_onnx(maker, "LogSoftmax"):
        place = _softmax_axis(facts, maker)
        nodes: tuple[ir.Node, ...] = (maker, node)
    elif is_onnx(maker, "Sub"):
        below = _stripped(facts, inputs_at(maker, 1))
        total = None if below is None else below.producer()
        if (
            total is None
            or not is_onnx(total, "ReduceLogSumExp")
            or _stripped(facts, inputs_at(total, 0)) is not _stripped(facts, inputs_at(maker, 0))
        ):
            return None
        axes = axes_argument(facts, total)
        place = from_end(facts, inputs_at(total, 0), axes[0]) if axes is not None and len(axes) == 1 else None
        nodes = (total, maker, node)
    else:
        return None
    scores = inputs_at(maker, 0)
    if scores is None:
        return None
    return Anchor(node=node, scores=scores, probabilities=node.outputs[0], axis=place, nodes=nodes)


_FORMS: dict[str, Callable[[Facts, ir.Node], Anchor | None]] = {
    "Softmax": _softmax,
    "Div": _quotient,
    "Mul": _quotient,
    "Exp": _log_form,
}
