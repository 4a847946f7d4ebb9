"""How long parts of a model take in float and in int8, and what the speed gate decides from that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import Any, Literal

LEAST, MOST = 20, 200
"""Pairs of runs before anything is decided, and at most."""
MARGIN = 1.03
"""int8 time over float time from which on a part counts as losing."""
SLIGHT = 0.005
"""Of the whole float model's time: a part that loses less stays int8, for its size."""
_WIDTH = 1.29
"""Half the width of a 99 % interval of the median, in square roots of the number of pairs (order statistics)."""

Verdict = Literal["float", "int8", "open"]

RULE = (
    f"float where int8 takes {MARGIN:g} times as long or more, the 99 % interval of that median lies above 1, and the loss "
    f"is {SLIGHT:.1%} of the whole float model's time or more; int8 where the interval lies below {MARGIN:g}; what {MOST} "
    "pairs or the time do not decide stays int8"
)


def pace(times: Sequence[tuple[float, float]]) -> "Pace":
    """Medians of pairs (float seconds, int8 seconds), and of their ratio a 99 % interval."""
    ratios = sorted(second / first for first, second in times)
    cut = max(0, int(len(ratios) / 2 - _WIDTH * sqrt(len(ratios))))
    return Pace(
        float_ms=1e3 * median(first for first, _ in times),
        int8_ms=1e3 * median(second for _, second in times),
        ratio=median(ratios), low=ratios[cut], high=ratios[-1 - cut], pairs=len(ratios),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times of one run in float and in int8, and int8 time over float time with its 99 % interval."""

    float_ms: float
    int8_ms: float
    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def verdict(self) -> Verdict:
        """What `RULE` says; "open" while more pairs could decide it."""
        if self.pairs < LEAST:
            return "open"
        if self.ratio >= MARGIN and self.low > 1:
            return "float"
        return "int8" if self.high < MARGIN else "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """Groups of parts of equal shapes, timed in one small model: what becomes of them."""

    parts: tuple[str, ...]
    """Ids of attentions and names of linears."""
    sizes: str
    """Of what goes in and of the weights."""
    pace: Pace | None = None
    """None where they could not be timed."""
    why: str = ""
    slight: bool = False
    """Whether what int8 loses is too little to matter."""

    @property
    def kept_float(self) -> bool:
        """Whether int8 loses here, and enough."""
        return self.pace is not None and self.pace.verdict == "float" and not self.slight

    @property
    def decision(self) -> str:
        """For the table."""
        if self.pace is None:
            return f"int8 (not timed: {self.why})"
        lost = "int8 (loses too little)" if self.slight else "float"
        return {"float": lost, "int8": "int8", "open": "int8 (undecided)"}[self.pace.verdict]

    @property
    def reason(self) -> str:
        """Why its parts stay float, for the setup."""
        assert self.pace is not None
        return f"float by the speed gate: int8 takes {self.pace.ratio:.2f} times as long here"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReport:
    """What the speed gate measured, on which machine, and what it did."""

    rows: tuple[GateRow, ...]
    runtime: str
    cpu: str
    threads: int
    seconds: float
    """What the gate took, building included."""
    whole: Mapping[str, Pace] = field(default_factory=dict)
    """The whole model against float, {"all int8", "gated"}: only what was built."""
    undone: str = ""
    """Why nothing was kept float although groups lose; "" where it was, or none loses."""

    @property
    def kept(self) -> int:
        """Number of parts that the gate left float."""
        return 0 if self.undone else sum(len(row.parts) for row in self.rows if row.kept_float)

    def sentence(self) -> str:
        """What was done, for the notes."""
        total = sum(len(row.parts) for row in self.rows)
        text = f"Speed gate: {self.kept} of {total} parts stay float on {self.cpu}, {self.threads} threads, {self.runtime}."
        whole = ", ".join(f"{name} {item.ratio:.2f}" for name, item in self.whole.items())
        text += f" Time of the whole model over float's: {whole}." if whole else ""
        return f"{text} {self.undone}".strip()

    def cells(self) -> list[list[str]]:
        """The table under `COLUMNS`: a row for each shape, then the whole model."""
        rows = [[_named(row.parts), row.sizes, *_figures(row.pace), row.decision] for row in self.rows]
        return rows + [["whole model", name, *_figures(item), ""] for name, item in self.whole.items()]

    def as_json(self) -> dict[str, Any]:
        """As JSON values (docs/json.md)."""
        return {
            "rule": RULE, "runtime": self.runtime, "cpu": self.cpu, "threads": self.threads,
            "seconds": round(self.seconds, 1), "kept_float": self.kept, "undone": self.undone or None,
            "groups": [
                {"parts": list(row.parts), "sizes": row.sizes, "decision": row.decision, **_pace_json(row.pace)}
                for row in self.rows
            ],
            "whole": {name: _pace_json(item) for name, item in self.whole.items()},
        }  # fmt: skip


COLUMNS = ("parts", "sizes", "float ms", "int8 ms", "int8 / float", "99 %", "pairs", "decision")
"""Headings of the gate's table."""


def _named(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{parts[0]} and {len(parts) - 1} more"


def _figures(item: Pace | None) -> list[str]:
    if item is None:
        return ["", "", "", "", ""]
    interval = f"{item.low:.2f}-{item.high:.2f}"
    return [f"{item.float_ms:.3g}", f"{item.int8_ms:.3g}", f"{item.ratio:.2f}", interval, f"{item.pairs}"]


def _pace_json(item: Pace | None) -> dict[str, Any]:
    names = ("float_ms", "int8_ms", "ratio", "low", "high")
    found = {name: None if item is None else round(getattr(item, name), 4) for name in names}
    return {**found, "pairs": 0 if item is None else item.pairs}
