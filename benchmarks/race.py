"""All files of a model against each other: float, attnquant and its peers, run in turn on the same sample.

    python -m benchmarks.race --models dinov2 minilm --keep FOLDER

takes the files that `benchmarks.run --keep FOLDER` left there, and adds to docs/benchmarks/MODEL.json who is as fast and as
accurate as attnquant. Speeds of rows that were measured one after the other differ by what else the machine did meanwhile;
here it slows everybody.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.metrics import Feeds
from benchmarks.models import MODELS
from benchmarks.peers import PEERS
from benchmarks.render import write_report
from benchmarks.runners import Run, Took, open_model, took

OURS = "attnquant"
AS_FAST, AS_ACCURATE = 0.98, 0.1
"""Of attnquant's speed, and dB below its SNR: what counts as the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """One file's medians over the rounds: how much faster than float, in wall clock and in processor time; dB."""

    peer: str
    speed: float
    work: float
    snr_db: float


def rounds(runs: dict[str, Run], feeds: Feeds, *, count: int, warmup: int = 2) -> list[dict[str, Took]]:
    """Every file once in each round, the order turned round in every second one."""
    for run in runs.values():
        for _ in range(warmup):
            run(feeds)
    found = []
    for index in range(count):
        names = list(runs) if index % 2 else list(reversed(runs))
        found.append({name: took(runs[name], feeds) for name in names})
    return found


def runners(times: list[dict[str, Took]], snr: dict[str, float]) -> list[Runner]:
    """Against "float" of the same round, in the order of `snr`."""
    return [
        Runner(
            peer=name,
            speed=statistics.median(one["float"].wall / one[name].wall for one in times),
            work=statistics.median(one["float"].cpu / one[name].cpu for one in times),
            snr_db=db,
        )
        for name, db in snr.items()
    ]


def ahead(found: list[Runner]) -> list[str]:
    """Peers as fast, by wall clock or processor time, and as accurate as attnquant."""
    ours = next(one for one in found if one.peer == OURS)
    return [
        one.peer
        for one in found
        if not one.peer.startswith(OURS)
        and max(one.speed / ours.speed, one.work / ours.work) >= AS_FAST
        and one.snr_db >= ours.snr_db - AS_ACCURATE
    ]


def race(model: str, keep: Path, report: dict[str, Any], *, threads: int, count: int) -> dict[str, Any]:
    """What the report of a model gets: its files in `keep` that load and stay quantized, raced."""
    files = {name: (keep / f"{model}-{name}{PEERS[name].suffix}").resolve() for name in PEERS}
    snr = {row["peer"]: row["snr_db"] for row in report["rows"] if "snr_db" in row and files[row["peer"]].is_file()}
    if OURS not in snr:
        msg = f"{model}: expected a row of {OURS} and its file {files[OURS]}; run `benchmarks.run --keep {keep}` first"
        raise SystemExit(msg)
    real = MODELS[model]
    paths = {"float": real.make(), **{name: files[name] for name in snr}}
    times = rounds({name: open_model(path, threads=threads) for name, path in paths.items()}, real.timed(), count=count)
    found = runners(times, snr)
    return {
        "rounds": count, "load": os.getloadavg()[0], "runners": [asdict(one) for one in found], "ahead": ahead(found),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Race the models that are asked for; 1 where a peer is both as fast and as accurate."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race")
    parser.add_argument("--models", nargs="*", default=["dinov2", "minilm"], choices=list(MODELS))
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args(arguments)
    lost = False
    for model in given.models:
        path = given.out / "benchmarks" / f"{model}.json"
        report = json.loads(path.read_text())
        report["race"] = race(model, given.keep, report, threads=given.threads, count=given.rounds)
        path.write_text(json.dumps(report, indent=1) + "\n")
        lost |= bool(report["race"]["ahead"])
        print(json.dumps(report["race"]))
    write_report(given.out)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
