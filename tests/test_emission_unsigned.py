"""Signed activations become unsigned: the same quantizers, bit for bit, in a form that loads and fuses."""

import numpy as np
import pytest
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

from attnquant.emission import executed, unsigned
from attnquant.graph import constant


def zero_points(model: object) -> dict[str, tuple[str, int]]:
    found = {}
    for node in model.graph:  # type: ignore[attr-defined]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            array = constant(node.inputs[2])
            found[node.name] = (array.dtype.name, int(array.reshape(-1)[0]))
    return found


def test_zero_points_move_by_128_and_weights_stay() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    model = builder.model([linear(builder, builder.qdq("x", zero_point=-8), "fc", 16, 8)])
    feeds = {"x": normal(2, 3, 16) * 8}  # far beyond both ends of the range
    before = plain(model, feeds)
    assert unsigned.apply(model, TARGET) == 1
    assert zero_points(model) == {"n_x_qdq_q": ("uint8", 120), "n_x_qdq_dq": ("uint8", 120), "n_fc_w": ("int8", 0)}
    np.testing.assert_array_equal(plain(model, feeds)[0], before[0])
    valid(model)
    assert unsigned.apply(model, TARGET) == 0


def test_one_tensor_with_several_readers_runs_int8_only_when_unsigned() -> None:
    def built() -> object:
        builder = Builder()
        builder.input("x", ["b", "s", 16])
        shared = builder.qdq("x")
        return builder.model([linear(builder, shared, name, 16, 8) for name in ("query", "key", "value")])

    signed, model = built(), built()
    unsigned.apply(model, TARGET)
    feeds = {"x": normal(2, 3, 16)}
    for got, expected in zip(optimized(model, feeds), plain(signed, feeds), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    assert set(executed(model).int8) == {"query", "key", "value"}
    assert executed(model).clean


@pytest.mark.parametrize("opset", [13, 21, 23])
def test_moves_between_quantize_and_dequantize_load(opset: int) -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    scale, zero = builder.constant("scale", np.float32(0.05)), builder.constant("zero", np.int8(3))
    builder.constant("heads", np.asarray([0, 0, 2, 8]))
    builder.node("QuantizeLinear", ["x", scale, zero], "q")
    builder.node("Reshape", ["q", "heads"], "split")
    builder.node("Transpose", ["split"], "moved", perm=[0, 2, 1, 3])
    for name in ("left", "right"):
        builder.node("DequantizeLinear", ["moved", scale, zero], name)
    model = builder.model([builder.node("Add", ["left", "right"], "y")], opset=opset)
    feeds = {"x": normal(2, 3, 16) * 4}
    expected = 2 * 0.05 * (np.clip(np.rint(feeds["x"] / np.float32(0.05)) + 3, -128, 127) - 3)
    assert unsigned.apply(model, TARGET) == 1
    valid(model)
    np.testing.assert_allclose(
        optimized(model, feeds)[0], expected.reshape(2, 3, 2, 8).transpose(0, 2, 1, 3).astype(np.float32), rtol=1e-5
    )
    assert {kind for kind, _ in zero_points(model).values()} == {"uint8"}


def test_default_zero_points_and_output_types_are_replaced() -> None:
    builder = Builder()
    builder.input("x", [4])
    builder.constant("scale", np.float32(0.1))
    builder.node("QuantizeLinear", ["x", "scale"], "q", output_dtype=3)
    builder.node("DequantizeLinear", ["q", "scale"], "y")
    model = builder.model(["y"])
    feeds = {"x": np.asarray([-20, -1, 0.04, 30], np.float32)}
    before = plain(model, feeds)[0]
    assert unsigned.apply(model, TARGET) == 1
    valid(model)
    np.testing.assert_array_equal(plain(model, feeds)[0], before)
    np.testing.assert_allclose(before, [-12.8, -1, 0, 12.7], rtol=1e-6)


def test_integers_that_something_else_reads_stay_signed() -> None:
    builder = Builder()
    builder.input("x", [4])
    builder.qdq("x")
    builder.node("Cast", ["x_qdq_q"], "raw", to=1)
    model = builder.model(["x_qdq_dq", "raw"])
    assert unsigned.apply(model, TARGET) == 0
    assert zero_points(model)["n_x_qdq_q"] == ("int8", -8)


def test_two_quantizers_that_meet_in_a_concat_change_together() -> None:
    builder = Builder()
    for name in ("x", "z"):
        builder.input(name, ["b", 4])
        builder.qdq(name, zero_point=0)
    builder.node("Concat", ["x_qdq_q", "z_qdq_q"], "both", axis=1)
    builder.node("DequantizeLinear", ["both", "x_qdq_scale", "x_qdq_zero"], "y")
    model = builder.model(["y"])
    feeds = {"x": normal(2, 4), "z": normal(2, 4, seed=2)}
    before = plain(model, feeds)[0]
    assert unsigned.apply(model, TARGET) == 2
    valid(model)
    np.testing.assert_array_equal(plain(model, feeds)[0], before)
