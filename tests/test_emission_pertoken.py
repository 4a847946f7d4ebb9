"""A scale per token: the float function stays, the int8 one is that of numpy, and SmoothQuant's factors go in front."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import Builder, plain, valid

from attnquant.emission.pertoken import scale_tokens, settle_tokens


def float_linear(op: str, *, bias: bool = False, opset: int = 21, **attributes: int) -> ir.Model:
    builder = Builder()
    builder.input("x", ["b", 16])
    shape = (8, 16) if attributes.get("transB") else (16, 8)
    builder.constant("w", builder.rng.standard_normal(shape).astype(np.float32))
    inputs = ["x", "w"] + ([builder.constant("c", builder.rng.standard_normal(8).astype(np.float32))] if bias else [])
    builder.node(op, inputs, "y", name="linear", **attributes)
    return builder.model(["y"], opset=opset)


def rows() -> np.ndarray:
    """Rows that differ by five orders of magnitude, one of them zero."""
    array = np.random.default_rng(1).standard_normal((6, 16)).astype(np.float32)
    return array * np.array([[1e-2], [1], [1e3], [0], [5], [30]], np.float32)


@pytest.mark.parametrize(("op", "bias", "attributes"), [
    ("MatMul", False, {}), ("Gemm", False, {}), ("Gemm", True, {}), ("Gemm", True, {"transB": 1}),
])  # fmt: skip
@pytest.mark.parametrize("opset", [13, 21])
def test_the_float_function_stays(op: str, bias: bool, attributes: dict[str, int], opset: int) -> None:
    model = float_linear(op, bias=bias, opset=opset, **attributes)
    before = plain(model, {"x": rows()})
    added = scale_tokens(model, {"linear"})
    assert added == {node.name for node in model.graph if node.name != "linear"}
    assert [value.name for value in model.graph.outputs] == ["y"]
    valid(model)
    np.testing.assert_allclose(plain(model, {"x": rows()})[0], before[0], rtol=2e-5, atol=1e-5)


def test_every_row_is_divided_by_its_own_largest_magnitude() -> None:
    """Small rows too, down to half precision's smallest normal number: all levels of the quantizer are used."""
    model = float_linear("MatMul")
    scale_tokens(model, {"linear"})
    model.graph.outputs.append(model.graph.node("linear").inputs[0])
    values = rows() * np.array([[1e-2], [1], [1], [1], [1], [1]], np.float32)
    values[4, :] = 2.0**-15
    _, divided = plain(model, {"x": values})
    np.testing.assert_allclose(np.abs(divided).max(axis=1), [1, 1, 1, 0, 0.5, 1], rtol=1e-6)


def test_only_what_is_asked_for_changes() -> None:
    model = float_linear("MatMul")
    assert scale_tokens(model, {"other"}) == frozenset()
    assert [node.op_type for node in model.graph] == ["MatMul"]


def test_linears_of_one_tensor_share_one_division() -> None:
    builder = Builder()
    builder.input("x", ["b", 16])
    for name in "qk":
        builder.constant(f"w{name}", builder.rng.standard_normal((16, 8)).astype(np.float32))
        builder.node("MatMul", ["x", f"w{name}"], name, name=f"linear_{name}")
    model = builder.model(["q", "k"])
    before = plain(model, {"x": rows()})
    scale_tokens(model, {"linear_q", "linear_k"})
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("Div"), kinds.count("Mul"), kinds.count("ReduceMax")) == (1, 2, 1)
    for expected, got in zip(before, plain(model, {"x": rows()}), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5)


def as_the_host_writes(*, factor: bool) -> tuple[ir.Model, np.ndarray, np.ndarray | None]:
    """x -> division -> factor or not -> Q/DQ of any range -> int8 linear -> product; (model, weight, factor)."""
    builder = Builder()
    builder.input("x", ["b", 16])
    builder.constant("axis", np.array([-1]))
    builder.constant("least", np.float32(2.0**-14))
    builder.node("Abs", ["x"], "abs")
    builder.node("ReduceMax", ["abs", "axis"], "most")
    builder.node("Max", ["most", "least"], "largest")
    value = builder.node("Div", ["x", "largest"], "rows")
    smooth = builder.rng.uniform(0.2, 3, 16).astype(np.float32) if factor else None
    if smooth is not None:
        value = builder.node("Mul", [value, builder.constant("f", smooth)], "smooth", name="x_nncf_smooth_quant")
    weight = builder.weight("w", (16, 8), axis=1)
    builder.node("MatMul", [builder.qdq(value, scale=0.004, zero_point=-3), weight], "product", name="linear")
    builder.node("Mul", ["product", "largest"], "y")
    integers, scale = (next(item for item in builder.initializers if item.name == f"w_{end}") for end in ("int8", "scale"))
    dequantized = ir.from_proto(integers).numpy() * ir.from_proto(scale).numpy()
    return builder.model(["y"]), dequantized, smooth


@pytest.mark.parametrize("factor", [False, True])
def test_the_quantized_linear_is_that_of_numpy(factor: bool) -> None:
    model, weight, smooth = as_the_host_writes(factor=factor)
    settle_tokens(model, {"linear"})
    valid(model)
    x = rows().astype(np.float64) * (1 if smooth is None else smooth)
    largest = np.maximum(np.abs(x).max(axis=1, keepdims=True), 2.0**-14)
    expected = np.rint(x / largest * 127) / 127 @ weight * largest
    got = plain(model, {"x": rows()})[0]
    levels = np.abs(weight).max() * largest / 127  # what one activation may be off by where it lies between two levels
    assert np.all(np.abs(got - expected) <= 1.01 * levels)
    assert np.mean(np.abs(got - expected) <= 1e-5 * largest) > 0.8


def test_a_factor_stands_in_front_of_the_division() -> None:
    model, _, smooth = as_the_host_writes(factor=True)
    settle_tokens(model, {"linear"})
    node = next(node for node in model.graph if node.name == "x_nncf_smooth_quant")
    assert node.inputs[0].name == "x"
    assert sorted(use.node.op_type for use in node.outputs[0].uses()) == ["Abs", "Div"]
    assert smooth is not None


def test_linears_without_a_division_keep_their_ranges() -> None:
    model, _, _ = as_the_host_writes(factor=True)
    settle_tokens(model, {"another"})
    assert {node.inputs[1].name for node in model.graph if node.op_type == "QuantizeLinear"} == {"smooth_qdq_scale"}
