"""From one attention operator to its AttentionSite, by its row in the catalogue: ports, heads, scale, masks and caches."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.dims import Read, Sizes, heads_first
from attnquant.graph import tensor_name
from attnquant.lineage import Cache, cache_of, find_repeat, input_behind, kind_of, operand_port
from attnquant.roles import OperatorSpec, PortRole, PortSpec
from attnquant.site import AttentionSite, Kind, Packed, Past, Port

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One attention operator in its graph."""

    node: ir.Node
    row: OperatorSpec
    version: int
    """Opset version of the operator's domain, as the graph or function imports it."""
    path: str
    inputs_tell: bool
    """The graph's inputs are the model's, not values handed to a function or body."""

    def value(self, role: PortRole) -> ir.Value | None:
        """The tensor at the first connected input with this role."""
        port = self.port(role)
        return None if port is None else self.node.inputs[port.index]

    def port(self, role: PortRole) -> PortSpec | None:
        """The first connected input with this role."""
        return next((port for port in self._inputs() if role in port.roles), None)

    def _inputs(self) -> Iterator[PortSpec]:
        since = self.row.since(self.version) or 0
        for port in self.row.inputs:
            if port.index < len(self.node.inputs) and self.node.inputs[port.index] is not None and port.since <= since:
                yield port

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


def site_of(operator: Operator, read: Read) -> AttentionSite:
    """The AttentionSite of one operator; `read` gives the sizes of tensors."""
    node, row = operator.node, operator.row
    packed, heads = packed_form(operator), heads_of(operator, read)
    ports, past, caches = _ports(operator, packed)
    branch, kv_repeat = _branch(operator, read, heads)
    modified = row.attributes.score_modifier in node.attributes
    return AttentionSite(
        id=f"{operator.path}/{node.name}",
        form=row.form(operator.version),
        node=node.name or "",
        nodes=(node.name or "",),
        ports=ports,
        branch=branch,
        kind=_kind(operator, packed),
        past=past if past != "none" else caches,
        q_heads=heads.q_heads,
        kv_heads=heads.kv_heads,
        kv_repeat=kv_repeat,
        qk_head_dim=heads.qk_head_dim,
        v_head_dim=heads.v_head_dim,
        scale=_scale(operator, heads.qk_head_dim),
        causal=None if modified else _causal(operator),
        window=None if modified else _window(operator),
        softcap=None if modified else operator.number(row.attributes.softcap, 0.0),
        sinks=_sinks(operator),
        packed=packed,
        inner_rotary=bool(operator.number(row.attributes.rotary, 0)),
        path=operator.path,
    )


def unsettled(operator: Operator, read: Read) -> Iterator[ir.Value]:
    """The tensors whose sizes would tell what the graph leaves open about heads, head sizes and repeat_kv."""
    if not heads_of(operator, read).complete:
        for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE, PortRole.PAST_KEY, PortRole.PAST_VALUE):
            value = operator.value(role)
            if value is not None:
                yield value
    for role in (PortRole.KEY, PortRole.VALUE):
        repeat = find_repeat(operator.value(role), read)
        if repeat is not None and repeat.factor is None:
            yield repeat.before


def packed_form(operator: Operator) -> Packed:
    """"qkv" where K and V are left out, "kv" where V is, by the forms that the row allows."""
    if "qkv" in operator.row.packed and operator.port(PortRole.KEY) is None:
        return "qkv"
    return "kv" if "kv" in operator.row.packed and operator.port(PortRole.VALUE) is None else "none"


def _ports(operator: Operator, packed: Packed) -> tuple[Mapping[PortRole, Port], Past, Past]:
    """Ports by role, whether a past comes in through the operator, and what cache lies in front of it."""
    node, ports = operator.node, {}
    for role in PortRole:
        port = operator.port(role)
        if port is not None:
            ports[role] = operand_port(node, port.index)
    shared = {"qkv": (PortRole.QUERY, (PortRole.KEY, PortRole.VALUE)), "kv": (PortRole.KEY, (PortRole.VALUE,))}.get(packed)
    if shared is not None and shared[0] in ports:
        ports.update(dict.fromkeys(shared[1], ports[shared[0]]))
    past: Past = "inner" if PortRole.PAST_KEY in ports else "none"
    outer: Past = "none"
    if past == "none" and packed == "none":
        key, value = _caches(operator)
        outer = key.past
        around = ((PortRole.PAST_KEY, key.past_port), (PortRole.PAST_VALUE, value.past_port),
                  (PortRole.PRESENT_KEY, key.present_port), (PortRole.PRESENT_VALUE, value.present_port))
        ports.update({role: found for role, found in around if found is not None})
    ports.update(_output_ports(operator))
    return ports, past, outer


