"""Weights with more than two axes: a matrix where they are one, and float where the runtime has no kernel.

ONNX Runtime takes a product with a stacked weight that has a scale per channel for int8, and fails when it runs.
"""

import numpy as np
import onnx_ir as ir

from attnquant.emission.dequantize import values
from attnquant.emission.editor import Editor, set_input
from attnquant.emission.linears import Linear, quantized_linears
from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.placement import KeptFloat
from attnquant.target import Target

REASON = "stacked weight with a scale per channel: no int8 kernel"


def apply(model: ir.Model, target: Target) -> int:
    """Settle MatMul with a weight of rank 3 or more and a scale per channel, in place; returns how many changed.

    A weight that is one matrix loses its leading axes, where the activation has as many. Others become float constants with
    the values that the integers stand for, and read the activation in front of its quantizer.

    Requires: DequantizeLinear feeds MatMul directly. Ensures: the same weights; the activation's rounding is left out.
    """
    editor = Editor(model)
    return sum(_settle(linear, editor) for linear in list(quantized_linears(model)))


def kept_float(model: ir.Model) -> tuple[KeptFloat, ...]:
    """Linears that `apply` would turn back into float ones. Nothing is changed."""
    return tuple(
        KeptFloat(node=linear.node.name or "", reason=REASON)
        for linear in quantized_linears(model)
        if _is_stacked(linear) and not _is_matrix(linear)
    )


def _is_stacked(linear: Linear) -> bool:
    scale = linear.weight_scale
    direct = linear.node.inputs[linear.weight_index] is linear.weight.outputs[0]
    stacked = is_onnx(linear.node, "MatMul") and linear.weight_value.ndim > 2
    return direct and stacked and scale is not None and scale.size > 1


def _is_matrix(linear: Linear) -> bool:
    """Whether dropping the weight's leading axes changes nothing: they are 1, and the activation has at least as many."""
    weight, scale = linear.weight_value, linear.weight_scale
    activation = linear.node.inputs[0]
    rank = None if activation is None or activation.shape is None else len(activation.shape)
    own = linear.weight.attributes.get_int("axis", 1) % weight.ndim
    columns = linear.weight_index == 1 and scale is not None and own == weight.ndim - 1
    return columns and set(weight.shape[:-2]) == {1} and rank is not None and rank >= weight.ndim


def _settle(linear: Linear, editor: Editor) -> int:
    if not _is_stacked(linear):
        return 0
    if not _is_matrix(linear):
        _unquantize(linear, editor)
        return 1
    weight, dequantize = linear.weight_value, linear.weight
    matrix = editor.constant(weight.reshape(weight.shape[-2:]), f"{tensor_name(dequantize.inputs[0])}_matrix")
    axis = {"axis": ir.AttrInt64("axis", 1)}
    name = f"{linear.node.name}/weight"
    inputs = [matrix, *dequantize.inputs[1:]]
    set_input(linear.node, 1, editor.before(linear.node, "DequantizeLinear", inputs, name, attributes=axis))
    return 1


def _unquantize(linear: Linear, editor: Editor) -> None:
    dequantize, node = linear.weight, linear.node
    zero_point = constant(dequantize.inputs[2]) if len(dequantize.inputs) > 2 else None
    scale = np.ones(1, np.float32) if linear.weight_scale is None else linear.weight_scale
    numbers = values(linear.weight_value, scale, zero_point, dequantize.attributes.get_int("axis", 1))
    float_name = f"{tensor_name(dequantize.outputs[0])}_float"
    set_input(node, linear.weight_index, editor.constant(numbers, float_name))
    quantize = linear.activation.inputs[0].producer() if linear.activation.inputs[0] is not None else None
    direct = node.inputs[1 - linear.weight_index] is linear.activation.outputs[0]
    if direct and quantize is not None and is_onnx(quantize, "QuantizeLinear"):
        set_input(node, 1 - linear.weight_index, quantize.inputs[0])
