"""Dropping what nothing reads: nodes and initializers that other passes left behind."""

import onnx_ir as ir

from attnquant.graph import bodies, is_constant, is_onnx
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Remove, in place, constants that nothing reads, arithmetic on them, and Q/DQ without a reader; returns how many.

    Ensures: nodes that compute something from an input of the model stay, read or not; so do inputs and outputs of graphs.
    """
    dropped = 0
    for _, body in bodies(model):
        for node in reversed(list(body)):
            quantizer = is_onnx(node, "DequantizeLinear", "QuantizeLinear")
            if _is_idle(node) and (quantizer or all(is_constant(value) for value in node.inputs)):
                body.remove(node, safe=True)
                dropped += 1
    return dropped + drop_dead_initializers(model)


def drop_dead_initializers(model: ir.Model) -> int:
    """Remove, in place, initializers that no node reads and that are no output or input; returns how many."""
    dropped = 0
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
