"""From one attention operator to its AttentionSite, by its row in the catalogue: ports, heads, scale, masks and caches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import is_onnx, tensor_name
from attnquant.patterns import operands
from attnquant.patterns.facts import Facts
from attnquant.patterns.operands import Chain
from attnquant.patterns.sizes import known, size_of
from attnquant.patterns.sources import kind
from attnquant.patterns.traits import channels_attend, traits
from attnquant.roles import OperatorSpec, PortRole, PortSpec
from attnquant.site import AttentionSite, Kind, Packed, Past, Port

Sizes = tuple[int | None, ...]
CACHED = {
    PortRole.KEY: (PortRole.PAST_KEY, PortRole.PRESENT_KEY),
    PortRole.VALUE: (PortRole.PAST_VALUE, PortRole.PRESENT_VALUE),
}
"""Past and present of K and V."""
FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One attention operator in its graph."""

    node: ir.Node
    row: OperatorSpec
    version: int
    """Opset version of the operator's domain, as the graph or function imports it."""
    path: str

    def value(self, role: PortRole) -> ir.Value | None:
        """The tensor at the first connected input with this role."""
        port = self.port(role)
        return None if port is None else self.node.inputs[port.index]

    def port(self, role: PortRole) -> PortSpec | None:
        """The first connected input with this role."""
        since, inputs = self.row.since(self.version) or 0, self.node.inputs
        for port in self.row.inputs:
            held = role is port.role or role in port.shares
            if held and port.since <= since and port.index < len(inputs) and inputs[port.index] is not None:
                return port
        return None

    def number(self, name: str, default: float | None = None) -> float | None:
        """A numeric attribute; `default` where it is left out, None where a function's caller gives it."""
        attribute = self.node.attributes.get(name) if name else None
        if attribute is None:
            return default
        return None if attribute.is_ref() or not isinstance(attribute.value, int | float) else attribute.value

    def integer(self, name: str, default: int | None = None) -> int | None:
        """As `number`, for a count."""
        found = self.number(name, default)
        return None if found is None else int(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads and head sizes, None where the graph does not say."""

    q_heads: int | None
    kv_heads: int | None
    qk_head_dim: int | None
    v_head_dim: int | None

    @property
    def complete(self) -> bool:
        """Nothing is left to find out."""
        return None not in (self.q_heads, self.kv_heads, self.qk_head_dim, self.v_head_dim)


def site_of(operator: Operator, facts: Facts) -> AttentionSite:
    """The AttentionSite of one operator; `facts` say what the graph tells about its tensors."""
    node, row = operator.node, operator.row
    packed, heads = packed_form(operator), heads_of(operator, facts)
    chains = {} if packed != "none" else _chains(operator, facts)
    past = _past(operator, facts, chains)
    query, key = (operator.value(role) if packed == "none" else None for role in (PortRole.QUERY, PortRole.KEY))
    across = channels_attend(facts, query, key)
    modified = row.attributes.score_modifier in node.attributes
    return AttentionSite(
        id=f"{operator.path}/{node.name}",
        form=row.form(operator.version),
        node=node.name or "",
        nodes=(node.name or "",),
        ports={**_input_ports(operator, packed), **dict(_cache_ports(facts, chains, past)), **_output_ports(operator)},
        branch=_branch(facts, chains),
        kind=_kind(operator, facts, packed, past),
        past=past,
        q_heads=heads.q_heads,
        kv_heads=heads.kv_heads,
        kv_repeat=operands.repeat_factor(chains[PortRole.KEY]) if PortRole.KEY in chains else None,
        qk_head_dim=heads.qk_head_dim,
        v_head_dim=heads.v_head_dim,
        scale=_scale(operator, heads.qk_head_dim),
        causal=None if modified else _causal(operator),
        window=None if modified else _window(operator),
        softcap=None if modified else operator.number(row.attributes.softcap, 0.0),
        sinks=_sinks(operator),
        packed=packed,
        cross_covariance=across,
        traits=traits(facts, query, key, across=across),
        inner_rotary=bool(operator.number(row.attributes.rotary, 0)),
        path=operator.path,
    )


def unsettled(operator: Operator, facts: Facts) -> Iterator[ir.Value]:
    """The tensors whose sizes would tell what the graph leaves open about heads, head sizes and repeat_kv."""
    chains = _chains(operator, facts)
    repeats = [link.repeat for chain in chains.values() for link in chain.links if link.kind == "repeat"]
    if heads_of(operator, facts).complete and None not in repeats:
        return
    for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE, PortRole.PAST_KEY, PortRole.PAST_VALUE):
        value = operator.value(role)
        if value is not None:
            yield value
    for chain in chains.values():
        yield from chain.values


def packed_form(operator: Operator) -> Packed:
    """"qkv" where K and V are left out, "kv" where V is, by the forms that the row allows."""
    if "qkv" in operator.row.packed and operator.port(PortRole.KEY) is None:
        return "qkv"
    return "kv" if "kv" in operator.row.packed and operator.port(PortRole.VALUE) is None else "none"


def _chains(operator: Operator, facts: Facts) -> dict[PortRole, Chain]:
    """K and V followed back over caches and repeat_kv."""
    values = {role: operator.value(role) for role in (PortRole.KEY, PortRole.VALUE)}
    return {role: operands.trace(facts, value) for role, value in values.items() if value is not None}


def _past(operator: Operator, facts: Facts, chains: Mapping[PortRole, Chain]) -> Past:
    if operator.port(PortRole.PAST_KEY) is not None:
        return "inner"
    for chain in chains.values():
        link = chain.first("past")
        if link is not None and link.other is not None:
            return "concat" if is_onnx(link.node, "Concat") else "scatter"
    query = operator.value(PortRole.QUERY)
    if "::" in operator.path or not chains or query is None or operands.is_given(facts, operands.trace(facts, query)):
        return "none"  # what a function is handed may be anything, and a K handed in like Q need not be a cache
    return "input" if all(operands.is_given(facts, chain) for chain in chains.values()) else "none"


def _input_ports(operator: Operator, packed: Packed) -> dict[PortRole, Port]:
    ports = {role: _edge(operator.node, port.index) for role in PortRole if (port := operator.port(role)) is not None}
    shared = {"qkv": (PortRole.QUERY, (PortRole.KEY, PortRole.VALUE)), "kv": (PortRole.KEY, (PortRole.VALUE,))}.get(packed)
    if shared is not None and shared[0] in ports:
        ports.update(dict.fromkeys(shared[1], ports[shared[0]]))
    return ports


def _cache_ports(facts: Facts, chains: Mapping[PortRole, Chain], past: Past) -> Iterator[tuple[PortRole, Port]]:
    """Past and present outside the operator."""
    for role, chain in chains.items():
        before, after = CACHED[role]
        link = chain.first("past")
        if past in ("concat", "scatter") and link is not None and link.other is not None:
            yield before, _edge(link.node, link.other)
        elif past == "input" and (readers := [one for one in chain.links if not operands.is_pair_half(one.node)]):
            yield before, _edge(readers[-1].node, readers[-1].index)
        shown = operands.present(facts, chain) if past != "inner" else None
        if shown is not None:
            node, index, value = shown
            yield after, Port(node=node.name or "", index=index, tensor=tensor_name(value))


def _edge(node: ir.Node, index: int) -> Port:
    return Port(node=node.name or "", index=index, tensor=tensor_name(node.inputs[index]))


def _output_ports(operator: Operator) -> Mapping[PortRole, Port]:
    node, row, ports = operator.node, operator.row, {}
    for spec in row.outputs:
        if spec.index >= len(node.outputs) or not node.outputs[spec.index].name:
            continue
        for role in spec.roles:
            meaning = _score_role(operator) if role == PortRole.SCORES else role
            if meaning is not None:
                ports[meaning] = Port(node=node.name or "", index=spec.index, tensor=tensor_name(node.outputs[spec.index]))
    return ports


def _score_role(operator: Operator) -> PortRole | None:
    row = operator.row
    if not row.score_roles:
        return PortRole.SCORES
    mode = operator.integer(row.attributes.scores_mode, 0)
    return next((role for value, role in row.score_roles if value == mode), None)


def _kind(operator: Operator, facts: Facts, packed: Packed, past: Past) -> Kind | None:
    if operator.row.self_only or packed == "qkv" or past in ("concat", "scatter"):
        return "self"
    query, key = operator.value(PortRole.QUERY), operator.value(PortRole.KEY)
    return None if query is None or key is None else kind(facts, query, key)


def _branch(facts: Facts, chains: Mapping[PortRole, Chain]) -> dict[PortRole, Port]:
    """Edges in front of repeat_kv."""
    links = {role: operands.before_repeat(facts, chain) for role, chain in chains.items()}
    return {role: _edge(link.node, link.index) for role, link in links.items() if link is not None}


def sizes_of(facts: Facts, value: ir.Value | None) -> Sizes | None:
    """Sizes along each axis, None where the graph does not say."""
    axes = facts.axes_of(value)
    return None if axes is None else tuple(known(size_of(axis)) for axis in axes)


def heads_first(sizes: Sizes | None) -> tuple[int | None, int | None]:
    """(heads, head size) of a 4-D tensor laid out batch, heads, sequence, head size; two None for anything else."""
    return (sizes[1], sizes[3]) if sizes is not None and len(sizes) == 4 else (None, None)


def heads_of(operator: Operator, facts: Facts) -> Heads:
    """Heads and head sizes from the attributes, the shapes at the ports, and the weights of an inner projection."""
    names, packed = operator.row.attributes, packed_form(operator)
    query, key, value = (sizes_of(facts, operator.value(role)) for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE))
    q_heads, kv_heads = operator.integer(names.q_heads), operator.integer(names.kv_heads)
    q_heads = q_heads if q_heads is not None else heads_first(query)[0]
    kv_heads = _first(heads_first(key)[0] if names.kv_heads == names.q_heads else None, kv_heads, heads_first(key)[0])
    context = sizes_of(facts, operator.node.outputs[0])
    if packed == "qkv":
        width = _packed_width(query, q_heads, kv_heads, grouped=names.kv_heads != names.q_heads)
        qk_dim, v_dim = width, _first(operator.integer(names.v_head_dim), width)
    elif operator.row.inner_weight is not None:
        qk_dim, v_dim = _inner_widths(operator, q_heads, facts)
    else:
        qk_dim = _first(_width(query, q_heads), _width(key, kv_heads), _cache_width(operator, PortRole.PAST_KEY, facts))
        v_dim = _first(operator.integer(names.v_head_dim), qk_dim if packed == "kv" else None, _width(value, kv_heads),
                       _width(context, q_heads), _cache_width(operator, PortRole.PAST_VALUE, facts))
    return Heads(q_heads=q_heads, kv_heads=kv_heads, qk_head_dim=qk_dim, v_head_dim=v_dim)


def _first(*candidates: int | None) -> int | None:
    return next((candidate for candidate in candidates if candidate is not None), None)


def _width(sizes: Sizes | None, heads: int | None) -> int | None:
    """Head size of a tensor that ends in the head size (4-D and packed) or in heads times head size."""
    if sizes is None or not sizes or sizes[-1] is None:
        return None
    if len(sizes) >= 4:
        return sizes[-1]
    return sizes[-1] // heads if heads and sizes[-1] % heads == 0 else None


def _packed_width(sizes: Sizes | None, q_heads: int | None, kv_heads: int | None, *, grouped: bool) -> int | None:
    if grouped:
        return None if q_heads is None or kv_heads is None else _width(sizes, q_heads + 2 * kv_heads)
    return sizes[-1] if sizes is not None and len(sizes) >= 4 else _width(sizes, None if q_heads is None else 3 * q_heads)


def _cache_width(operator: Operator, role: PortRole, facts: Facts) -> int | None:
    """Head size of a float cache (batch, heads, sequence, head size); packed integer caches are narrower than the heads."""
    cache = operator.value(role)
    return heads_first(sizes_of(facts, cache))[1] if cache is not None and cache.dtype in FLOATS else None


def _inner_widths(operator: Operator, heads: int | None, facts: Facts) -> tuple[int | None, int | None]:
    row = operator.row
    stated = operator.node.attributes.get(row.attributes.hidden_sizes) if row.attributes.hidden_sizes else None
    if stated is not None and not stated.is_ref() and heads:
        widths = [int(width) for width in stated.as_ints()]
        return widths[0] // heads, widths[-1] // heads
    name, parts = row.inner_weight or ("", 1)
    index = next((port.index for port in row.inputs if port.name == name), None)
    sizes = None if index is None or index >= len(operator.node.inputs) else sizes_of(facts, operator.node.inputs[index])
    width = _width(sizes, heads * parts if heads else None)
    return width, width


def _scale(operator: Operator, head_dim: int | None) -> float | None:
    names = operator.row.attributes
    attribute = operator.node.attributes.get(names.scale) if names.scale else None
    stated = operator.number(names.scale)
    if attribute is not None and (stated is None or stated != 0 or not names.zero_scale_is_default):
        return stated
    return None if not head_dim else float(head_dim) ** -0.5


def _causal(operator: Operator) -> bool | None:
    names = operator.row.attributes
    if names.causal and names.causal in operator.node.attributes:
        stated = operator.number(names.causal)
        return None if stated is None else bool(stated)
    return names.causal_default


def _window(operator: Operator) -> tuple[int, int] | None:
    names = operator.row.attributes
    if names.window is not None:
        left, right = (operator.integer(name, -1) for name in names.window)
        return None if left is None or right is None else (left, right)
    if names.side_window:
        side = operator.integer(names.side_window)
        return None if side is None else (side, side)
    size = operator.integer(names.local_window, -1)
    if size is None or size <= 0:
        return None if size is None else (-1, -1)
    return size - 1, 0 if _causal(operator) else -1


def _sinks(operator: Operator) -> bool | None:
    row = operator.row
    index = next((port.index for port in row.inputs if row.sink_port and port.name == row.sink_port), None)
    if index is not None and index < len(operator.node.inputs) and operator.node.inputs[index] is not None:
        return True
    smooth = operator.number(row.attributes.sinks, 0)
    return None if smooth is None else smooth > 0
