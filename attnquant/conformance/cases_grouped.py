"""Cases of com.microsoft GroupQueryAttention: prompts, decode steps, chunks, and what changes their scores."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from attnquant.conformance.case import Case
from attnquant.conformance.cases_contrib import Given, Shapes, case, lengths

_B, _H, _D, _S = 2, 4, 16, 5
"""Batch, query heads, head size, queries of a prompt."""
_HEADS = {"num_heads": _H, "kv_num_heads": 2}
_PRESENTS = ("output", "present_key", "present_value")
_PACKED: Shapes = {"query": (_B, _S, (_H + 4) * _D)}
_TABLES: Shapes = {"cos_cache": (16, _D // 2), "sin_cache": (16, _D // 2)}
_SINK: Shapes = {"head_sink": (_H,)}


def _new(count: int, batch: int = _B) -> Shapes:
    """Q, K and V of new tokens."""
    return {"query": (batch, count, _H * _D), "key": (batch, count, 2 * _D), "value": (batch, count, 2 * _D)}


def _cache(size: int, batch: int = _B) -> Shapes:
    return {"past_key": (batch, 2, size, _D), "past_value": (batch, 2, size, _D)}


def _filled(total: int, *keys: int) -> Given:
    """seqlens_k and total_sequence_length for samples with this many keys."""
    return {"seqlens_k": lengths(*(count - 1 for count in keys)), "total_sequence_length": lengths(total)}


_PROMPT, _RAGGED = _filled(_S, _S, _S), _filled(_S, _S, 3)
_DECODE, _APART, _CHUNK = _filled(7, 7, 7), _filled(7, 7, 4), _filled(8, 8)


def grouped_cases() -> Iterator[Case]:
    """Every case; the operator has one version, 1."""
    shapes: dict[str, tuple[Shapes, dict[str, Any], Given]] = {
        "prompt": (_new(_S), {}, _PROMPT),
        "prompt-ragged": (_new(_S), {}, _RAGGED),
        "prompt-packed": (_PACKED, {}, _PROMPT),
        "prompt-buffer": ({**_new(_S), **_cache(8)}, {}, _PROMPT),
        "decode": ({**_new(1), **_cache(6)}, {}, _DECODE),
        "decode-buffer": ({**_new(1), **_cache(8)}, {}, _DECODE),
        "decode-ragged": ({**_new(1), **_cache(8)}, {}, _APART),
        "chunk": ({**_new(3, 1), **_cache(5, 1)}, {}, _CHUNK),
        "scale": (_new(_S), {"scale": 0.7}, _PROMPT),
        "softcap": (_new(_S), {"softcap": 0.5}, _PROMPT),
        "window": (_new(_S), {"local_window_size": 2}, _PROMPT),
        "window-decode": ({**_new(1), **_cache(6)}, {"local_window_size": 2}, _DECODE),
        "smooth-softmax": (_new(_S), {"smooth_softmax": 1}, _PROMPT),
        "head-sink": ({**_new(_S), **_SINK}, {}, _PROMPT),
        "head-sink-decode": ({**_new(1), **_cache(6), **_SINK}, {}, _DECODE),
        "not-causal": (_new(_S), {"causal": 0}, _PROMPT),
        "attention-bias": ({**_new(_S), "attention_bias": (1, 1, _S, _S)}, {}, _PROMPT),
        "attention-bias-decode": ({**_new(1), **_cache(6), "attention_bias": (1, _H, 1, 7)}, {}, _DECODE),
        "rotary": ({**_new(_S), **_TABLES}, {"do_rotary": 1}, _PROMPT),
        "rotary-interleaved": ({**_new(_S), **_TABLES}, {"do_rotary": 1, "rotary_interleaved": 1}, _PROMPT),
        "rotary-decode-ragged": ({**_new(1), **_cache(8), **_TABLES}, {"do_rotary": 1}, _APART),
        "rotary-packed": ({**_PACKED, **_TABLES}, {"do_rotary": 1}, _PROMPT),
    }
    for name, (own, attributes, given) in shapes.items():
        yield case(f"GroupQueryAttention@1/{name}", own, {**_HEADS, **attributes}, given, _PRESENTS)
    for mode in (1, 2):
        attributes = {**_HEADS, "qk_output": mode}
        yield case(f"GroupQueryAttention@1/qk-output-{mode}", _new(_S), attributes, _PROMPT, (*_PRESENTS, "output_qk"))
        yield case(f"GroupQueryAttention@1/qk-output-{mode}-decode", {**_new(1), **_cache(6)}, attributes, _DECODE,
                   (*_PRESENTS, "output_qk"))
    for name in ("prompt", "decode", "softcap"):
        own, more, given = shapes[name]
        yield case(f"GroupQueryAttention@1/fp16/{name}", own, {**_HEADS, **more}, given, _PRESENTS, dtype="float16")
    yield from _quantized_cache()


def _quantized_cache() -> Iterator[Case]:
    """int8 caches: round to nearest, symmetric."""
    rng = np.random.default_rng(11)
    past: Given = {name: rng.integers(-100, 100, (_B, 2, 6, _D)).astype(np.int8) for name in ("past_key", "past_value")}
    for kind, shape in (("PER_TENSOR", (1,)), ("PER_CHANNEL", (1, 2, 1, _D))):
        scales: Given = {name: (0.02 + 0.01 * rng.random(shape)).astype(np.float32) for name in ("k_scale", "v_scale")}
        attributes = {**_HEADS, "k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}
        given = {**past, **scales, **_DECODE}
        yield case(f"GroupQueryAttention@1/int8-cache/{kind.lower()}", _new(1), attributes, given, _PRESENTS)
