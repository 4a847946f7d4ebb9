"""Attention operators of com.microsoft in numpy, in float64, written from the schemas that ONNX Runtime publishes.

Where a schema leaves something open (padding, unused places of a cache) the result is masked (numpy.ma): anything is right.
"""

from collections.abc import Sequence

import numpy as np

from attnquant.conformance.oracle import Array

Arrays = tuple[Array, ...]


def multi_head_attention(
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    bias: Array | None = None,
    key_padding_mask: Array | None = None,
    attention_bias: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    mask_filter_value: float = -10000.0,
) -> Arrays:
    """(output, present_key, present_value, qk) of com.microsoft MultiHeadAttention.

    :param query: (B, S, H * D), or packed (B, S, H, 3, D).
    :param key: (B, T, H * D) or (B, H, T, D), or packed with value (B, T, H, 2, D); value likewise.
    :param key_padding_mask: int32 (B,) lengths, (B, T) or (B, S, T); 0 is padding, which gets mask_filter_value.
    """
    parts = _unpacked(query, key, value)
    if bias is not None:
        cuts = np.cumsum([num_heads * _width(part, num_heads) for part in parts[:2]])
        shares = np.split(bias, cuts)
        parts = [part if part.ndim == 4 else part + share for part, share in zip(parts, shares, strict=True)]
    heads = [part if part.ndim == 4 else split_heads(part, num_heads) for part in parts]
    keys, values = _joined(past_key, heads[1]), _joined(past_value, heads[2])
    sizes = (*heads[0].shape[:3], keys.shape[2])
    added = np.zeros(sizes) if attention_bias is None else np.broadcast_to(attention_bias, sizes).astype(np.float64)
    added = added + np.where(kept(key_padding_mask, sizes[3]), 0.0, mask_filter_value)
    if unidirectional:
        added = added + np.where(_before(sizes, sizes[3] - sizes[2]), 0.0, -np.inf)
    masked = scaled(heads[0], keys, scale) + added
    return merge_heads(softmax(masked) @ values).astype(query.dtype), keys, values, masked.astype(query.dtype)


