"""Quantizers stand in front of a DepthToSpace and its crop: the runtime interleaves integers, a quarter of the bytes.

The host puts QuantizeLinear and DequantizeLinear behind the convolution. ONNX Runtime computes that in int8 and carries
integers through Slice or Transpose on its own, not through DepthToSpace.
"""

import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_reads, set_input
from attnquant.graph import constant, is_onnx
from attnquant.target import Target

MOVES = ("DepthToSpace", "Slice")
"""What a quantizer moves in front of: an interleaving and its crop."""


def apply(model: ir.Model, target: Target) -> int:
    """Move DequantizeLinear behind DepthToSpace and the Slices that follow, in place; returns how many.

    Requires: types of tensors are known.
    Ensures: the same numbers; the last tensor of a chain keeps its name. Only uint8 with one scale moves: the kernel takes
    no int8.
    """
    editor = Editor(model)
    found = [node for node in model.graph if is_onnx(node, "DequantizeLinear") and _has_one_scale(node)]
    return sum(_moved(node, editor) for node in found)


def _has_one_scale(node: ir.Node) -> bool:
    scale, value = constant(node.inputs[1]), node.inputs[0]
    return scale is not None and scale.size == 1 and value is not None and value.dtype == ir.DataType.UINT8


def _moved(node: ir.Node, editor: Editor) -> bool:
    chain, value = [], node.outputs[0]
    while len(uses := tuple(value.uses())) == 1 and not value.is_graph_output():
        reader = uses[0].node
        if uses[0].idx != 0 or reader.graph is not node.graph or not is_onnx(reader, *MOVES):
            break
        chain.append(reader)
        value = reader.outputs[0]
    if not any(is_onnx(move, "DepthToSpace") for move in chain) or value.is_graph_output():
        return False
    set_input(chain[0], 0, node.inputs[0])
    floats = node.outputs[0]
    editor.graph.remove(node)
    editor.graph.insert_after(chain[-1], node)
    replace_reads(value, floats)
    node.replace_input_with(0, value)
    floats.shape, floats.name, value.name = value.shape, value.name, editor.free_tensor(f"{value.name}_integers")
    for move in chain:
        move.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    return True
