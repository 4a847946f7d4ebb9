"""K is signed where the CPU multiplies u8 x s8 exactly: the same numbers, the runtime's kernel for them, nothing else."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

import attnquant
from attnquant.audit.flow import Flow
from attnquant.audit.rules import target_rules
from attnquant.emission import biases, executed, keys
from attnquant.target import has_vnni
from attnquant.verification import verify
from tests.layeredmodels import DECOMPOSED, LAYERS, encoder, samples

WITH = replace(TARGET, vnni=True)
HEADS, SIZE = 2, 8
WIDTH = HEADS * SIZE
SHAPES = {"dynamic": ["b", "s", WIDTH], "static": [2, 5, WIDTH]}


def scores(
    shape: Sequence[str | int], *, bias: bool = True, heads: bool = True, shared: bool = False, opset: int = 21
) -> ir.Model:
    """Q K^T of two projections of x, quantized behind the split into heads; `shared`: sizes are read of K too."""
    builder = Builder()
    x = builder.qdq(builder.input("x", shape), zero_point=120, dtype=np.uint8)
    split = builder.constant("split", np.asarray([0, 0, HEADS, SIZE], np.int64))
    sides = []
    for name, order in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1])):
        made = linear(builder, x, name, WIDTH, WIDTH, bias=bias)
        if heads:
            made = builder.node("Reshape", [made, split], f"{name}_split")
            made = builder.node("Transpose", [made], f"{name}_heads", perm=order)
        elif name == "k":
            made = builder.node("Transpose", [made], f"{name}_turned", perm=[0, 2, 1])
        sides.append(builder.qdq(made, scale=0.05, zero_point=131, dtype=np.uint8, name=f"{name}_pair"))
    builder.node("MatMul", sides, "scores", name="product")
    outputs = ["scores"]
    if shared:
        builder.node("Cast", [builder.node("Shape", ["k_split"], "sizes")], "sizes_float", to=TensorProto.FLOAT)
        outputs.append("sizes_float")
    return builder.model(outputs, opset=opset)


def key_type(model: ir.Model) -> ir.DataType:
    """Element type of what the right operand of the product is dequantized from."""
    product = next(node for node in model.graph if node.name == "product")
    maker = product.inputs[1].producer()  # type: ignore[union-attr]
    assert maker is not None
    assert maker.op_type == "DequantizeLinear"
    zero_point = maker.inputs[2]
    assert zero_point is not None
    assert zero_point.dtype is not None
    return zero_point.dtype


def kernel_types(model: ir.Model, tmp: str) -> list[tuple[str, int]]:
    """(operator, type of its right operand's zero point) of the products of two activations in the runtime's graph."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = tmp
    options.log_severity_level = 4
    onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp).graph
    types = {item.name: item.data_type for item in graph.initializer}
    return [
        (node.op_type, types[node.input[5]])
        for node in graph.node
        if node.op_type == "MatMulIntegerToFloat" and node.input[1] not in types
    ]


