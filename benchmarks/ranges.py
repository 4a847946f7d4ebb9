"""Ranges by measurement against every fixed setting: held-out accuracy of one calibration, in one run.

    python -m benchmarks.ranges [--models minilm dinov2] [--samples 32] [--held-out 32] [--seconds 30] [--out docs]

quantizes with each of NNCF's range estimators and strengths of SmoothQuant as a fixed recipe, with the default recipe and
with `measured`, and writes OUT/ranges.md and OUT/ranges.json; rows that are not asked for are kept.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

from attnquant import model as models
from attnquant.host import strengths
from attnquant.host.memory import HostMemory
from attnquant.host.run import HostArguments
from attnquant.markup import escaped, row
from attnquant.quantization import QuantizationResult, quantize_loaded
from attnquant.recipe import load
from attnquant.target import parse_target
from benchmarks.metrics import SignalToNoise
from benchmarks.models import MODELS, RealModel, samples
from benchmarks.run import ROOT, machine, versions
from benchmarks.runners import open_model

ESTIMATORS = ("minmax", "mean_minmax", "quantile", "histogram")
STRENGTHS = ("off", "0.25", "0.5", "0.65", "0.75", "0.85", "0.95")
SLOW = ("quantile", "histogram")
"""Estimators that take whole activations: by default with three strengths only."""
SEARCHED = ("int8", "measured")
NNCFS_FLOOR = 0.1
"""NNCF's own, for fixed settings."""

HEAD = """# Ranges by measurement

Signal to noise on held-out data, in dB, against the float model. All rows of a model share the calibration data, the
placement and the target's form. *Fixed* rows differ in ranges and SmoothQuant's strength alone: recipes that name one of
NNCF's range estimators (`minmax`, `mean_minmax`, which is NNCF's default, `quantile`, its MEAN_QUANTILE, and `histogram`)
and one strength for all linears (NNCF's default is 0.95), with one scale for all tokens. `int8` is the default recipe, which
tries two strengths and gives linears with outlier tokens a scale for each; `measured` searches, and rounds weights so that
they make up for each other (docs/accuracy.md). NNCF has no estimator by squared error for ONNX. Settings share the
observation of the samples, so the seconds of a row are those of a search whose samples are known already.

Written by `python -m benchmarks.ranges`; do not edit.
"""


def recipe(name: str, seconds: float) -> str:
    """TOML of a fixed setting, "ESTIMATOR STRENGTH", or of a recipe that searches for so many seconds."""
    if name in SEARCHED:
        return f'name = "{name}"\nextends = "{name}"\n[options]\nsearch_seconds = {seconds}\n'
    estimator, strength = name.split()
    smooth = "smooth_quant = false" if strength == "off" else f"smooth_quant_alpha = {strength}"
    linears = f'[linears]\noutliers = "int8"\n{smooth}'
    return f'name = "{name}"\nextends = "int8"\n{linears}\n[ranges]\nestimator = "{estimator}"\n'


def settings(every: bool) -> list[str]:
    """All rows; those of slow estimators with every strength only if asked."""
    fixed = [
        f"{estimator} {strength}"
        for estimator in ESTIMATORS
        for strength in (STRENGTHS if every or estimator not in SLOW else ("off", "0.5", "0.75"))
    ]
    return [*fixed, *SEARCHED]


class Judge:
    """Held-out samples with what the float model makes of them."""

    def __init__(self, model: RealModel, count: int) -> None:
        run = open_model(model.make(), threads=2)
        self._pairs = [(feeds, run(feeds)) for feeds in islice(model.test(), count)]

    def snr_db(self, path: Path) -> float:
        """Signal to noise of a model on all of them."""
        noise, run = SignalToNoise(), open_model(path, threads=2)
        for feeds, expected in self._pairs:
            noise.add(expected, run(feeds))
        return float(noise.value())


class Quantizer:
    """Quantizes one model with settings that share the observation of its samples."""

    def __init__(self, model: RealModel, count: int) -> None:
        self._source, self._data = models.load(model.make()), samples(model, count)
        self._memory = defaultdict[str, HostMemory](HostMemory)

    def __call__(self, text: str) -> QuantizationResult:
        asked = load(text)
        memory = self._memory[asked.linears.outliers]  # graphs with scales per token are others
        fixed = asked.name not in SEARCHED
        with mock.patch.object(strengths, "FLOOR", NNCFS_FLOOR if fixed else strengths.FLOOR):
            return quantize_loaded(
                self._source, self._data, recipe=asked, target=parse_target(), memory=memory,
                arguments=HostArguments(subset_size=len(self._data)),
            )  # fmt: skip


