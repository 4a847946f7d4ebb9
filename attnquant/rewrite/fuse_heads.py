"""From a decomposed attention to com.microsoft MultiHeadAttention."""

from typing import Any

import onnx_ir as ir

from attnquant.rewrite import landing, masking
from attnquant.rewrite.biased import attention_bias, zeroed
from attnquant.rewrite.result import Refused
from attnquant.rewrite.shop import Job, check_batch, count, probabilities_shown, replaced, with_cache
from attnquant.rewrite.views import View, flat, heads_first, heads_last

Places = dict[ir.Value, ir.Value]
DOMAIN = "com.microsoft"


def fuse_heads(job: Job) -> Places:
    """Draft the operator: {old tensor: new}. Raises Refused for softcap, sinks, and probabilities that are read."""
    reading, facts, draft = job.reading, job.facts, job.draft
    if reading.softcap:
        raise Refused("softcap: com.microsoft MultiHeadAttention has none (runtime)")
    if reading.sinks is not None or reading.plus_one:
        raise Refused("attention sinks: com.microsoft MultiHeadAttention has none (runtime)")
    if probabilities_shown(job):
        raise Refused("the probabilities are read: com.microsoft MultiHeadAttention shows scores only (runtime)")
    check_batch(job, reading.key, reading.value)
    heads = count(job, reading.query, reading.site.q_heads)
    cache = with_cache(job, reading.key, reading.value)
    new = (reading.key, reading.value) if cache is None else cache.new
    past = (None, None) if cache is None else cache.past
    query = heads_last(draft, facts, reading.query, "query")
    key, value = _keys_and_values(job, new, heads, cached=cache is not None)
    bias, causal = attention_bias(job, replaced(reading, *new), past[0])
    attributes: dict[str, Any] = {"num_heads": heads, "scale": reading.scale}
    if causal:
        attributes["unidirectional"] = 1
    inputs = [query, key, value, None, None, bias, *past]
    made = draft.operator(
        DOMAIN, "MultiHeadAttention", inputs, "attention", outputs=1 if cache is None else 3, **attributes
    )
    places = landing.land_flat(draft, facts, reading, zeroed(job, made[0], bias), heads)
    if cache is not None:
        places |= dict(zip(cache.present, made[1:3], strict=True))
    return places


def _keys_and_values(job: Job, views: tuple[View, View], heads: int, *, cached: bool) -> list[ir.Value]:
    """Both with heads and channels in one axis; or, where they lie that way already, both with the heads first."""
    draft, facts = job.draft, job.facts
    merged = all(view.rank == 3 or flat(facts, view) is not None for view in views)
    lone = [count(job, view, None if view.rank > 3 else 1) if view.rank >= 4 else heads for view in views]
    if any(one != heads for one in lone):
        return [_spread(job, view, heads, word) for view, word in zip(views, ("key", "value"), strict=True)]
    sizes = {masking.size(facts, view, -1) for view in views}
    if merged or cached or any(view.rank != 4 for view in views) or len(sizes) > 1 or None in sizes:
        return [heads_last(draft, facts, view, word) for view, word in zip(views, ("key", "value"), strict=True)]
    return [heads_first(draft, view, word) for view, word in zip(views, ("key", "value"), strict=True)]


def _spread(job: Job, view: View, heads: int, word: str) -> ir.Value:
    """One head of K or V for all query heads, copied: the operator takes as many as queries have."""
    own = count(job, view, None)
    value = heads_first(job.draft, view, word)
    if own == heads:
        return value
    if own != 1:
        raise Refused(f"{own} heads of K and V for {heads} of Q (runtime): use GroupQueryAttention or ai.onnx Attention")
    return job.draft.op("Expand", [value, job.draft.ints([1, heads, 1, 1], "all_heads")], f"{word}_all_heads")
