"""Linears with a bias run int8 at default settings, with static and with dynamic shapes, and compute what they did."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

from attnquant.emission import biases, executed, unsigned
from attnquant.graph import constant
from attnquant.target import parse_target

SHAPES = {
    "dynamic": ["b", "s", 16],
    "batch": ["b", 5, 16],
    "static": [2, 5, 16],
    "matrix": ["n", 16],
    "static matrix": [10, 16],
}


def with_activation(builder: Builder, tensor: str, activation: str | None) -> str:
    """What follows a linear in a transformer: GELU as exporters write it, or a residual and a norm."""
    if activation == "gelu":
        builder.node("Div", [tensor, builder.constant("root", np.float32(np.sqrt(2)))], "scaled")
        builder.node("Add", [builder.node("Erf", ["scaled"], "erf"), builder.constant("one", np.float32(1))], "shifted")
        builder.node("Mul", [tensor, "shifted"], "doubled")
        return builder.node("Mul", ["doubled", builder.constant("half", np.float32(0.5))], "gelu")
    if activation == "residual":
        builder.node("Add", [tensor, "r"], "sum")
        ones = builder.constant("ones", np.ones(8, np.float32))
        zeros = builder.constant("zeros", np.zeros(8, np.float32))
        return builder.node("LayerNormalization", ["sum", ones, zeros], "norm", axis=-1)
    return tensor


def sizes(shape: list[str | int]) -> list[int]:
    return [size if isinstance(size, int) else 2 for size in shape]


@pytest.mark.parametrize("activation", [None, "gelu", "residual"])
@pytest.mark.parametrize("kind", SHAPES)
def test_matmul_and_add_run_int8_whatever_is_known_of_the_shape(kind: str, activation: str | None) -> None:
    def built() -> ir.Model:
        builder = Builder()
        builder.input("x", SHAPES[kind])
        builder.input("r", [*SHAPES[kind][:-1], 8])
        out = linear(builder, builder.qdq("x", zero_point=120, dtype=np.uint8), "fc", 16, 8)
        return builder.model([with_activation(builder, out, activation)])

    reference, model = built(), built()
    assert biases.apply(model, TARGET) == (0 if kind in ("dynamic", "batch") else 1)
    valid(model)
    shape = sizes(SHAPES[kind])
    feeds = {"x": normal(*shape), "r": normal(*shape[:-1], 8, seed=2)}
    np.testing.assert_allclose(optimized(model, feeds)[0], plain(reference, feeds)[0], atol=3e-4)
    report = executed(model)
    assert report.int8 == ("fc",)
    assert report.clean
    if kind in ("dynamic", "batch") and activation == "residual":
        assert "SkipLayerNormalization" in report.operators  # the bias is added there


def test_without_the_pass_the_runtime_dequantizes_the_weight() -> None:
    """Guards the reason for the pass: if this fails, the runtime has learned and the pass can go."""
    builder = Builder()
    builder.input("x", [2, 5, 16])
    model = builder.model([linear(builder, builder.qdq("x", dtype=np.uint8, zero_point=120), "fc", 16, 8)])
    assert executed(model).float_behind_dequantize == ("fc",)


def test_the_bias_is_rounded_to_the_scale_of_the_product() -> None:
    builder = Builder()
    builder.input("x", [2, 5, 16])
    model = builder.model([linear(builder, builder.qdq("x", scale=0.25), "fc", 16, 8)])
    old = {value.name: constant(value) for value in model.graph.initializers.values()}
    biases.apply(model, TARGET)
    dequantize = next(node for node in model.graph if node.name == "fc_add/bias_dequantize")
    integers, scale = constant(dequantize.inputs[0]), constant(dequantize.inputs[1])
    assert integers is not None
    assert scale is not None
    np.testing.assert_array_equal(scale, old["fc_w_scale"] * np.float32(0.25))
    np.testing.assert_array_equal(integers, np.rint(old["fc_bias"].astype(np.float64) / scale.astype(np.float64)))
    assert integers.dtype == np.int32


def test_a_bias_that_int32_cannot_hold_keeps_its_value_in_another_shape() -> None:
    builder = Builder()
    builder.input("x", [2, 5, 16])
    model = builder.model([linear(builder, builder.qdq("x", scale=1e-12, zero_point=0), "fc", 16, 8)])
    feeds = {"x": normal(2, 5, 16) * 1e-11}
    before = plain(model, feeds)[0]
    assert biases.apply(model, TARGET) == 1
    add = next(node for node in model.graph if node.name == "fc_add")
    assert [None if value is None else constant(value) is not None for value in add.inputs] == [False, True]
    np.testing.assert_array_equal(plain(model, feeds)[0], before)
    unsigned.apply(model, TARGET)
    assert executed(model).int8 == ("fc",)


def test_an_unknown_shape_is_taken_for_a_static_one() -> None:
    builder = Builder()
    builder.input("x", [2, 5, 16])
    out = linear(builder, builder.qdq("x", dtype=np.uint8, zero_point=120), "fc", 16, 8)
    model = builder.model([out], infer=False)
    assert biases.apply(model, TARGET) == 1
    assert executed(model).int8 == ("fc",)


def test_force_treats_a_dynamic_linear() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    model = builder.model([linear(builder, builder.qdq("x"), "fc", 16, 8)])
    assert biases.apply(model, TARGET) == 0
    assert biases.apply(model, TARGET, force={"fc"}) == 1


@pytest.mark.parametrize(("version", "opset", "wide"), [("1.24.4", 22, False), ("1.24.4", 23, True), ("1.31.1", 23, False)])
def test_old_runtimes_lose_a_gemm_between_reshapes_at_opset_23(version: str, opset: int, wide: bool) -> None:
    """Measured with 1.24.4: float Gemm behind DequantizeLinear; fine from 1.27.0 on."""
    builder = Builder()
    builder.input("x", [2, 5, 16])
    model = builder.model([linear(builder, builder.qdq("x"), "fc", 16, 8)], opset=opset)
    assert biases.apply(model, parse_target(f"onnxruntime-cpu@{version}")) == 1
    bias = model.graph.node("fc_add").inputs[1]
    assert (constant(bias) is not None) == wide
    if wide:
        assert constant(bias).shape == (1, 1, 8)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", ["n", 4])
def test_gemm_runs_int8_with_its_factors(alpha: float, beta: float, transposed: bool, rows: int | str) -> None:
    def built() -> ir.Model:
        builder = Builder()
        builder.input("x", [rows, 16])
        quantized = builder.qdq("x", dtype=np.uint8, zero_point=120)
        weight = builder.weight("w", (8, 16) if transposed else (16, 8), axis=0 if transposed else 1)
        inputs = [quantized, weight, builder.vector("c", 8)]
        return builder.model([builder.node("Gemm", inputs, "y", name="fc", alpha=alpha, beta=beta, transB=int(transposed))])

    reference, model = built(), built()
    assert biases.apply(model, TARGET) == 1
    valid(model)
    feeds = {"x": normal(4, 16)}
    np.testing.assert_allclose(optimized(model, feeds)[0], plain(reference, feeds)[0], atol=3e-4)
    assert executed(model).int8 == ("fc",)


def test_a_weight_scaled_along_its_rows_is_left_alone() -> None:
    builder = Builder()
    builder.input("x", [4, 16])
    inputs = [builder.qdq("x"), builder.weight("w", (16, 16), axis=0), builder.vector("c", 16)]
    model = builder.model([builder.node("Gemm", inputs, "y", name="fc")])
    assert biases.apply(model, TARGET) == 0


def test_a_shared_bias_is_copied_not_edited() -> None:
    builder = Builder()
    builder.input("x", [2, 5, 16])
    out = linear(builder, builder.qdq("x"), "fc", 16, 8)
    model = builder.model([out, builder.node("Exp", ["fc_bias"], "also")])
    feeds = {"x": normal(2, 5, 16)}
    before = plain(model, feeds)[1]
    biases.apply(model, TARGET)
    np.testing.assert_array_equal(plain(model, feeds)[1], before)


def test_inner_shapes_of_a_static_model_count_as_static() -> None:
    """Inference may lose a shape that the runtime finds: with static inputs everything is static."""
    builder = Builder()
    builder.input("x", [2, 5, 16])
    builder.node("Exp", ["x"], "e")
    model = builder.model([linear(builder, builder.qdq("e", dtype=np.uint8, zero_point=120), "fc", 16, 8)])
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None and len(value.shape) == 3:
                value.shape = ir.Shape(["lost", 5, value.shape[2]])
    assert biases.apply(model, TARGET) == 1
    assert executed(model).int8 == ("fc",)
