"""Quantizers that no setup asked for."""

from collections.abc import Iterator

import onnx_ir as ir

from attnquant.audit.flow import MOVES, SCALES, Flow, is_dequantize
from attnquant.audit.quantizers import parameters
from attnquant.graph import tensor_name
from attnquant.placement import QuantizerSetup

_THROUGH = MOVES | SCALES | {"QuantizeLinear", "DequantizeLinear"}
_THROUGH_WEIGHTS = _THROUGH - {"Gather", "GatherND"}
"""A Gather that takes rows of a weight is its reader: what follows is an activation."""


def unplanned(flow: Flow, setup: QuantizerSetup) -> Iterator[str]:
    """One line for every Q/DQ with a reader that the setup does not name, directly or by the tensor's maker.

    A setup without a host section says nothing about quantizers outside attention: then nothing is unplanned.
    """
    if setup.host is None:
        return
    edges = {(point.node, point.index) for point in setup.points}
    edges |= {(point.node, point.index) for point in setup.host if point.index is not None}
    makers = {point.node for point in setup.host if point.index is None}
    linears = {point.node for point in setup.host if point.weight}
    for node in flow.dequantizes:
        source = _source(flow, node)
        through = _THROUGH if flow.is_data(node.inputs[0]) else _THROUGH_WEIGHTS
        maker = source.producer() if source is not None else None
        if parameters(node).dtype == "int32" or (maker is not None and maker.name in makers):
            continue
        strays = [
            way[-1]
            for way in flow.ahead(node.outputs[0], through)
            if not any((step.name or "", index) in edges or step.name in linears for step, index in way)
        ]
        if strays:
            readers = ", ".join(sorted({f"input {index} of {reader.op_type} {reader.name!r}" for reader, index in strays}))
            yield f"node {node.name!r} (tensor {tensor_name(source)!r}), read by {readers}"


def _source(flow: Flow, node: ir.Node) -> ir.Value | None:
    """The float tensor that was quantized; the integers where they are constant."""
    hit = flow.origin(node)
    value = node.inputs[0] if hit is None or hit.quantize is None else hit.quantize.inputs[0]
    while value is not None and (maker := value.producer()) is not None and (is_dequantize(maker) or maker.op_type in MOVES):
        if maker.op_type == "Concat" or not flow.is_data(maker.inputs[0]):
            break
        value = maker.inputs[0]
    return value
