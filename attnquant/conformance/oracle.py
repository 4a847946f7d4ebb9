"""ai.onnx Attention 23, 24 and 25 in numpy, written from the text of the specification (onnx 1.23), in float64.

https://onnx.ai/onnx/operators/onnx__Attention.html. Nothing of onnx.reference and nothing of the rest of attnquant is used:
it is the standard that both and the runtimes are compared with.
"""

from typing import Any, TypeAlias

import numpy as np

from attnquant.conformance.readings import NEWEST, Reading

Array: TypeAlias = np.ndarray[Any, Any]

_PRECISIONS: dict[int, Any] = {1: np.float32, 10: np.float16, 11: np.float64}
"""TensorProto.DataType of softmax_precision."""


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    reading: Reading = NEWEST,
) -> tuple[Array, Array, Array, Array]:
    """(Y, present_key, present_value, qk_matmul_output), in the dtype of query (present_value: of value).

    :param query: (B, H, S, D), or (B, S, H * D) with the head attributes; key and value likewise with their own heads and T.
    :param mask: boolean (True: attend) or float (added), broadcast to (B, H, S, T), its last axis T or shorter.
    :param nonpad_kv_seqlen: (B,) int64, the number of keys that count in each sample; excludes past.
    :raises ValueError: what the specification does not allow.
    """
    if is_causal and mask is not None and reading.mask_and_causal == "one of them":
        msg = "expected attn_mask or is_causal, of which onnx 1.18 allows only one, got both"
        raise ValueError(msg)
    dtype, flat = query.dtype, query.ndim == 3
    query = _with_heads(query, q_num_heads, reading)
    key, value = _with_heads(key, kv_num_heads, reading), _with_heads(value, kv_num_heads, reading)
    if past_key is not None and past_value is not None:
        key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    past = 0 if past_key is None else past_key.shape[2]
    window = (left_window_size, right_window_size)
    bias = _bias(mask, sizes) + _frontiers(sizes, past, nonpad_kv_seqlen, is_causal, window, reading)
    wide = (np.asarray(query, np.float64), *(_for_queries(item, sizes[1], reading) for item in (key, value)))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = wide[0] @ np.swapaxes(wide[1], -1, -2) * factor
    if reading.softcap == "in front of the mask":
        capped = _capped(scores, softcap)
        masked = final = capped + bias
    else:
        masked = scores + bias
        capped = final = _capped(masked, softcap)
    dead = np.all(np.isneginf(bias), axis=-1, keepdims=True)
    probabilities = _softmax(final, dead, softmax_precision, reading)
    context = probabilities @ wide[2]
    shown = {"scores": scores, "capped": capped, "masked": masked, "probabilities": probabilities}
    result = np.swapaxes(context, 1, 2).reshape(sizes[0], sizes[2], -1) if flat else context
    with np.errstate(over="ignore"):
        scores_out = shown[reading.modes[qk_matmul_output_mode]].astype(dtype)
        return result.astype(dtype), key, value, scores_out


def _with_heads(item: Array, heads: int | None, reading: Reading) -> Array:
    """(B, S, heads * D) as (B, heads, S, D); four axes stay."""
    if item.ndim == 4:
        return item
    if item.ndim != 3 or not heads or item.shape[-1] % heads:
        msg = f"expected 4 axes, or 3 with a head count that divides the last, got shape {item.shape!r} and {heads!r} heads"
        raise ValueError(msg)
    batch, length, width = item.shape
    if reading.flat == "reshaped":
        return item.reshape(batch, heads, length, width // heads)
    return item.reshape(batch, length, heads, width // heads).swapaxes(1, 2)


def _for_queries(item: Array, heads: int, reading: Reading) -> Array:
    """K or V with a head for every query head, in float64."""
    copies, rest = divmod(heads, item.shape[1])
    if rest:
        msg = f"expected a number of query heads that those of K and V divide, got {heads} and {item.shape[1]}"
        raise ValueError(msg)
    wide = np.asarray(item, np.float64)
    return np.tile(wide, (1, copies, 1, 1)) if reading.copies == "tiled" else np.repeat(wide, copies, axis=1)


def _bias(mask: Array | None, sizes: tuple[int, int, int, int]) -> Array:
    """The mask as what is added to the scores, (B, H, S, T): False is -inf, and so is what the mask does not reach."""
    if mask is None:
        return np.zeros(sizes)
    added = np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else np.asarray(mask, np.float64)
    missing = sizes[3] - added.shape[-1]
    if missing > 0:
        added = np.concatenate([added, np.full((*added.shape[:-1], missing), -np.inf)], axis=-1)
    return np.broadcast_to(added, sizes)


def _frontiers(
    sizes: tuple[int, int, int, int],
    past: int,
    nonpad: Array | None,
    causal: int,
    window: tuple[int, int],
    reading: Reading,
) -> Array:
    """-inf for keys behind the causal diagonal, outside the window and behind the padding; broadcast to (B, H, S, T)."""
    rows, columns = np.arange(sizes[2])[:, None], np.arange(sizes[3])[None, :]
    offset = np.full((1, 1, 1, 1), past)
    if nonpad is not None and past == 0:
        offset = np.asarray(nonpad, np.int64).reshape(-1, 1, 1, 1) - sizes[2]
    moves = reading.causal_past if nonpad is None else reading.causal_nonpad
    place = rows + offset
    allowed = np.ones((1, 1, sizes[2], sizes[3]), np.bool_)
    if causal:
        allowed = allowed & (columns <= (place if moves == "offset" else rows))
    if window[0] >= 0:
        allowed = allowed & (columns >= place - window[0])
    if window[1] >= 0:
        allowed = allowed & (columns <= place + window[1])
    if nonpad is not None:
        allowed = allowed & (columns < np.asarray(nonpad).reshape(-1, 1, 1, 1))
    return np.where(allowed, 0.0, -np.inf)


def _capped(scores: Array, cap: float) -> Array:
    return cap * np.tanh(scores / cap) if cap else scores


def _softmax(logits: Array, dead: Array, precision: int | None, reading: Reading) -> Array:
    """Rows without a key are zero (or NaN, as it was); others sum to one."""
    if precision is not None:
        with np.errstate(over="ignore"):
            logits = np.asarray(logits.astype(_PRECISIONS[precision]), np.float64)
    highest = logits.max(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - highest)
        result: Array = weights / weights.sum(-1, keepdims=True)
    if reading.dead_rows == "zero":
        result = np.where(dead, 0.0, result)
    return result
