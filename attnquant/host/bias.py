"""Which biases NNCF corrects after quantizing: those of linears whose activation is the first operand."""

from collections.abc import Callable
from typing import Any

from attnquant.host.plan import current_plan


def correctable(original: "staticmethod[..., bool]") -> "staticmethod[..., bool]":
    """`is_node_with_bias` that is False for a constant times an activation, W x + b."""

    def replacement(node: Any, nncf_graph: Any) -> bool:
        function: Callable[..., bool] = original.__func__
        found = function(node, nncf_graph)
        if current_plan() is None or not found:
            return found
        # Only edges with activations are in the graph, but they are looked up by port.
        return 0 not in node.layer_attributes.weight_attrs

    return staticmethod(replacement)
