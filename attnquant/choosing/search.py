"""Settings in the order in which they are worth trying, until time is up; the one of the highest score is kept."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

_ALWAYS = 2
"""Settings that are tried whatever the time."""
OFF = -1.0
"""The strength of a linear that is not smoothed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A range estimator and the strength of SmoothQuant."""

    estimator: str
    strength: float | None = None
    """One for all linears; `OFF`: none; None: `strengths` has them, or the recipe."""
    strengths: Mapping[str, float] = field(default_factory=dict)
    """By the name of the linear, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting and what it gave: signal to noise in dB, of the worst float output over the samples judged."""

    setting: Setting
    snr_db: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was tried, in order, and what was left for want of time."""

    trials: tuple[Trial, ...]
    untried: tuple[Setting, ...] = ()

    @property
    def won(self) -> Trial:
        """The best; of equals the first."""
        return max(self.trials, key=lambda trial: trial.snr_db)


def search(
    strengths: Sequence[float | None],
    estimators: Sequence[str],
    measure: Callable[[Setting], float],
    *,
    by_linear: Callable[[], Mapping[str, float]] | None = None,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Try the first two strengths, one for each linear, the second estimator with the best so far, then the other strengths,
    those next to the best first, and the other estimators.

    The first two settings are always tried; the first is calibrated by the way, so time counts from its end. Of the others
    none is begun that would end after `seconds`, were it as long as the longest before it.

    :param by_linear: Strengths from the error of each linear alone; called once, after the first trial.
    """
    run = _Run(measure, seconds, clock)
    first = [Setting(estimator=estimators[0], strength=strength) for strength in strengths]
    for setting in first[:2]:
        run.attempt(setting)
    if by_linear is not None and run.has_time():
        own = by_linear()
        if own:
            run.attempt(Setting(estimator=estimators[0], strengths=own))
    for estimator in estimators[1:2]:
        run.attempt(replace(run.best, estimator=estimator))
    left = list(first[2:])
    while left:
        near = min(left, key=lambda setting: run.distance(setting.strength))
        left.remove(near)
        run.attempt(replace(near, estimator=run.best.estimator))
    for estimator in estimators[2:]:
        run.attempt(replace(run.best, estimator=estimator))
    return Outcome(trials=tuple(run.trials), untried=tuple(run.untried))


class _Run:
    """The trials so far, and the time they took."""

    def __init__(self, measure: Callable[[Setting], float], seconds: float, clock: Callable[[], float]) -> None:
        self._measure, self._seconds, self._clock = measure, seconds, clock
        self._end, self._longest = float("inf"), 0.0
        self.trials: list[Trial] = []
        self.untried: list[Setting] = []

    @property
    def best(self) -> Setting:
        return max(self.trials, key=lambda trial: trial.snr_db).setting

    def distance(self, strength: float | None) -> float:
        """From the best strength so far."""
        best = max((trial for trial in self.trials if not trial.setting.strengths), key=lambda trial: trial.snr_db)
        return abs((best.setting.strength or 0.0) - (strength or 0.0))

    def has_time(self) -> bool:
        return len(self.trials) < _ALWAYS or self._clock() + self._longest <= self._end

    def attempt(self, setting: Setting) -> None:
        if not self.has_time():
            self.untried.append(setting)
            return
        start = self._clock()
        self.trials.append(Trial(setting=setting, snr_db=self._measure(setting)))
        if len(self.trials) == 1:
            self._end = self._clock() + self._seconds
        else:
            self._longest = max(self._longest, self._clock() - start)
