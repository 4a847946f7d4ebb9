"""How the cost of quantizing grows with layers, sequence length and calibration samples: a plot for each.

    python -m benchmarks.growth [--axes layers length samples] [--out docs]

writes OUT/growth.json, OUT/growth.md and OUT/growth-AXIS.png. Points are measured in processes of their own, in seconds of
processor time; the model is the written-out decoder of benchmarks.scaling. Axes that are not asked for are kept.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cost import _timed as timed
from benchmarks.run import ROOT, machine, versions
from benchmarks.scaling import SIZE, WIDTH, decoder

AXES = {"layers": (4, 8, 16, 32, 64), "length": (64, 128, 256, 512, 1024), "samples": (8, 16, 32, 64, 128, 256)}
FIXED = {"layers": 4, "length": 64, "samples": 4}
"""What the other two are meanwhile."""
LINEAR = 1.15
"""Largest exponent of growth that counts as linear: times are noisy."""

HEAD = """# Cost as work grows

`attnquant.quantize` with its default recipe on a decoder written out in operators ({width} wide, computed shapes, rotary
embedding, grouped heads, an added mask, a gated feed-forward), and the same samples run once through the float model.
One of layers, sequence length and calibration samples grows; the others are {layers} layers, {length} tokens and {samples}
samples. Seconds of processor time, each point in a process of its own, imports left out. Written by
`python -m benchmarks.growth`; do not edit.

*exponent*: of a power law through the last three points: 1 is linear. Wanted: at most linear ({linear} here, times being
noisy), but for the length, where attention itself is quadratic: there it is held against that of the inference.
"""


def point(axis: str, value: int) -> dict[str, Any]:
    """Processor time of bare inference and of quantizing, and the peak of memory."""
    import onnxruntime

    from attnquant.quantization import quantize
    from attnquant.saving import to_proto

    work = {**FIXED, axis: value}
    each = len(decoder(1)[0].graph)
    model, layers = decoder(each * (work["layers"] - 1) + 1)
    assert layers == work["layers"]
    quantize(decoder(1)[0], _samples(2, 8), samples=2)  # imports are no part of it
    data, source = _samples(work["samples"], work["length"]), to_proto(model).SerializeToString()

    def infer() -> None:
        session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
        for sample in data:
            session.run(None, sample)

    bare, whole = timed(infer), timed(lambda: quantize(model, data, samples=len(data)))
    return {"bare_s": bare["cpu_s"], "quantize_s": whole["cpu_s"], "peak_mb": whole["peak_mb"], "load": os.getloadavg()[0]}


def _samples(count: int, length: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    shapes = {"x": (1, length, WIDTH), "mask": (1, 1, length, length), "cos": (length, SIZE), "sin": (length, SIZE)}
    return [{name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(count)]


def exponent(values: list[int], seconds: list[float]) -> float:
    """Of the power law that fits the last three points best."""
    return float(np.polyfit(np.log(values[-3:]), np.log(seconds[-3:]), 1)[0])


def verdict(axis: str, quantizing: float, bare: float) -> str:
    """A sentence on how fast it grows."""
    most = max(LINEAR, bare + LINEAR - 1) if axis == "length" else LINEAR
    word = "reached" if quantizing <= most else "NOT reached"
    return f"{word}: exponent {quantizing:.2f}, at most {most:.2f} wanted (inference alone {bare:.2f})"


def page(found: dict[str, Any]) -> str:
    """docs/growth.md."""
    lines = [HEAD.format(width=WIDTH, linear=LINEAR, **FIXED)]
    for axis, points in found["axes"].items():
        values = sorted(map(int, points))
        rows = [points[str(value)] for value in values]
        grown = [exponent(values, [row[key] for row in rows]) for key in ("quantize_s", "bare_s")]
        lines += [f"## {axis}", "", f"![{axis}](growth-{axis}.png)", ""]
        lines += [f"| {axis} | quantizing s | inference s | peak MB | load |", "|---|---|---|---|---|"]
        lines += [
            f"| {value} | {row['quantize_s']:.2f} | {row['bare_s']:.3f} | {row['peak_mb']:.0f} | {row['load']:.1f} |"
            for value, row in zip(values, rows, strict=True)
        ]
        lines += ["", f"{verdict(axis, *grown)}.", ""]
    where, packages = found["machine"], ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    flags = ", ".join(where["flags"])
    lines.append(f"{where['cpu']} ({flags}), {where['cores']} cores, {where['system']}; {packages}.")
    return "\n".join(lines) + "\n"


def plot(axis: str, points: dict[str, Any], path: Path) -> None:
    """Seconds and megabytes over what grows, both axes logarithmic, with a line of slope 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values = sorted(map(int, points))
    rows = [points[str(value)] for value in values]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for key, name, colour in (("quantize_s", "attnquant.quantize", "crimson"), ("bare_s", "float inference", "steelblue")):
        left.plot(values, [row[key] for row in rows], "o-", color=colour, label=name)
    first = rows[0]["quantize_s"]
    left.plot(values, [first * value / values[0] for value in values], ":", color="grey", label="linear")
    right.plot(values, [row["peak_mb"] for row in rows], "o-", color="crimson")
    for panel, label in ((left, "seconds of processor time"), (right, "peak memory, MB")):
        panel.set_xscale("log", base=2)
        panel.set_xlabel(axis, fontsize=9)
        panel.set_ylabel(label, fontsize=9)
        panel.set_xticks(values, [str(value) for value in values])
    left.set_yscale("log")
    left.legend(fontsize=8)
    right.set_ylim(bottom=0, top=1.2 * max(row["peak_mb"] for row in rows))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _child(axis: str, value: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.growth", "--child", axis, str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str]) -> int:
    """Measure the axes that are asked for and write everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth")
    parser.add_argument("--axes", nargs="*", default=list(AXES), choices=list(AXES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        print(json.dumps(point(given.child[0], int(given.child[1]))))
        return 0
    store = given.out / "growth.json"
    found: dict[str, Any] = json.loads(store.read_text()) if store.is_file() else {"axes": {}}
    found |= {"machine": machine(), "versions": versions()}
    for axis in given.axes:
        found["axes"][axis] = {str(value): _child(axis, value) for value in AXES[axis]}
        store.write_text(json.dumps(found, indent=1) + "\n")
        (given.out / "growth.md").write_text(page(found))
        plot(axis, found["axes"][axis], given.out / f"growth-{axis}.png")
    return int(any(not math.isfinite(row["quantize_s"]) for points in found["axes"].values() for row in points.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
