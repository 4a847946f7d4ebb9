"""Linears whose result is quantized for one reader and read in float by another keep their int8 kernel.

ONNX Runtime looks for QuantizeLinear right behind a linear; where it finds one it wants nothing but that, and computes the
linear in float if something else reads the result too. A Reshape to the same shape, which copies nothing, separates them.
"""

import onnx_ir as ir

from attnquant.emission.editor import Editor, set_input
from attnquant.emission.linears import Linear, quantized_linears
from attnquant.graph import constant, is_onnx
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Put a Reshape behind such linears, in place; returns how many.

    Requires: the rank of the result known; others are left alone.
    Ensures: the same numbers, and no new control flow; the linear's result keeps its tensor name for its readers.
    """
    editor = Editor(model)
    return sum(_separate(linear, editor) for linear in list(quantized_linears(model)))


def _separate(linear: Linear, editor: Editor) -> int:
    value = _result(linear)
    uses = tuple(value.uses())
    quantizers = [use for use in uses if is_onnx(use.node, "QuantizeLinear") and use.idx == 0]
    if not quantizers or (len(uses) == 1 and not value.is_graph_output()) or value.shape is None:
        return 0
    node = value.producer()
    if node is None or node.graph is not editor.graph:
        return 0
    if value.is_graph_output():
        # The caller reads the linear's own result; only the quantizers read the copy.
        copy = editor.same_shape(node, value, f"{node.name}/fork")
        for use in quantizers:
            set_input(use.node, 0, copy)
        return 1
    copy = editor.same_shape(node, value, f"{node.name}/fork")
    for use in uses:
        use.node.replace_input_with(use.idx, copy)
    value.name, copy.name = copy.name, value.name
    return 1


def _result(linear: Linear) -> ir.Value:
    """What the runtime's linear computes: with its bias, where MatMul and Add become one Gemm on a matrix."""
    output = linear.output
    uses = tuple(output.uses())
    if is_onnx(linear.node, "MatMul") and len(uses) == 1 and is_onnx(uses[0].node, "Add"):
        matrix = output.shape is not None and len(output.shape) == 2
        if matrix and constant(uses[0].node.inputs[1 - uses[0].idx]) is not None:
            return uses[0].node.outputs[0]
    return output
