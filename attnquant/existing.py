"""Quantizers that a model came with: they stay as they are, and what reads their values gets no second one."""

from collections.abc import Iterable
from typing import Final

import onnx_ir as ir

from attnquant.emission.smooth import SMOOTH
from attnquant.errors import ModelError
from attnquant.graph import bodies, is_onnx, tensor_name
from attnquant.placement import QUANTIZED_ALREADY, HostPoint, QuantizerSetup
from attnquant.roles import PortRole

_QUANTIZERS: Final = ("QuantizeLinear", "DequantizeLinear")
_PREFIX: Final = "quantized_already/"
_HOSTS: Final = ("QuantizeLinear_", "DequantizeLinear_", "q_output_", "dq_output_", "scale_", "zero_point_")
"""How names of the host's quantizers and their tensors start (nncf.onnx.graph.model_transformer)."""
_MOVES: Final = ("Cast", "Transpose", "Reshape", "Identity")
_INTEGER: Final = ("MatMulInteger", "QLinearMatMul", "ConvInteger", "QLinearConv")


def existing_points(model: ir.Model) -> list[HostPoint]:
    """The edges behind quantizers that the model came with, also behind casts and moves."""
    return [HostPoint(node=node.name or "", index=index) for value in _dequantized(model) for node, index in value.uses()]


def rename_quantizers(model: ir.Model) -> None:
    """Give quantizers and SmoothQuant's factors that are named as the host names its own other names, in place.

    The host names them after tensors and nodes, and refuses a model that has such names. All others keep theirs.
    """
    nodes = {node.name or "": node for _, body in bodies(model) for node in body}
    values = {tensor_name(value) for node in nodes.values() for value in (*node.inputs, *node.outputs)}
    count = 0
    for node in filter(_is_hosts, nodes.values()):
        while any(name in nodes or name in values for name in (_name(count), f"{_name(count)}_output")):
            count += 1
        node.name = _name(count)
        if not node.outputs[0].is_graph_output():
            node.outputs[0].name = f"{_name(count)}_output"
        _rename_parameters(node, f"{_name(count)}_")
        count += 1


def _rename_parameters(node: ir.Node, prefix: str) -> None:
    for value in node.inputs:
        if value is None or not value.is_initializer() or value.is_graph_input() or value.is_graph_output():
            continue
        if _is_hosts_name(tensor_name(value)):
            value.name = prefix + tensor_name(value)


def _is_hosts(node: ir.Node) -> bool:
    if is_onnx(node, "Mul"):
        return SMOOTH in (node.name or "")
    names = (node.name or "", *map(tensor_name, (*node.outputs, *node.inputs[1:])))
    return is_onnx(node, *_QUANTIZERS) and any(map(_is_hosts_name, names))


def _is_hosts_name(name: str) -> bool:
    return name.startswith(_HOSTS) or SMOOTH in name


def require_float_parts(model: ir.Model, setup: QuantizerSetup, carriers: Iterable[ir.Node]) -> QuantizerSetup:
    """The setup, where an attention or a linear is left to quantize or the model quantizes nothing itself.

    :param carriers: The nodes with a weight to quantize.
    :raises ModelError: the model is quantized from end to end.
    """
    rounded = {(point.node, point.index) for point in existing_points(model)}
    integer = sum(is_onnx(node, *_INTEGER) for _, body in bodies(model) for node in body)
    linears = [node for node in carriers if not {(node.name, 0), (node.name, 1)} <= rounded]
    asked = [row for row in setup.skipped if row.role in (PortRole.QUERY, PortRole.KEY) and row.reason != QUANTIZED_ALREADY]
    if (rounded or integer) and not (setup.points or linears or asked):
        msg = (
            "The model is quantized already: expected an attention or a linear in float, got none "
            f"({len(rounded)} edges behind DequantizeLinear, {integer} operators on integers). Give the float model."
        )
        raise ModelError(msg)
    return setup


def _name(count: int) -> str:
    return f"{_PREFIX}{count}"


def _dequantized(model: ir.Model) -> list[ir.Value]:
    found = [node.outputs[0] for _, body in bodies(model) for node in body if is_onnx(node, "DequantizeLinear")]
    for value in found:  # grows while it is read
        found.extend(node.outputs[0] for node, _ in value.uses() if is_onnx(node, *_MOVES))
    return found
