"""Linears with outlier tokens: found on the data, and then as the recipe wants them."""

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant.outliers
from attnquant import runtime
from attnquant.errors import RecipeError
from attnquant.host.prepare import prepare
from attnquant.model import copy, load
from attnquant.outliers import LARGEST, Treatment, outliers, treat_outliers
from attnquant.recipe import load as load_recipe
from attnquant.target import parse_target
from tests import tinymodels

WIDTH, INNER, LAYERS, PLANTED = 16, 32, 3, 1
CPU = parse_target("onnxruntime-cpu")
FACTOR = 50.0
"""How much larger the planted token's row is than the others', in the input of the layer's last linear."""


@cache
def decoder(opset: int = 23, planted: int = PLANTED, factor: float = FACTOR) -> onnx.ModelProto:
    """x (batch, sequence, WIDTH): LAYERS residual attentions and gated feed-forwards; in one layer the first token, told by
    its first channel, is made so many times as large in front of the down projection. In the last layer GELU is there."""
    nodes, constants = [], [numpy_helper.from_array(np.ones(WIDTH, np.float32), "gamma")]

    def linear(source: str, result: str, rows: int, columns: int) -> None:
        constants.append(numpy_helper.from_array(tinymodels.weights(len(constants), rows, columns), f"w_{result}"))
        nodes.append(helper.make_node("MatMul", [source, f"w_{result}"], [result], name=result))

    def op(kind: str, inputs: list[str], result: str, **attributes: object) -> None:
        nodes.append(helper.make_node(kind, inputs, [result], name=f"node_{result}", **attributes))

    constants += [
        numpy_helper.from_array(np.array([0], np.int64), "first"), numpy_helper.from_array(np.array([2], np.int64), "axis"),
        numpy_helper.from_array(np.array([1], np.int64), "second"), numpy_helper.from_array(np.float32(factor), "factor"),
        numpy_helper.from_array(np.float32(1), "one"), numpy_helper.from_array(np.float32(2), "limit"),
    ]  # fmt: skip
    op("Slice", ["x", "first", "second", "axis"], "mark")
    op("Greater", ["mark", "limit"], "planted")
    op("Where", ["planted", "factor", "one"], "factors")
    hidden = "x"
    for layer in range(LAYERS):
        op("LayerNormalization", [hidden, "gamma"], f"n{layer}")
        for role in "qkv":
            linear(f"n{layer}", f"{role}{layer}", WIDTH, WIDTH)
        op("Attention", [f"{role}{layer}" for role in "qkv"], f"a{layer}", q_num_heads=2, kv_num_heads=2, is_causal=1)
        linear(f"a{layer}", f"o{layer}", WIDTH, WIDTH)
        op("Add", [hidden, f"o{layer}"], f"r{layer}")
        op("LayerNormalization", [f"r{layer}", "gamma"], f"m{layer}")
        linear(f"m{layer}", f"up{layer}", WIDTH, INNER)
        inner = f"up{layer}"
        if layer == planted:
            op("Mul", [inner, "factors"], f"large{layer}")
            inner = f"large{layer}"
        linear(inner, f"down{layer}", INNER, WIDTH)
        if layer == LAYERS - 1:
            op("Gelu", [inner], f"gelu{layer}")  # takes no factor
            nodes[-1], nodes[-2] = nodes[-2], nodes[-1]
            nodes[-1].input[0] = f"gelu{layer}"
        hidden = f"y{layer}"
        op("Add", [f"r{layer}", f"down{layer}"], hidden)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "sequence", WIDTH]) for name in ("x", hidden)]
    return tinymodels.made(helper.make_graph(nodes, "decoder", info[:1], info[1:], constants), opset)


def data(count: int = 3, length: int = 24) -> list[dict[str, np.ndarray]]:
    """Samples whose first token is marked."""
    made = [np.random.default_rng(seed).standard_normal((1, length, WIDTH)).astype(np.float32) for seed in range(count)]
    for array in made:
        array[:, :, 0] = np.clip(array[:, :, 0], -1, 1)
        array[:, 0, 0] = 3.0
    return [{"x": array} for array in made]


def recipe(how: str) -> str:
    return f'extends = "llm-w8a8"\n[linears]\nsmooth_quant = false\noutliers = "{how}"'


@cache
def quantized(how: str) -> attnquant.QuantizationResult:
    return attnquant.quantize(decoder(), data(), recipe=recipe(how))


def half() -> onnx.ModelProto:
    """The decoder in float16."""
    proto = onnx.ModelProto()
    proto.CopyFrom(decoder())
    for index, tensor in enumerate(proto.graph.initializer):
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor).astype(np.float16)
            proto.graph.initializer[index].CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return proto


def of(result: attnquant.QuantizationResult, name: str) -> ir.Node:
    return next(node for node in result.model.graph if node.name == name)


def usual_snr(result: attnquant.QuantizationResult) -> float:
    """Signal to noise in dB of what the planted layer's down projection gives the unmarked tokens, against float."""
    sample = {"x": data(5)[4]["x"]}
    expected, got = (_inner(model, sample) for model in (load(decoder()), result.model))
    return float(10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()))


