"""What is summed up over samples for one attention, and for each of its quantizers."""

from dataclasses import dataclass, field

import numpy as np

from attnquant.audit.quantizers import Parameters, neutral
from attnquant.measures import Likeness, Scaled, pieces
from attnquant.roles import PortRole
from attnquant.verification.watching import Gauge

BINS = 60
"""Of a histogram, over the quantizer's range and a quarter of it on each side; the end bins hold everything beyond."""
_MARGIN = 0.25
_SMOOTHED = (PortRole.VALUE, PortRole.CONTEXT)
_EXPLAINED_DB = 6.0
_DEAD = 1e-6
"""Sum of a row of probabilities below which its query sees no key."""


def limits(found: Parameters) -> tuple[float, float] | None:
    """Lowest and highest real value of a quantizer with constant parameters, the widest of its channels."""
    if found.scale is None or found.zero_point is None or found.bits is None or not found.scale.size:
        return None
    lowest = neutral(found.dtype) - (1 << (found.bits - 1))
    scale, zero = found.scale.astype(np.float64).ravel(), found.zero_point.astype(np.float64).ravel()
    low, high = (lowest - zero) * scale, (lowest + (1 << found.bits) - 1 - zero) * scale
    return float(low.min()), float(high.max())


@dataclass(slots=True)
class GaugeSums:
    """Values that reached one quantizer."""

    gauge: Gauge
    low: float = 0.0
    high: float = 0.0
    """The quantizer's range; 0 and 0 where it is not constant."""
    minimum: float = float("inf")
    maximum: float = float("-inf")
    count: int = 0
    clipped: int = 0
    bins: np.ndarray = field(default_factory=lambda: np.zeros(BINS, np.int64))

    @classmethod
    def of(cls, gauge: Gauge) -> "GaugeSums":
        """Empty sums."""
        low, high = limits(gauge.parameters) or (0.0, 0.0)
        return cls(gauge=gauge, low=low, high=high)

    @property
    def step(self) -> float:
        """Width of one step, of the widest channel."""
        return (self.high - self.low) / ((1 << (self.gauge.parameters.bits or 8)) - 1)

    @property
    def edges(self) -> tuple[float, float]:
        """Where the histogram begins and ends."""
        margin = _MARGIN * (self.high - self.low)
        return self.low - margin, self.high + margin

    def add(self, array: np.ndarray) -> None:
        """Add the values of one sample."""
        start, end = self.edges
        for (values,) in pieces(array):
            finite = values[np.isfinite(values)]
            if not finite.size:
                continue
            self.minimum = min(self.minimum, float(finite.min()))
            self.maximum = max(self.maximum, float(finite.max()))
            self.count += finite.size
            if end > start:
                half = self.step / 2
                self.clipped += int(((finite < self.low - half) | (finite > self.high + half)).sum())
                places = np.clip((finite - start) * (BINS / (end - start)), 0, BINS - 1).astype(np.int64)
                self.bins += np.bincount(places, minlength=BINS)

    @property
    def clipped_share(self) -> float | None:
        """Share of the values beyond the range by more than half a step."""
        return self.clipped / self.count if self.count and self.high > self.low else None

    @property
    def unused_share(self) -> float | None:
        """Share of the range that no value reaches; of a symmetric range on the fuller side only."""
        if not self.count or self.high <= self.low:
            return None
        if self.gauge.parameters.symmetric:
            used = max(self.maximum / self.high if self.high > 0 else 0.0, self.minimum / self.low if self.low < 0 else 0.0)
        else:
            used = (min(self.high, self.maximum) - max(self.low, self.minimum)) / (self.high - self.low)
        return float(np.clip(1 - used, 0.0, 1.0))


@dataclass(slots=True)
class SiteSums:
    """Everything about one attention."""

    scaled: dict[PortRole, Scaled] = field(default_factory=dict)
    """Value and context up to a factor for each channel."""
    roles: dict[PortRole, Likeness] = field(default_factory=dict)
    """Quantized against float model: what came in from earlier layers included."""
    own: Likeness = field(default_factory=Likeness)
    """Context against the float twin on the same inputs."""
    least: Likeness = field(default_factory=Likeness)
    """Context of the twin with Q and K of 8 bits against the float twin."""
    crossed: dict[tuple[PortRole, bool], Likeness] = field(default_factory=dict)
    """Query against the float model's key, key against its query; as they are and transposed."""
    gauges: list[GaugeSums] = field(default_factory=list)
    dead: dict[str, int] = field(default_factory=lambda: {"float": 0, "quantized": 0})
    rows: dict[str, int] = field(default_factory=lambda: {"float": 0, "quantized": 0})

    def add_role(self, role: PortRole, reference: np.ndarray, other: np.ndarray) -> None:
        """Add one sample of a role; tensors that can't be laid over each other are left out."""
        fitted = laid_over(reference, other)
        if fitted is not None:
            self.roles.setdefault(role, Likeness()).add(reference, fitted)
            if role in _SMOOTHED:
                self.scaled.setdefault(role, Scaled()).add(reference, fitted)

    def snr_db(self, role: PortRole) -> float | None:
        """SNR against the float model; of value and context without the factors that smoothing put there."""
        plain = self.roles[role].snr_db if role in self.roles else None
        return self.scaled[role].snr_db if self.smoothed(role) else plain

    def smoothed(self, role: PortRole) -> bool:
        """Whether a factor for each channel explains so much of the difference that there must be one."""
        plain = self.roles[role].snr_db if role in self.roles else None
        without = self.scaled[role].snr_db if role in self.scaled else None
        return plain is not None and without is not None and without > plain + _EXPLAINED_DB

    def add_crossed(self, role: PortRole, reference: np.ndarray, other: np.ndarray) -> None:
        """Add query against key, or key against query."""
        for turned in (False, True):
            candidate = other.swapaxes(-1, -2) if turned and other.ndim > 1 else other
            if candidate.shape == reference.shape:
                self.crossed.setdefault((role, turned), Likeness()).add(reference, candidate)

    def add_rows(self, model: str, probabilities: np.ndarray) -> None:
        """Count the queries that see no key."""
        sums = probabilities.astype(np.float32).sum(-1)
        self.rows[model] += sums.size
        self.dead[model] += int((~(sums > _DEAD)).sum())


def laid_over(reference: np.ndarray, other: np.ndarray) -> np.ndarray | None:
    """`other` in the shape of `reference`: as it is, with batch and heads in one axis, or with the last axes exchanged."""
    if reference.shape == other.shape:
        return other
    if other.size != reference.size or min(reference.ndim, other.ndim) < 2:
        return None
    if reference.shape[-2:] == other.shape[-2:]:
        return other.reshape(reference.shape)
    turned = other.swapaxes(-1, -2)
    return turned.reshape(reference.shape) if turned.shape[-2:] == reference.shape[-2:] else None
