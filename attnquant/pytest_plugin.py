"""The fixture `attnquant_suite`: figures of float and quantized models that later runs may not fall behind (docs/suites.md).

Loaded by pytest wherever attnquant is installed, so nothing heavy is imported before a test asks for the fixture.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnquant.suite import Entry, Metric, Pair, SuiteReport

OPTION = "--attnquant-update"
INI = "attnquant_suite_file"
DEFAULT = "attnquant-suite.toml"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option and the name of the file."""
    group = parser.getgroup("attnquant")
    group.addoption(OPTION, action="store_true", help="record the figures of this run in the suite's file, and fail once")
    parser.addini(INI, f"TOML file with the figures, relative to the rootdir (default: {DEFAULT})", default=DEFAULT)


def pytest_configure(config: pytest.Config) -> None:
    """One ledger for the session."""
    if config.getoption(OPTION) and hasattr(config, "workerinput"):
        msg = f"{OPTION} writes one file: run it without -n"
        raise pytest.UsageError(msg)
    config.stash[_LEDGER] = Ledger(config.rootpath / config.getini(INI), update=bool(config.getoption(OPTION)))


@pytest.fixture
def attnquant_suite(request: pytest.FixtureRequest) -> Generator["Recorder"]:
    """Hold float/quantized pairs against the file: `compare(...)` models, or `record(...)` figures that a test computes."""
    recorder = Recorder(request.config.stash[_LEDGER], request.node.nodeid)
    yield recorder
    recorder.finish()  # does nothing where the test has failed or was judged already


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Judge when the test itself has passed, so that what got worse is its failure and not an error of its teardown."""
    recorder = getattr(pyfuncitem, "funcargs", {}).get("attnquant_suite")
    if not isinstance(recorder, Recorder):
        return (yield)
    try:
        result = yield
    except BaseException:
        recorder.entries.clear()
        raise
    recorder.finish()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file where that was asked for; the run fails, so that nobody leaves the option in a script."""
    ledger = session.config.stash.get(_LEDGER, None)
    if ledger is not None and ledger.update and ledger.entries:
        ledger.write()
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was written."""
    ledger = config.stash.get(_LEDGER, None)
    if ledger is not None and ledger.written:
        terminalreporter.section("attnquant")
        for line in ledger.written:
            terminalreporter.write_line(line)


class Ledger:
    """The suite's file and what this session adds to it."""

    def __init__(self, file: Path, *, update: bool) -> None:
        self.file, self.update = file, update
        self.entries: dict[str, Entry] = {}
        self.owners: dict[str, str] = {}
        self.written: list[str] = []

    def recorded(self) -> dict[str, "Entry"]:
        """What the file says; nothing where there is none yet."""
        from attnquant.suite import document

        return document.read(self.file) if self.file.exists() else {}

    def write(self) -> None:
        """Rewrite the file: entries of this session replace theirs, others stay."""
        from attnquant.suite import document

        before = self.recorded()
        document.write(self.file, (before | self.entries).values())
        self.written = [f"{self.file} was rewritten; read its difference before you commit it. This run fails once."]
        self.written += [f"  {'replaced' if name in before else 'added'}: {name}" for name in self.entries]


