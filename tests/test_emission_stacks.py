"""Stacked weights: a matrix where they are one, float where no kernel takes them."""

import numpy as np
import pytest
from qdqmodels import TARGET, Builder, normal, optimized, plain, valid

from attnquant.emission import clean, emit, executed, stacks
from attnquant.graph import constant


@pytest.mark.parametrize("shape", [["b", "s", 16], [2, 5, 16]])
def test_a_stack_of_one_becomes_a_matrix(shape: list[int | str]) -> None:
    builder = Builder()
    builder.input("x", shape)
    weight = builder.weight("w", (1, 16, 8), axis=2)
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=120)
    model = builder.model([builder.node("MatMul", [quantized, weight], "y", name="fc")])
    feeds = {"x": normal(2, 5, 16)}
    before = plain(model, feeds)[0]
    assert stacks.apply(model, TARGET) == 1
    assert stacks.kept_float(model) == ()
    clean.apply(model, TARGET)
    valid(model)
    np.testing.assert_allclose(optimized(model, feeds)[0], before, atol=1e-5)
    assert executed(model).int8 == ("fc",)


@pytest.mark.parametrize("axis", [0, 2])
def test_a_real_stack_with_a_scale_per_channel_goes_back_to_float(axis: int) -> None:
    """The runtime takes such a product for int8 and fails when it runs."""
    builder = Builder()
    builder.input("x", [2, 5, 16])
    weight = builder.weight("w", (2, 16, 8), axis=axis)
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=120)
    model = builder.model([builder.node("MatMul", [quantized, weight], "y", name="fc")])
    feeds = {"x": normal(2, 5, 16)}
    integers, scale = (constant(model.graph.initializers[f"w_{part}"]) for part in ("int8", "scale"))
    values = integers * scale.reshape((-1, 1, 1) if axis == 0 else (1, 1, -1))
    report = emit(model, TARGET)
    assert [(row.node, row.reason) for row in report.kept_float] == [("fc", stacks.REASON)]
    valid(model)
    np.testing.assert_allclose(optimized(model, feeds)[0], feeds["x"] @ values, atol=1e-5)
    assert executed(model).float_linears == ("fc",)
    assert {node.op_type for node in model.graph} == {"MatMul"}


def test_one_scale_for_the_stack_is_int8() -> None:
    builder = Builder()
    builder.input("x", [2, 5, 16])
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=120)
    model = builder.model([builder.node("MatMul", [quantized, builder.weight("w", (2, 16, 8), axis=None)], "y", name="fc")])
    assert stacks.apply(model, TARGET) == 0
    assert executed(model).int8 == ("fc",)
