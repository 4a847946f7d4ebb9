"""What a run of the suite says: one row for each case and provider, and the counts."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from attnquant.deviations import DEVIATIONS, Deviation

Status = Literal["passed", "deviates", "not implemented", "crashes"]
STATUSES: tuple[Status, ...] = ("passed", "deviates", "not implemented", "crashes")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What became of one case on one provider."""

    name: str
    status: Status
    max_difference: float | None = None
    """Largest absolute difference to the specification; None where values differ in kind (NaN, infinity, shape, type)."""
    output: str = ""
    """The output that differs most."""
    reads_as: tuple[str, ...] = ()
    """Releases of onnx whose older text the runtime follows here."""
    issues: tuple[str, ...] = ()
    """Ids of attnquant.deviations that explain it; none: not known so far."""
    sentence: str = ""
    """The runtime's, where it does not load or run the case."""

    @property
    def group(self) -> str:
        """The operator and its version: "Attention@24"."""
        return self.name.partition("/")[0]

    @property
    def unknown(self) -> bool:
        """A crash, or a deviation that nothing known explains."""
        return self.status == "crashes" or (self.status == "deviates" and not self.issues)

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "status": self.status,
            "max_difference": self.max_difference,
            "output": self.output,
            "reads_as": list(self.reads_as),
            "issues": list(self.issues),
            "sentence": self.sentence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformanceReport:
    """Every case on every provider that was asked for."""

    runtime: str
    """Version of ONNX Runtime."""
    specification: str
    """The text that cases were held to: "onnx 1.23"."""
    providers: Mapping[str, tuple[CaseResult, ...]]

    @property
    def ok(self) -> bool:
        """Nothing crashes, and every deviation is a known one."""
        return not any(row.unknown for rows in self.providers.values() for row in rows)

    @property
    def issues(self) -> tuple[Deviation, ...]:
        """The known deviations that were met."""
        met = {issue for rows in self.providers.values() for row in rows for issue in row.issues}
        return tuple(row for row in DEVIATIONS if row.id in met)

    def counts(self, provider: str) -> dict[str, Counter[str]]:
        """{operator@version: {status: cases}} of a provider, in the order of the cases."""
        found: dict[str, Counter[str]] = {}
        for row in self.providers[provider]:
            found.setdefault(row.group, Counter())[row.status] += 1
        return found

    def as_json(self) -> dict[str, Any]:
        """As JSON values (docs/conformance.md)."""
        return {
            "runtime": self.runtime,
            "specification": self.specification,
            "ok": self.ok,
            "providers": {
                name: {
                    "counts": {status: sum(row.status == status for row in rows) for status in STATUSES},
                    "cases": [row.as_json() for row in rows],
                }
                for name, rows in self.providers.items()
            },
            "issues": [_issue(row) for row in self.issues],
        }


def _issue(row: Deviation) -> dict[str, Any]:
    since, until = (".".join(map(str, numbers)) or None for numbers in (row.since, row.until))
    return {"id": row.id, "sentence": row.sentence, "since": since, "until": until, "url": row.url or None}
