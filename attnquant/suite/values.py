"""What a suite's file holds, as frozen values."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attnquant.errors import VerificationError

Better = Literal["higher", "lower"]
Function = Callable[[Any, Any], float]
"""(run, samples) -> figure; `run(sample)` gives {output: array} of the float or of the quantized model."""

BUILT_IN: dict[str, tuple[Better, float]] = {
    "snr_db": ("higher", 200.0),
    "cosine": ("higher", 1.0),
    "top1": ("higher", 1.0),
    "equal": ("higher", 1.0),
    "kl": ("lower", 0.0),
    "max_abs": ("lower", 0.0),
}
"""Of the quantized model's outputs against the float one's, the worst output each: what is better, and the float value."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """How a figure is made and judged."""

    tolerance: float
    """How much worse a figure may become, absolute; there is no default."""
    better: Better = "higher"
    function: str | Function | None = None
    """None for a built-in metric, or for figures that a test computes; a text is "FILE.py:function" beside the TOML."""

    def worsening(self, before: float, now: float) -> float:
        """By how much `now` is worse; negative where it is better, infinite where it is no number."""
        if not math.isfinite(now):
            return math.inf
        return before - now if self.better == "higher" else now - before

    def changes(self, other: "Metric") -> list[str]:
        """How `other` judges otherwise, as sentences."""
        pairs = (("tolerance", self.tolerance, other.tolerance), ("better", self.better, other.better))
        return [f"{name} {now!r} instead of {before!r}" for name, before, now in pairs if before != now]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One metric of both models."""

    float_value: float
    quantized_value: float

    def shortened(self) -> "Figures":
        """To the digits that the file keeps."""
        return Figures(float_value=short(self.float_value), quantized_value=short(self.quantized_value))

    def rounded(self, where: str) -> "Figures":
        """As `shortened`, for the file.

        :raises VerificationError: a figure is NaN or infinite, which no later figure could be held against.
        """
        for kind, value in (("float", self.float_value), ("quantized", self.quantized_value)):
            if not math.isfinite(value):
                msg = f"{where}: the {kind} figure is {value}: expected a finite number. Nothing was recorded."
                raise VerificationError(msg)
        return self.shortened()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A metric and its figures, None before they were recorded."""

    metric: Metric
    figures: Figures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A float model, its quantized form and data, each as a path inside the folder of the suite's file."""

    float_model: str
    quantized_model: str
    data: str
    """FILE.npz, a folder of them, or "FILE.py:function", which is called with the seed."""
    samples: int = 100
    provider: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One pair of models and its metrics."""

    name: str
    seed: int
    metrics: Mapping[str, Recorded]
    pair: Pair | None = None
    """None where a test makes the models: then only that test can measure them."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Packages of the run that recorded the figures."""


def short(value: float) -> float:
    """Rounded to the digits that the file keeps."""
    return float(f"{value:.{_DIGITS}g}")
