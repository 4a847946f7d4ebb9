"""The fewest parts float that make a bound hold: ranked by what each gains alone, tried together, then built for real."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Generic, Protocol, TypeVar

import onnx_ir as ir

from attnquant.bounds import Bound
from attnquant.errors import VerificationError
from attnquant.executors import Workers
from attnquant.tuning.judge import Judge
from attnquant.tuning.parts import Part, Switches, switched
from attnquant.tuning.spread import spread_scores

SECONDS = 600.0
"""After so long no further part is ranked and no further model is built."""
ATTEMPTS = 5
"""Models that are built at most."""
_MORE = 0.25
"""By how much the kept parts grow where the built model misses the bound."""


class Built(Protocol):
    """A quantized model in both forms."""

    @property
    def host_model(self) -> ir.Model:
        """With float weights in front of their quantizers."""

    @property
    def model(self) -> ir.Model:
        """As it is handed over."""


Made = TypeVar("Made", bound=Built)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A part that stays float, and what the metric gains when it alone does."""

    part: Part
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair(Generic[Made]):
    """The model that meets the bound, and what it took."""

    built: Made
    kept: tuple[Kept, ...]
    before: float
    after: float


def repair(
    first: Made,
    parts: Sequence[Part],
    judge: Judge,
    build: Callable[[Sequence[Part]], Made],
    stage: Progress,
    workers: Workers | None = None,
) -> Repair[Made]:
    """Keep the fewest parts float that meet the judge's bound.

    Each part's gain is measured with it alone float, all in one session; then the shortest head of that ranking that meets
    the bound is found by bisection in the same session, built, and measured as it is handed over. Where that misses, a
    quarter more parts are kept, at most `ATTEMPTS` models and about `SECONDS` in all.

    :param workers: By whom gains are measured; None: by this process, in one session.
    :raises VerificationError: the bound isn't met; nothing is handed over.
    """
    bound = judge.bound
    before = judge.of_model(first.model)
    if bound.holds(before):
        return Repair(built=first, kept=(), before=before, after=before)
    if not parts:
        raise _missed(bound, before, 0, parts, before)
    end = time.monotonic() + SECONDS
    with switched(first.host_model, parts) as switches:
        search = _Search(judge, switches, stage, end)
        scores = None if workers is None else spread_scores(first.host_model, parts, judge, workers, stage)
        ranking = search.ranking(parts) if scores is None else ranked(parts, scores, search.score(()))
        # What the target's form costs beside the host's (weights of 7 bits without VNNI) is asked for in addition.
        margin = search.score(()) - bound.score(before)
        number = search.shortest(ranking, bound.score(bound.value) + max(margin, 0.0))
    best = before
    for _ in range(ATTEMPTS):
        kept = tuple(ranking[:number])
        stage(f"keeping {number} of {len(parts)} parts float for {bound}")
        built = build([item.part for item in kept])
        after = judge.of_model(built.model)
        if bound.holds(after):
            return Repair(built=built, kept=kept, before=before, after=after)
        best = max(best, after, key=bound.score)
        if number == len(ranking) or time.monotonic() > end:
            break
        number = min(len(ranking), number + max(1, ceil(number * _MORE)))
    raise _missed(bound, best, number, parts, before)


def _missed(bound: Bound, best: float, number: int, parts: Sequence[Part], before: float) -> VerificationError:
    return VerificationError(
        f"max_drop {bound}: reached {best:.4g} at best, with {number} of {len(parts)} quantized parts kept float "
        f"({before:.4g} with none). Ask for less, or give more calibration data. Nothing was handed over."
    )


def ranked(parts: Sequence[Part], scores: Mapping[str, float], base: float) -> list[Kept]:
    """By gain over `base`, the largest first; parts without a score come last, in their order."""
    return _sorted(parts, {name: score - base for name, score in scores.items()})


def _sorted(parts: Sequence[Part], gains: Mapping[str, float]) -> list[Kept]:
    lowest = float("-inf")
    return sorted(
        (Kept(part=part, gain=gains.get(part.name, lowest)) for part in parts), key=lambda kept: kept.gain, reverse=True
    )


class _Search:
    """Sets of parts and their scores (more is better), in one session."""

    def __init__(self, judge: Judge, switches: Switches, stage: Progress, end: float) -> None:
        self._judge, self._switches, self._stage, self._end = judge, switches, stage, end

    def score(self, parts: Sequence[Part]) -> float:
        names = [part.name for part in parts]
        return self._judge.bound.score(self._judge.of(lambda sample: self._switches.run(sample, names)))

    def ranking(self, parts: Sequence[Part]) -> list[Kept]:
        """By gain, the largest first; parts that time did not reach come last, in graph order."""
        base = self.score(())
        gains: dict[str, float] = {}
        for number, part in enumerate(parts, 1):
            if time.monotonic() > self._end and gains:
                break
            if number % 10 == 1:
                self._stage(f"what each part costs: {number} of {len(parts)}")
            gains[part.name] = self.score([part]) - base
        return _sorted(parts, gains)

    def shortest(self, ranking: Sequence[Kept], needed: float) -> int:
        """Length of the shortest head of the ranking that scores as much, 1 at least; all of it where none does."""
        low, high = 1, len(ranking)
        while low < high:
            middle = (low + high) // 2
            if self.score([kept.part for kept in ranking[:middle]]) >= needed:
                high = middle
            else:
                low = middle + 1
        return low


def sentence(found: Repair[Made], judge: Judge) -> str:
    """What was kept float and what it gave, for the report."""
    bound = judge.bound
    if not found.kept:
        return f"max_drop {bound}: {found.after:.4g} with every part quantized; nothing had to stay float."
    rows = ", ".join(f"{kept.part.name} ({kept.gain:+.2g})" for kept in found.kept[:10])
    more = f" and {len(found.kept) - 10} more" if len(found.kept) > 10 else ""
    return (
        f"max_drop {bound}: {found.before:.4g} with every part quantized, {found.after:.4g} with {len(found.kept)} kept "
        f"float, in the order of what each gains alone: {rows}{more}."
    )
