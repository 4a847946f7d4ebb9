"""Constant factors fold into norms, columns and V projections; the function stays."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, linear, normal, plain, valid

from attnquant.emission import executed, smooth
from attnquant.graph import constant

FEEDS = {"x": normal(2, 3, 16)}


def smoothed(builder: Builder, tensor: str, name: str, *, size: int = 16, low: float = 0.5) -> str:
    """NNCF's SmoothQuant factor in front of a quantized linear."""
    builder.constant(f"{name}_factor", builder.rng.uniform(low, 2, (1, 1, size)).astype(np.float32))
    product = builder.node("Mul", [tensor, f"{name}_factor"], f"{name}_smooth", name=f"{name}_nncf_smooth_quant")
    return linear(builder, builder.qdq(product, name=f"{name}_in"), name, size, 8)


def folds(model: ir.Model, expected: int, *, tolerance: float = 1e-5, feeds: dict[str, np.ndarray] | None = None) -> None:
    """`smooth` folds so many factors and every output stays within `tolerance` of its largest value."""
    fed = feeds or FEEDS
    before = plain(model, fed)
    assert smooth.apply(model, TARGET) == expected
    valid(model)
    for got, old in zip(plain(model, fed), before, strict=True):
        np.testing.assert_allclose(got, old, atol=tolerance * np.abs(old).max())


def muls(model: ir.Model) -> list[str]:
    return [node.name or "" for node in model.graph if node.op_type == "Mul"]


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_a_norm_takes_the_factor_into_scale_and_bias(kind: str) -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    inputs = ["x", builder.vector("scale", 16)] + ([builder.vector("shift", 16)] if kind == "LayerNormalization" else [])
    builder.node(kind, inputs, "norm", axis=-1)
    model = builder.model([smoothed(builder, "norm", "fc")], opset=23)
    folds(model, 1)
    assert muls(model) == []
    norm = next(node for node in model.graph if node.op_type == kind)
    expected = constant(model.graph.initializers["scale"]) * constant(model.graph.initializers["fc_factor"]).reshape(-1)
    np.testing.assert_allclose(constant(norm.inputs[1]), expected, rtol=1e-6)
    assert constant(norm.inputs[1]).shape == (16,)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_norms_of_the_runtime_take_it_too(domain: str) -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    if domain:
        builder.input("skip", ["b", "s", 16])
        inputs = ["x", "skip", builder.vector("scale", 16), builder.vector("shift", 16)]
        builder.node("SkipLayerNormalization", inputs, "norm", domain=domain)
    else:
        builder.node("SimplifiedLayerNormalization", ["x", builder.vector("scale", 16)], "norm", axis=-1)
    model = builder.model([smoothed(builder, "norm", "fc")])
    output = model.graph.node("n_norm").outputs[0]  # onnx infers nothing here
    output.shape, output.type = ir.Shape(["b", "s", 16]), ir.TensorType(ir.DataType.FLOAT)
    feeds = {**FEEDS, "skip": normal(2, 3, 16, seed=5)} if domain else FEEDS
    before = plain(model, feeds)
    assert smooth.apply(model, TARGET) == 1
    np.testing.assert_allclose(plain(model, feeds)[0], before[0], atol=1e-5)


def test_a_decomposed_norm_takes_it_in_its_last_two_constants() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    builder.node("ReduceMean", ["x"], "mean", axes=[-1])
    builder.node("Sub", ["x", "mean"], "centred")
    builder.node("Mul", ["centred", "centred"], "square")
    builder.node("Sqrt", [builder.node("ReduceMean", ["square"], "variance", axes=[-1])], "deviation")
    builder.node("Div", ["centred", "deviation"], "unit")
    builder.node("Mul", ["unit", builder.vector("scale", 16)], "scaled")
    builder.node("Add", ["scaled", builder.vector("shift", 16)], "norm")
    model = builder.model([smoothed(builder, "norm", "fc")], opset=17)
    folds(model, 1)
    assert muls(model) == ["n_square", "n_scaled"]