class Recorder:
    """What one test measures."""

    def __init__(self, ledger: Ledger, test: str) -> None:
        self._ledger, self._test = ledger, test
        self.entries: dict[str, Entry] = {}

    @property
    def folder(self) -> Path:
        """The folder of the suite's file: relative paths start there."""
        return self._ledger.file.parent

    def compare(
        self,
        name: str,
        float_model: Any,
        quantized_model: Any,
        data: "str | Path | Iterable[Any] | Callable[[int], Iterable[Any]]",
        *,
        metrics: "Mapping[str, float | Metric]",
        seed: int = 0,
        samples: int = 100,
        provider: str = "cpu",
    ) -> None:
        """Measure a pair of models and hold every metric against the file, when the test ends.

        :param name: Of the entry, unique in the file.
        :param float_model: Path, ModelProto or onnx_ir.Model; a path below the suite's folder is recorded, so that
            `attnquant suite run` can measure it too. quantized_model likewise.
        :param data: Samples {input: array}; FILE.npz, a folder of them, or a function or "FILE.py:function", called with
            the seed.
        :param metrics: {name: tolerance} of built-in metrics (snr_db, cosine, top1, kl, equal, max_abs), {name: Metric} of
            others.
        :param seed: Recorded; the figures of another seed are not comparable.
        :raises AttnQuantError: the models or the data do not work.
        """
        from attnquant.account import installed_versions
        from attnquant.suite import Entry, Recorded
        from attnquant.suite.measure import measured

        self._claim(name)
        wanted = {item: _metric(item, asked) for item, asked in metrics.items()}
        figures = measured(
            self._found(float_model),
            self._found(quantized_model),
            self._samples(data, seed),
            {item: self._resolved(metric, f"{name}, {item}") for item, metric in wanted.items()},
            limit=samples,
            provider=provider,
            where=f"Suite entry {name!r}",
        )
        self.entries[name] = Entry(
            name=name,
            seed=seed,
            metrics={item: Recorded(metric=metric, figures=figures[item]) for item, metric in wanted.items()},
            pair=self._pair(float_model, quantized_model, data, wanted, samples, provider),
            versions=installed_versions(),
        )

    def record(
        self,
        name: str,
        metric: str,
        *,
        float_value: float,
        quantized_value: float,
        tolerance: float,
        better: str = "higher",
        seed: int = 0,
    ) -> None:
        """Hold figures that the test computed against the file, when the test ends; once for each metric of an entry.

        :raises ValueError: `better` is neither "higher" nor "lower", the tolerance is negative, or the metric was given.
        """
        from attnquant.account import installed_versions
        from attnquant.suite import Entry, Figures, Metric, Recorded

        if better not in ("higher", "lower") or not tolerance >= 0:
            msg = f'expected better "higher" or "lower" and a tolerance of 0 or more, got {better!r} and {tolerance!r}'
            raise ValueError(msg)
        known = self.entries.get(name)
        if known is None:
            self._claim(name)
        elif metric in known.metrics or known.seed != seed:
            msg = f"{name!r}: {metric!r} was recorded already, or with another seed"
            raise ValueError(msg)
        figures = Figures(float_value=float(float_value), quantized_value=float(quantized_value))
        one = Recorded(metric=Metric(tolerance=float(tolerance), better=better), figures=figures)  # type: ignore[arg-type]
        metrics = {**(known.metrics if known else {}), metric: one}
        pair = known.pair if known else None
        self.entries[name] = Entry(name=name, seed=seed, metrics=metrics, pair=pair, versions=installed_versions())

    def finish(self) -> None:
        """Judge what was measured, or keep it for the file; once."""
        from attnquant.suite.run import rounded

        entries, self.entries = self.entries, {}
        if not entries:
            return
        if self._ledger.update:
            self._ledger.entries |= {name: rounded(entry) for name, entry in entries.items()}
            return
        report = self._judged(entries)
        if not report.ok:
            from attnquant.suite.pages import difference

            pytest.fail(difference(report, f"pytest {OPTION}"), pytrace=False)

    def _judged(self, entries: "Mapping[str, Entry]") -> "SuiteReport":
        from attnquant.suite.judge import SuiteReport, judged, versions_of

        recorded = self._ledger.recorded()
        rows = [row for name, entry in entries.items() for row in judged(recorded.get(name), entry)]
        known = [recorded[name] for name in entries if name in recorded]
        return SuiteReport(file=str(self._ledger.file), rows=tuple(rows), recorded_versions=versions_of(known))

    def _claim(self, name: str) -> None:
        owner = self._ledger.owners.setdefault(name, self._test)
        if owner != self._test or name in self.entries:
            msg = f"the suite has an entry {name!r} already, of {owner}: give each pair a name of its own"
            raise ValueError(msg)

    def _found(self, model: Any) -> Any:
        return self.folder / model if isinstance(model, str | Path) else model

    def _samples(self, data: Any, seed: int) -> Any:
        from attnquant.data import load_data
        from attnquant.suite.measure import function_in

        if callable(data):
            return data(seed)
        if isinstance(data, str) and data.rpartition(":")[0].endswith(".py"):
            return function_in(data, self.folder, "data")(seed)
        return load_data(self.folder / data) if isinstance(data, str | Path) else data

    def _resolved(self, metric: "Metric", where: str) -> "Metric":
        from attnquant.suite.run import resolved

        return resolved(metric, self.folder, where)

    def _pair(
        self, first: Any, second: Any, data: Any, metrics: "Mapping[str, Metric]", samples: int, provider: str
    ) -> "Pair | None":
        """The pair as the file names it; None where part of it is no path below the folder."""
        from attnquant.suite import Pair

        names = [_below(item, self.folder) for item in (first, second, data)]
        functions = [metric.function for metric in metrics.values() if metric.function is not None]
        if None in names or not all(isinstance(function, str) for function in functions):
            return None
        one, two, three = (str(name) for name in names)
        return Pair(float_model=one, quantized_model=two, data=three, samples=samples, provider=provider)


_LEDGER = pytest.StashKey[Ledger]()


def _metric(name: str, asked: "float | Metric") -> "Metric":
    from attnquant.suite import Metric
    from attnquant.suite.values import BUILT_IN

    if isinstance(asked, Metric):
        return asked
    better = BUILT_IN[name][0] if name in BUILT_IN else "higher"
    return Metric(tolerance=float(asked), better=better)


def _below(item: Any, folder: Path) -> str | None:
    """The path relative to the folder, with "/"; None for anything else."""
    if not isinstance(item, str | Path):
        return None
    path = (folder / item).resolve()
    return path.relative_to(folder.resolve()).as_posix() if path.is_relative_to(folder.resolve()) else None
