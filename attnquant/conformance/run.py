"""conformance(): the suite through the installed ONNX Runtime, in subprocesses that may crash."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attnquant.conformance.cases import all_cases
from attnquant.conformance.readings import NEWEST
from attnquant.conformance.results import CaseResult, ConformanceReport
from attnquant.errors import AttnQuantError, HostError
from attnquant.providers import chosen

Progress = Callable[[str], None]
Worker = Callable[[str, Sequence[str]], "subprocess.CompletedProcess[str]"]

SECONDS = 300
"""How long one subprocess may take; the suite takes about two seconds."""


def conformance(
    *, providers: Sequence[str] = ("cpu",), only: str = "", progress: Progress | None = None
) -> ConformanceReport:
    """Hold the installed ONNX Runtime to the specification of its attention operators.

    :param providers: "cpu", "cuda", or "auto" for what is there.
    :param only: Run the cases whose name has this in it; "" runs all.
    :param progress: Called with what is under way.
    :raises HostError: ONNX Runtime or a provider that was asked for is missing.
    :raises AttnQuantError: no case has `only` in its name.
    """
    say = progress or (lambda text: None)
    selected = chosen(providers)
    names = [name for name in all_cases() if only in name]
    if not names:
        msg = f"Conformance: expected a part of a case's name, got {only!r}, which none of the {len(all_cases())} has."
        raise AttnQuantError(msg)
    version, found = "", {}
    for provider in selected:
        say(f"running {len(names)} cases on {provider}")
        version, found[provider] = run_suite(provider, names, start)
    return ConformanceReport(runtime=version, specification=NEWEST.name, providers=found)


def run_suite(provider: str, names: Sequence[str], worker: Worker) -> tuple[str, tuple[CaseResult, ...]]:
    """(version of the runtime, a result for each name). A case that ends its subprocess crashes; the others go on.

    :raises HostError: a subprocess ends before its first case.
    """
    version, found = "", dict[str, CaseResult]()
    while left := [name for name in names if name not in found]:
        ended, running = worker(provider, left), ""
        for line in _lines(ended.stdout):
            version = line.get("runtime", version)
            running = line.get("case", running)
            if "result" in line:
                found[running] = _result(line["result"])
                running = ""
        if running:
            found[running] = CaseResult(name=running, status="crashes", sentence=_ending(ended))
        elif not any(name in found for name in left):
            msg = f"Conformance: the subprocess ended before its next case ({_ending(ended)}): {ended.stderr.strip()[-500:]}"
            raise HostError(msg)
    return version, tuple(found[name] for name in names)


def start(provider: str, names: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """One subprocess in this environment; it sees the packages that this process sees."""
    paths = os.pathsep.join(path for path in sys.path if path)
    return launch(provider, names, {**os.environ, "PYTHONPATH": paths})


def launch(provider: str, names: Sequence[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    """One subprocess in an environment of its own."""
    command = [sys.executable, "-m", "attnquant.conformance.worker", provider]
    options: dict[str, Any] = {"input": "\n".join(names), "capture_output": True, "text": True, "env": environment}
    try:
        return subprocess.run(command, **options, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return subprocess.CompletedProcess(command, 0, output, f"no answer in {SECONDS} s")


def _lines(text: str) -> Iterator[dict[str, Any]]:
    """The JSON among what was printed; a line that the crash cut off is none."""
    for line in text.splitlines():
        if line.startswith("{") and line.endswith("}"):
            yield json.loads(line)


def _result(content: Mapping[str, Any]) -> CaseResult:
    return CaseResult(**{**content, "reads_as": tuple(content["reads_as"]), "issues": tuple(content["issues"])})


def _ending(ended: "subprocess.CompletedProcess[str]") -> str:
    if ended.returncode < 0:
        return f"the process was ended by signal {-ended.returncode}"
    return ended.stderr.strip()[-200:] or f"the process ended with code {ended.returncode}"
