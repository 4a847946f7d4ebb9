"""K in front of Q K^T becomes signed int8 where the CPU multiplies u8 x s8 without saturation: the same quantizer, faster.

With VNNI a product of u8 and s8 takes half of the time of one of u8 and u8 (`python -m benchmarks.kernels`). The runtime
makes u8 of a signed pair whose nodes follow each other, and moves a quantizer through Reshape and Transpose to the linear,
whose kernel takes no signed result. So K is quantized right behind what computes it, in a Sum, which the runtime sees no
linear's bias in; it is moved as integers, and dequantized in front of the product.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_node, set_input
from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.target import Target

_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze")
"""Operators through which the runtime moves a quantizer against the flow."""


def apply(model: ir.Model, target: Target) -> int:
    """Make such quantizers signed, in place; returns how many.

    Requires: activations are uint8 (`unsigned`), types known.
    Ensures: every quantizer rounds and clips the same real numbers; names of nodes stay. A K whose integers something else
    reads, or whose rank is not known where nothing moves it, stays unsigned.
    """
    if not target.signs_keys:
        return 0
    editor = Editor(model)
    found = [key for node in list(model.graph) if is_onnx(node, "MatMul") and (key := _key(node)) is not None]
    for key in found:
        _sign(key, editor)
    return len(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """The quantizer of a K and what stands around it."""

    source: ir.Value
    """What is moved and quantized."""
    moves: tuple[ir.Node, ...]
    """Between the source and QuantizeLinear, in the order of the flow."""
    quantize: ir.Node
    dequantize: ir.Node
    zero_point: int


def _key(product: ir.Node) -> _Key | None:
    """The quantizer of the right operand of a product of two quantized activations."""
    left, right = (None if value is None else value.producer() for value in product.inputs)
    dequantize = None if right is None else _alone(product.inputs[1])
    quantize = None if dequantize is None else _alone(dequantize.inputs[0])
    if dequantize is None or quantize is None or not is_onnx(left, "DequantizeLinear"):
        return None
    if not is_onnx(dequantize, "DequantizeLinear") or not is_onnx(quantize, "QuantizeLinear"):
        return None
    zeros = [constant(node.inputs[2]) if len(node.inputs) > 2 else None for node in (quantize, dequantize)]
    known = [zero for zero in zeros if zero is not None and zero.size == 1 and zero.dtype == np.uint8]
    if len(known) < len(zeros):
        return None
    moves: list[ir.Node] = []
    value = quantize.inputs[0]
    while (move := _alone(value)) is not None and is_onnx(move, *_MOVES):
        moves.insert(0, move)
        value = move.inputs[0]
    if value is None or value.dtype != ir.DataType.FLOAT or (not moves and value.shape is None):
        return None
    zero_point = int(known[0].reshape(()))
    return _Key(source=value, moves=tuple(moves), quantize=quantize, dequantize=dequantize, zero_point=zero_point)


def _alone(value: ir.Value | None) -> ir.Node | None:
    """The maker of a tensor that has one reader."""
    return None if value is None or value.is_graph_output() or len(value.uses()) != 1 else value.producer()


def _sign(key: _Key, editor: Editor) -> None:
    quantize, integers, signed = key.quantize, key.quantize.outputs[0], ir.TensorType(ir.DataType.INT8)
    source = _summed(key.source, (*key.moves, quantize)[0], editor)
    zero_point = editor.constant(np.asarray(key.zero_point - 128, np.int8), f"{tensor_name(quantize.inputs[2])}_int8")
    for node in (quantize, key.dequantize):
        set_input(node, 2, zero_point)
    if "output_dtype" in quantize.attributes:
        quantize.attributes["output_dtype"] = ir.AttrInt64("output_dtype", ir.DataType.INT8)
    integers.type = signed
    if not key.moves:
        set_input(quantize, 0, source)
        set_input(key.dequantize, 0, editor.same_shape(quantize, integers, f"{quantize.name}/apart"))
        return
    editor.graph.remove(quantize)
    editor.graph.insert_before(key.moves[0], quantize)
    set_input(quantize, 0, source)
    set_input(key.moves[0], 0, integers)
    set_input(key.dequantize, 0, key.moves[-1].outputs[0])
    integers.shape = None if source.shape is None else source.shape.copy()
    for move in key.moves:
        made = move.outputs[0]
        made.type, made.name = signed, editor.free_tensor(f"{made.name}_int8")


def _summed(value: ir.Value, reader: ir.Node, editor: Editor) -> ir.Value:
    """The tensor as a Sum makes it, where a linear made it: in the place of the Add of a bias, or behind the product."""
    node = value.producer()
    if node is not None and is_onnx(node, "MatMul", "Gemm"):
        return editor.before(reader, "Sum", [value], f"{node.name}/apart", like=value)
    if node is None or not is_onnx(node, "Add") or _alone(value) is None:
        return value  # The runtime takes no quantizer into a linear whose result, with the bias, has several readers.
    return replace_node(node, "Sum", node.inputs)
