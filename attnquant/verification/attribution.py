"""What the outputs gain when one attention alone is float: a run for each, here in one session or as tasks of workers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from attnquant import runtime
from attnquant.executors import Workers, run_tasks
from attnquant.feeds import Sample
from attnquant.kvcache import Change, forms
from attnquant.measures import Likeness
from attnquant.providers import session
from attnquant.saving import to_proto
from attnquant.verification.pairing import SitePair
from attnquant.verification.sites import Subject, Tick
from attnquant.verification.watching import switchable

CHUNK = 4
"""Attentions of one task: a lost worker costs so many."""

_WHAT = "what each attention costs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """By site what the SNR of the worst output gains, in dB, when it alone is float; None: not known. And why not."""

    gains: Mapping[str, float | None]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A task."""

    model: bytes
    """The quantized model with switches, a ModelProto."""
    switches: Mapping[str, str]
    """{site: name of its switch} of all sites."""
    sites: tuple[str, ...]
    """Those to measure."""
    samples: tuple[Sample, ...]
    references: tuple[Mapping[str, np.ndarray], ...]
    """Outputs of the float model for the samples."""
    provider: str


def attribute(
    subject: Subject,
    data: Iterable[Sample],
    references: Sequence[Mapping[str, np.ndarray]],
    provider: str,
    tick: Tick,
    workers: Workers | None = None,
) -> Attribution:
    """Measure what each attention costs.

    :param references: Outputs of the float model for the first samples; so many are run.
    :param workers: By whom; None: by this process, in one session.
    :raises ModelError: for workers, a model that does not fit into one message (2 GB).
    """
    gains: dict[str, float | None] = dict.fromkeys(pair.id for pair in subject.pairs)
    for pair in subject.pairs:
        watch = subject.quantized.watches.get(pair.id)
        if watch is not None and watch.twin and not watch.bypassed:
            gains[pair.id] = 0.0
    known = tuple(pair.id for pair in subject.pairs if _is_bypassed(subject, pair))
    if not known or not references:
        return Attribution(gains=gains)
    model, switches = switchable(subject.quantized, known)
    samples = tuple(sample for sample, _ in zip(data, references, strict=False))
    measure = partial(_snr, forms(model), tuple(zip(samples, references, strict=False)), switches)
    with session(model, provider) as made:
        base = measure(made, "")
        worst = min(base, key=lambda name: base[name], default=None)
        if worst is None:
            return Attribution(gains=gains)
        if workers is None:
            for number, site in enumerate(known, 1):
                tick(_WHAT, f"{number} of {len(known)}")
                gains[site] = measure(made, site)[worst] - base[worst]
            return Attribution(gains=gains)
    task = Chunk(
        model=to_proto(model).SerializeToString(), switches=switches, sites=known, samples=samples,
        references=tuple(references), provider=provider,
    )  # fmt: skip
    found, notes = _spread(task, workers, lambda number: tick(_WHAT, f"{number} of {len(known)}"))
    gains.update((site, snr[worst] - base[worst]) for site, snr in found.items())
    return Attribution(gains=gains, notes=notes)


def _is_bypassed(subject: Subject, pair: SitePair) -> bool:
    watch = subject.quantized.watches.get(pair.id)
    return watch is not None and bool(watch.twin) and watch.bypassed > 0


def _spread(
    whole: Chunk, workers: Workers, told: Callable[[int], None]
) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """{site: SNR by output with it alone float}, without those whose worker was lost, and a sentence on each of these."""
    chunks = [whole.sites[start : start + CHUNK] for start in range(0, len(whole.sites), CHUNK)]
    done = run_tasks(
        measured,
        [replace(whole, sites=sites) for sites in chunks],
        executor=workers.executor, workers=workers.number,
        progress=lambda number: told(min(number * CHUNK, len(whole.sites))),
    )  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    notes = []
    for sites, one in zip(chunks, done, strict=True):
        if one.value is None:
            notes.append(f"what {', '.join(map(repr, sites))} cost is not known: {one.lost}")
        else:
            found.update(zip(sites, one.value, strict=True))
    return found, tuple(notes)


def measured(chunk: Chunk) -> list[dict[str, float]]:
    """By site of a chunk, the SNR of each output with this attention alone float."""
    model = ir.from_proto(onnx.ModelProto.FromString(chunk.model))
    pairs = tuple(zip(chunk.samples, chunk.references, strict=True))
    measure = partial(_snr, forms(model), pairs, chunk.switches)
    with session(model, chunk.provider) as made:
        return [measure(made, site) for site in chunk.sites]


def _snr(
    changes: tuple[Change, Change],
    pairs: Sequence[tuple[Sample, Mapping[str, np.ndarray]]],
    switches: Mapping[str, str],
    made: Any,
    site: str,
) -> dict[str, float]:
    """By output, the SNR over the samples with one attention in float, "": with none."""
    sums = {name: Likeness() for name in pairs[0][1]}
    store, restore = changes
    feeds = {name: np.array(key == site) for key, name in switches.items()}
    for sample, expected in pairs:
        got = restore(runtime.run_session(made, {**store(sample), **feeds}, sums))
        for name, likeness in sums.items():
            if got[name].shape == expected[name].shape:
                likeness.add(expected[name], got[name])
    return {name: likeness.snr_db for name, likeness in sums.items() if likeness.snr_db is not None}