def test_a_tensor_that_a_residual_reads_too_keeps_its_factor_and_it_is_reported() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    builder.node("LayerNormalization", ["x", builder.vector("scale", 16), builder.vector("shift", 16)], "norm", axis=-1)
    model = builder.model([smoothed(builder, "norm", "fc"), builder.node("Add", ["norm", "x"], "residual")])
    folds(model, 0)
    assert muls(model) == ["fc_nncf_smooth_quant"]
    assert smooth.remaining(model) == ("1 SmoothQuant factor stays as Mul: 1 something else reads the tensor.",)


def test_shape_is_no_reader() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    builder.node("LayerNormalization", ["x", builder.vector("scale", 16), builder.vector("shift", 16)], "norm", axis=-1)
    builder.node("Cast", [builder.node("Shape", ["norm"], "sizes")], "numbers", to=1)
    folds(builder.model([smoothed(builder, "norm", "fc"), "numbers"]), 1)


def test_a_factor_behind_gelu_stays() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    builder.node("Gelu", ["x"], "active")
    model = builder.model([smoothed(builder, "active", "fc")])
    folds(model, 0)
    assert smooth.remaining(model) == ("1 SmoothQuant factor stays as Mul: 1 behind Gelu.",)


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("low", [0.5, -2.0])
def test_layer_scale_goes_into_the_columns_and_the_bias(quantized: bool, low: float) -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    if quantized:
        out = linear(builder, builder.qdq("x"), "fc", 16, 16)
    else:
        builder.constant("w", builder.rng.standard_normal((16, 16)).astype(np.float32))
        out = builder.node("Add", [builder.node("MatMul", ["x", "w"], "xw"), builder.vector("c", 16)], "fc_out")
    builder.constant("gamma", builder.rng.uniform(low, 2, 16).astype(np.float32))
    builder.node("Mul", [out, "gamma"], "scaled")
    model = builder.model([builder.node("Relu", ["scaled"], "y")])
    folds(model, 1)
    assert muls(model) == []


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_takes_it_in_columns_or_rows_and_bias(transposed: int) -> None:
    builder = Builder()
    builder.input("x", ["n", 16])
    weight = builder.weight("w", (8, 16) if transposed else (16, 8), axis=None)
    builder.node("Gemm", [builder.qdq("x"), weight, builder.vector("c", 8)], "out", transB=transposed)
    builder.node("Mul", ["out", builder.vector("gamma", 8)], "scaled")
    model = builder.model([builder.node("Relu", ["scaled"], "y")])
    folds(model, 1, feeds={"x": normal(4, 16)})
    dequantize = model.graph.node("n_w")
    assert constant(dequantize.inputs[1]).shape == (8,)
    assert dequantize.attributes["axis"].as_int() == 1 - transposed


def heads(builder: Builder, tensor: str, name: str) -> str:
    builder.constant(f"{name}_split", np.asarray([0, 0, 2, 8]))
    builder.node("Reshape", [tensor, f"{name}_split"], f"{name}_heads")
    return builder.node("Transpose", [f"{name}_heads"], f"{name}_moved", perm=[0, 2, 1, 3])


def attention(builder: Builder, form: str) -> str:
    """Attention of two heads whose V projection is an int8 linear; returns its output (b, s, 16)."""
    builder.input("x", ["b", "s" if form in ("operator", "decomposed") else 3, 16])
    query = heads(builder, "x", "q")
    value = heads(builder, linear(builder, builder.qdq("x"), "value", 16, 16), "v")
    if form == "operator":
        builder.node("Attention", [query, query, value], "context")
    else:
        builder.node("Transpose", [query], "keys", perm=[0, 1, 3, 2])
        builder.node("Softmax", [builder.node("MatMul", [query, "keys"], "scores")], "weights", axis=-1)
        builder.node("MatMul", ["weights", value], "context")
    context = "context"
    for place, sizes in enumerate({"as it is": [[-1, 2, 3, 8]], "and back": [[-1, 2, 24], [-1, 2, 3, 8]]}.get(form, [])):
        size = builder.constant(f"sizes_{place}", np.asarray(sizes))
        context = builder.node("Reshape", [context, size], f"context_{place}")
    builder.node("Transpose", [context], "tokens", perm=[0, 2, 1, 3])
    return builder.node("Reshape", ["tokens", builder.constant("merge", np.asarray([0, 0, 16]))], "merged")


