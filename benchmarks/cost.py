"""What quantizing costs: bare inference of the calibration data, NNCF alone and attnquant, each in a process of its own.

    python -m benchmarks.cost --models minilm dinov2 --samples 32 300 --layers 8 16 32 64 --out docs

writes DIR/cost.json and DIR/cost.md. Rows that are not asked for are kept; each has the machine's load average.
`--rows bare attnquant` leaves NNCF alone out, which takes most of the time.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.models import MODELS, samples
from benchmarks.run import ROOT, machine, step, versions
from benchmarks.scaling import SIZE, WIDTH, decoder

ROWS = ("bare", "nncf", "attnquant")
TIMES, SECONDS, SHARE, PER_LAYER = 2, 10, 1 / 3, 0.1
"""The bounds: wall time in bare inferences and seconds, its share of NNCF's, seconds a layer of placement."""


def bare(name: str, count: int) -> dict[str, Any]:
    """The float model over the calibration data in a default session; making it counts."""
    import onnxruntime

    model = MODELS[name]
    path, data = model.make(), samples(model, count)

    def work() -> None:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for sample in data:
            session.run(None, sample)

    return _timed(work)


def layered(layers: int) -> dict[str, Any]:
    """Placement and quantization of a written-out decoder, from two samples."""
    from attnquant.quantization import plan, quantize

    each = len(decoder(1)[0].graph)
    model, made = decoder(each * (layers - 1) + 1)
    random = np.random.default_rng(0)
    shapes = {"x": (1, 16, WIDTH), "mask": (1, 1, 16, 16), "cos": (16, SIZE), "sin": (16, SIZE)}
    data = [{name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(2)]
    assert made == layers
    plan(decoder(1)[0], feeds=data[0])  # imports are no part of it
    quantize(decoder(1)[0], data)
    placed, whole = _timed(lambda: plan(model, feeds=data[0])), _timed(lambda: quantize(model, data))
    return {"nodes": each * layers, "placement": placed, "quantizing": whole}


def _timed(work: Any) -> dict[str, Any]:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "before_mb": before.ru_maxrss / 1024,
        "peak_mb": after.ru_maxrss / 1024,
    }


def measured(name: str, count: int, row: str, folder: Path) -> dict[str, Any]:
    """One row: bare inference here in a child, the quantizations as benchmarks.tasks does them."""
    if row == "bare":
        return _child("bare", name, str(count))
    return step(sys.executable, folder, "quantize", name, row, str(folder / "out.onnx"), "--samples", str(count))


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cost", "--child", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr.strip()[-300:]}


