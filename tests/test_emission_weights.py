"""Weights as integers: exact products on every x86 kernel, and what is left alone."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant import model as models
from attnquant import runtime
from attnquant.emission.execution import executed
from attnquant.emission.weights import fold_weights


def model(weight: np.ndarray, op: str = "MatMul", *, axis: int | None = 1, x_rank: int = 2, **attributes: int) -> ir.Model:
    """x -> Q/DQ (uint8, scale 1, zero point 0) -> op with a weight behind QuantizeLinear and DequantizeLinear."""
    channels = () if axis is None else (weight.shape[axis],)
    spread = np.abs(weight).max(axis=None if axis is None else tuple(i for i in range(weight.ndim) if i != axis)) / 127
    data = {
        "w": weight,
        "ws": spread.astype(np.float32).reshape(channels),
        "wz": np.zeros(channels, np.int8),
        "xs": np.float32(1),
        "xz": np.uint8(0),
    }
    side = {} if axis is None else {"axis": axis}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"], name="xq"),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"], name="xd"),
        helper.make_node("QuantizeLinear", ["w", "ws", "wz"], ["wq"], name="wq", **side),
        helper.make_node("DequantizeLinear", ["wq", "ws", "wz"], ["wd"], name="wd", **side),
        helper.make_node(op, ["xd", "wd"], ["y"], name="linear", **attributes),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * x_rank)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in data.items()],
    )
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def folded(made: ir.Model) -> tuple[np.ndarray, np.ndarray]:
    """(integers, scales) that the weight's DequantizeLinear reads."""
    node = next(node for node in made.graph if node.name == "wd")
    return node.inputs[0].const_value.numpy(), node.inputs[1].const_value.numpy()


def pair_sums(integers: np.ndarray, reduction: int) -> np.ndarray:
    """Largest sum of same-signed weights of every pair (0, 1), (2, 3), ... along the reduction."""
    moved = np.moveaxis(integers.astype(int), reduction, -1)
    pairs = moved.reshape(*moved.shape[:-1], -1, 2)
    return np.maximum(np.maximum(pairs, 0).sum(-1), np.maximum(-pairs, 0).sum(-1))


@pytest.mark.parametrize("kind", ["normal", "uniform", "equal"])
def test_no_pair_can_saturate_and_the_runtime_is_exact(kind: str) -> None:
    random = np.random.default_rng(0)
    weight = {
        "normal": random.standard_normal((64, 8)),
        "uniform": random.uniform(-1, 1, (64, 8)),
        "equal": np.full((64, 8), 0.7),
    }[kind].astype(np.float32)
    made = model(weight)
    assert fold_weights(made, overflow_safe=True) == 1
    integers, scales = folded(made)
    assert integers.dtype == np.int8
    assert pair_sums(integers, 0).max() * 255 < 2**15
    sample = {"x": np.full((3, 64), 255, np.float32)}  # what saturates first
    expected = 255.0 * (integers.astype(np.float64) * scales).sum(axis=0)
    np.testing.assert_allclose(runtime.run(made, sample, threads=1)["y"], np.tile(expected, (3, 1)), rtol=1e-5)


def test_scales_are_the_smallest_that_are_safe() -> None:
    weight = np.zeros((4, 3), np.float32)
    weight[0, 0] = 1.0  # alone in its pair: the full range
    weight[:2, 1] = 1.0  # both of one pair: half the range
    weight[1:3, 2] = 1.0  # neighbours in different pairs: the full range
    made = model(weight)
    fold_weights(made, overflow_safe=True)
    integers, scales = folded(made)
    np.testing.assert_allclose(scales, [1 / 127, 2 / 127, 1 / 127], rtol=1e-6)
    assert integers.max(axis=0).tolist() == [127, 64, 127]


def test_without_the_need_the_scales_stay() -> None:
    weight = np.random.default_rng(1).standard_normal((8, 4)).astype(np.float32)
    made = model(weight)
    fold_weights(made, overflow_safe=False)
    integers, scales = folded(made)
    np.testing.assert_allclose(scales, np.abs(weight).max(axis=0) / 127, rtol=1e-6)
    np.testing.assert_array_equal(integers, np.rint(weight / scales))


def test_reduction_follows_gemm_and_the_side_of_the_weight() -> None:
    weight = np.random.default_rng(2).uniform(0.5, 1, (6, 10)).astype(np.float32)
    transposed = model(weight, "Gemm", axis=0, transB=1)
    fold_weights(transposed, overflow_safe=True)
    assert pair_sums(folded(transposed)[0], 1).max() <= 128
    plain = model(weight, "Gemm", axis=1)
    fold_weights(plain, overflow_safe=True)
    assert pair_sums(folded(plain)[0], 0).max() <= 128