@pytest.mark.parametrize("form", ["operator", "decomposed", "as it is", "and back"])
def test_behind_an_attention_it_goes_into_the_v_projection(form: str) -> None:
    builder = Builder()
    model = builder.model([smoothed(builder, attention(builder, form), "out")], opset=23)
    folds(model, 1)
    assert muls(model) == []
    scale = constant(model.graph.node("n_value_w").inputs[1])
    old, factor = (constant(model.graph.initializers[name]) for name in ("value_w_scale", "out_factor"))
    np.testing.assert_allclose(scale, old * factor.reshape(-1), rtol=1e-6)


def test_values_that_are_cached_keep_theirs() -> None:
    builder = Builder()
    out = smoothed(builder, attention(builder, "decomposed"), "out")
    model = builder.model([out, builder.node("Identity", ["v_moved"], "present")], opset=23)
    folds(model, 0)


def test_shared_scales_are_copied_not_edited() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    shared = [builder.vector("scale", 16), builder.vector("shift", 16)]
    builder.node("LayerNormalization", ["x", *shared], "first", axis=-1)
    builder.node("LayerNormalization", ["x", *shared], "second", axis=-1)
    model = builder.model([smoothed(builder, "first", "fc"), builder.node("Relu", ["second"], "y")])
    before = plain(model, FEEDS)[1]
    folds(model, 1)
    np.testing.assert_array_equal(plain(model, FEEDS)[1], before)


def test_a_shared_weight_keeps_its_factor_outside() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    weight = builder.weight("w", (16, 16), axis=1)
    one = builder.node("MatMul", [builder.qdq("x"), weight], "one")
    two = builder.node("MatMul", [builder.qdq("x", name="again"), weight], "two")
    builder.node("Mul", [one, builder.vector("gamma", 16)], "scaled")
    folds(builder.model([builder.node("Relu", ["scaled"], "y"), two]), 0)


def test_a_zero_in_the_factor_is_no_scale() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    out = linear(builder, builder.qdq("x"), "fc", 16, 16)
    builder.constant("gamma", np.asarray([0.0, *np.ones(15)], np.float32))
    builder.node("Mul", [out, "gamma"], "scaled")
    folds(builder.model([builder.node("Relu", ["scaled"], "y")]), 0)


def test_a_factor_passes_a_transpose_that_is_not_its_own_inverse() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    out = linear(builder, builder.qdq("x"), "fc", 16, 16)
    builder.node("Reshape", [out, builder.constant("split", np.asarray([0, 0, 2, 8]))], "heads")
    builder.node("Transpose", ["heads"], "moved", perm=[0, 3, 1, 2])
    builder.node("Mul", ["moved", builder.vector("gamma", 2)], "scaled")
    model = builder.model([builder.node("Relu", ["scaled"], "y")])
    folds(model, 1)
    assert muls(model) == []


def test_gelu_as_exporters_write_it_is_still_one_kernel() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    builder.node("Div", ["x", builder.constant("root", np.float32(np.sqrt(2)))], "scaled")
    builder.node("Add", [builder.node("Erf", ["scaled"], "erf"), builder.constant("one", np.float32(1))], "shifted")
    builder.node("Mul", ["x", "shifted"], "doubled")
    builder.node("Mul", ["doubled", builder.constant("half", np.float32(0.5))], "gelu")
    model = builder.model([smoothed(builder, "gelu", "fc")])
    folds(model, 0)
    assert executed(model).operators["Gelu"] == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_the_up_projection_of_a_gated_feed_forward_takes_it(swapped: bool) -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    shared = builder.qdq("x")
    gate, up = (linear(builder, shared, name, 16, 16, bias=False) for name in ("gate", "up"))
    builder.node("Mul", [gate, builder.node("Sigmoid", [gate], "open")], "active")
    builder.node("Mul", [up, "active"] if swapped else ["active", up], "gated")
    model = builder.model([smoothed(builder, "gated", "down")])
    gates = constant(model.graph.node("n_gate_w").inputs[1])
    folds(model, 1)
    np.testing.assert_array_equal(constant(model.graph.node("n_gate_w").inputs[1]), gates)
    old, factor = (constant(model.graph.initializers[name]) for name in ("up_w_scale", "down_factor"))
    np.testing.assert_allclose(constant(model.graph.node("n_up_w").inputs[1]), old * factor.reshape(-1), rtol=1e-6)


