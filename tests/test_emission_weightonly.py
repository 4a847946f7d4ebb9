"""Weights alone as int8: the numbers of numpy, in the graph and in the runtime's own kernel."""

import numpy as np
import pytest
from qdqmodels import Builder, plain, valid

from attnquant import runtime
from attnquant.emission.weightonly import quantize_weights


def model(op: str, transb: int = 0) -> tuple[object, np.ndarray]:
    """(model x -> linear -> y, weight (in, out))."""
    builder = Builder()
    builder.input("x", ["b", 64])
    weight = (builder.rng.standard_normal((64, 32)) * builder.rng.uniform(0.1, 10, 32)).astype(np.float32)
    weight[:, 5] = 0
    builder.constant("w", np.ascontiguousarray(weight.T) if transb else weight)
    builder.node(op, ["x", "w"], "y", name="linear", **({"transB": 1} if transb else {}))
    return builder.model(["y"]), weight


@pytest.mark.parametrize(("op", "transb"), [("MatMul", 0), ("Gemm", 0), ("Gemm", 1)])
def test_weights_are_rounded_per_output_channel(op: str, transb: int) -> None:
    made, weight = model(op, transb)
    assert quantize_weights(made, {"linear"}) == 1
    valid(made)
    dequantize = next(node for node in made.graph if node.op_type == "DequantizeLinear")
    integers, scale = (value.const_value.numpy() for value in dequantize.inputs[:2])
    assert integers.dtype == np.int8
    assert dequantize.attributes.get_int("axis") == (0 if transb else 1)
    largest = np.abs(weight).max(axis=0)
    np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
    levels = np.where(largest > 0, largest / 127, 1)
    rounded = np.rint(weight / levels) * levels
    x = np.random.default_rng(2).standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_allclose(plain(made, {"x": x})[0], x @ rounded, rtol=1e-4, atol=1e-4)
    signal, noise = x @ rounded, runtime.run(made, {"x": x})["y"] - x @ rounded
    assert (signal**2).sum() > 1e3 * (noise**2).sum()  # the runtime may round activations, in blocks, to 8 bits


def test_only_named_linears_with_a_matrix_of_float_change() -> None:
    made, _ = model("MatMul")
    assert quantize_weights(made, {"another"}) == 0
    builder = Builder()
    builder.input("x", ["b", 16])
    builder.input("w", [16, 8])
    builder.node("MatMul", ["x", "w"], "y", name="linear")
    assert quantize_weights(builder.model(["y"]), {"linear"}) == 0
