"""verify: every figure against numpy, memory that stays bounded, providers that are there or not, and what fails."""

import gc
import json
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant import measures
from attnquant.cli import main
from attnquant.errors import DataError, HostError, ModelError
from attnquant.feeds import Feeds
from attnquant.providers import problem
from attnquant.roles import PortRole
from attnquant.verification import VerificationReport, sites, verify
from attnquant.verification.pairing import pair_sites
from attnquant.verification.stats import GaugeSums, SiteSums, laid_over
from attnquant.verification.watching import Gauge
from tests.layeredmodels import DECOMPOSED, HEAD, HEADS, LAYERS, LENGTH, OPERATOR, WIDTH, encoder, samples
from tests.test_verification_faults import TARGET, Planted, quantized, quarter_scale
from tests.tinymodels import linear, made, run, weights

DATA = samples(5, seed=7)
ROLES = ("query", "key", "scores", "probabilities", "value", "context")
CUDA = problem("cuda")


def snr(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return float(10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def fetch(model: onnx.ModelProto, *names: str) -> list[list[np.ndarray]]:
    """Inner tensors of a model for every sample of DATA."""
    watched = onnx.ModelProto()
    watched.CopyFrom(model)
    del watched.graph.output[:]
    watched.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return [run(watched, sample) for sample in DATA]


def heads(x: np.ndarray) -> np.ndarray:
    """(B, S, H * d) -> (B, H, S, d)."""
    return x.reshape(*x.shape[:2], HEADS, HEAD).transpose(0, 2, 1, 3)


@cache
def report(form: str = OPERATOR) -> VerificationReport:
    return verify(encoder(form), quantized(form), DATA, target=TARGET)


# ---- measures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [7, 1 << 20])
def test_likeness_is_numpys(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "_PIECE", piece)
    x, y = weights(1, 5, 11), weights(2, 5, 11)
    found = measures.Likeness()
    for row, other in zip(x, y, strict=True):
        found.add(row, other)
    assert found.snr_db == pytest.approx(snr(x, y))
    wide, narrow = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    assert found.cosine == pytest.approx(wide @ narrow / np.linalg.norm(wide) / np.linalg.norm(narrow))
    assert found.max_abs == pytest.approx(np.abs(x - y).max())
    assert found.count == 55


def test_likeness_at_its_ends() -> None:
    x = np.array([1.0, -np.inf, 2.0], np.float32)
    equal, broken, nothing = measures.Likeness(), measures.Likeness(), measures.Likeness()
    equal.add(x, np.array([1.0, 5.0, 2.0], np.float32))  # a mask's -inf is no value to compare
    broken.add(x, np.array([1.0, 5.0, np.nan], np.float32))
    assert equal.snr_db == measures.CEILING
    assert broken.snr_db == -measures.CEILING
    assert nothing.snr_db is None
    assert nothing.cosine is None
    assert measures.worst_snr([equal, nothing, broken]) == -measures.CEILING
    assert measures.worst_snr([nothing]) is None


def test_classes_are_numpys() -> None:
    x, y = 3 * weights(3, 40, 20), 3 * weights(4, 40, 20)
    p, q = softmax(x.astype(np.float64)), softmax(y.astype(np.float64))
    kl = float((p * np.log(p / q)).sum(-1).mean())
    agreement = float((x.argmax(-1) == y.argmax(-1)).mean())
    for first, second in ((x, y), (p.astype(np.float32), q.astype(np.float32))):  # logits, and probabilities as they are
        found = measures.Classes()
        found.add(first.reshape(4, 10, 20), second.reshape(4, 10, 20))
        assert found.kl == pytest.approx(kl, rel=1e-4)
        assert found.top1 == pytest.approx(agreement)


def test_factors_of_channels_are_taken_out() -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 2, 50, 4)).astype(np.float32)
    factors = random.uniform(0.2, 5, (1, 2, 1, 4)).astype(np.float32)
    noise = 0.01 * random.standard_normal(x.shape).astype(np.float32)
    found = measures.Scaled()
    found.add(x, (x + noise) / factors)
    assert found.snr_db == pytest.approx(snr(x, x + noise), abs=0.2)
    other = measures.Scaled()
    other.add(x[:1, :, :4], x[:1, :, :4])
    assert other.snr_db is None  # four elements are too few for a factor