def test_a_square_takes_nothing() -> None:
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    out = linear(builder, builder.qdq("x"), "fc", 16, 16)
    model = builder.model([smoothed(builder, builder.node("Mul", [out, out], "square"), "next")])
    folds(model, 0)


def test_an_outer_product_is_no_factor() -> None:
    """Positions times frequencies: the constant is wider than the tensor."""
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    builder.node("ReduceSum", ["x", builder.constant("axis", np.array([2]))], "positions", keepdims=1)
    builder.node("Reshape", ["positions", builder.constant("to", np.array([0, -1, 1]))], "column")
    builder.node("Mul", ["column", builder.vector("frequencies", 16)], "angles")
    model = builder.model([builder.node("Sin", ["angles"], "y")])
    folds(model, 0)


@pytest.mark.parametrize("kind", ["Mul", "Mul left", "Div", "Div left", "vector Div"])
@pytest.mark.parametrize("moved", [True, False])
def test_a_number_in_front_of_a_quantizer_goes_into_the_linear(kind: str, moved: bool) -> None:
    """The attention's scale as exporters write it: weights and bias take it, and the quantizer stands behind the linear."""
    number = np.full(8 if kind.startswith("vector") else (), 2.5, np.float32)

    def built() -> ir.Model:
        builder = Builder()
        out = linear(builder, builder.qdq(builder.input("x", ["b", 5, 16]), zero_point=120, dtype=np.uint8), "q", 16, 8)
        operands = [out, builder.constant("number", number)]
        out = builder.node(kind.split()[-1 if "vector" in kind else 0], operands[:: -1 if "left" in kind else 1], "scaled")
        if moved:
            out = builder.node("Transpose", [out], "turned", perm=[0, 2, 1])
        return builder.model([builder.qdq(out, scale=0.05, zero_point=131, dtype=np.uint8)])

    reference, model = built(), built()
    gone = kind in ("Mul", "Mul left", "Div")
    assert smooth.apply(model, TARGET) == gone
    valid(model)
    kinds = [node.op_type for node in model.graph]
    assert ("Mul" in kinds or "Div" in kinds) is not gone
    feeds = {"x": normal(2, 5, 16)}
    np.testing.assert_allclose(plain(model, feeds)[0], plain(reference, feeds)[0], atol=0.051)  # a tie, rounded otherwise
    assert np.mean(plain(model, feeds)[0] != plain(reference, feeds)[0]) < 0.02


@pytest.mark.parametrize("case", ["read in float", "an output", "zero", "infinite"])
def test_other_numbers_stay(case: str) -> None:
    """Elsewhere the runtime takes a number into a float product; none and infinitely many times is no scale of a weight."""
    builder = Builder()
    out = linear(builder, builder.qdq(builder.input("x", ["b", 5, 16]), zero_point=120, dtype=np.uint8), "q", 16, 8)
    number = {"zero": 0.0, "infinite": np.inf}.get(case, 2.5)
    builder.node("Mul", [out, builder.constant("number", np.float32(number))], "scaled")
    outputs = [builder.qdq("scaled", scale=0.05, zero_point=131, dtype=np.uint8)]
    if case == "read in float":
        outputs.append(builder.node("Softmax", ["scaled"], "soft", axis=-1))
    model = builder.model([*outputs, "scaled"] if case == "an output" else outputs)
    assert smooth.apply(model, TARGET) == 0
    assert "Mul" in [node.op_type for node in model.graph]
