"""Scales of keys and values from what a float model's caches hold, one for a cache or one for each head's channel."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from attnquant.errors import DataError
from attnquant.kvcache.storage import limit

_HELD = 2048
"""Positions of a cache whose values are kept to choose a clipping from."""
_RATIOS = np.linspace(0.4, 1.0, 31)
_TINY = 1e-6


@dataclass(slots=True)
class Observed:
    """One cache: the smallest and largest value of every channel, 0 among them, and a sample of positions."""

    smallest: np.ndarray
    """(kv heads, head size)."""
    largest: np.ndarray
    """(kv heads, head size)."""
    held: list[np.ndarray] = field(default_factory=list)
    """Each (positions, kv heads, head size)."""
    seen: int = 0

    def add(self, cache: np.ndarray, room: int) -> None:
        """Take a cache (batch, kv heads, positions, head size); at most `room` of its positions are kept."""
        if not cache.size:
            return
        values = cache.astype(np.float32)
        self.smallest = np.minimum(self.smallest, values.min(axis=(0, 2)))
        self.largest = np.maximum(self.largest, values.max(axis=(0, 2)))
        rows = values.transpose(0, 2, 1, 3).reshape(-1, *self.largest.shape)
        step = max(1, -(-len(rows) // room))
        self.held.append(rows[self.seen % step :: step].copy())
        self.seen += 1

    def scale(self, *, bits: int, per_channel: bool, clip: str) -> np.ndarray:
        """float32 (1, kv heads, 1, head size), or (1,).

        Integers run from -limit - 1 to limit: a channel that is mostly negative has the finer scale that its side allows.

        :param clip: "max": the least scale that clips nothing seen; "mse": the fraction of it that makes the mean squared
            error over the positions kept the least.
        """
        edge = limit(bits)
        scale = np.maximum(np.maximum(self.largest / edge, -self.smallest / (edge + 1)), _TINY)
        if not per_channel:
            scale = scale.max()
        if clip == "mse":
            scale = scale * self._ratio(scale, edge=edge, per_channel=per_channel)
        whole = scale.astype(np.float32)
        return whole.reshape(1, self.largest.shape[0], 1, -1) if per_channel else whole.reshape(1)

    def _ratio(self, least: np.ndarray, *, edge: int, per_channel: bool) -> np.ndarray:
        rows = np.concatenate(self.held)
        errors = []
        for ratio in _RATIOS:
            scale = least * ratio
            wrong = (np.clip(np.rint(rows / scale), -edge - 1, edge) * scale - rows) ** 2
            errors.append(wrong.mean(axis=0) if per_channel else wrong.mean())
        return np.asarray(_RATIOS[np.argmin(np.stack(errors), axis=0)])


def observe(runs: Iterable[Mapping[str, np.ndarray]], names: Iterable[str], *, samples: int) -> dict[str, Observed]:
    """What the caches of these names hold over all runs.

    :param runs: Outputs of the float model for each sample, prefill and decode steps alike.
    :param samples: About how many there are, so that the positions kept are spread over all.
    :raises DataError: nothing was ever in a cache.
    """
    wanted, room, found = tuple(names), max(1, _HELD // max(1, samples)), dict[str, Observed]()
    for outputs in runs:
        for name in wanted:
            cache = outputs[name]
            if name not in found:
                none = np.zeros((cache.shape[1], cache.shape[3]), np.float32)
                found[name] = Observed(smallest=none, largest=none)
            found[name].add(cache, room)
    if not found or any(one.seen == 0 for one in found.values()):
        raise DataError("KV cache calibration: expected samples with at least one position, got none. Give longer samples.")
    return found
