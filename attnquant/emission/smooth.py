"""Constant factors in front of and behind linears go into what is there anyway.

NNCF leaves SmoothQuant's factor as a Mul in front of every linear; LayerScale is one behind a linear. Both belong into the
scale of a norm, the columns of the linear that makes the tensor, or, through an attention, the columns of its V projection.
A number in front of the quantizer of Q or K, by which exporters write the attention's scale, belongs into the projection:
only then is the quantizer right behind it, where the runtime rounds to integers as it multiplies.
"""

from collections import Counter

import numpy as np
import onnx_ir as ir

from attnquant.emission.absorb import absorb
from attnquant.emission.editor import Editor, replace_reads
from attnquant.emission.linears import MOVES
from attnquant.graph import constant, is_onnx
from attnquant.target import Target

SMOOTH = "nncf_smooth_quant"
"""In the name of every Mul that NNCF's SmoothQuant adds."""


def apply(model: ir.Model, target: Target) -> int:
    """Fold constant factors into the tensors that they multiply, in place; returns how many Mul and Div are gone.

    Requires: node names unique, sizes known where a factor has to pass a Reshape.
    Ensures: the same real numbers up to rounding at every other tensor (1e-6 relative); quantizers of activations unchanged.
    A factor stays where something else reads the tensor (the residual behind a post-norm) or where a non-linear operator
    makes it (GELU).
    """
    editor = Editor(model)
    folded = 0
    for node in list(model.graph):
        if _try(node, editor) is None:
            folded += 1
    return folded


def remaining(model: ir.Model) -> tuple[str, ...]:
    """A sentence on the SmoothQuant factors that are still nodes, and why; empty where there is none. Nothing is changed."""
    reasons: Counter[str] = Counter()
    for node in model.graph:
        if is_onnx(node, "Mul") and SMOOTH in (node.name or ""):
            source = node.inputs[0].producer() if node.inputs[0] is not None else None
            shared = node.inputs[0] is not None and len(node.inputs[0].uses()) > 1
            reasons["something else reads the tensor" if shared else f"behind {source.op_type if source else 'inputs'}"] += 1
    if not reasons:
        return ()
    parts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    count = reasons.total()
    return (f"{count} SmoothQuant factor{'s stay' if count > 1 else ' stays'} as Mul: {parts}.",)


def _try(node: ir.Node, editor: Editor) -> str | None:
    """Fold one Mul or Div; why not, if not."""
    places = [place for place in (0, 1) if is_onnx(node, "Mul", "Div") and constant(node.inputs[place]) is not None]
    if len(places) != 1:
        return "no product with a constant"
    factor, value, output = constant(node.inputs[places[0]]), node.inputs[1 - places[0]], node.outputs[0]
    if factor is None or value is None or value.shape is None or value.dtype != ir.DataType.FLOAT:
        return "rank or type not known"
    if output.is_graph_output() or factor.ndim > len(value.shape):
        return "the product is an output or wider than the tensor"
    if factor.size == 1:
        return _number(node, places[0], float(factor.reshape(())), value, editor)
    if not is_onnx(node, "Mul") or factor.size != factor.shape[-1]:
        return "no vector along the last axis"
    if isinstance(value.shape[-1], int) and value.shape[-1] != factor.size:
        return "the product is wider than the tensor"  # an outer product, of positions and frequencies
    return _absorbed(node, value, factor, editor)


def _number(node: ir.Node, place: int, number: float, value: ir.Value, editor: Editor) -> str | None:
    """Fold a number in front of quantizers only: elsewhere the runtime takes it into a float product for nothing."""
    divides = is_onnx(node, "Div")
    if (divides and place == 0) or not np.finfo(np.float32).tiny < abs(number) < np.inf:
        return "no factor of the tensor"
    if not _only_quantized(node.outputs[0]):
        return "something else than quantizers reads it"
    return _absorbed(node, value, np.asarray(1 / number if divides else number), editor)


def _only_quantized(value: ir.Value) -> bool:
    """Whether QuantizeLinear alone reads a tensor, or what moves its elements."""
    uses = tuple(value.uses())
    if not uses or value.is_graph_output():
        return False
    return all(
        use.idx == 0
        and (is_onnx(use.node, "QuantizeLinear") or (is_onnx(use.node, *MOVES) and _only_quantized(use.node.outputs[0])))
        for use in uses
    )


def _absorbed(node: ir.Node, value: ir.Value, factor: np.ndarray, editor: Editor) -> str | None:
    assert value.shape is not None
    reason = absorb(value, factor.reshape([1] * (len(value.shape) - 1) + [-1]), node, editor)
    if reason is None:
        replace_reads(node.outputs[0], value)
        editor.graph.remove(node, safe=True)
    return reason
