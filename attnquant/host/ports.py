"""Ports made visible to the host: one Identity per quantized edge.

NNCF quantizes tensors; an attention needs edges: one tensor may feed Q, K and V, or two attentions and a graph output, and
only some of these uses are to be quantized. An Identity on the edge gives it a tensor of its own, so the quantizer can't
reach any other reader, and "expanding the insertion points of parallel edges" needs no change in NNCF's graph.
"""

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from attnquant.errors import PlacementError
from attnquant.graph import is_onnx, tensor_name
from attnquant.placement import QuantizationPoint

PREFIX = "attnquant_port/"


def isolate_ports(model: ir.Model, points: Iterable[QuantizationPoint]) -> Mapping[str, QuantizationPoint]:
    """Insert an Identity on the edge of every point, in place; returns {name of the Identity: point}.

    Points on one edge (two attentions behind one repeat_kv) share an Identity and its quantizer.
    Requires unique node names in the main graph.

    :raises PlacementError: a point names an edge that the graph does not have.
    """
    nodes = {node.name: node for node in model.graph}
    ports: dict[str, QuantizationPoint] = {}
    shared = {(point.node, point.index): point for point in points}
    for position, point in enumerate(shared.values()):
        node = nodes.get(point.node)
        value = node.inputs[point.index] if node is not None and point.index < len(node.inputs) else None
        if node is None or value is None:
            msg = (
                f"Site {point.site!r}, role {point.role}: expected an edge at input {point.index} of node {point.node!r}, "
                "got none. The setup was made for another model."
            )
            raise PlacementError(msg)
        _require_heads(point, value)
        name = f"{PREFIX}{position}"
        output = ir.Value(name=f"{name}_output", type=value.type, shape=value.shape)
        identity = ir.Node("", "Identity", [value], outputs=[output], name=name)
        model.graph.insert_before(node, identity)
        node.replace_input_with(point.index, output)
        ports[name] = point
    return ports


def _require_heads(point: QuantizationPoint, value: ir.Value) -> None:
    """NNCF has one scale for each position of axis 1; these are heads in (batch, heads, ...) alone."""
    sizes = () if value.shape is None else tuple(value.shape)
    if point.granularity == "head" and (len(sizes) != 4 or sizes[1] != point.heads):
        msg = (
            f"Site {point.site!r}, role {point.role}: expected a tensor (batch, {point.heads}, ...) of rank 4 for one "
            f"scale a head, got {point.tensor!r} with shape {[str(size) for size in sizes]}. Use the granularity \"tensor\"."
        )
        raise PlacementError(msg)


def join_ports(model: ir.Model) -> None:
    """Take out the Identities again, in place: what read one now reads what it read."""
    for node in list(model.graph):
        if is_onnx(node, "Identity") and (node.name or "").startswith(PREFIX):
            source, output = node.inputs[0], node.outputs[0]
            ir.convenience.replace_all_uses_with(output, source)  # type: ignore[arg-type]
            model.graph.remove(node, safe=True)


def port_quantizers(model: ir.Model) -> dict[str, ir.Node]:
    """{name of the port's Identity: the QuantizeLinear behind it}."""
    found = {}
    for node in model.graph:
        if not is_onnx(node, "QuantizeLinear") or node.inputs[0] is None:
            continue
        producer = node.inputs[0].producer()
        if producer is not None and (producer.name or "").startswith(PREFIX):
            found[producer.name or ""] = node
    return found


def edge_tensor(model: ir.Model, node_name: str, index: int) -> str:
    """Name of the tensor at one edge, "" if there is none."""
    for node in model.graph:
        if node.name == node_name and index < len(node.inputs):
            return tensor_name(node.inputs[index])
    return ""
