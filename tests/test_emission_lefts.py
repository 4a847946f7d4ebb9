"""A weight used on both sides: the product on the left reads a float constant, and nothing dequantizes at run time."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdqmodels import TARGET, Builder, normal, optimized, plain, valid

import attnquant
from attnquant import runtime
from attnquant.emission import executed, lefts
from attnquant.emission.kernels import COMPUTED
from attnquant.graph import constant
from tests.decomposed_cases import CASES

WIDTH = 32


def both_sides() -> onnx.ModelProto:
    """relu(x W + b) and W times its transpose."""
    weights = [numpy_helper.from_array(normal(WIDTH, WIDTH) / 6, "w"), numpy_helper.from_array(normal(WIDTH), "b")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="right"),
        helper.make_node("Add", ["a", "b"], ["c"], name="add"),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Transpose", ["r"], ["t"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["w", "t"], ["y"], name="left"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 5, WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "both", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_a_weight_on_both_sides_passes_its_own_check() -> None:
    samples = [{"x": normal(2, 5, WIDTH)} for _ in range(4)]
    result = attnquant.quantize(both_sides(), samples)
    report = attnquant.check(result.model)
    assert report.ok, (report.unplanned, report.problems)
    assert not report.unplanned
    ran = executed(result.model)
    assert ran.int8 == ("right",)
    assert not ran.float_behind_dequantize
    assert "DequantizeLinear" not in ran.operators
    assert result.setup.kept_float[0].node == "left"
    expected = runtime.run(ir.from_proto(both_sides()), samples[0], threads=1)["y"]
    noise = expected - runtime.run(result.model, samples[0], threads=1)["y"]
    assert 10 * np.log10((expected**2).sum() / (noise**2).sum()) > 30


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_the_numbers_are_the_same(axis: int | None) -> None:
    builder = Builder()
    builder.input("x", ["b", 16, "s"])
    weight = builder.weight("w", (8, 16), axis=axis)
    model = builder.model([builder.node("MatMul", [weight, "x"], "y", name="left")])
    feeds = {"x": normal(2, 16, 3)}
    before = plain(model, feeds)
    assert lefts.apply(model, TARGET) == 1
    valid(model)
    np.testing.assert_array_equal(plain(model, feeds)[0], before[0])
    np.testing.assert_allclose(optimized(model, feeds)[0], before[0], atol=1e-5)
    assert constant(model.graph.node("left").inputs[0]).dtype == np.float32
    assert lefts.apply(model, TARGET) == 0


@pytest.mark.parametrize(("size", "taken"), [(0, 1), (4, 0)], ids=["explicit zero", "blocks"])
def test_an_explicit_block_size_of_zero_is_no_block(size: int, taken: int) -> None:
    """torch writes it."""
    builder = Builder()
    builder.input("x", ["b", 16, "s"])
    weight = builder.weight("w", (8, 16), axis=1)
    model = builder.model([builder.node("MatMul", [weight, "x"], "y", name="left")])
    dequantize = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    dequantize.attributes["block_size"] = ir.AttrInt64("block_size", size)
    assert lefts.apply(model, TARGET) == taken


def test_a_constant_query_stays_integers() -> None:
    samples = [{"x": normal(2, 5, 32)}]
    model = attnquant.quantize(CASES["constant_query"]()[0].proto(), samples).model
    assert lefts.apply(model, TARGET) == 0


@pytest.mark.parametrize("between", ["", "Identity", "Transpose"])
def test_a_projected_table_is_folded_by_the_runtime(between: str) -> None:
    """x W, and LayerNormalization(table) W: relative positions go through the weights of Q and K (DeBERTa)."""
    builder = Builder()
    builder.input("x", ["n", 5, WIDTH])
    weight = builder.constant("w", normal(WIDTH, WIDTH) / 6)
    turned = builder.node(between, [weight], "moved") if between else weight
    own = builder.node("Transpose", [weight], "own") if between == "Transpose" else weight
    builder.node("MatMul", ["x", own], "a", name="right")
    table = builder.constant("table", normal(7, WIDTH, seed=3))
    normed = builder.node("LayerNormalization", [table, builder.vector("scale", WIDTH)], "normed", axis=-1)
    builder.node("Unsqueeze", [normed, builder.constant("zero", np.array([0]))], "batched")
    builder.node("Transpose", [builder.node("MatMul", ["batched", turned], "b", name="fixed")], "t", perm=[0, 2, 1])
    model = builder.model([builder.node("MatMul", [builder.node("Sigmoid", ["a"], "s"), "t"], "y", name="positions")])
    samples = [{"x": normal(2, 5, WIDTH, seed=seed)} for seed in range(4)]
    result = attnquant.quantize(model, samples)
    report = attnquant.check(result.model)
    assert report.ok, report.violations
    assert {(row.node, row.reason) for row in report.linears} == {("right", ""), ("positions", COMPUTED)}
    ran = executed(result.model)
    assert "right" in ran.int8
    assert not ran.float_behind_dequantize
    assert "LayerNormalization" not in ran.operators
    expected, got = (runtime.run(one, samples[0], threads=1)["y"] for one in (model, result.model))
    assert 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()) > 30


@pytest.mark.parametrize("shared", [False, True], ids=["own weight", "weight of a linear"])
def test_a_product_of_two_stored_constants_is_no_linear(shared: bool) -> None:
    """Object queries of fixed size through their projection (DETR): stock NNCF fails on it."""
    builder = Builder()
    builder.input("x", ["n", 5, WIDTH])
    queries, weight = builder.constant("queries", normal(7, WIDTH)), builder.constant("w", normal(WIDTH, WIDTH) / 6)
    key = builder.node("MatMul", ["x", builder.constant("wk", normal(WIDTH, WIDTH, seed=4) / 6)], "k", name="key")
    builder.node("Transpose", [key], "kt", perm=[0, 2, 1])
    builder.node("MatMul", [queries, "wk" if shared else weight], "q", name="fixed")
    builder.node("Softmax", [builder.node("MatMul", ["q", "kt"], "scores", name="qk")], "p", axis=-1)
    model = builder.model([builder.node("MatMul", ["p", "x"], "y", name="pv")])
    result = attnquant.quantize(model, [{"x": normal(2, 5, WIDTH, seed=seed)} for seed in range(4)])
    assert len(result.sites) == 1
    report = attnquant.check(result.model)
    assert report.ok, report.violations
    assert [row.node for row in report.linears] == ["key"]
    assert all(constant(value).dtype == np.float32 for value in result.model.graph.node("fixed").inputs)
    assert executed(result.model).clean


def test_linears_that_depend_on_sizes_alone_are_float_with_a_reason() -> None:
    """Object queries repeated for every batch (DETR): the same for all data, which NNCF leaves alone and smoothed before."""
    builder = Builder()
    builder.input("x", ["n", 5, WIDTH])
    ends = [builder.constant(f"end{end}", np.array([end])) for end in (0, 1)]
    batch = builder.node("Slice", [builder.node("Shape", ["x"], "shape"), *ends], "batch")
    sizes = builder.node("Concat", [batch, builder.constant("rest", np.array([7, WIDTH]))], "sizes", axis=0)
    queries = builder.node("Expand", [builder.constant("queries", normal(1, 7, WIDTH)), sizes], "expanded")
    norm = builder.node("LayerNormalization", [queries, builder.vector("scale", WIDTH)], "normed", axis=-1)
    builder.node("MatMul", [norm, builder.constant("w", normal(WIDTH, WIDTH) / 6)], "q", name="repeated")
    key = builder.node("MatMul", ["x", builder.constant("wk", normal(WIDTH, WIDTH, seed=4) / 6)], "k", name="key")
    builder.node("Transpose", [key], "kt", perm=[0, 2, 1])
    builder.node("Softmax", [builder.node("MatMul", ["q", "kt"], "scores", name="qk")], "p", axis=-1)
    model = builder.model([builder.node("MatMul", ["p", "x"], "y", name="pv")])
    result = attnquant.quantize(model, [{"x": normal(2, 5, WIDTH, seed=seed)} for seed in range(4)])
    assert [(row.node, "sizes alone" in row.reason) for row in result.setup.kept_float] == [("repeated", True)]
    assert [value.name for value in result.model.graph.node("repeated").inputs] == ["normed", "w"]
    assert attnquant.check(result.model).ok
    assert executed(result.model).clean
