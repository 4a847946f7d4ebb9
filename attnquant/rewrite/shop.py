"""What every emitter gets: the graph's facts, the reading of one attention, and the checks that all operators share."""

from dataclasses import dataclass, replace

import onnx_ir as ir

from attnquant.dtypes import TypeMap
from attnquant.graph import is_onnx
from attnquant.patterns.facts import Facts
from attnquant.rewrite import caches, masking
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.reading import Reading
from attnquant.rewrite.result import Refused
from attnquant.rewrite.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One attention to be fused."""

    draft: Draft
    facts: Facts
    types: TypeMap
    reading: Reading
    shared: dict[object, ir.Value]
    allow_dead_row_change: bool

    def masks(self, reading: Reading | None = None, past: ir.Value | None = None) -> masking.Site:
        """The masks of the reading, or of one with other operands."""
        return masking.Site(
            facts=self.facts, types=self.types, reading=reading or self.reading, shared=self.shared,
            allow_dead_row_change=self.allow_dead_row_change, past=past,
        )


def count(job: Job, view: View, stated: int | None) -> int:
    """Heads of an operand. Raises Refused where the graph does not say."""
    if view.rank == 3 and not job.reading.split:
        return 1
    if view.rank == 2:
        return 1
    known = job.facts.axis_size(view.value, view.order[view.rank - 3])
    heads = known if isinstance(known, int) else stated
    if heads is None:
        raise Refused("the graph does not say how many heads there are: pass one set of inputs as feeds")
    return heads


def check_batch(job: Job, *views: View) -> None:
    """Raise Refused where K or V have one sample for the whole batch."""
    sizes = [job.facts.axis_size(view.value, view.order[0]) for view in (job.reading.query, *views) if view.rank == 4]
    if len(set(sizes)) > 1 and 1 in sizes[1:]:
        raise Refused("K or V is broadcast over the batch: operators take one of each sample (specification)")


def probabilities_shown(job: Job) -> bool:
    """Something else reads the probabilities. Raises Refused where something else reads what no operator shows."""
    reading, shown = job.reading, False
    members = set(reading.site.nodes)
    last = reading.match.values.product.value(reading.match.values.side)
    for node in job.draft.editor.graph:
        if node.name not in members or node is job.draft.reader:
            continue
        for value in node.outputs:
            others = [use.node for use in value.uses() if use.node.name not in members and not is_onnx(use.node, "Shape")]
            if not others and not value.is_graph_output():
                continue
            if value is not last:
                what = f"{others[0].op_type} {others[0].name!r}" if others else "the caller"
                raise Refused(f"{what} reads {value.name!r}, which no operator shows")
            shown = True
    return shown


def without_repeat(job: Job) -> tuple[View, View]:
    """K and V in front of repeat_kv, where both have the same."""
    key, value = job.reading.key, job.reading.value
    found = caches.ungrouped(job.facts, key), caches.ungrouped(job.facts, value)
    if found[0] is None or found[1] is None or found[0][1] != found[1][1] or found[1][0].factor != 1.0:
        return key, value
    if found[0][0].factor != key.factor:
        return key, value
    return found[0][0], found[1][0]


def kv_heads(job: Job) -> int | None:
    """Heads of K and V in front of repeat_kv, as recognition knows them."""
    site = job.reading.site
    return None if site.kv_heads is None else site.kv_heads // (site.kv_repeat or 1)


def with_cache(job: Job, key: View, value: View) -> caches.Cache | None:
    """The caches in front of K and V that the operator may take over: nothing else that it reads may wait for them."""
    found = caches.cache(job.facts, key, value)
    if found is None:
        return None
    reading = job.reading
    read = [step.node.inputs[step.other] for step in reading.tail if step.other is not None]
    others = [item for step in reading.tail for index, item in enumerate(step.node.inputs) if index != step.index]
    inputs = [reading.query.value, *found.past, *(view.value for view in found.new), *read, *others, reading.sinks]
    return None if caches.depend(inputs, found.present) else found


def replaced(reading: Reading, key: View, value: View) -> Reading:
    """The reading with other views of K and V."""
    return replace(reading, key=key, value=value)