def _inner(model: ir.Model, sample: dict[str, np.ndarray]) -> np.ndarray:
    model = attnquant.model.copy(model)
    node = next(node for node in model.graph if node.name == f"node_y{PLANTED}")
    value = node.inputs[1]
    assert value is not None
    value.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs[:] = [value]
    return next(iter(runtime.run(model, sample).values()))[:, 1:]


def test_the_planted_linear_stands_out_from_all_others() -> None:
    found = outliers(load(decoder()), data())
    assert [name for name, ratio in found.items() if ratio >= LARGEST["float"]] == [f"down{PLANTED}"]
    behind_norms = [ratio for name, ratio in found.items() if name[0] in "qkvu"]
    assert max(behind_norms) < LARGEST["per_token"], "a norm makes tokens alike"
    rows = [_input_rows(sample["x"]) for sample in data()]
    expected = np.concatenate(rows).max() / np.median(np.concatenate(rows))
    assert found[f"down{PLANTED}"] == pytest.approx(expected, rel=1e-5)
    assert expected > 2 * LARGEST["float"]


def _input_rows(x: np.ndarray) -> np.ndarray:
    """Largest magnitude of each row in front of the planted linear, read from the float model."""
    model = load(decoder())
    value = next(node.inputs[0] for node in model.graph if node.name == f"down{PLANTED}")
    model.graph.outputs[:] = [value]
    return np.abs(next(iter(runtime.run(model, {"x": x}).values()))).max(axis=-1).reshape(-1)


def test_rows_of_zeros_are_no_outliers() -> None:
    assert outliers(load(tinymodels.linear()), [{"x": np.zeros((4, tinymodels.WIDTH), np.float32)}]) == {"matmul": 1.0}


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_the_measure_is_written_for_every_opset(opset: int) -> None:
    rows = np.ones((9, tinymodels.WIDTH), np.float32)
    rows[4, 2] = -20.0
    assert outliers(load(tinymodels.linear(opset)), [{"x": rows}]) == {"matmul": pytest.approx(20.0)}


def test_a_scale_per_token_is_int8_and_the_usual_tokens_keep_their_bits() -> None:
    result = quantized("per_token")
    assert [row.node for row in result.setup.kept_float] == []
    found = [name for name, ratio in outliers(load(decoder()), data()).items() if ratio >= LARGEST["per_token"]]
    assert f"{len(found)} linears with outlier tokens have an activation scale for each token." in result.notes
    divide = of(result, f"down{PLANTED}/token/divided")
    quantize = next(iter(divide.outputs[0].uses())).node
    assert quantize.op_type == "QuantizeLinear"
    np.testing.assert_array_equal(quantize.inputs[1].const_value.numpy(), np.float32(1 / 127))
    np.testing.assert_array_equal(quantize.inputs[2].const_value.numpy(), np.uint8(128))
    assert usual_snr(result) > usual_snr(quantized("int8")) + 8


def test_no_factor_of_smoothquant_stays_a_node() -> None:
    result = attnquant.quantize(decoder(), data(), recipe="llm-w8a8")
    assert not [node.name for node in result.model.graph if node.op_type == "Mul" and "smooth" in (node.name or "")]
    assert not [note for note in result.notes if "stay" in note]
    smoothed = [of(result, f"{role}0").inputs[1].producer().inputs[1].const_value.numpy() for role in "qv"]
    plain = [of(quantized("per_token"), f"{role}0").inputs[1].producer().inputs[1].const_value.numpy() for role in "qv"]
    assert all(np.abs(a / b - 1).max() > 0.01 for a, b in zip(smoothed, plain, strict=True)), "SmoothQuant was at work"
    assert attnquant.check(result.model).ok
    assert usual_snr(result) > usual_snr(quantized("int8")) + 8


@pytest.mark.parametrize("how", ["weight_only", "float"])
def test_activations_stay_float_and_the_report_says_why(how: str) -> None:
    result = quantized(how)
    (row,) = result.setup.kept_float
    assert row.node == f"down{PLANTED}"
    words = {"weight_only": "int8 weights, float activations", "float": "float"}[how]
    assert row.reason.startswith(f"{words}: its largest token is ")
    node = of(result, f"down{PLANTED}")
    weight = node.inputs[1].producer()
    assert (weight is None) == (how == "float")
    assert node.inputs[0].producer().op_type == "Mul"
    assert usual_snr(result) > usual_snr(quantized("int8")) + 8
    others = [of(result, f"{name}{layer}") for name in ("up", "down", "q", "o") for layer in (0, 2)]
    assert {node.inputs[0].producer().op_type for node in others} == {"DequantizeLinear"}


@pytest.mark.parametrize("how", ["auto", "int8", "per_token", "weight_only", "float"])
def test_every_way_passes_its_own_audit(how: str) -> None:
    report = attnquant.check(quantized(how).model)
    assert report.ok, report


