"""The two steps of a row, each in a process of its own so that a crash costs one row and its memory can be read.

    python -m benchmarks.tasks quantize MODEL PEER FILE --samples N
    python -m benchmarks.tasks measure MODEL FILE --threads 2 --pairs 30

print one JSON object as their last line.
"""

import argparse
import contextlib
import fcntl
import importlib
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.executed import executed
from benchmarks.limit import distance
from benchmarks.metrics import SignalToNoise
from benchmarks.models import MODELS, RealModel, samples
from benchmarks.peers import PEERS, Peer
from benchmarks.runners import load_as_a_user_would, open_model, paired

MEGABYTE = 1 << 20


def quantize(model: RealModel, peer: Peer, target: Path, *, count: int) -> dict[str, Any]:
    """Run one peer: seconds of wall clock and CPU and peak memory in MB. Importing the peer and reading data come before."""
    for module in peer.needs:
        importlib.import_module(module)
    source, data = model.make(), samples(model, count)
    before = resource.getrusage(resource.RUSAGE_SELF)
    start = time.perf_counter()
    peer.quantize(source, data, target)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "samples": len(data),
        "wall_s": wall,
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mb": after.ru_maxrss * 1024 / MEGABYTE,  # kilobytes on Linux
        "before_mb": before.ru_maxrss * 1024 / MEGABYTE,
        "versions": {package: importlib.metadata.version(package) for package in peer.packages},
    }


def size_mb(path: Path) -> float:
    """Size of a model with the files of external data or weights that go with it."""
    companions = [path.with_suffix(".bin")] if path.suffix == ".xml" else list(path.parent.glob(f"{path.name}[._]data"))
    return sum(file.stat().st_size for file in [path, *companions] if file.is_file()) / MEGABYTE


def measure(model: RealModel, path: Path, *, threads: int, pairs: int, bound: bool = False) -> dict[str, Any]:
    """Load, compare with float on the held-out data, time in pairs, and read what int8 really executes.

    :param bound: Hold its profile against the bound of benchmarks.limit too.
    """
    found: dict[str, Any] = {"size_mb": size_mb(path), "float_mb": size_mb(model.make())}
    load_as_a_user_would(path, next(model.calibration(1)))
    found["loads"] = True
    reference, quantized = open_model(model.make(), threads=threads), open_model(path, threads=threads)
    noise, float_score, score = SignalToNoise(), model.metric.start(), model.metric.start()
    for feeds in model.test():
        expected, got = reference(feeds), quantized(feeds)
        noise.add(expected, got)
        score.add(feeds, expected, got)
        float_score.add(feeds, expected, expected)
    found |= {"snr_db": noise.value(), "metric": score.value(), "float_metric": float_score.value()}
    with _alone():
        found["load_average"] = os.getloadavg()[0]
        found["timing"] = asdict(paired(reference, quantized, model.timed(), pairs=pairs))
        if bound:
            found["limit"] = distance(model.make(), path, model.timed(), threads=threads)
    if path.suffix == ".onnx":
        found["executed"] = asdict(executed(path))
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold the lock file that ATTNQUANT_BENCH_LOCK names, so that two benchmarks on one machine don't time each other."""
    name = os.environ.get("ATTNQUANT_BENCH_LOCK")
    if not name:
        yield
        return
    with open(name, "w", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str]) -> int:
    """Do one step; a failure is printed as {"error": ...} and exit code 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tasks")
    steps = parser.add_subparsers(dest="step", required=True)
    one = steps.add_parser("quantize")
    one.add_argument("model", choices=sorted(MODELS))
    one.add_argument("peer", choices=sorted(PEERS))
    one.add_argument("file", type=Path)
    one.add_argument("--samples", type=int, default=300)
    two = steps.add_parser("measure")
    two.add_argument("model", choices=sorted(MODELS))
    two.add_argument("file", type=Path)
    two.add_argument("--threads", type=int, default=2)
    two.add_argument("--pairs", type=int, default=30)
    two.add_argument("--bound", action="store_true")
    given = parser.parse_args(arguments)
    model = MODELS[given.model]
    try:
        if given.step == "quantize":
            found = quantize(model, PEERS[given.peer], given.file, count=given.samples)
        else:
            found = measure(model, given.file, threads=given.threads, pairs=given.pairs, bound=given.bound)
    except Exception as error:  # a peer may raise anything: its row gets the reason
        print(json.dumps({"error": f"{type(error).__name__}: {_first_line(error)}"}))
        return 1
    print(json.dumps(found))
    return 0


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "no message")[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
