"""Outputs of the model whose transposed values are quantized stay as they were computed, as the present keys of a decoder.

ONNX Runtime moves a QuantizeLinear in front of the Transpose that it reads, with a DequantizeLinear behind it, also where
the tensor there is an output of the model: the caller is then given the rounded numbers, and a cache is rounded at every
step (1.24.4 to 1.32.0). It moves none in front of a Reshape, so one to the same shape keeps the output out of it.
"""

import onnx_ir as ir

from attnquant.emission.editor import Editor, set_input
from attnquant.emission.linears import MOVES
from attnquant.graph import is_onnx
from attnquant.target import Target


def apply(model: ir.Model, target: Target) -> int:
    """Put a Reshape between such outputs and the Transposes, in place; returns how many.

    Requires: the rank of the output known; others are left alone.
    Ensures: the same numbers; names of outputs stay.
    """
    editor = Editor(model)
    return sum(_separate(value, editor) for value in dict.fromkeys(model.graph.outputs))


def _separate(value: ir.Value, editor: Editor) -> int:
    node = value.producer()
    turned = [use for use in value.uses() if is_onnx(use.node, "Transpose") and _is_quantized(use.node.outputs[0])]
    if not turned or node is None or node.graph is not editor.graph or value.shape is None:
        return 0
    copy = editor.same_shape(node, value, f"{node.name}/output")
    for use in turned:
        set_input(use.node, use.idx, copy)
    return 1


def _is_quantized(value: ir.Value) -> bool:
    """Whether QuantizeLinear reads a tensor, moves in between."""
    return any(
        is_onnx(use.node, "QuantizeLinear") or (is_onnx(use.node, *MOVES) and _is_quantized(use.node.outputs[0]))
        for use in value.uses() if use.idx == 0
    )  # fmt: skip
