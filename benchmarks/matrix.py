"""Every supported ONNX Runtime and NNCF: the tests' models quantized for each, and one file for the oldest on all.

    python -m benchmarks.matrix --out docs/versions.md

Each version lies in a folder of its own (benchmarks.runtimes) and runs in a subprocess. A model counts where the float model
runs in that version; it is right where attnquant.check finds the placement kept, the file loads at default settings, and the
SNR is at least 25 dB (20 in half precision). A case that must be refused counts as right where it is.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.runtimes import NNCFS, ONNXRUNTIMES, environment, runtime_folder

ROOT = Path(__file__).resolve().parents[1]
CRASH = "the runtime crashed"
HEAD = """# Versions

Written by `python -m benchmarks.matrix --out docs/versions.md`; do not edit. Of the tests' models and cases that run in
float in that version, those that are right: quantized there for its own version, and the files made once for onnxruntime
{oldest} (with onnxruntime {newest}: {made}) and run there. Rows of nncf are run with the installed onnxruntime.

| version | quantized for itself | file for the oldest |
|---|---|---|
"""


def main(arguments: list[str]) -> int:
    """Write the table; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.matrix")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=2, metavar=("WAY", "FOLDER"), help="one subprocess: own, make or load")
    given = parser.parse_args(arguments)
    if given.work:
        return work(given.work[0], Path(given.work[1]))
    with tempfile.TemporaryDirectory(prefix="attnquant-matrix-") as folder:
        text, wrong = table(Path(folder))
    if given.out:
        given.out.write_text(text)
    print(text)
    return int(wrong)


# ---- one subprocess -----------------------------------------------------------------------------------------------------


def work(way: str, folder: Path) -> int:
    """A line of JSON for each model: its name first, then what became of it, so that a crash has a name."""
    from tests.corpora import entries

    done = set(sys.stdin.read().split())
    for entry in (*entries("", "corpus"), *entries("", "cases")):
        if entry.path.name in done:
            continue
        print(json.dumps({"file": entry.path.name}), flush=True)
        try:
            print(json.dumps({"result": judge(entry, way, folder)}), flush=True)
        except Exception as error:
            print(json.dumps({"result": f"{type(error).__name__}: {error}"[:400]}), flush=True)
    return 0


def judge(entry: Any, way: str, folder: Path) -> str:
    """"" where all is right, "float" where the float model does not run here, else what is wrong.

    `own` quantizes for this runtime, `make` writes a file for the oldest as well, `load` only runs those files.
    """
    import attnquant
    from tests.corpora import runnable

    file = folder / entry.path.name
    if entry.truth.get("expect") == "error":
        return refused(entry) if way != "load" else ""
    float_run = runnable(entry.path)
    if isinstance(float_run, str):
        return "float"
    if way == "load":
        return loaded(entry, file, float_run) if file.exists() else "float"
    target = f"onnxruntime-cpu@{ONNXRUNTIMES[0]}" if way == "make" else None
    attnquant.quantize(entry.path, float_run[0], target=target).save(file)
    return loaded(entry, file, float_run)


def refused(entry: Any) -> str:
    """"" where quantizing ends in an error of the model."""
    import attnquant
    from attnquant.errors import ModelError

    try:
        attnquant.quantize(entry.path, entry.samples)
    except ModelError:
        return ""
    return "not refused"


def loaded(entry: Any, file: Path, float_run: Any) -> str:
    """"" where the file loads by itself, is placed right and close to the float outputs."""
    import numpy as np
    import onnxruntime

    import attnquant
    from tests.corpora import snr

    samples, expected = float_run
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    got = [dict(zip(names, session.run(None, sample), strict=True)) for sample in samples]
    half = any(array.dtype == np.float16 for sample in samples for array in sample.values()) or "fp16" in file.name
    value, report = snr(expected, got), attnquant.check(file)
    if not report.ok:
        return f"check: {report.problems}"[:300]
    return "" if value >= (20 if half else 25) else f"{value:.1f} dB"


# ---- all of them --------------------------------------------------------------------------------------------------------


def results(way: str, folder: Path, *folders: Path) -> dict[str, str]:
    """{model: result} of one subprocess; a model at which it crashed is named and skipped, the others go on."""
    found: dict[str, str] = {}
    command = [sys.executable, "-m", "benchmarks.matrix", "--work", way, str(folder)]
    while True:
        before, name = len(found), ""
        run = subprocess.run(
            command, env=environment(*folders), cwd=ROOT, input=" ".join(found), capture_output=True, text=True, check=False
        )
        for line in lines(run.stdout):
            if "file" in line:
                name = line["file"]
                found[name] = CRASH
            else:
                found[name] = line["result"]
        if run.returncode == 0:
            return found
        if len(found) == before:
            raise SystemExit(run.stderr[-2000:])


def lines(text: str) -> Iterator[dict[str, str]]:
    """The JSON among what was printed."""
    return (json.loads(line) for line in text.splitlines() if line.startswith('{"'))


def summary(found: dict[str, str]) -> tuple[str, dict[str, str]]:
    """("right of those that run", what is wrong)."""
    counted = {name: result for name, result in found.items() if result != "float"}
    wrong = {name: result for name, result in counted.items() if result}
    return f"{len(counted) - len(wrong)} of {len(counted)}", wrong


def table(folder: Path) -> tuple[str, bool]:
    """(the page, whether something is wrong)."""
    oldest, newest = folder / "oldest", ONNXRUNTIMES[-2]
    for name in ("oldest", "own"):
        (folder / name).mkdir()
    made, wrong = summary(results("make", oldest, runtime_folder(newest)))
    problems = {f"made for {ONNXRUNTIMES[0]} with {newest}": wrong}
    rows = []
    for version in ONNXRUNTIMES:
        print(f"onnxruntime {version}", file=sys.stderr)
        own = summary(results("own", folder / "own", runtime_folder(version)))
        old = summary(results("load", oldest, runtime_folder(version)))
        problems |= {f"onnxruntime {version}, own": own[1], f"onnxruntime {version}, oldest's": old[1]}
        rows.append(f"| onnxruntime {version} | {own[0]} | {old[0]} |")
    for version in NNCFS:
        print(f"nncf {version}", file=sys.stderr)
        own = summary(results("own", folder / "own", runtime_folder(version, "nncf")))
        problems[f"nncf {version}"] = own[1]
        rows.append(f"| nncf {version} | {own[0]} | |")
    listed = [f"- {where}: `{name}`: {what}" for where, wrong in problems.items() for name, what in wrong.items()]
    head = HEAD.format(oldest=ONNXRUNTIMES[0], newest=newest, made=made)
    tail = "\n".join(["", "", "What is wrong:", "", *listed, ""]) if listed else "\n"
    return head + "\n".join(rows) + tail, bool(listed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
