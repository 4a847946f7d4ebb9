"""Every supported ONNX Runtime against the specification: the tables of docs/conformance.md.

    python -m benchmarks.conformance --out docs/conformance.md      # 1 where a deviation is not known

Each version lies in a folder of its own (benchmarks.runtimes). The tables replace what stands between the marks in the page.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

from attnquant.conformance import ConformanceReport
from attnquant.conformance.cases import all_cases
from attnquant.conformance.readings import NEWEST
from attnquant.conformance.results import STATUSES, CaseResult
from attnquant.conformance.run import launch, run_suite
from attnquant.deviations import DEVIATIONS, Deviation
from benchmarks import specification
from benchmarks.runtimes import ONNXRUNTIMES, environment, runtime_folder

PROVIDER = "cpu"
MARKS = ("<!-- {name}: written by python -m {by} -->", "<!-- end of {name} -->")


def main(arguments: list[str]) -> int:
    """Write the tables; 1 where a deviation or a disagreement is not explained."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    reports = [report_of(version) for version in ONNXRUNTIMES]
    releases, wrong = specification.table()
    texts = {
        "counts": table(*counts(reports)),
        "deviations": table(*deviations(reports)),
        "refused": table(*refused(reports)),
        "releases": table(specification.COLUMNS, releases),
    }
    if given.out:
        given.out.write_text(filled(given.out.read_text(encoding="utf-8"), texts), encoding="utf-8")
    print("\n\n".join(texts.values()))
    unknown = [f"{report.runtime}: {row.name}" for report in reports for row in report.providers[PROVIDER] if row.unknown]
    print("\n".join([*unknown, *wrong]), file=sys.stderr)
    return int(bool(unknown or wrong))


def report_of(version: str) -> ConformanceReport:
    """The suite in one version of the runtime."""
    print(f"onnxruntime {version}", file=sys.stderr)
    surroundings = environment(runtime_folder(version))

    def worker(provider: str, names: Sequence[str]) -> "CompletedProcess[str]":
        return launch(provider, names, surroundings)

    runtime, rows = run_suite(PROVIDER, list(all_cases()), worker)
    return ConformanceReport(runtime=runtime, specification=NEWEST.name, providers={PROVIDER: rows})


def counts(reports: Sequence[ConformanceReport]) -> tuple[list[str], list[list[str]]]:
    """A row for each operator: passed / deviates / not implemented / crashes in each version."""
    columns = ["operator", "cases", *(report.runtime for report in reports)]
    every = [report.counts(PROVIDER) for report in reports]
    sizes = {group: str(sum(found.values())) for group, found in every[0].items()}
    return columns, [[f"`{group}`", size, *(_figures(found[group]) for found in every)] for group, size in sizes.items()]


def deviations(reports: Sequence[ConformanceReport]) -> tuple[list[str], list[list[str]]]:
    """A row for each known deviation: in how many cases it shows, and the largest difference, in each version."""
    columns = ["id", "what happens", *(report.runtime for report in reports), "known as"]
    rows = []
    for issue in DEVIATIONS:
        found = [[row for row in report.providers[PROVIDER] if issue.id in row.issues] for report in reports]
        rows.append([f"`{issue.id}`", issue.sentence, *map(_extent, found), _link(issue)])
    return columns, rows


def refused(reports: Sequence[ConformanceReport]) -> tuple[list[str], list[list[str]]]:
    """A row for each sentence with which the runtime refuses cases: how many, in each version."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, report in enumerate(reports):
        for row in report.providers[PROVIDER]:
            if row.status in ("not implemented", "crashes"):
                key = row.group, row.sentence if row.status != "crashes" else f"crash: {row.sentence}"
                found.setdefault(key, [0] * len(reports))[index] += 1
    columns = ["operator", "the runtime's answer", *(report.runtime for report in reports)]
    return columns, [[f"`{group}`", text, *(str(count or "") for count in row)] for (group, text), row in found.items()]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def filled(page: str, texts: dict[str, str], by: str = "benchmarks.conformance") -> str:
    """The page with each text between its marks, which name the module that writes them.

    Raises:
        SystemExit: the page lacks a mark.
    """
    for name, text in texts.items():
        begin, end = (mark.format(name=name, by=by) for mark in MARKS)
        if begin not in page or end not in page:
            raise SystemExit(f"the page lacks {begin!r} or {end!r}")
        head, tail = page.partition(begin)[0], page.partition(end)[2]
        page = f"{head}{begin}\n{text}\n{end}{tail}"
    return page


def _figures(found: dict[str, int]) -> str:
    """"12", "12, 3 deviate, 1 refused"."""
    words = dict(zip(STATUSES, ("", " deviate", " refused", " crash"), strict=True))
    return ", ".join(f"{found[status]}{words[status]}" for status in STATUSES if found[status] or status == "passed")


def _extent(rows: Sequence[CaseResult]) -> str:
    if not rows:
        return "right"
    known = [row.max_difference for row in rows if row.max_difference is not None]
    size = f"{max(known):.2g}" if len(known) == len(rows) else "NaN or inf"
    return f"{len(rows)} ({size})"


def _link(issue: Deviation) -> str:
    if not issue.url:
        return ""
    return f"[#{issue.url.rpartition('/')[2]}]({issue.url})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
