"""Ranges by measurement: the setting of the least error is found, within the time, and the report says what was tried."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant import choosing, quantization, runtime
from attnquant.choosing import Setting, choice, locally, search
from attnquant.choosing.choice import STRENGTHS, snr
from attnquant.emission.compensated import Moments
from attnquant.emission.dequantize import dequantize_weights
from attnquant.emission.weights import fold_weights
from attnquant.feeds import Sample
from attnquant.graph import constant
from attnquant.host import strengths
from attnquant.host.known import SHAPE, Reduction
from attnquant.host.memory import HostMemory
from attnquant.host.run import HostArguments
from attnquant.recipe import QuantizationRecipe, load
from attnquant.target import parse_target
from tests import tinymodels
from tests.corpora import entries, runnable

WIDTH = tinymodels.WIDTH
ONE_SCALE = "[linears]\noutliers = 'int8'\n"
PATIENT = load("extends = 'measured'\n[options]\nsearch_seconds = 100")


def linear(scale: float = 0.2) -> onnx.ModelProto:
    """x (batch, tokens, WIDTH) -> MatMul -> y."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="linear")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "t", WIDTH]) for name in "xy"]
    weight = (np.random.default_rng(3).standard_normal((WIDTH, WIDTH)) * scale).astype(np.float32)
    return tinymodels.made(helper.make_graph([node], "g", infos[:1], infos[1:], [numpy_helper.from_array(weight, "w")]), 17)


