"""Figures measured now against those recorded: rows with a status, and whether anything got worse."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from attnquant.account import installed_versions
from attnquant.suite.values import Entry, Figures, Metric, Recorded

Status = Literal["ok", "better", "worse", "changed", "new", "missing"]
FAILING: frozenset[Status] = frozenset({"worse", "changed", "new", "missing"})
"""better is no failure: record it when it is worth keeping."""
PARTS: tuple[Literal["float", "quantized"], ...] = ("float", "quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric of one entry."""

    entry: str
    metric: str
    status: Status
    judged: Metric
    recorded: Figures | None = None
    measured: Figures | None = None
    remark: str = ""

    def worse(self, part: Literal["float", "quantized"]) -> bool:
        """Whether this figure fell behind by more than the tolerance."""
        if self.recorded is None or self.measured is None:
            return False
        before, now = (getattr(item, f"{part}_value") for item in (self.recorded, self.measured))
        # Rounded like the figures themselves: 0.9 - 0.8 is a little more than 0.1.
        return round(self.judged.worsening(before, now), 12) > self.judged.tolerance

    def as_json(self) -> dict[str, Any]:
        """As JSON values; a figure that is NaN or infinite is null."""
        figures = {
            word: None if item is None else {part: _finite(getattr(item, f"{part}_value")) for part in PARTS}
            for word, item in (("recorded", self.recorded), ("measured", self.measured))
        }
        return {
            "entry": self.entry,
            "metric": self.metric,
            "status": self.status,
            **figures,
            "tolerance": self.judged.tolerance,
            "better": self.judged.better,
            "remark": self.remark,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReport:
    """What became of a suite."""

    file: str
    rows: tuple[Row, ...]
    skipped: tuple[str, ...] = ()
    """Entries whose models only a test can make."""
    updated: bool = False
    """The file was rewritten; the run fails once, so that the new figures are read."""
    recorded_versions: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=installed_versions)

    @property
    def ok(self) -> bool:
        """Nothing got worse, everything recorded was measured, and nothing was rewritten."""
        return not self.updated and not any(row.status in FAILING for row in self.rows)

    @property
    def version_changes(self) -> tuple[str, ...]:
        """"onnxruntime 1.31.1 -> 1.32.0", for packages that are no longer those of the record."""
        old, new = self.recorded_versions, self.versions
        changed = [name for name in sorted(old.keys() | new.keys()) if old and old.get(name) != new.get(name)]
        return tuple(f"{name} {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in changed)

    def as_json(self) -> dict[str, Any]:
        """As JSON values (docs/suites.md)."""
        return {
            "file": self.file,
            "ok": self.ok,
            "updated": self.updated,
            "rows": [row.as_json() for row in self.rows],
            "skipped": list(self.skipped),
            "versions": dict(self.versions),
            "version_changes": list(self.version_changes),
        }


def judged(recorded: Entry | None, measured: Entry) -> tuple[Row, ...]:
    """A row for each metric that either knows."""
    old = {} if recorded is None else recorded.metrics
    rows = [_row(measured.name, name, old.get(name), item) for name, item in measured.metrics.items()]
    if recorded is not None and recorded.seed != measured.seed:
        remark = f"seed {measured.seed} instead of {recorded.seed}"
        rows = [replace(row, status="changed", remark=remark) if row.status != "new" else row for row in rows]
    left = [name for name in old if name not in measured.metrics]
    return (*rows, *(
        Row(entry=measured.name, metric=name, status="missing", judged=old[name].metric, recorded=old[name].figures,
            remark="recorded, and not measured any more")
        for name in left
    ))  # fmt: skip


def unmeasured(recorded: Entry, why: str) -> tuple[Row, ...]:
    """A failing row for each metric of an entry whose worker was lost."""
    return tuple(
        Row(
            entry=recorded.name, metric=name, status="missing", judged=item.metric, recorded=item.figures,
            remark=f"not measured: {why}",
        )
        for name, item in recorded.metrics.items()
    )  # fmt: skip


def versions_of(entries: Iterable[Entry]) -> dict[str, str]:
    """The versions that the entries were recorded with; several where they differ."""
    found: dict[str, dict[str, None]] = {}
    for entry in entries:
        for package, version in entry.versions.items():
            found.setdefault(package, {})[version] = None
    return {package: ", ".join(versions) for package, versions in found.items()}


def _row(entry: str, name: str, old: Recorded | None, new: Recorded) -> Row:
    assert new.figures is not None
    now = new.figures.shortened()
    if old is None or old.figures is None:
        return Row(entry=entry, metric=name, status="new", judged=new.metric, measured=now, remark="not recorded yet")
    row = Row(entry=entry, metric=name, status="ok", judged=old.metric, recorded=old.figures, measured=now)
    if changes := old.metric.changes(new.metric):
        return replace(row, status="changed", remark=", ".join(changes))
    if any(row.worse(part) for part in PARTS):
        return replace(row, status="worse")
    gain = old.metric.worsening(old.figures.quantized_value, now.quantized_value)
    return replace(row, status="better") if gain < -old.metric.tolerance else row


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
