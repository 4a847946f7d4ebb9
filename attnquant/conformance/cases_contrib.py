"""Cases of com.microsoft MultiHeadAttention, Attention and RotaryEmbedding."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attnquant.conformance.case import Case
from attnquant.conformance.oracle import Array

_B, _H, _D, _S, _P = 2, 4, 8, 5, 3
"""Batch, query heads, head size, queries, cached keys."""
Shapes = Mapping[str, tuple[int, ...]]
Given = Mapping[str, Array]


def contrib_cases() -> Iterator[Case]:
    """Every case; operators of com.microsoft have one version, 1."""
    yield from _multi_head()
    yield from _packed()
    yield from _quantized()
    yield from _rotary()


def case(
    name: str,
    shapes: Shapes,
    attributes: Mapping[str, Any],
    given: Given | None = None,
    outputs: tuple[str, ...] = ("output",),
    dtype: str = "float32",
) -> Case:
    """A case with normal arrays of these shapes, drawn from a generator seeded by the name, besides what is given."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    drawn = {formal: rng.normal(size=shape).astype(dtype) for formal, shape in shapes.items()}
    return Case(name=name, inputs={**drawn, **(given or {})}, attributes=attributes, outputs=outputs)


def lengths(*numbers: int) -> Array:
    """int32, as seqlens and padding masks are."""
    return np.array(numbers, np.int32)


def _multi_head() -> Iterator[Case]:
    wide, heads = _H * _D, {"num_heads": _H}
    plain: Shapes = {"query": (_B, _S, wide), "key": (_B, _S, wide), "value": (_B, _S, wide)}
    cross: Shapes = {"query": (_B, _S, wide), "key": (_B, 7, wide), "value": (_B, 7, wide)}
    past: Shapes = {"past_key": (_B, _H, _P, _D), "past_value": (_B, _H, _P, _D)}
    presents = ("output", "present_key", "present_value")
    some = (np.random.default_rng(5).random((_B, 7)) < 0.6).astype(np.int32)
    some[:, 0] = 1
    shapes: dict[str, tuple[Shapes, dict[str, Any], Given]] = {
        "plain": (plain, {}, {}),
        "cross": (cross, {}, {}),
        "scale": (plain, {"scale": 0.7}, {}),
        "wide-v": ({**cross, "value": (_B, 7, _H * 12)}, {}, {}),
        "bias": ({**plain, "bias": (3 * wide,)}, {}, {}),
        "unidirectional": (plain, {"unidirectional": 1}, {}),
        "key-value-4d": ({"query": (_B, _S, wide), "key": (_B, _H, 7, _D), "value": (_B, _H, 7, _D)}, {}, {}),
        "packed-kv": ({"query": (_B, _S, wide), "key": (_B, 7, _H, 2, _D)}, {}, {}),
        "packed-qkv": ({"query": (_B, _S, _H, 3, _D)}, {}, {}),
        "padding-lengths": (cross, {}, {"key_padding_mask": lengths(7, 4)}),
        "padding-mask": (cross, {}, {"key_padding_mask": some}),
        "padding-mask-3d": (cross, {}, {"key_padding_mask": np.repeat(some[:, None], _S, axis=1)}),
        "padding-filter": (cross, {"mask_filter_value": -2.0}, {"key_padding_mask": some}),
        "padding-unidirectional": (plain, {"unidirectional": 1}, {"key_padding_mask": some[:, :_S].copy()}),
        "attention-bias": ({**cross, "attention_bias": (_B, _H, _S, 7)}, {}, {}),
        "attention-bias-one-sample": ({**cross, "attention_bias": (1, _H, _S, 7)}, {}, {}),
        "attention-bias-one-head": ({**cross, "attention_bias": (_B, 1, _S, 7)}, {}, {}),
        "attention-bias-padding": ({**cross, "attention_bias": (1, 1, _S, 7)}, {}, {"key_padding_mask": some}),
        "past": ({**plain, **past}, {}, {}),
        "past-unidirectional": ({**plain, **past}, {"unidirectional": 1}, {}),
        "past-attention-bias": ({**plain, **past, "attention_bias": (1, 1, _S, _S + _P)}, {}, {}),
        "past-bias": ({**plain, **past, "bias": (3 * wide,)}, {}, {}),
        "past-decode": (dict.fromkeys(plain, (_B, 1, wide)) | dict(past), {}, {}),
    }
    for name, (own, attributes, given) in shapes.items():
        outputs = presents if "past_key" in own else ("output",)
        yield case(f"MultiHeadAttention@1/{name}", own, {**heads, **attributes}, given, outputs)
    yield case("MultiHeadAttention@1/qk", cross, heads, outputs=(*presents, "qk"))
    yield case("MultiHeadAttention@1/qk-attention-bias", {**cross, "attention_bias": (1, 1, _S, 7)}, heads,
               outputs=(*presents, "qk"))
    yield case("MultiHeadAttention@1/fp16", plain, heads, dtype="float16")


