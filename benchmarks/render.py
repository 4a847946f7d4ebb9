"""docs/benchmarks.md and docs/benchmarks.png from the JSON files that benchmarks.run wrote: never edited by hand."""

import json
import math
import sys
from pathlib import Path
from typing import Any

COLUMNS = (
    "peer", "loads", "speed against float", "work", "ms", "of the limit", "SNR dB", "metric", "MB", "int8 linears",
    "float behind DQ", "quantizing s", "CPU s", "peak MB",
)  # fmt: skip
TOP_DB = 45  # a model that is still float is drawn here: above it nothing differs that anyone would see

HEADER = """# Benchmarks

Float and quantized models side by side: real trained models, held-out data, one machine. Written by
`python -m benchmarks.run` (see [benchmarks/README.md](../benchmarks/README.md)); do not edit.

- *speed against float*: median over pairs of interleaved runs of the float model and this one in one process, in
  brackets the quartiles; the same number of threads for both, no spinning. OpenVINO is another runtime: its speed is
  against ONNX Runtime's float.
- *work*: the same of processor time, which other programs on the machine hardly disturb.
- *of the limit*: the time that exact int8 kernels of the same shapes would leave, with everything else at its float time
  and no quantizing at all, by the model's own time in the same profile; then how much faster than float that limit is
  (`python -m benchmarks.limit`). At least 0.85 is wanted.
- *SNR*: 10 log10(sum x² / sum (x - y)²) over all test samples, worst output. *metric*: of the task, float's first.
- *int8 linears*: products with a constant weight that the optimized graph runs in an int8 kernel, of all such products.
  *float behind DQ*: float products that read a DequantizeLinear.
- *quantizing*: wall clock and CPU of the quantization alone, peak memory of its process.
- *run in turn*: all files of a model in one process, one after the other in each round (`python -m benchmarks.race`); speeds
  of rows above were measured at different times. As fast is 0.98 of attnquant's speed or work, as accurate 0.1 dB below it.
- CPUs of one instruction set differ in what int8 can gain: *int8 products ... as fast as float ones* under a table is
  measured with it (`python -m benchmarks.kernels`). Rows without it are older than that figure.
- Wall clock (*speed*, *ms*, *quantizing s*) is disturbed by what else the machine does while it is measured: the JSON files
  have the load average of each row. *work*, *CPU s*, SNR and counts are not.

![accuracy against speed](benchmarks.png)
"""


