"""The oracle of ai.onnx Attention against onnx itself: function body, reference and test cases, in every release of onnx.

    python -m benchmarks.specification            # the table of docs/conformance.md; 1 where something is not explained

Each release lies in a folder of its own (benchmarks.runtimes) and is read in a subprocess. A case of the suite, or of
`onnx.backend.test.case.node`, is held to the oracle in the reading of that release.
"""

import importlib
import inspect
import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from onnx.reference import ReferenceEvaluator

from attnquant.conformance.case import Array, Case, largest_difference
from attnquant.conformance.cases import all_cases
from attnquant.conformance.disagreements import DISAGREEMENTS
from attnquant.conformance.readings import reading
from benchmarks.runtimes import environment, runtime_folder

RELEASES = ("1.18.0", "1.19.1", "1.20.1", "1.21.0", "1.22.0", "1.23.2")
SOURCES = ("function body", "reference", "test cases")
COLUMNS = ("onnx", "reading", *SOURCES, "explained by")


def main(arguments: list[str]) -> int:
    """Print the table, or in a subprocess (--work) what one release says."""
    if arguments == ["--work"]:
        print(json.dumps([(row.case, row.source, row.difference) for row in compared()]))
        return 0
    rows, wrong = table()
    print("\n".join(f"| {' | '.join(row)} |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows)))
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def table() -> tuple[list[list[str]], list[str]]:
    """(a row of COLUMNS for each release, what is not explained)."""
    rows, wrong = [], list[str]()
    for release in RELEASES:
        print(f"onnx {release}", file=sys.stderr)
        row, unexplained = summary(release, findings(release))
        rows.append(row)
        wrong += unexplained
    return rows, wrong


def findings(release: str) -> list["Finding"]:
    """What one release says, in a subprocess."""
    command = [sys.executable, "-m", "benchmarks.specification", "--work"]
    root = Path(__file__).resolve().parents[1]
    run = subprocess.run(
        command, env=environment(runtime_folder(release, "onnx")), cwd=root, capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise SystemExit(run.stderr[-2000:])
    return [Finding(*row) for row in json.loads(run.stdout.splitlines()[-1])]


def summary(release: str, found: list["Finding"]) -> tuple[list[str], list[str]]:
    """(a row of COLUMNS, what is not explained or explains nothing)."""
    numbers = release_of(release)
    agreed = Counter(row.source for row in found if row.difference is None)
    counts = [f"{agreed[source]} of {sum(row.source == source for row in found)}" for source in SOURCES]
    met, wrong = explained(numbers, found)
    return [release, reading(release).name, *counts, ", ".join(met)], [f"onnx {release}: {item}" for item in wrong]


def explained(release: tuple[int, int], found: list["Finding"]) -> tuple[list[str], list[str]]:
    """(ids of the disagreements met, differences that none explains and disagreements that were not met)."""
    met, wrong = Counter[str](), []
    for row in found:
        if row.difference is None:
            continue
        ids = [item.id for item in DISAGREEMENTS if item.concerns(release, row.source, row.case)]
        met.update(ids)
        if not ids:
            wrong.append(f"{row.case}, {row.source}: {row.difference}")
    active = [item.id for item in DISAGREEMENTS if item.active(release)]
    return [item for item in active if met[item]], wrong + [f"{item} was not met" for item in active if not met[item]]


def release_of(version: str) -> tuple[int, int]:
    """(1, 23) of "1.23.2"."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor


# ---- one release --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """One source on one case."""

    case: str
    source: str
    difference: str | None
    """What differs from the oracle, None where nothing does."""


def compared() -> Iterator[Finding]:
    """Every case that the imported onnx defines."""
    warnings.simplefilter("ignore")
    now = reading(onnx.__version__)
    for name, case, stored in (*own(), *published()):
        try:
            expected = case.expected(now)
        except ValueError:  # not allowed in that release
            continue
        yield Finding(name, "function body", _difference(expected, lambda case=case: run(body(case.model()), case), case))
        yield Finding(name, "reference", _difference(expected, lambda case=case: run(case.model(), case), case))
        if stored is not None:
            yield Finding(name, "test cases", _difference(expected, lambda stored=stored: stored, case))


def own() -> Iterator[tuple[str, Case, None]]:
    """The suite's cases of ai.onnx Attention, of the versions that there are."""
    for name, case in all_cases().items():
        if not case.operator.domain and case.operator.op_type == "Attention" and _defined(case.version):
            yield name, case, None


def published() -> Iterator[tuple[str, Case, Mapping[str, Array]]]:
    """(name, case, stored outputs) of onnx.backend.test.case.node, without importing the cases of all other operators."""
    node = importlib.import_module("onnx.backend.test.case.node")
    importlib.import_module("onnx.backend.test.case.node.attention")
    formal = all_cases()["Attention@24/4d/mha"].operator
    for item in node._NodeTestCases:
        call = item.model.graph.node[0]
        if call.op_type == "Attention" and len(item.model.graph.node) == 1:
            inputs, outputs = (iter([np.asarray(array) for array in arrays]) for arrays in item.data_sets[0])
            given = {name: next(inputs) for name, used in zip(formal.inputs, call.input, strict=False) if used}
            stored = {name: next(outputs) for name, used in zip(formal.outputs, call.output, strict=False) if used}
            attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in call.attribute}
            version = onnx.defs.get_schema("Attention", item.model.opset_import[0].version).since_version
            name = f"Attention@{version}/{item.name}"
            yield item.name, Case(name=name, inputs=given, attributes=attributes, outputs=tuple(stored)), stored


def body(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of one node with the node's function body in its place."""
    expand = importlib.import_module("onnx.backend.test.case.node").function_testcase_helper
    node, kinds = deepcopy(model.graph.node[0]), {item.name: item.type for item in model.graph.input}
    types = [kinds.get(name, onnx.TypeProto()) for name in node.input]
    named = "opset_imports" in inspect.signature(expand).parameters  # older releases always take the newest version
    found, _ = expand(node, types, "body", **({"opset_imports": list(model.opset_import)} if named else {}))
    nodes, opsets = found[-1]
    graph = helper.make_graph(nodes, "body", model.graph.input, model.graph.output)
    return helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)


def run(model: onnx.ModelProto, case: Case) -> Mapping[str, Array]:
    """{output: array} by onnx.reference."""
    return dict(zip(case.expected(), ReferenceEvaluator(model).run(None, dict(case.inputs)), strict=True))


def _defined(version: int) -> bool:
    return version <= onnx.defs.onnx_opset_version() and onnx.defs.get_schema("Attention", version).since_version == version


def _difference(expected: Mapping[str, Array], source: Callable[[], Mapping[str, Array]], case: Case) -> str | None:
    try:
        got = source()
    except Exception as error:  # whatever the source raises is its answer
        return f"{type(error).__name__}: {error}"[:200]
    off = {name: largest_difference(want, np.asarray(got[name]), case.tolerance) for name, want in expected.items()}
    return ", ".join(f"{name} {by:.3g}" for name, (same, by) in off.items() if not same) or None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