def packed_attention(
    input: Array,
    weights: Array,
    bias: Array | None = None,
    mask_index: Array | None = None,
    past: Array | None = None,
    attention_bias: Array | None = None,
    *,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    mask_filter_value: float = -10000.0,
    qkv_hidden_sizes: Sequence[int] | None = None,
) -> Arrays:
    """(output, present) of com.microsoft Attention: one projection for Q, K and V.

    :param input: (B, S, E); weights (E, sum of widths); past (2, B, H, P, D).
    :param mask_index: int32, (B,) ends, (2 B,) ends and starts, (B, T) or (B, S, T) with 0 for padding.
    """
    projected = input.astype(np.float64) @ weights.astype(np.float64) + (0.0 if bias is None else bias)
    widths = qkv_hidden_sizes or [weights.shape[1] // 3] * 3
    query, key, value = (split_heads(part, num_heads) for part in np.split(projected, np.cumsum(widths)[:2], axis=-1))
    if past is not None:
        key, value = _joined(past[0], key), _joined(past[1], value)
    sizes = (*query.shape[:3], key.shape[2])
    added = np.zeros(sizes) if attention_bias is None else np.broadcast_to(attention_bias, sizes).astype(np.float64)
    added = added + np.where(kept(mask_index, sizes[3], batch=sizes[0]), 0.0, mask_filter_value)
    if unidirectional:
        added = added + np.where(_before(sizes, sizes[3] - sizes[2]), 0.0, -np.inf)
    context = softmax(scaled(query, key, scale) + added) @ value
    present = np.stack([key, value]) if key.shape == value.shape else np.zeros(0)
    return merge_heads(context).astype(input.dtype), present.astype(input.dtype)


def quantized_attention(
    input: Array,
    weight: Array,
    bias: Array,
    input_scale: Array,
    weight_scale: Array,
    mask_index: Array | None = None,
    input_zero_point: Array | None = None,
    weight_zero_point: Array | None = None,
    past: Array | None = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
) -> Arrays:
    """(output, present) of com.microsoft QAttention: as Attention, of a quantized input and quantized weights.

    :param input: uint8 or int8 (B, S, E) with one scale; weight (E, 3 H * D) with one scale or one for each column.
    """
    real = (input.astype(np.float64) - (0 if input_zero_point is None else input_zero_point)) * input_scale
    weights = (weight.astype(np.float64) - (0 if weight_zero_point is None else weight_zero_point)) * weight_scale
    found = packed_attention(real, weights, bias, mask_index, past, num_heads=num_heads, unidirectional=unidirectional)
    return tuple(item.astype(bias.dtype) for item in found)


def rotary_embedding(
    input: Array, position_ids: Array, cos_cache: Array, sin_cache: Array, *, interleaved: int = 0, num_heads: int = 0
) -> Arrays:
    """(output,) of com.microsoft RotaryEmbedding: input (B, H, S, D) or (B, S, H * D), tables (length, D / 2)."""
    heads = num_heads or input.shape[-1] // (2 * cos_cache.shape[-1])
    four = input if input.ndim == 4 else split_heads(input, heads)
    places = position_ids if position_ids.ndim == 2 else position_ids + np.arange(four.shape[2])[None, :]
    places = np.broadcast_to(places, (four.shape[0], four.shape[2]))
    turned = rotate(four, cos_cache, sin_cache, places, interleaved=bool(interleaved))
    return ((turned if input.ndim == 4 else merge_heads(turned)).astype(input.dtype),)


def rotate(item: Array, cos: Array, sin: Array, places: Array, *, interleaved: bool) -> Array:
    """Rotary embedding (Su et al. 2021) of (B, H, S, D) at places (B, S); channels behind twice the table's stay."""
    half = cos.shape[-1]
    c, s = cos[places][:, None].astype(np.float64), sin[places][:, None].astype(np.float64)
    first = slice(0, 2 * half, 2) if interleaved else slice(0, half)
    second = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
    result = item.astype(np.float64)
    a, b = result[..., first].copy(), result[..., second].copy()
    result[..., first], result[..., second] = a * c - b * s, b * c + a * s
    return result


def scaled(query: Array, key: Array, scale: float) -> Array:
    """Q K^T times scale; 0 is 1 / sqrt(D)."""
    return query.astype(np.float64) @ np.swapaxes(key, -1, -2).astype(np.float64) * (scale or query.shape[-1] ** -0.5)


def softmax(logits: Array, sink: Array | None = None) -> Array:
    """Over the last axis; `sink` (H,) is one more logit in each row of its head, whose probability is dropped."""
    if sink is not None:
        column = np.broadcast_to(sink.astype(np.float64).reshape(1, -1, 1, 1), (*logits.shape[:3], 1))
        logits = np.concatenate([logits, column], axis=-1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    result: Array = weights / weights.sum(-1, keepdims=True)
    return result if sink is None else result[..., :-1]


def kept(mask: Array | None, keys: int, batch: int = 0) -> Array:
    """What a padding mask leaves, as booleans that broadcast to (B, H, S, T)."""
    if mask is None:
        return np.ones((1, 1, 1, 1), np.bool_)
    if mask.ndim == 1:
        columns = np.arange(keys)[None, :]
        ends, starts = (mask[:batch], mask[batch:]) if batch and len(mask) == 2 * batch else (mask, np.zeros_like(mask))
        within: Array = (columns < ends[:, None]) & (columns >= starts[:, None])
        return within[:, None, None, :]
    return (mask > 0)[:, None, None, :] if mask.ndim == 2 else (mask > 0)[:, None]


def split_heads(flat: Array, heads: int) -> Array:
    """(B, S, H * D) as (B, H, S, D)."""
    batch, length, width = flat.shape
    return flat.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def merge_heads(context: Array) -> Array:
    """(B, H, S, D) as (B, S, H * D)."""
    batch, heads, length, size = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * size)


def _unpacked(query: Array, key: Array | None, value: Array | None) -> list[Array]:
    """Q, K and V; packed ones, (B, S, H, count, D), as (B, S, H * D) each."""
    if key is None:
        return [query[:, :, :, index].reshape(*query.shape[:2], -1) for index in range(3)]
    if value is None:
        return [query, *(key[:, :, :, index].reshape(*key.shape[:2], -1) for index in range(2))]
    return [query, key, value]


def _width(part: Array, heads: int) -> int:
    return int(part.shape[-1]) if part.ndim == 4 else int(part.shape[-1]) // heads


def _joined(past: Array | None, new: Array) -> Array:
    return new if past is None else np.concatenate([past, new], axis=2)


def _before(sizes: tuple[int, ...], offset: int) -> Array:
    rows, columns = np.arange(sizes[2])[:, None], np.arange(sizes[3])[None, :]
    before: Array = columns <= rows + offset
    return before
