"""Sums in front of LayerNormalization: what the runtime makes of them, and that the numbers stay."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant.emission import residuals
from attnquant.target import parse_target

WIDTH = 16
TARGET = parse_target("onnxruntime-cpu@1.31.1")


def encoder_tail(*, residual_read_again: bool = False, swapped: bool = False, opset: int = 17) -> onnx.ModelProto:
    """LayerNormalization(residual + (x @ w + bias)), [1, 8, 16]."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.normal(size=(WIDTH, WIDTH)), "bias": rng.normal(size=WIDTH)}
    arrays |= {"g": np.ones(WIDTH), "b": np.zeros(WIDTH)}
    terms = ["r", "biased"] if swapped else ["biased", "r"]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"], name="linear"),
        helper.make_node("Add", ["product", "bias"], ["biased"], name="bias_add"),
        helper.make_node("Add", terms, ["total"], name="residual_add"),
        helper.make_node("LayerNormalization", ["total", "g", "b"], ["y"], name="norm"),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, WIDTH])]
    if residual_read_again:
        nodes.append(helper.make_node("Relu", ["total"], ["z"], name="reader"))
        outputs.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 8, WIDTH]))
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, WIDTH]) for name in ("x", "r")]
    weights = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def run(model: onnx.ModelProto) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    feeds = {name: rng.normal(size=(1, 8, WIDTH)).astype(np.float32) for name in ("x", "r")}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def optimized_operators(model: onnx.ModelProto, path: str) -> list[str]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.optimized_model_filepath = path
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("swapped", [False, True])
def test_bias_and_residual_become_one_sum_that_stays_unfused(swapped: bool, tmp_path: object) -> None:
    before = encoder_tail(swapped=swapped)
    model = ir.from_proto(before)
    assert residuals.apply(model, TARGET) == 1
    after = ir.to_proto(model)
    onnx.checker.check_model(after, full_check=True)
    assert [(node.op_type, node.name) for node in after.graph.node] == [
        ("MatMul", "linear"), ("Sum", "residual_add"), ("LayerNormalization", "norm")
    ]  # fmt: skip
    assert after.graph.node[1].output[0] == "total"
    for expected, got in zip(run(before), run(after), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6)
    assert "SkipLayerNormalization" in optimized_operators(before, f"{tmp_path}/before.onnx")
    assert "SkipLayerNormalization" not in optimized_operators(after, f"{tmp_path}/after.onnx")


def test_a_sum_that_something_else_reads_stays() -> None:
    model = ir.from_proto(encoder_tail(residual_read_again=True))
    assert residuals.apply(model, TARGET) == 0
    assert "Sum" not in [node.op_type for node in model.graph]


def test_a_dequantized_bias_stays_with_its_linear() -> None:
    model = encoder_tail()
    bias = helper.make_node("DequantizeLinear", ["bias_int32", "bias_scale"], ["bias_float"], name="dequantize_bias")
    model.graph.node.insert(0, bias)
    model.graph.node[2].input[1] = "bias_float"
    model.graph.initializer.append(numpy_helper.from_array(np.ones(WIDTH, np.int32), "bias_int32"))
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(0.1, np.float32), "bias_scale"))
    read = ir.from_proto(model)
    assert residuals.apply(read, TARGET) == 1
    assert [node.op_type for node in read.graph] == ["DequantizeLinear", "MatMul", "Add", "Sum", "LayerNormalization"]
