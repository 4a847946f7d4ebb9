"""Where statistics go: NNCF's aggregators, told as little as they need."""

from collections.abc import Callable, Sequence

import numpy as np
from nncf.common.tensor_statistics.collectors import AggregatorBase, MaxAggregator, MinAggregator
from nncf.tensor import Tensor

from attnquant.host.known import Found, told
from attnquant.host.requests import Request

_FOLDS: dict[str, Callable[..., np.ndarray]] = {"ReduceMin": np.minimum, "ReduceMax": np.maximum}


class Sink:
    """What one aggregator is to be told. Running minima and maxima are taken here and told it once, at the end."""

    def __init__(self, aggregator: AggregatorBase) -> None:
        self._aggregator = aggregator
        over_samples = 0 in aggregator._aggregation_axes
        folds = {MinAggregator: np.minimum, MaxAggregator: np.maximum}
        self.fold = folds.get(type(aggregator)) if over_samples else None
        self.limit: int | None = aggregator.num_samples
        self._total: np.ndarray | None = None
        self._count = 0

    def add(self, array: np.ndarray) -> None:
        """One sample's value."""
        if self.limit is not None and self._count >= self.limit:
            return
        self._count += 1
        if self.fold is None or (self._total is not None and self._total.shape != array.shape):
            self._aggregator.register_reduced_input(Tensor(array))
        elif self._total is None:
            self._total = array
        else:
            self._total = self.fold(self._total, array)

    def finish(self) -> None:
        """Tell the aggregator what it has not been told yet."""
        if self._total is not None:
            self._aggregator.register_reduced_input(Tensor(self._total))


class Group:
    """Sinks that one request answers. What only minima and maxima are wanted of is folded first and answered once."""

    def __init__(self, one: Request, sinks: Sequence[tuple[int, Sink]]) -> None:
        self._request, self._sinks = one, sinks
        fold = _FOLDS.get(one.needs[-1][1].op_type)
        alike = fold is not None and all(sink.fold is fold for _, sink in sinks)
        limits = {sink.limit for _, sink in sinks}
        self._limit = limits.pop() if alike and len(limits) == 1 and one.is_monotone else 0
        self._totals: list[np.ndarray] | None = None
        self._count = 0

    def add(self, found: Found) -> None:
        """One sample, not beyond the limit of the sinks."""
        if self._limit == 0:
            self._tell(self._request.answer(found))
        elif self._limit is None or self._count < self._limit:
            self._count += 1
            arrays = [told(found, key) for key in self._request.needs]
            if self._totals is not None and [one.shape for one in self._totals] != [one.shape for one in arrays]:
                self._flush()
            if self._totals is None:
                self._totals = arrays
            else:
                self._totals = [
                    _FOLDS[wanted.op_type](*pair)
                    for (_, wanted), *pair in zip(self._request.needs, self._totals, arrays, strict=True)
                ]

    def finish(self) -> None:
        """Tell the aggregators what they have not been told yet."""
        self._flush()
        for _, sink in self._sinks:
            sink.finish()

    def _flush(self) -> None:
        if self._totals is not None:
            self._tell(self._request.made_of(self._totals))
            self._totals = None

    def _tell(self, answer: Sequence[Tensor] | None) -> None:
        if answer is not None:
            for port, sink in self._sinks:
                sink.add(answer[port].data)
