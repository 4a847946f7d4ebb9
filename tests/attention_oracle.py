"""Scaled dot-product attention in numpy, written from the specification of ai.onnx Attention (onnx 1.23), in float64.

A second, independent reading of what the operators mean: nothing of attnquant is used.
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Tensors of one attention, (batch, heads, S, T) each but the context (batch, heads, S, size)."""

    scores: Array
    capped: Array
    masked: Array
    probabilities: Array
    context: Array


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Array | None = None,
    allowed: Array | None = None,
    sink: Array | None = None,
) -> Reference:
    """Operands (batch, heads, length, size); heads of K and V are repeated in blocks; a row without a key gives zeros.

    :param sink: one logit a head, (heads,); it takes part in the softmax and its probability is dropped.
    """
    query, key, value = (np.asarray(item, np.float64) for item in (query, key, value))
    copies = query.shape[1] // key.shape[1]
    key, value = np.repeat(key, copies, axis=1), np.repeat(value, copies, axis=1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("bhsd,bhtd->bhst", query, key) * factor
    capped = softcap * np.tanh(scores / softcap) if softcap else scores
    masked = capped if bias is None else capped + np.asarray(bias, np.float64)
    if allowed is not None:
        masked = np.where(allowed, masked, -np.inf)
    logits = masked
    if sink is not None:
        column = np.broadcast_to(np.asarray(sink, np.float64).reshape(1, -1, 1, 1), (*masked.shape[:3], 1))
        logits = np.concatenate([masked, column], axis=-1)
    highest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(-1, keepdims=True)
    probabilities = (weights / np.where(total == 0, 1.0, total))[..., : masked.shape[-1]]
    return Reference(
        scores=scores, capped=capped, masked=masked, probabilities=probabilities,
        context=np.einsum("bhst,bhtd->bhsd", probabilities, value),
    )


def split_heads(flat: Array, heads: int) -> Array:
    """(batch, length, heads * size) as (batch, heads, length, size)."""
    batch, length, width = flat.shape
    return flat.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def merge_heads(context: Array) -> Array:
    """(batch, heads, length, size) as (batch, length, heads * size)."""
    batch, heads, length, size = context.shape
    return context.swapaxes(1, 2).reshape(batch, length, heads * size)


def rotate(value: Array, cos: Array, sin: Array, places: Array, *, interleaved: bool = False) -> Array:
    """Rotary embedding (Su et al. 2021) of (batch, heads, S, size) with tables (length, half) at places (batch, S)."""
    half = cos.shape[-1]
    c, s = cos[places][:, None], sin[places][:, None]
    out = np.array(value, np.float64)
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = value[..., first], value[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out
