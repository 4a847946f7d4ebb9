"""Range estimators by name, and SmoothQuant with a strength for each linear."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from nncf.quantization.algorithms.smooth_quant.algorithm import SmoothQuant
from nncf.quantization.range_estimator import RangeEstimatorParametersSet
from nncf.tensor import Tensor

from attnquant.host.plan import current_plan

ESTIMATORS = {
    "auto": RangeEstimatorParametersSet.MINMAX,
    "minmax": RangeEstimatorParametersSet.MINMAX,
    "mean_minmax": RangeEstimatorParametersSet.MEAN_MINMAX,
    "histogram": RangeEstimatorParametersSet.HISTOGRAM,
    "quantile": RangeEstimatorParametersSet.MEAN_QUANTILE,
}
"""NNCF's range estimators by the names of recipes."""

FLOOR = 0.3
"""Share of the channels that get SmoothQuant's smallest factor; NNCF's is 0.1. Channels that calibration hardly saw at work,
as many are behind GELU, are amplified to the range of the others by their own factors, and clip on other data
(docs/accuracy.md)."""


def looked_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """`_get_statistics_for_node` that notes for which linear."""

    def replacement(self: Any, statistic_points: Any, node_name: str, act_port: int) -> Any:
        plan = current_plan()
        if plan is not None:
            plan.smoothing = node_name
        return original(self, statistic_points, node_name, act_port)

    return replacement


def strengthened(original: "staticmethod[..., Any]") -> "staticmethod[..., Any]":
    """`_calculate_scale_and_ratio` with the strength of the linear that was looked up; a ratio of 0 leaves it alone."""

    def replacement(activations: Any, weights: Any, alpha: float, quantile: float | None = 0.1) -> Any:
        plan = current_plan()
        if plan is None:
            return original.__func__(activations, weights, alpha, quantile)
        own = plan.strengths.get(plan.smoothing, alpha)
        scales, ratio = original.__func__(activations, weights, max(own, 0.0), FLOOR)
        return scales, 0.0 if own < 0 else ratio

    return staticmethod(replacement)


def factor(largest: np.ndarray, weights: Sequence[np.ndarray], alpha: float) -> np.ndarray | None:
    """SmoothQuant's scale of an activation, float32 (channels,); None where it is left alone.

    :param largest: The largest absolute value of each channel.
    :param weights: The same of each linear's weight.
    """
    best, scale = 0.0, None
    for weight in weights if alpha >= 0 else ():
        clipped = [SmoothQuant._clip_statistics([Tensor(array)]) for array in (largest.reshape(-1), weight.reshape(-1))]
        found, ratio = SmoothQuant._calculate_scale_and_ratio(*clipped, alpha, FLOOR)
        if float(ratio.data) > best:
            best, scale = float(ratio.data), found.data
    return scale