def test_value_and_context_leave_smoothing_out_and_say_so() -> None:
    """SmoothQuant moves factors into V's projection: the model is equal, its V is not."""
    x = weights(5, 200, 8).reshape(1, 1, 200, 8)
    factors = np.linspace(0.3, 3, 8, dtype=np.float32)
    sums = SiteSums()
    for role in (PortRole.VALUE, PortRole.QUERY):
        sums.add_role(role, x, x * factors + 1e-3)
    assert sums.smoothed(PortRole.VALUE)
    assert not sums.smoothed(PortRole.QUERY)
    assert sums.snr_db(PortRole.VALUE) > 30
    assert sums.snr_db(PortRole.QUERY) == pytest.approx(snr(x, x * factors + 1e-3))


def test_a_gauge_counts_what_its_range_cuts() -> None:
    scale, zero = np.float32(0.1), np.uint8(100)
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize")
    sums = GaugeSums.of(_gauge(node, scale, zero))
    assert (sums.low, sums.high) == pytest.approx((-10, 15.5))
    values = np.random.default_rng(0).normal(0, 8, 5000).astype(np.float32)
    for part in np.split(values, 5):
        sums.add(part)
    assert sums.clipped_share == pytest.approx(((values < -10.05) | (values > 15.55)).mean())
    assert (sums.minimum, sums.maximum) == (values.min(), values.max())
    expected = np.histogram(np.clip(values, *sums.edges), bins=len(sums.bins), range=sums.edges)[0]
    assert np.abs(sums.bins - expected).sum() <= 4  # elements on an edge
    assert sums.unused_share == 0
    narrow = GaugeSums.of(_gauge(node, scale, zero))
    narrow.add(np.array([-1.0, 1.55], np.float32))
    assert narrow.unused_share == pytest.approx(0.9)


def _gauge(node: onnx.NodeProto, scale: np.ndarray, zero: np.ndarray) -> Gauge:
    import onnx_ir as ir

    from attnquant.audit.quantizers import parameters

    constants = [numpy_helper.from_array(np.asarray(scale), "s"), numpy_helper.from_array(np.asarray(zero), "z")]
    info = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
        helper.make_tensor_value_info("q", TensorProto.UINT8, [4]),
    ]
    model = ir.from_proto(made(helper.make_graph([node], "g", info[:1], info[1:], constants), 17))
    return Gauge(role=PortRole.QUERY, node="quantize", tensor="x", parameters=parameters(model.graph[0]))


def test_dead_rows_are_counted() -> None:
    sums = SiteSums()
    rows = softmax(weights(6, 2, 3, 4, 5))
    rows[0, 1, 2] = 0
    rows[1, 0, 0] = np.nan
    sums.add_rows("quantized", rows)
    assert (sums.dead["quantized"], sums.rows["quantized"]) == (2, 24)


def test_layouts_are_laid_over_each_other() -> None:
    x = weights(7, 2, 3, 4, 5)
    assert np.array_equal(laid_over(x, x.reshape(6, 4, 5)), x)
    assert np.array_equal(laid_over(x, x.swapaxes(-1, -2)), x)
    assert laid_over(x, x[:1]) is None


# ---- the report ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [OPERATOR, DECOMPOSED])
def test_outputs_are_numpys(form: str) -> None:
    found = report(form).providers["cpu"].outputs
    pairs = [(run(encoder(form), sample), run(quantized(form), sample)) for sample in DATA]
    assert [row.name for row in found] == ["y", "logits"]
    for index, row in enumerate(found):
        x, y = (np.stack([pair[side][index] for pair in pairs]) for side in (0, 1))
        assert row.snr_db == pytest.approx(snr(x, y), abs=1e-3)
        assert row.max_abs == pytest.approx(np.abs(x - y).max(), rel=1e-5)
        each = [snr(*pair) for pair in zip(x, y, strict=True)]
        assert row.samples == pytest.approx(each, abs=1e-3)
        assert row.worst == int(np.argmin(each))
    logits, (x, y) = found[1], (np.stack([pair[side][1] for pair in pairs]).astype(np.float64) for side in (0, 1))
    p, q = softmax(x), softmax(y)
    assert logits.kl == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-3)
    assert logits.top1 == pytest.approx((x.argmax(-1) == y.argmax(-1)).mean())
    assert (found[0].top1, found[0].kl) == (None, None)  # an output named logits is there: y is none
    assert report(form).providers["cpu"].snr_db == min(row.snr_db for row in found)


