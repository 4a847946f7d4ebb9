"""The cache in int8 and int4: the operator against numpy, the pipeline against its float model, and what is refused."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant import model as models
from attnquant.errors import AttnQuantError, ModelError, RecipeError, UnmatchedRuleError
from attnquant.kvcache import CACHE_KEY, KvCache, quantize_caches, stored_cache
from attnquant.kvcache.storage import floats, quantized
from attnquant.recipe import KvCacheConfig, QuantizationRecipe
from attnquant.recipe import load as load_recipe
from attnquant.target import parse_target
from attnquant.verification.decoding import decode
from tests.layeredmodels import DECOMPOSED, HEAD, HEADS, decoder, tokens
from tests.tinymodels import run

TARGET = "onnxruntime-cpu@1.32.0"
BATCH, Q_HEADS, KV_HEADS, SIZE = 3, 6, 2, 16
KINDS = [(8, "tensor"), (8, "channel"), (4, "tensor"), (4, "channel")]


def grouped(*, past: bool = True, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """One GroupQueryAttention of three query heads for each of K and V, with its cache."""

    def info(name: str, *shape: int | str, of: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, of, shape)

    caches = [info(name, "batch", KV_HEADS, "past", SIZE, of=kind) for name in ("past_key", "past_value")]
    presents = [info(name, "batch", KV_HEADS, "all", SIZE, of=kind) for name in ("present_key", "present_value")]
    operands = [("query", Q_HEADS), ("key", KV_HEADS), ("value", KV_HEADS)]
    node = helper.make_node(
        "GroupQueryAttention",
        ["query", "key", "value", *(["past_key", "past_value"] if past else ["", ""]), "last", "total"],
        ["output", "present_key", "present_value"], name="attention", domain="com.microsoft",
        num_heads=Q_HEADS, kv_num_heads=KV_HEADS,
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "grouped",
        [
            *(info(name, "batch", "new", count * SIZE, of=kind) for name, count in operands), *(caches if past else []),
            info("last", "batch", of=TensorProto.INT32), info("total", 1, of=TensorProto.INT32),
        ],
        [info("output", "batch", "new", Q_HEADS * SIZE, of=kind), *presents],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(new: int, past: int, seed: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.normal(0, 0.7, (1, 1, KV_HEADS * SIZE)))  # channels of different size, as keys have them

    def flat(heads: int) -> np.ndarray:
        values = rng.standard_normal((BATCH, new, heads * SIZE))
        return (values * spread if heads == KV_HEADS else values).astype(np.float32)

    def held() -> np.ndarray:
        values = rng.standard_normal((BATCH, past, KV_HEADS * SIZE)) * spread
        return values.reshape(BATCH, past, KV_HEADS, SIZE).transpose(0, 2, 1, 3).astype(np.float32)

    return {
        "query": flat(Q_HEADS), "key": flat(KV_HEADS), "value": flat(KV_HEADS), "past_key": held(), "past_value": held(),
        "last": np.full(BATCH, past + new - 1, np.int32), "total": np.array([past + new], np.int32),
    }  # fmt: skip


def rounded(values: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Integers as float64, by this test's own arithmetic."""
    top = 127 if bits == 8 else 7
    return np.minimum(np.maximum(np.round(values.astype(np.float64) / scale.astype(np.float64)), -top - 1), top)


