"""How alike two arrays are, summed up over samples: signal-to-noise ratio, cosine, largest difference, classes.

All sums are in float64 and taken in pieces, so that no second copy of a large array is made.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

CEILING = 200.0
"""dB; the SNR of equal arrays, since JSON has no infinity. Its negative stands for a result that is not finite."""

MIN_CLASSES = 16
"""Width of the last axis from which a float output is taken for logits."""

_PIECE = 1 << 20
_FEWEST = 8
"""Elements of a channel from which a factor is fitted to it."""
_ALIKE = 1e-3
"""How far the sum of a row of probabilities may be from one."""


def decibel(signal: float, error: float) -> float:
    """10 log10(signal / error), within the ceiling."""
    if error == 0:
        return CEILING
    if signal == 0 or not np.isfinite(error):
        return -CEILING
    return float(np.clip(10 * np.log10(signal / error), -CEILING, CEILING))


def is_float(array: np.ndarray) -> bool:
    """Floating point, bfloat16 and the like included."""
    return array.dtype.kind == "f" or array.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def logits_outputs(outputs: Mapping[str, np.ndarray]) -> frozenset[str]:
    """Outputs with classes along the last axis: float, of two or three axes, MIN_CLASSES wide or more.

    Four axes are a map of pixels. A hidden state looks like logits; where an output has "logit" in its name, only such
    ones count.
    """
    wide = {
        name
        for name, array in outputs.items()
        if is_float(array) and array.ndim in (2, 3) and array.shape[-1] >= MIN_CLASSES
    }
    named = {name for name in wide if "logit" in name.lower()}
    return frozenset(named or wide)


def pieces(*arrays: np.ndarray) -> Iterator[tuple[np.ndarray, ...]]:
    """The same stretch of several arrays of one size as float64, one after the other."""
    flat = [array.reshape(-1) for array in arrays]
    for start in range(0, flat[0].size, _PIECE):
        yield tuple(item[start : start + _PIECE].astype(np.float64) for item in flat)


def worst_snr(found: "Iterable[Likeness]") -> float | None:
    """The lowest SNR in dB; None where nothing was added to any."""
    return min((one.snr_db for one in found if one.snr_db is not None), default=None)


@dataclass(slots=True)
class Likeness:
    """Sums over everything that was added: a reference x and another y of the same shape."""

    signal: float = 0.0
    """Sum of x^2."""
    error: float = 0.0
    """Sum of (x - y)^2; infinite where y is not finite and x is."""
    other: float = 0.0
    """Sum of y^2."""
    product: float = 0.0
    """Sum of x y."""
    max_abs: float = 0.0
    count: int = 0

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Add one pair; elements that are infinite or NaN in the reference are left out."""
        for first, second in pieces(reference, other):
            finite = np.isfinite(first)
            broken = finite & ~np.isfinite(second)
            if broken.any():
                self.error = self.max_abs = float("inf")
            kept = finite & ~broken
            x, y = (first, second) if kept.all() else (first[kept], second[kept])
            self.signal += float(x @ x)
            self.other += float(y @ y)
            self.product += float(x @ y)
            difference = x - y
            self.error += float(difference @ difference)
            self.max_abs = max(self.max_abs, float(np.abs(difference).max(initial=0.0)))
            self.count += x.size

    def merge(self, more: "Likeness") -> None:
        """Add the sums of other pairs."""
        self.signal += more.signal
        self.error += more.error
        self.other += more.other
        self.product += more.product
        self.max_abs = max(self.max_abs, more.max_abs)
        self.count += more.count

    @property
    def snr_db(self) -> float | None:
        """10 log10(sum x^2 / sum (x - y)^2); None where nothing was added."""
        return decibel(self.signal, self.error) if self.count or self.error else None

    @property
    def cosine(self) -> float | None:
        """Sum x y / sqrt(sum x^2 sum y^2); None where one of them is zero throughout."""
        scale = np.sqrt(self.signal * self.other)
        return float(self.product / scale) if scale > 0 else None