def test_sites_are_numpys() -> None:
    """Q, scores, P and the own error of one attention, computed here from the tensors at its ports."""
    name = "layer3.attn"
    site = report().providers["cpu"].sites[3]
    assert site.id == f"/n_{name}.context"
    exact = fetch(encoder(OPERATOR), f"{name}.q", f"{name}.k")
    node = next(node for node in quantized(OPERATOR).graph.node if node.name == f"n_{name}.context")
    ours = fetch(quantized(OPERATOR), *node.input, f"{name}.q", f"{name}.k", f"{name}.context")

    def scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
        return heads(q) @ heads(k).swapaxes(-1, -2) / np.sqrt(HEAD)

    def stacked(rows: Iterator[np.ndarray]) -> np.ndarray:
        return np.stack(list(rows))

    float_scores = stacked(scores(q, k) for q, k in exact)
    own_scores = stacked(scores(q, k) for q, k, *_ in ours)
    assert site.snr_db[PortRole.QUERY] == pytest.approx(
        snr(*(stacked(row[0] for row in one) for one in (exact, ours))), abs=0.01
    )
    assert site.snr_db[PortRole.SCORES] == pytest.approx(snr(float_scores, own_scores), abs=0.01)
    probabilities = snr(softmax(float_scores), softmax(own_scores))
    assert site.snr_db[PortRole.PROBABILITIES] == pytest.approx(probabilities, abs=0.01)
    context = stacked(heads(row[5]) for row in ours)
    twin = stacked(softmax(scores(q, k)) @ heads(v) for _, _, v, q, k, _ in ours)
    assert site.local_snr_db == pytest.approx(snr(twin, context), abs=0.01)

    def rounded(x: np.ndarray) -> np.ndarray:
        step = np.abs(x).max() / 127
        return np.round(x / step) * step

    eight = stacked(softmax(scores(rounded(q), rounded(k))) @ heads(v) for _, _, v, q, k, _ in ours)
    assert site.expected_snr_db == pytest.approx(snr(twin, eight), abs=0.05)


@pytest.mark.parametrize("form", [OPERATOR, DECOMPOSED])
def test_attribution_is_what_removing_the_quantizers_gives(form: str) -> None:
    planted = Planted(form, 0)
    planted.drop("query")
    planted.drop("key")
    before, after = (verify(encoder(form), model, DATA, target=TARGET) for model in (quantized(form), planted.model))
    gain = after.providers["cpu"].snr_db - before.providers["cpu"].snr_db
    assert before.providers["cpu"].sites[0].attribution_db == pytest.approx(gain, abs=0.02)


def test_both_forms_say_the_same() -> None:
    for one, other in zip(report(OPERATOR).providers["cpu"].sites, report(DECOMPOSED).providers["cpu"].sites, strict=True):
        assert one.local_snr_db == pytest.approx(other.local_snr_db, abs=0.3)
        assert [row.role for row in one.quantizers] == [PortRole.QUERY, PortRole.KEY]
        assert all(sum(row.histogram) == len(DATA) * 2 * LENGTH * WIDTH for row in (*one.quantizers, *other.quantizers))


def test_json_is_the_published_one() -> None:
    content = json.loads(json.dumps(report().to_json(), allow_nan=False))
    assert content["placement_ok"] is True
    provider = content["providers"]["cpu"]
    assert {"name", "snr_db", "cosine", "max_abs", "top1", "kl", "samples", "worst_sample"} <= provider["outputs"][0].keys()
    assert len(provider["sites"]) == LAYERS
    site = provider["sites"][0]
    assert tuple(site["snr_db"]) == ROLES
    assert site["id"] == "/n_layer0.attn.context"
    assert site["node"] == "n_layer0.attn.context"
    assert (site["suspect"], site["reasons"]) == (False, [])
    assert isinstance(site["attribution_db"], float)


