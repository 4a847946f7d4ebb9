"""Scaled dot-product attention written out in operators: softmax(scale * Q K^T + mask) V (Vaswani et al. 2017), in any form.

Found from the softmax: back to the product of two activations that made the scores, forward to the product that sums them
over the normalised axis. The operand that owns the normalised axis is the key.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import is_onnx, tensor_name
from attnquant.patterns import masks, moves, operands
from attnquant.patterns.anchors import Anchor
from attnquant.patterns.facts import Facts, Level, inputs_at
from attnquant.patterns.inference import refresh
from attnquant.patterns.measure import Sizes, measure
from attnquant.patterns.operands import Chain
from attnquant.patterns.probabilities import ValuePath, find_values
from attnquant.patterns.scores import Failure, ScoresPath, Step, find_product
from attnquant.patterns.sources import kind
from attnquant.patterns.traits import traits
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite, Kind, NearMiss, Past, Port


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One attention as found: both products with their sides, and the three operand chains."""

    anchor: Anchor
    scores: ScoresPath
    values: ValuePath
    query_side: int
    query: Chain
    key: Chain
    value: Chain


def match(facts: Facts, anchor: Anchor) -> list[Match] | NearMiss:
    """Every attention around one softmax, or why there is none."""
    scores = find_product(facts, anchor)
    if isinstance(scores, Failure):
        return near_miss(facts, scores)
    values = find_values(facts, anchor)
    if isinstance(values, Failure):
        return near_miss(facts, values)
    query_side = 0 if scores.product.source(scores.axis)[0] is None else 1
    return [
        Match(
            anchor=anchor,
            scores=scores,
            values=found,
            query_side=query_side,
            query=operands.trace(facts, scores.product.value(query_side)),
            key=operands.trace(facts, scores.product.value(1 - query_side)),
            value=operands.trace(facts, found.product.value(1 - found.side)),
        )
        for found in values
    ]


def near_miss(facts: Facts, failure: Failure) -> NearMiss:
    return NearMiss(
        nodes=tuple(facts.name(node) for node in failure.nodes), reason=failure.reason, progress=failure.progress
    )


def site(facts: Facts, found: Match) -> AttentionSite:
    """The canonical record of a match."""
    node = found.values.product.node
    path = facts.paths.get(node, "")
    sizes = _sizes(facts, found)
    return AttentionSite(
        id=f"{path}/{facts.name(node)}",
        form=DECOMPOSED,
        node=facts.name(node),
        nodes=tuple(facts.name(one) for one in _nodes(facts, found)),
        ports=dict(_ports(facts, found)),
        branch=dict(_branches(facts, found)),
        kind=_kind(facts, found),
        past=_past(facts, found),
        q_heads=sizes.q_heads,
        kv_heads=sizes.kv_heads,
        kv_repeat=operands.repeat_factor(found.key),
        qk_head_dim=sizes.qk_head_dim,
        v_head_dim=sizes.v_head_dim,
        scale=_scale(found),
        causal=masks.causal(facts, found.scores),
        softcap=_softcap(found.scores),
        sinks=True if any(step.kind == "sinks" for step in found.scores.steps) else found.anchor.sinks,
        cross_covariance=sizes.cross_covariance,
        traits=traits(
            facts, found.query.port, found.key.port, across=sizes.cross_covariance, between=_between(facts, found)
        ),
        path=path,
    )


def _between(facts: Facts, found: Match) -> tuple[ir.Node, ...]:
    """Nodes between the two products, steps of the scores and of the probabilities."""
    return (*(step.node for step in found.scores.steps), *found.values.nodes)


def _sizes(facts: Facts, found: Match) -> Sizes:
    products = found.scores.product, found.query_side, found.values.product, 1 - found.values.side
    sizes = measure(facts, *products)
    if None in (sizes.q_heads, sizes.kv_heads, sizes.qk_head_dim, sizes.v_head_dim):
        for chain in (found.query, found.key, found.value):
            refresh(facts, chain.port)
        return measure(facts, *products)
    return sizes


def is_unsettled(made: AttentionSite) -> bool:
    """The graph does not say heads, head sizes or scale. Only the main graph can be measured."""
    told = (made.q_heads, made.kv_heads, made.qk_head_dim, made.v_head_dim, made.scale)
    return made.path == "" and None in told


def telling(facts: Facts, found: Match) -> Iterator[ir.Value]:
    """Tensors whose sizes or elements tell what the graph does not: the operand chains and unknown scale factors."""
    for chain in (found.query, found.key, found.value):
        yield from (value for value in chain.values if facts.level(value) > Level.SHAPE)
        yield from _factors((link.node, link.other) for link in chain.links if link.factor is None)
    yield from _factors((step.node, step.other) for step in found.scores.steps if step.factor is None)


def _factors(places: Iterable[tuple[ir.Node, int | None]]) -> Iterator[ir.Value]:
    for node, index in places:
        value = None if index is None else inputs_at(node, index)
        if value is not None and value.producer() is not None:
            yield value


def _port(facts: Facts, node: ir.Node, index: int) -> Port:
    return Port(node=facts.name(node), index=index, tensor=tensor_name(inputs_at(node, index)))


def _output_port(facts: Facts, node: ir.Node, index: int = 0) -> Port:
    return Port(node=facts.name(node), index=index, tensor=tensor_name(node.outputs[index]))


