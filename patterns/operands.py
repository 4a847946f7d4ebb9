"""From a port of a product back to where its tensor was made: scale factors, repeat_kv, past and present on the way.

The chain ends at the projection, at a norm, or at an input of the graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import onnx_ir as ir

from attnquant.graph import constant, is_onnx
from attnquant.patterns import moves
from attnquant.patterns.facts import Facts, Level, inputs_at, integer
from attnquant.patterns.rotary import rotated
from attnquant.patterns.scores import factor_of, spread_over
from attnquant.patterns.sizes import known

LIMIT = 64
"""Links that one chain may have."""

LinkKind = Literal["layout", "scale", "repeat", "past", "rotary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One node of a chain; the operand comes in at input `index`."""

    node: ir.Node
    index: int
    kind: LinkKind
    factor: float | None = 1.0
    repeat: int | None = None
    """How often heads are repeated, None where there is a repeat of unknown factor; only for kind "repeat"."""
    other: int | None = None
    """Input with the past (kind "past") or with the factor (kind "scale")."""

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.index]
        assert value is not None
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The way back from one port; `links` from the port on, `origin` the tensor where it ends."""

    port: ir.Value
    links: tuple[Link, ...]
    origin: ir.Value

    @property
    def factor(self) -> float | None:
        """Product of all scale factors, None where one is not known."""
        total = 1.0
        for link in self.links:
            if link.factor is None:
                return None
            total *= link.factor
        return total

    @property
    def values(self) -> tuple[ir.Value, ...]:
        """Every tensor of the chain, from the port on."""
        return (self.port, *(link.value for link in self.links))

    def first(self, kind: LinkKind) -> Link | None:
        return next((link for link in self.links if link.kind == kind), None)


def trace(facts: Facts, port: ir.Value) -> Chain:
    """The chain behind a port of a product."""
    links: list[Link] = []
    value = port
    for _ in range(LIMIT):
        node = value.producer()
        if node is None:
            break
        facts.steps += 1
        link = _link(facts, node, value)
        if link is not None and inputs_at(node, link.index) is not None:
            links.append(link)
            value = link.value
            continue
        source = rotated(facts, value)
        if source is None:
            break
        readers = [use for use in facts.uses(source) if facts.depths.get(use[0].outputs[0], 0) <= facts.depths.get(value, 0)]
        if not readers:
            break
        links.append(Link(node=readers[0][0], index=readers[0][1], kind="rotary"))
        value = source
    return Chain(port=port, links=tuple(links), origin=value)


def _link(facts: Facts, node: ir.Node, value: ir.Value) -> Link | None:
    if is_onnx(node, "Mul", "Div"):
        return _scaled(facts, node)
    if is_onnx(node, "Concat"):
        return _joined(facts, node)
    if is_onnx(node, "ScatterElements", "ScatterND", "TensorScatter"):
        update = 1 if node.op_type == "TensorScatter" else 2
        grows = reaches_input(facts, inputs_at(node, 0)) or facts.level(inputs_at(node, 0)) < Level.LEARNED
        if not grows:
            return Link(node=node, index=0, kind="layout")
        return Link(node=node, index=update, kind="past", other=0 if reaches_input(facts, inputs_at(node, 0)) else None)
    if is_onnx(node, "Where"):
        return _overwritten(facts, node)
    if node.op_type == "RotaryEmbedding":
        return Link(node=node, index=0, kind="rotary")
    if not moves.is_transparent(node) or node.op_type in ("BatchNormalization", "Clip", "Neg"):
        return None
    if node.op_type in ("DequantizeLinear", "Gather", "GatherND") and _ends(facts, node):
        return None
    repeat = _repeat(facts, node)
    if repeat is not None:
        return Link(node=node, index=0, kind="repeat", repeat=repeat or None)
    return Link(node=node, index=0, kind="layout")


def _ends(facts: Facts, node: ir.Node) -> bool:
    """What is taken from a constant is not followed into it, but through the Q/DQ pair of a constant operand."""
    source = inputs_at(node, 0)
    paired = node.op_type == "DequantizeLinear" and source is not None and source.producer() is not None
    return facts.level(source) < Level.LEARNED and not paired


def _scaled(facts: Facts, node: ir.Node) -> Link | None:
    """A Mul or Div by something without a feature axis of its own: a scale, whatever its value."""
    for index in (0,) if is_onnx(node, "Div") else (0, 1):
        data, other = inputs_at(node, index), inputs_at(node, 1 - index)
        if data is None or other is None or facts.level(other) >= Level.LEARNED:
            continue
        if facts.level(data) < Level.LEARNED <= facts.level(node.outputs[0]):
            continue
        elements = facts.elements_of(other)
        if elements is None and spread_over(facts, other, (-1, -2)) is not False:
            continue
        if elements is not None and len(elements.items) > 1 and len(set(elements.items)) > 1:
            continue
        return Link(node=node, index=index, kind="scale", factor=factor_of(node, elements), other=1 - index)
    return None


def _joined(facts: Facts, node: ir.Node) -> Link | None:
    """A Concat: of one tensor, of copies of one (repeat), of a past or a prefix with something computed."""
    if len(node.inputs) == 1:
        return Link(node=node, index=0, kind="layout")
    if len({moves.provenance(facts, value) for value in node.inputs}) == 1:
        return Link(node=node, index=0, kind="repeat", repeat=len(node.inputs))
    axes = facts.axes_of(node.outputs[0])
    axis = integer(node, "axis", 0)
    if axes is not None and axis in (-1, len(axes) - 1) and all(factor.origin == "feature" for factor in axes[-1]):
        return None
    pasts = [index for index, value in enumerate(node.inputs) if reaches_input(facts, value)]
    computed = [
        index for index, value in enumerate(node.inputs) if index not in pasts and facts.level(value) >= Level.LEARNED
    ]
    if pasts and computed:
        return Link(node=node, index=computed[0], kind="past", other=pasts[0])
    if len(pasts) > 1:
        return Link(node=node, index=pasts[-1], kind="past", other=pasts[0])
    if len(computed) == 1:
        return Link(node=node, index=computed[0], kind="layout")
    return None


def _overwritten(facts: Facts, node: ir.Node) -> Link | None:
    """A Where that puts something computed into a cache."""
    for past in (1, 2):
        if reaches_input(facts, inputs_at(node, past)) and not reaches_input(facts, inputs_at(node, 3 - past)):
            return Link(node=node, index=3 - past, kind="past", other=past)
    return None


def is_given(facts: Facts, chain: Chain) -> bool:
    """The operand is an input of the graph, up to scale and layout."""
    plain = all(link.kind in ("layout", "scale", "repeat") for link in chain.links)
    return (
        plain and chain.origin.producer() is None and chain.origin.is_graph_input() and facts.depends_on_data(chain.origin)
    )


def reaches_input(facts: Facts, value: ir.Value | None) -> bool:
    """True where nothing but transparent operators lies between an input of the graph and this tensor."""
    return source_input(facts, value) is not None


def source_input(facts: Facts, value: ir.Value | None) -> tuple[ir.Node | None, int, ir.Value] | None:
    """(node, input index, tensor): what reads the graph input behind this tensor; no node where it is the input itself."""
    edge: tuple[ir.Node | None, int] = (None, 0)
    for _ in range(LIMIT):
        if value is None:
            return None
        node = value.producer()
        if node is None:
            return (*edge, value) if value.is_graph_input() and facts.level(value) == Level.DATA else None
        facts.steps += 1
        single = is_onnx(node, "Concat") and len(node.inputs) == 1
        if not (moves.is_transparent(node) or single) or is_onnx(node, "ScatterND", "ScatterElements", "TensorScatter"):
            return None
        edge = (node, 0)
        value = inputs_at(node, 0)
    return None


def _repeat(facts: Facts, node: ir.Node) -> int | None:
    """How often a node repeats heads: None where it does not, 0 where the factor is not known."""
    if is_onnx(node, "Expand", "Tile"):
        return _broadcast_factor(facts, node)
    if is_onnx(node, "Gather"):
        return _gathered_factor(facts, node)
    return None


def _broadcast_factor(facts: Facts, node: ir.Node) -> int | None:
    before, after = facts.axes_of(inputs_at(node, 0)), facts.axes_of(node.outputs[0])
    if after is None or before is None or len(before) != len(after):
        return 0 if _between_new_axis_and_merge(facts, node) else None
    start = 1 if len(after) > 3 else 0
    for one, old in list(zip(after, before, strict=True))[start:-1]:
        added = [factor for factor in one if factor.origin == "repeat" and factor not in old]
        if len(one) > len(old) and added:
            size = known(added[0].size)
            if size is None:
                return 0 if _between_new_axis_and_merge(facts, node) else None
            return size if size > 1 else None
    return None


def _between_new_axis_and_merge(facts: Facts, node: ir.Node) -> bool:
    """Unsqueeze > Expand > Reshape: a repeat even where no size is known."""
    value = inputs_at(node, 0)
    maker = value.producer() if value is not None else None
    return is_onnx(maker, "Unsqueeze") and any(is_onnx(use, "Reshape") for use, _ in facts.uses(node.outputs[0]))


def _gathered_factor(facts: Facts, node: ir.Node) -> int | None:
    """A Gather of heads by a constant list in which every head comes equally often: 0, 0, 1, 1 or 0, 1, 0, 1."""
    indices = inputs_at(node, 1)
    found = facts.elements_of(indices)
    if found is None or found.scalar or not all(isinstance(item, int) for item in found.items):
        return None
    items = [item for item in found.items if isinstance(item, int)]
    distinct = sorted(set(items))
    if not items or distinct != list(range(len(distinct))) or len(items) == len(distinct):
        return None
    counts = {items.count(item) for item in distinct}
    return counts.pop() if len(counts) == 1 else None


def before_repeat(facts: Facts, chain: Chain) -> Link | None:
    """The edge in front of repeat_kv: the deepest repeat's, the operator that made room for the copies included.

    Only moves and constant factors may separate quantizer and product. Behind a rotary embedding, rows put together with
    others (a cache), or a factor computed at run time, no repeat counts: None where all of them lie there (Falcon).
    """
    near = list(takewhile(_keeps_pairs, chain.links))
    place = max((index for index, link in enumerate(near) if link.kind == "repeat"), default=None)
    if place is None:
        return None
    for link in chain.links[place + 1 :]:
        if _makes_room(facts, link.node):
            return link
        if not (is_onnx(link.node, "Slice", "Identity") or is_pair_half(link.node)):
            break
    return chain.links[place]


def _keeps_pairs(link: Link) -> bool:
    """What is quantized in front of this link is quantized behind it."""
    if link.kind in ("rotary", "past"):
        return False
    if link.kind == "scale":
        return link.other is None or constant(inputs_at(link.node, link.other)) is not None
    mixed = is_onnx(link.node, "Concat") and len(link.node.inputs) > 1
    return link.kind == "repeat" or not (mixed or is_onnx(link.node, "ScatterElements", "ScatterND", "TensorScatter"))


def _makes_room(facts: Facts, node: ir.Node) -> bool:
    """An Unsqueeze, or a Reshape used as one."""
    if is_onnx(node, "Unsqueeze"):
        return True
    before, after = facts.rank(inputs_at(node, 0)), facts.rank(node.outputs[0])
    return is_onnx(node, "Reshape") and before is not None and after == before + 1


def is_pair_half(node: ir.Node) -> bool:
    """QuantizeLinear or DequantizeLinear."""
    return node.op_type in ("QuantizeLinear", "DequantizeLinear")


def repeat_factor(chain: Chain) -> int | None:
    """Product of all repeats of a chain; None where there is none or one is not known."""
    repeats = [link.repeat for link in chain.links if link.kind == "repeat"]
    if not repeats or None in repeats:
        return None
    total = 1
    for repeat in repeats:
        total *= repeat or 1
    return total


def present(facts: Facts, chain: Chain) -> tuple[ir.Node, int, ir.Value] | None:
    """(node, output index, tensor) of the graph output with this operand, on the chain or behind transparent readers."""
    for value in chain.values:
        found = next(_outputs(facts, value, 8), None)
        if found is not None:
            return found
    return None


def _outputs(facts: Facts, value: ir.Value, depth: int) -> Iterator[tuple[ir.Node, int, ir.Value]]:
    node = value.producer()
    if value.is_graph_output() and node is not None:
        yield node, value.index() or 0, value
    if not depth:
        return
    for reader, index in facts.uses(value):
        facts.steps += 1
        plain = is_onnx(reader, "Identity", "Transpose", "Reshape", "Cast", "Unsqueeze", "Squeeze") or is_pair_half(reader)
        if index == 0 and plain:
            yield from _outputs(facts, reader.outputs[0], depth - 1)
        elif is_onnx(reader, "Concat") and reader.outputs[0].is_graph_output():
            yield from _outputs(facts, reader.outputs[0], 0)
