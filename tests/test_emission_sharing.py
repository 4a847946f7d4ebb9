"""Equal quantizers of one tensor become one."""

import numpy as np
from qdqmodels import TARGET, Builder, linear, normal, plain, valid

from attnquant.emission import sharing


def counts(model: object) -> tuple[int, int]:
    kinds = [node.op_type for node in model.graph]  # type: ignore[attr-defined]
    return kinds.count("QuantizeLinear"), kinds.count("DequantizeLinear")


def test_equal_parameters_share_and_others_do_not() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    same = [builder.qdq("x", name="one"), builder.qdq("x", name="two")]
    others = [builder.qdq("x", name="three", scale=0.031), builder.qdq("x", name="four", zero_point=-7)]
    outputs = [builder.node("Relu", [name], f"y{place}") for place, name in enumerate(same + others)]
    model = builder.model(outputs)
    feeds = {"x": normal(2, 3, 16) * 3}
    before = plain(model, feeds)
    assert sharing.apply(model, TARGET) == 2
    valid(model)
    assert counts(model) == (3, 3)
    for got, old in zip(plain(model, feeds), before, strict=True):
        np.testing.assert_array_equal(got, old)


def test_signed_and_unsigned_are_different_and_so_are_axes() -> None:
    builder = Builder()
    builder.input("x", ["b", 16, 16])
    builder.qdq("x", name="signed", zero_point=0)
    builder.qdq("x", name="unsigned", zero_point=0, dtype=np.uint8)
    for axis in (1, 2):
        scale, zero = builder.vector(f"s{axis}", 16), builder.constant(f"z{axis}", np.zeros(16, np.int8))
        builder.node("QuantizeLinear", ["x", scale, zero], f"q{axis}", axis=axis)
        builder.node("DequantizeLinear", [f"q{axis}", scale, zero], f"d{axis}", axis=axis)
    assert sharing.apply(builder.model(["signed_dq", "unsigned_dq", "d1", "d2"]), TARGET) == 0


def test_weights_keep_their_own() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    shared = builder.qdq("x")
    model = builder.model([linear(builder, shared, "a", 16, 8), linear(builder, shared, "b", 16, 8)])
    assert sharing.apply(model, TARGET) == 0
