"""The sum in front of a LayerNormalization becomes one Sum of product, bias and residual, which the runtime doesn't fuse.

ONNX Runtime fuses Add and LayerNormalization into com.microsoft SkipLayerNormalization, whose CPU kernel is a scalar loop:
five times slower than LayerNormalization and the addition alone (1.31.1, x86). Once the linears are int8 that is a tenth of
a post-norm encoder's time.
"""

import onnx_ir as ir

from attnquant.emission.editor import replace_node
from attnquant.graph import constant, is_onnx
from attnquant.target import Target

_FIRST_OPSET = 8  # Sum broadcasts since then


def apply(model: ir.Model, target: Target) -> int:
    """Turn Adds that only a LayerNormalization reads into Sum, in place; returns how many.

    Requires: passes that look for a linear's bias in an Add have run.
    Ensures: the same function up to the order of a float addition. The Sum keeps the Add's name and output; the Add of a
    constant bias that nothing else reads goes into it. A bias that is dequantized stays: its linear is to become a Gemm.
    """
    if model.graph.opset_imports.get("", 0) < _FIRST_OPSET:
        return 0
    changed = 0
    for node in list(model.graph):
        if is_onnx(node, "LayerNormalization") and node.graph is model.graph:
            add = node.inputs[0].producer() if node.inputs[0] is not None else None
            if add is not None and add.graph is model.graph and is_onnx(add, "Add") and _read_once(add):
                _replace(model.graph, add)
                changed += 1
    return changed


def _replace(graph: ir.Graph, add: ir.Node) -> None:
    terms: list[ir.Value | None] = []
    merged: list[ir.Node] = []
    for value in add.inputs:
        inner = None if value is None else value.producer()
        if inner is not None and inner.graph is graph and not merged and _adds_bias(inner) and _read_once(inner):
            terms += inner.inputs
            merged.append(inner)
        else:
            terms.append(value)
    replace_node(add, "Sum", terms)
    graph.remove(merged, safe=True)


def _adds_bias(node: ir.Node) -> bool:
    return is_onnx(node, "Add") and any(constant(value) is not None for value in node.inputs)


def _read_once(node: ir.Node) -> bool:
    value = node.outputs[0]
    return not value.is_graph_output() and len(tuple(value.uses())) == 1
