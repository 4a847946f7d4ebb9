"""verify(): does the quantized model do what the float one does, and if not, which attention is to blame."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import data as samples_of
from attnquant import deviations
from attnquant import model as models
from attnquant.check import CheckReport, check
from attnquant.executors import Workers
from attnquant.feeds import Feeds
from attnquant.measures import MIN_CLASSES
from attnquant.providers import chosen
from attnquant.recipe import QuantizationRecipe
from attnquant.recognition import recognize
from attnquant.site import Recognition
from attnquant.target import Target, parse_target
from attnquant.verification.attribution import attribute
from attnquant.verification.outputs import OutputRun, run_outputs
from attnquant.verification.pairing import SitePair, Wiring, differences, exchanged, pair_sites
from attnquant.verification.results import output_row, site_verdict
from attnquant.verification.sites import Subject, observe
from attnquant.verification.values import ProviderReport, SiteVerdict, VerificationReport
from attnquant.verification.verdict import Findings
from attnquant.verification.watching import watched

Progress = Callable[[str], None]

ATTRIBUTION_SAMPLES = 8
"""Samples on which the effect of each attention on the outputs is measured: every one takes a run of the whole model."""
_PAUSE = 5.0  # seconds between two lines of progress within a stage


def verify(
    float_model: models.Source,
    quantized_model: models.Source,
    data: Iterable[Any],
    *,
    providers: Sequence[str] = ("cpu",),
    min_snr: float | None = None,
    samples: int = 100,
    recipe: str | PathLike[str] | QuantizationRecipe = "int8",
    target: str | Target | None = None,
    names: Sequence[str] = (),
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> VerificationReport:
    """Compare a quantized ONNX model with its float one in ONNX Runtime, output by output and attention by attention.

    Samples are read one at a time, several times over; nothing of a sample is kept but sums.

    :param data: Samples, {input name: array}; at most `samples` of them.
    :param providers: "cpu", "cuda", any other provider of ONNX Runtime by its short name, or "auto" for what is there.
    :param min_snr: SNR in dB that the worst float output must reach; the report fails below.
    :param recipe: What the placement is held against where the quantized model carries no setup.
    :param target: As in `check`.
    :param names: Names of the samples for the report, in order.
    :param workers: By whom what each attention costs is measured (docs/executors.md); None: by this process.
    :param progress: Called with what is under way.
    :raises ModelError: a model is broken or does not run, or the two are not forms of one model.
    :raises DataError: the data do not fit the float model.
    :raises HostError: ONNX Runtime or a provider that was asked for is missing.
    """
    say = _Progress(progress)
    say.stage("reading the models")
    selected = chosen(providers)
    reference, quantized = models.load(float_model), models.load(quantized_model)
    for model in (reference, quantized):
        models.name_nodes(model)
    feeds = samples_of.checked(
        samples_of.materialize(data, samples=samples, inputs=samples_of.input_names(reference)), reference
    )
    first = samples_of.first_sample(feeds)
    say.stage("auditing the placement")
    audit = check(quantized, recipe=recipe, target=target, feeds=first)
    recognition = recognize(reference, feeds=first)
    pairs = pair_sites(recognition.sites, audit.sites)

    def count(number: int) -> None:
        say.count("outputs", f"{number} samples")

    outputs = run_outputs(reference, quantized, feeds, selected, hold=ATTRIBUTION_SAMPLES, tick=count)
    subject = Subject(
        reference=watched(reference, recognition.sites, first, twins=False),
        quantized=watched(quantized, audit.sites, first, twins=True),
        pairs=pairs,
    )
    findings = _findings(pairs, audit, reference, quantized)
    judge = _Judge(subject=subject, feeds=feeds, sample=first, outputs=outputs, findings=findings, workers=workers, say=say)
    sites = {name: judge.sites(name) for name in selected}
    return VerificationReport(
        placement=audit,
        providers={
            name: ProviderReport(
                outputs=tuple(output_row(sums, names) for sums in outputs.providers[name].values()), sites=sites[name]
            )
            for name in selected
        },
        between={pair: tuple(output_row(one, names) for one in sums.values()) for pair, sums in outputs.between.items()},
        samples=outputs.samples,
        min_snr=min_snr,
        notes=(*_notes(recognition, pairs, outputs), *judge.notes, *_deviations(reference, target)),
        float_model=_name(float_model),
        quantized_model=_name(quantized_model),
    )


def _deviations(reference: ir.Model, target: str | Target | None) -> tuple[str, ...]:
    """Where the runtime is known to compute the float model itself other than specified."""
    return deviations.warnings(reference, target if isinstance(target, Target) else parse_target(target))


def _findings(
    pairs: Sequence[SitePair], audit: CheckReport, reference: ir.Model, quantized: ir.Model
) -> dict[str, Findings]:
    rows = {row.site.id: row for row in audit.rows}
    first, second = Wiring(reference), Wiring(quantized)
    return {
        pair.id: Findings(
            placement=rows[pair.id].reasons if rows[pair.id].status == "violates" else (),
            differences=tuple(differences(pair)),
            exchanged=exchanged(pair, first, second),
        )
        for pair in pairs
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    """What every attention is judged by; `notes` grow with the providers."""

    subject: Subject
    feeds: Feeds
    sample: dict[str, np.ndarray]
    outputs: OutputRun
    findings: dict[str, Findings]
    workers: Workers | None
    say: "_Progress"
    notes: list[str] = field(default_factory=list)

    def sites(self, provider: str) -> tuple[SiteVerdict, ...]:
        """The verdict on each attention on one provider."""

        def tick(what: str, state: str) -> None:
            self.say.count(f"{provider}: {what}", state)

        sums = observe(self.subject, self.feeds, provider, self.sample, tick)
        references = self.outputs.references.get(provider, ())
        found = attribute(self.subject, self.feeds, references, provider, tick, self.workers)
        self.notes.extend(f"{provider}: {note}" for note in found.notes)
        return tuple(
            site_verdict(pair, sums.get(pair.id), self.findings[pair.id], found.gains[pair.id], _unseen(self.subject, pair))
            for pair in self.subject.pairs
        )


def _unseen(subject: Subject, pair: SitePair) -> list[str]:
    """Why something of an attention was not observed."""
    if pair.reference is None:
        return ["the float model has no attention of this name"]
    found = (subject.quantized.refused.get(pair.id), subject.reference.refused.get(pair.reference.id))
    return list(dict.fromkeys(reason for reason in found if reason))


def _notes(recognition: Recognition, pairs: Sequence[SitePair], outputs: OutputRun) -> list[str]:
    notes = []
    paired = {pair.reference.id for pair in pairs if pair.reference is not None}
    notes += [
        f"attention {site.id!r} of the float model has no counterpart in the quantized model"
        for site in recognition.sites
        if site.id not in paired
    ]
    if not recognition.sites:
        notes.append("No attention was found: the outputs alone are compared.")
    logits = {name: None for sums in outputs.providers.values() for name, one in sums.items() if one.logits}
    if logits:
        shown = ", ".join(repr(name) for name in logits)
        notes.append(f"Taken for logits: {shown} (float, two or three axes, the last of {MIN_CLASSES} or more).")
    held = {name: len(kept) for name, kept in outputs.references.items()}
    few = min(held.values(), default=0)
    if pairs and few < outputs.samples:
        notes.append(f"What each attention costs was measured on the first {few} of {outputs.samples} samples.")
    return notes


def _name(source: models.Source) -> str:
    return str(source) if isinstance(source, str | PathLike) else "?"


class _Progress:
    """Stages as they begin, and how far they are now and then."""

    def __init__(self, report: Progress | None) -> None:
        self._report = report or (lambda text: None)
        self._stage, self._next = "", 0.0

    def stage(self, name: str) -> None:
        """A stage begins."""
        if name != self._stage:
            self._stage, self._next = name, time.monotonic() + _PAUSE
            self._report(name)

    def count(self, name: str, state: str) -> None:
        """How far a stage is, told now and then."""
        self.stage(name)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PAUSE
            self._report(f"{name}: {state}")