def data(outlier: float, *, every: int, count: int = 24) -> list[dict[str, np.ndarray]]:
    """Normal tokens; in every so-manieth sample one token is as large as said."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(count):
        x = np.clip(rng.standard_normal((1, 64, WIDTH)), -2, 2).astype(np.float32)
        if index % every == every - 1:
            x[0, 5, :] = outlier * np.sign(x[0, 5, :])
        made.append({"x": x})
    return made


def fixed_strength() -> QuantizationRecipe:
    recipe = load("measured")
    options = replace(recipe.options, search_seconds=60.0)
    return replace(recipe, linears=replace(recipe.linears, smooth_quant=False, outliers="int8"), options=options)


def held_out(model: onnx.ModelProto, quantized: ir.Model, samples: list[dict[str, np.ndarray]]) -> float:
    pairs = [(tinymodels.run(model, sample)[0], tinymodels.run(ir.to_proto(quantized), sample)[0]) for sample in samples]
    return snr([{"y": one} for one, _ in pairs], [{"y": other} for _, other in pairs])


@pytest.mark.parametrize(
    ("outlier", "every", "expected"),
    [(12.0, 2, {"minmax", "histogram"}), (40.0, 23, {"mean_minmax", "quantile", "histogram"})],
    ids=["large tokens that count", "one sample that is like no other"],
)
def test_the_right_estimator_wins(outlier: float, every: int, expected: set[str]) -> None:
    """Large tokens in every second sample must not be clipped; one monster in 24 must not set the range of all.

    A histogram's range ends at the large tokens too.
    """
    model, samples = linear(), data(outlier, every=every)
    result = quantization.quantize(model, samples, recipe=fixed_strength())
    note = next(note for note in result.notes if note.startswith("Ranges "))
    assert note.split(",")[0].removeprefix("Ranges ") in expected, note
    test = data(outlier, every=every, count=2)
    each = {}
    for name in ("minmax", "mean_minmax"):
        recipe = replace(fixed_strength(), ranges=replace(load("measured").ranges, estimator=name))
        each[name] = held_out(model, quantization.quantize(model, samples, recipe=recipe).model, test)
    assert held_out(model, result.model, test) >= max(each.values()) - 0.3
    assert abs(each["minmax"] - each["mean_minmax"]) > 3, "the planted models tell the two apart"


def channels(model: onnx.ModelProto, factor: float) -> list[dict[str, np.ndarray]]:
    """Samples with two channels that are `factor` as large as the others."""
    samples = data(1.0, every=100)
    for sample in samples:
        sample["x"][..., :2] *= factor
    return samples


def test_outlier_channels_are_smoothed_and_even_ones_are_not_hurt() -> None:
    model = linear()
    for factor, smoothed in ((100.0, True), (1.0, False)):
        samples = channels(model, factor)
        result = quantization.quantize(model, samples, recipe=PATIENT)
        off = quantization.quantize(model, samples, recipe=fixed_strength())
        gain = held_out(model, result.model, samples[:2]) - held_out(model, off.model, samples[:2])
        assert (gain > 6) if smoothed else (gain > -0.5), gain


def scored(table: dict[tuple[str, object], float], taken: list[Setting], seconds: float = 1.0) -> tuple[object, list[float]]:
    clock = [0.0]

    def measure(setting: Setting) -> float:
        taken.append(setting)
        clock[0] += seconds
        return table.get((setting.estimator, "own" if setting.strengths else setting.strength), 0.0)

    return measure, clock


def test_the_order_of_trials_and_the_best_of_all() -> None:
    taken: list[Setting] = []
    measure, _ = scored({("a", 0.5): 5, ("a", "own"): 7, ("b", "own"): 6, ("a", 0.9): 8, ("c", 0.9): 9}, taken)
    outcome = search((0.7, 0.5, 0.9), ("a", "b", "c"), measure, by_linear=lambda: {"one": 0.1})
    assert [(one.estimator, one.strength, dict(one.strengths)) for one in taken] == [
        ("a", 0.7, {}), ("a", 0.5, {}), ("a", None, {"one": 0.1}), ("b", None, {"one": 0.1}), ("a", 0.9, {}), ("c", 0.9, {}),
    ]  # fmt: skip
    assert outcome.won.setting == Setting(estimator="c", strength=0.9)
    assert outcome.untried == ()
    assert choosing.sentence(outcome).startswith("Ranges c, SmoothQuant strength 0.9 by error")


@pytest.mark.parametrize(("seconds", "tried"), [(0.5, 2), (1.0, 2), (2.0, 3), (3.5, 4)])
def test_time_is_kept(seconds: float, tried: int) -> None:
    """A trial takes one second; the first is no part of the time, the second always is made."""
    taken: list[Setting] = []
    measure, clock = scored({("a", 0.5): 3.25}, taken)
    outcome = search((0.7, 0.5, 0.9), ("a", "b", "c"), measure, seconds=seconds, clock=lambda: clock[0])
    assert len(outcome.trials) == len(taken) == tried
    assert len(outcome.trials) + len(outcome.untried) == 5
    text = choosing.sentence(outcome)
    assert "0.5 3.2 dB" in text
    assert ("No time was left for" in text) == bool(outcome.untried)


def test_nothing_is_searched_where_the_recipe_decides() -> None:
    recipe = load("[ranges]\nestimator = 'minmax'\n[linears]\nsmooth_quant_alpha = 0.5")
    samples = [{"x": tinymodels.weights(seed, 2, 5, WIDTH)} for seed in range(3)]
    for decided in (recipe, load("extends = 'measured'\n[options]\nsearch_seconds = 0")):
        notes = quantization.quantize(tinymodels.attention(), samples, recipe=decided).notes
        assert not [note for note in notes if "Ranges" in note]
    searched = quantization.quantize(tinymodels.attention(), samples, recipe=PATIENT)
    note = next(note for note in searched.notes if note.startswith("Ranges "))
    for strength in ("0.75", "0.5", "off", "0.25", "0.65", "0.85", "0.95"):
        assert f"{strength} " in note
    for estimator in ("minmax", "mean_minmax", "quantile", "histogram"):
        assert f"{estimator}: " in note
    default = next(note for note in quantization.quantize(tinymodels.attention(), samples).notes if "Ranges" in note)
    assert default.count(" dB") == 2, "the default recipe tries two strengths"


def test_trials_are_judged_on_samples_they_have_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    run = quantization.Builder.calibrated

    def watched(self: quantization.Builder, recipe: object, samples: Iterator[Sample], **options: object) -> object:
        samples = list(samples)
        asked.append([round(float(sample["x"].flat[0])) for sample in samples])
        return run(self, recipe, samples, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(quantization.Builder, "calibrated", watched)
    samples = [{"x": np.full((1, 4, WIDTH), number, np.float32)} for number in range(1, 11)]
    quantization.quantize(linear(), samples, recipe=PATIENT)
    assert asked[0] == [5], "what is asked, of one sample"
    assert all(numbers == [5, 6, 7, 8] for numbers in asked[1:-1:2]), "few samples"
    assert all(numbers == list(range(5, 11)) for numbers in asked[2:-1:2]), "and all"
    assert asked[-1] == list(range(1, 11))
    assert len(asked) == 2 + 2 * (len(STRENGTHS) + 1 + 3)
    asked.clear()
    quantization.quantize(linear(), samples)
    assert asked == [[5], *[list(range(5, 11))] * 2, list(range(1, 11))], "the default recipe calibrates each trial once"


@pytest.mark.parametrize(
    ("count", "judged"), [(3, 3), (7, 4), (8, 4), (39, 4), (40, 5), (63, 7), (64, 8), (300, 8)]
)
def test_an_eighth_of_the_samples_judges(count: int, judged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least four and at most eight, which are not calibrated with where there are eight or more."""
    asked: list[int] = []
    outputs = choice._outputs

    def watched(model: ir.Model, samples: Sequence[Sample]) -> Iterator[dict[str, np.ndarray]]:
        asked.append(len(samples))
        return outputs(model, samples)

    monkeypatch.setattr(choice, "_outputs", watched)
    seen: list[list[int]] = []
    run = quantization.Builder.calibrated

    def calibrated(self: quantization.Builder, recipe: object, samples: Iterable[Sample], **options: object) -> object:
        samples = list(samples)
        seen.append([round(float(sample["x"].flat[0])) for sample in samples])
        return run(self, recipe, samples, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(quantization.Builder, "calibrated", calibrated)
    samples = [{"x": np.full((1, 4, WIDTH), number, np.float32)} for number in range(count)]
    quantization.quantize(linear(), samples, recipe=load("[linears]\noutliers = 'int8'"))
    assert asked == [judged] * 3, "of the float model and of two strengths"
    asked.clear()
    seen.clear()
    quantization.quantize(linear(), samples)
    assert asked == [judged] * 2, "those of the float model are known from the search for outlier tokens"
    first = judged if count >= 8 else 0
    assert seen[1] == seen[2] == list(range(first, min(count, first + 32)))


@pytest.mark.parametrize(
    ("rounding", "count", "by"),
    [("auto", 63, []), ("auto", 64, [16]), ("nearest", 64, []), ("compensated", 12, [8, 12]), ("compensated", 64, [32, 32])],
)
def test_what_weights_are_rounded_by(rounding: str, count: int, by: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By default in the result alone, and where there are many samples; where it is asked for, in the trials too."""
    asked: list[int] = []
    moments = choice.moments

    def watched(model: ir.Model, linears: Sequence[str], samples: Iterable[Sample]) -> dict[str, Moments]:
        samples = list(samples)
        asked.append(len(samples))
        return moments(model, linears, samples)

    monkeypatch.setattr(choice, "moments", watched)
    samples = [{"x": tinymodels.weights(seed, 1, 4, WIDTH)} for seed in range(count)]
    made = quantization.quantize(linear(), samples, recipe=load(f"[linears]\nrounding = '{rounding}'")).model
    assert asked == by
    nearest = quantization.quantize(linear(), samples, recipe=load("[linears]\nrounding = 'nearest'")).model
    assert (integers(made) != integers(nearest)).any() == bool(by)


def integers(model: ir.Model) -> np.ndarray:
    """The int8 weight of the one linear."""
    (found,) = [array for value in model.graph.initializers.values() if (array := constant(value)).ndim == 2]
    return found


def test_strengths_next_to_the_best_come_first() -> None:
    taken: list[Setting] = []
    measure, _ = scored({("a", 0.75): 4, ("a", 0.5): 3, ("a", 0.85): 5, ("a", 0.95): 2}, taken)
    search((0.75, 0.5, -1.0, 0.25, 0.65, 0.85, 0.95), ("a",), measure)
    assert [one.strength for one in taken] == [0.75, 0.5, 0.65, 0.85, 0.95, 0.25, -1.0]


def test_a_trial_promises_what_the_target_then_runs() -> None:
    """Judged with float weights the wrong one of two strengths won: scales that no kernel overflows cost it 2 dB."""
    entry = next(entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.name == "d_onnx23_3d.onnx")
    samples, expected = runnable(entry.path)
    promised, reached = {}, {}
    for strength in STRENGTHS[:2]:
        recipe = load(f"[linears]\nsmooth_quant_alpha = {strength}")
        result = quantization.quantize(entry.path, samples, recipe=recipe)
        reached[strength] = snr(expected, [runtime.run(result.model, sample, threads=1) for sample in samples])
    note = next(note for note in quantization.quantize(entry.path, samples).notes if note.startswith("Ranges "))
    for strength in STRENGTHS[:2]:
        promised[strength] = float(note.split(f"{strength:g} ")[-1].split(" dB")[0])
        assert promised[strength] == pytest.approx(reached[strength], abs=0.5), note
    assert max(promised, key=promised.__getitem__) == max(reached, key=reached.__getitem__)


def test_channels_that_hardly_work_are_not_amplified() -> None:
    """Three tenths of the channels share the smallest factor: SmoothQuant's formula in numpy, floored."""
    rng = np.random.default_rng(5)
    largest, weight = rng.uniform(0.01, 4, 50).astype(np.float32), rng.uniform(0.5, 1, 50).astype(np.float32)
    found = strengths.factor(largest, [weight], 0.75)
    plain = largest**0.75 / weight**0.25
    assert found is not None
    np.testing.assert_allclose(found, np.maximum(plain, np.quantile(plain, 0.3)), rtol=1e-4)
    assert (found > plain * 1.01).sum() >= 14


def test_a_channel_that_calibration_hardly_saw_does_not_clip_on_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = linear(), data(1.0, every=100)
    for sample in samples:
        sample["x"][..., :4] *= 0.01
    other = data(1.0, every=100, count=2)
    reached = []
    for floor in (strengths.FLOOR, 0.1):
        monkeypatch.setattr(strengths, "FLOOR", floor)
        recipe = load(f"{ONE_SCALE}smooth_quant_alpha = 0.75")
        reached.append(held_out(model, quantization.quantize(model, samples, recipe=recipe).model, other))
    assert reached[0] > reached[1] + 6, reached


def test_each_linear_by_its_own_error() -> None:
    """The estimate against the error measured by brute force, for a model with outlier channels and one without."""
    model = ir.from_proto(linear())
    weight = model.graph.initializers["w"].const_value.numpy()  # type: ignore[union-attr]
    for factor in (1.0, 30.0):
        x = channels(linear(), factor)[0]["x"]
        memory = HostMemory()
        keys = {kind: Reduction(op_type=kind, axes=(0, 1)) for kind in ("ReduceMin", "ReduceMax", "ReduceSumSquare")}
        memory.asked["x", keys["ReduceMax"]] = None
        arrays = (x.min((0, 1), keepdims=True), x.max((0, 1), keepdims=True), np.square(x).sum((0, 1), keepdims=True))
        memory.statistics[b""] = {"x": {SHAPE: np.array(x.shape), **dict(zip(keys.values(), arrays, strict=True))}}
        found = locally.strengths(model, ["linear"], memory)["linear"]
        errors = {strength: brute_force(x.reshape(-1, WIDTH), weight, strength) for strength in locally.STRENGTHS}
        assert errors[found] <= 1.25 * min(errors.values()), (factor, found, errors)
        assert max(errors.values()) > 1.5 * min(errors.values()) or factor == 1.0


def brute_force(x: np.ndarray, weight: np.ndarray, strength: float) -> float:
    """Squared error of the quantized product, SmoothQuant's factor as in its paper: max|x|^a / max|w|^(1 - a)."""
    largest, own = np.abs(x).max(0), np.abs(weight).max(1)
    factor = np.ones(WIDTH) if strength < 0 else np.clip(largest, 1e-5, None) ** strength / own ** (1 - strength)
    inputs, columns = x / factor, weight * factor[:, None]
    step, steps = (inputs.max() - inputs.min()) / 255, np.abs(columns).max(0) / 127
    return float(np.square(np.rint(inputs / step) * step @ (np.rint(columns / steps) * steps) - x @ weight).sum())


def test_weights_of_a_draft_are_what_their_integers_mean() -> None:
    captured: list[ir.Model] = []
    samples = [{"x": tinymodels.weights(seed, 2, 5, WIDTH)} for seed in range(3)]
    result = quantization.quantize(tinymodels.attention(), samples)
    before = tinymodels.run(ir.to_proto(result.model), samples[0])
    captured.append(result.model)
    fold_weights(captured[0], overflow_safe=True)
    assert dequantize_weights(captured[0]) > 0
    after = tinymodels.run(ir.to_proto(captured[0]), samples[0])
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=0.02 * np.abs(one).max())
    left = [node for node in captured[0].graph if node.op_type == "DequantizeLinear" and node.inputs[0].producer() is None]
    assert not left


@pytest.mark.parametrize(("recipe", "asked"), [("int8", False), ("measured", True)])
def test_sums_of_squares_are_asked_for_where_linears_are_told_apart(recipe: str, asked: bool) -> None:
    memory, data = HostMemory(), [{"x": tinymodels.weights(seed, 2, 5, tinymodels.WIDTH)} for seed in range(9)]
    quantization.quantize_loaded(
        ir.from_proto(tinymodels.attention()), data, recipe=load(recipe), target=parse_target(None),
        arguments=HostArguments(), memory=memory,
    )  # fmt: skip
    found = {key.op_type for _, key in memory.asked if isinstance(key, Reduction)}
    assert ("ReduceSumSquare" in found) == asked
    assert "ReduceMax" in found
