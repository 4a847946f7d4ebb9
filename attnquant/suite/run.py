"""run_suite(): every entry of a suite's file measured and judged, without pytest."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from attnquant.account import installed_versions
from attnquant.data import load_data
from attnquant.errors import DataError
from attnquant.suite import document
from attnquant.suite.judge import Row, SuiteReport, judged, versions_of
from attnquant.suite.measure import function_in, inside, measured
from attnquant.suite.values import Entry, Metric, Pair, Recorded

Progress = Callable[[str], None]


def run_suite(file: str | PathLike[str], *, update: bool = False, progress: Progress | None = None) -> SuiteReport:
    """Measure every entry that names its models, and hold it against what the file says.

    The file may name Python files beside it, which are executed: run suites of people whom you trust.

    :param update: Rewrite the file with what was measured; the report is not ok then, so that somebody reads it.
    :param progress: Called with what is under way.
    :raises DataError: the file is no suite, names something outside its folder, or no entry names its models.
    :raises AttnQuantError: as `attnquant.suite.measure.measured`.
    """
    path, say = Path(file), progress or (lambda text: None)
    entries = document.read(path)
    runnable = [entry for entry in entries.values() if entry.pair is not None]
    if not runnable:
        msg = (
            f"Suite {str(path)!r}: expected an entry with float, quantized and data, got {list(entries)!r}. "
            "Models that a test makes are measured by pytest alone."
        )
        raise DataError(msg)
    rows, new = list[Row](), dict[str, Entry]()
    for entry in runnable:
        say(f"measuring {entry.name}")
        new[entry.name] = measured_entry(entry, path.parent)
        rows += judged(entry, new[entry.name])
    if update:
        document.write(path, (entries | {name: rounded(entry) for name, entry in new.items()}).values())
    return SuiteReport(
        file=str(path),
        rows=tuple(rows),
        skipped=tuple(entry.name for entry in entries.values() if entry.pair is None),
        updated=update,
        recorded_versions=versions_of(runnable),
    )


def measured_entry(entry: Entry, folder: Path) -> Entry:
    """The entry with the figures of now."""
    assert entry.pair is not None
    where, pair = f"Suite entry {entry.name!r}", entry.pair
    metrics = {name: resolved(item.metric, folder, f"{where}, {name}") for name, item in entry.metrics.items()}
    figures = measured(
        inside(pair.float_model, folder, where),
        inside(pair.quantized_model, folder, where),
        samples_in(pair, folder, entry.seed, where),
        metrics,
        limit=pair.samples,
        provider=pair.provider,
        where=where,
    )
    found = {name: Recorded(metric=item.metric, figures=figures[name]) for name, item in entry.metrics.items()}
    return replace(entry, metrics=found, versions=installed_versions())


def rounded(entry: Entry) -> Entry:
    """The entry as the file keeps it.

    :raises VerificationError: a figure is NaN or infinite.
    """
    found = {
        name: replace(item, figures=item.figures and item.figures.rounded(f"{entry.name}, {name}"))
        for name, item in entry.metrics.items()
    }
    return replace(entry, metrics=found)


def resolved(metric: Metric, folder: Path, where: str) -> Metric:
    """The metric with the function itself in the place of its name."""
    function = metric.function
    return replace(metric, function=function_in(function, folder, where)) if isinstance(function, str) else metric


def samples_in(pair: Pair, folder: Path, seed: int, where: str) -> Any:
    """The samples that a pair names; a function is called with the seed.

    :raises DataError: nothing inside the folder has that name.
    """
    if pair.data.rpartition(":")[0].endswith(".py"):
        return function_in(pair.data, folder, where)(seed)
    return load_data(inside(pair.data, folder, where))
