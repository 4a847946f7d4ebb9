"""Biases in a form with which linears stay int8 in ONNX Runtime: int32 at the scale of the product, where need be.

MatMul followed by Add of a vector becomes Gemm before Q/DQ pairs are looked at, where the activation is a matrix or all of
its shape is known; and Gemm is int8 only if its bias is a DequantizeLinear of int32 at scale s_x * s_w. Otherwise it is
computed in float behind a dequantization of the weight at every run, at half the float model's speed (docs/targets.md).
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, set_input
from attnquant.emission.linears import Linear, quantized_linears
from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.model import opset
from attnquant.target import Target

_LARGEST = 2.0**30
"""Largest absolute value of an int32 bias, which leaves room for the sum of products."""


def apply(model: ir.Model, target: Target, *, force: Collection[str] = ()) -> int:
    """Change the biases of linears that the runtime would compute in float, in place; returns how many.

    Requires: quantized linears as `linears.read` finds them, shapes as known. Biases of dynamic MatMul stay as they are: the
    runtime adds them in the same pass as GELU or a residual.
    Ensures: outputs differ by at most half of s_x * s_w (the bias's rounding).

    :param force: Names of MatMul nodes to treat whatever their shape.
    """
    editor = Editor(model)
    changed = 0
    reshaped = target.gemm_opset is None or (opset(model) or 0) <= target.gemm_opset
    static = all(value.shape is not None and value.shape.is_static() for value in model.graph.inputs)
    for linear in list(quantized_linears(model)):
        if is_onnx(linear.node, "Gemm"):
            changed += _settle_gemm(linear, editor)
        elif linear.weight_index == 1 and (static or linear.node.name in force or _becomes_gemm(linear.node.inputs[0])):
            changed += _settle_matmul(linear, editor, reshaped=reshaped)
    return changed


def _becomes_gemm(activation: ir.Value | None) -> bool:
    """Whether MatMul and Add turn into Gemm: a matrix, a known shape, or one that is not known to be dynamic."""
    shape = None if activation is None else activation.shape
    return shape is None or len(shape) == 2 or all(isinstance(size, int) for size in shape)


def _settle_matmul(linear: Linear, editor: Editor, *, reshaped: bool) -> int:
    """Change the bias behind a MatMul; `reshaped`: a Gemm between reshapes is int8 too."""
    uses = tuple(linear.output.uses())
    if len(uses) != 1 or linear.output.is_graph_output() or not is_onnx(uses[0].node, "Add"):
        return 0
    add, place = uses[0].node, 1 - uses[0].idx
    bias = constant(add.inputs[place])
    rank = None if linear.output.shape is None else len(linear.output.shape)
    if bias is None or bias.ndim == 0 or bias.ndim > 2 or (bias.ndim == 2 and rank != 2):
        return 0  # No Gemm takes such a bias.
    replacement = _int32_bias(linear, bias, add, place, editor) if reshaped or rank is None or rank == 2 else None
    if replacement is None and rank is not None and rank > 2:
        # The same sum, in a shape that no Gemm takes.
        replacement = editor.constant(bias.reshape(1, 1, -1), f"{tensor_name(add.inputs[place])}_wide")
    if replacement is None:
        return 0
    set_input(add, place, replacement)
    return 1


def _settle_gemm(linear: Linear, editor: Editor) -> int:
    node = linear.node
    bias = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is None or linear.product_scale is None:
        return 0
    alpha, beta = (node.attributes.get_float(name, 1.0) for name in ("alpha", "beta"))
    if alpha != 1.0 and len(linear.weight.outputs[0].uses()) > 1:
        return 0
    if alpha != 1.0:
        scale = linear.weight_scale
        scaled = (np.asarray(scale, np.float64) * alpha).astype(np.float32)
        set_input(linear.weight, 1, editor.constant(scaled, f"{tensor_name(linear.weight.inputs[1])}_alpha"))
        node.attributes["alpha"] = ir.AttrFloat32("alpha", 1.0)
    replacement = _int32_bias(linear, bias.astype(np.float64) * beta, node, 2, editor)
    if replacement is None:
        return 0
    set_input(node, 2, replacement)
    node.attributes["beta"] = ir.AttrFloat32("beta", 1.0)
    return 1


def _int32_bias(linear: Linear, bias: np.ndarray, reader: ir.Node, place: int, editor: Editor) -> ir.Value | None:
    """DequantizeLinear of the bias in int32 in front of its reader; None where int32 can't hold it."""
    scale = linear.product_scale
    if scale is None or bias.size not in (1, scale.size):
        return None
    if not np.all(np.isfinite(scale)) or not np.all(scale >= np.finfo(np.float32).tiny):
        return None
    whole = np.round(np.broadcast_to(bias.reshape(-1), scale.shape).astype(np.float64) / scale.astype(np.float64))
    if not np.all(np.abs(whole) <= _LARGEST):
        return None
    old = reader.inputs[place]
    name = f"{reader.name}/bias"
    inputs = [editor.constant(whole.astype(np.int32), f"{name}_int32"), editor.constant(scale, f"{name}_scale")]
    return editor.before(
        reader, "DequantizeLinear", inputs, f"{name}_dequantize", attributes={"axis": ir.AttrInt64("axis", 0)}, like=old
    )
