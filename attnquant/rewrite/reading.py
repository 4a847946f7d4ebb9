"""A decomposed attention in the terms of the operators: operands, scale, softcap, masks, and what an empty row gives."""

from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from attnquant.graph import constant, is_onnx, operator
from attnquant.patterns.anchors import Anchor
from attnquant.patterns.facts import Facts, inputs_at
from attnquant.patterns.products import Product
from attnquant.patterns.scores import Step
from attnquant.patterns.sdpa import Match
from attnquant.rewrite.result import Refused
from attnquant.rewrite.views import View, lifted, operand
from attnquant.site import AttentionSite

_BY_HAND = ("Exp", "ReduceSum", "Div", "Reciprocal", "Sub", "ReduceMax", "Max", "ReduceLogSumExp", "LogSoftmax", "Expand")
_BEHIND = ("Dropout", "Identity", "Cast", "Where", "Reshape", "Slice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One attention, read."""

    match: Match
    site: AttentionSite
    query: View
    key: View
    value: View
    scale: float
    """Of the product in front of softcap and masks, the factors of the views included."""
    softcap: float
    tail: tuple[Step, ...]
    """Masks, casts and reshapes behind scale and softcap."""
    turned: bool
    """The scores are (..., keys, queries)."""
    context_turned: bool
    """The context is (..., channels, positions)."""
    split: bool
    """The products have batch and heads in one axis, and the views have them apart."""
    zero_rows: bool
    """A row that sees no key gives zeros: NaN of the softmax are replaced."""
    sinks: ir.Value | None = None
    plus_one: bool = False

    @property
    def context(self) -> ir.Value:
        """The result of the product with V."""
        return self.match.values.product.node.outputs[0]


def read(facts: Facts, match: Match, site: AttentionSite) -> Reading:
    """Read one attention. Raises Refused with the fact that no attention operator has room for."""
    if site.path:
        raise Refused("inside control flow")
    if site.cross_covariance:
        raise Refused("channels attend to channels (cross-covariance): no operator computes that")
    scores, values = match.scores.product, match.values.product
    if scores.addend is not None or values.addend is not None:
        raise Refused("a term is added inside the product (Gemm)")
    _check_normalisation(match.anchor, site)
    query = operand(facts, scores, match.query_side, channels_summed=True)
    key = operand(facts, scores, 1 - match.query_side, channels_summed=True)
    value = operand(facts, values, 1 - match.values.side, channels_summed=False)
    factor, softcap, tail = _steps(facts, match)
    query, key, value, split = _together(facts, query, key, value)
    scale = factor * query.factor * key.factor
    if scale <= 0:
        raise Refused(f"a scale of {scale:g}: operators take positive ones (runtime)")
    if value.factor != 1.0:
        raise Refused("a factor on V")
    sinks, tail = _sink(match, tail, facts)
    return Reading(
        match=match, site=site, query=query, key=key, value=value, scale=scale, softcap=softcap, tail=tail,
        turned=_turned(scores, match.query_side), context_turned=_turned(values, match.values.side), split=split,
        zero_rows=_guarded(match), sinks=sinks, plus_one=bool(site.sinks) and sinks is None,
    )


def _check_normalisation(anchor: Anchor, site: AttentionSite) -> None:
    if anchor.axis not in (-1, -2):
        raise Refused("the normalised axis is not one of the last two")
    if is_onnx(anchor.node, "Softmax"):
        return
    if anchor.probabilities is not anchor.node.outputs[0]:
        raise Refused("normalised behind the product with V")
    for node in anchor.nodes:
        allowed = _BY_HAND if not site.sinks else (*_BY_HAND, "Add")
        makers = [value.producer() for value in node.inputs if value is not None]
        reciprocal = is_onnx(node, "Mul") and any(is_onnx(maker, "Reciprocal") for maker in makers)
        if not is_onnx(node, *allowed) and not reciprocal:
            raise Refused(f"{node.op_type} {node.name!r} inside a softmax that is written out")


def _turned(product: Product, side: int) -> bool:
    """The rows (of Q, of P) are the last axis of the result."""
    place = product.free(side)
    if len(place) != 1 or place[0] not in (-1, -2):
        raise Refused("a product with its axes in another order than (batch, heads, rows, columns)")
    return place[0] == -1


def _steps(facts: Facts, match: Match) -> tuple[float, float, tuple[Step, ...]]:
    """(factor, softcap, the steps behind them)."""
    total, cap, index = match.scores.product.factor, 0.0, 0
    steps = match.scores.steps
    while index < len(steps) and (steps[index].kind in ("scale", "cap") or is_onnx(steps[index].node, "Identity")):
        step = steps[index]
        if step.kind == "cap":
            if cap:
                raise Refused("two softcaps")
            cap, index = 1.0, index + 1
            while index < len(steps) and steps[index].kind == "scale":
                cap *= _factor(steps[index])
                index += 1
            total *= cap
            continue
        total *= _factor(step)
        index += 1
    tail = steps[index:]
    for step in tail:
        if step.kind == "mixing":
            raise Refused("scores of different heads are mixed (talking heads)")
        if step.kind == "cap":
            raise Refused("a softcap behind the mask: operators cap in front of it (specification, onnx 1.22)")
        if step.kind == "guard":
            raise Refused(f"{step.node.op_type} {step.node.name!r} replaces scores by a test of their values")
    return total, cap, tuple(step for step in tail if step.kind != "maximum")


def _factor(step: Step) -> float:
    if step.factor is None or step.factor <= 0:
        raise Refused(f"the scores are multiplied in {step.node.name!r} by what is no positive constant")
    return step.factor


def _together(facts: Facts, *views: View) -> tuple[View, View, View, bool]:
    """Views of one rank, with batch and heads apart where all three have them merged from two axes."""
    query, key, value = views
    apart = [lifted(facts, view) if view.rank == 3 else view for view in views]
    if all(view is not None and view.rank == 4 for view in apart) and any(view.rank == 3 for view in views):
        first, second, third = (view for view in apart if view is not None)
        return first, second, third, True
    ranks = {view.rank for view in views}
    if len(ranks) != 1:
        raise Refused(f"operands of different ranks, {sorted(ranks)}")
    if not 2 <= query.rank <= 5:
        raise Refused(f"products of {query.rank} axes")
    return query, key, value, False


def _sink(match: Match, tail: tuple[Step, ...], facts: Facts) -> tuple[ir.Value | None, tuple[Step, ...]]:
    steps = [step for step in tail if step.kind == "sinks"]
    if not steps:
        return None, tail
    node = steps[0].node
    other = inputs_at(node, 1 - steps[0].index)
    if len(steps) > 1 or len(node.inputs) != 2 or other is None or facts.rank(other) is None:
        raise Refused("attention sinks in a form that is not known")
    return other, tuple(step for step in tail if step.kind != "sinks")


def _guarded(match: Match) -> bool:
    """NaN probabilities are replaced by zeros. Raises Refused for what else happens to the probabilities."""
    guarded = False
    for node in match.values.nodes:
        if not is_onnx(node, *_BEHIND):
            raise Refused(f"the probabilities go through {node.op_type} {node.name!r}")
        if is_onnx(node, "Where"):
            if not _replaces_nan(node):
                raise Refused(f"the probabilities are masked in {node.name!r}")
            guarded = True
        if is_onnx(node, "Slice") and not match.anchor.sinks and not any(s.kind == "sinks" for s in match.scores.steps):
            raise Refused(f"the probabilities are cut in {node.name!r}")
        if is_onnx(node, "Dropout") and len(node.inputs) > 2 and node.inputs[2] is not None:
            training: Any = constant(node.inputs[2])
            if training is None or training.any():
                raise Refused(f"Dropout {node.name!r} may be training")
    return guarded


def _replaces_nan(node: ir.Node) -> bool:
    condition, filled = node.inputs[0], constant(node.inputs[1])
    test = None if condition is None else condition.producer()
    return test is not None and operator(test) == ("ai.onnx", "IsNaN") and filled is not None and not filled.any()


def with_views(reading: Reading, query: View, key: View, value: View) -> Reading:
    """The reading with other operands, the scale as it is."""
    return replace(reading, query=query, key=key, value=value)
