"""From a decomposed attention to ai.onnx Attention of opset 23 or 24."""

from typing import Any

import onnx_ir as ir

from attnquant.rewrite import caches, landing, masking
from attnquant.rewrite.result import Refused
from attnquant.rewrite.shop import (
    Job,
    check_batch,
    count,
    kv_heads,
    probabilities_shown,
    replaced,
    with_cache,
    without_repeat,
)
from attnquant.rewrite.views import View, flat, heads_first, heads_last

Places = dict[ir.Value, ir.Value]


def fuse_standard(job: Job) -> Places:
    """Draft the operator: {old tensor: new}. Raises Refused for sinks, which the operator does not have."""
    reading, facts, draft = job.reading, job.facts, job.draft
    if reading.sinks is not None or reading.plus_one:
        raise Refused("attention sinks: ai.onnx Attention has none (specification)")
    shown = probabilities_shown(job)
    key, value = without_repeat(job)
    check_batch(job, key, value)
    cache = with_cache(job, key, value)
    new_key, new_value = (key, value) if cache is None else cache.new
    past = (None, None) if cache is None else cache.past
    views = (reading.query, new_key, new_value)
    wide = _is_flat(job, views)
    words = ("query", "key", "value")
    operands = [
        heads_last(draft, facts, view, word) if wide else heads_first(draft, view, word)
        for view, word in zip(views, words, strict=True)
    ]
    mask, causal = _mask(job, replaced(reading, new_key, new_value), past[0])
    attributes: dict[str, Any] = {"scale": reading.scale}
    if reading.softcap:
        attributes["softcap"] = reading.softcap
    if causal:
        attributes["is_causal"] = 1
    heads = count(job, reading.query, reading.site.q_heads) if wide else 0
    if wide:
        attributes |= {"q_num_heads": heads, "kv_num_heads": count(job, new_key, kv_heads(job))}
    if shown:
        attributes["qk_matmul_output_mode"] = 3
    outputs = 4 if shown else 3 if cache is not None else 1
    made = draft.operator("", "Attention", [*operands, mask, *past], "attention", outputs=outputs, **attributes)
    return _places(job, made, cache, heads, wide=wide, shown=shown)


def _places(
    job: Job, made: list[ir.Value], cache: caches.Cache | None, heads: int, *, wide: bool, shown: bool
) -> Places:
    reading, facts, draft = job.reading, job.facts, job.draft
    if wide:
        places = landing.land_flat(draft, facts, reading, made[0], heads)
    else:
        places = landing.land_heads_first(draft, facts, reading, made[0])
    if cache is not None:
        places |= dict(zip(cache.present, made[1:3], strict=True))
    if shown:
        product = reading.match.values
        old = product.product.value(product.side)
        if facts.rank(old) != 4 or reading.match.scores.axis != -1 or reading.turned:
            raise Refused("the probabilities are read in a layout that the operator does not show")
        places[old] = made[3]
    return places


def _is_flat(job: Job, views: tuple[View, View, View]) -> bool:
    """All three operands are there with heads and channels in one axis, or have no axis of heads at all."""
    if all(view.rank == 3 for view in views):
        return True
    sources = [flat(job.facts, view) if view.rank == 4 else None for view in views]
    return None not in sources and _has_width(sources[2])


def _has_width(value: ir.Value | None) -> bool:
    """Whether the width of V is not declared as unknown: onnx (1.23) then infers a context of width 0, and nothing loads."""
    return value is not None and (value.shape is None or isinstance(value.shape[-1], int))


def _mask(job: Job, reading: Any, past: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """(mask, is_causal): a boolean mask where an empty row gives zeros anyway, else a bias that keeps its mean."""
    site, draft = job.masks(reading, past), job.draft
    if not reading.tail:
        return None, False
    terms = masking.terms(site)
    if terms is None:
        mask = masking.replayed(draft, site)
        if not (reading.zero_rows or job.allow_dead_row_change):
            mask = masking.raised(draft, mask, keep_infinite=False)
        return mask, False
    if not terms:
        return None, False
    if past is None and masking.is_causal(site, terms):
        return None, True
    closed = reading.zero_rows or job.allow_dead_row_change or masking.never_empty(site, terms)
    plain = all(term.kind != "bias" for term in terms)
    if plain and (closed or all(term.fill == float("-inf") for term in terms)):
        return masking.boolean_mask(draft, site, terms), False
    return masking.bias_mask(draft, site, terms, lowest=not job.allow_dead_row_change), False