def _ports(facts: Facts, found: Match) -> Iterator[tuple[PortRole, Port]]:
    scores, values = found.scores.product.node, found.values.product.node
    yield PortRole.QUERY, _port(facts, scores, found.query_side)
    yield PortRole.KEY, _port(facts, scores, 1 - found.query_side)
    yield PortRole.VALUE, _port(facts, values, 1 - found.values.side)
    yield PortRole.SCORES, _output_port(facts, _scaled_scores(found.scores))
    yield PortRole.PROBABILITIES, _port(facts, values, found.values.side)
    yield PortRole.CONTEXT, _output_port(facts, values)
    yield from _mask_port(facts, found.scores)
    for chain, past, present in (
        (found.key, PortRole.PAST_KEY, PortRole.PRESENT_KEY),
        (found.value, PortRole.PAST_VALUE, PortRole.PRESENT_VALUE),
    ):
        if (edge := _past_edge(facts, found, chain)) is not None:
            yield past, _port(facts, *edge)
        if (made := operands.present(facts, chain)) is not None:
            yield present, _output_port(facts, made[0], made[1])


def _mask_port(facts: Facts, path: ScoresPath) -> Iterator[tuple[PortRole, Port]]:
    """The mask nearest to the softmax; the others are biases in front of it."""
    steps = masks.mask_steps(path)
    if steps:
        last = steps[-1]
        yield PortRole.MASK, _port(facts, last.node, last.other or 0)
    elif path.product.addend is not None:
        yield PortRole.MASK, _port(facts, path.product.node, path.product.addend)


def _scaled_scores(path: ScoresPath) -> ir.Node:
    """The last of the scales right after the product, else the product itself; the divisor of a softcap is no scale."""
    scales: list[ir.Node] = [path.product.node]
    for step in path.steps:
        if step.kind == "scale":
            scales.append(step.node)
        elif step.kind != "layout":
            capped = step.kind == "cap" and len(scales) > 1
            return scales[-2] if capped else scales[-1]
    return scales[-1]


def _branches(facts: Facts, found: Match) -> Iterator[tuple[PortRole, Port]]:
    for role, chain in ((PortRole.KEY, found.key), (PortRole.VALUE, found.value)):
        link = operands.before_repeat(facts, chain)
        if link is not None:
            yield role, _port(facts, link.node, link.index)


def _past_edge(facts: Facts, found: Match, chain: Chain) -> tuple[ir.Node, int] | None:
    link = chain.first("past")
    if link is not None and link.other is not None:
        return link.node, link.other
    if link is not None or _past(facts, found) != "input" or not operands.is_given(facts, chain):
        return None
    reader = next((link for link in reversed(chain.links) if not operands.is_pair_half(link.node)), None)
    if reader is not None:
        return reader.node, reader.index
    if chain is found.key:
        return found.scores.product.node, 1 - found.query_side
    return found.values.product.node, 1 - found.values.side


def _past(facts: Facts, found: Match) -> Past:
    for chain in (found.key, found.value):
        link = chain.first("past")
        if link is not None and link.other is not None:
            return "concat" if is_onnx(link.node, "Concat") else "scatter"
    given = operands.is_given(facts, found.key) and operands.is_given(facts, found.value)
    if given and not operands.is_given(facts, found.query) and "::" not in facts.paths.get(found.anchor.node, ""):
        return "input"
    return "none"


def _kind(facts: Facts, found: Match) -> Kind | None:
    if _past(facts, found) in ("concat", "scatter"):
        return "self"
    return kind(facts, found.query.port, found.key.port)


def _scale(found: Match) -> float | None:
    """Factors on Q, on K and between product and softmax, both of a softcap too: c * tanh(s x / c) is s x for small x."""
    total = found.scores.product.factor
    for factor in (found.query.factor, found.key.factor, *(step.factor for step in found.scores.steps)):
        if factor is None:
            return None
        total *= factor
    return total


def _softcap(path: ScoresPath) -> float | None:
    """The factor behind the tanh."""
    caps = [index for index, step in enumerate(path.steps) if step.kind == "cap"]
    if not caps:
        return None
    total = 1.0
    for step in path.steps[caps[-1] + 1 :]:
        if step.factor is None:
            return None
        total *= step.factor
    return total


def _nodes(facts: Facts, found: Match) -> list[ir.Node]:
    """All nodes from one product to the other in graph order, with the helpers of guards and softmax, without Q/DQ."""
    nodes: dict[ir.Node, None] = {found.scores.product.node: None, found.values.product.node: None}
    for step in found.scores.steps:
        nodes[step.node] = None
        nodes.update(dict.fromkeys(_helpers(facts, step.node, step)))
    for node in (*found.anchor.nodes, *found.values.nodes):
        nodes[node] = None
        nodes.update(dict.fromkeys(_helpers(facts, node, None)))
    plain = [node for node in nodes if not operands.is_pair_half(node)]
    return sorted(plain, key=lambda node: facts.order.get(node, -1))


def _helpers(facts: Facts, node: ir.Node, step: Step | None) -> Iterator[ir.Node]:
    """IsNaN of a guard, ReduceMax of a maximum, ReduceSum of a second normalisation."""
    for value in node.inputs:
        source = moves.without_round_trips(facts, value)
        maker = None if source is None else source.producer()
        if is_onnx(maker, "IsNaN", "IsInf") or (step is not None and step.kind == "maximum" and is_onnx(maker, "ReduceMax")):
            assert maker is not None
            yield maker
        elif step is None and is_onnx(node, "Div") and is_onnx(maker, "ReduceSum") and maker is not None:
            yield maker
