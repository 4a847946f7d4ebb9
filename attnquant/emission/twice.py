"""A weight that two operators share, such as a table tied to the last linear, is quantized once.

The host quantizes the table for Gather, and behind it, as if it were an activation, the transposed table for the product:
rounded twice, with one scale for all rows, and dequantized and quantized anew at every run.
"""

import onnx_ir as ir

from attnquant.emission.editor import replace_reads
from attnquant.graph import constant, is_blocked, is_onnx, weight_axis

_MOVES = ("Transpose", "Identity")


def drop_second_quantizers(model: ir.Model) -> int:
    """Remove Q/DQ behind a weight's own, in place, where the scales in front are one per output channel; returns how many.

    Requires: a Q/DQ model as the host writes it, weights folded or not.
    Ensures: MatMul and Gemm read the weight as it was quantized first; other readers, and scales along the sum, are left.
    """
    gone = 0
    for node in list(model.graph):
        if not is_onnx(node, "QuantizeLinear") or constant(node.inputs[0]) is not None:
            continue
        axis = _channels(node.inputs[0])
        pairs = [use.node for use in node.outputs[0].uses()]
        readers = [use for pair in pairs for use in pair.outputs[0].uses()]
        if axis is None or not all(is_onnx(pair, "DequantizeLinear") for pair in pairs):
            continue
        source = node.inputs[0]
        if source is None or not readers or not all(_fits(use.node, use.idx, axis) for use in readers):
            continue
        for pair in pairs:
            replace_reads(pair.outputs[0], source)
            model.graph.remove(pair, safe=True)
        model.graph.remove(node, safe=True)
        gone += 1
    return gone


def _channels(value: ir.Value | None) -> int | None:
    """Axis along which a moved, dequantized weight matrix has its scales, -1 for a single scale; None for anything else."""
    orders = []
    while value is not None and (node := value.producer()) is not None and is_onnx(node, *_MOVES):
        orders.append(node.attributes.get_ints("perm", [1, 0]) if is_onnx(node, "Transpose") else [0, 1])
        value = node.inputs[0]
    node = None if value is None else value.producer()
    if node is None or not is_onnx(node, "DequantizeLinear") or is_blocked(node):
        return None
    maker = None if node.inputs[0] is None else node.inputs[0].producer()
    weight = constant(maker.inputs[0] if maker is not None and is_onnx(maker, "QuantizeLinear") else node.inputs[0])
    scale = constant(node.inputs[1])
    if weight is None or weight.ndim != 2 or scale is None:
        return None
    axis = node.attributes.get_int("axis", 1) % 2
    for order in reversed(orders):
        axis = list(order).index(axis)
    return -1 if scale.size == 1 else axis


def _fits(reader: ir.Node, index: int, axis: int) -> bool:
    """Whether a product reads scales along `axis` of its weight as those of its output channels."""
    if index != 1 or not is_onnx(reader, "MatMul", "Gemm"):
        return False
    return axis in (-1, weight_axis(reader))
