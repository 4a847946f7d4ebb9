"""Relu and Clip behind a quantized product: the product stays in its int8 kernel whatever reads them."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

from attnquant.emission import clips, executed, smooth

FEEDS = {"x": normal(2, 3, 16)}


def clipped(
    kind: str, *, gemm: bool = False, reader: str = "Mul", bounds: tuple[float, ...] = (), twice: bool = False
) -> ir.Model:
    """x -> int8 product -> Relu or Clip -> `reader`."""
    builder = Builder()
    builder.input("x", ["b", 16] if gemm else ["b", "s", 16])
    if gemm:
        weight = builder.weight("fc_w", (16, 8), axis=1)
        product = builder.node("Gemm", [builder.qdq("x", zero_point=128, dtype=np.uint8), weight], "product", name="fc")
    else:
        product = linear(builder, builder.qdq("x", zero_point=128, dtype=np.uint8), "fc", 16, 8, bias=False)
    limits = [builder.constant(f"limit{place}", np.float32(value)) for place, value in enumerate(bounds)]
    last = builder.node(kind, [product, *limits], "clipped", name="clip")
    if reader == "Mul":
        last = builder.node("Mul", [last, builder.vector("factor", 8)], "y")
    if reader == "quantizer":
        last = builder.qdq(last, zero_point=0, dtype=np.uint8)
    if twice:
        last = builder.node("Add", [last, builder.node("Sigmoid", ["clipped"], "gate")], "sum")
    return builder.model([last])


@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize(("kind", "bounds", "operators"), [
    ("Relu", (), ["Max"]), ("Clip", (-0.5, 0.5), ["Max", "Min"]), ("Clip", (-0.25,), ["Max"]),
])  # fmt: skip
def test_the_product_is_int8(kind: str, bounds: tuple[float, ...], operators: list[str], *, gemm: bool) -> None:
    model = clipped(kind, bounds=bounds, gemm=gemm)
    feeds = {"x": normal(5, 16)} if gemm else FEEDS
    assert executed(model).int8 == ()  # the trap
    before = plain(model, feeds)[0]
    assert before.std() > 0.01
    assert clips.apply(model, TARGET) == 1
    valid(model)
    assert [node.op_type for node in model.graph if node.op_type in ("Relu", "Clip", "Max", "Min")] == operators
    assert model.graph.node("clip").outputs[0].name == "clipped"
    report = executed(model)
    assert report.int8 == ("fc",)
    assert report.clean
    np.testing.assert_array_equal(plain(model, feeds)[0], before)
    np.testing.assert_allclose(optimized(model, feeds)[0], before, atol=1e-5)


@pytest.mark.parametrize("change", ["output", "quantizer", "twice"])
def test_what_the_runtime_takes_as_it_is_stays(change: str) -> None:
    model = clipped("Relu", reader=change, twice=change == "twice")
    assert executed(model).int8 == ("fc",)
    assert clips.apply(model, TARGET) == 0
    assert "Relu" in [node.op_type for node in model.graph]


def test_a_float_product_keeps_its_relu() -> None:
    builder = Builder()
    builder.input("x", ["b", 16])
    builder.constant("w", normal(16, 8))
    builder.node("Relu", [builder.node("MatMul", ["x", "w"], "product")], "clipped")
    assert clips.apply(builder.model([builder.node("Mul", ["clipped", builder.vector("f", 8)], "y")]), TARGET) == 0


@pytest.mark.parametrize(("kind", "low", "folded"), [
    ("Relu", 0.5, 1), ("LeakyRelu", 0.5, 1), ("Relu", -1.0, 0), ("LeakyRelu", -1.0, 0), ("Gelu", 0.5, 0),
])  # fmt: skip
def test_a_positive_factor_passes_a_relu(kind: str, low: float, folded: int) -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    up = linear(builder, builder.qdq("x"), "up", 16, 16)
    builder.node(kind, [up], "clipped", name="clip")
    builder.constant("factor", np.linspace(low, 2, 16, dtype=np.float32))
    builder.node("Mul", ["clipped", "factor"], "scaled")
    model = builder.model([linear(builder, builder.qdq("scaled"), "down", 16, 8)])
    before = plain(model, FEEDS)[0]
    assert smooth.apply(model, TARGET) == folded
    np.testing.assert_allclose(plain(model, FEEDS)[0], before, atol=1e-5 * np.abs(before).max())
