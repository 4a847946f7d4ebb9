"""Which attentions of a model have a cache that can be stored as integers, and why the others can't."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.errors import ModelError, RecipeError
from attnquant.graph import bodies, is_onnx, operator, tensor_name
from attnquant.recognition import recognize
from attnquant.rewrite import fuse
from attnquant.rewrite.buffers import GROUPED, PAST
from attnquant.target import Target, release

FORM = "::".join(GROUPED)
_PRESENT = (1, 2)
K_SCALE, V_SCALE = 12, 13
_SINCE = (1, 27)
"""Release of ONNX Runtime whose CPU kernel takes integer caches; half precision activations from _HALF_SINCE."""
_HALF_SINCE = (1, 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A GroupQueryAttention whose caches go in and come out of the model."""

    node: ir.Node
    past: tuple[ir.Value, ir.Value]
    present: tuple[ir.Value, ir.Value]
    heads: int
    size: int

    @property
    def name(self) -> str:
        """Of the node."""
        return self.node.name or ""


def grouped(model: ir.Model) -> list[ir.Node]:
    """Every GroupQueryAttention, in bodies too."""
    return [node for _, body in bodies(model) for node in body if operator(node) == GROUPED]


def with_grouped(model: ir.Model, sample: Mapping[str, np.ndarray]) -> ir.Model:
    """The model with every attention as GroupQueryAttention; itself where they are.

    :raises ModelError: there is no attention, or one can't be that operator; the reasons are given.
    """
    sites = recognize(model, feeds=sample).sites
    if sites and all(site.form.startswith(FORM) for site in sites):
        return model
    made = fuse(model, to=FORM, feeds=sample)
    left = [f"{row.site}: {'; '.join(row.reasons)}" for row in made.rows if row.status != "fused"]
    if left or not made.rows:
        msg = f"KV cache: expected attentions that can be {FORM}, the operator with integer caches, got "
        raise ModelError(msg + ("; ".join(left[:3]) or "none at all") + ". Use kv_cache.dtype = \"none\" for this model.")
    return made.model


def require_target(target: Target) -> None:
    """Raise RecipeError where no quantized cache is known to run."""
    if target.name != "onnxruntime-cpu" or (target.version and release(target.version)[:2] < _SINCE):
        msg = (
            f"Recipe, key `kv_cache.dtype`: expected the target onnxruntime-cpu of version "
            f"{'.'.join(map(str, _SINCE))} or later, whose GroupQueryAttention is known to take integer caches, "
            f"got {target}. Use \"none\" there."
        )
        raise RecipeError(msg)


def find(model: ir.Model, target: Target) -> list[Layer]:
    """Every layer, each of them fit for an integer cache.

    :raises ModelError: a layer is not; the message names it and says why.
    """
    nodes = grouped(model)
    if not nodes:
        msg = f"KV cache: expected {FORM} in the graph, got none. Fuse the attentions first, or leave the cache float."
        raise ModelError(msg)
    main = set(model.graph)
    return [_layer(model, node, target, inside=node not in main) for node in nodes]


def _layer(model: ir.Model, node: ir.Node, target: Target, *, inside: bool) -> Layer:
    past = [node.inputs[index] if index < len(node.inputs) else None for index in PAST]
    present = [node.outputs[index] if index < len(node.outputs) else None for index in _PRESENT]
    reason = "it is inside control flow" if inside else _unfit(model, node, past, present, target)
    if reason is not None:
        msg = f"KV cache of node {node.name!r}: expected caches that can be integers, got one that can't: {reason}. "
        raise ModelError(msg + "Keep it float by kv_cache.dtype = \"none\".")
    kept, made = [value for value in past if value], [value for value in present if value]
    heads, size = (_static(kept[0], axis) for axis in (1, 3))
    return Layer(node=node, past=(kept[0], kept[1]), present=(made[0], made[1]), heads=heads, size=size)


def _unfit(
    model: ir.Model, node: ir.Node, past: Sequence[ir.Value | None], present: Sequence[ir.Value | None], target: Target
) -> str | None:
    quantized = [node.attributes[name].as_string() for name in ("k_quant_type", "v_quant_type") if name in node.attributes]
    if any(kind != "NONE" for kind in quantized):
        return "it is quantized already"
    if any(value is None or not value.is_graph_input() for value in past):
        return "past_key and past_value are not both inputs of the model"
    if any(value is None or not value.is_graph_output() for value in present):
        return "present_key and present_value are not both outputs of the model"
    for value in (*past, *present):
        assert value is not None
        readers = [use.node.name for use in value.uses() if use.node is not node and not is_onnx(use.node, "Shape")]
        if readers:
            return f"{tensor_name(value)!r} is also read by {readers!r}, as float"
        if value.shape is None or len(value.shape) != 4 or not all(isinstance(value.shape[axis], int) for axis in (1, 3)):
            return f"{tensor_name(value)!r} is declared as {value.shape}, heads and head size have to be numbers"
        if value.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
            return f"{tensor_name(value)!r} is {value.dtype}"
        if value.dtype == ir.DataType.FLOAT16 and target.version and release(target.version)[:2] < _HALF_SINCE:
            return f"half precision with integer caches needs {target.name} 1.31"
    own = node.attributes.get("sliding_window_cache")
    return "sliding_window_cache" if own is not None and own.as_int() else None


def _static(value: ir.Value, axis: int) -> int:
    assert value.shape is not None
    return int(value.shape[axis])  # type: ignore[arg-type]
