"""Caches stored as integers: are their scales there, of the right shape, and what the metadata tell a runtime."""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from attnquant.audit.problem import Problem
from attnquant.errors import ModelError
from attnquant.graph import constant, tensor_name
from attnquant.kvcache import KvCache, KvLayer, stored_cache
from attnquant.kvcache.layers import K_SCALE, V_SCALE, grouped

_PAST, _PRESENT = (3, 4), (1, 2)
_STORED = {8: ir.DataType.INT8, 4: ir.DataType.UINT8}
_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)


def caches(model: ir.Model) -> Iterator[Problem]:
    """What is wrong with the cache of every GroupQueryAttention; a float cache without scales has nothing wrong."""
    nodes = grouped(model)
    try:
        described = stored_cache(model.metadata_props)
    except ModelError as error:
        described = None
        yield Problem(kind="cache", node="", tensor="", reason=str(error))
    for node in nodes:
        yield from _at(node)
    if described is not None:
        yield from _described(described, {node.name or "": node for node in nodes})


def _at(node: ir.Node) -> Iterator[Problem]:
    kinds = [_text(node, "k_quant_type"), _text(node, "v_quant_type")]
    bits = node.attributes["kv_cache_bit_width"].as_int() if "kv_cache_bit_width" in node.attributes else 8
    if kinds[0] != kinds[1]:
        yield _problem(node, None, f"expected one k_quant_type and v_quant_type, got {kinds!r}: the runtime refuses that.")
    if bits not in _STORED:
        yield _problem(node, None, f"expected kv_cache_bit_width 8 or 4, got {bits}.")
        return
    heads = node.attributes["kv_num_heads"].as_int() if "kv_num_heads" in node.attributes else None
    for role, kind, at, past, made in zip("kv", kinds, (K_SCALE, V_SCALE), _PAST, _PRESENT, strict=True):
        held, present, scale = _input(node, past), node.outputs[made] if made < len(node.outputs) else None, _input(node, at)
        for value in (held, present):
            if value is not None and value.dtype is not None:
                wanted = "float" if kind == "NONE" else str(_STORED[bits])
                if (value.dtype in _INTEGERS if kind == "NONE" else value.dtype != _STORED[bits]):
                    yield _problem(node, value, f"expected {wanted} for {role}_quant_type {kind!r}, got {value.dtype}.")
        if kind != "NONE":
            yield from _scale(node, f"{role}_scale", scale, _expected(kind, heads, held, bits))


def _expected(kind: str, heads: int | None, held: ir.Value | None, bits: int) -> tuple[int | None, ...]:
    """Shape of the scales; None for what is not known."""
    if kind == "PER_TENSOR":
        return (1,)
    width = held.shape[3] if held is not None and held.shape is not None and len(held.shape) == 4 else None
    return (1, heads, 1, width * 8 // bits if isinstance(width, int) else None)


def _scale(node: ir.Node, name: str, value: ir.Value | None, shape: tuple[int | None, ...]) -> Iterator[Problem]:
    if value is None:
        yield _problem(node, None, f"expected {name} for a quantized cache, got none.")
        return
    array = constant(value)
    if array is None:
        yield _problem(node, value, f"expected a constant {name}, got one that is computed or fed.")
        return
    alike = len(array.shape) == len(shape) and all(
        wanted in (None, got) for got, wanted in zip(array.shape, shape, strict=True)
    )
    if array.dtype != np.float32 or not alike:
        yield _problem(node, value, f"expected {name} float32 of shape {shape}, got {array.dtype} of shape {array.shape}.")
    elif not (np.isfinite(array).all() and (array > 0).all()):
        yield _problem(node, value, f"expected {name} above 0, got {float(array.min())!r}.")


def _described(cache: KvCache, nodes: dict[str, ir.Node]) -> Iterator[Problem]:
    """What a generation runtime would allocate, against the graph."""
    for layer in cache.layers:
        node = nodes.pop(layer.node, None)
        if node is None:
            yield Problem(kind="cache", node=layer.node, tensor="", reason="the metadata describe it, it is gone.")
            continue
        yield from _layer(layer, node)
    for name, node in nodes.items():
        if _text(node, "k_quant_type") != "NONE":
            yield Problem(kind="cache", node=name, tensor="", reason="the metadata do not describe its cache.")


def _layer(layer: KvLayer, node: ir.Node) -> Iterator[Problem]:
    made = [node.outputs[index] for index in _PRESENT if index < len(node.outputs)]
    values = [*(_input(node, index) for index in _PAST), *made]
    names = [layer.past_key, layer.past_value, layer.present_key, layer.present_value]
    got = [tensor_name(value) for value in values]
    if got != names:
        yield _problem(node, None, f"the metadata name its caches {names!r}, got {got!r}.")
    for at, told in ((K_SCALE, layer.k_scale), (V_SCALE, layer.v_scale)):
        value = _input(node, at)
        array = constant(value)
        if array is not None and not np.array_equal(array.ravel(), np.asarray(told, np.float32)):
            yield _problem(node, value, "the metadata tell other scales than the operator has.")
    held = values[0]
    if held is not None and held.dtype is not None and held.dtype.numpy().name != layer.dtype:
        yield _problem(node, held, f"the metadata say {layer.dtype!r}, got {held.dtype}.")


def _text(node: ir.Node, name: str) -> str:
    return node.attributes[name].as_string() if name in node.attributes else "NONE"


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _problem(node: ir.Node, value: ir.Value | None, reason: str) -> Problem:
    return Problem(kind="cache", node=node.name or "", tensor=tensor_name(value), reason=reason)
