"""emit() as a whole: an encoder block as NNCF writes it, with static and dynamic shapes, for every target."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

from attnquant.emission import emit, executed
from attnquant.target import parse_target

STATED = ("onnxruntime-cpu@1.31.1", "onnxruntime-cuda@1.31.1", "openvino@2026.0")
FEEDS = {"x": normal(2, 6, 16)}


def smoothed(builder: Builder, tensor: str, name: str, size: int) -> str:
    builder.constant(f"{name}_factor", builder.rng.uniform(0.5, 2, (1, 1, size)).astype(np.float32))
    product = builder.node("Mul", [tensor, f"{name}_factor"], f"{name}_smooth", name=f"{name}_nncf_smooth_quant")
    return builder.qdq(product, name=f"{name}_in", zero_point=0)


def heads(builder: Builder, tensor: str, name: str) -> str:
    builder.node("Reshape", [tensor, "split"], f"{name}_heads")
    return builder.node("Transpose", [f"{name}_heads"], f"{name}_moved", perm=[0, 2, 1, 3])


def block(shape: list[int | str]) -> ir.Model:
    """Pre-norm attention and feed-forward: signed activations, SmoothQuant factors, Q and K quantized, float biases."""
    builder = Builder()
    builder.input("x", shape)
    builder.constant("split", np.asarray([0, 0, 2, 8]))
    builder.constant("merge", np.asarray([0, 0, 16]))
    for name in ("first", "second"):
        builder.vector(f"{name}_scale", 16)
        builder.vector(f"{name}_shift", 16, low=-1, high=1)
    builder.node("LayerNormalization", ["x", "first_scale", "first_shift"], "normed", axis=-1)
    shared = smoothed(builder, "normed", "qkv", 16)
    query, key, value = (heads(builder, linear(builder, shared, name, 16, 16), name) for name in ("q", "k", "v"))
    ports = [builder.qdq(port, scale=0.01, zero_point=0) for port in (query, key)]
    builder.node("Attention", [*ports, value], "context", name="attention")
    builder.node("Transpose", ["context"], "tokens", perm=[0, 2, 1, 3])
    builder.node("Reshape", ["tokens", "merge"], "merged")
    out = linear(builder, smoothed(builder, "merged", "out", 16), "out", 16, 16)
    builder.node("Add", [out, "x"], "residual")
    builder.node("LayerNormalization", ["residual", "second_scale", "second_shift"], "again", axis=-1)
    wide = linear(builder, smoothed(builder, "again", "up", 16), "up", 16, 32)
    builder.node("Gelu", [wide], "active")
    down = linear(builder, smoothed(builder, "active", "down", 32), "down", 32, 16)
    return builder.model([builder.node("Add", [down, "residual"], "y", name="last")], opset=23)


def snr(expected: np.ndarray, got: np.ndarray) -> float:
    """Signal to noise in dB, at most 200."""
    return float(10 * np.log10(np.sum(expected**2) / max(np.sum((got - expected) ** 2), 1e-20 * np.sum(expected**2))))


@pytest.mark.parametrize("shape", [["b", "s", 16], [2, 6, 16]])
def test_a_block_runs_all_its_linears_in_int8(shape: list[int | str]) -> None:
    reference, model = block(shape), block(shape)
    report = emit(model, parse_target("onnxruntime-cpu"))
    valid(model)
    static = isinstance(shape[0], int)
    assert report.changes == {
        "opsets": 0, "unsigned": 6, "smooth": 3, "sharing": 0, "embedding": 0, "exact": 0, "lefts": 0, "stacks": 0,
        "forks": 0, "outputs": 0, "keys": 0, "biases": 6 if static else 0, "clips": 0, "gelus": 0,
        "interleaves": 0, "residuals": 0,
        "clean": report.changes["clean"],
    }
    assert report.notes == ("1 SmoothQuant factor stays as Mul: 1 behind Gelu.",)
    assert report.kept_float == ()
    found = executed(model)
    assert sorted(found.int8) == ["down", "k", "out", "q", "up", "v"]
    assert found.clean
    expected = plain(reference, FEEDS)[0]
    assert snr(expected, optimized(model, FEEDS)[0]) > 40  # ties that round to the other side


@pytest.mark.parametrize("text", STATED)
def test_every_target_keeps_the_function_and_the_names(text: str) -> None:
    reference, model = block(["b", "s", 16]), block(["b", "s", 16])
    emit(model, parse_target(text))
    valid(model)
    expected = plain(reference, FEEDS)[0]
    assert snr(expected, plain(model, FEEDS)[0]) > 40
    gone = {node.name for node in reference.graph} - {node.name for node in model.graph}
    assert gone == {f"{name}_nncf_smooth_quant" for name in ("qkv", "out", "up")}


def test_signed_activations_stay_where_the_target_wants_them() -> None:
    model = block(["b", "s", 16])
    emit(model, parse_target("openvino@2026.0"))
    kinds = {node.outputs[0].dtype for node in model.graph if node.op_type == "QuantizeLinear"}
    assert kinds == {ir.DataType.INT8}


def test_emitting_twice_changes_nothing_more() -> None:
    model = block([2, 6, 16])
    emit(model, TARGET)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    again = emit(model, TARGET)
    assert set(again.changes.values()) == {0}
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
