"""Constant factors in front of and behind linears go into what is there anyway.

NNCF leaves SmoothQuant's factor as a Mul in front of every linear; LayerScale is one behind a linear. Both belong into the
scale of a norm, the columns of the linear that makes the tensor, or, through an attention, the columns of its V projection.
"""

from collections import Counter

import numpy as np
import onnx_ir as ir

from attnquant.emission.absorb import absorb
from attnquant.emission.editor import Editor, replace_reads
from attnquant.graph import constant, is_onnx
from attnquant.target import Target

SMOOTH = "nncf_smooth_quant"
"""In the name of every Mul that NNCF's SmoothQuant adds."""


def apply(model: ir.Model, target: Target) -> int:
    """Fold constant vectors into the tensors that they multiply, in place; returns how many Mul are gone.

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
    """Fold one Mul; why not, if not."""
    places = [place for place in (0, 1) if is_onnx(node, "Mul") and constant(node.inputs[place]) is not None]
    if len(places) != 1:
        return "no product with a constant"
    factor, value, output = constant(node.inputs[places[0]]), node.inputs[1 - places[0]], node.outputs[0]
    if factor is None or value is None or value.shape is None or value.dtype != ir.DataType.FLOAT:
        return "rank or type not known"
    rank = len(value.shape)
    if factor.ndim > rank or factor.size < 2 or factor.size != factor.shape[-1] or output.is_graph_output():
        return "no vector along the last axis"
    if isinstance(value.shape[-1], int) and value.shape[-1] != factor.size:
        return "the product is wider than the tensor"  # an outer product, of positions and frequencies
    reason = absorb(value, np.broadcast_to(factor, factor.shape).reshape([1] * (rank - 1) + [-1]), node, editor)
    if reason is None:
        replace_reads(output, value)
        editor.graph.remove(node, safe=True)
    return reason
