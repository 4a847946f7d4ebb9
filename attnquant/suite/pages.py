"""A SuiteReport as rows of a table, as a readable difference for pytest, and as markdown."""

from collections.abc import Sequence

from attnquant.markup import escaped, plain
from attnquant.markup import row as markdown_row
from attnquant.suite.judge import FAILING, PARTS, Row, SuiteReport

COLUMNS = ("entry", "metric", "", "recorded", "measured", "change", "tolerance", "status")
UPDATE = "If this is meant: rerun with {option}, and read the difference of the file before you commit it."


def headline(report: SuiteReport) -> str:
    """One line."""
    failing = sum(row.status in FAILING for row in report.rows)
    if report.updated:
        return f"{report.file} was rewritten: {len(report.rows)} metrics. Read its difference; this run fails once."
    if failing:
        return f"{report.file}: {failing} of {len(report.rows)} metrics fail"
    return f"{report.file}: {len(report.rows)} metrics, none worse"


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Two lines of COLUMNS for each metric: the float figure, then the quantized one with the status."""
    return [line for row in rows for line in _lines(row)]


def remarks(report: SuiteReport) -> list[str]:
    """What else there is to say."""
    said = [f"since it was recorded: {', '.join(report.version_changes)}"] if report.version_changes else []
    if report.skipped:
        said.append(f"measured by pytest alone: {', '.join(report.skipped)}")
    return said


def difference(report: SuiteReport, option: str) -> str:
    """Aligned columns of everything that was measured, for a terminal of any kind."""
    table = [COLUMNS, *cells(report.rows)]
    widths = [max(len(line[index]) for line in table) for index in range(len(COLUMNS))]
    left = {0, 1, 2, len(COLUMNS) - 1}
    lines = [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    return "\n".join([headline(report), "", *lines, "", *remarks(report), UPDATE.format(option=option)])


def markdown(report: SuiteReport) -> str:
    """For pull requests."""
    table = [COLUMNS, ["---"] * len(COLUMNS), *cells(report.rows)]
    lines = [markdown_row([escaped(plain(cell)) for cell in line]) for line in table]
    said = [f"- {escaped(plain(remark))}" for remark in remarks(report)]
    return "\n".join(["### Suite", "", f"{escaped(headline(report))}.", "", *lines, *([""] if said else []), *said]) + "\n"


def _lines(row: Row) -> list[tuple[str, ...]]:
    found = list[tuple[str, ...]]()
    for part in PARTS:
        before, now = (None if item is None else getattr(item, f"{part}_value") for item in (row.recorded, row.measured))
        change = "" if before is None or now is None else f"{now - before:+.4g}"
        status = "WORSE" if row.worse(part) else ""
        if part == "quantized" and not status:
            status = " ".join(word for word in (row.status, f"({row.remark})" if row.remark else "") if word)
        names = (row.entry, row.metric) if part == "float" else ("", "")
        found.append((*names, part, _figure(before), _figure(now), change, f"{row.judged.tolerance:g}", status))
    return found


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
