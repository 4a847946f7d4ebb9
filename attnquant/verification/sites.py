"""Every attention of both models, observed sample by sample."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from attnquant import runtime
from attnquant.feeds import Sample
from attnquant.kvcache import forms
from attnquant.providers import session
from attnquant.roles import PortRole
from attnquant.verification.pairing import SitePair
from attnquant.verification.stats import GaugeSums, SiteSums
from attnquant.verification.watching import ROLES, Watch, Watched, with_outputs

BUDGET = 2**28
"""Bytes of observed tensors at a time: attentions are observed in groups that stay below, each in a run of its own."""
_WIDTH = 4  # bytes of an element, for the estimate
_OTHER = {PortRole.QUERY: PortRole.KEY, PortRole.KEY: PortRole.QUERY}

Tick = Callable[[str, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Both models, made ready to be looked into, and the attentions to compare."""

    reference: Watched
    quantized: Watched
    pairs: tuple[SitePair, ...]

    def watches(self, pair: SitePair) -> tuple[Watch | None, Watch | None]:
        """What is observed in the float and in the quantized model."""
        first = None if pair.reference is None else self.reference.watches.get(pair.reference.id)
        return first, self.quantized.watches.get(pair.id)


def observe(subject: Subject, data: Iterable[Sample], provider: str, sample: Sample, tick: Tick) -> dict[str, SiteSums]:
    """Sums of every attention that can be observed, by its id in the quantized model.

    :param sample: One sample, by which memory is estimated.
    :param tick: Called with what is under way and how far it is.
    :raises ModelError: a model with the observed tensors as outputs does not load or run.
    """
    found: dict[str, SiteSums] = {}
    seen = [pair for pair in subject.pairs if subject.watches(pair)[1] is not None]
    done = 0
    for group in _groups(subject, seen, provider, sample):
        what = f"attentions {done + 1} to {done + len(group)} of {len(seen)}"
        done += len(group)
        found.update(_observe_group(subject, group, data, provider, partial(tick, what)))
    return found


def _groups(subject: Subject, pairs: Sequence[SitePair], provider: str, sample: Sample) -> Iterator[list[SitePair]]:
    """As many attentions at a time as the budget allows, by the sizes of their tensors in one sample."""
    if not pairs:
        return
    names = {name for pair in pairs for watch in (subject.watches(pair)[1],) if watch for name in watch.tensors}
    model, outputs = with_outputs(subject.quantized.model, sorted(names), "Size")
    store, _ = forms(model)
    with session(model, provider) as made:
        sizes = _fetch(made, store(sample), outputs)
    group: list[SitePair] = []
    held = 0
    for pair in pairs:
        watch = subject.watches(pair)[1]
        size = 2 * _WIDTH * sum(int(sizes[name]) for name in (watch.tensors if watch else ()))
        if group and held + size > BUDGET:
            yield group
            group, held = [], 0
        group.append(pair)
        held += size
    yield group


def _fetch(made: Any, sample: Sample, outputs: Mapping[str, str]) -> dict[str, np.ndarray]:
    """{observed tensor: array} of one run."""
    result = runtime.run_session(made, sample, outputs.values())
    return {name: result[output] for name, output in outputs.items()}


def _observe_group(
    subject: Subject, group: Sequence[SitePair], data: Iterable[Sample], provider: str, tick: Callable[[str], None]
) -> dict[str, SiteSums]:
    watches = {pair.id: subject.watches(pair) for pair in group}
    wanted = [name for first, _ in watches.values() if first is not None for name in first.roles.values()]
    first_model, first_outputs = with_outputs(subject.reference.model, wanted)
    wanted = [name for _, second in watches.values() if second is not None for name in second.tensors]
    second_model, second_outputs = with_outputs(subject.quantized.model, wanted)
    found = {key: SiteSums() for key in watches}
    for key, (_, second) in watches.items():
        found[key].gauges = [GaugeSums.of(gauge) for gauge in (second.gauges if second else ())]
    store, _ = forms(second_model)
    with session(first_model, provider) as reference, session(second_model, provider) as quantized:
        for number, sample in enumerate(data, 1):
            expected = _fetch(reference, sample, first_outputs) if first_outputs else {}
            got = _fetch(quantized, store(sample), second_outputs)
            for key, (first, second) in watches.items():
                if second is not None:
                    _add(found[key], first, second, expected, got)
            tick(f"{number} samples")
    return found


def _add(
    sums: SiteSums, first: Watch | None, second: Watch, expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]
) -> None:
    for role in ROLES if first is not None else ():
        if first is None or role not in first.roles or role not in second.roles:
            continue
        sums.add_role(role, expected[first.roles[role]], got[second.roles[role]])
        other = _OTHER.get(role)
        if other is not None and other in first.roles:
            sums.add_crossed(role, expected[first.roles[other]], got[second.roles[role]])
    if first is not None and PortRole.PROBABILITIES in first.roles:
        sums.add_rows("float", expected[first.roles[PortRole.PROBABILITIES]])
    if PortRole.PROBABILITIES in second.roles:
        sums.add_rows("quantized", got[second.roles[PortRole.PROBABILITIES]])
    if second.twin:
        twin = got[second.twin]
        sums.own.add(twin, got[second.roles[PortRole.CONTEXT]])
        sums.least.add(twin, got[second.rounded])
    for gauge in sums.gauges:
        gauge.add(got[gauge.gauge.tensor])