@pytest.mark.parametrize("how", ["per_token", "weight_only", "float"])
def test_half_precision_stays_half_and_is_as_close(how: str) -> None:
    samples = [{"x": sample["x"].astype(np.float16)} for sample in data()]
    result = attnquant.quantize(half(), samples, recipe=recipe(how))
    assert attnquant.check(result.model).ok
    expected, got = (runtime.run(model, samples[0])[f"y{LAYERS - 1}"] for model in (load(half()), result.model))
    assert got.dtype == np.float16
    expected, got = expected.astype(np.float64), got.astype(np.float64)
    assert 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()) > 25


def test_a_name_that_is_kept_anyway_is_not_treated() -> None:
    model = load(decoder())
    assert treat_outliers(model, data(), "float", CPU, {f"down{PLANTED}"}).kept_float == ()
    assert treat_outliers(model, data(), "int8", CPU, ()).per_token == frozenset()


def test_inputs_that_take_no_factor_get_a_scale_per_token_too() -> None:
    rows = {"x": np.ones((4, tinymodels.WIDTH), np.float32)}
    found = treat_outliers(load(tinymodels.linear()), [rows], "per_token", CPU, ())
    assert found.per_token == found.unsmoothable == {"matmul"}
    assert found.notes == ("1 more have one because their input takes no factor of SmoothQuant.",)
    found = treat_outliers(prepare(load(decoder()), data()[0]), data(), "per_token", CPU, ())
    assert found.unsmoothable == {f"down{LAYERS - 1}"}, "behind GELU"


@pytest.mark.parametrize(
    ("planted", "factor", "per_token"),
    [(1, 50.0, {"down1"}), (1, 8.0, set()), (2, 8.0, {"down2"}), (2, 50.0, {"down2"}), (2, 2.0, set())],
)
def test_by_default_a_scale_per_token_is_for_few(planted: int, factor: float, per_token: set[str]) -> None:
    """From 16 times the usual token on, or from 4 where SmoothQuant's factor would stay as a node, as behind GELU."""
    model = prepare(load(decoder(planted=planted, factor=factor)), data()[0])
    before = [node.name for node in model.graph]
    found = treat_outliers(model, data(), "auto", CPU, ())
    assert found.per_token == per_token
    assert found.unsmoothable == per_token & {"down2"}
    assert found.kept_float == ()
    assert set(before) | found.added == {node.name for node in model.graph}
    assert bool(found.added) == bool(found.notes) == bool(per_token)


@pytest.mark.parametrize("target", ["openvino", "onnxruntime-cuda@1.31.1"])
def test_by_default_other_targets_have_one_scale(target: str) -> None:
    model = prepare(load(decoder()), data()[0])
    assert treat_outliers(model, data(), "auto", parse_target(target), ()) == Treatment()


def test_the_default_recipe_keeps_the_bits_of_usual_tokens() -> None:
    result, plain = (attnquant.quantize(decoder(), data(), recipe=name) for name in ("int8", ONE_SCALE))
    assert "1 linear with outlier tokens has an activation scale for each token." in result.notes
    assert attnquant.check(result.model).ok
    assert usual_snr(result) > usual_snr(plain) + 8


ONE_SCALE = 'extends = "int8"\n[linears]\noutliers = "int8"\n'


def test_recipes_name_the_ways() -> None:
    assert load_recipe("llm-w8a8").linears.outliers == "per_token"
    assert load_recipe("int8").linears.outliers == "auto"
    with pytest.raises(RecipeError, match=r"`linears.outliers`: expected one of 'auto', 'int8', 'per_token'.*got 'half'"):
        load_recipe('[linears]\noutliers = "half"')


def test_outputs_of_the_samples_that_were_looked_at_are_those_of_the_model() -> None:
    """They judge trials later: the same numbers, in the order of the samples, or none at all."""
    model, samples = prepare(load(decoder()), data()[0]), data()
    expected = [runtime.run(model, sample) for sample in samples]
    found = treat_outliers(copy(model), samples, "auto", CPU, ()).outputs
    assert len(found) == len(expected) > 1
    for got, wanted in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5)
    assert treat_outliers(copy(model), samples, "int8", CPU, ()).outputs == ()


def test_large_outputs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = prepare(load(decoder()), data()[0]), data()
    size = sum(array.nbytes for array in runtime.run(model, samples[0]).values())
    for room, count in ((8 * size, len(samples)), (8 * size - 1, 0)):
        monkeypatch.setattr(attnquant.outliers, "_HELD_BYTES", room)
        assert len(treat_outliers(copy(model), samples, "auto", CPU, ()).outputs) == count


def test_an_input_that_is_an_output_too_is_left_to_the_model() -> None:
    model = load(tinymodels.linear())
    model.graph.outputs.append(model.graph.inputs[0])
    assert treat_outliers(model, [{"x": np.ones((4, tinymodels.WIDTH), np.float32)}], "auto", CPU, ()).outputs == []