def _packed() -> Iterator[Case]:
    heads, width = {"num_heads": 2}, 16
    plain: Shapes = {"input": (_B, _S, 12), "weights": (12, 3 * width), "bias": (3 * width,)}
    mask = np.array([[1, 1, 1, 0, 1], [1, 0, 1, 1, 0]], np.int32)
    past: Shapes = {"past": (2, _B, 2, _P, 8)}
    shapes: dict[str, tuple[Shapes, dict[str, Any], Given]] = {
        "plain": (plain, {}, {}),
        "scale": (plain, {"scale": 0.7}, {}),
        "unidirectional": (plain, {"unidirectional": 1}, {}),
        "hidden-sizes": ({**plain, "weights": (12, 56), "bias": (56,)}, {"qkv_hidden_sizes": [16, 16, 24]}, {}),
        "ends": (plain, {}, {"mask_index": lengths(5, 3)}),
        "ends-and-starts": (plain, {}, {"mask_index": lengths(5, 4, 1, 0)}),
        "mask": (plain, {}, {"mask_index": mask}),
        "mask-3d": (plain, {}, {"mask_index": np.repeat(mask[:, None], _S, axis=1)}),
        "mask-unidirectional": (plain, {"unidirectional": 1}, {"mask_index": mask}),
        "attention-bias": ({**plain, "attention_bias": (1, 2, _S, _S)}, {}, {}),
        "past": ({**plain, **past}, {}, {}),
        "past-unidirectional": ({**plain, **past}, {"unidirectional": 1}, {}),
    }
    for name, (own, attributes, given) in shapes.items():
        outputs = ("output", "present") if "past" in own else ("output",)
        yield case(f"com.microsoft::Attention@1/{name}", own, {**heads, **attributes}, given, outputs)


def _quantized() -> Iterator[Case]:
    width = 16
    rng = np.random.default_rng(7)
    quantized: Given = {
        "input": rng.integers(0, 256, (_B, _S, 12), dtype=np.uint8),
        "weight": rng.integers(-63, 64, (12, 3 * width), dtype=np.int8),  # 7 bits: products of 8 saturate without VNNI
        "input_scale": np.array(0.02, np.float32),
        "weight_scale": np.array(0.01, np.float32),
        "input_zero_point": np.array(120, np.uint8),
        "weight_zero_point": np.array(0, np.int8),
    }
    columns = (0.005 + 0.01 * rng.random(3 * width)).astype(np.float32)
    shapes: dict[str, tuple[Shapes, dict[str, Any], Given]] = {
        "plain": ({}, {}, {}),
        "unidirectional": ({}, {"unidirectional": 1}, {}),
        "per-column": ({}, {}, {"weight_scale": columns, "weight_zero_point": np.zeros(3 * width, np.int8)}),
        "weight-zero-point": ({}, {}, {"weight_zero_point": np.array(5, np.int8)}),
        "ends": ({}, {}, {"mask_index": lengths(5, 3)}),
        "past": ({"past": (2, _B, 2, _P, 8)}, {"unidirectional": 1}, {}),
    }
    for name, (own, attributes, given) in shapes.items():
        outputs = ("output", "present") if "past" in own else ("output",)
        drawn = {"bias": (3 * width,), **own}
        yield case(f"QAttention@1/{name}", drawn, {"num_heads": 2, **attributes}, {**quantized, **given}, outputs)


def _rotary() -> Iterator[Case]:
    tables: Shapes = {"cos_cache": (16, _D // 2), "sin_cache": (16, _D // 2)}
    each = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]], np.int64)
    for name, shape, places in (
        ("4d", (_B, _H, _S, _D), each),
        ("3d", (_B, _S, _H * _D), each),
        ("offset", (_B, _H, _S, _D), np.array([6], np.int64)),
    ):
        for interleaved in (0, 1):
            full = f"RotaryEmbedding@1/{name}{'/interleaved' if interleaved else ''}"
            yield case(full, {"input": shape, **tables}, {"interleaved": interleaved}, {"position_ids": places})
