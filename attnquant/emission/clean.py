"""Dropping what nothing reads: nodes and initializers that other passes left behind."""

import onnx_ir as ir

from attnquant.graph import bodies, is_onnx
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Remove, in place, constants that nothing reads and Q/DQ without a reader; returns how many.

    Ensures: nodes that compute something of the float model stay, read or not; so do inputs and outputs of graphs.
    """
    dropped = 0
    for _, body in bodies(model):
        for node in reversed(list(body)):
            if is_onnx(node, "DequantizeLinear", "QuantizeLinear", "Constant") and _is_idle(node):
                body.remove(node, safe=True)
                dropped += 1
    for _, body in bodies(model):
        if not isinstance(body, ir.Graph):
            continue
        for name, value in list(body.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del body.initializers[name]
                dropped += 1
    return dropped


def _is_idle(node: ir.Node) -> bool:
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)
