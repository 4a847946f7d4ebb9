"""The search on one model: settings are quantized by the host, judged on calibration samples, and told from each other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import get_args

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.building import Builder
from attnquant.choosing import locally
from attnquant.choosing.search import OFF, Outcome, Setting, search
from attnquant.choosing.words import sentence
from attnquant.emission.compensated import Moments
from attnquant.feeds import Feeds, Sample
from attnquant.measures import CEILING, Likeness, is_float, worst_snr
from attnquant.moments import moments
from attnquant.recipe import Estimator, QuantizationRecipe

STRENGTHS = (0.75, 0.5, OFF, 0.25, 0.65, 0.85, 0.95)
"""In the order in which they are tried: one that text and image encoders bear alike (docs/accuracy.md), and the one that the
method's paper proposes (Xiao et al. 2023, section 4); then the others."""
ESTIMATORS = ("minmax", "mean_minmax", "quantile", "histogram")
"""In the order in which they are tried. The last two need whole activations: they take several times as long."""
assert {*ESTIMATORS, "auto"} == {*get_args(Estimator)}

_JUDGED, _JUDGED_AT_MOST, _SHARE = 4, 8, 8
"""Samples that the trials are judged on: an eighth, four at least. What one of two strengths gains differs by 4 dB from one
photograph to the next, where it gains 1 dB in the mean: of few the worse may win (docs/accuracy.md)."""
_SEEN = 32
"""Samples that the trials are calibrated with, at most."""
_MANY = 64
"""Samples from which on weights make up for each other's rounding by default: one of few fits these, and takes its time."""
_ROUNDED_BY = 16
"""Samples that they are then rounded by."""
_FEW = 4
"""Samples that they are calibrated with besides: ranges of few show what clips on data unlike them (photographs of which
calibration has other crops do not), ranges of all what one sample does to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The recipe to quantize with, the strengths of linears that differ from it, and how that was found."""

    recipe: QuantizationRecipe
    strengths: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome | None = None
    moments: Mapping[str, Moments] = field(default_factory=dict)
    """What the weights of linears are rounded by."""

    @property
    def notes(self) -> tuple[str, ...]:
        """For the report."""
        return () if self.outcome is None else (sentence(self.outcome),)


def choose(builder: Builder, recipe: QuantizationRecipe, feeds: Feeds, linears: Sequence[str]) -> Choice:
    """What the recipe leaves open: ranges and strengths by measurement, and what weights are rounded by.

    :param linears: Names of the linears that are quantized.
    :raises HostError: NNCF fails.
    :raises ModelError: the model does not run on a sample.
    """
    if recipe.linears.rounding == "compensated":
        return _compensated(builder, recipe, feeds, linears)
    choice = _searched(builder, recipe, feeds, linears)
    if recipe.linears.rounding == "nearest" or sum(1 for _ in islice(feeds.raw(), _MANY)) < _MANY:
        return choice
    runtime.release_memory()
    return replace(choice, moments=moments(builder.prepared, linears, islice(feeds, _ROUNDED_BY)))


def _compensated(builder: Builder, recipe: QuantizationRecipe, feeds: Feeds, linears: Sequence[str]) -> Choice:
    """By all samples in the result, and in the trials by those that they are calibrated with."""

    def of(samples: Iterable[Sample]) -> dict[str, Moments]:
        return moments(builder.prepared, linears, islice(samples, _SEEN))

    choice = _searched(builder, recipe, feeds, linears, of)
    runtime.release_memory()
    return replace(choice, moments=of(feeds))


