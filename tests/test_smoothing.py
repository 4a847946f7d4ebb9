"""SmoothQuant's strength: tried on the calibration data, the better one kept, and no search where a recipe decides."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from attnquant import smoothing
from attnquant.feeds import Feeds, Sample
from attnquant.model import load
from attnquant.quantization import quantize
from attnquant.recipe import load as load_recipe
from tests import tinymodels


def with_alpha(alpha: float | None, *, smooth: bool = True) -> smoothing.QuantizationRecipe:
    recipe = load_recipe("int8")
    return replace(recipe, linears=replace(recipe.linears, smooth_quant=smooth, smooth_quant_alpha=alpha))


def test_a_recipe_that_decides_is_not_searched() -> None:
    for decided in (with_alpha(0.3), with_alpha(None, smooth=False)):
        assert smoothing.candidates(decided) == (decided,)
    assert [choice.linears.smooth_quant_alpha for choice in smoothing.candidates(with_alpha(None))] == [0.75, 0.5]


@pytest.mark.parametrize("factors", [(1.01, 1.2), (1.2, 1.01)])
def test_the_closest_is_kept_and_all_trials_are_told(factors: tuple[float, float]) -> None:
    reference = load(tinymodels.linear())
    feeds = Feeds([{"x": tinymodels.weights(seed, 3, tinymodels.WIDTH)} for seed in range(3)])

    def make(choice: smoothing.QuantizationRecipe, samples: object) -> ir.Model:
        """The float model with all weights scaled: an error of known size."""
        factor = factors[smoothing.CANDIDATES.index(choice.linears.smooth_quant_alpha)]
        model = load(tinymodels.linear())
        for value in model.graph.initializers.values():
            value.const_value = ir.tensor((value.const_value.numpy() * factor).astype(np.float32), name=value.name)
        return model

    choices = smoothing.candidates(with_alpha(None))
    kept, choice, trials = smoothing.best(choices, make, lambda model: model, reference, feeds)
    expected = [-20 * np.log10(factor - 1) for factor in factors]
    assert [trial.snr_db for trial in trials] == pytest.approx(expected, abs=0.1)
    weight = next(iter(kept.graph.initializers.values())).const_value.numpy()
    original = next(iter(reference.graph.initializers.values())).const_value.numpy()
    np.testing.assert_allclose(weight, original * min(factors), rtol=1e-6)
    winner = smoothing.CANDIDATES[int(np.argmin(factors))]
    assert choice.linears.smooth_quant_alpha == winner
    assert smoothing.sentence(trials).startswith(f"SmoothQuant strength {winner:g} ")


def test_trials_are_judged_on_samples_they_have_not_seen() -> None:
    reference = load(tinymodels.linear())
    feeds = Feeds([{"x": np.full((1, tinymodels.WIDTH), number, np.float32)} for number in range(10)])
    asked = []

    def make(choice: smoothing.QuantizationRecipe, samples: Iterable[Sample]) -> ir.Model:
        asked.append([int(sample["x"][0, 0]) for sample in samples])
        return reference

    _, _, trials = smoothing.best(smoothing.candidates(with_alpha(None)), make, lambda model: model, reference, feeds)
    assert asked == [list(range(4, 10)), list(range(4, 10)), list(range(10))]
    assert [trial.snr_db for trial in trials] == [np.inf, np.inf]


def test_the_report_says_what_was_tried() -> None:
    data = [{"x": tinymodels.weights(seed, 2, 5, tinymodels.WIDTH)} for seed in range(2)]
    searched = quantize(tinymodels.attention(), data)
    assert any("SmoothQuant strength" in note for note in searched.notes)
    fixed = quantize(tinymodels.attention(), data, recipe=with_alpha(0.5))
    assert not any("SmoothQuant strength" in note for note in fixed.notes)
