"""Weights of linears as int8 per output channel, activations float: the weight alone gets a quantizer."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor
from attnquant.graph import constant, is_onnx, tensor_name, weight_axis


def quantize_weights(model: ir.Model, linears: Collection[str]) -> int:
    """Put DequantizeLinear of int8 in front of the weights of these MatMul and Gemm, in place; returns how many.

    Only constant float32 matrices on the right are taken; a weight that something else reads too is quantized once for each.
    Ensures: zero point 0, one scale per output channel, largest magnitude 127; the activations stay as they are.
    """
    editor = Editor(model)
    changed = 0
    for node in list(model.graph):
        if node.name not in linears or not is_onnx(node, "MatMul", "Gemm"):
            continue
        value = node.inputs[1]
        weight = constant(value)
        if value is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32:
            continue
        node.replace_input_with(1, _dequantized(node, value, weight, weight_axis(node), editor))
        changed += 1
    return changed


def _dequantized(node: ir.Node, value: ir.Value, weight: np.ndarray, axis: int, editor: Editor) -> ir.Value:
    scale = (np.abs(weight).max(axis=1 - axis) / 127).astype(np.float32)
    spread = np.expand_dims(np.where(scale > 0, scale, 1), 1 - axis)
    integers = np.clip(np.rint(weight / spread), -127, 127).astype(np.int8)
    name = tensor_name(value)
    inputs = [editor.constant(integers, f"{name}_int8"), editor.constant(scale, f"{name}_int8_scale")]
    zero = editor.constant(np.zeros(scale.shape, np.int8), f"{name}_int8_zero_point")
    attributes = {"axis": ir.AttrInt64("axis", axis)}
    return editor.before(node, "DequantizeLinear", [*inputs, zero], f"{node.name}/weight", attributes=attributes, like=value)
