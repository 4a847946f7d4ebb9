"""run_suite(): every entry of a suite's file measured and judged, without pytest."""

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from attnquant.account import installed_versions
from attnquant.data import load_data
from attnquant.errors import DataError
from attnquant.executors import run_tasks
from attnquant.suite import document
from attnquant.suite.judge import Row, SuiteReport, judged, unmeasured, versions_of
from attnquant.suite.measure import function_in, inside, measured
from attnquant.suite.values import Entry, Metric, Pair, Recorded

Progress = Callable[[str], None]


def run_suite(
    file: str | PathLike[str],
    *,
    update: bool = False,
    executor: str = "local",
    workers: int | None = None,
    progress: Progress | None = None,
) -> SuiteReport:
    """Measure every entry that names its models, and hold it against what the file says.

    The file may name Python files beside it, which are executed: run suites of people whom you trust.

    :param update: Rewrite the file with what was measured; the report is not ok then, so that somebody reads it.
    :param executor: "local", processes of this machine, or "ray"; entries are independent tasks. Where a worker is lost, its
        entry fails and the others are measured.
    :param workers: Entries at a time; default: one for every four cores. 0: in this process.
    :param progress: Called with what is under way.
    :raises DataError: the file is no suite, names something outside its folder, or no entry names its models.
    :raises AttnQuantError: as `attnquant.suite.measure.measured`.
    :raises HostError: Ray is asked for and not installed.
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
        _require_inside(entry, path.parent)
    say(f"measuring {', '.join(entry.name for entry in runnable)}")
    found = run_tasks(
        _measured_task, [(entry, path.parent.resolve()) for entry in runnable], executor=executor, workers=workers,
        progress=lambda number: say(f"measured {number} of {len(runnable)}"),
    )  # fmt: skip
    for entry, done in zip(runnable, found, strict=True):
        if done.value is None:
            rows += unmeasured(entry, done.lost)
        else:
            new[entry.name] = done.value
            rows += judged(entry, done.value)
    if update:
        document.write(path, (entries | {name: rounded(entry) for name, entry in new.items()}).values())
    return SuiteReport(
        file=str(path),
        rows=tuple(rows),
        skipped=tuple(entry.name for entry in entries.values() if entry.pair is None),
        updated=update,
        recorded_versions=versions_of(runnable),
    )


def _require_inside(entry: Entry, folder: Path) -> None:
    """The files of an entry lie in the folder: known before any worker is started."""
    pair, where = entry.pair, f"Suite entry {entry.name!r}"
    assert pair is not None
    inside(pair.float_model, folder, where)
    inside(pair.quantized_model, folder, where)
    file, _, _ = pair.data.rpartition(":")
    inside(file if file.endswith(".py") else pair.data, folder, where)


def _measured_task(task: tuple[Entry, Path]) -> Entry:
    return measured_entry(*task)


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
