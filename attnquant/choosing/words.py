"""The search in words, for the report."""

from itertools import groupby

from attnquant.choosing.search import OFF, Outcome, Setting, Trial


def sentence(outcome: Outcome) -> str:
    """What was tried, what won, and what there was no time for."""
    won = outcome.won.setting
    groups = groupby(outcome.trials, key=lambda trial: trial.setting.estimator)
    some = not all(trial.setting.unfolded for trial in outcome.trials)
    tried = "; ".join(f"{name}: {', '.join(_tried(trial, some=some) for trial in trials)}" for name, trials in groups)
    left = ", ".join(f"{setting.estimator} {_strength(setting)}" for setting in outcome.untried)
    where = "" if won.unfolded else " where its factor folds"
    chosen = f"Ranges {won.estimator}, SmoothQuant strength {_strength(won)}{where}"
    text = f"{chosen} by error on the calibration data ({tried})."
    return f"{text} No time was left for {left}." if left else text


def _strength(setting: Setting) -> str:
    if setting.strengths:
        return f"by linear {_named(min(setting.strengths.values()))} to {_named(max(setting.strengths.values()))}"
    return "as asked" if setting.strength is None else _named(setting.strength)


def _tried(trial: Trial, *, some: bool) -> str:
    where = " also where its factor stays" if some and trial.setting.unfolded else ""
    return f"{_strength(trial.setting)}{where} {trial.snr_db:.1f} dB"


def _named(strength: float) -> str:
    return "off" if strength == OFF else f"{strength:g}"
