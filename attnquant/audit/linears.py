"""Linears with a constant weight: which run in int8, and why the others do not."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.audit.flow import MOVES, Flow, is_dequantize, is_quantize
from attnquant.audit.quantizers import parameters
from attnquant.graph import bodies, is_onnx

_INTEGER = frozenset({
    "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "QGemm", "QLinearMatMul",
})  # fmt: skip
"""Products whose operands are integers already."""
_WEIGHT_ONLY = ("MatMulBnb4", "MatMulNBits")
_EIGHT = ("int8", "uint8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear; `reason` is "" where weight and activation are int8."""

    node: str
    reason: str


def linears(flow: Flow, inside: Iterable[ir.Node], kept: Mapping[str, str]) -> Iterator[Linear]:
    """Every MatMul or Gemm of a constant weight with an activation, in graph order.

    :param inside: Nodes of attentions: their products are no linears, not even with a learned K.
    :param kept: {name: reason} of linears that were left float on purpose.
    """
    own = set(inside)
    for path, body in bodies(flow.model):
        for node in body:
            if node in own:
                continue
            reason = _reason(flow, node)
            if reason is None:
                continue
            if reason and (node.name or "") in kept:
                reason = kept[node.name or ""]
            elif reason and path:
                reason = f"{'inside control flow' if path.startswith('/') else 'inside a function'}: {reason}"
            yield Linear(node=node.name or "", reason=reason)


def _reason(flow: Flow, node: ir.Node) -> str | None:
    """None: no linear; "": int8; else why it is not."""
    if node.op_type in _INTEGER:
        return ""
    if node.op_type in _WEIGHT_ONLY:
        return f"the weight alone is quantized ({node.op_type})"
    if not is_onnx(node, "MatMul", "Gemm") and node.op_type not in ("FusedMatMul", "FusedGemm"):
        return None
    if len(node.inputs) < 2 or flow.is_data(node.inputs[0]) == flow.is_data(node.inputs[1]):
        return None
    data = 0 if flow.is_data(node.inputs[0]) else 1
    activation, weight = _activation(flow, node.inputs[data]), constant_type(node.inputs[1 - data])
    if activation in _EIGHT and weight in _EIGHT:
        return ""
    if activation is None:
        return "weight and activation are float" if weight is None else f"the weight alone is quantized ({weight})"
    if weight is None:
        return f"the activation alone is quantized ({activation})"
    return f"weight {weight}, activation {activation}"


def _activation(flow: Flow, value: ir.Value | None) -> str | None:
    """Type of the activation's quantizer; None where a path has none."""
    trace = flow.trace(value)
    if not trace.complete:
        return None
    types = {parameters(hit.quantize or hit.dequantize).dtype for hit in trace.hits}
    return types.pop() if len(types) == 1 else next(iter(sorted(types - set(_EIGHT))), "int8")


def constant_type(value: ir.Value | None) -> str | None:
    """Type of a constant operand's integers behind DequantizeLinear; None for a float constant."""
    while value is not None and (node := value.producer()) is not None:
        if is_dequantize(node):
            source = node.inputs[0]
            maker = None if source is None else source.producer()
            if is_quantize(maker) and maker is not None:
                return parameters(maker).dtype
            return parameters(node).dtype
        if not is_onnx(node, *MOVES):
            return None
        value = node.inputs[0]
    return None