@pytest.mark.parametrize("opset", [17, 21, 23])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("heads", "shared"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("kind", SHAPES)
def test_the_runtime_multiplies_unsigned_and_signed(
    kind: str, heads: bool, shared: bool, bias: bool, opset: int, tmp_path: object
) -> None:
    built = [scores(SHAPES[kind], bias=bias, heads=heads, shared=shared, opset=opset) for _ in range(2)]
    reference, model = built
    feeds = {"x": normal(2, 5, WIDTH)}
    assert keys.apply(model, WITH) == 1
    np.testing.assert_allclose(plain(model, feeds)[0], plain(reference, feeds)[0], rtol=1e-6, atol=1e-6)
    biases.apply(model, WITH)
    valid(model)
    assert key_type(model) == ir.DataType.INT8
    assert key_type(reference) == ir.DataType.UINT8
    assert {"k", "q"} <= set(executed(model).int8)
    assert executed(model).clean
    assert kernel_types(model, f"{tmp_path}/optimized.onnx") == [("MatMulIntegerToFloat", TensorProto.INT8)]
    assert kernel_types(reference, f"{tmp_path}/optimized.onnx") == [("MatMulIntegerToFloat", TensorProto.UINT8)]
    if has_vnni():  # a rounded bias may move an integer of Q or K by one step
        np.testing.assert_allclose(optimized(model, feeds)[0], plain(model, feeds)[0], atol=0.06)
    assert list(target_rules(Flow(model), WITH, opset, emitted=True)) == []


def test_a_key_of_a_gemm_that_nothing_moves_is_set_apart(tmp_path: object) -> None:
    """From both sides: the Gemm takes no signed result, and the runtime makes a pair unsigned whose nodes touch."""

    def built() -> ir.Model:
        builder = Builder()
        x = builder.qdq(builder.input("x", [5, WIDTH]), zero_point=120, dtype=np.uint8)
        query = builder.qdq(builder.input("y", [4, 5]), scale=0.05, zero_point=131, dtype=np.uint8)
        builder.constant("bias", builder.rng.standard_normal(WIDTH).astype(np.float32))
        made = builder.node("Gemm", [x, builder.weight("w", (WIDTH, WIDTH), axis=1), "bias"], "made", name="k")
        key = builder.qdq(made, scale=0.05, zero_point=131, dtype=np.uint8)
        builder.node("MatMul", [query, key], "scores", name="product")
        return builder.model(["scores"])

    reference, model = built(), built()
    feeds = {"x": normal(5, WIDTH), "y": normal(4, 5)}
    assert keys.apply(model, WITH) == 1
    np.testing.assert_allclose(plain(model, feeds)[0], plain(reference, feeds)[0], rtol=1e-6, atol=1e-6)
    biases.apply(model, WITH)
    assert "k" in executed(model).int8
    assert kernel_types(model, f"{tmp_path}/optimized.onnx") == [("MatMulIntegerToFloat", TensorProto.INT8)]


@pytest.mark.parametrize(("vnni", "version"), [(False, "1.32.0"), (None, "1.32.0"), (True, "1.30.0"), (True, "")])
def test_elsewhere_keys_stay_unsigned(vnni: bool | None, version: str) -> None:
    target = replace(TARGET, vnni=vnni, version=version)
    model = scores(SHAPES["dynamic"])
    before = ir.to_proto(model).SerializeToString()
    assert keys.apply(model, target) == 0
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("reader", ["k_pair_q", "k_pair_dq"])
def test_a_key_that_something_else_reads_stays_unsigned(reader: str) -> None:
    model = scores(SHAPES["dynamic"])
    value = next(value for node in model.graph for value in node.outputs if value.name == reader)
    extra = ir.Node("", "Identity", [value], name="extra")
    extra.outputs[0].name, extra.outputs[0].type = "copied", value.type
    model.graph.append(extra)
    model.graph.outputs.append(extra.outputs[0])
    assert keys.apply(model, WITH) == 0


def test_a_signed_key_is_no_problem_and_a_signed_query_is() -> None:
    model = scores(SHAPES["dynamic"])
    keys.apply(model, WITH)
    assert list(target_rules(Flow(model), WITH, 21, emitted=True)) == []
    product = next(node for node in model.graph if node.name == "product")
    left, right = product.inputs
    product.replace_input_with(0, right)
    product.replace_input_with(1, left)
    found = list(target_rules(Flow(model), WITH, 21, emitted=True))
    assert [(problem.kind, problem.severity) for problem in found] == [("target type", "violation")]


def test_presents_are_not_rounded(tmp_path: object) -> None:
    """K is handed out as it was computed: the quantizer stands behind it, whatever else reads it."""
    builder = Builder()
    past = builder.input("past", ["b", HEADS, "p", SIZE])
    x = builder.qdq(builder.input("x", ["b", "s", WIDTH]), zero_point=120, dtype=np.uint8)
    split = builder.constant("split", np.asarray([0, 0, HEADS, SIZE], np.int64))
    made = [builder.node("Reshape", [linear(builder, x, name, WIDTH, WIDTH), split], f"{name}_split") for name in "kq"]
    new, query = (builder.node("Transpose", [tensor], f"{tensor}_heads", perm=[0, 2, 1, 3]) for tensor in made)
    present = builder.node("Concat", [past, new], "present", axis=2)
    turned = builder.node("Transpose", [present], "turned", perm=[0, 1, 3, 2])
    pairs = [builder.qdq(tensor, scale=0.05, zero_point=131, dtype=np.uint8) for tensor in (query, turned)]
    builder.node("MatMul", pairs, "scores", name="product")
    model = builder.model(["scores", "present"])
    feeds = {"x": normal(2, 3, WIDTH), "past": normal(2, HEADS, 4, SIZE, seed=7)}
    expected = plain(model, feeds)
    assert keys.apply(model, WITH) == 1
    scores_made, present_made = optimized(model, feeds)
    np.testing.assert_allclose(present_made, expected[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(present_made[:, :, :4], feeds["past"])
    if has_vnni():
        np.testing.assert_allclose(scores_made, expected[0], atol=0.06)
    assert kernel_types(model, f"{tmp_path}/optimized.onnx") == [("MatMulIntegerToFloat", TensorProto.INT8)]


def test_signed_keys_are_verified_like_unsigned_ones() -> None:
    data = samples(2, seed=5)
    result = attnquant.quantize(encoder(DECOMPOSED), data, target="onnxruntime-cpu@1.30.0")
    unsigned = ir.to_proto(result.model)
    assert keys.apply(result.model, WITH) == LAYERS
    reports = [verify(encoder(DECOMPOSED), model, data) for model in (unsigned, ir.to_proto(result.model))]
    assert all(report.placement_ok and not report.suspects for report in reports)
    for one, other in zip(*(report.providers["cpu"].sites for report in reports), strict=True):
        assert [row.role for row in one.quantizers] == [row.role for row in other.quantizers]
        assert one.expected_snr_db == pytest.approx(other.expected_snr_db, abs=0.01)
        if has_vnni():
            assert one.local_snr_db == pytest.approx(other.local_snr_db, abs=0.1)
            assert one.attribution_db == pytest.approx(other.attribution_db, abs=0.2)
