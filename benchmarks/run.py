"""Float, attnquant and its peers, side by side on the same real models and data, in one command.

    python -m benchmarks.run --models dinov2 minilm --peers all --out docs

writes DIR/benchmarks/MODEL.json for each model, and DIR/benchmarks.md and DIR/benchmarks.png from all of them. Rows of
peers that are not asked for are kept, so that one peer can be measured again. A peer that fails gets a row with its reason.
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from attnquant.executors import EXECUTORS, run_tasks
from attnquant.target import processor
from benchmarks.kernels import machine_ratio
from benchmarks.models import MODELS
from benchmarks.peers import PEERS, Peer
from benchmarks.render import write_report

STEP_TIMEOUT = 3 * 3600  # seconds for one quantization or one measurement
CPU_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
ROOT = Path(__file__).resolve().parents[1]


def machine() -> dict[str, Any]:
    """The processor, its instructions that decide int8 speed, cores, system, and the speed of its int8 products."""
    fields = processor()
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in CPU_FLAGS if flag in present],
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "int8_over_float": round(machine_ratio(), 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of what every row uses."""
    found = {"python": platform.python_version()}
    for package in ("onnxruntime", "nncf", "onnx", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def step(python: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run one step of benchmarks.tasks in its own process and return what it found, {"error": reason} if it failed.

    It runs in `folder`: some peers leave files of external data in the working directory.
    """
    command = [python, "-m", "benchmarks.tasks", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment, timeout=STEP_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {STEP_TIMEOUT} s"}
    last = done.stdout.strip().splitlines()[-1:]
    if last and last[0].startswith("{"):
        found: dict[str, Any] = json.loads(last[0])
        return found
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
    return {"error": f"process ended with {done.returncode}: {said[0] if said else 'no message'}"[:300]}


def row(
    model: str, peer: Peer, folder: Path, options: argparse.Namespace, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Quantize with one peer and measure the file; what failed and why is part of the row.

    With --reuse, the file that is kept from the row `before` is measured again.
    """
    found: dict[str, Any] = {"peer": peer.name, "what": peer.what, "runtime": peer.runtime}
    python = options.pythons.get(peer.name, sys.executable)
    target = folder.resolve() / f"{model}-{peer.name}{peer.suffix}"
    if options.reuse and before is not None and target.is_file():
        quantization = before["quantization"]
    else:
        quantization = step(python, folder, "quantize", model, peer.name, str(target), "--samples", str(options.samples))
    found["quantization"] = quantization
    if "error" in quantization:
        return {**found, "error": _local(quantization["error"], folder), "failed": "quantizing"}
    chosen = ("--threads", str(options.threads), "--pairs", str(options.pairs))
    bound = ("--bound",) if peer.name.startswith("attnquant") else ()
    measured = step(sys.executable, folder, "measure", model, str(target), *chosen, *bound)
    if "error" in measured:
        return {**found, "error": _local(measured["error"], folder), "failed": "loading or running"}
    return {**found, **measured}


def _local(text: str, folder: Path) -> str:
    """A message without the path of the folder that this machine happens to use."""
    return text.replace(f"{folder.resolve()}{os.sep}", "")


def benchmark(model: str, peers: list[str], options: argparse.Namespace) -> None:
    """Measure the asked peers on one model. Rows in turn are written one by one, so that nothing is lost when stopped."""
    lists = [peers] if options.executor == "ray" else [[peer] for peer in peers]
    before = _read(options.out / "benchmarks" / f"{model}.json")
    for listed in lists:
        tasks = [(model, peer, options, before.get(peer)) for peer in listed]
        done = run_tasks(_measured, tasks, executor=options.executor, workers=0)  # its steps are processes
        found = {peer: one.value or _lost(peer, one.lost) for peer, one in zip(listed, done, strict=True)}
        _write(model, {**_read(options.out / "benchmarks" / f"{model}.json"), **found}, options)


def _measured(task: tuple[str, str, argparse.Namespace, dict[str, Any] | None]) -> dict[str, Any]:
    """One row, with when and where it was measured: the task of a worker."""
    model, name, options, before = task
    print(f"{model}: {name}", file=sys.stderr, flush=True)
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with tempfile.TemporaryDirectory(dir=options.scratch) as temporary:
        found = row(model, PEERS[name], options.keep or Path(temporary), options, before)
    return {**found, "measured": stamp, "machine": machine(), "versions": versions()}


def _lost(name: str, why: str) -> dict[str, Any]:
    peer = PEERS[name]
    return {
        "peer": name, "what": peer.what, "runtime": peer.runtime, "error": why, "failed": "its worker",
        "machine": machine(), "versions": versions(),
    }  # fmt: skip


def _read(path: Path) -> dict[str, dict[str, Any]]:
    kept = json.loads(path.read_text())["rows"] if path.is_file() else []
    return {found["peer"]: found for found in kept}


def _write(model: str, rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    path, real = options.out / "benchmarks" / f"{model}.json", MODELS[model]
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "model": model, "shape": real.shape, "metric": real.metric.name, "higher_is_better": real.metric.higher_is_better,
        "threads": options.threads, "rows": [rows[name] for name in PEERS if name in rows],
    }  # fmt: skip
    if path.is_file() and (race := json.loads(path.read_text()).get("race")):
        report["race"] = race  # of benchmarks.race
    path.write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Run what the command line asks for and write the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", nargs="*", default=["dinov2", "minilm"], help=f"all, or some of {', '.join(MODELS)}")
    parser.add_argument("--peers", nargs="*", default=["all"], help=f"all, or some of {', '.join(PEERS)}")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder for the report")
    parser.add_argument("--samples", type=int, default=300, help="calibration samples")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40, help="timed pairs of float and quantized model")
    parser.add_argument("--keep", type=Path, help="keep the quantized models in this folder")
    parser.add_argument("--reuse", action="store_true", help="measure the models in --keep again instead of quantizing")
    parser.add_argument("--scratch", type=Path, help="folder for temporary files")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH",
        help="quantize with this peer in another Python, for peers whose dependencies do not go together",
    )
    parser.add_argument("--executor", choices=EXECUTORS, default="local", help="rows here in turn, or on a Ray cluster")
    options = parser.parse_args(arguments)
    options.pythons = dict(pair.split("=", 1) for pair in options.python)
    models, peers = _chosen(parser, options.models, MODELS), _chosen(parser, options.peers, PEERS)
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    for model in models:
        benchmark(model, peers, options)
    write_report(options.out)
    return 0


def _chosen(parser: argparse.ArgumentParser, asked: list[str], known: dict[str, Any]) -> list[str]:
    unknown = [name for name in asked if name not in known and name != "all"]
    if unknown:
        parser.error(f"expected all or some of {', '.join(known)}, got {', '.join(unknown)}")
    return list(known) if "all" in asked else asked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