def test_convolutions_keep_any_two_weights_apart_from_overflow() -> None:
    weight = np.random.default_rng(3).standard_normal((4, 2, 3, 3)).astype(np.float32)
    made = model(weight, "Conv", axis=0, x_rank=4)
    fold_weights(made, overflow_safe=True)
    assert np.abs(folded(made)[0].astype(int)).max() <= 64


def test_one_scale_for_the_tensor_and_an_odd_reduction() -> None:
    weight = np.full((5, 3), 1.0, np.float32)
    made = model(weight, axis=None)
    fold_weights(made, overflow_safe=True)
    integers, scales = folded(made)
    assert scales.shape == ()
    assert int(integers.max()) == 64


def test_zero_channels_and_what_is_no_weight() -> None:
    weight = np.zeros((4, 2), np.float32)
    made = model(weight)
    fold_weights(made, overflow_safe=True)
    assert not folded(made)[0].any()
    assert np.isfinite(runtime.run(made, {"x": np.ones((1, 4), np.float32)}, threads=1)["y"]).all()
    activations = [node for node in made.graph if node.op_type == "QuantizeLinear"]
    assert [node.name for node in activations] == ["xq"], "a quantizer of an activation is no weight's"


@pytest.mark.parametrize("axis", [1, None])
def test_scales_that_have_to_stay_make_weights_uint8_and_the_runtime_is_exact(axis: int | None) -> None:
    weight = np.random.default_rng(4).uniform(-1, 1, (64, 8)).astype(np.float32)
    kept = model(weight, axis=axis)
    fold_weights(kept, overflow_safe=False)
    int8, scales = folded(kept)
    made = model(weight, axis=axis)
    assert fold_weights(made, overflow_safe=True, keep_scales=True) == 1
    integers, same = folded(made)
    np.testing.assert_array_equal(same, scales)
    assert integers.dtype == np.uint8
    np.testing.assert_array_equal(integers.astype(int) - 128, int8)
    sample = {"x": np.full((3, 64), 255, np.float32)}
    expected = 255.0 * (int8.astype(np.float64) * scales).sum(axis=0)
    np.testing.assert_allclose(runtime.run(made, sample, threads=1)["y"], np.tile(expected, (3, 1)), rtol=1e-5)
    assert "MatMulIntegerToFloat" in executed(made).operators


def test_what_can_not_overflow_stays_int8() -> None:
    weight = np.zeros((4, 2), np.float32)
    weight[::2] = 1.0  # alone in their pairs
    safe, cuda = model(weight), model(np.ones((4, 2), np.float32))
    fold_weights(safe, overflow_safe=True, keep_scales=True)
    fold_weights(cuda, overflow_safe=False, keep_scales=True)
    assert {folded(made)[0].dtype for made in (safe, cuda)} == {np.dtype(np.int8)}


@pytest.mark.parametrize(("dtype", "zero"), [(np.int8, 5), (np.uint8, 200)])
def test_any_quantizer_keeps_its_values(dtype: type, zero: int) -> None:
    weight = np.random.default_rng(5).uniform(-1, 1, (6, 3)).astype(np.float32)
    made = model(weight)
    made.graph.initializers["wz"].const_value = ir.tensor(np.full(3, zero, dtype))
    made.graph.initializers["wz"].dtype = ir.DataType.from_numpy(np.dtype(dtype))
    sample = {"x": np.arange(6, dtype=np.float32).reshape(1, 6)}
    before = models.copy(made)
    assert fold_weights(made, overflow_safe=True) == 0
    assert fold_weights(made, overflow_safe=True, keep_scales=True) == 1
    assert folded(made)[0].dtype == np.uint8
    scale = np.abs(weight).max(0) / 127
    limits = np.iinfo(dtype)
    values = (np.clip(np.rint(weight / scale) + zero, limits.min, limits.max) - zero) * scale
    for one in (before, made):
        np.testing.assert_allclose(runtime.run(one, sample, threads=1)["y"], sample["x"] @ values, rtol=1e-4)


def test_convolutions_in_uint8_are_exact() -> None:
    weight = np.random.default_rng(6).standard_normal((4, 2, 3, 3)).astype(np.float32)
    made = model(weight, "Conv", axis=0, x_rank=4)
    fold_weights(made, overflow_safe=True, keep_scales=True)
    integers, scales = folded(made)
    assert integers.dtype == np.uint8
    values = (integers.astype(np.float64) - 128) * scales.reshape(-1, 1, 1, 1)
    expected = 255.0 * values.sum(axis=(1, 2, 3))
    found = runtime.run(made, {"x": np.full((1, 2, 3, 3), 255, np.float32)}, threads=1)["y"]
    np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-5)
