"""Quantized tables are read row by row: Gather takes the int8 rows, and only those are dequantized.

NNCF puts DequantizeLinear between the table and Gather, and the runtime then dequantizes the whole vocabulary at every run.
A table that is also a weight (tied embeddings) stays one int8 initializer with a DequantizeLinear for the linear.
"""

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_reads
from attnquant.graph import along, constant, is_blocked, is_onnx, is_weight_dequantize, tensor_name
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Move DequantizeLinear of constant tables behind Gather, in place; returns how many Gather read integers now.

    Requires: constant scales and zero points; a scale per row only with zero point 0 (as NNCF writes weights).
    Ensures: the same numbers, bit for bit. The float result keeps its tensor name.
    """
    editor = Editor(model)
    moved = 0
    for dequantize in list(model.graph):
        if not is_weight_dequantize(dequantize) or is_blocked(dequantize):
            continue
        for use in tuple(dequantize.outputs[0].uses()):
            if is_onnx(use.node, "Gather") and use.idx == 0 and use.node.graph is model.graph:
                moved += _gather_integers(dequantize, use.node, editor)
    return moved


def _gather_integers(dequantize: ir.Node, gather: ir.Node, editor: Editor) -> int:
    table, scale, output = constant(dequantize.inputs[0]), constant(dequantize.inputs[1]), gather.outputs[0]
    zero_point = constant(dequantize.inputs[2]) if len(dequantize.inputs) > 2 else None
    if table is None or scale is None or output.is_graph_output() or scale.dtype != np.float32:
        return 0
    axis = gather.attributes.get_int("axis", 0) % table.ndim
    channels = dequantize.attributes.get_int("axis", 1) % table.ndim
    indices = gather.inputs[1]
    rank = None if indices is None or indices.shape is None else len(indices.shape)
    if scale.size > 1 and channels == axis:
        if zero_point is not None and zero_point.any():
            return 0
        last = _per_row(dequantize, gather, along(scale, axis, table.ndim), editor)
    elif scale.size > 1 and rank is None:
        return 0
    else:
        behind = channels if channels < axis or rank is None else channels - 1 + rank
        attributes = {"axis": ir.AttrInt64("axis", behind)} if scale.size > 1 else {}
        inputs = [output, *dequantize.inputs[1:]]
        last = editor.make("DequantizeLinear", inputs, f"{gather.name}/dequantize", attributes=attributes, like=output)
        editor.graph.insert_after(gather, last)
    _hand_over(gather, last, dequantize)
    return 1


def _per_row(dequantize: ir.Node, gather: ir.Node, scale: np.ndarray, editor: Editor) -> ir.Node:
    """Cast(rows) * Gather(scales): a scale per row is no axis of the result that DequantizeLinear could take."""
    output = gather.outputs[0]
    axis = ir.AttrInt64("axis", gather.attributes.get_int("axis", 0))
    scales = editor.constant(scale, f"{tensor_name(dequantize.inputs[1])}_rows")
    picked = editor.make("Gather", [scales, gather.inputs[1]], f"{gather.name}/scale", attributes={"axis": axis})
    picked.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    attributes = {"to": ir.AttrInt64("to", ir.DataType.FLOAT.value)}
    cast = editor.make("Cast", [output], f"{gather.name}/cast", attributes=attributes, like=output)
    product = editor.make("Mul", [cast.outputs[0], picked.outputs[0]], f"{gather.name}/rows", like=output)
    editor.graph.insert_after(gather, [picked, cast, product])
    return product


def _hand_over(gather: ir.Node, last: ir.Node, dequantize: ir.Node) -> None:
    """Let `gather` read the integers, and its readers the output of `last` under the old tensor name."""
    integers, result = gather.outputs[0], last.outputs[0]
    own = {gather, last, *(use.node for use in integers.uses() if (use.node.name or "").startswith(f"{gather.name}/"))}
    replace_reads(integers, result, but=own)
    integers.name, result.name = result.name, integers.name
    source = dequantize.inputs[0]
    gather.replace_input_with(0, source)
    integers.type = None if source is None else source.type
