"""Linears that ONNX Runtime merged when it saved an optimized model: ai.onnx operators again, same numbers, then int8."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto
from qdqmodels import Builder, normal, plain

import attnquant
from attnquant import runtime
from attnquant.emission import executed
from attnquant.emission.unfused import unfuse
from attnquant.model import load


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def changed(model: ir.Model, feeds: dict[str, np.ndarray], expected: list[str]) -> None:
    before = plain(model, feeds)[0]
    assert unfuse(model) == 1
    assert operators(model) == expected
    assert "linear" in [node.name for node in model.graph]
    assert model.graph.outputs[0].name == "y"
    np.testing.assert_allclose(plain(model, feeds)[0], before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("attributes", "shape", "expected"), [
    ({"alpha": 0.25}, (8, 4), ["MatMul", "Mul"]), ({"transB": 1}, (4, 8), ["Transpose", "MatMul"]),
    ({"transB": 1, "alpha": 3.0}, (4, 8), ["Transpose", "MatMul", "Mul"]),
])  # fmt: skip
def test_a_scaled_product(attributes: dict[str, float], shape: tuple[int, int], expected: list[str]) -> None:
    builder = Builder()
    builder.input("x", ["b", 3, 8])
    weight = builder.constant("w", normal(*shape))
    builder.node("FusedMatMul", ["x", weight], "y", name="linear", domain="com.microsoft", **attributes)
    changed(builder.model(["y"], infer=False), {"x": normal(2, 3, 8)}, expected)


@pytest.mark.parametrize(("activation", "more"), [("Relu", {}), ("Tanh", {}), ("LeakyRelu", {"activation_alpha": 0.3})])
def test_a_gemm_with_its_activation(activation: str, more: dict[str, float]) -> None:
    builder = Builder()
    builder.input("x", ["b", 8])
    weights = [builder.constant("w", normal(4, 8)), builder.constant("c", normal(4, seed=5))]
    builder.node(
        "FusedGemm", ["x", *weights], "y", name="linear", domain="com.microsoft", transB=1, alpha=0.5,
        activation=activation, **more,
    )  # fmt: skip
    changed(builder.model(["y"], infer=False), {"x": normal(3, 8)}, ["Gemm", activation])


@pytest.mark.parametrize("residual", [False, True])
def test_a_convolution_with_residual_and_activation(residual: bool) -> None:
    builder = Builder()
    builder.input("x", ["b", 8, 5, 5])
    inputs = ["x", builder.constant("w", normal(8, 8, 3, 3)), builder.constant("c", normal(8, seed=5))]
    builder.node(
        "FusedConv", [*inputs, *(["x"] if residual else [])], "y", name="linear", domain="com.microsoft",
        pads=[1, 1, 1, 1], activation="Relu",
    )  # fmt: skip
    expected = ["Conv", "Add", "Relu"] if residual else ["Conv", "Relu"]
    changed(builder.model(["y"], infer=False), {"x": normal(2, 8, 5, 5)}, expected)


@pytest.mark.parametrize("attributes", [{"transA": 1}, {"transBatchA": 1}])
def test_what_no_plain_operator_says_stays(attributes: dict[str, int]) -> None:
    builder = Builder()
    builder.input("x", [3, 3, 3])
    builder.node("FusedMatMul", ["x", builder.constant("w", normal(3, 3))], "y", domain="com.microsoft", **attributes)
    model = builder.model(["y"], infer=False)
    assert unfuse(model) == 0
    assert operators(model) == ["FusedMatMul"]


def test_a_model_that_the_runtime_optimized_runs_in_int8(tmp_path: Path) -> None:
    """A scale behind a linear, which the runtime merges into FusedMatMul."""
    builder = Builder()
    builder.input("x", ["b", "s", 32], TensorProto.FLOAT)
    up = builder.node("MatMul", ["x", builder.constant("w1", normal(32, 32) / 6)], "up", name="first")
    scaled = builder.node("Div", [up, builder.constant("thirty", np.float32(3))], "scaled")
    weight = builder.constant("w2", normal(32, 8) / 6)
    down = builder.node("MatMul", [builder.node("Tanh", [scaled], "t"), weight], "y", name="last")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(ir.to_proto(builder.model([down])).SerializeToString(), options)
    proto = onnx.load(tmp_path / "optimized.onnx")
    assert "FusedMatMul" in [node.op_type for node in proto.graph.node]
    samples = [{"x": normal(2, 5, 32, seed=seed)} for seed in range(4)]
    result = attnquant.quantize(proto, samples)
    ran = executed(result.model)
    assert len(ran.int8) == 2
    assert ran.clean
    assert not ran.float_linears
    expected, got = (runtime.run(one, samples[0], threads=1)["y"] for one in (load(proto), result.model))
    assert 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()) > 30