def test_an_output_that_is_not_finite_fails_and_is_json() -> None:
    planted = Planted(OPERATOR, 0)
    last = next(node for node in planted.graph.node if node.output[0] == "logits")
    last.input[1] = planted.constant("planted", np.full(2 * WIDTH, np.nan, np.float32))
    found = verify(encoder(OPERATOR), planted.model, DATA, target=TARGET, min_snr=10)
    json.dumps(found.to_json(), allow_nan=False)
    assert found.providers["cpu"].snr_db == -measures.CEILING
    assert any("SNR" in failure for failure in found.failures)


def test_min_snr() -> None:
    worst = report().providers["cpu"].snr_db
    below, above = (
        verify(encoder(OPERATOR), quantized(OPERATOR), DATA, target=TARGET, min_snr=limit)
        for limit in (worst - 1, worst + 1)
    )
    assert below.ok
    assert above.failures == (f"cpu: expected an SNR of {worst + 1:g} dB at least, got {worst:.1f} dB",)


# ---- streaming ----------------------------------------------------------------------------------------------------------


def test_one_sample_is_held_at_a_time() -> None:
    alive: weakref.WeakSet[_Tracked] = weakref.WeakSet()
    most = 0

    def read() -> Iterator[dict[str, np.ndarray]]:
        nonlocal most
        for sample in samples(20, seed=3):
            array = sample["x"].view(_Tracked)
            alive.add(array)
            gc.collect(0)
            most = max(most, len(alive))
            yield {"x": array}

    found = verify(encoder(DECOMPOSED), quantized(DECOMPOSED), Feeds.lazy(read), target=TARGET)
    assert found.samples == 20
    assert most <= 3


class _Tracked(np.ndarray):
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        return self is other


def test_a_generator_is_read_once_and_is_enough() -> None:
    found = verify(encoder(OPERATOR), quantized(OPERATOR), (sample for sample in DATA), target=TARGET)
    assert found.providers == report().providers


def test_attentions_are_observed_in_groups_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "BUDGET", 1)
    told: list[str] = []
    found = verify(encoder(OPERATOR), quantized(OPERATOR), DATA, target=TARGET, progress=told.append)
    assert [line for line in told if "attentions" in line] == [f"cpu: attentions {n} to {n} of 6" for n in range(1, 7)]
    for one, other in zip(found.providers["cpu"].sites, report().providers["cpu"].sites, strict=True):
        assert one == other


# ---- what is compared ---------------------------------------------------------------------------------------------------


def test_a_model_without_attention_compares_its_outputs() -> None:
    model = linear()
    data = [{"x": weights(n, 3, 16)} for n in range(4)]
    found = verify(model, attnquant.quantize(model, data, target=TARGET).model, data)
    assert found.ok
    assert found.providers["cpu"].sites == ()
    assert found.providers["cpu"].snr_db > 20
    assert any("No attention" in note for note in found.notes)


def test_integer_outputs_are_compared_for_equality() -> None:
    def model(shift: float) -> onnx.ModelProto:
        nodes = [
            helper.make_node("Add", ["x", "c"], ["z"], name="add"),
            helper.make_node("ArgMax", ["z"], ["best"], axis=-1, keepdims=0, name="best"),
        ]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 4])
        best = helper.make_tensor_value_info("best", TensorProto.INT64, ["b"])
        constant = numpy_helper.from_array(np.array([shift, 0, 0, 0], np.float32), "c")
        return made(helper.make_graph(nodes, "g", [x], [best], [constant]), 17)

    data = [{"x": weights(n, 50, 4)} for n in range(3)]
    (row,) = verify(model(0), model(0.5), data).providers["cpu"].outputs
    shifted = [sample["x"] + np.array([0.5, 0, 0, 0], np.float32) for sample in data]
    same = [sample["x"].argmax(-1) == other.argmax(-1) for sample, other in zip(data, shifted, strict=True)]
    assert row.equal == pytest.approx(np.mean(same))
    assert row.samples == pytest.approx([one.mean() for one in same])
    assert (row.snr_db, row.cosine) == (None, None)


def test_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="expected the float model's outputs"):
        verify(encoder(OPERATOR), linear(), DATA)
    with pytest.raises(DataError):
        verify(encoder(OPERATOR), quantized(OPERATOR), [])


