"""Where a model's time goes: ONNX Runtime's own profile, summed by operator, for two models side by side.

    python -m benchmarks.profiles MODEL FILE...

prints, for the float file of a real model and for each FILE, milliseconds per run and operator (2 threads, no spinning).
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.metrics import Feeds
from benchmarks.models import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTime:
    """One node of the optimized graph: operator, time per run in ms, shapes of what it reads and writes.

    Constants that the kernel packed beforehand are not among the shapes it reads. The time is the lowest decile over the
    runs: what else the machine does makes a node slower, never faster.
    """

    name: str
    operator: str
    ms: float
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]


def profile(path: Path, feeds: Feeds, *, threads: int, runs: int) -> list[NodeTime]:
    """Run with profiling on; times are per node, so that one disturbed run doesn't count."""
    return profiles([(path, feeds)], threads=threads, runs=runs)[0]


def profiles(models: Sequence[tuple[Path, Feeds]], *, threads: int, runs: int) -> list[list[NodeTime]]:
    """As `profile` of several files, run in turn: what else the machine does meanwhile slows all of them."""
    with tempfile.TemporaryDirectory() as folder:
        sessions = [_profiled(path, Path(folder) / str(place), threads) for place, (path, _) in enumerate(models)]
        for _ in range(runs + 2):
            for session, (_, feeds) in zip(sessions, models, strict=True):
                session.run(None, feeds)
        return [_nodes(json.loads(Path(session.end_profiling()).read_text())) for session in sessions]


def _profiled(path: Path, prefix: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.enable_profiling = True
    options.profile_file_prefix = str(prefix)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _nodes(events: list[dict[str, Any]]) -> list[NodeTime]:
    nodes: dict[str, list[dict[str, Any]]] = defaultdict(list)  # names are not unique, indices are within one graph
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes[event["args"]["node_index"] + event["name"]].append(event)
    return [_node_time(found) for found in nodes.values()]


def _node_time(events: list[dict[str, Any]]) -> NodeTime:
    """All events of one node; the first two runs are warm-up."""
    last = events[-1]
    return NodeTime(
        name=last["name"].removesuffix("_kernel_time"), operator=last["args"]["op_name"],
        ms=float(np.quantile([event["dur"] for event in events[2:] or events], 0.1)) / 1e3,
        inputs=_shapes(last["args"]["input_type_shape"]), outputs=_shapes(last["args"]["output_type_shape"]),
    )


def _shapes(listed: list[dict[str, list[int]]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for one in listed for shape in one.values())


def by_operator(nodes: list[NodeTime]) -> dict[str, tuple[float, int]]:
    """Operator -> (ms per run, number of nodes), slowest first."""
    found: dict[str, tuple[float, int]] = {}
    for node in nodes:
        ms, number = found.get(node.operator, (0.0, 0))
        found[node.operator] = (ms + node.ms, number + 1)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))


def model_and_files(program: str, arguments: list[str]) -> argparse.Namespace:
    """`MODEL [FILE ...] [--threads N] [--runs N]`, as this module and `benchmarks.limit` take it."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=20)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Print the table."""
    given = model_and_files("benchmarks.profiles", arguments)
    model = MODELS[given.model]
    feeds = model.timed()
    paths = [model.make(), *given.files]
    found = profiles([(path, feeds) for path in paths], threads=given.threads, runs=given.runs)
    tables = [by_operator(nodes) for nodes in found]
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
