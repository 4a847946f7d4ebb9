"""NNCF's bias correction: which biases are corrected, and the output of the mean input without a session for each."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from nncf.tensor import Tensor
from nncf.tensor import functions as fns
from onnx import numpy_helper

from attnquant.emission.dequantize import values
from attnquant.emission.weights import quantized
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


def shifted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_get_bias_shift` that computes a linear's quantized output of its mean input here, without a session for each."""

    def replacement(
        self: Any, model: Any, input_blob: Any, output_channel_axis: Any, output_fp: list[Tensor], output_name: str
    ) -> Tensor:
        blob = next(iter(input_blob.values()))
        plan = current_plan()
        found = None if plan is None or output_channel_axis != -1 else _product(model, blob, plan.folder)
        if found is None:
            return original(self, model, input_blob, output_channel_axis, output_fp, output_name)
        return fns.stack(output_fp) - Tensor(found)

    return replacement


def corrected(original: Callable[..., Any]) -> Callable[..., Any]:
    """`FastBiasCorrection.apply` that leaves a draft as it is."""

    def replacement(self: Any, model: Any, graph: Any, statistic_points: Any = None, dataset: Any = None) -> Any:
        plan = current_plan()
        return model if plan is not None and plan.draft else original(self, model, graph, statistic_points, dataset)

    return replacement


def _product(model: onnx.ModelProto, blob: np.ndarray, folder: str | None) -> np.ndarray | None:
    """The output's channels of an input whose rows are all the same; None for more than quantizers and one MatMul.

    :param folder: Where weights lie that are not in the message.
    """
    nodes = model.graph.node
    products = [node for node in nodes if node.op_type == "MatMul"]
    kinds = {node.op_type for node in nodes} - {"MatMul", "QuantizeLinear", "DequantizeLinear"}
    if kinds or len(products) != 1 or not blob.size or products[0].output[0] != model.graph.output[0].name:
        return None
    found = {tensor.name: numpy_helper.to_array(tensor, folder or "") for tensor in model.graph.initializer}
    found[model.graph.input[0].name] = blob.reshape(-1, blob.shape[-1])[:1]
    for node in nodes:
        given = [found[name] for name in node.input]
        if node.op_type == "MatMul":
            if given[0].ndim != 2 or given[1].ndim != 2 or given[0].shape[1] != given[1].shape[0]:
                return None
            found[node.output[0]] = given[0] @ given[1]
            continue
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        array, scale, zero_point = given
        convert = quantized if node.op_type == "QuantizeLinear" else values
        found[node.output[0]] = convert(array, scale, zero_point, axis)
    return np.asarray(found[products[0].output[0]][0])
