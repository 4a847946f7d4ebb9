"""The reading of optimized graphs, against graphs whose execution is known."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdqmodels import Builder, linear

from attnquant.emission import executed
from attnquant.emission.execution import read_optimized
from attnquant.errors import ModelError


def mixed() -> ir.Model:
    """One linear of each kind: int8, float behind a dequantized weight (weight on the left), float, and a table."""
    builder = Builder()
    builder.input("x", ["b", 4, 4])
    builder.input("ids", [2], TensorProto.INT64)
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=120)
    good = linear(builder, quantized, "good", 4, 4, bias=False)
    left = builder.node("MatMul", [builder.weight("w", (4, 4), axis=0), quantized], "left_out", name="left")
    builder.constant("f", builder.rng.standard_normal((4, 4)).astype(np.float32))
    float_one = builder.node("MatMul", ["x", "f"], "float_out", name="float")
    table = builder.weight("table", (2000, 4), axis=0)
    rows = builder.node("Gather", [table, "ids"], "rows")
    return builder.model([good, left, float_one, rows])


def test_every_product_is_told_apart() -> None:
    report = executed(mixed())
    assert report.int8 == ("good",)
    assert report.float_behind_dequantize == ("left",)
    assert report.float_linears == ("float",)
    assert report.attention_behind_dequantize == ()
    assert len(report.tables) == 1
    assert not report.clean
    assert report.operators["MatMulIntegerToFloat"] == 1


def test_products_of_two_tensors_are_no_linears() -> None:
    builder = Builder()
    builder.input("x", ["b", 4, 4])
    builder.node("Softmax", ["x"], "p", axis=-1)
    scores = builder.node("MatMul", ["p", builder.qdq("x", dtype=np.uint8, zero_point=120)], "scores", name="scores")
    report = executed(builder.model([scores]))
    assert report.attention_behind_dequantize == ("scores",)
    assert report.float_behind_dequantize == ()
    assert report.clean


def test_models_in_every_form(tmp_path: Path) -> None:
    model = mixed()
    proto = ir.to_proto(model)
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    reports = [executed(source) for source in (model, proto, proto.SerializeToString(), path, str(path))]
    assert all(report == reports[0] for report in reports)


def test_a_model_that_does_not_load_is_an_error_with_the_runtimes_reason() -> None:
    builder = Builder()
    builder.input("x", ["b", 4])
    builder.node("NoSuchOperator", ["x"], "y")
    with pytest.raises(ModelError, match=r"does not load .*NoSuchOperator"):
        executed(builder.model(["y"], infer=False))


def test_subgraphs_are_read_too_and_renamed_nodes_get_their_names_back() -> None:
    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    inner = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["z"], name="inside")], "g", [], [], [weight])
    nodes = [
        helper.make_node("If", ["c"], ["z"], then_branch=inner, else_branch=inner),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"]),
        helper.make_node("Gemm", ["x", "d"], ["y"], name="fc/MatMulAddFusion"),
    ]
    constants = [numpy_helper.from_array(np.zeros((4, 4), np.int8), "q"), numpy_helper.from_array(np.float32(1), "s")]
    report = read_optimized(helper.make_model(helper.make_graph(nodes, "g", [], [], constants)))
    assert report.float_linears == ("inside", "inside")
    assert report.float_behind_dequantize == ("fc",)
