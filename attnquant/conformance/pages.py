"""A ConformanceReport as rows of a table and as markdown: counts, then what did not pass, alike cases in one row."""

from collections.abc import Sequence
from dataclasses import dataclass

from attnquant.conformance.results import STATUSES, CaseResult, ConformanceReport

COUNT_COLUMNS = ("operator", *STATUSES)
FINDING_COLUMNS = ("status", "cases", "largest difference", "why")
_NAMED = 3
"""Cases that a row names; JSON has them all."""


def headline(report: ConformanceReport, provider: str) -> str:
    """One line on one provider."""
    rows = report.providers[provider]
    counts = [(status, sum(row.status == status for row in rows)) for status in STATUSES]
    text = ", ".join(f"{count} {status}" for status, count in counts if count)
    return f"ONNX Runtime {report.runtime}, {provider}, against {report.specification}: {len(rows)} cases, {text}"


def count_rows(report: ConformanceReport, provider: str) -> list[tuple[str, ...]]:
    """A row of COUNT_COLUMNS for each operator and version."""
    return [(group, *(str(found[status]) for status in STATUSES)) for group, found in report.counts(provider).items()]


def findings(report: ConformanceReport, provider: str) -> list["Finding"]:
    """What did not pass, the unknown first; cases with the same status and cause together."""
    found: dict[tuple[str, tuple[str, ...], str], list[CaseResult]] = {}
    for row in report.providers[provider]:
        if row.status != "passed":
            found.setdefault((row.status, row.issues, _cause(report, row)), []).append(row)
    made = [Finding(cases=tuple(rows), why=why) for (_, _, why), rows in found.items()]
    return sorted(made, key=lambda finding: (not finding.cases[0].unknown, STATUSES.index(finding.cases[0].status)))


def markdown(report: ConformanceReport) -> str:
    """For pull requests and pages."""
    lines: list[str] = []
    for provider in report.providers:
        lines += ["### Conformance", "", f"{headline(report, provider)}.", ""]
        lines += _table(COUNT_COLUMNS, count_rows(report, provider))
        rows = [finding.row for finding in findings(report, provider)]
        if rows:
            lines += ["", *_table(FINDING_COLUMNS, rows)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _cause(report: ConformanceReport, row: CaseResult) -> str:
    if row.status != "deviates":
        return row.sentence
    known = [f"{issue.sentence} ({issue.id})" for issue in report.issues if issue.id in row.issues]
    return "; ".join(known) if known else "not known so far"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Cases that did not pass for one reason."""

    cases: tuple[CaseResult, ...]
    why: str

    @property
    def row(self) -> tuple[str, ...]:
        """By FINDING_COLUMNS."""
        first, count = self.cases[0], len(self.cases)
        named = ", ".join(case.name for case in self.cases[:_NAMED]) + (", ..." if count > _NAMED else "")
        return first.status, f"{count}: {named}", self.difference, self.why

    @property
    def difference(self) -> str:
        """The largest one; "NaN or infinite" where a value is of another kind."""
        if self.cases[0].status != "deviates":
            return ""
        known = [case.max_difference for case in self.cases if case.max_difference is not None]
        kinds = [] if len(known) == len(self.cases) else ["NaN or infinite"]
        return " / ".join([*([f"{max(known):.3g}"] if known else []), *kinds])