@dataclass(slots=True)
class Scaled:
    """Likeness up to a factor for each channel (heads and last axis): what smoothing moves between two linear layers.

    The factor is that of least squares, sum x y / sum y^2 over batch and positions.
    """

    sums: list[np.ndarray] | None = None
    """Sum of x^2, of x y and of y^2 by channel."""
    count: int = 0
    """Elements of each channel."""
    broken: bool = False

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Add one pair (batch, heads, positions, channels), or one without the first axes; all of the same channels."""
        if reference.ndim < 2 or self.broken:
            return
        rows = zip(reference, other, strict=True) if reference.ndim > 3 else [(reference, other)]
        for first, second in rows:
            x, y = first.astype(np.float64), second.astype(np.float64)
            sums = [np.einsum("...sc,...sc->...c", *pair) for pair in ((x, x), (x, y), (y, y))]
            if self.sums is not None and self.sums[0].shape != sums[0].shape:
                self.broken = True
                return
            self.sums = sums if self.sums is None else [old + new for old, new in zip(self.sums, sums, strict=True)]
            self.count += x.shape[-2]

    @property
    def snr_db(self) -> float | None:
        """SNR with the best factors; None where channels have too few elements to fit one, or differ between samples."""
        if self.broken or self.count < _FEWEST or self.sums is None:
            return None
        signal, product, other = self.sums
        with np.errstate(all="ignore"):
            explained = np.where(other > 0, product**2 / other, 0.0)
            error = float(np.maximum(signal - explained, 0.0).sum()) * self.count / (self.count - 1)
        return decibel(float(signal.sum()), error) if np.isfinite(signal.sum()) and np.isfinite(error) else None


@dataclass(slots=True)
class Classes:
    """Agreement of logits, or of probabilities, along the last axis."""

    rows: int = 0
    agreeing: int = 0
    divergence: float = 0.0

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Add one pair (..., classes)."""
        width = reference.shape[-1]
        step = max(1, _PIECE // width)
        x, y = reference.reshape(-1, width), other.reshape(-1, width)
        for start in range(0, len(x), step):
            first, second = (item[start : start + step].astype(np.float64) for item in (x, y))
            self.rows += len(first)
            self.agreeing += int((first.argmax(-1) == second.argmax(-1)).sum())
            p, log_p = _distribution(first)
            _, log_q = _distribution(second)
            with np.errstate(invalid="ignore"):
                terms = np.where(p > 0, p * (log_p - log_q), 0.0)
            self.divergence += float(terms.sum())

    @property
    def top1(self) -> float | None:
        """Share of rows with the same largest class."""
        return self.agreeing / self.rows if self.rows else None

    @property
    def kl(self) -> float | None:
        """Mean KL divergence from the reference, in nats a row."""
        return max(0.0, self.divergence / self.rows) if self.rows and np.isfinite(self.divergence) else None


@dataclass(slots=True)
class OutputSums:
    """One graph output over all samples: float ones as Likeness, others as the share of equal elements."""

    name: str
    logits: bool = False
    whole: Likeness = field(default_factory=Likeness)
    samples: list[float | None] = field(default_factory=list)
    """SNR of each sample in dB, share of equal elements where the output is not floating point."""
    classes: Classes = field(default_factory=Classes)
    equal: int = 0
    elements: int = 0
    exact: bool = False
    """Not floating point."""
    fault: str = ""

    def add(self, reference: np.ndarray, other: np.ndarray) -> None:
        """Add one sample."""
        if reference.shape != other.shape:
            self.fault = self.fault or f"shape {list(other.shape)} instead of {list(reference.shape)}"
            self.samples.append(None)
        elif is_float(reference):
            one = Likeness()
            one.add(reference, other)
            self.whole.merge(one)
            self.samples.append(one.snr_db)
            if self.logits:
                self.classes.add(reference, other)
        else:
            self.exact = True
            same = int((reference == other).sum())
            self.equal, self.elements = self.equal + same, self.elements + reference.size
            self.samples.append(same / reference.size if reference.size else None)


def _distribution(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(p, log p) of rows of probabilities, or of the softmax of logits."""
    if rows.size and rows.min() >= 0 and np.abs(rows.sum(-1) - 1).max() < _ALIKE:
        return rows, np.log(np.maximum(rows, np.finfo(np.float64).tiny))
    shifted = rows - rows.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.exp(logs), logs
