"""Bounds on the accuracy of a quantized model: "snr_db>=30", "ppl<=1.02" (recipes, `--max-drop`)."""

import re
from dataclasses import dataclass
from math import inf
from typing import Literal, cast, get_args

Metric = Literal["snr_db", "cosine", "top1", "kl", "ppl"]
"""Against the float model, on calibration samples; docs/accuracy.md defines each."""

_AT_MOST = ("kl", "ppl")
_POSSIBLE = {"cosine": (-1.0, 1.0), "top1": (0.0, 1.0), "kl": (0.0, inf), "ppl": (0.0, inf)}
_FORM = re.compile(r"\s*([A-Za-z_][\w.@-]*)\s*(<=|>=|=)\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A metric and the value that it must reach."""

    metric: Metric
    value: float

    @property
    def at_most(self) -> bool:
        """True where less is better."""
        return self.metric in _AT_MOST

    def score(self, measured: float) -> float:
        """A measured value, or the bound's own, turned so that more is better."""
        return -measured if self.at_most else measured

    def holds(self, measured: float) -> bool:
        """Whether a measured value is good enough; NaN never is."""
        return self.score(measured) >= self.score(self.value)

    def __str__(self) -> str:
        """As a recipe writes it; `parse` reads the same bound, to the last digit."""
        return f"{self.metric}{'<=' if self.at_most else '>='}{repr(self.value).removesuffix('.0')}"


def parse(text: str) -> Bound:
    """A bound from "METRIC>=VALUE", "METRIC<=VALUE" or "METRIC=VALUE", where = stands for the metric's own direction.

    :raises ValueError: the form, the metric, the direction or the value is wrong; the message says what was expected.
    """
    found = _FORM.fullmatch(text)
    known = get_args(Metric)
    if found is None or found[1] not in known:
        msg = f"a bound METRIC=VALUE with a metric among {', '.join(known)}, such as \"ppl<=1.02\""
        raise ValueError(msg)
    bound = Bound(metric=cast(Metric, found[1]), value=float(found[3]))
    if found[2] not in ("=", "<=" if bound.at_most else ">="):
        msg = f"the direction of {bound.metric}, as in \"{bound}\""
        raise ValueError(msg)
    least, most = _POSSIBLE.get(bound.metric, (-inf, inf))
    if not least <= bound.value <= most:
        msg = f"a {bound.metric} from {least:g} to {most:g}" if most < inf else f"a {bound.metric} of {least:g} or more"
        raise ValueError(msg)
    return bound