def measured(quantize: Quantizer, setting: str, seconds: float, judge: Judge) -> dict[str, Any]:
    """One row."""
    start = time.perf_counter()
    result = quantize(recipe(setting, seconds))
    wall = time.perf_counter() - start
    with tempfile.TemporaryDirectory(prefix="attnquant-ranges-") as folder:
        path = Path(folder, "model.onnx")
        result.save(path)
        value = judge.snr_db(path)
    notes = [note for note in result.notes if note.startswith("Ranges ")]
    return {"snr_db": round(value, 2), "wall_s": round(wall, 1), "note": " ".join(notes), "load": os.getloadavg()[0]}


def verdict(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """How the searched recipes stand to the best fixed setting."""
    fixed = {name: one["snr_db"] for name, one in rows.items() if name not in SEARCHED}
    if not fixed:
        return []
    best = max(fixed, key=fixed.__getitem__)
    said = []
    for name in SEARCHED:
        if name in rows:
            gap = rows[name]["snr_db"] - fixed[best]
            word = "beats" if gap > 0 else "equals" if gap == 0 else "does NOT beat"
            said.append(f"- `{name}` {word} the best of {len(fixed)} fixed settings, {best}: {gap:+.2f} dB.")
    return said


def page(found: dict[str, Any]) -> str:
    """docs/ranges.md."""
    lines = [HEAD]
    for name, one in sorted(found["models"].items()):
        rows = one["rows"]
        sizes = f"{one['samples']} calibration samples, {one['held_out']} held-out ones"
        lines += [f"## {name}", "", f"{sizes}; at most {one['seconds']:g} s of trials.", ""]
        lines += [row(["", *STRENGTHS]), row(["---"] * (len(STRENGTHS) + 1))]
        for estimator in ESTIMATORS:
            cells = [rows.get(f"{estimator} {strength}") for strength in STRENGTHS]
            lines.append(row([estimator, *("" if cell is None else f"{cell['snr_db']:.1f}" for cell in cells)]))
        lines += ["", row(["recipe", "dB", "search s", "load", "what it found"]), row(["---"] * 5)]
        for searched in SEARCHED:
            if (cell := rows.get(searched)) is not None:
                cells = [searched, f"{cell['snr_db']:.2f}", f"{cell['wall_s']:.1f}", f"{cell['load']:.1f}", cell["note"]]
                lines.append(row([escaped(text) for text in cells]))
        lines += ["", *verdict(rows), ""]
    where, packages = found["machine"], ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines.append(f"{where['cpu']} ({', '.join(where['flags'])}), {where['cores']} cores, {where['system']}; {packages}.")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Measure what is asked for and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranges")
    parser.add_argument("--models", nargs="*", default=["minilm", "dinov2"], choices=sorted(MODELS))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=30.0, help="options.search_seconds, as `measured` has it")
    parser.add_argument("--every", action="store_true", help="slow estimators with every strength")
    parser.add_argument("--settings", nargs="*", help='rows such as "minmax 0.5" or "measured"; all by default')
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    store = given.out / "ranges.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.is_file() else {"models": {}}
    found |= {"machine": machine(), "versions": versions()}
    for name in given.models:
        model = MODELS[name]
        quantizer, judge = Quantizer(model, given.samples), Judge(model, given.held_out)
        one = found["models"].get(name)
        if one is None or (one["samples"], one["held_out"]) != (given.samples, given.held_out):
            one = found["models"][name] = {"samples": given.samples, "held_out": given.held_out, "rows": {}}
        one["seconds"] = given.seconds
        for setting in given.settings or settings(given.every):
            one["rows"][setting] = measured(quantizer, setting, given.seconds, judge)
            print(name, setting, one["rows"][setting], flush=True)
            store.write_text(json.dumps(found, indent=1) + "\n")
            (given.out / "ranges.md").write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
