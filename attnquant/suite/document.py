"""A suite's file: TOML to entries and back. Every key is known, nothing is null, no tolerance has a default."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attnquant.errors import DataError
from attnquant.files import write_text
from attnquant.suite.values import BUILT_IN, Entry, Figures, Metric, Pair, Recorded

HEAD = """# Figures of float and quantized models, which later runs may not fall behind (docs/suites.md of attnquant).
# Rewritten by `pytest --attnquant-update` and `attnquant suite run FILE.toml --update`: read the difference before a commit.
"""
_ENTRY = {"float": str, "quantized": str, "data": str, "samples": int, "provider": str, "seed": int,
          "versions": dict, "metrics": dict}  # fmt: skip
_METRIC = {"float": float, "quantized": float, "tolerance": float, "better": str, "function": str}
_PAIR = ("float", "quantized", "data")
_KINDS = {str: "a text", int: "a whole number", float: "a number", dict: "a table"}


def read(path: Path) -> dict[str, Entry]:
    """{name: entry} of a file.

    :raises DataError: the file is missing, no TOML, or holds something that a suite does not have; the message says where.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as problem:
        msg = f"Suite {str(path)!r}: expected a TOML file, got {type(problem).__name__}: {problem}"
        raise DataError(msg) from None
    return {name: _entry(name, table, f"Suite {str(path)!r}, [{name}]") for name, table in content.items()}


def write(path: Path, entries: Iterable[Entry]) -> None:
    """Write the file atomically, entries by name.

    :raises DataError: it can't be written.
    """
    blocks = [_lines(entry) for entry in sorted(entries, key=lambda entry: entry.name)]
    write_text(path, HEAD + "".join("\n" + "\n".join(lines) + "\n" for lines in blocks), DataError)


def _entry(name: str, table: Any, where: str) -> Entry:
    known = _checked(table, _ENTRY, where)
    given = [key for key in _PAIR if key in known]
    if given and len(given) < len(_PAIR):
        msg = f"{where}: expected all of {', '.join(_PAIR)}, or none where a test makes the models; got {', '.join(given)}."
        raise DataError(msg)
    if "seed" not in known or not known.get("metrics"):
        msg = f"{where}: expected seed and at least one [{name}.metrics.NAME], got {sorted(known)!r}."
        raise DataError(msg)
    samples = known.get("samples", 100)
    if samples < 1:
        msg = f"{where}: samples: expected 1 or more, got {samples}."
        raise DataError(msg)
    pair = Pair(
        float_model=known["float"], quantized_model=known["quantized"], data=known["data"], samples=samples,
        provider=known.get("provider", "cpu"),
    ) if given else None  # fmt: skip
    metrics = {item: _recorded(item, content, f"{where}.metrics.{item}") for item, content in known["metrics"].items()}
    versions = {package: str(version) for package, version in known.get("versions", {}).items()}
    return Entry(name=name, seed=known["seed"], metrics=metrics, pair=pair, versions=versions)


def _recorded(name: str, table: Any, where: str) -> Recorded:
    known = _checked(table, _METRIC, where)
    if "tolerance" not in known or not known["tolerance"] >= 0:
        msg = f"{where}: expected a tolerance of 0 or more, got {known.get('tolerance')!r}. There is no default."
        raise DataError(msg)
    better = known.get("better", BUILT_IN[name][0] if name in BUILT_IN else None)
    if better not in ("higher", "lower"):
        msg = f'{where}: better: expected "higher" or "lower", got {better!r}.'
        raise DataError(msg)
    if ("float" in known) != ("quantized" in known):
        msg = f"{where}: expected both of float and quantized, or neither before they are recorded."
        raise DataError(msg)
    figures = Figures(float_value=known["float"], quantized_value=known["quantized"]) if "float" in known else None
    metric = Metric(tolerance=known["tolerance"], better=better, function=known.get("function"))
    return Recorded(metric=metric, figures=figures)


def _checked(table: Any, kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """The table with numbers as floats where those are meant."""
    if not isinstance(table, dict):
        msg = f"{where}: expected a table, got {table!r}."
        raise DataError(msg)
    found = {}
    for key, value in table.items():
        kind = kinds.get(key)
        if kind is None:
            msg = f"{where}: unknown key {key!r}, expected {', '.join(kinds)}."
            raise DataError(msg)
        number = kind is float and isinstance(value, int | float) and not isinstance(value, bool)
        if not number and (not isinstance(value, kind) or isinstance(value, bool)):
            msg = f"{where}: {key}: expected {_KINDS[kind]}, got {value!r}."
            raise DataError(msg)
        found[key] = float(value) if number else value
    return found


def _lines(entry: Entry) -> list[str]:
    name = _text(entry.name)
    lines = [f"[{name}]"]
    if entry.pair is not None:
        pair = entry.pair
        lines += [f"float = {_text(pair.float_model)}", f"quantized = {_text(pair.quantized_model)}"]
        lines += [f"data = {_text(pair.data)}", f"samples = {pair.samples}", f"provider = {_text(pair.provider)}"]
    lines += [f"seed = {entry.seed}", "", f"[{name}.versions]"]
    lines += [f"{_text(package)} = {_text(version)}" for package, version in sorted(entry.versions.items())]
    for item, recorded in sorted(entry.metrics.items()):
        lines += ["", f"[{name}.metrics.{_text(item)}]", *_metric_lines(recorded)]
    return lines


def _metric_lines(recorded: Recorded) -> list[str]:
    metric, figures = recorded.metric, recorded.figures
    lines = [] if figures is None else [f"float = {figures.float_value!r}", f"quantized = {figures.quantized_value!r}"]
    lines += [f"tolerance = {metric.tolerance!r}", f"better = {_text(metric.better)}"]
    return [*lines, f"function = {_text(metric.function)}"] if isinstance(metric.function, str) else lines


def _text(value: str) -> str:
    """A bare key or a basic string; JSON's escapes are TOML's, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
