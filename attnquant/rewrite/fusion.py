"""From any form of attention to one operator: Attention, MultiHeadAttention or GroupQueryAttention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import opset
from attnquant.dtypes import infer_types
from attnquant.emission.clean import drop_dead_initializers
from attnquant.emission.editor import Editor
from attnquant.errors import ModelError
from attnquant.graph import tensor_name
from attnquant.patterns import sdpa
from attnquant.patterns.facts import Facts
from attnquant.patterns.inference import study
from attnquant.patterns.sdpa import Match
from attnquant.patterns.search import search
from attnquant.recognition import recognize, run_for_sizes
from attnquant.rewrite import landing, target_form
from attnquant.rewrite.buffers import require_sharing, share_buffers
from attnquant.rewrite.compare import Change, keep_equal, keep_loading
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.expansion import expanded_sites
from attnquant.rewrite.fuse_grouped import fuse_grouped
from attnquant.rewrite.fuse_heads import fuse_heads
from attnquant.rewrite.fuse_standard import fuse_standard
from attnquant.rewrite.reading import read
from attnquant.rewrite.result import Refused, RewriteResult, RewriteRow
from attnquant.rewrite.selection import Sites, wanted
from attnquant.rewrite.shop import Job
from attnquant.rewrite.target_form import Target
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite
from attnquant.validity import require_loading, validate

Feeds = Mapping[str, np.ndarray]
Emitter = Callable[[Job], dict[ir.Value, ir.Value]]

_LAST_WITH_KERNEL = 24
"""ONNX Runtime 1.32 inlines Attention of opset 25 into some sixty nodes."""

_EMITTERS: dict[str, Emitter] = {
    "ai.onnx::Attention": fuse_standard,
    "com.microsoft::MultiHeadAttention": fuse_heads,
    "com.microsoft::GroupQueryAttention": fuse_grouped,
}


def fuse(
    model: models.Source,
    *,
    to: str,
    sites: Sites | None = None,
    feeds: Feeds | None = None,
    allow_dead_row_change: bool = False,
    shared_cache: bool = False,
) -> RewriteResult:
    """Turn attentions into one operator: written-out ones, and those of other operators by way of their plain form.

    Masks, causal masks, scale, softcap, grouped heads and caches go into the operator as far as it takes them; a repeat_kv
    in front is dropped where it takes grouped heads, and a Concat of the cache moves inside where nothing that the operator
    reads waits for it. What the operator can't express is refused for that site with the reason, and the others go on.
    Tensors that stay keep their names. The opset is raised where the operator needs it.

    :param model: path of an ONNX file, onnx.ModelProto or onnx_ir.Model; it is read and never changed.
    :param to: "ai.onnx::Attention@23", "ai.onnx::Attention@24", "com.microsoft::MultiHeadAttention" or
        "com.microsoft::GroupQueryAttention".
    :param sites: ids or AttentionSites; None for all.
    :param feeds: one set of inputs. With it, the result is compared with the model by running both (1e-4 of an output's
        largest value, 2e-3 in half precision), sizes that the graph does not state are measured, and a site that changes an
        output is refused. Without it, the result is only loaded.
    :param allow_dead_row_change: what a row gives that sees no key may change: smaller graphs, where no such rows occur.
    :param shared_cache: GroupQueryAttention only: the number of past tokens follows from the width of the mask input, so
        that a generation loop may bind one preallocated buffer as past and as present, which the runtime then does not copy.
    :raises ModelError: the model is broken, `to` names no operator, a site of `sites` is not in the model, or its caches
        can't be shared.
    """
    target = target_form.parse(to)
    if shared_cache:
        require_sharing(target.form)
    own = models.load(model)
    models.name_nodes(own)
    validate(own)
    found = recognize(own, feeds=feeds).sites
    chosen = wanted(sites, found, "an attention")
    job = _Fusion(
        own=own, base=_raised(own, target), target=target, emit=_EMITTERS[target.form], feeds=feeds,
        sites=tuple(site for site in found if site.id in chosen), allow_dead_row_change=allow_dead_row_change,
        shared_cache=shared_cache,
    )
    made = job.fused(frozenset(site.id for site in job.sites))
    made = keep_loading(own, made, job.fused)
    if feeds is None:
        return RewriteResult(model=made[0], rows=tuple(made[1]))
    return keep_equal(own, made, job.fused, feeds)


def _raised(own: ir.Model, target: Target) -> ir.Model:
    """The model at the opset that the operator needs, with the same node names."""
    try:
        return opset.upgraded(own, target.opset)
    except ModelError:
        require_loading(own)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fusion:
    own: ir.Model
    base: ir.Model
    target: Target
    emit: Emitter
    feeds: Feeds | None
    sites: tuple[AttentionSite, ...]
    allow_dead_row_change: bool
    shared_cache: bool

    def fused(self, kept: frozenset[str]) -> Change:
        """A copy with these sites fused, and a row for every chosen site among them."""
        version = self.base.graph.opset_imports.get("", 0)
        if self.target.domain == "ai.onnx" and version > _LAST_WITH_KERNEL:
            reason = f"the model is of opset {version}: no kernel for Attention beyond opset {_LAST_WITH_KERNEL} (runtime)"
            return self.base, [_refused(site, reason) for site in self.sites if site.id in kept]
        sites = [site for site in self.sites if site.id in kept]
        operators = [site for site in sites if site.form != DECOMPOSED and not self._is_settled(site)]
        refused: dict[str, RewriteRow] = {}
        while True:
            changed, rows = self._attempt(sites, operators)
            opened = {site.id for site in operators}
            back = {row.site: row for row in rows if row.status == "refused" and row.site in opened}
            if not back:
                by_site = {**{row.site: row for row in rows}, **refused}
                return changed, [by_site[site.id] for site in self.sites if site.id in kept]
            by_id = {site.id: site for site in operators if self._is_target(site)}
            refused |= {name: _settled(by_id[name]) if name in by_id else row for name, row in back.items()}
            operators = [site for site in operators if site.id not in back]
            sites = [site for site in sites if site.id not in back]

    def _is_target(self, site: AttentionSite) -> bool:
        form, _, version = site.form.partition("@")
        return form == self.target.form and (self.target.domain != "ai.onnx" or int(version) <= self.target.opset)

    def _is_settled(self, site: AttentionSite) -> bool:
        """The operator already, without a repeat_kv or a cache in front that could go in."""
        return self._is_target(site) and (bool(site.path) or ((site.kv_repeat or 1) == 1 and site.past != "concat"))

    def _attempt(self, sites: list[AttentionSite], operators: list[AttentionSite]) -> Change:
        copy = models.copy(self.base)
        rows: list[RewriteRow] = []
        names: dict[str, AttentionSite] = {site.node: site for site in sites if site.form == DECOMPOSED and not site.path}
        if operators:
            copy, opened = expanded_sites(copy, operators, self.feeds)
            for site, row in zip(operators, opened, strict=True):
                if row.status == "refused":  # an operator that can't become another one stays as it was
                    rows.append(replace(row, reasons=(f"not written out first: {row.reasons[0]}",)))
                else:
                    names[_context_node(copy, row)] = site
        rows += [_settled(site) for site in sites if self._is_target(site) and site not in operators]
        rows += [_inside(site) for site in sites if site.form == DECOMPOSED and site.path]
        bench = _Bench(fusion=self, copy=copy, names=names)
        rows += bench.run()
        if self.shared_cache and any(row.status == "fused" for row in rows):  # else the rows say why not
            share_buffers(copy)
        done = {row.site for row in rows}
        rows += [_lost(site) for site in sites if site.id not in done]
        return copy, rows


def _context_node(copy: ir.Model, row: RewriteRow) -> str:
    """Name of the node that makes the context of a site that was written out."""
    wanted_name = row.tensors[PortRole.CONTEXT]
    return next(node.name or "" for node in copy.graph for value in node.outputs if value.name == wanted_name)


def _settled(site: AttentionSite) -> RewriteRow:
    ports = {role: port.tensor for role, port in site.ports.items()}
    return RewriteRow(site=site.id, node=site.node, status="fused", reasons=("it is this operator already",), tensors=ports)


def _inside(site: AttentionSite) -> RewriteRow:
    return RewriteRow(site=site.id, node=site.node, status="refused", reasons=("inside control flow",))


def _lost(site: AttentionSite) -> RewriteRow:
    reason = "not found any more once the opset was raised or the operators were written out"
    return RewriteRow(site=site.id, node=site.node, status="refused", reasons=(reason,))


@dataclass(slots=True, kw_only=True)
class _Bench:
    """One copy in work."""

    fusion: _Fusion
    copy: ir.Model
    names: dict[str, AttentionSite]

    def run(self) -> list[RewriteRow]:
        copy, fusion = self.copy, self.fusion
        facts, matches = self._study()
        types, editor, shared = infer_types(copy), Editor(copy), dict[object, ir.Value]()
        rows = []
        for match in matches:
            node = match.values.product.node
            original = self.names.get(facts.name(node))
            if original is None or facts.paths.get(node, "") or node.graph is not copy.graph:
                continue
            if match.scores.product.node.graph is not copy.graph:
                rows.append(_refused(original, "it has the scores of an attention that was fused before it"))
                continue
            site = sdpa.site(facts, match)
            try:
                dtype = types.dtype(match.values.product.value(match.values.side))
                if dtype is None:
                    raise Refused("the element type of the attention is not known")
                job = Job(draft=Draft(editor, node, dtype), facts=facts, types=types, reading=read(facts, match, site),
                          shared=shared, allow_dead_row_change=fusion.allow_dead_row_change)
                places = fusion.emit(job)
            except Refused as reason:
                rows.append(_refused(original, str(reason)))
                continue
            rows.append(_land(job, places, original))
            copy.opset_imports.setdefault("" if fusion.target.domain == "ai.onnx" else fusion.target.domain, 1)
        copy.graph.sort()
        drop_dead_initializers(copy)
        return rows

    def _study(self) -> tuple[Facts, list[Match]]:
        facts = study(self.copy)
        matches, _ = search(facts, self.copy)
        feeds = self.fusion.feeds
        if feeds is not None and (arrays := run_for_sizes(self.copy, facts, [], matches, feeds)):
            facts = study(self.copy, arrays)
            matches, _ = search(facts, self.copy)
        return facts, matches


def _refused(site: AttentionSite, reason: str) -> RewriteRow:
    return RewriteRow(site=site.id, node=site.node, status="refused", reasons=(reason,))


def _land(job: Job, places: dict[ir.Value, ir.Value], original: AttentionSite) -> RewriteRow:
    node = next(node for node in job.draft.nodes if node.op_type.endswith("Attention"))
    job.shared.update(job.draft.shared)
    landing.put(job.draft, job.facts, places)
    ports = zip((PortRole.QUERY, PortRole.KEY, PortRole.VALUE), node.inputs[:3], strict=True)
    tensors = {role: tensor_name(value) for role, value in ports}
    tensors[PortRole.CONTEXT] = tensor_name(node.outputs[0])
    notes = tuple(job.draft.notes)
    return RewriteRow(site=original.id, node=original.node, status="fused", reasons=notes, tensors=tensors)
