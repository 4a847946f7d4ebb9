"""What stays float by measurement: parts that a bound on the accuracy needs, then parts that int8 makes slower."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import onnx_ir as ir

from attnquant import bounds, timing, tuning
from attnquant.building import Builder, Built
from attnquant.executors import Workers
from attnquant.feeds import Feeds, Sample
from attnquant.pace import GateReport, GateRow, Pace
from attnquant.recipe import QuantizationRecipe
from attnquant.timing import ratio
from attnquant.tuning import Judge, Part, gate

Stage = Callable[[str], None]

JUDGED = 8
"""Calibration samples that a bound is measured on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A model and what stayed float in it."""

    built: Built
    sites: Mapping[str, str] = field(default_factory=dict)
    """{id of a site that stays float: reason}"""
    linears: Mapping[str, str] = field(default_factory=dict)
    """{name of a node that stays float: reason}"""


def _by_kind(reasons: Sequence[tuple[Part, str]]) -> dict[str, dict[str, str]]:
    """The fields `sites` and `linears` of `Kept`."""
    return {
        "sites": {part.name: reason for part, reason in reasons if part.is_site},
        "linears": {part.name: reason for part, reason in reasons if not part.is_site},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedBuild(Kept):
    """A model that meets the recipe's bound."""

    sentence: str
    parts: tuple[Part, ...] = ()
    """What stays float."""
    judge: Judge | None = None
    """By which the bound is held."""


def bounded_build(
    builder: Builder, first: Built, recipe: QuantizationRecipe, source: ir.Model, feeds: Feeds, stage: Stage,
    workers: Workers | None = None,
) -> BoundedBuild:  # fmt: skip
    """Keep parts float until `recipe.options.max_drop` holds against `source` on the first calibration samples.

    :param first: The model with everything quantized, built with `keep_host`.
    :param workers: By whom the effect of each part is measured; None: by this process.
    :raises RecipeError: the metric can't be told of this model.
    :raises VerificationError: the bound isn't met.
    """
    bound = bounds.parse(recipe.options.max_drop or "")
    gated = recipe.options.gate
    unfused = builder.target.elsewhere
    judge = tuning.Judge(bound, source, islice(feeds, JUDGED), unfused=unfused)
    parts = tuning.parts_of(first.host_model, builder.points)

    def build(kept: Sequence[Part]) -> Built:
        own = builder.without(kept)
        return own.finished(own.calibrated(recipe, feeds), keep_host=gated)

    found = tuning.repair(first, parts, judge, build, stage, workers)
    cost = 1.0
    if found.kept:
        stage("timing what was kept float")
        cost = ratio(first.model, found.built.model, next(iter(feeds)), unfused=unfused)
    reasons = [(kept.part, f"float for max_drop {bound} ({kept.gain:+.2g} alone)") for kept in found.kept]
    return BoundedBuild(
        built=found.built,
        sentence=tuning.sentence(found, judge) + (f" That takes {cost:.2f} times as long." if found.kept else ""),
        parts=tuple(kept.part for kept in found.kept),
        judge=judge,
        **_by_kind(reasons),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedBuild(Kept):
    """A model without the quantizers that lose on this machine, and the table behind it."""

    report: GateReport


def race(first: ir.Model, second: ir.Model, sample: Sample, seconds: float) -> Pace:
    """Times of a float model and an int8 one on this machine."""
    return timing.raced(first, second, sample, seconds=seconds)


def gated_build(
    builder: Builder, first: Built, recipe: QuantizationRecipe, source: ir.Model, feeds: Feeds,
    stage: Stage, judge: Judge | None = None,
) -> GatedBuild:  # fmt: skip
    """Time float and int8 of every group of parts here, and leave float what loses (`attnquant.pace.RULE`).

    What is built without those must not be slower as a whole than `first`, nor miss the bound of `judge`; else it is undone.

    :param first: Built with `keep_host`.
    """
    start = time.monotonic()
    found = tuning.parts_of(first.host_model, builder.points)
    parts = [part for part in found if part.name not in builder.per_token]  # theirs is more than a pair of quantizers
    sample = next(iter(feeds))
    stage("timing the whole model")
    whole = {"all int8": race(source, first.model, sample, gate.WHOLE_SECONDS)}
    whole_ms = whole["all int8"].float_ms
    rows = gate.rows(first.host_model, parts, sample, builder.small, race, whole_ms=whole_ms, stage=stage)
    named = {part.name: part for part in parts}
    losing = {name: row.reason for row in rows if row.kept_float for name in row.parts}
    built, undone = first, ""
    if losing:
        stage(f"keeping {len(losing)} of {len(parts)} parts float, which lose here")
        own = builder.without([named[name] for name in losing])
        built = own.finished(own.calibrated(recipe, feeds))
        undone = _undone(race(first.model, built.model, sample, gate.WHOLE_SECONDS), built, judge)
        if undone:
            built, losing = first, {}
        else:
            whole["gated"] = race(source, built.model, sample, gate.WHOLE_SECONDS)
    return GatedBuild(
        built=built,
        report=_gate_report(rows, whole, undone, time.monotonic() - start),
        **_by_kind([(named[name], reason) for name, reason in losing.items()]),
    )


def _undone(against: Pace, built: Built, judge: Judge | None) -> str:
    """Why a gated model is not handed over; "" where it is."""
    if against.verdict == "float":
        return f"Undone: as a whole it takes {against.ratio:.2f} times as long as with every part in int8."
    if judge is not None and not judge.bound.holds(value := judge.of_model(built.model)):
        return f"Undone: it gives {value:.4g}, which misses {judge.bound}."
    return ""


def _gate_report(rows: Sequence[GateRow], whole: Mapping[str, Pace], undone: str, seconds: float) -> GateReport:
    return GateReport(
        rows=tuple(rows), runtime=gate.runtime_name(), cpu=gate.machine(), threads=gate.threads(), seconds=seconds,
        whole=whole, undone=undone,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(Kept):
    """The model after both choices."""

    notes: tuple[str, ...] = ()
    pace: GateReport | None = None


def settled(
    builder: Builder, first: Built, recipe: QuantizationRecipe, source: ir.Model, feeds: Feeds, stage: Stage,
    workers: Workers | None = None,
) -> Settled:  # fmt: skip
    """What the recipe's `max_drop` keeps float, then what its `gate` does. Parameters and errors as `bounded_build`."""
    found, judge = Settled(built=first), None
    if recipe.options.max_drop is not None:
        bounded = bounded_build(builder, first, recipe, source, feeds, stage, workers)
        found = Settled(
            built=bounded.built, sites=bounded.sites, linears=bounded.linears, notes=(bounded.sentence,)
        )
        builder, judge = builder.without(bounded.parts), bounded.judge
    if not recipe.options.gate:
        return found
    gated = gated_build(builder, found.built, recipe, source, feeds, stage, judge)
    return Settled(
        built=gated.built, sites={**found.sites, **gated.sites}, linears={**found.linears, **gated.linears},
        notes=(*found.notes, gated.report.sentence()), pace=gated.report,
    )  # fmt: skip
