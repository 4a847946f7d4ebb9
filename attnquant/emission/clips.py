"""A Relu or Clip right behind a quantized product becomes Max and Min where no quantizer follows it.

ONNX Runtime looks for the product's own quantizer behind a Relu or Clip that alone reads it. Where one node reads that and
is none (a linear that stays float, a residual), it gives the product up: a float MatMul, or FusedGemm, behind run-time
dequantization of its weight. It does not look through Max and Min (1.32.0, x86).
"""

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_node
from attnquant.graph import is_onnx
from attnquant.target import Target

_FIRST_OPSET = 8  # Max and Min broadcast since then
CLIPS = ("Relu", "Clip")
"""What the runtime takes into the quantizer behind a product or convolution."""


def apply(model: ir.Model, target: Target) -> int:
    """Replace every such Relu or Clip, in place; returns how many.

    Requires: types of tensors are known.
    Ensures: the same numbers; the last new node keeps the name and the output.
    """
    if model.graph.opset_imports.get("", 0) < _FIRST_OPSET:
        return 0
    editor = Editor(model)
    found = [node for node in model.graph if is_onnx(node, *CLIPS) and _hides(node)]
    return sum(_replaced(node, editor) for node in found)


def _hides(node: ir.Node) -> bool:
    """Whether a product of dequantized operands is read by `node` alone, and that by one node which is no quantizer."""
    value, output = node.inputs[0], node.outputs[0]
    product = None if value is None else value.producer()
    if value is None or product is None or not is_onnx(product, "MatMul", "Gemm") or product.graph is not node.graph:
        return False
    makers = [None if operand is None else operand.producer() for operand in product.inputs[:2]]
    if not all(maker is not None and is_onnx(maker, "DequantizeLinear") for maker in makers):
        return False
    readers = [use.node for use in output.uses()]
    alone = len(value.uses()) == 1 and not value.is_graph_output() and not output.is_graph_output()
    return alone and len(readers) == 1 and not is_onnx(readers[0], "QuantizeLinear")


def _replaced(node: ir.Node, editor: Editor) -> bool:
    value, output = node.inputs[0], node.outputs[0]
    if value is None or output.dtype is None or output.dtype != ir.DataType.FLOAT:
        return False
    bounds = [*node.inputs[1:3], None, None][:2]
    if is_onnx(node, "Relu"):
        bounds = [editor.constant(np.zeros((), np.float32), "attnquant_zero"), None]
    steps = [(kind, bound) for kind, bound in zip(("Max", "Min"), bounds, strict=True) if bound is not None]
    if not steps or (is_onnx(node, "Clip") and any(name in node.attributes for name in ("min", "max"))):
        return False
    for kind, bound in steps[:-1]:
        value = editor.before(node, kind, [value, bound], f"{node.name}/{kind}", like=output)
    kind, bound = steps[-1]
    replace_node(node, kind, [value, bound])
    return True
