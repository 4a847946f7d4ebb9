"""Quantizers of activations that no int8 kernel of the target uses: they cost time and accuracy, and are reported.

The host places them (on sums, concatenations, norms, pools); whether they stay is for the recipe's author to decide.
"""

from collections import Counter

import onnx_ir as ir

from attnquant.emission.linears import MOVES
from attnquant.graph import constant, is_onnx, operator, sizes_only
from attnquant.target import Target

_MOVES = (*MOVES, "Cast", "Slice", "Split", "Expand", "Gather")
_FACTORS = ("Mul", "Div")


def remaining(model: ir.Model, target: Target) -> tuple[str, ...]:
    """A sentence on Q/DQ pairs of activations in the main graph that only operators without an int8 kernel read, if any.

    Attention operators count as readers that want their quantizer, and so do operators whose result is quantized again:
    the runtime has int8 kernels for many of those. Nothing is changed.
    """
    found: Counter[str] = Counter()
    for node in model.graph if target.int8_operators else ():
        if is_onnx(node, "DequantizeLinear") and _is_activation(node):
            readers = _readers(node.outputs[0])
            if readers and not any(_uses(reader, target) for reader in readers):
                found[readers[0].op_type] += 1
    if not found:
        return ()
    parts = ", ".join(f"{op_type} {count}" for op_type, count in sorted(found.items()))
    count = found.total()
    quantizers = f"{count} quantizer{'s are' if count > 1 else ' is'}"
    return (f"{quantizers} read by operators without an int8 kernel on {target.name} alone: {parts}.",)


def _is_activation(dequantize: ir.Node) -> bool:
    """Whether QuantizeLinear makes the integers, moves in between, of something computed."""
    value = dequantize.inputs[0]
    while value is not None:
        node = value.producer()
        if is_onnx(node, "QuantizeLinear") and node is not None:
            return constant(node.inputs[0]) is None
        if node is None or not is_onnx(node, *_MOVES):
            return False
        value = node.inputs[0]
    return False


def _readers(value: ir.Value) -> list[ir.Node]:
    """Nodes that compute with a tensor, behind moves and factors."""
    found: list[ir.Node] = []
    waiting = [value]
    while waiting:
        for use in waiting.pop().uses():
            factor = is_onnx(use.node, *_FACTORS) and constant(use.node.inputs[1 - use.idx]) is not None
            if (is_onnx(use.node, *_MOVES) and use.idx == 0) or factor:
                waiting.extend(use.node.outputs)
            elif not sizes_only(use.node):
                found.append(use.node)
    return found


def _uses(reader: ir.Node, target: Target) -> bool:
    domain, op_type = operator(reader)
    if domain != "ai.onnx" or op_type in target.int8_operators or "Attention" in op_type:
        return True
    return any(is_onnx(use.node, "QuantizeLinear") for output in reader.outputs for use in output.uses())