def write_report(folder: Path) -> None:
    """Write FOLDER/benchmarks.md, and the plot beside it if matplotlib is installed, from FOLDER/benchmarks/*.json."""
    reports = [json.loads(path.read_text()) for path in sorted((folder / "benchmarks").glob("*.json"))]
    (folder / "benchmarks.md").write_text(HEADER + "".join(map(section, reports)), encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plot: matplotlib isn't installed (pip install 'attnquant[demo]')", file=sys.stderr)
        return
    plot(reports, folder / "benchmarks.png")


def section(report: dict[str, Any]) -> str:
    """One model: a table with a row per peer, what failed below it, then machine and versions."""
    rows = report["rows"]
    counts = sorted({row["quantization"]["samples"] for row in rows if "samples" in row["quantization"]})
    calibrated = " or ".join(map(str, counts)) or "no"
    setting = f"{report['shape']}, {report['threads']} threads, {calibrated} calibration samples"
    lines = [f"\n## {report['model']}\n", f"{setting}; metric: {report['metric']}.\n"]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    measured = [row for row in rows if "timing" in row]
    if measured:
        lines.append(_float_line(measured))
    lines += [_line(row) for row in rows]
    if "race" in report:
        lines += ["", *_race(report["race"])]
    failed = [row for row in rows if "error" in row]
    lines += ["", *(f"- {row['peer']} failed {row['failed']}: `{_plain(row['error'])}`" for row in failed)]
    lines += ["", *_provenance(rows)]
    return "\n".join(lines) + "\n"


def _race(race: dict[str, Any]) -> list[str]:
    """Who is how fast where all files run in turn, and who is both as fast and as accurate as attnquant."""
    ahead = ", ".join(race["ahead"])
    verdict = f"as fast and as accurate as attnquant: {ahead}" if ahead else "no peer is both as fast and as accurate"
    table = ["| run in turn | speed against float | work | SNR dB |", "|---|---|---|---|"]
    table += [f"| {one['peer']} | {one['speed']:.2f} | {one['work']:.2f} | {one['snr_db']:.1f} |" for one in race["runners"]]
    return [f"In turn, {race['rounds']} rounds (load average {race['load']:.1f}): **{verdict}**.", "", *table]


def _float_line(rows: list[dict[str, Any]]) -> str:
    times = sorted(row["timing"]["float_ms"] for row in rows)
    metric, size = rows[0]["float_metric"], rows[0]["float_mb"]
    cells = ["float", "yes", "1", "1", f"{times[len(times) // 2]:.1f}", "", "", f"{metric:.4g}", f"{size:.1f}"]
    return "| " + " | ".join(cells + [""] * (len(COLUMNS) - len(cells))) + " |"


def _line(row: dict[str, Any]) -> str:
    cells = [f"{row['peer']} ({row['what']})"]
    if "error" in row:
        cells.append("no" if row["failed"] != "quantizing" else "-")
        cells += [""] * 9
    else:
        cells += ["yes", *_measured_cells(row)]
    cost = row["quantization"]
    cells += [f"{cost[key]:.0f}" if key in cost else "" for key in ("wall_s", "cpu_s", "peak_mb")]
    return "| " + " | ".join(cells) + " |"


def _measured_cells(row: dict[str, Any]) -> list[str]:
    timing, ran = row["timing"], row.get("executed")
    speed = f"{timing['speedup']:.2f} [{timing['speedup_low']:.2f}, {timing['speedup_high']:.2f}]"
    work = f"{timing['work']:.2f}" if "work" in timing else ""  # rows measured before it was recorded
    limit = row.get("limit")
    cells = [speed, work, f"{timing['model_ms']:.1f}"]
    cells += ["" if limit is None else f"{limit['reached']:.2f} of {limit['speedup']:.2f}x"]
    cells += [f"{row['snr_db']:.1f}", f"{row['metric']:.4g}", f"{row['size_mb']:.1f}"]
    if ran is None:
        return [*cells, "", ""]
    total = ran["int8_linears"] + ran["float_linears"]
    return [*cells, f"{ran['int8_linears']}/{total}", str(len(ran["float_behind_dequantize"]))]


def _provenance(rows: list[dict[str, Any]]) -> list[str]:
    """Machine and versions, once if all rows share them."""
    found: dict[str, list[str]] = {}
    for row in rows:
        machine = row["machine"]
        flags = ", ".join(machine["flags"]) or "no vector flags"
        versions = ", ".join(f"{name} {version}" for name, version in sorted(row["versions"].items()))
        own = row["quantization"].get("versions", {})
        extra = " + ".join(f"{name} {version}" for name, version in own.items() if row["versions"].get(name) != version)
        kernels = machine.get("int8_over_float")
        flags += "" if kernels is None else f"; int8 products {kernels:.2f}x as fast as float ones on one thread"
        text = f"{machine['cpu']} ({flags}), {machine['cores']} cores, {machine['system']}; {versions}"
        found.setdefault(text, []).append(row["peer"] + (f" ({extra})" if extra else ""))
    return [f"{text}: {', '.join(peers)}." for text, peers in found.items()]


def _plain(text: str) -> str:
    return text.replace("`", "'").replace("|", "/")


def plot(reports: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against speed, a panel for each model; up and right is better."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(reports)) or 1
    lines = math.ceil(len(reports) / columns) or 1
    figure, panels = plt.subplots(lines, columns, figsize=(5.2 * columns, 4.2 * lines), squeeze=False)
    for panel, report in zip(panels.flat, reports, strict=False):
        for row in report["rows"]:
            if "timing" not in row or not math.isfinite(row["snr_db"]):
                continue
            ours = row["peer"].startswith("attnquant")
            x, y = row["timing"]["speedup"], min(row["snr_db"], TOP_DB)
            marker = "*" if ours else ("s" if row["runtime"] == "openvino" else "o")
            panel.plot(x, y, marker, color="crimson" if ours else "steelblue", markersize=13 if ours else 6)
            panel.annotate(row["peer"], (x, y), xytext=(5, 4), textcoords="offset points", fontsize=7)
        panel.axvline(1, color="grey", linewidth=0.6, linestyle=":")
        panel.set_title(report["model"], fontsize=10)
        panel.set_xlabel("speed against float, ONNX Runtime", fontsize=8)
        panel.set_ylabel(f"SNR on held-out data, dB ({TOP_DB}: float)", fontsize=8)
        panel.margins(0.15)
    for panel in list(panels.flat)[len(reports) :]:
        panel.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    write_report(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
