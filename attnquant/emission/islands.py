"""Float32 islands: the nodes around int8 arithmetic that stay float32 in a half precision model.

ONNX Runtime's CPU fuses Q/DQ with a MatMul to MatMulIntegerToFloat only in float32; with half precision scales it runs
Cast > DequantizeLinear > float MatMul instead.
"""

from collections.abc import Set

import onnx_ir as ir

from attnquant.graph import constant, is_onnx

PASSES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Cast")
"""Operators that hand on a dequantized operand unchanged in value."""

LINEARS = ("MatMul", "Gemm", "Conv", "ConvTranspose")


def islands(graph: ir.Graph, own: Set[ir.Node]) -> frozenset[ir.Node]:
    """Nodes of the main graph that work in float32 on a target with float32 int8 kernels only.

    :param own: Nodes that quantization made: only their DequantizeLinears begin an island.
    """
    found: set[ir.Node] = set()
    for node in graph:
        if is_onnx(node, "QuantizeLinear", "DequantizeLinear") and node in own:
            found.add(node)
        elif is_onnx(node, *LINEARS):
            chains = [_behind(value) for value in node.inputs[:2]]
            if any(chain and chain[-1] in own for chain in chains):
                found.add(node)
                found.update(step for chain in chains for step in chain)
        elif is_onnx(node, "Add") and any(_is_int32_bias(value, own) for value in node.inputs):
            found.add(node)
    return frozenset(_without_leaks(found))


def _behind(value: ir.Value | None) -> list[ir.Node]:
    """The chain from `value` back to a DequantizeLinear, which comes last; empty where there is none."""
    chain: list[ir.Node] = []
    while value is not None:
        node = value.producer()
        if node is None or not is_onnx(node, "DequantizeLinear", *PASSES):
            return []
        chain.append(node)
        if is_onnx(node, "DequantizeLinear"):
            return chain
        value = node.inputs[0]
    return []


def _is_int32_bias(value: ir.Value | None, own: Set[ir.Node]) -> bool:
    node = None if value is None else value.producer()
    if node is None or node not in own or not is_onnx(node, "DequantizeLinear"):
        return False
    data = constant(node.inputs[0])
    return data is not None and data.dtype.name == "int32"


def _without_leaks(found: set[ir.Node]) -> set[ir.Node]:
    """Leave out the moves of a dequantized tensor that something outside reads too: they stay half precision."""
    while True:
        leaking = {
            node
            for node in found
            if is_onnx(node, *PASSES) and any(use.node not in found for value in node.outputs for use in value.uses())
        }
        if not leaking:
            return found
        found -= leaking