INTRODUCTION = f"""# Cost of quantizing

Bare inference of the calibration data in ONNX Runtime, `nncf.quantize` alone, and `attnquant.quantize` with its default
recipe (it tries two strengths of SmoothQuant on at most 32 samples), each in a process of its own. Written by
`python -m benchmarks.cost`; do not edit. Wall clock is disturbed by what else the machine does: *load* is its load average
at the end of the row. CPU time is disturbed less.

Statistics are reduced by nodes of the session, so neither time nor memory grows with the size of a sample beyond the
inference itself. Minima and maxima have the same bits as NNCF's own, means differ by the order of their float32 sums, and
NaN are passed over. One pass finds what both of NNCF's steps and every trial ask of a sample. What is left beside it: a
pass over eight samples that looks for outlier tokens, four calls of NNCF (one on a single sample, to learn what it asks,
one for each strength, one for the result) and three unoptimized runs over the samples that judge the trials, four to eight.
With few samples these fixed parts dominate. Imports come before the clock in every row.

Wanted: wall time at most {TIMES} x bare + {SECONDS} s, and at most a third of NNCF's.

| model | samples | row | wall s | CPU s | peak MB | load | wall / bare | CPU / bare | wall / nncf | CPU / nncf |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def text(found: dict[str, Any]) -> str:
    """docs/cost.md."""
    models = sorted(found["models"].items(), key=lambda item: (item[0].split()[0], int(item[0].split()[1])))
    lines = [_line(key, row, rows) for key, rows in models for row in ROWS if row in rows]
    lines += ["", "## Reached", "", *(_verdict(key, rows) for key, rows in models)]
    lines += ["", "## Layers", "", "A decoder written out in operators, two samples; seconds of CPU time.", ""]
    lines += ["| layers | nodes | placement | a layer | quantizing | a layer | peak MB |", "|---|---|---|---|---|---|---|"]
    lines += [_layers(int(layers), row) for layers, row in sorted(found["layers"].items(), key=lambda item: int(item[0]))]
    where, packages = found["machine"], ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += ["", f"{where['cpu']} ({', '.join(where['flags'])}), {where['cores']} cores, {where['system']}; {packages}."]
    return INTRODUCTION + "\n".join(lines) + "\n"


def _layers(layers: int, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {layers} | {row['error']} |"
    placed, whole = row["placement"]["cpu_s"], row["quantizing"]["cpu_s"]
    cells = [str(row["nodes"]), f"{placed:.2f}", f"{placed / layers:.3f}", f"{whole:.1f}", f"{whole / layers:.2f}"]
    return f"| {layers} | {' | '.join(cells)} | {row['quantizing']['peak_mb']:.0f} |"


def _line(key: str, name: str, rows: dict[str, Any]) -> str:
    row = rows[name]
    if "error" in row:
        return f"| {key.replace(' ', ' | ')} | {name} | {row['error']} |"

    def ratio(other: str, field: str) -> str:
        base = rows.get(other, {}).get(field)
        return f"{row[field] / base:.2f}" if base and name != other and (other == "bare" or name == "attnquant") else ""

    cells = [f"{row['wall_s']:.1f}", f"{row['cpu_s']:.1f}", f"{row['peak_mb']:.0f}", f"{row['load']:.1f}"]
    cells += [ratio(other, field) for other in ("bare", "nncf") for field in ("wall_s", "cpu_s")]
    return f"| {key.replace(' ', ' | ')} | {name} | {' | '.join(cells)} |"


def _verdict(key: str, rows: dict[str, Any]) -> str:
    ours, base, peer = (rows.get(name, {}).get("wall_s") for name in ("attnquant", "bare", "nncf"))
    said = []
    if ours and base:
        limit = TIMES * base + SECONDS
        said.append(f"{'reached' if ours <= limit else 'NOT reached'}: {ours:.1f} s of {limit:.1f} s for bare inference")
    if ours and peer:
        word = "reached" if ours <= peer * SHARE else "NOT reached"
        said.append(f"{word}: {ours / peer:.2f} of NNCF's time, {SHARE:.2f} wanted")
    return f"- {key} samples: {'; '.join(said) or 'not measured'}."


def main(arguments: list[str]) -> int:
    """Measure what is asked for and write both files; 1 where a row fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost")
    parser.add_argument("--models", nargs="*", default=["minilm", "dinov2"], choices=sorted(MODELS))
    parser.add_argument("--samples", nargs="*", type=int, default=[32, 300])
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=ROWS)
    parser.add_argument("--layers", nargs="*", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        kind, *rest = given.child
        print(json.dumps(bare(rest[0], int(rest[1])) if kind == "bare" else layered(int(rest[0]))))
        return 0
    store = given.out / "cost.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.is_file() else {"models": {}, "layers": {}}
    found |= {"machine": machine(), "versions": versions()}
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any], place: dict[str, Any], key: str) -> None:
        rows.append(row)
        place[key] = {**row, "load": os.getloadavg()[0]}
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(found, indent=1) + "\n")
        (given.out / "cost.md").write_text(text(found))

    for count in given.samples:
        for name in given.models:
            for row in given.rows:
                with tempfile.TemporaryDirectory(prefix="attnquant-cost-") as folder:
                    keep(measured(name, count, row, Path(folder)), found["models"].setdefault(f"{name} {count}", {}), row)
    for layers in given.layers:
        keep(_child("layers", str(layers)), found["layers"], str(layers))
    failed = [row["error"] for row in rows if "error" in row]
    print("\n".join(failed) or f"wrote {given.out / 'cost.md'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