def attended(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Causal softmax(QK^T / sqrt(d))V in float64, head by head and row by row."""
    batch, new, _ = query.shape
    total = keys.shape[2]
    output = np.zeros((batch, new, Q_HEADS * SIZE))
    for b in range(batch):
        for h in range(Q_HEADS):
            own = h // (Q_HEADS // KV_HEADS)
            for row in range(new):
                seen = total - new + row + 1
                scores = keys[b, own, :seen] @ query[b, row, h * SIZE : (h + 1) * SIZE] / np.sqrt(SIZE)
                weights = np.exp(scores - scores.max())
                output[b, row, h * SIZE : (h + 1) * SIZE] = weights / weights.sum() @ values[b, own, :seen]
    return output


def converted(bits: int, granularity: str, **more: object) -> tuple[ir.Model, KvCache]:
    config = KvCacheConfig(dtype=f"int{bits}", granularity=granularity, **more)  # type: ignore[arg-type]
    made = quantize_caches(models.load(grouped()), [feeds(5, 0), feeds(1, 7)], config, parse_target(TARGET))
    return made.model, made.cache


@pytest.mark.parametrize(("bits", "granularity"), KINDS)
@pytest.mark.parametrize(("new", "past"), [(5, 0), (1, 7)], ids=["prefill", "decode"])
def test_the_operator_computes_what_numpy_computes(bits: int, granularity: str, new: int, past: int) -> None:
    model, cache_of = converted(bits, granularity)
    sample = feeds(new, past, seed=9)
    layer = cache_of.layers[0]
    got = dict(zip(("output", "present_key", "present_value"), run(ir.to_proto(model), cache_of.store(sample)), strict=True))
    wide = {}
    for name in ("key", "value"):
        scale = layer.scale(f"past_{name}")
        fresh = sample[name].reshape(BATCH, new, KV_HEADS, SIZE).transpose(0, 2, 1, 3)
        wide[name] = rounded(np.concatenate([sample[f"past_{name}"], fresh], axis=2), scale, bits)
        stored = got[f"present_{name}"]
        assert stored.dtype == (np.int8 if bits == 8 else np.uint8)
        assert stored.shape == (BATCH, KV_HEADS, past + new, SIZE * bits // 8)
        if bits == 8:
            np.testing.assert_array_equal(stored, wide[name])
        else:
            np.testing.assert_array_equal(stored % 16, wide[name][..., 0::2] + 8)
            np.testing.assert_array_equal(stored // 16, wide[name][..., 1::2] + 8)
        wide[name] = wide[name] * scale
    expected = attended(sample["query"].astype(np.float64), wide["key"], wide["value"])
    np.testing.assert_allclose(got["output"], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("bits", "granularity"), KINDS)
def test_scales_are_the_least_that_clip_nothing(bits: int, granularity: str) -> None:
    _, cache_of = converted(bits, granularity)
    samples = [feeds(5, 0), feeds(1, 7)]
    for name in ("key", "value"):
        whole = [one[name].reshape(-1, KV_HEADS, SIZE) for one in samples]
        whole += [one[f"past_{name}"].transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, SIZE) for one in samples]
        found, top = np.concatenate(whole), 127 if bits == 8 else 7
        least = np.maximum(found.max(axis=0) / top, -found.min(axis=0) / (top + 1))
        expected = least.reshape(1, KV_HEADS, 1, SIZE) if granularity == "channel" else least.max(keepdims=True)
        got = cache_of.layers[0].scale(f"past_{name}")
        np.testing.assert_allclose(got.ravel(), expected.ravel(), rtol=1e-6)


def test_clipping_lowers_the_squared_error_of_int4() -> None:
    """Never above that of the maximum, and below it where one value stands out."""
    rng = np.random.default_rng(0)
    sample = feeds(64, 0)
    sample["key"] = rng.standard_normal(sample["key"].shape).astype(np.float32)
    sample["key"][0, 0] *= 6  # a first token that stands out
    keys = sample["key"].reshape(BATCH, 64, KV_HEADS, SIZE).transpose(0, 2, 1, 3)
    errors = {}
    for clip in ("max", "mse"):
        config = KvCacheConfig(dtype="int4", granularity="channel", clip=clip)  # type: ignore[arg-type]
        made = quantize_caches(models.load(grouped()), [sample], config, parse_target(TARGET))
        scale = made.cache.layers[0].scale("past_key")
        errors[clip] = float(((rounded(keys, scale, 4) * scale - keys) ** 2).mean())
    assert errors["mse"] < 0.8 * errors["max"]


def test_packing_is_undone() -> None:
    values = np.random.default_rng(2).uniform(-2, 2, (2, 3, 4, 8)).astype(np.float32)
    scale = np.linspace(0.2, 0.4, 24, dtype=np.float32).reshape(1, 3, 1, 8)
    packed = quantized(values, scale, 4)
    assert packed.dtype == np.uint8
    assert packed.shape == (2, 3, 4, 4)
    np.testing.assert_allclose(floats(packed, scale, 4), rounded(values, scale, 4) * scale, rtol=1e-6)


# ---- the pipeline -------------------------------------------------------------------------------------------------------


def calibration() -> list[dict[str, np.ndarray]]:
    return [*tokens(40, past=0, new=9), *tokens(8, past=4, new=1)]


@cache
def made(recipe: str) -> attnquant.QuantizationResult:
    return attnquant.quantize(decoder(DECOMPOSED), calibration(), recipe=recipe, target=TARGET)


def test_a_model_that_has_the_operator_already() -> None:
    before = grouped()
    result = attnquant.quantize(before, [feeds(5, 0), feeds(1, 7)], recipe='extends = "llm-kv8"\n[linears]\nkeep_float = []',
                                target=TARGET)
    assert {value.dtype for value in result.model.graph.inputs[3:5]} == {ir.DataType.INT8}
    assert stored_cache(result.model.metadata_props) is not None


def signature(values: list[ir.Value]) -> dict[str, tuple[object, ...]]:
    return {value.name or "": (value.dtype, *map(str, value.shape or ())) for value in values}


@pytest.mark.parametrize(("recipe", "bits"), [("llm-kv8", 8), ("llm-kv4", 4)])
def test_only_caches_change(recipe: str, bits: int) -> None:
    before, after = models.load(decoder(DECOMPOSED)), made(recipe).model
    stored = ir.DataType.INT8 if bits == 8 else ir.DataType.UINT8
    for old, new in ((before.graph.inputs, after.graph.inputs), (before.graph.outputs, after.graph.outputs)):
        expected = signature(list(old))
        for name, (_, *shape) in expected.items():
            if name.startswith("pa") or name.startswith("pre"):
                expected[name] = (stored, *shape[:3], str(HEAD * bits // 8))
        assert list(signature(list(new)).items()) == list(expected.items())
    assert not [node for node in after.graph if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    nodes = [node for node in after.graph if node.op_type == "GroupQueryAttention"]
    assert len(nodes) == 2
    for node in nodes:
        assert node.attributes["kv_cache_bit_width"].as_int() == bits
        assert {node.attributes[f"{role}_quant_type"].as_string() for role in "kv"} == {"PER_CHANNEL"}
        for value in node.inputs[12:14]:
            assert value is not None
            assert value.const_value is not None
            assert value.const_value.shape == (1, HEADS, 1, HEAD)


def rounding(bits: int, data: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    """The float decoder as exported, whose attentions read caches that standard operators round: another way to the same.

    Scales are this test's own, the least of each channel that clip nothing of what the caches hold over the data.
    """
    model, top = onnx.ModelProto(), 127 if bits == 8 else 7
    model.CopyFrom(decoder(DECOMPOSED))
    names = [value.name for value in model.graph.output[1:]]
    held = [dict(zip(names, run(model, sample)[1:], strict=True)) for sample in data]
    nodes = list(model.graph.node)
    for name in names:
        whole = np.concatenate([one[name].transpose(0, 2, 1, 3).reshape(-1, HEADS, HEAD) for one in held])
        scale = np.maximum(whole.max(axis=0) / top, -whole.min(axis=0) / (top + 1)).reshape(1, HEADS, 1, HEAD)
        for node in nodes:
            node.input[:] = [f"{name}.rounded" if item == name else item for item in node.input]
        chain = [("Div", ["scale"]), ("Round", []), ("Clip", ["least", "most"]), ("Mul", ["scale"])]
        consts = {"scale": scale, "least": np.array(-top - 1), "most": np.array(top)}
        model.graph.initializer.extend(
            numpy_helper.from_array(np.asarray(array, np.float32), f"{name}.{key}") for key, array in consts.items()
        )
        place = next(index for index, node in enumerate(nodes) if name in node.output) + 1
        for index, (kind, given) in enumerate(chain):
            source = name if index == 0 else f"{name}.{index - 1}"
            made = f"{name}.rounded" if kind == "Mul" else f"{name}.{index}"
            nodes.insert(place + index, helper.make_node(kind, [source, *(f"{name}.{item}" for item in given)], [made]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize(("recipe", "bits"), [("llm-kv8", 8), ("llm-kv4", 4)])
def test_steps_say_what_prefill_says(recipe: str, bits: int) -> None:
    """Each step as prefill; its error against float is what rounding costs in the model as exported, no more, no less."""
    prompts, oracle = tokens(2, past=0, new=9, seed=8), rounding(bits, calibration())
    report = decode(decoder(DECOMPOSED), made(recipe).model, prompts, steps=3)
    pairs = [(run(decoder(DECOMPOSED), sample)[0], run(oracle, sample)[0]) for sample in prompts]
    for step in report.steps:
        assert step.float_db is not None
        assert step.quantized_db is not None
        assert step.error_db is not None
        assert min(step.float_db, step.quantized_db) > 60
        signal, noise = (sum(float((part**2).sum()) for part in parts) for parts in (
            [x[:, step.position] for x, _ in pairs], [(x - y)[:, step.position] for x, y in pairs],
        ))  # fmt: skip
        assert step.error_db == pytest.approx(10 * np.log10(signal / noise), abs=0.02)


def test_metadata_say_what_to_allocate(tmp_path: Path) -> None:
    path = tmp_path / "kv.onnx"
    made("llm-kv4").save(path)
    found = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    content = json.loads(found[CACHE_KEY])
    assert content["version"] == 1
    assert [row["shape"] for row in content["layers"]] == 2 * [["batch", HEADS, "positions", HEAD // 2]]
    assert {row["dtype"] for row in content["layers"]} == {"uint8"}
    read = stored_cache(found)
    assert read is not None
    scales = {entry.name: onnx.numpy_helper.to_array(entry) for entry in onnx.load(path).graph.initializer}
    for layer in read.layers:
        for role in ("k", "v"):
            np.testing.assert_array_equal(layer.scale(f"{layer.past_key if role == 'k' else layer.past_value}"),
                                          scales[f"{layer.node}/{role}_scale"])
    assert read.bytes_per_token() == 2 * 2 * HEADS * HEAD / 2


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": 2}', '{"version": 1, "layers": [{}], "granularity": "tensor"}'])
def test_other_metadata_are_an_error(text: str) -> None:
    with pytest.raises(ModelError, match=r"attnquant\.kv_cache.*expected what attnquant writes"):
        stored_cache({CACHE_KEY: text})


def test_linears_and_caches_together() -> None:
    """The default recipe and an int8 cache: linears are int8, and steps follow prefill."""
    both = '[kv_cache]\ndtype = "int8"\ngranularity = "channel"'
    result = made(both)
    assert any(node.op_type == "QuantizeLinear" for node in result.model.graph)
    assert stored_cache(result.model.metadata_props) is not None
    alone = attnquant.quantize(decoder(DECOMPOSED), tokens(8, past=4), target=TARGET)
    for model, least in ((alone.model, 20.0), (result.model, 20.0)):
        report = decode(decoder(DECOMPOSED), model, tokens(2, past=0, new=9, seed=8), steps=3)
        assert min(step.error_db or 0.0 for step in report.steps) > least


def test_check_verify_and_inspect_read_the_result() -> None:
    result = made("llm-kv8")
    report = attnquant.check(result.model, target=TARGET)
    assert report.ok, report.violations
    data = tokens(3, past=0, new=9, seed=3)
    found = attnquant.verify(decoder(DECOMPOSED), result.model, data, target=TARGET)
    assert found.ok, found.failures
    worst = min(row.snr_db for row in found.providers["cpu"].outputs if row.snr_db is not None)
    assert worst > 35
    assert len(attnquant.recognize(result.model).sites) == 2


def _scaled(change: object) -> ir.Model:
    """The model with its first k_scale changed."""
    model = models.copy(made("llm-kv8").model)
    node = next(node for node in model.graph if node.op_type == "GroupQueryAttention")
    value = node.inputs[12]
    assert value is not None
    assert value.const_value is not None
    array = change(value.const_value.numpy().copy())  # type: ignore[operator]
    value.const_value = ir.tensor(array, name=value.name)
    value.type, value.shape = ir.TensorType(value.const_value.dtype), value.const_value.shape
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda scale: scale[:, :1], r"k_scale float32 of shape \(1, 4, 1, 8\), got float32 of shape \(1, 1, 1, 8\)"),
        (lambda scale: scale.ravel(), r"expected k_scale float32 of shape \(1, 4, 1, 8\)"),
        (lambda scale: scale * 0, "expected k_scale above 0"),
        (lambda scale: scale.astype(np.float16), "expected k_scale float32"),
        (lambda scale: scale * 2, "other scales than the operator has"),
    ],
    ids=["heads", "flat", "zero", "half", "other"],
)
def test_check_finds_wrong_scales(change: object, reason: str) -> None:
    report = attnquant.check(_scaled(change), target=TARGET)
    assert not report.ok
    assert any(re.search(reason, line) for line in report.violations), report.violations


def _without_scale(node: ir.Node) -> None:
    node.replace_input_with(12, None)


def _per_tensor(node: ir.Node) -> None:
    node.attributes["v_quant_type"] = ir.AttrString("v_quant_type", "PER_TENSOR")


def _four_bits(node: ir.Node) -> None:
    node.attributes["kv_cache_bit_width"] = ir.AttrInt64("kv_cache_bit_width", 4)


def _no_type(node: ir.Node) -> None:
    del node.attributes["k_quant_type"], node.attributes["v_quant_type"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_without_scale, "expected k_scale for a quantized cache, got none"),
        (_per_tensor, "expected one k_quant_type and v_quant_type"),
        (_four_bits, "expected UINT8 for k_quant_type 'PER_CHANNEL', got INT8"),
        (_no_type, "expected float for k_quant_type 'NONE', got INT8"),
    ],
)
def test_check_finds_what_the_operator_lacks(change: object, reason: str) -> None:
    model = models.copy(made("llm-kv8").model)
    change(next(node for node in model.graph if node.op_type == "GroupQueryAttention"))  # type: ignore[operator]
    report = attnquant.check(model, target=TARGET)
    assert any(reason in line for line in report.violations), report.violations


# ---- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["onnxruntime-cuda@1.32.0", "openvino", "onnxruntime-cpu@1.26.0"])
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(RecipeError, match=r"kv_cache\.dtype.*onnxruntime-cpu of version 1\.27"):
        attnquant.quantize(decoder(DECOMPOSED), tokens(1, past=4), recipe="llm-kv8", target=target)


def test_a_bound_beside_the_cache_is_refused() -> None:
    with pytest.raises(RecipeError, match="max_drop"):
        attnquant.quantize(
            decoder(DECOMPOSED), tokens(1, past=4), recipe="llm-kv8", max_drop="snr_db>=10", target=TARGET
        )


def _read_twice(model: ir.Model) -> None:
    node = ir.Node("", "Identity", [model.graph.inputs[3]], name="other")
    model.graph.append(node)


def _no_output(model: ir.Model) -> None:
    model.graph.outputs.pop()


def _named_heads(model: ir.Model) -> None:
    model.graph.inputs[3].shape = ir.Shape(["batch", "heads", "past", SIZE])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_read_twice, "'past_key' is also read by"),
        (_no_output, "not both outputs of the model"),
        (_named_heads, "heads and head size have to be numbers"),
    ],
)
def test_caches_that_can_not_be_integers_are_named(change: object, reason: str) -> None:
    model = models.load(grouped())
    change(model)  # type: ignore[operator]
    with pytest.raises(ModelError, match=rf"node 'attention'.*{reason}"):
        quantize_caches(model, [feeds(5, 0)], KvCacheConfig(dtype="int8"), parse_target(TARGET))


def test_no_cache_and_a_second_time_are_refused() -> None:
    config, target = KvCacheConfig(dtype="int8"), parse_target(TARGET)
    with pytest.raises(ModelError, match="not both inputs of the model"):
        quantize_caches(models.load(grouped(past=False)), [feeds(5, 0)], config, target)
    model, _ = converted(8, "channel")
    with pytest.raises(ModelError, match="quantized already"):
        quantize_caches(model, [feeds(5, 0)], config, target)


def test_layers_stay_float_by_choice() -> None:
    recipe = 'extends = "llm-kv8"\n[kv_cache]\nkeep_float = ["layer0"]'
    result = attnquant.quantize(decoder(DECOMPOSED), tokens(8, past=0), recipe=recipe, target=TARGET)
    found = stored_cache(result.model.metadata_props)
    assert found is not None
    assert [layer.bits for layer in found.layers] == [None, 8]
    assert [layer.dtype for layer in found.layers] == ["float32", "int8"]
    assert found.bytes_per_token() == 2 * HEADS * HEAD * (4 + 1)
    report = decode(decoder(DECOMPOSED), result.model, tokens(2, past=0, new=9, seed=8), steps=3)
    assert min(step.quantized_db or 0.0 for step in report.steps) > 60
    with pytest.raises(UnmatchedRuleError, match=r"kv_cache\.keep_float.*'nowhere'"):
        attnquant.quantize(
            decoder(DECOMPOSED), tokens(1, past=0), recipe=recipe.replace("layer0", "nowhere"), target=TARGET
        )


@pytest.mark.parametrize("name", ["llm-kv8", "llm-kv4"])
def test_the_recipes_quantize_the_cache_alone(name: str) -> None:
    recipe: QuantizationRecipe = load_recipe(name)
    assert recipe.kv_cache.granularity == "channel"
    assert {config.dtype for config in recipe.roles.values()} == {"none"}
    assert recipe.linears.keeps_float("anything")
    assert issubclass(RecipeError, AttnQuantError)
