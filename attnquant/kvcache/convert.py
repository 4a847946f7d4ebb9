"""From a model with float caches to the same with int8 or int4 ones: scales, attributes, inputs and outputs; no more."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.emission.editor import Editor, set_input
from attnquant.errors import UnmatchedRuleError
from attnquant.kvcache.layers import K_SCALE, V_SCALE, Layer, find
from attnquant.kvcache.scales import Observed, observe
from attnquant.kvcache.storage import CACHE_KEY, Bits, KvCache, KvLayer
from attnquant.recipe import KvCacheConfig
from attnquant.target import Target

_BITS: dict[str, Bits] = {"int8": 8, "int4": 4}
_STORED = {8: ir.DataType.INT8, 4: ir.DataType.UINT8}
_KINDS = {"tensor": "PER_TENSOR", "channel": "PER_CHANNEL"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheResult:
    """The model that was changed in place, and how its caches are stored."""

    model: ir.Model
    cache: KvCache


def quantize_caches(
    model: ir.Model, data: Iterable[Mapping[str, np.ndarray]], config: KvCacheConfig, target: Target
) -> CacheResult:
    """Store the caches of every GroupQueryAttention as integers, in place, with scales calibrated by running the model.

    :param data: Samples with float caches: prompts (caches without positions) and decode steps (rolled caches).
    :raises ModelError: an attention's cache can't be stored so.
    :raises DataError: nothing was ever in a cache.
    :raises UnmatchedRuleError: a pattern of `keep_float` matches no node.
    """
    layers = find(model, target)
    kept = _kept(layers, config)
    chosen = [layer for layer in layers if layer.name not in kept]
    names = [value.name or "" for layer in chosen for value in layer.present]
    samples = list(data)
    found = observe(_runs(model, samples, names), names, samples=len(samples)) if chosen else {}
    editor = Editor(model)
    rows = tuple(
        _float(layer, kept[layer.name]) if layer.name in kept else _apply(layer, found, config, editor) for layer in layers
    )
    cache = KvCache(layers=rows, granularity=config.granularity)
    model.metadata_props[CACHE_KEY] = cache.to_text()
    return CacheResult(model=model, cache=cache)


def _kept(layers: Iterable[Layer], config: KvCacheConfig) -> dict[str, str]:
    names = [layer.name for layer in layers]
    kept: dict[str, str] = {}
    for pattern in config.keep_float:
        matched = [name for name in names if re.search(pattern, name)]
        if not matched:
            msg = f"Recipe, kv_cache.keep_float: expected {pattern!r} to match one of {len(names)} attentions with a cache "
            raise UnmatchedRuleError(msg + f"({', '.join(map(repr, names[:3]))}, ...), got none. Correct the pattern.")
        kept |= dict.fromkeys(matched, f"float by the recipe ({pattern!r})")
    return kept


def _runs(
    model: ir.Model, samples: Iterable[Mapping[str, np.ndarray]], names: list[str]
) -> Iterator[Mapping[str, np.ndarray]]:
    with runtime.session(model) as made:
        for sample in samples:
            yield runtime.run_session(made, dict(sample), names)


def _row(layer: Layer, *, bits: Bits | None, dtype: str, width: int, **more: object) -> KvLayer:
    past, present = [value.name or "" for value in layer.past], [value.name or "" for value in layer.present]
    return KvLayer(
        node=layer.name, past_key=past[0], past_value=past[1], present_key=present[0], present_value=present[1],
        bits=bits, dtype=dtype, shape=("batch", layer.heads, "positions", width), head_size=layer.size, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def _float(layer: Layer, reason: str) -> KvLayer:
    assert layer.past[0].dtype is not None
    dtype = layer.past[0].dtype.numpy().name
    return _row(layer, bits=None, dtype=dtype, width=layer.size, reason=reason)


def _apply(layer: Layer, found: Mapping[str, Observed], config: KvCacheConfig, editor: Editor) -> KvLayer:
    """Change one node and its caches. Scales are two new initializers, named after the node."""
    bits, node = _BITS[config.dtype], layer.node
    width = layer.size * bits // 8
    scales = []
    for place, value, role in ((K_SCALE, layer.present[0], "k_scale"), (V_SCALE, layer.present[1], "v_scale")):
        scale = found[value.name or ""].scale(bits=bits, per_channel=config.granularity == "channel", clip=config.clip)
        set_input(node, place, editor.constant(scale, f"{layer.name}/{role}"))
        scales.append(tuple(float(item) for item in scale.ravel()))
    for name in ("k_quant_type", "v_quant_type"):
        node.attributes[name] = ir.AttrString(name, _KINDS[config.granularity])
    node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", bits)
    for value in (*layer.past, *layer.present):
        assert value.shape is not None
        value.type = ir.TensorType(_STORED[bits])
        value.shape = ir.Shape([*value.shape[:3], width])
    return _row(
        layer, bits=bits, dtype=_STORED[bits].numpy().name, width=width, k_scale=scales[0], v_scale=scales[1]
    )

