"""Tied tables: quantized once, with the scales that the table has, exact in the runtime's kernels."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto
from qdqmodels import Builder, plain, valid

from attnquant import runtime
from attnquant.emission.twice import drop_second_quantizers
from attnquant.emission.weights import fold_weights

WORDS, WIDTH = 24, 16


def tied(*, axis: int | None = 0, move: str = "Transpose", transb: bool = False) -> tuple[ir.Model, np.ndarray]:
    """ids -> rows of a quantized table -> uint8 -> product with the table, quantized again behind a move; (model, table)."""
    builder = Builder()
    builder.input("ids", ["b"], TensorProto.INT64)
    table = builder.rng.standard_normal((WORDS, WIDTH)).astype(np.float32)
    largest = np.abs(table).max() if axis is None else np.abs(table).max(axis=1 - axis)
    builder.constant("table", table)
    scale = builder.constant("s", np.asarray(largest / 127, np.float32))
    zero = builder.constant("z", np.zeros(largest.shape, np.int8))
    side = {} if axis is None else {"axis": axis}
    builder.node("QuantizeLinear", ["table", scale, zero], "tq", **side)
    builder.node("DequantizeLinear", ["tq", scale, zero], "td", **side)
    builder.node("Gather", ["td", "ids"], "rows")
    moved = builder.node(move, ["td"], "moved") if move else "td"
    weight = builder.qdq(moved, scale=0.03, zero_point=3)
    activation = builder.qdq("rows", scale=0.02, zero_point=128, dtype=np.uint8)
    side = {"transB": 1} if transb else {}
    builder.node("Gemm" if transb else "MatMul", [activation, weight], "y", name="head", **side)
    return builder.model(["y"]), table


@pytest.mark.parametrize(("axis", "move", "transb"), [
    (0, "Transpose", False), (None, "Transpose", False), (0, "", True), (0, "Identity", True),
])  # fmt: skip
def test_the_product_reads_the_table_as_it_was_quantized_first(axis: int | None, move: str, transb: bool) -> None:
    model, table = tied(axis=axis, move=move, transb=transb)
    assert drop_second_quantizers(model) == 1
    assert [node.op_type for node in model.graph].count("QuantizeLinear") == 2
    assert fold_weights(model, overflow_safe=True) == 1
    valid(model)
    ids = np.array([3, 0, 23, 7, 7])
    dequantize = next(node for node in model.graph if node.op_type == "DequantizeLinear" and node.outputs[0].name == "td")
    integers, scale = (value.const_value.numpy() for value in dequantize.inputs[:2])
    read = integers * (scale[:, None] if scale.ndim else scale)
    assert np.abs(read - table).max() <= scale.max() / 2 * 1.001
    rows = (np.clip(np.rint(read[ids] / np.float32(0.02)) + 128, 0, 255) - 128) * 0.02
    np.testing.assert_allclose(plain(model, {"ids": ids})[0], rows @ read.T, rtol=1e-4, atol=1e-4)
    # The kernels of CPUs without VNNI saturate where a pair of weights is too large for 16 bits.
    np.testing.assert_allclose(runtime.run(model, {"ids": ids})["y"], rows @ read.T, rtol=1e-4, atol=1e-4)
    pairs = integers.astype(int).reshape(WORDS, -1, 2)
    sums = np.maximum(np.maximum(pairs, 0).sum(-1), np.maximum(-pairs, 0).sum(-1)).max(axis=-1)
    assert sums.max() <= 128  # exact ...
    assert (sums if axis == 0 else sums.max()).min() >= 126  # ... and no coarser than that takes


@pytest.mark.parametrize(("axis", "move", "transb"), [(1, "Transpose", False), (1, "", True)])
def test_scales_along_the_sum_are_left(axis: int, move: str, transb: bool) -> None:
    model, _ = tied(axis=axis, move=move, transb=transb)
    before = [node.name for node in model.graph]
    assert drop_second_quantizers(model) == 0
    assert [node.name for node in model.graph] == before


def test_activations_keep_their_quantizers() -> None:
    builder = Builder()
    builder.input("x", ["b", 16])
    activation = builder.qdq(builder.qdq("x"), name="again")
    builder.node("MatMul", [activation, builder.weight("w", (16, 8), axis=1)], "y")
    assert drop_second_quantizers(builder.model(["y"])) == 0
