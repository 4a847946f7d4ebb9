"""The placement contract of one attention: what the graph quantizes on each operand, against what was asked."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attnquant.audit.flow import CACHED, GUARDS, MASKING, MOVES, SCALES, Flow, Hit, Trace, is_dequantize, is_quantize
from attnquant.audit.linears import constant_type
from attnquant.audit.quantizers import Parameters, neutral, parameters
from attnquant.graph import bodies, is_onnx, tensor_name
from attnquant.metatypes import for_form
from attnquant.placement import QUANTIZED_ALREADY, QuantizationPoint, QuantizerSetup, Skipped, edge
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite, Port

_PRESENT = {PortRole.KEY: PortRole.PRESENT_KEY, PortRole.VALUE: PortRole.PRESENT_VALUE}
_CARRIES = MOVES | SCALES
_PASSES_QDQ = MOVES | {"QuantizeLinear", "DequantizeLinear"}
_REFUSED = ("inside control flow", "inside a function")
"""Reasons of ours that do not forbid another tool to quantize Q and K there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """One attention, audited."""

    site: AttentionSite
    reasons: tuple[str, ...]
    """Violations, each one sentence."""
    found: Mapping[PortRole, Trace]
    nodes: frozenset[ir.Node]
    """Every quantizer and dequantizer on one of its operands."""

    def quantizer(self, role: PortRole) -> Parameters | None:
        """The quantizer of a role that is quantized on every path; where paths differ, one of them."""
        trace = self.found.get(role)
        if trace is None or not trace.complete:
            return None
        nodes = [hit.quantize or hit.dequantize for hit in trace.hits]
        return parameters(nodes[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What was asked of every role of every attention."""

    points: Mapping[tuple[str, PortRole], QuantizationPoint] = field(default_factory=dict)
    skipped: Mapping[tuple[str, PortRole], Skipped] = field(default_factory=dict)
    exact: bool = False
    """From the model's own setup: types and symmetry count too, not the placement alone."""


def expectations(setup: QuantizerSetup, *, exact: bool) -> Expectations:
    """The setup by site and role."""
    return Expectations(
        points={(point.site, point.role): point for point in setup.points},
        skipped={(row.site, row.role): row for row in setup.skipped},
        exact=exact,
    )


def nodes_by_name(model: ir.Model) -> dict[tuple[str, str], ir.Node]:
    """{(graph path, node name): node}; needs named nodes."""
    return {(path, node.name or ""): node for path, body in bodies(model) for node in body}


def audit_site(flow: Flow, names: Mapping[tuple[str, str], ir.Node], site: AttentionSite, asked: Expectations) -> Contract:
    """Compare one attention with what was asked of it."""
    found = dict(_findings(flow, names, site))
    reasons: list[str] = []
    for role, trace in found.items():
        point, skip = asked.points.get((site.id, role)), asked.skipped.get((site.id, role))
        if point is not None:
            reasons.extend(_missing(role, trace))
            if asked.exact and trace.constant and role in (PortRole.QUERY, PortRole.KEY):
                reasons.extend(_float_constant(role, _operand(names, site.path, site.ports[role])))
            if trace.hits and asked.exact:
                reasons.extend(_unlike(role, point, trace))
        elif trace.hits and not _tolerated(role, skip, asked):
            why = "" if skip is None else f" ({skip.reason})"
            reasons.append(f"{role}: expected float{why}, got {_types(trace)} at {_places(trace)}")
    hits = [hit for trace in found.values() for hit in trace.hits]
    nodes = {node for hit in hits for node in (hit.dequantize, hit.quantize) if node is not None}
    return Contract(site=site, reasons=tuple(reasons), found=found, nodes=frozenset(nodes))


def _findings(
    flow: Flow, names: Mapping[tuple[str, str], ir.Node], site: AttentionSite
) -> Iterator[tuple[PortRole, Trace]]:
    for role in (PortRole.QUERY, PortRole.KEY):
        port = site.ports.get(role)
        if port is not None and (role is PortRole.KEY or site.packed != "qkv"):
            yield role, flow.trace(_operand(names, site.path, port))
    if site.packed == "none" and PortRole.VALUE in site.ports:
        yield PortRole.VALUE, _hits(flow.near(_operand(names, site.path, site.ports[PortRole.VALUE]), _CARRIES))
    product = _value_product(site)
    probabilities = () if product is None else flow.near(_operand(names, site.path, product), GUARDS)
    if product is not None:
        yield PortRole.PROBABILITIES, _hits(probabilities)
    yield from _inner(flow, names, site, {hit.dequantize for hit in probabilities})
    for role, present in _PRESENT.items():
        yield present, _hits(_present(flow, names, site, role))


def _value_product(site: AttentionSite) -> Port | None:
    """The probabilities' edge into the product with V."""
    return edge(site, PortRole.PROBABILITIES) if site.form == DECOMPOSED else None


def _inner(
    flow: Flow, names: Mapping[tuple[str, str], ir.Node], site: AttentionSite, behind: set[ir.Node]
) -> Iterator[tuple[PortRole, Trace]]:
    """Masks, caches inside the operator, and scores."""
    masks: list[Hit] = []
    for port in _all_ports(names, site, PortRole.MASK):
        masks.extend(flow.near(_operand(names, site.path, port), MASKING))
    scores: list[Hit] = []
    if site.form == DECOMPOSED:
        own = {names[site.path, name] for name in site.nodes if (site.path, name) in names}
        for hit in _between(flow, site, own):
            if hit.dequantize not in behind:
                made = None if hit.quantize is None or hit.quantize.inputs[0] is None else hit.quantize.inputs[0].producer()
                (scores if made in own else masks).append(hit)
    elif site.past == "inner":
        for role in (PortRole.PAST_KEY, PortRole.PAST_VALUE):
            for port in _all_ports(names, site, role):
                yield role, _hits(flow.near(_operand(names, site.path, port), MOVES))
    yield PortRole.SCORES, _hits(scores)
    yield PortRole.MASK, _hits(masks)


def _between(flow: Flow, site: AttentionSite, own: set[ir.Node]) -> Iterator[Hit]:
    """Quantized operands of the nodes between the two products."""
    products = {site.ports[role].node for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE) if role in site.ports}
    for node in own:
        if node.name in products or is_dequantize(node):
            continue
        for value in node.inputs:
            maker = None if value is None else value.producer()
            if is_dequantize(maker) and maker is not None and (hit := flow.origin(maker)) is not None:
                yield hit


def _all_ports(names: Mapping[tuple[str, str], ir.Node], site: AttentionSite, role: PortRole) -> Iterator[Port]:
    """Every input with a role: an operator may have two masks."""
    row, node = for_form(site.form), names.get((site.path, site.node))
    if row is None or node is None:
        if role in site.ports:
            yield site.ports[role]
        return
    for port in row.inputs:
        if role in port.roles and port.index < len(node.inputs) and node.inputs[port.index] is not None:
            yield Port(node=site.node, index=port.index, tensor=tensor_name(node.inputs[port.index]))


def _present(flow: Flow, names: Mapping[tuple[str, str], ir.Node], site: AttentionSite, role: PortRole) -> Iterator[Hit]:
    """Q/DQ between the projection of K or V and a graph output that caches it."""
    port = site.ports.get(_PRESENT[role])
    maker = None if port is None else names.get((site.path, port.node))
    starts: list[ir.Value] = []
    if port is not None and maker is not None and port.index < len(maker.outputs):
        made = maker.outputs[port.index]
        if site.past == "inner":
            starts.append(made)
        else:
            yield from flow.near(made, CACHED)
    operand = site.ports.get(role)
    if operand is not None and site.packed == "none":
        starts.extend(_trunk(flow, _operand(names, site.path, operand)))
    for start in starts:
        yield from _to_outputs(flow, start)


def _trunk(flow: Flow, value: ir.Value | None) -> list[ir.Value]:
    """The float tensors from an operand back to its projection, Q/DQ passed, as long as one path leads there."""
    found: list[ir.Value] = []
    while value is not None and flow.is_data(value) and len(found) < 64:
        node = value.producer()
        if node is None:
            break
        if not is_dequantize(node) and not is_quantize(node):
            found.append(value)
        if not (is_onnx(node, *CACHED) or is_dequantize(node) or is_quantize(node)):
            break
        data = [other for other in node.inputs if flow.is_data(other)]
        value = data[-1] if is_onnx(node, "Concat") and data else next(iter(data), None)
    return found


def _to_outputs(flow: Flow, start: ir.Value) -> Iterator[Hit]:
    """Q/DQ pairs between a tensor and a graph output, over moves alone."""
    stack: list[tuple[ir.Value, tuple[Hit, ...]]] = [(start, ())]
    seen = {start}
    while stack and len(seen) < 64:
        at, hits = stack.pop()
        if at.is_graph_output():
            yield from hits
        for use in at.uses():
            if not flow.goes_on(use.node, use.idx, _PASSES_QDQ):
                continue
            for output in use.node.outputs:
                if output in seen:
                    continue
                seen.add(output)
                hit = flow.origin(use.node) if is_dequantize(use.node) else None
                stack.append((output, hits if hit is None else (*hits, hit)))


def _operand(names: Mapping[tuple[str, str], ir.Node], path: str, port: Port) -> ir.Value | None:
    node = names.get((path, port.node))
    return node.inputs[port.index] if node is not None and port.index < len(node.inputs) else None


def _hits(hits: Iterable[Hit]) -> Trace:
    return Trace(hits=tuple(dict.fromkeys(hits)))


def _missing(role: PortRole, trace: Trace) -> Iterator[str]:
    """A quantizer was asked for; None of the paths, or not all, have one."""
    if trace.complete or (trace.constant and role in (PortRole.QUERY, PortRole.KEY)):
        return
    if not trace.hits:
        where = f" at tensor {tensor_name(trace.leaves[0][0])!r}" if trace.leaves else ""
        yield f"{role}: expected a quantizer, got float{where}"
        return
    value, reader = trace.leaves[0]
    at = "" if reader is None else f", which {reader.op_type} {reader.name!r} reads"
    yield f"{role}: expected a quantizer on every path, got float at tensor {tensor_name(value)!r}{at}"


def _float_constant(role: PortRole, operand: ir.Value | None) -> Iterator[str]:
    """A constant Q or K has no quantizer on its way: its integers are stored."""
    if constant_type(operand) is None:
        yield f"{role}: expected the constant as integers, got float at tensor {tensor_name(operand)!r}"


def _tolerated(role: PortRole, skip: Skipped | None, asked: Expectations) -> bool:
    """Q and K that the model came quantized with, or that another tool quantized where we would not: neither wrong."""
    if skip is not None and skip.reason == QUANTIZED_ALREADY:
        return True
    return not asked.exact and role in (PortRole.QUERY, PortRole.KEY) and skip is not None and skip.reason in _REFUSED


def _unlike(role: PortRole, point: QuantizationPoint, trace: Trace) -> Iterator[str]:
    """Differences between the quantizers found and the one asked for; signed and shifted unsigned are the same."""
    for hit in trace.hits:
        node = hit.quantize or hit.dequantize
        got = parameters(node)
        if got.bits != 8:
            yield f"{role}: expected {point.dtype}, got {got.dtype or 'an unknown type'} at node {node.name!r}"
        elif point.range is not None:
            yield from _other_range(role, point.range, got, node)
        elif point.symmetric and point.dtype == "int8" and got.symmetric is False:
            zero = "?" if got.zero_point is None else int(got.zero_point.ravel()[0])
            yield (
                f"{role}: expected zero point {neutral(got.dtype)} ({got.dtype}, symmetric), got {zero} at node "
                f"{node.name!r}, tensor {tensor_name(node.inputs[0])!r}"
            )
        if got.scale is not None and got.scale.size != (point.heads or 1):
            yield f"{role}: expected {point.heads or 1} scales, got {got.scale.size} at node {node.name!r}"


def _other_range(role: PortRole, asked: tuple[float, float], got: Parameters, node: ir.Node) -> Iterator[str]:
    if got.scale is None or got.zero_point is None or got.scale.size != 1:
        return
    lowest = neutral(got.dtype) - 128 if got.dtype.startswith("u") else -128
    scale, zero = float(got.scale.ravel()[0]), int(np.ravel(got.zero_point)[0])
    low, high = (lowest - zero) * scale, (lowest + 255 - zero) * scale
    slack = 0.01 * (asked[1] - asked[0])
    if abs(low - asked[0]) > slack or abs(high - asked[1]) > slack:
        yield f"{role}: expected the range [{asked[0]:g}, {asked[1]:g}], got [{low:g}, {high:g}] at node {node.name!r}"


def _types(trace: Trace) -> str:
    return " and ".join(sorted({parameters(hit.quantize or hit.dequantize).dtype or "integers" for hit in trace.hits}))


def _places(trace: Trace) -> str:
    shown = [f"node {(hit.quantize or hit.dequantize).name!r}" for hit in trace.hits[:3]]
    return ", ".join(shown) + (", ..." if len(trace.hits) > 3 else "")
