"""Speed of two models against each other on this machine."""

import time
from collections.abc import Callable, Mapping
from math import ceil
from statistics import median

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.pace import LEAST, MOST, Pace, pace

PAIRS = 15
"""Interleaved runs of both."""
_WARM = 2
_OBSERVED = 2e-3
"""Seconds that one observation takes at least: shorter models run several times in it."""

Sample = Mapping[str, np.ndarray]


def ratio(first: ir.Model, second: ir.Model, sample: Sample, *, pairs: int = PAIRS, unfused: bool = False) -> float:
    """Time of the second model over that of the first: the median over interleaved pairs of runs of one sample.

    :param unfused: As `runtime.session` takes it.
    :raises ModelError: a model does not load or run.
    """
    with runtime.session(first, unfused=unfused) as one, runtime.session(second, unfused=unfused) as other:
        for _ in range(_WARM):
            _pair(one, other, sample)
        return median(_pair(one, other, sample) for _ in range(pairs))


def raced(
    first: ir.Model, second: ir.Model, sample: Sample, *, seconds: float, clock: Callable[[], float] = time.monotonic
) -> Pace:
    """Times of a float model and an int8 one on one sample: interleaved pairs, the order swapped in every second one.

    Pairs are run until their median decides (`Pace.verdict`), `MOST` are done, or `seconds` have passed. Threads of the two
    sessions wait without spinning, or they would take each other's cores.

    :raises ModelError: a model does not load or run.
    """
    end = clock() + seconds
    with runtime.session(first, spinning=False) as one, runtime.session(second, spinning=False) as other:
        for _ in range(_WARM):
            took = [_seconds(session, sample) for session in (one, other)]
        repeats = ceil(_OBSERVED / max(min(took), 1e-6))
        times: list[tuple[float, float]] = []
        while len(times) < MOST and (clock() < end or not times):
            times.append(_observed(one, other, sample, repeats, swapped=len(times) % 2 == 1))
            if len(times) >= LEAST and len(times) % 5 == 0 and pace(times).verdict != "open":
                break
        return pace(times)


def _observed(first: object, second: object, sample: Sample, repeats: int, *, swapped: bool) -> tuple[float, float]:
    order = (second, first) if swapped else (first, second)
    took = [sum(_seconds(session, sample) for _ in range(repeats)) / repeats for session in order]
    return (took[1], took[0]) if swapped else (took[0], took[1])


def _pair(first: object, second: object, sample: Sample) -> float:
    before = _seconds(first, sample)
    return _seconds(second, sample) / before


def _seconds(session: object, sample: Sample) -> float:
    start = time.perf_counter()
    runtime.run_session(session, sample)
    return time.perf_counter() - start
