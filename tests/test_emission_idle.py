"""Quantizers that nothing uses are reported by the operator that reads them, and stay."""

import numpy as np
from qdqmodels import TARGET, Builder, linear

from attnquant.emission import emit, idle
from attnquant.target import parse_target


def test_only_readers_without_a_kernel_are_reported() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    out = linear(builder, builder.qdq("x", name="one", scale=0.01), "fc", 16, 16)
    query = builder.qdq(out, name="two")
    builder.constant("split", np.asarray([0, 0, 2, 8]))
    builder.node("Transpose", [builder.node("Reshape", [query, "split"], "heads")], "q", perm=[0, 2, 1, 3])
    context = builder.node("Attention", ["q", "q", "q"], "context")
    builder.node("Softmax", [builder.qdq("x", name="three", scale=0.02)], "p", axis=-1)
    builder.node("Transpose", [builder.qdq("x", name="four", scale=0.03)], "turned", perm=[0, 2, 1])
    builder.node("Exp", ["turned"], "e")
    builder.node("Mul", [builder.qdq("x", name="five", scale=0.04), builder.constant("c", np.float32(0.5))], "scaled")
    scores = builder.node("MatMul", ["scaled", "turned"], "scores")
    builder.node("Sigmoid", [builder.qdq("x", name="six", scale=0.05)], "s")  # quantized again: QLinearSigmoid
    again = builder.qdq("s", name="seven")
    model = builder.model([context, "p", "e", scores, builder.node("Relu", [again], "y")], opset=23)
    assert idle.remaining(model, TARGET) == (
        "2 quantizers are read by operators without an int8 kernel on onnxruntime-cpu alone: Relu 1, Softmax 1.",
    )
    before = [node.op_type for node in model.graph].count("QuantizeLinear")
    assert idle.remaining(model, TARGET)[0] in emit(model, TARGET).notes
    assert [node.op_type for node in model.graph].count("QuantizeLinear") == before


def test_targets_that_compute_in_float_anyway_report_none() -> None:
    builder = Builder()
    builder.input("x", ["b", 16])
    model = builder.model([builder.node("Softmax", [builder.qdq("x")], "y", axis=-1)])
    assert idle.remaining(model, parse_target("onnxruntime-cuda@1.31.1")) == ()
