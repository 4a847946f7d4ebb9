"""Speed of two models against each other on this machine."""

import time
from collections.abc import Mapping
from statistics import median

import numpy as np
import onnx_ir as ir

from attnquant import runtime

PAIRS = 15
"""Interleaved runs of both."""
_WARM = 2


def ratio(first: ir.Model, second: ir.Model, sample: Mapping[str, np.ndarray], *, pairs: int = PAIRS) -> float:
    """Time of the second model over that of the first: the median over interleaved pairs of runs of one sample.

    :raises ModelError: a model does not load or run.
    """
    with runtime.session(first) as one, runtime.session(second) as other:
        for _ in range(_WARM):
            _pair(one, other, sample)
        return median(_pair(one, other, sample) for _ in range(pairs))


def _pair(first: object, second: object, sample: Mapping[str, np.ndarray]) -> float:
    before = _seconds(first, sample)
    return _seconds(second, sample) / before


def _seconds(session: object, sample: Mapping[str, np.ndarray]) -> float:
    start = time.perf_counter()
    runtime.run_session(session, sample)
    return time.perf_counter() - start
