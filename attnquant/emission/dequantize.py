"""Integer weights as the float numbers that they mean: what is run to be judged needs no kernel for them."""

import numpy as np
import onnx_ir as ir

from attnquant.graph import constant, is_weight_dequantize, tensor_name


def dequantize_weights(model: ir.Model) -> int:
    """Replace every DequantizeLinear of a constant by the float tensor, in place; returns how many.

    Requires one scale for a tensor or for each position of an axis; blocks are left alone.
    """
    changes = 0
    for node in list(model.graph):
        if not is_weight_dequantize(node) or (array := _values(node)) is None:
            continue
        output = node.outputs[0]
        name = f"{tensor_name(output)}_values"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(array.shape)
        model.graph.register_initializer(value)
        for reader, index in list(output.uses()):
            reader.replace_input_with(index, value)
        if not output.is_graph_output():
            model.graph.remove(node, safe=True)
            changes += 1
    return changes


def _values(node: ir.Node) -> np.ndarray | None:
    """(q - zero point) * scale, float32 (onnx, Operators.md, DequantizeLinear)."""
    levels, scale = constant(node.inputs[0]), constant(node.inputs[1])
    offset = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if levels is None or scale is None or scale.dtype != np.float32 or "block_size" in node.attributes:
        return None
    if scale.size > 1:
        attribute = node.attributes.get("axis")
        axis = (1 if attribute is None else attribute.as_int()) % levels.ndim
        shape = [-1 if place == axis else 1 for place in range(levels.ndim)]
        scale, offset = scale.reshape(shape), None if offset is None else offset.reshape(shape)
    whole = levels.astype(np.float32) if offset is None else levels.astype(np.float32) - offset.astype(np.float32)
    return np.asarray(whole * scale, np.float32)
