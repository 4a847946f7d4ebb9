"""com.microsoft GroupQueryAttention in numpy, in float64, written from the schema that ONNX Runtime publishes."""

import numpy as np

from attnquant.conformance.contrib import merge_heads, rotate, scaled, softmax, split_heads
from attnquant.conformance.oracle import Array


def group_query_attention(
    query: Array,
    key: Array | None,
    value: Array | None,
    past_key: Array | None,
    past_value: Array | None,
    seqlens_k: Array,
    total_sequence_length: Array,
    cos_cache: Array | None = None,
    sin_cache: Array | None = None,
    position_ids: Array | None = None,
    attention_bias: Array | None = None,
    head_sink: Array | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    do_rotary: int = 0,
    rotary_interleaved: int = 0,
    local_window_size: int = -1,
    smooth_softmax: int = 0,
    causal: int = 1,
    qk_output: int = 0,
    k_quant_type: str = "NONE",
    v_quant_type: str = "NONE",
    kv_cache_bit_width: int = 8,
) -> tuple[Array, ...]:
    """(output, present_key, present_value, output_qk); what is not specified is masked.

    :param query: (B, S, H * D), or packed with K and V; past (B, kv heads, P, D), int8 with scales where it is quantized.
    :param seqlens_k: int32 (B,), keys of each sample less one; total_sequence_length int32, the most of them.
    """
    parts = _parts(query, key, value, num_heads, kv_num_heads)
    batch, new, total = query.shape[0], query.shape[1], int(np.asarray(total_sequence_length).reshape(()))
    lengths = np.asarray(seqlens_k).reshape(-1).astype(np.int64) + 1
    start = np.zeros_like(lengths) if new == total else lengths - new
    places = start[:, None] + np.arange(new)[None, :]
    heads = [part.astype(np.float64) for part in parts]
    if do_rotary and cos_cache is not None and sin_cache is not None:
        turns = places if position_ids is None else position_ids
        heads[:2] = [rotate(part, cos_cache, sin_cache, turns, interleaved=bool(rotary_interleaved)) for part in heads[:2]]
    keys = _cache(past_key, heads[1], start, total, k_scale)
    values = _cache(past_value, heads[2], start, total, v_scale)
    columns = np.arange(keys.shape[2])
    copies = num_heads // kv_num_heads
    wide = [np.repeat(_floats(item, by), copies, axis=1)[:, :, :total] for item, by in ((keys, k_scale), (values, v_scale))]
    scores = scaled(heads[0], wide[0], scale)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    if attention_bias is not None:
        scores = scores + attention_bias[..., :total]
    rows = places[:, None, :, None]
    seen = columns[None, None, None, :total] < lengths[:, None, None, None]
    if causal:
        seen = seen & (columns[:total] <= rows)
    if local_window_size >= 0:
        seen = seen & (columns[:total] > rows - local_window_size)
    masked = np.where(seen, scores, -np.inf)
    sink = head_sink if head_sink is not None else (np.zeros(num_heads) if smooth_softmax else None)
    real = places < lengths[:, None]  # right of a shorter prompt there is padding, and no row of it is specified
    with np.errstate(invalid="ignore"):
        probabilities = softmax(masked, sink)
    context = np.where(real[:, None, :, None], np.nan_to_num(probabilities), 0.0) @ wide[1]
    unreal = np.broadcast_to(~real[:, :, None], (batch, new, num_heads * context.shape[-1]))
    output = np.ma.array(merge_heads(context).astype(query.dtype), mask=unreal)
    shown = np.where(seen, scores, 0.0) if qk_output != 2 else np.nan_to_num(probabilities)
    hidden = np.broadcast_to(~(real[:, None, :, None] & (seen | (qk_output == 2))), shown.shape)
    unfilled = np.broadcast_to((columns[None, :] >= lengths[:, None])[:, None, :, None], keys.shape)
    caches = [np.ma.array(item if by is not None else item.astype(query.dtype), mask=unfilled)
              for item, by in ((keys, k_scale), (values, v_scale))]
    return output, *caches, np.ma.array(shown.astype(query.dtype), mask=hidden)


def _parts(query: Array, key: Array | None, value: Array | None, heads: int, kv_heads: int) -> list[Array]:
    if key is None or value is None:
        size = query.shape[-1] // (heads + 2 * kv_heads)
        query, key, value = np.split(query, [heads * size, (heads + kv_heads) * size], axis=-1)
    return [split_heads(query, heads), split_heads(key, kv_heads), split_heads(value, kv_heads)]


def _cache(past: Array | None, new: Array, start: Array, total: int, by: Array | None) -> Array:
    """Past with the new keys or values where each sample's begin; as long as past or total, whichever is more."""
    batch, heads, count, size = new.shape
    length = max(total, 0 if past is None else past.shape[2])
    written = new if by is None else np.clip(np.round(new / by), -128, 127)
    cache = np.zeros((batch, heads, length, size), np.float64)
    if past is not None:
        cache[:, :, : past.shape[2]] = past
    for sample, first in enumerate(start):
        cache[sample, :, first : first + count] = written[sample, :, : max(0, length - first)]
    return cache if by is None else cache.astype(np.int8)


def _floats(cache: Array, by: Array | None) -> Array:
    return cache.astype(np.float64) if by is None else cache.astype(np.float64) * by
