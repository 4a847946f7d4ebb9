"""Where a model's time goes: ONNX Runtime's own profile, summed by operator, for two models side by side.

    python -m benchmarks.profiles MODEL FILE...

prints, for the float file of a real model and for each FILE, milliseconds per run and operator (2 threads, no spinning).
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.metrics import Feeds
from benchmarks.models import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTime:
    """One node of the optimized graph: its operator and its median time over the runs, in ms."""

    name: str
    operator: str
    ms: float


def profile(path: Path, feeds: Feeds, *, threads: int, runs: int) -> list[NodeTime]:
    """Run with profiling on; the medians are per node, so that one disturbed run doesn't count."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for _ in range(runs + 2):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            times[event["name"].removesuffix("_kernel_time"), event["args"]["op_name"]].append(event["dur"] / 1e3)
    # Nodes may share a name; each run then adds the same number of events, so totals are means over the runs kept.
    found = []
    for (name, operator), values in times.items():
        per_run = max(1, round(len(values) / (runs + 2)))
        sums = [sum(values[start : start + per_run]) for start in range(2 * per_run, len(values), per_run)]
        found.append(NodeTime(name=name, operator=operator, ms=statistics.median(sums or values)))
    return found


def by_operator(nodes: list[NodeTime]) -> dict[str, tuple[float, int]]:
    """Operator -> (ms per run, number of nodes), slowest first."""
    found: dict[str, tuple[float, int]] = {}
    for node in nodes:
        ms, number = found.get(node.operator, (0.0, 0))
        found[node.operator] = (ms + node.ms, number + 1)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiles")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args(arguments)
    model = MODELS[given.model]
    feeds = model.timed()
    paths = [model.make(), *given.files]
    tables = [by_operator(profile(path, feeds, threads=given.threads, runs=given.runs)) for path in paths]
    operators = dict.fromkeys(operator for table in tables for operator in table)
    print("| operator | " + " | ".join(path.name for path in paths) + " |")
    print("|---|" + "---|" * len(paths))
    for operator in sorted(operators, key=lambda name: -max(table.get(name, (0.0, 0))[0] for table in tables)):
        cells = [f"{table[operator][0]:.2f} ({table[operator][1]})" if operator in table else "" for table in tables]
        print(f"| {operator} | " + " | ".join(cells) + " |")
    print("| all | " + " | ".join(f"{sum(ms for ms, _ in table.values()):.2f}" for table in tables) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
