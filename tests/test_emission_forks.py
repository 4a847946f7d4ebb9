"""A linear whose result is quantized for one reader and float for another stays int8."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

from attnquant.emission import biases, executed, forks


def forked(shape: list[int | str], *, bias: bool, output: bool) -> ir.Model:
    builder = Builder()
    builder.input("x", shape)
    out = linear(builder, builder.qdq("x", dtype=np.uint8, zero_point=120), "fc", 16, 8, bias=bias)
    builder.node("Relu", [builder.qdq(out, dtype=np.uint8, zero_point=128)], "key", name="key")
    other = out if output else builder.node("Sigmoid", [out], "value", name="value")
    return builder.model(["key", other])


@pytest.mark.parametrize("output", [False, True])
@pytest.mark.parametrize("shape", [["b", "s", 16], [2, 5, 16], ["n", 16]])
@pytest.mark.parametrize("bias", [False, True])
def test_forked_linears_keep_their_kernel(shape: list[int | str], bias: bool, output: bool) -> None:
    reference, model = (forked(shape, bias=bias, output=output) for _ in range(2))
    changed = forks.apply(model, TARGET)
    assert changed == (1 if not bias or len(shape) == 2 else 0)
    biases.apply(model, TARGET)
    valid(model)
    feeds = {"x": normal(*[size if isinstance(size, int) else 2 for size in shape])}
    for got, expected in zip(optimized(model, feeds), plain(reference, feeds), strict=True):
        np.testing.assert_allclose(got, expected, atol=0.0301)  # a rounded tie may fall on the other side
        assert np.mean(np.abs(got - expected) > 1e-3) < 0.05
    assert executed(model).int8 == ("fc",)
    assert executed(model).clean


def test_without_the_pass_the_runtime_computes_in_float() -> None:
    """Guards the reason for the pass."""
    assert executed(forked(["b", "s", 16], bias=False, output=False)).float_behind_dequantize == ("fc",)


def test_the_tensor_that_is_read_keeps_its_name() -> None:
    model = forked(["b", "s", 16], bias=False, output=False)
    forks.apply(model, TARGET)
    assert model.graph.node("value").inputs[0].name == "fc_product"
    model = forked(["b", "s", 16], bias=False, output=True)
    forks.apply(model, TARGET)
    assert [value.name for value in model.graph.outputs] == ["key", "fc_product"]


def test_one_reader_needs_nothing() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    out = linear(builder, builder.qdq("x"), "fc", 16, 8, bias=False)
    assert forks.apply(builder.model([builder.qdq(out)]), TARGET) == 0
