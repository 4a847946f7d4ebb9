"""The caches of a decoder and of its sibling with past, paired.

They are found by the attentions that make and read them, and paired in the order of the graphs, self-attention apart from
attention to the encoder; where names are alike, they must say the same.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.graph import sizes_only, tensor_name
from attnquant.recognition import recognize
from attnquant.roles import PortRole
from attnquant.site import AttentionSite, Kind

ENCODER, DECODER, WITH_PAST = "encoder", "decoder", "decoder_with_past"

_PRESENT = {PortRole.KEY: PortRole.PRESENT_KEY, PortRole.VALUE: PortRole.PRESENT_VALUE}
_PAST = {PortRole.KEY: PortRole.PAST_KEY, PortRole.VALUE: PortRole.PAST_VALUE}
_PREFIX = re.compile(r"^(past|present)(_key_values)?[._/]?")

Read = tuple[Kind, PortRole, str, str]
"""(kind, role, input, output or "") of a cache that the decoder with past reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Keys or values of one attention: where each model has them."""

    kind: Kind
    """"self": it grows by what is new; "cross": made of the encoder's answer once."""
    role: PortRole
    first: str
    """Output of the decoder."""
    past: str
    """Input of the decoder with past."""
    present: str
    """Output of the decoder with past; "" for attention to the encoder, whose cache stays as it is."""


def _made(model: ir.Model, tokens: str) -> Iterator[tuple[Kind, PortRole, str]]:
    """(kind, role, output) of every cache that the decoder makes."""
    outputs = {tensor_name(value): value for value in model.graph.outputs}
    for site in recognize(model).sites:
        for role, present in _PRESENT.items():
            tensor = _tensor(site, present)
            if tensor in outputs:
                yield "self" if tokens in _sources(outputs[tensor]) else "cross", role, tensor


def read(model: ir.Model) -> Iterator[Read]:
    """Every cache that the decoder with past reads, in order.

    :raises ModelError: a longer cache is not given back.
    """
    inputs, outputs = ({tensor_name(value) for value in side} for side in (model.graph.inputs, model.graph.outputs))
    for site in recognize(model).sites:
        for role, port in _PAST.items():
            past, present = _tensor(site, port), _tensor(site, _PRESENT[role])
            if site.past == "input":
                past, present = past or _tensor(site, role), ""
            if past not in inputs:
                continue
            if site.past != "input" and present not in outputs:
                msg = f"Input {past!r} of the {WITH_PAST}: expected that attention {site.id!r} gives the longer cache back "
                raise ModelError(msg + "as an output, got none. Export the model with its present keys and values.")
            yield "cross" if site.past == "input" else "self", role, past, present


def _tensor(site: AttentionSite, role: PortRole) -> str:
    return site.ports[role].tensor if role in site.ports else ""


def _sources(value: ir.Value) -> set[str]:
    """The inputs that a tensor's values, not its sizes, are made of."""
    waiting: list[ir.Value | None] = [value]
    seen: set[ir.Value] = set()
    while waiting:
        item = waiting.pop()
        if item is None or item in seen:
            continue
        seen.add(item)
        node = item.producer()
        if node is not None and not sizes_only(node):
            waiting += node.inputs
    return {tensor_name(item) for item in seen if item.is_graph_input()}


def paired(decoder: ir.Model, tokens: str, given: Sequence[Read]) -> tuple[Cache, ...]:
    """The caches of both decoders, in order.

    :param tokens: The decoder's input of tokens: what is made of it is self-attention's.
    :param given: Of the decoder with past, by `read`.
    :raises ModelError: they don't pair up, or their names contradict.
    """
    made, found = list(_made(decoder, tokens)), {}
    kinds: tuple[Kind, ...] = ("self", "cross")
    for kind in kinds:
        ours, theirs = [row for row in made if row[0] == kind], [row for row in given if row[0] == kind]
        if not ours or [row[1] for row in ours] != [row[1] for row in theirs]:
            msg = f"Caches of {kind}-attention: expected as many outputs of the {DECODER} as inputs of the {WITH_PAST}, "
            msg += f"keys and values alike, got {[row[2] for row in ours]!r} and {[row[2] for row in theirs]!r}. "
            raise ModelError(msg + "Export both decoders of one model, with every present key and value.")
        for (_, role, first), (_, _, past, present) in zip(ours, theirs, strict=True):
            found[past] = Cache(kind=kind, role=role, first=first, past=past, present=present)
    caches = tuple(found[past] for _, _, past, _ in given)
    _check_names(caches)
    return caches


def _check_names(caches: Sequence[Cache]) -> None:
    """Where past and present are named alike, the graphs have to pair them as the names do."""
    by_name = {_PREFIX.sub("", cache.first): cache.first for cache in caches}
    for cache in caches:
        named = by_name.get(_PREFIX.sub("", cache.past), cache.first)
        if named != cache.first:
            msg = f"Input {cache.past!r} of the {WITH_PAST}: its name says that it takes {named!r} of the {DECODER}, the "
            msg += f"graphs {cache.first!r} (the {cache.role} of {cache.kind}-attention, in order). Expected both to agree. "
            raise ModelError(msg + "Rename one of them, or export both decoders again.")
