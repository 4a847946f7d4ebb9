"""Weights that the graph computes from constants: folded to the same bits, and then int8 like any other."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant import runtime
from attnquant.emission.computed import fold_computed

F16, F32, I64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.INT64
KINDS = {F16: np.float16, F32: np.float32}


def weight(name: str, *shape: int, dtype: int = F16) -> onnx.TensorProto:
    data = np.random.default_rng(sum(map(ord, name))).standard_normal(shape) / 8
    return numpy_helper.from_array(data.astype(KINDS[dtype]), name)


def ints(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=name, **attributes)


def model(
    nodes: Sequence[onnx.NodeProto], outputs: Sequence[str], weights: Sequence[onnx.TensorProto], dtype: int = F16
) -> ir.Model:
    inputs = [helper.make_tensor_value_info("x", dtype, ("b", "s", 32))]
    made = [helper.make_tensor_value_info(name, dtype, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", inputs, made, list(weights))
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def packed(dtype: int = F16) -> ir.Model:
    """Concat(Wq, Wk, Wv) > Transpose > MatMul."""
    nodes = [
        node("Concat", ["wq", "wk", "wv"], ["w"], "pack", axis=0),
        node("Transpose", ["w"], ["wt"], "turn", perm=[1, 0]),
        node("MatMul", ["x", "wt"], ["y"], "qkv"),
    ]
    return model(
        nodes,
        ["y"],
        [weight(f"w{role}", size, 32, dtype=dtype) for role, size in zip("qkv", (32, 16, 16), strict=True)],
        dtype,
    )


def sliced() -> ir.Model:
    """One projection weight and bias cut in three, as torch's MultiheadAttention is exported, with computed sizes."""
    nodes = [
        node("Shape", ["w"], ["shape"], "shape"),
        node("Gather", ["shape", "zero"], ["rows"], "rows"),
        node("Div", ["rows", "three"], ["third"], "third"),
    ]
    for place, role in enumerate("qkv"):
        nodes += [
            node("Mul", ["third", f"i{place}"], [f"from_{role}"], f"from_{role}"),
            node("Mul", ["third", f"i{place + 1}"], [f"to_{role}"], f"to_{role}"),
            node("Slice", ["w", f"from_{role}", f"to_{role}", "axis"], [f"w_{role}"], f"cut_w_{role}"),
            node("Slice", ["b", f"from_{role}", f"to_{role}", "axis"], [f"b_{role}"], f"cut_b_{role}"),
            node("Transpose", [f"w_{role}"], [f"t_{role}"], f"turn_{role}", perm=[1, 0]),
            node("MatMul", ["x", f"t_{role}"], [f"m_{role}"], f"proj_{role}"),
            node("Add", [f"m_{role}", f"b_{role}"], [role], f"bias_{role}"),
        ]
    numbers = [ints("zero", 0), ints("three", 3), ints("axis", 0), *(ints(f"i{place}", place) for place in range(4))]
    return model(nodes, ["q", "k", "v"], [weight("w", 96, 32), weight("b", 96), *numbers])


def names(graph: ir.Model) -> list[str | None]:
    return [item.name for item in graph.graph]


def test_packed_weights_are_folded_to_the_same_bits() -> None:
    for dtype in (F16, F32):
        original = packed(dtype)
        before = ir.to_proto(original).SerializeToString()
        folded = fold_computed(original)
        assert ir.to_proto(original).SerializeToString() == before
        assert names(folded) == ["qkv"]
        assert set(folded.graph.initializers) == {"wt"}
        parts = [original.graph.initializers[f"w{role}"].const_value.numpy() for role in "qkv"]
        expected = np.concatenate(parts).T
        found = folded.graph.initializers["wt"].const_value.numpy()
        assert (found.dtype, found.tobytes()) == (KINDS[dtype], np.ascontiguousarray(expected).tobytes())


def test_slices_with_computed_bounds_are_folded() -> None:
    original = sliced()
    folded = fold_computed(original)
    assert names(folded) == [f"{kind}_{role}" for role in "qkv" for kind in ("proj", "bias")]
    assert set(folded.graph.initializers) == {f"{kind}_{role}" for kind in "tb" for role in "qkv"}
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float16)}
    expected, got = runtime.run(original, feeds), runtime.run(folded, feeds)
    assert all(np.array_equal(expected[role], got[role]) for role in "qkv")


def test_what_is_seen_through_or_arithmetic_or_fed_stays() -> None:
    """A turned tied weight, a scaled one, a widened one, a random one, and what an input moves: nothing to fold."""
    nodes = [
        node("Transpose", ["w"], ["wt"], "turn", perm=[1, 0]),
        node("Mul", ["w", "half"], ["scaled"], "scale"),
        node("Cast", ["w"], ["wide"], "widen", to=F32),
        node("Cast", ["wide"], ["back"], "narrow", to=F16),
        node("Concat", ["x", "x"], ["xx"], "both", axis=1),
        node("MatMul", ["xx", "wt"], ["m0"], "m0"),
        node("MatMul", ["m0", "scaled"], ["m1"], "m1"),
        node("MatMul", ["m1", "back"], ["y"], "m2"),
    ]
    original = model(nodes, ["y"], [weight("w", 32, 32), numpy_helper.from_array(np.float16(0.5), "half")])
    assert fold_computed(original) is original


def test_a_constant_with_another_reader_is_kept() -> None:
    nodes = [
        node("Concat", ["w", "v"], ["wv"], "pack", axis=1),
        node("MatMul", ["x", "wv"], ["m"], "fc"),
        node("MatMul", ["x", "w"], ["y"], "own"),
    ]
    folded = fold_computed(model(nodes, ["m", "y"], [weight("w", 32, 32), weight("v", 32, 32)]))
    assert set(folded.graph.initializers) == {"wv", "w"}
    assert names(folded) == ["fc", "own"]


@pytest.mark.parametrize("build", [packed, sliced])
def test_computed_weights_become_int8(build: object, tmp_path: Path) -> None:
    original = build()  # type: ignore[operator]
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 32)).astype(np.float16)}
    result = attnquant.quantize(original, [feeds], target="onnxruntime-cpu@1.31.1").model
    linear = [item for item in result.graph if item.op_type == "MatMul"]
    assert all(value.producer().op_type == "DequantizeLinear" for item in linear for value in item.inputs)
    kept = [value.const_value.nbytes for value in result.graph.initializers.values() if value.dtype != ir.DataType.INT8]
    assert max(kept) <= 4 * 64
    expected, got = runtime.run(original, feeds), runtime.run(result, feeds)
    for name, array in expected.items():
        wide = array.astype(np.float64)
        assert 10 * np.log10(np.sum(wide**2) / np.sum((wide - got[name]) ** 2)) > 25
