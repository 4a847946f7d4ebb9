"""The search in words, for the report."""

from itertools import groupby

from attnquant.choosing.search import OFF, Outcome, Setting


def sentence(outcome: Outcome) -> str:
    """What was tried, what won, and what there was no time for."""
    won = outcome.won.setting
    groups = groupby(outcome.trials, key=lambda trial: trial.setting.estimator)
    tried = "; ".join(
        f"{estimator}: {', '.join(f'{_strength(trial.setting)} {trial.snr_db:.1f} dB' for trial in trials)}"
        for estimator, trials in groups
    )
    left = ", ".join(f"{setting.estimator} {_strength(setting)}" for setting in outcome.untried)
    text = f"Ranges {won.estimator}, SmoothQuant strength {_strength(won)} by error on the calibration data ({tried})."
    return f"{text} No time was left for {left}." if left else text


def _strength(setting: Setting) -> str:
    if setting.strengths:
        return f"by linear {_named(min(setting.strengths.values()))} to {_named(max(setting.strengths.values()))}"
    return "as asked" if setting.strength is None else _named(setting.strength)


def _named(strength: float) -> str:
    return "off" if strength == OFF else f"{strength:g}"
