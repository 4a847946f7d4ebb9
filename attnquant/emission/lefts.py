"""A weight that one product reads on the right and another on the left: the one on the left reads a float constant.

On the left the runtime has no int8 kernel, and such a product stays float. Where the same weight is quantized for a reader
on the right, the left one would read its DequantizeLinear, at every run.
"""

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor
from attnquant.graph import constant, is_blocked, is_onnx, is_weight_dequantize, tensor_name
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Give products of a weight with a float activation on its right the weight in float, in place; returns how many.

    Requires: constant scales and zero points, one for the tensor or one a channel; others are left alone.
    Ensures: the same numbers. A constant query, whose product takes a quantized key, stays integers.
    """
    editor = Editor(model)
    given = 0
    for dequantize in list(model.graph):
        if not is_weight_dequantize(dequantize) or is_blocked(dequantize):
            continue
        lefts = [use.node for use in dequantize.outputs[0].uses() if _is_float_product(use.node, use.idx)]
        numbers = _numbers(dequantize) if lefts else None
        if numbers is None:
            continue
        weight = editor.constant(numbers, f"{tensor_name(dequantize.inputs[0])}_float")
        for node in lefts:
            node.replace_input_with(0, weight)
        given += len(lefts)
    return given


def _is_float_product(node: ir.Node, index: int) -> bool:
    """A MatMul that reads the weight on the left and nothing quantized on the right."""
    other = node.inputs[1] if is_onnx(node, "MatMul") and index == 0 else None
    return other is not None and constant(other) is None and not is_onnx(other.producer(), "DequantizeLinear")


def _numbers(dequantize: ir.Node) -> np.ndarray | None:
    """(integers - zero point) * scale, float32."""
    inputs = [constant(value) for value in dequantize.inputs]
    integers, scale, zero = (*inputs, None)[:3]
    if integers is None or scale is None or scale.dtype != np.float32:
        return None
    shape = [1] * integers.ndim
    if scale.size > 1:
        shape[dequantize.attributes.get_int("axis", 1) % integers.ndim] = -1
    shifted = integers.astype(np.float32) - (0 if zero is None else zero.astype(np.float32).reshape(shape))
    return np.asarray(shifted * scale.reshape(shape), np.float32)
