"""One quantizer where the same tensor is quantized twice with the same parameters."""

import onnx_ir as ir

from attnquant.emission.editor import replace_reads
from attnquant.graph import constant, is_onnx
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Let readers of equal QuantizeLinear, then DequantizeLinear, share the first, in place; returns how many go.

    Requires: nodes in topological order. Only constant parameters are compared, by value; weights are left alone.
    Ensures: every reader gets the same numbers.
    """
    gone = 0
    for op_type in ("QuantizeLinear", "DequantizeLinear"):
        first: dict[tuple[object, ...], ir.Node] = {}
        for node in list(model.graph):
            key = _key(node) if is_onnx(node, op_type) else None
            if key is None:
                continue
            kept = first.setdefault(key, node)
            if kept is not node and not node.outputs[0].is_graph_output():
                replace_reads(node.outputs[0], kept.outputs[0])
                model.graph.remove(node, safe=True)
                gone += 1
    return gone


def _key(node: ir.Node) -> tuple[object, ...] | None:
    """The quantized tensor and everything that decides the result; None where that is not constant."""
    value = node.inputs[0]
    if value is None or constant(value) is not None:
        return None
    parameters: list[object] = []
    for parameter in node.inputs[1:]:
        array = constant(parameter)
        if array is None and parameter is not None:
            return None
        parameters.append(None if array is None else (array.dtype.str, array.shape, array.tobytes()))
    attributes = sorted((name, str(attribute.value)) for name, attribute in node.attributes.items())
    return (id(value), *parameters, *attributes)
