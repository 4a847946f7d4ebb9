"""From attention operators to plain operators of ai.onnx: for runtimes without a kernel, and to see Q, K, scores and P."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import opset, probe
from attnquant.dtypes import infer_types
from attnquant.emission.clean import drop_dead_initializers
from attnquant.emission.editor import Editor
from attnquant.graph import tensor_name
from attnquant.operators import Operator, site_of
from attnquant.patterns.facts import Facts
from attnquant.patterns.inference import study
from attnquant.recognition import find_operators, run_for_sizes
from attnquant.rewrite.buffers import BUFFER_KEY
from attnquant.rewrite.compare import Change, keep_equal
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.expand_grouped import expand_grouped
from attnquant.rewrite.expand_heads import expand_multi_head, expand_packed_weight
from attnquant.rewrite.expand_standard import expand_standard
from attnquant.rewrite.result import Refused, RewriteResult, RewriteRow
from attnquant.rewrite.selection import Sites, wanted
from attnquant.rewrite.subject import Expansion, Subject
from attnquant.roles import PortRole
from attnquant.site import AttentionSite
from attnquant.validity import validate

Feeds = Mapping[str, np.ndarray]

_WRITERS: dict[tuple[str, str], Callable[[Draft, Subject], Expansion]] = {
    ("ai.onnx", "Attention"): expand_standard,
    ("com.microsoft", "MultiHeadAttention"): expand_multi_head,
    ("com.microsoft", "GroupQueryAttention"): expand_grouped,
    ("com.microsoft", "Attention"): expand_packed_weight,
}


def expand(model: models.Source, *, sites: Sites | None = None, feeds: Feeds | None = None) -> RewriteResult:
    """Write out attention operators in plain operators of the model's opset (13 at least; an earlier one is raised).

    Tensors at the operators' ports and outputs keep their names; new nodes and tensors are named after the operator. No
    control flow and no other domain comes in. An operator, or a form of one, that can't be written out is refused with the
    reason, and the others go on. A fully masked row gives zeros, as the specification of ai.onnx Attention asks for.

    :param model: path of an ONNX file, onnx.ModelProto or onnx_ir.Model; it is read and never changed.
    :param sites: ids or AttentionSites to write out; None for every attention operator.
    :param feeds: one set of inputs. With it, the result is compared with the model by running both, sizes that the graph
        does not state are measured, and a site that changes an output is refused.
    :raises ModelError: the model is broken, or a site of `sites` is not in it.
    """
    own = models.load(model)
    models.name_nodes(own)
    validate(own)
    own = opset.upgraded(own)
    models.name_nodes(own)
    operators = _chosen(own, sites, feeds)
    changed, rows = _expanded(own, operators, feeds)
    if feeds is None:
        return RewriteResult(model=changed, rows=tuple(rows))

    def again(kept: frozenset[str]) -> Change:
        return _expanded(own, [pair for pair in operators if pair[1].id in kept], feeds)

    return keep_equal(own, (changed, rows), again, feeds)


def _chosen(own: ir.Model, sites: Sites | None, feeds: Feeds | None) -> list[tuple[Operator, AttentionSite]]:
    found, _ = find_operators(own)
    facts = study(own)
    if feeds is not None and (arrays := run_for_sizes(own, facts, found, [], feeds)):
        facts = study(own, arrays)
    pairs = [(one, site_of(one, facts)) for one in found]
    chosen = wanted(sites, [site for _, site in pairs], "an attention operator")
    return [(one, site) for one, site in pairs if site.id in chosen]


def _expanded(own: ir.Model, chosen: Iterable[tuple[Operator, AttentionSite]], feeds: Feeds | None) -> Change:
    """A copy with these sites written out."""
    return expanded_sites(models.copy(own), [site for _, site in chosen], feeds)


def expanded_sites(copy: ir.Model, chosen: Iterable[AttentionSite], feeds: Feeds | None) -> Change:
    """Write out these sites in a model with named nodes, in place; rows in the order of the graph.

    :param feeds: One set of inputs, by which ranks are measured that the graph does not state.
    """
    sites = {(site.path, site.node): site for site in chosen}
    found = [one for one in find_operators(copy)[0] if (one.path, one.node.name or "") in sites]
    editor, facts, types = Editor(copy), _facts(copy, found, feeds), infer_types(copy)
    rows = []
    for one in found:
        site = sites[one.path, one.node.name or ""]
        rows.append(_row(editor, Subject(operator=one, site=site, facts=facts, types=types)))
    drop_dead_initializers(copy)
    grouped = {site.id for site in sites.values() if site.form.startswith("com.microsoft::GroupQueryAttention@")}
    if any(row.status == "expanded" and row.site in grouped for row in rows):
        copy.metadata_props.pop(BUFFER_KEY, None)  # a Concat makes a present of its own
    return copy, rows


def _facts(copy: ir.Model, operators: Iterable[Operator], feeds: Feeds | None) -> Facts:
    """What is known of the model; one run tells the ranks of operands that the graph does not."""
    facts = study(copy)
    operands = [value for one in operators if one.path == "" for value in one.node.inputs if value is not None]
    unknown = [value for value in operands if facts.rank(value) is None]
    return study(copy, probe.arrays(copy, unknown, feeds)) if unknown and feeds is not None else facts


def _row(editor: Editor, subject: Subject) -> RewriteRow:
    site = subject.site
    try:
        tensors = _write(editor, subject)
    except Refused as reason:
        return RewriteRow(site=site.id, node=site.node, status="refused", reasons=(str(reason),))
    return RewriteRow(site=site.id, node=site.node, status="expanded", tensors=tensors)


def _write(editor: Editor, subject: Subject) -> dict[PortRole, str]:
    one, row = subject.operator, subject.operator.row
    if subject.site.path:
        raise Refused("inside control flow")
    writer = _WRITERS.get((row.domain, row.op_type))
    if writer is None:
        raise Refused(f"{row.domain}::{row.op_type} is not written out: {row.reason or 'no plain form of it is known here'}")
    dtype = subject.dtype(one.node.inputs[0]) if one.node.inputs[0] is not None else None
    if dtype is None:
        raise Refused("the element type of the query is not known")
    draft = Draft(editor, one.node, dtype)
    made = writer(draft, subject)
    outputs: dict[int, ir.Value] = {}
    for index, output in enumerate(one.node.outputs):
        value = made.outputs.get(index)
        if value is not None and (output.uses() or output.is_graph_output()):
            outputs[index] = value
        elif output.uses() or output.is_graph_output():
            raise Refused(f"output {row.outputs[index].name!r} is not written out")
    draft.put(outputs)
    product = made.product
    named = {
        PortRole.QUERY: made.query, PortRole.KEY: made.key, PortRole.SCORES: product.scores,
        PortRole.PROBABILITIES: product.probabilities, PortRole.VALUE: made.value, PortRole.CONTEXT: product.context,
    }
    return {role: tensor_name(value) for role, value in named.items()}
