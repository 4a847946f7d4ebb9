"""Integer weights as the float numbers that they mean: what is run to be judged needs no kernel for them."""

from functools import partial

import numpy as np
import onnx_ir as ir

from attnquant.graph import constant, is_weight_dequantize, tensor_name


def dequantize_weights(model: ir.Model) -> int:
    """Replace every DequantizeLinear of a constant by the float tensor, in place; returns how many.

    Requires one scale for a tensor or for each position of an axis; blocks are left alone.
    """
    changes = 0
    for node in list(model.graph):
        if not is_weight_dequantize(node) or (levels := constant(node.inputs[0])) is None:
            continue
        scale, offset = (None if value is None else constant(value) for value in (*node.inputs, None)[1:3])
        if scale is None or scale.dtype != np.float32 or "block_size" in node.attributes:
            continue
        output = node.outputs[0]
        name = f"{tensor_name(output)}_values"
        # Computed as often as it is read: a session reads it once, and the model is not in memory as float numbers besides.
        values = partial(_values, levels, scale, offset, node.attributes.get_int("axis", 1), name)
        value = ir.Value(name=name, const_value=ir.LazyTensor(values, ir.DataType.FLOAT, ir.Shape(levels.shape), name=name))
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(levels.shape)
        model.graph.register_initializer(value)
        for reader, index in list(output.uses()):
            reader.replace_input_with(index, value)
        if not output.is_graph_output():
            model.graph.remove(node, safe=True)
            changes += 1
    return changes


def _values(levels: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, axis: int, name: str) -> ir.TensorProtocol:
    """(q - zero point) * scale, float32 (onnx, Operators.md, DequantizeLinear)."""
    if scale.size > 1:
        shape = [-1 if place == axis % levels.ndim else 1 for place in range(levels.ndim)]
        scale, offset = scale.reshape(shape), None if offset is None else offset.reshape(shape)
    whole = levels.astype(np.float32)
    if offset is not None and offset.any():
        whole -= offset.astype(np.float32)
    whole *= scale
    return ir.tensor(whole, name=name)