def _caches(operator: Operator) -> tuple[Cache, Cache]:
    key = cache_of(operator.value(PortRole.KEY))
    told = operator.inputs_tell and input_behind(operator.value(PortRole.QUERY)) is None
    if key.past == "input" and not told:  # Q is handed in like K, so K need not be a cache
        key = Cache(present_port=key.present_port)
    return key, cache_of(operator.value(PortRole.VALUE))


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


def _kind(operator: Operator, packed: Packed) -> Kind | None:
    if operator.row.self_only or packed == "qkv":
        return "self"
    return kind_of(operator.value(PortRole.QUERY), operator.value(PortRole.KEY), inputs_tell=operator.inputs_tell)


def _branch(operator: Operator, read: Read, heads: Heads) -> tuple[Mapping[PortRole, Port], int | None]:
    """Edges in front of repeat_kv, and its factor."""
    branch: dict[PortRole, Port] = {}
    factors: list[int | None] = []
    for role in (PortRole.KEY, PortRole.VALUE):
        found = find_repeat(operator.value(role), read)
        if found is not None:
            branch[role], factor = found.port, found.factor
            before = heads_first(read(found.before))[0]
            if factor is None and before and heads.kv_heads and heads.kv_heads % before == 0:
                factor = heads.kv_heads // before
            factors.append(factor)
    if factors and factors[0] == 1:
        return {}, None
    return branch, factors[0] if factors else None


def heads_of(operator: Operator, read: Read) -> Heads:
    """Heads and head sizes from the attributes, the shapes at the ports, and the weights of an inner projection."""
    names, packed = operator.row.attributes, packed_form(operator)
    query, key, value = (read(operator.value(role)) for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE))
    q_heads, kv_heads = operator.integer(names.q_heads), operator.integer(names.kv_heads)
    q_heads = q_heads if q_heads is not None else heads_first(query)[0]
    kv_heads = _first(heads_first(key)[0] if names.kv_heads == names.q_heads else None, kv_heads, heads_first(key)[0])
    context = read(operator.node.outputs[0])
    if packed == "qkv":
        width = _packed_width(query, q_heads, kv_heads, grouped=names.kv_heads != names.q_heads)
        qk_dim, v_dim = width, _first(operator.integer(names.v_head_dim), width)
    elif operator.row.inner_weight is not None:
        qk_dim, v_dim = _inner_widths(operator, q_heads, read)
    else:
        qk_dim = _first(_width(query, q_heads), _width(key, kv_heads), _cache_width(operator, PortRole.PAST_KEY, read))
        v_dim = _first(operator.integer(names.v_head_dim), qk_dim if packed == "kv" else None, _width(value, kv_heads),
                       _width(context, q_heads), _cache_width(operator, PortRole.PAST_VALUE, read))
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


def _cache_width(operator: Operator, role: PortRole, read: Read) -> int | None:
    """Head size of a float cache (batch, heads, sequence, head size); packed integer caches are narrower than the heads."""
    cache = operator.value(role)
    return heads_first(read(cache))[1] if cache is not None and cache.dtype in FLOATS else None


def _inner_widths(operator: Operator, heads: int | None, read: Read) -> tuple[int | None, int | None]:
    row = operator.row
    stated = operator.node.attributes.get(row.attributes.hidden_sizes) if row.attributes.hidden_sizes else None
    if stated is not None and not stated.is_ref() and heads:
        widths = [int(width) for width in stated.as_ints()]
        return widths[0] // heads, widths[-1] // heads
    name, parts = row.inner_weight or ("", 1)
    index = next((port.index for port in row.inputs if port.name == name), None)
    sizes = None if index is None or index >= len(operator.node.inputs) else read(operator.node.inputs[index])
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
