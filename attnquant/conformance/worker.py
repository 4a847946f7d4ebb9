"""One subprocess of the suite: a crash of the runtime ends it and nothing else.

    python -m attnquant.conformance.worker PROVIDER < names

Prints a line of JSON with the runtime's version, then two for each case: its name before it runs, its result after.
"""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

import numpy as np

from attnquant import runtime
from attnquant.conformance.case import Case, largest_difference
from attnquant.conformance.cases import all_cases
from attnquant.conformance.oracle import Array, attention
from attnquant.conformance.readings import READINGS, Reading
from attnquant.conformance.results import CaseResult
from attnquant.deviations import Call, known

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def main(provider: str, names: Sequence[str], output: TextIO) -> None:
    """Run the named cases and print what became of each."""
    _say(output, runtime=runtime.import_runtime().__version__)
    suite = all_cases()
    for name in names:
        _say(output, case=name)
        _say(output, result=judge(suite[name], provider).as_json())


def judge(case: Case, provider: str) -> CaseResult:
    """What the runtime makes of a case."""
    try:
        got = run(case, provider)
    except Exception as error:
        if not type(error).__module__.startswith("onnxruntime"):  # a fault of ours is no answer of the runtime's
            raise
        return CaseResult(name=case.name, status="not implemented", sentence=telling(str(error)))
    return compared(case, got, runtime.import_runtime().__version__, provider)


def telling(message: str) -> str:
    """The part of the runtime's message that says what is the matter, without source paths, signatures and node names."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", " ".join(message.split()))
    for mark in (" was false. ", "Status Message: ", ", Error "):
        text = text.rpartition(mark)[2]
    return text.strip()[:300]


def run(case: Case, provider: str) -> dict[str, Array]:
    """{formal output: array} of one case in a session with default options, without any other provider to fall back to."""
    onnxruntime = runtime.import_runtime()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if provider != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    full = PROVIDERS.get(provider, f"{provider}ExecutionProvider")
    session = onnxruntime.InferenceSession(case.model().SerializeToString(), options, providers=[full])
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(case.inputs)), strict=True))


def compared(case: Case, got: dict[str, Array], version: str, provider: str) -> CaseResult:
    """The result of a case that ran."""
    off = {name: largest_difference(want, got[name], case.tolerance) for name, want in case.expected().items()}
    wrong = {name: difference for name, (same, difference) in off.items() if not same}
    if not wrong:
        worst = max((difference for _, difference in off.values()), default=0.0)
        return CaseResult(name=case.name, status="passed", max_difference=worst)
    output = max(wrong, key=lambda name: wrong[name])
    return CaseResult(
        name=case.name,
        status="deviates",
        max_difference=wrong[output] if np.isfinite(wrong[output]) else None,
        output=output,
        reads_as=_older_readings(case, got),
        issues=tuple(row.id for row in known(call_of(case), version, provider)),
    )


def call_of(case: Case) -> Call:
    """What a case uses, as for nodes of a graph."""
    mask = case.inputs.get("attn_mask")
    return Call(
        operator=(case.operator.domain or "ai.onnx", case.operator.op_type),
        attributes=case.attributes,
        inputs=frozenset(case.inputs),
        outputs=frozenset(case.outputs),
        boolean_mask=mask is not None and mask.dtype == np.bool_,
        half=case.floats[0].dtype == np.float16,
        mask=mask,
        nonpad=case.inputs.get("nonpad_kv_seqlen"),
    )


def _older_readings(case: Case, got: dict[str, Array]) -> tuple[str, ...]:
    if case.operator.oracle is not attention:
        return ()
    return tuple(reading.name for reading in READINGS[:-1] if _follows(reading, case, got))


def _follows(reading: Reading, case: Case, got: dict[str, Array]) -> bool:
    try:
        expected = case.expected(reading)
    except ValueError:  # not allowed at that time
        return False
    return all(largest_difference(want, got[name], case.tolerance)[0] for name, want in expected.items())


def _say(output: TextIO, **content: Any) -> None:
    print(json.dumps(content), file=output, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.stdin.read().split("\n"), sys.stdout)
