"""Which attention of the quantized model is which of the float model, and how they differ by structure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.audit.contract import nodes_by_name
from attnquant.audit.flow import Flow
from attnquant.graph import tensor_name
from attnquant.roles import PortRole
from attnquant.site import AttentionSite

_SCALE_TOLERANCE = 0.01
_STATED = ("causal", "window", "softcap", "sinks", "cross_covariance", "packed")
"""What the record says of an attention besides its sizes; comparable between two of the same form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePair:
    """One attention in both models."""

    quantized: AttentionSite
    reference: AttentionSite | None
    """None: the float model has no such attention."""

    @property
    def id(self) -> str:
        """The id in the quantized model, which its setup uses."""
        return self.quantized.id


def pair_sites(reference: Sequence[AttentionSite], quantized: Sequence[AttentionSite]) -> tuple[SitePair, ...]:
    """Pairs in the order of the quantized model: by id, what is left in order where as many are left on both sides."""
    by_id = {site.id: site for site in reference}
    known = {site.id for site in quantized}
    left = [site for site in reference if site.id not in known]
    strangers = [site.id for site in quantized if site.id not in by_id]
    rest = dict(zip(strangers, left, strict=True)) if len(left) == len(strangers) else {}
    return tuple(SitePair(quantized=site, reference=by_id.get(site.id) or rest.get(site.id)) for site in quantized)


def differences(pair: SitePair) -> Iterator[str]:
    """What the record of an attention says differently in the two models; unknown values are no difference."""
    first, second = pair.reference, pair.quantized
    if first is None:
        return
    for name in ("q_heads", "kv_heads", "qk_head_dim", "v_head_dim"):
        one, other = getattr(first, name), getattr(second, name)
        if None not in (one, other) and one != other:
            yield f"{name}: {one} in the float model, {other} in the quantized one"
    one, other = first.scale, second.scale
    if one is not None and other is not None and abs(one - other) > _SCALE_TOLERANCE * abs(one):
        yield f"scale: {one:.6g} in the float model, {other:.6g} in the quantized one"
    if first.form != second.form:
        return
    for name in _STATED:
        one, other = getattr(first, name), getattr(second, name)
        if None not in (one, other) and one != other:
            yield f"{name}: {one!r} in the float model, {other!r} in the quantized one"
    if (PortRole.MASK in first.ports) != (PortRole.MASK in second.ports):
        where = "float" if PortRole.MASK in first.ports else "quantized"
        yield f"mask: only the {where} model has one"


def exchanged(pair: SitePair, reference: "Wiring", quantized: "Wiring") -> bool:
    """True where query reads what key reads in the float model, and the other way round, by the names of tensors."""
    if pair.reference is None:
        return False
    query, key = (reference.sources(pair.reference, role) for role in (PortRole.QUERY, PortRole.KEY))
    own_query, own_key = (quantized.sources(pair.quantized, role) for role in (PortRole.QUERY, PortRole.KEY))
    return bool(query and key) and query != key and (own_query, own_key) == (key, query)


class Wiring:
    """Where the operands of attentions come from in one model."""

    def __init__(self, model: ir.Model) -> None:
        self._flow, self._nodes = Flow(model), nodes_by_name(model)

    def sources(self, site: AttentionSite, role: PortRole) -> frozenset[str]:
        """Names of the tensors that an operand is moved, scaled or rounded from; empty where there is no such operand."""
        port = site.ports.get(role)
        node = None if port is None else self._nodes.get((site.path, port.node))
        if port is None or node is None or port.index >= len(node.inputs):
            return frozenset()
        found: set[str] = set()
        waiting, seen = [node.inputs[port.index]], set[ir.Value]()
        while waiting:
            trace = self._flow.trace(waiting.pop())
            found.update(tensor_name(value) for value, _ in trace.leaves)
            for hit in trace.hits:
                behind = None if hit.quantize is None else hit.quantize.inputs[0]
                if behind is not None and behind not in seen:
                    seen.add(behind)
                    waiting.append(behind)
        return frozenset(found)
