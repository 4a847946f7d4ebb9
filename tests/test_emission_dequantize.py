"""The numbers of QuantizeLinear and DequantizeLinear as attnquant computes them, beside ONNX's reference implementation."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from attnquant.emission.dequantize import values
from attnquant.emission.weights import quantized

RNG = np.random.default_rng(0)
CASES = [(None, (1,)), (0, (5,)), (1, (3,)), (-1, (4,))]


def reference(op_type: str, array: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int | None) -> np.ndarray:
    """By onnx, a scalar scale where there is one for the tensor."""
    if axis is None:
        scale, zero_point = scale.reshape(()), zero_point.reshape(())
    given = {"x": array, "s": scale, "z": zero_point}
    node = helper.make_node(op_type, list(given), ["y"], **({} if axis is None else {"axis": axis}))
    types = {name: helper.np_dtype_to_tensor_dtype(item.dtype) for name, item in given.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], item.shape) for name, item in given.items()]
    output = helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None)
    model = helper.make_model(helper.make_graph([node], "g", inputs, [output]), opset_imports=[helper.make_opsetid("", 19)])
    found = ReferenceEvaluator(onnx.ModelProto.FromString(model.SerializeToString())).run(None, given)[0]
    return np.asarray(found)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize(("axis", "shape"), CASES)
def test_values_are_those_of_dequantize_linear(dtype: type, axis: int | None, shape: tuple[int, ...]) -> None:
    limits = np.iinfo(dtype)
    integers = RNG.integers(limits.min, limits.max + 1, (5, 3, 4)).astype(dtype)
    scale, zero_point = RNG.uniform(0.01, 1, shape).astype(np.float32), RNG.integers(1, 100, shape).astype(dtype)
    expected = reference("DequantizeLinear", integers, scale, zero_point, axis)
    found = values(integers, scale, zero_point, axis)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(
        values(integers, scale, None, axis), reference("DequantizeLinear", integers, scale, np.zeros_like(zero_point), axis)
    )


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize(("axis", "shape"), CASES)
def test_integers_are_those_of_quantize_linear(dtype: type, axis: int | None, shape: tuple[int, ...]) -> None:
    array = RNG.normal(scale=90, size=(5, 3, 4)).astype(np.float32)
    scale, zero_point = RNG.uniform(0.1, 1, shape).astype(np.float32), RNG.integers(1, 100, shape).astype(dtype)
    found = quantized(array, scale, zero_point, axis)
    assert found.dtype == dtype
    assert (found.min(), found.max()) == (np.iinfo(dtype).min, np.iinfo(dtype).max)  # some are clipped
    np.testing.assert_array_equal(found, reference("QuantizeLinear", array, scale, zero_point, axis))
