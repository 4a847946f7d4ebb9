"""Depthwise convolutions: NNCF quantizes their input with a scale per channel, which ONNX Runtime's kernel fails on."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdqmodels import normal

import attnquant
from attnquant import runtime
from attnquant.graph import constant
from attnquant.model import load

WIDTH = 8


def separable() -> onnx.ModelProto:
    """Depthwise convolution over positions, pointwise one behind it (ConvBERT's keys), [batch, 8, positions]."""
    square = normal(WIDTH, WIDTH) / 3
    arrays = {"d": normal(WIDTH, 1, 3), "p": square[:, :, None], "w": square.T}
    nodes = [
        helper.make_node("Conv", ["x", "d"], ["depth"], name="depthwise", group=WIDTH, pads=[1, 1]),
        helper.make_node("Conv", ["depth", "p"], ["point"], name="pointwise"),
        helper.make_node("Transpose", ["point"], ["turned"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["turned", "w"], ["y"], name="linear"),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH, "positions"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "separable", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize(("target", "sizes"), [
    ("onnxruntime-cpu", {1}), ("onnxruntime-cuda@1.31", {1}), ("openvino", {1, 8}),
])  # fmt: skip
def test_one_scale_for_the_input_where_the_kernel_takes_one(target: str, sizes: set[int]) -> None:
    samples = [{"x": normal(2, WIDTH, 6, seed=seed)} for seed in range(4)]
    result = attnquant.quantize(separable(), samples, target=target)
    scales = [constant(node.inputs[1]) for node in result.model.graph if node.op_type == "QuantizeLinear"]
    assert {scale.size for scale in scales if scale is not None} == sizes
    elsewhere = target != "onnxruntime-cpu"
    expected = runtime.run(load(separable()), samples[0], threads=1)["y"]
    got = runtime.run(result.model, samples[0], threads=1, unfused=elsewhere)["y"]
    assert 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()) > 30
