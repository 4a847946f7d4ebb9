"""A rewriting told: one row for each attention, and the reasons of those that were refused."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnquant.markup import code, escaped, plain, row
from attnquant.rewrite.result import RewriteRow

COLUMNS = ("attention", "node", "status", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """What became of the attentions of a model that was fused or expanded."""

    model: str
    rows: tuple[RewriteRow, ...]

    @property
    def done(self) -> bool:
        """At least one attention was rewritten."""
        return any(row.status != "refused" for row in self.rows)


def as_json(report: RewriteReport, versions: Mapping[str, str]) -> dict[str, Any]:
    """{"model", "versions", "sites": [{"id", "node", "status", "reasons", "tensors"}]}."""
    return {"model": report.model, "versions": dict(versions), "sites": [item.as_json() for item in report.rows]}


def headline(report: RewriteReport) -> str:
    """One line: how many attentions, and what became of them."""
    count = len(report.rows)
    statuses = Counter(item.status for item in report.rows)
    detail = ", ".join(f"{number} {status}" for status, number in statuses.items())
    return f"{count} attention{'s' if count != 1 else ''}{': ' if detail else ''}{detail}"


def cells(item: RewriteRow) -> list[str]:
    """The columns of one row, safe for a terminal."""
    return [plain(item.site), plain(item.node), item.status, "; ".join(map(plain, item.reasons))]


def markdown(report: RewriteReport, versions: Mapping[str, str]) -> str:
    """The report as markdown."""
    lines = [f"### {code(report.model)}", "", f"{headline(report)}.", ""]
    if report.rows:
        lines += [row(list(COLUMNS)), row(["---"] * len(COLUMNS))]
        lines += [row([code(item.site), code(item.node), *map(escaped, cells(item)[2:])]) for item in report.rows]
        lines.append("")
    lines.append(f"<sub>{', '.join(f'{name} {version}' for name, version in versions.items())}</sub>")
    return "\n".join(lines) + "\n"
