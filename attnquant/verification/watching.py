"""A model made ready to be looked into: operators written out, twins beside every attention, names of what to observe."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant.audit.flow import Flow
from attnquant.audit.quantizers import Parameters, parameters
from attnquant.dtypes import infer_types
from attnquant.emission.editor import Editor, replace_reads
from attnquant.graph import tensor_name
from attnquant.rewrite import expand
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite
from attnquant.verification.twins import Twins, region, rounded

ROLES = (
    PortRole.QUERY, PortRole.KEY, PortRole.SCORES, PortRole.PROBABILITIES, PortRole.VALUE, PortRole.CONTEXT,
)  # fmt: skip
"""The roles that are observed, in the order in which they are computed."""
OPERANDS = (PortRole.QUERY, PortRole.KEY, PortRole.VALUE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A quantizer on an operand, to be held against the values that reach it."""

    role: PortRole
    node: str
    tensor: str
    """The float tensor in front."""
    parameters: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is observed of one attention: names of tensors of the watched model."""

    roles: Mapping[PortRole, str]
    twin: str = ""
    """Context of the float twin, "" where there is none."""
    rounded: str = ""
    """Context of the twin with Q and K rounded to 8 bits."""
    gauges: tuple[Gauge, ...] = ()
    bypassed: int = 0
    """Quantizers that the float twin leaves out."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every tensor to observe, each once."""
        names = [*self.roles.values(), self.twin, self.rounded, *(gauge.tensor for gauge in self.gauges)]
        return tuple(dict.fromkeys(name for name in names if name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A model with everything to observe in it, and by site id what that is or why there is nothing."""

    model: ir.Model
    watches: Mapping[str, Watch]
    refused: Mapping[str, str] = field(default_factory=dict)


def watched(model: ir.Model, sites: Sequence[AttentionSite], feeds: Mapping[str, np.ndarray], *, twins: bool) -> Watched:
    """A copy of a model in which these attentions can be observed.

    :param model: With named nodes; `sites` are what `recognize` finds in it.
    :param twins: Write the twins too: for the quantized model.
    """
    operators = [site for site in sites if site.form != DECOMPOSED and not site.path]
    roles = {site.id: _ports(site) for site in sites if site.form == DECOMPOSED and not site.path}
    refused = {site.id: "not observed: inside control flow or a function" for site in sites if site.path}
    copy = models.copy(model)
    if operators:
        written = expand(model, sites=operators, feeds=feeds)
        copy = written.model
        for row in written.rows:
            if row.status == "refused":
                refused[row.site] = f"not observed: {'; '.join(row.reasons)}"
            else:
                roles[row.site] = dict(row.tensors)
    if not twins:
        return Watched(model=copy, watches={key: Watch(roles=names) for key, names in roles.items()}, refused=refused)
    return Watched(model=copy, watches=_with_twins(copy, roles), refused=refused)


def _ports(site: AttentionSite) -> dict[PortRole, str]:
    return {role: site.ports[role].tensor for role in ROLES if role in site.ports}


def _with_twins(model: ir.Model, sites: Mapping[str, Mapping[PortRole, str]]) -> dict[str, Watch]:
    """Write the twins of every site at the end of the graph, in place."""
    flow, types, editor, values = Flow(model), infer_types(model), Editor(model), named_values(model)
    found = {}
    for key, names in sites.items():
        operands = {role: values[names[role]] for role in OPERANDS if names.get(role) in values}
        context = values.get(names.get(PortRole.CONTEXT, ""))
        gauges = tuple(gauge for role, value in operands.items() for gauge in _gauges(flow, role, value))
        if context is None or len(operands) < len(OPERANDS):
            found[key] = Watch(roles=names, gauges=gauges)
            continue
        inside = region(context, frozenset(operands.values()))
        moved = Twins(editor, flow, frozenset())
        plain = {role: moved.of(value) for role, value in operands.items()}
        exact = Twins(editor, flow, inside, {operands[role]: plain[role] for role in OPERANDS})
        # V comes last: where it is the same tensor as K it stays as it is.
        eight = {role: plain[role] if role is PortRole.VALUE else rounded(editor, types, plain[role]) for role in OPERANDS}
        coarse = Twins(editor, flow, inside, {operands[role]: eight[role] for role in OPERANDS})
        twin, other = exact.of(context), coarse.of(context)
        found[key] = Watch(
            roles=names, twin=tensor_name(twin), rounded=tensor_name(other), gauges=gauges,
            bypassed=moved.bypassed + exact.bypassed,
        )  # fmt: skip
    return found


def _gauges(flow: Flow, role: PortRole, value: ir.Value) -> Iterator[Gauge]:
    seen = set()
    for hit in flow.trace(value).hits:
        node = hit.quantize
        if node is None or node in seen or node.inputs[0] is None:
            continue
        seen.add(node)
        yield Gauge(role=role, node=node.name or "", tensor=tensor_name(node.inputs[0]), parameters=parameters(node))


def named_values(model: ir.Model) -> dict[str, ir.Value]:
    """Every tensor of the main graph by name."""
    found = {tensor_name(value): value for value in (*model.graph.inputs, *model.graph.initializers.values())}
    found.update((tensor_name(value), value) for node in model.graph for value in node.outputs if value.name)
    return found


def with_outputs(model: ir.Model, tensors: Iterable[str], op_type: str = "Identity") -> tuple[ir.Model, dict[str, str]]:
    """A copy with these tensors as outputs, and {tensor: name of its output}; "Size" gives the number of elements."""
    copy = models.copy(model)
    values, editor = named_values(copy), Editor(copy)
    outputs: dict[str, str] = {}
    for name in dict.fromkeys(tensors):
        node = editor.make(op_type, [values[name]], f"attnquant_observed_{len(outputs)}")
        copy.graph.append(node)
        copy.graph.outputs.append(node.outputs[0])
        outputs[name] = tensor_name(node.outputs[0])
    return copy, outputs


def switchable(found: Watched, sites: Iterable[str]) -> tuple[ir.Model, dict[str, str]]:
    """A copy in which each of these attentions can be its float twin, and {site: name of its switch}, a bool input."""
    copy = models.copy(found.model)
    values, editor = named_values(copy), Editor(copy)
    switches: dict[str, str] = {}
    for site in sites:
        watch = found.watches[site]
        context, twin = values[watch.roles[PortRole.CONTEXT]], values[watch.twin]
        switch = editor.switch(f"attnquant_switch_{len(switches)}")
        node = editor.make("Where", [switch, twin, context], "attnquant_switched", like=context)
        _take_place(copy, context, node, editor)
        switches[site] = tensor_name(switch)
    copy.graph.sort()
    return copy, switches


def _take_place(model: ir.Model, old: ir.Value, node: ir.Node, editor: Editor) -> None:
    """Let everything that reads `old` read the output of `node`, which reads `old` too; graph outputs keep their names."""
    new = node.outputs[0]
    replace_reads(old, new, but=[node])
    model.graph.append(node)
    for index, output in enumerate(model.graph.outputs):
        if output is old:
            name, old.name = tensor_name(old), editor.free_tensor(f"{old.name}/quantized")
            new.name = name
            model.graph.outputs[index] = new
