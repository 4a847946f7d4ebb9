"""SmoothQuant's strength by measurement: models differ in the one that suits them (docs/accuracy.md)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.feeds import Feeds, Sample
from attnquant.recipe import QuantizationRecipe

CANDIDATES = (0.75, 0.5)
"""Strengths that are tried: one that text and image encoders bear alike (docs/accuracy.md), and the one that the method's
paper proposes (Xiao et al. 2023, section 4)."""

_JUDGED = 4
"""Samples that the trials are judged on."""

_SEEN = 32
"""Samples that the trials are calibrated with, at most."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One strength and what it gave: signal to noise in dB, of the worst float output over the samples tried."""

    alpha: float
    snr_db: float


def candidates(recipe: QuantizationRecipe) -> Sequence[QuantizationRecipe]:
    """Recipes to choose from: the recipe itself where it names a strength or wants none."""
    linears = recipe.linears
    if not linears.smooth_quant or linears.smooth_quant_alpha is not None:
        return (recipe,)
    return [replace(recipe, linears=replace(linears, smooth_quant_alpha=alpha)) for alpha in CANDIDATES]


def best(
    choices: Sequence[QuantizationRecipe],
    make: Callable[[QuantizationRecipe, Iterable[Sample]], Made],
    model_of: Callable[[Made], ir.Model],
    reference: ir.Model,
    feeds: Feeds,
) -> tuple[Made, QuantizationRecipe, tuple[Trial, ...]]:
    """Make the model with the choice that comes closest to the float model on calibration samples.

    With eight samples or more the trials are calibrated without the first four and judged on these, because what clips
    unseen values looks best on the values it was calibrated with; the winner is then made from all samples.

    :param make: Quantizes with a recipe and samples.
    :param reference: The float model that `make` starts from.
    :returns: the best, its choice, and the trials in order; no trial where there is one choice only.
    """
    if len(choices) == 1:
        return make(choices[0], feeds), choices[0], ()
    judged = list(islice(feeds, _JUDGED))
    held_out = sum(1 for _ in islice(feeds, 2 * _JUDGED)) == 2 * _JUDGED
    seen = Feeds.lazy(lambda: islice(iter(feeds), _JUDGED, _JUDGED + _SEEN)) if held_out else feeds
    expected = _outputs(reference, judged)
    trials: list[Trial] = []
    kept: tuple[QuantizationRecipe, Made] | None = None
    for choice in choices:
        runtime.release_memory()
        made = make(choice, seen)
        runtime.release_memory()
        alpha = choice.linears.smooth_quant_alpha
        trial = Trial(alpha=-1.0 if alpha is None else alpha, snr_db=_snr(expected, _outputs(model_of(made), judged)))
        if kept is None or trial.snr_db > max(other.snr_db for other in trials):
            kept = choice, made
        trials.append(trial)
    assert kept is not None
    return make(kept[0], feeds) if held_out else kept[1], kept[0], tuple(trials)


def sentence(trials: Sequence[Trial]) -> str:
    """What was tried and won, for the report."""
    won = max(trials, key=lambda trial: trial.snr_db)
    tried = ", ".join(f"{trial.alpha:g}: {trial.snr_db:.1f} dB" for trial in trials)
    return f"SmoothQuant strength {won.alpha:g} by its error on the calibration data ({tried})."


def _outputs(model: ir.Model, samples: Sequence[Sample]) -> list[dict[str, np.ndarray]]:
    # Without optimizations: the host's signed quantizers are not yet in the form that the runtime's own passes take.
    with runtime.session(model, optimize=False, spare=True) as made:
        return [runtime.run_session(made, sample) for sample in samples]


def _snr(expected: list[dict[str, np.ndarray]], got: list[dict[str, np.ndarray]]) -> float:
    """10 log10(sum x^2 / sum (x - y)^2) of the worst float output; infinite where nothing differs."""
    worst = np.inf
    for name in expected[0]:
        if expected[0][name].dtype.kind != "f":
            continue
        signal = sum(float(np.square(one[name], dtype=np.float64).sum()) for one in expected)
        pairs = zip(expected, got, strict=True)
        noise = sum(float(np.square(one[name].astype(np.float64) - other[name]).sum()) for one, other in pairs)
        if noise > 0:
            worst = min(worst, 10 * np.log10(max(signal, np.finfo(np.float64).tiny) / noise))
        elif np.isnan(noise):
            return -np.inf
    return float(worst)
