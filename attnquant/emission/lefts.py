"""A quantized weight that a float product reads too: that product reads a float constant.

With the weight on the left the runtime has no int8 kernel, and a product of constants (DeBERTa's relative positions, which
are projected with the weights of Q and K) it folds: both stay float. Where the same weight is quantized for another product,
they would read its DequantizeLinear, at every run, and nothing is folded behind one.
"""

from collections.abc import Iterator

import onnx_ir as ir

from attnquant.emission.dequantize import values_of
from attnquant.emission.editor import Editor
from attnquant.graph import constant, is_constant, is_onnx, is_weight_dequantize, tensor_name
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Give products of a weight with a float activation on its right, or with constants, the weight in float, in place.

    Returns how many.

    Requires: constant scales and zero points, one for the tensor or one a channel; others are left alone.
    Ensures: the same numbers. A constant query, whose product takes a quantized key, stays integers.
    """
    editor = Editor(model)
    given = 0
    for dequantize in list(model.graph):
        if not is_weight_dequantize(dequantize):
            continue
        uses = list(_float_uses(dequantize.outputs[0]))
        compute = values_of(dequantize) if uses else None
        if compute is None:
            continue
        weight = editor.constant(compute(), f"{tensor_name(dequantize.inputs[0])}_float")
        for node, index in uses:
            node.replace_input_with(index, weight)
        given += len(uses)
    return given


def _float_uses(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """(node, input) that can read the weight in float: such products, and Transposes that only such products read."""
    for node, index in tuple(value.uses()):
        if is_onnx(node, "Identity") and not node.outputs[0].is_graph_output():
            yield from _float_uses(node.outputs[0])
        elif is_onnx(node, "Transpose") and not node.outputs[0].is_graph_output():
            readers = tuple(node.outputs[0].uses())
            if readers and all(_is_float_product(*use) for use in readers):
                yield node, index
        elif _is_float_product(node, index):
            yield node, index


def _is_float_product(node: ir.Node, index: int) -> bool:
    """A MatMul that reads the weight on the left and nothing quantized on the right, or a product of constants."""
    if is_onnx(node, "MatMul", "Gemm") and index < 2 and is_constant(node.inputs[1 - index]):
        return True
    other = node.inputs[1] if is_onnx(node, "MatMul") and index == 0 else None
    return other is not None and constant(other) is None and not is_onnx(other.producer(), "DequantizeLinear")