def test_sites_are_paired_by_id_and_what_is_left_in_order() -> None:
    first = attnquant.recognize(encoder(OPERATOR)).sites
    second = attnquant.recognize(quantized(OPERATOR)).sites
    assert [(pair.reference.id, pair.quantized.id) for pair in pair_sites(first, second)] == [(s.id, s.id) for s in first]
    (alone,) = pair_sites(first, second[:1])
    assert alone.reference is first[0]
    assert pair_sites((), second)[0].reference is None


# ---- providers ----------------------------------------------------------------------------------------------------------


def test_a_provider_that_is_missing_is_an_error() -> None:
    with pytest.raises(HostError, match=r"Provider 'nothing'.*auto"):
        verify(encoder(OPERATOR), quantized(OPERATOR), DATA, providers=["nothing"])
    if CUDA is not None:
        with pytest.raises(HostError, match="Provider 'cuda'"):
            verify(encoder(OPERATOR), quantized(OPERATOR), DATA, providers=["cpu", "cuda"])


def test_auto_takes_what_is_there() -> None:
    found = verify(encoder(OPERATOR), quantized(OPERATOR), DATA[:1], providers=["auto"], target=TARGET)
    assert tuple(found.providers) == (("cpu",) if CUDA else ("cpu", "cuda"))


@pytest.mark.skipif(CUDA is not None, reason=f"needs the CUDA provider: {CUDA}")
def test_cuda_beside_cpu() -> None:
    found = verify(encoder(OPERATOR), quantized(OPERATOR), DATA, providers=["cpu", "cuda"], target=TARGET)
    assert found.ok, found.failures
    (rows,) = found.between.values()
    assert all(row.snr_db > 25 for row in rows)
    for one, other in zip(*(found.providers[name].sites for name in ("cpu", "cuda")), strict=True):
        assert one.local_snr_db == pytest.approx(other.local_snr_db, abs=3)


# ---- command line -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    planted = Planted(OPERATOR, 4)
    quarter_scale(planted)
    for name, model in (("float", encoder(OPERATOR)), ("int8", quantized(OPERATOR)), ("planted", planted.model)):
        onnx.save(model, folder / f"{name}.onnx")
    (folder / "data").mkdir()
    for index, sample in enumerate(DATA[:3]):
        np.savez(folder / "data" / f"clip{index}.npz", **sample)
    return folder


def call(files: Path, *options: str, model: str = "int8") -> int:
    names = [str(files / name) for name in ("float.onnx", f"{model}.onnx")]
    return main(["verify", *names, "--data", str(files / "data"), "--target", TARGET, *options])


def test_command(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(files, "--format", "json") == 0
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert content["ok"]
    assert content["quantized"] == str(files / "int8.onnx")
    assert content["command"].startswith(f"attnquant verify {files / 'float.onnx'}")
    assert content["providers"]["cpu"]["outputs"][0]["worst_sample"]["name"].startswith("clip")
    assert "attnquant: cpu: attentions 1 to 6 of 6" in captured.err


@pytest.mark.parametrize("format", ["rich", "markdown", "html"])
def test_a_suspect_is_3_in_every_format(files: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(files, "--format", format, model="planted") == 3
    out = capsys.readouterr().out
    assert "/n_layer4.attn.context" in out
    assert "suspect" in out
    assert "values are clipped" in out


def test_missed_snr_is_3(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(files, "--min-snr", "60") == 3
    assert "expected an SNR of 60 dB at least" in capsys.readouterr().out


def test_out_takes_the_report(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(files, "--format", "markdown", "--out", str(tmp_path / "report.md")) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "wrote" in captured.err
    assert (tmp_path / "report.md").read_text().startswith("### Verification of `")


@pytest.mark.parametrize("name", ["float.onnx", "int8.onnx"])
def test_a_report_does_not_take_the_place_of_a_model(name: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (files / name).read_bytes()
    assert call(files, "--format", "html", "--out", str(files / name)) == 1
    assert "never changed: name another file" in " ".join(capsys.readouterr().err.replace("│", "").split())
    assert (files / name).read_bytes() == before


def test_bad_calls_are_1(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(files, "--provider", "nothing") == 1
    assert call(files, "--out", str(tmp_path / "no" / "report.md")) == 1
    assert main(["verify", str(files / "float.onnx"), str(files / "int8.onnx")]) == 1
    err = capsys.readouterr().err
    assert "Provider 'nothing'" in err
    assert "existing folder" in err
    assert "needs data" in err
