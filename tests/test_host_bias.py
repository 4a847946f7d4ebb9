"""A constant times an activation with a bias (Mamba, 1x1 convolutions as products) quantizes like any other model."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tinymodels
from onnx import TensorProto, helper, numpy_helper

import attnquant

WIDTH = tinymodels.WIDTH


def turned(bias: tuple[int, ...]) -> onnx.ModelProto:
    """x (batch, WIDTH, 6) -> W x + b -> Relu -> transposed -> MatMul and Add, weight on the right -> y."""
    nodes = [
        helper.make_node("MatMul", ["w", "x"], ["wx"], name="left"),
        helper.make_node("Add", ["wx", "b"], ["wxb"], name="add"),
        helper.make_node("Relu", ["wxb"], ["r"], name="relu"),
        helper.make_node("Transpose", ["r"], ["t"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "v"], ["tw"], name="right"),
        helper.make_node("Add", ["tw", "c"], ["y"], name="add_right"),
    ]
    weights = {"w": (WIDTH, WIDTH), "b": bias, "v": (WIDTH, WIDTH), "c": (WIDTH,)}
    graph = helper.make_graph(
        nodes,
        "turned",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 6, WIDTH])],
        [
            numpy_helper.from_array(tinymodels.weights(seed, *shape), name)
            for seed, (name, shape) in enumerate(weights.items())
        ],
    )
    return tinymodels.made(graph, 17)


@pytest.mark.parametrize("bias", [(WIDTH, 1), (1, WIDTH, 1), (6,), (1,)], ids=str)
def test_a_bias_behind_a_weight_on_the_left(bias: tuple[int, ...]) -> None:
    model = turned(bias)
    data = [{"x": tinymodels.weights(seed, 2, WIDTH, 6) * 2} for seed in range(8)]
    result = attnquant.quantize(model, data)
    quantized = ir.to_proto(result.model)
    (expected,), (got,) = tinymodels.run(model, data[0]), tinymodels.run(quantized, data[0])
    assert 10 * np.log10(np.square(expected).sum() / np.square(expected - got).sum()) > 25
    report = attnquant.check(result.model)
    assert report.ok
    assert "right" not in {linear.node for linear in report.linears if linear.reason}