def _searched(
    builder: Builder, recipe: QuantizationRecipe, feeds: Feeds, smoothable: Sequence[str],
    moments_of: Callable[[Iterable[Sample]], dict[str, Moments]] | None = None,
) -> Choice:  # fmt: skip
    """What comes closest to the float model on calibration samples, of all that the recipe leaves open.

    With eight samples or more the trials are calibrated without the first of them and judged on these, because what clips
    unseen values looks best on the values it was calibrated with. Where estimators are compared, that is done twice, with
    few samples and with all, and the mean counts.

    :param smoothable: Names of the linears that SmoothQuant may scale.
    :raises HostError: NNCF fails.
    """
    measured = recipe.ranges.estimator == "auto"
    estimators = ESTIMATORS if measured else (recipe.ranges.estimator,)
    is_open = bool(smoothable) and recipe.linears.smooth_quant and recipe.linears.smooth_quant_alpha is None
    strengths: Sequence[float] = (STRENGTHS if measured else STRENGTHS[:2]) if is_open else ()
    count = sum(1 for _ in islice(feeds.raw(), _SHARE * _JUDGED_AT_MOST))
    judged = list(islice(feeds, max(_JUDGED, count // _SHARE)))
    held_out = count >= 2 * _JUDGED
    seen = Feeds.lazy(lambda: islice(iter(feeds), len(judged), len(judged) + _SEEN)) if held_out else feeds
    options = _Options(recipe, smoothable)
    base = options.of(Setting(estimator=estimators[0], strength=strengths[0] if strengths else None))
    if recipe.linears.smooth_quant and smoothable:
        # What it asks of one sample is then asked of the others in one pass.
        builder.calibrated(base.recipe, list(islice(seen, 1)), draft=True)
    if recipe.options.search_seconds == 0 or max(len(strengths), 1) * len(estimators) == 1:
        return base
    by_linear = measured and is_open
    if by_linear:
        builder.memory.asked.update(dict.fromkeys(locally.powers(builder.memory.asked)))
    if moments_of is not None:
        builder = replace(builder, moments=moments_of(seen))
    trial = _Trials(builder, judged)
    subsets: list[Iterable[Sample]] = [seen]
    if measured and held_out:
        few = list(islice(seen, _FEW + 1))
        subsets = [few[:_FEW], seen] if len(few) > _FEW else subsets
    estimate = (lambda: locally.strengths(builder.prepared, smoothable, builder.memory)) if by_linear else None
    outcome = search(
        strengths or (None,), estimators, lambda setting: trial.measured(options.of(setting), subsets), by_linear=estimate,
        seconds=recipe.options.search_seconds,
    )  # fmt: skip
    return replace(options.of(outcome.won.setting), outcome=outcome)


class _Options:
    """Settings as what a builder takes."""

    def __init__(self, recipe: QuantizationRecipe, smoothable: Sequence[str]) -> None:
        self._recipe, self._smoothable = recipe, smoothable

    def of(self, setting: Setting) -> Choice:
        estimator: Estimator = setting.estimator  # type: ignore[assignment]
        linears, strengths = self._recipe.linears, setting.strengths
        if setting.strength is not None:
            linears = replace(linears, smooth_quant_alpha=max(setting.strength, 0.0))
            strengths = {} if setting.strength >= 0 else dict.fromkeys(self._smoothable, OFF)
        elif strengths:
            linears = replace(linears, smooth_quant_alpha=STRENGTHS[0])
        ranges = replace(self._recipe.ranges, estimator=estimator)
        return Choice(recipe=replace(self._recipe, linears=linears, ranges=ranges), strengths=strengths)


class _Trials:
    """Quantized models for the samples that they are judged on."""

    def __init__(self, builder: Builder, judged: Sequence[Sample]) -> None:
        self._builder, self._judged = builder, judged
        known = [dict(one) for one in builder.outputs[: len(judged)]]
        self._expected = known if len(known) == len(judged) else list(_outputs(builder.prepared, judged))

    def measured(self, choice: Choice, subsets: Sequence[Iterable[Sample]]) -> float:
        """Signal to noise in dB, the mean of what calibration with each of the subsets gives."""
        return float(np.mean([self._one(choice, seen) for seen in subsets]))

    def _one(self, choice: Choice, seen: Iterable[Sample]) -> float:
        """Biases are not corrected, and weights are rounded as the target has them."""
        runtime.release_memory()
        made = replace(self._builder, strengths=choice.strengths).drafted(choice.recipe, seen)
        runtime.release_memory()
        found = snr(self._expected, _outputs(made, self._judged))
        for value in made.graph.initializers.values():
            value.const_value = None  # the graph is a cycle, which may wait long for its collection
        return found


def _outputs(model: ir.Model, samples: Sequence[Sample]) -> Iterator[dict[str, np.ndarray]]:
    # Without optimizations: the host's signed quantizers are not yet in the form that the runtime's own passes take.
    with runtime.session(model, optimize=False, spare=True) as made:
        for sample in samples:
            yield runtime.run_session(made, sample)


def snr(expected: Iterable[dict[str, np.ndarray]], got: Iterable[dict[str, np.ndarray]]) -> float:
    """Signal to noise of the worst float output, in dB, as `measures` has it; the ceiling where nothing differs.

    One sample at a time: logits of texts are large.
    """
    likeness: dict[str, Likeness] = {}
    for one, other in zip(expected, got, strict=True):
        for name in filter(lambda name: is_float(one[name]), one):
            likeness.setdefault(name, Likeness()).add(one[name], other[name])
    worst = worst_snr(likeness.values())
    return CEILING if worst is None else worst
