"""From a decomposed attention to com.microsoft GroupQueryAttention: a decoder's layer with its cache, or a prompt's."""

from typing import Any

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import inputs_at
from attnquant.rewrite import caches, landing, rotary_inside
from attnquant.rewrite.biased import attention_bias, zeroed
from attnquant.rewrite.masking import size
from attnquant.rewrite.reading import with_views
from attnquant.rewrite.result import Refused
from attnquant.rewrite.shop import (
    Job,
    check_batch,
    count,
    kv_heads,
    probabilities_shown,
    with_cache,
    without_repeat,
)
from attnquant.rewrite.views import View, heads_last

Places = dict[ir.Value, ir.Value]
DOMAIN = "com.microsoft"
MULTIPLE = 8
"""The runtime takes head sizes that are multiples of this."""


def fuse_grouped(job: Job) -> Places:
    """Draft the operator: {old tensor: new}. Raises Refused for cross attention and for heads that the runtime lacks.

    All masks go into attention_bias, left padding included, and seqlens_k says that every sample has all keys: the cache is
    then what Concat made. The operator's own causal mask is on only where a constant mask is exactly that.
    """
    reading, facts, draft = job.reading, job.facts, job.draft
    if probabilities_shown(job):
        raise Refused("the probabilities are read: they are not fused to com.microsoft GroupQueryAttention")
    key, value = without_repeat(job)
    check_batch(job, key, value)
    cache = with_cache(job, key, value)
    new = (key, value) if cache is None else cache.new
    past = (None, None) if cache is None else cache.past
    heads, own = count(job, reading.query, reading.site.q_heads), count(job, new[0], kv_heads(job))
    _check(job, new, heads, own)
    turning = rotary_inside.inside(job, reading.query, new[0], past[0])
    views = (reading.query, *new) if turning is None else (turning.query, turning.key, new[1])
    words = ("query", "key", "value")
    operands = [heads_last(draft, facts, view, word) for view, word in zip(views, words, strict=True)]
    bias, causal = attention_bias(job, with_views(reading, *views), past[0])
    tables = (None, None) if turning is None else (turning.cos, turning.sin)
    inputs = [*operands, *past, *_lengths(job, operands[0], past[0], bias), *tables, None, bias, _sink(job, heads)]
    attributes: dict[str, Any] = {"num_heads": heads, "kv_num_heads": own, "scale": reading.scale}
    if reading.softcap:
        attributes["softcap"] = reading.softcap
    if turning is not None:
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(turning.interleaved)}
    if reading.plus_one:
        attributes["smooth_softmax"] = 1
    if not causal and size(facts, reading.query, -2) != 1:  # one query sees all keys either way
        attributes["causal"] = 0
    made = draft.operator(
        DOMAIN, "GroupQueryAttention", inputs, "attention", outputs=1 if cache is None else 3, **attributes
    )
    places = landing.land_flat(draft, facts, reading, zeroed(job, made[0], bias), heads)
    if cache is not None:
        if size(facts, reading.query, -2) != 1 and size(facts, reading.query, 0) != 1:
            draft.notes.append("several new tokens behind a cache run at batch 1 only (runtime)")
        places |= dict(zip(cache.present, made[1:3], strict=True))
    return places


def _check(job: Job, new: tuple[View, View], heads: int, own: int) -> None:
    facts, site, dtype = job.facts, job.reading.site, job.draft.dtype
    if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise Refused(f"{dtype}: com.microsoft GroupQueryAttention takes float32 and float16 on CPU (runtime)")
    if heads % own:
        raise Refused(f"{own} heads of K and V for {heads} of Q: no multiple (runtime)")
    width, other = (known if isinstance(known := size(facts, view, -1), int) else None for view in new)
    width, other = width or site.qk_head_dim, other or site.v_head_dim
    if width is None or width != other:
        raise Refused(f"heads of K of size {width} and of V of size {other}: the operator has one head size (runtime)")
    if width % MULTIPLE:
        raise Refused(f"a head size of {width}: the operator takes multiples of {MULTIPLE} (runtime)")
    queries, keys = size(facts, job.reading.query, -2), size(facts, new[0], -2)
    if queries is None or queries != keys:
        raise Refused("K has other positions than Q and is no Concat of a past and new keys: no cross attention (runtime)")


def _lengths(
    job: Job, flat: ir.Value, past: ir.Value | None, bias: ir.Value | None
) -> tuple[ir.Value, ir.Value]:
    """(seqlens_k, total_sequence_length), int32: the same for all layers of equal sizes or one bias, made once.

    :param flat: Q, (batch, S, heads * size).
    """
    draft, query = job.draft, job.reading.query
    batch = size(job.facts, query, 0) if query.rank == 4 else None
    lengths = size(job.facts, query, -2), caches.length(job.facts, past)
    key = ("lengths", batch, lengths if bias is None else bias)  # a bias is as wide as there are keys
    if batch is not None and None not in lengths and key in job.shared:
        return job.shared[key], job.shared[key, "total"]
    rows = draft.dim(flat, 1, "queries")
    whole = rows if past is None else draft.op("Add", [draft.dim(past, 2, "past"), rows], "all_keys")
    last = draft.cast(draft.op("Sub", [whole, draft.integer(1, "one")], "last_key"), ir.DataType.INT32, "last_key_int32")
    seqlens = draft.op("Expand", [last, draft.dims(flat, 0, "batch")], "seqlens_k")
    total = draft.cast(whole, ir.DataType.INT32, "total_sequence_length")
    draft.shared |= {key: seqlens, (key, "total"): total}
    return seqlens, total


def _sink(job: Job, heads: int) -> ir.Value | None:
    """One logit for each head, (heads,)."""
    sink = job.reading.sinks
    while sink is not None and (node := sink.producer()) is not None and is_onnx(node, "Expand", "Identity"):
        sink = inputs_at(node, 0)
    if sink is None:
        return None
    sizes = [job.facts.axis_size(sink, axis) for axis in range(job.facts.rank(sink) or 0)]
    if sizes.count(1) + 1 != len(sizes) or heads not in sizes:
        raise Refused(f"attention sinks of sizes {sizes}: expected one for each of {heads} heads")
    return job.draft.reshape(sink, [-1], "head_sink")
