"""Integer weights as the float numbers that they mean: what is run to be judged needs no kernel for them."""

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import replace_reads
from attnquant.graph import along, constant, is_blocked, is_weight_dequantize, tensor_name


def dequantize_weights(model: ir.Model) -> int:
    """Replace every DequantizeLinear of a constant by the float tensor, in place; returns how many.

    Requires one scale for a tensor or for each position of an axis; blocks are left alone.
    """
    changes = 0
    for node in list(model.graph):
        integers = constant(node.inputs[0]) if is_weight_dequantize(node) else None
        compute = values_of(node) if integers is not None else None
        if integers is None or compute is None:
            continue
        output = node.outputs[0]
        name, shape = f"{tensor_name(output)}_values", ir.Shape(integers.shape)
        # Computed as often as it is read: a session reads it once, and the model is not in memory as float numbers besides.
        made = ir.LazyTensor(partial(_tensor, compute, name), ir.DataType.FLOAT, shape, name=name)
        value = ir.Value(name=name, const_value=made, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
        model.graph.register_initializer(value)
        replace_reads(output, value)
        if not output.is_graph_output():
            model.graph.remove(node, safe=True)
            changes += 1
    return changes


def _tensor(compute: Callable[[], np.ndarray], name: str) -> ir.TensorProtocol:
    return ir.tensor(compute(), name=name)


def values(integers: np.ndarray, scale: np.ndarray, zero_point: np.ndarray | None, axis: int | None) -> np.ndarray:
    """(q - zero point) * scale, float32 (onnx, Operators.md, DequantizeLinear); one scale, or one a position of `axis`."""
    found = integers.astype(np.float32)
    if zero_point is not None and zero_point.any():
        found -= along(zero_point.astype(np.float32), axis, found.ndim)
    found *= along(scale, axis, found.ndim)
    return found


def values_of(node: ir.Node) -> Callable[[], np.ndarray] | None:
    """What computes the values of a DequantizeLinear of constants; None for blocks and scales that are not float32."""
    integers, scale, zero_point = (*map(constant, node.inputs), None)[:3]
    if integers is None or scale is None or scale.dtype != np.float32 or is_blocked(node):
        return None
    return partial(values, integers, scale, zero_point, node.attributes.get_int("axis", 1))
