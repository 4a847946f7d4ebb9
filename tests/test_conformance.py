"""Conformance: the oracle against onnx itself, the runtime against the oracle, crashes survived, and warnings."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

import attnquant
from attnquant import deviations
from attnquant.cli import main
from attnquant.conformance import CaseResult, ConformanceReport, run, worker
from attnquant.conformance.case import largest_difference
from attnquant.conformance.cases import all_cases
from attnquant.conformance.disagreements import DISAGREEMENTS
from attnquant.conformance.oracle import attention
from attnquant.conformance.readings import NEWEST, READINGS, reading
from attnquant.deviations import DEVIATIONS, Call, known
from attnquant.errors import AttnQuantError, HostError
from attnquant.report import render
from attnquant.runtime import import_runtime
from attnquant.target import parse_target
from benchmarks import conformance as tables
from benchmarks import specification
from tests import tinymodels

Capture = pytest.CaptureFixture[str]
RUNTIME = import_runtime().__version__
ATTENTION = {name: case for name, case in all_cases().items() if re.match(r"Attention@", name)}


# ---- the oracle against onnx ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def findings() -> list[specification.Finding]:
    return list(specification.compared())


def test_the_oracle_agrees_with_onnx_wherever_onnx_agrees_with_itself(findings: list[specification.Finding]) -> None:
    """Function body and published cases; both differ from the oracle nowhere, unless a row of DISAGREEMENTS says why."""
    counts = {source: sum(row.source == source for row in findings) for source in specification.SOURCES}
    assert counts["function body"] > 200
    assert counts["test cases"] > 40
    _, wrong = specification.explained(specification.release_of(onnx.__version__), findings)
    assert not wrong, "\n".join(wrong)


def test_disagreements_name_a_clause_and_real_cases() -> None:
    assert len({row.id for row in DISAGREEMENTS}) == len(DISAGREEMENTS)
    for row in DISAGREEMENTS:
        assert row.clause, row.id
        assert row.until is None or row.since < row.until, row.id
        assert any(re.search(row.cases, name.partition("/")[2]) for name in ATTENTION), row.id


def test_a_difference_that_nothing_explains_is_named() -> None:
    found = [specification.Finding("Attention@23/4d/mha", "function body", "Y 0.5")]
    _, wrong = specification.explained((1, 23), found)
    assert wrong[0] == "Attention@23/4d/mha, function body: Y 0.5"
    assert any("was not met" in line for line in wrong[1:]), "a row that explains nothing is stale"


def by_loops(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """softmax(Q K^T / sqrt(D)) V, one query at a time."""
    out = np.zeros((*query.shape[:3], value.shape[3]))
    for where in np.ndindex(*query.shape[:3]):
        scores = [query[where] @ row / np.sqrt(query.shape[3]) for row in key[where[:2]]]
        weights = np.exp(np.array(scores) - max(scores))
        out[where] = (weights / weights.sum()) @ value[where[:2]]
    return out


def test_the_oracle_agrees_with_loops() -> None:
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 3, length, 4)) for length in (2, 5, 5))
    np.testing.assert_allclose(attention(query, key, value)[0], by_loops(query, key, value), atol=1e-12)
    with pytest.raises(ValueError, match="head count that divides"):
        attention(query[:, 0], key[:, 0], value[:, 0], q_num_heads=3, kv_num_heads=3)


# ---- errata ---------------------------------------------------------------------------------------------------------------


def test_readings_go_by_release() -> None:
    names = [reading(release).name for release in ("1.18.0", "1.19.1", "1.21.0", "1.22", "1.23.2", "1.40")]
    assert names == ["onnx 1.18", "onnx 1.19", "onnx 1.19", "onnx 1.22", "onnx 1.23", "onnx 1.23"]
    assert reading("1.23.2") is NEWEST
    for wrong in ("1.17.0", "new", "1"):
        with pytest.raises(ValueError, match=r"expected 1\.18 or later"):
            reading(wrong)


ROWS = np.arange(8.0).reshape(1, 2, 4)
"""Two tokens of two heads of two channels."""


def test_errata_by_release() -> None:
    """Each change of meaning, in numbers that can be checked by hand."""
    old, middle, capped, new = READINGS
    flat = {"q_num_heads": 2, "kv_num_heads": 2}
    present = {row.name: attention(ROWS, ROWS, ROWS, **flat, reading=row)[1][0, 0].tolist() for row in (old, middle)}
    assert present == {"onnx 1.18": [[0, 1], [2, 3]], "onnx 1.19": [[0, 1], [4, 5]]}, "3D heads"

    one = np.ones((1, 4, 1, 1))
    heads = np.array([10.0, 20.0]).reshape(1, 2, 1, 1)
    copies = [attention(one, heads, heads, reading=row)[0].ravel().tolist() for row in (old, middle)]
    assert copies == [[10, 20, 10, 20], [10, 10, 20, 20]], "grouped queries"

    three, past = np.zeros((1, 1, 3, 1)), np.zeros((1, 1, 2, 1))
    values, cached = np.arange(3.0).reshape(1, 1, 3, 1), np.array([[[[-2.0], [-1.0]]]])
    means = [
        attention(three, three, values, None, past, cached, is_causal=1, reading=row)[0].ravel().tolist()
        for row in (old, middle)
    ]
    assert means == [[-2, -1.5, -1], [-1, -0.5, 0]], "is_causal behind cached keys"

    hidden = np.array([[True, False]])
    query, key = np.ones((1, 1, 1, 1)), np.array([[[[3.0], [9.0]]]])
    share = [attention(query, key, key, hidden, scale=1.0, softcap=1.0, reading=row)[3:] for row in (middle, capped)]
    assert [item[0].ravel().tolist() for item in share] == [[3, 9], [3, 9]], "mode 0 is never capped"
    weights = [
        attention(query, key, key, hidden, scale=1.0, softcap=1.0, qk_matmul_output_mode=3, reading=row)[3][0, 0, 0, 1]
        for row in (middle, capped)
    ]
    assert weights == [pytest.approx(1 / (1 + np.exp(np.tanh(3) + 1))), 0], "softcap behind the mask"
    modes = [
        attention(query, key, key, hidden, scale=1.0, softcap=1.0, qk_matmul_output_mode=mode, reading=row)[3][..., 1].item()
        for row in (middle, capped)
        for mode in (1, 2)
    ]
    assert modes == [-np.inf, -1, pytest.approx(np.tanh(9)), -np.inf], "what modes 1 and 2 hold"

    filled, cache = np.array([2]), np.arange(4.0).reshape(1, 1, 4, 1)
    decode = [
        attention(np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 4, 1)), cache, nonpad_kv_seqlen=filled, is_causal=1, reading=row)
        for row in (capped, new)
    ]
    assert [item[0].item() for item in decode] == [0, 0.5], "is_causal with nonpad_kv_seqlen"

    dead = [attention(query, key, key, np.array([[False, False]]), reading=row)[0].item() for row in (capped, new)]
    np.testing.assert_equal(dead, [np.nan, 0.0], "rows without a key")

    with pytest.raises(ValueError, match="only one"):
        attention(query, key, key, hidden, is_causal=1, reading=old)


# ---- the reported case ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [23, 24])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_the_reported_case(version: int, mode: int) -> None:
    """4D attention, a mask of (2, 1, 4, 13) over 7 cached and 6 new keys: the runtime gives what plain numpy gives."""
    case = all_cases()[f"Attention@{version}/reported/mask-2-1-4-13-past/mode-{mode}"]
    given = {name: array.astype(np.float64) for name, array in case.inputs.items()}
    keys, values = (np.concatenate([given[f"past_{word}"], given[word[0].upper()]], axis=2) for word in ("key", "value"))
    assert given["attn_mask"].shape == (2, 1, 4, 13)
    assert keys.shape == (2, 3, 13, 4)
    scores = np.einsum("bhsd,bhtd->bhst", given["Q"], keys) / 2
    masked = scores + given["attn_mask"]
    weights = np.exp(masked - masked.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    right = {
        "Y": np.einsum("bhst,bhtw->bhsw", weights, values),
        "present_key": keys,
        "present_value": values,
        "qk_matmul_output": (scores, scores, masked, weights)[mode],
    }
    got, oracle = worker.run(case, "cpu"), case.expected()
    assert got.keys() == oracle.keys() == right.keys()
    for name, want in right.items():
        np.testing.assert_allclose(oracle[name], want, atol=1e-6, err_msg=f"oracle, {name}")
        if (mode, name) != (1, "qk_matmul_output") or deviations.release(RUNTIME) >= (1, 27):
            np.testing.assert_allclose(got[name], want, atol=2e-6, err_msg=f"ONNX Runtime, {name}")


# ---- the suite ------------------------------------------------------------------------------------------------------------


def test_the_suite_covers_what_it_says() -> None:
    names = "\n".join(all_cases())
    for word in (
        *("Attention@23/4d/", "Attention@23/3d/", "Attention@24/", "/gqa", "/mqa", "past", "causal", "softcap", "nonpad/"),
        *("mask-bool-ST", "mask-bool-HST", "mask-float-B1ST", "mask-float-BHST", "mode-0", "mode-1", "mode-2", "mode-3"),
        *("softmax-precision", "fp16", "dead-rows/", "MultiHeadAttention@1/", "GroupQueryAttention@1/"),
        *("com.microsoft::Attention@1/", "QAttention@1/", "RotaryEmbedding@1/"),
    ):
        assert word in names, word
    for name in list(ATTENTION)[::20]:
        assert all_cases()[name].model() == ATTENTION[name].model(), "drawn alike at every call"


@pytest.fixture(scope="module")
def report() -> ConformanceReport:
    return attnquant.conformance()


def test_the_installed_runtime_deviates_only_as_known(report: ConformanceReport) -> None:
    rows = report.providers["cpu"]
    assert [row.name for row in rows] == list(all_cases())
    assert report.runtime == RUNTIME
    assert report.ok, [row for row in rows if row.unknown]
    for row in rows:
        assert (row.status == "passed") == (not row.issues and not row.sentence), row
    assert sum(row.status == "passed" for row in rows) > 0.7 * len(rows)
    met = {issue.id for issue in report.issues}
    assert met == {row.id for row in DEVIATIONS if row.since <= deviations.release(RUNTIME)
                   and (not row.until or deviations.release(RUNTIME) < row.until)}, "edges of the versions"


def test_names_limit_the_suite() -> None:
    report = attnquant.conformance(only="@24/reported")
    assert [row.status for row in report.providers["cpu"]] == ["passed"] * 4
    with pytest.raises(AttnQuantError, match="'nothing like it'"):
        attnquant.conformance(only="nothing like it")
    with pytest.raises(HostError, match="warp"):
        attnquant.conformance(providers=["warp"])


def test_statuses() -> None:
    """Of the case "4d/mha", whatever the runtime makes of it."""
    case = all_cases()["Attention@23/4d/mha"]
    right = case.expected()
    assert worker.compared(case, right, RUNTIME, "cpu").status == "passed"
    wrong = worker.compared(case, {"Y": right["Y"] + np.float32(0.25)}, RUNTIME, "cpu")
    assert (wrong.status, wrong.output, wrong.issues, wrong.unknown) == ("deviates", "Y", (), True)
    assert wrong.max_difference == pytest.approx(0.25)
    nan = worker.compared(case, {"Y": right["Y"] * np.float32(np.nan)}, RUNTIME, "cpu")
    assert (nan.status, nan.max_difference) == ("deviates", None)
    refused = worker.judge(all_cases()["Attention@23/4d/mha/mask-bool-T"], "cpu")
    assert (refused.status, refused.unknown) == ("not implemented", False)
    assert refused.sentence == "attn_mask must be 2D or 3D or 4D tensor"
    wrong_feed = replace(case, inputs={**case.inputs, "K": case.inputs["K"].tolist()})
    with pytest.raises(AttributeError):
        worker.judge(wrong_feed, "cpu")


def test_older_readings_are_recognised() -> None:
    """A runtime that computes as onnx 1.19 said is told so, and the deviation is known where the runtime is old."""
    case = all_cases()["Attention@23/4d/softcap/mask-float"]
    found = worker.compared(case, case.expected(reading("1.21")), "1.24.4", "cpu")
    assert found.reads_as == ("onnx 1.18", "onnx 1.19")
    assert "softcap-behind-mask" in found.issues
    assert worker.compared(case, case.expected(reading("1.21")), "1.31.1", "cpu").unknown


@pytest.mark.parametrize(
    ("want", "got", "same"),
    [
        ([1.0, np.nan], [1.0, np.nan], True),
        ([1.0, np.inf], [1.0, np.inf], True),
        ([1.0, np.inf], [1.0, -np.inf], False),
        ([1.0, np.nan], [1.0, 0.0], False),
        ([1.0, 2.0], [1.0, 2.001], False),
        ([1.0, 2.0], [1.0], False),
    ],
)
def test_differences(want: list[float], got: list[float], same: bool) -> None:
    assert largest_difference(np.array(want), np.array(got), 1e-5)[0] is same


def test_masked_values_may_be_anything() -> None:
    want = np.ma.array([1.0, 2.0], mask=[False, True])
    assert largest_difference(want, np.array([1.0, np.nan]), 1e-6) == (True, 0.0)
    assert not largest_difference(want, np.array([1.5, 2.0]), 1e-6)[0]


# ---- crashes --------------------------------------------------------------------------------------------------------------

NAMES = ["Attention@23/4d/mha", "Attention@23/4d/square", "Attention@23/4d/gqa"]
CRASH = """
import os, signal, sys
from attnquant.conformance import worker
judge = worker.judge
def crashing(case, provider):
    if case.name == {name!r}:
        {how}
    return judge(case, provider)
worker.judge = crashing
worker.main("cpu", sys.stdin.read().split("\\n"), sys.stdout)
"""


def crashing(name: str, how: str) -> run.Worker:
    """A worker whose process ends in one case."""

    def start(provider: str, names: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", CRASH.format(name=name, how=how)]
        return subprocess.run(command, input="\n".join(names), capture_output=True, text=True, check=False, timeout=60)

    return start


def test_a_crash_is_survived() -> None:
    version, rows = run.run_suite("cpu", NAMES, crashing(NAMES[1], "os.kill(os.getpid(), signal.SIGSEGV)"))
    assert version == RUNTIME
    assert [(row.name, row.status) for row in rows] == [
        (NAMES[0], "passed"), (NAMES[1], "crashes"), (NAMES[2], "passed")
    ]
    assert f"signal {int(signal.SIGSEGV)}" in rows[1].sentence
    assert rows[1].unknown


@pytest.mark.parametrize(
    ("code", "stderr", "sentence"),
    [(3, "terminate called after throwing", "terminate called after throwing"), (0, "", "code 0"), (-6, "x", "signal 6")],
)
def test_every_early_end_is_a_crash(code: int, stderr: str, sentence: str) -> None:
    """Also where the last line was cut off, and where the process claims that all is well."""

    def start(provider: str, names: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        text = f'{{"runtime": "9.9"}}\n{json.dumps({"case": names[0]})}\n{{"result": {{"na'
        return subprocess.CompletedProcess([], code, text, stderr)

    version, rows = run.run_suite("cpu", NAMES, start)
    assert version == "9.9"
    assert [row.status for row in rows] == ["crashes"] * 3
    assert sentence in rows[0].sentence


def test_a_subprocess_that_never_starts_is_an_error() -> None:
    def broken(provider: str, names: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess([], 1, "", "No module named onnxruntime")

    with pytest.raises(HostError, match="No module named onnxruntime"):
        run.run_suite("cpu", NAMES, broken)


def test_a_case_that_hangs_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: Sequence[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 300, output=json.dumps({"case": NAMES[0]}).encode() + b"\n")

    monkeypatch.setattr(run.subprocess, "run", hang)
    _, rows = run.run_suite("cpu", NAMES[:1], run.start)
    assert [(row.status, row.sentence) for row in rows] == [("crashes", "no answer in 300 s")]


# ---- reports --------------------------------------------------------------------------------------------------------------

KNOWN = ("qk-mode-2-lowest",)
MIXED = ConformanceReport(
    runtime="1.31.1",
    specification="onnx 1.23",
    providers={
        "cpu": (
            CaseResult(name="Attention@23/a", status="passed", max_difference=1e-7),
            CaseResult(name="Attention@23/b", status="deviates", max_difference=0.5, output="Y", issues=KNOWN),
            CaseResult(name="Attention@23/c", status="deviates", output="Y", issues=KNOWN),
            CaseResult(name="Attention@24/d", status="not implemented", sentence="no | kernel"),
            CaseResult(name="Attention@24/e", status="crashes", sentence="signal 11"),
            CaseResult(name="Attention@24/f", status="deviates", max_difference=0.25, output="Y"),
        )
    },
)


def test_json_has_every_case() -> None:
    content = json.loads(render(MIXED, "json"))
    assert (content["runtime"], content["specification"], content["ok"]) == ("1.31.1", "onnx 1.23", False)
    one = content["providers"]["cpu"]
    assert one["counts"] == {"passed": 1, "deviates": 3, "not implemented": 1, "crashes": 1}
    assert [case["status"] for case in one["cases"]] == [row.status for row in MIXED.providers["cpu"]]
    assert one["cases"][1]["issues"] == ["qk-mode-2-lowest"]
    assert one["cases"][2]["max_difference"] is None
    assert [issue["id"] for issue in content["issues"]] == ["qk-mode-2-lowest"]
    assert content["versions"]["attnquant"] == attnquant.__version__


def test_markdown_groups_by_cause_the_unknown_first() -> None:
    text = render(MIXED, "markdown")
    assert "1.31.1, cpu, against onnx 1.23: 6 cases, 1 passed, 3 deviates, 1 not implemented, 1 crashes." in text
    assert "| Attention@23 | 1 | 2 | 0 | 0 |\n| Attention@24 | 0 | 1 | 1 | 1 |" in text
    rows = [line for line in text.splitlines() if re.match(r"\| (deviates|crashes|not)", line)]
    assert rows[0] == "| deviates | 1: Attention@24/f | 0.25 | not known so far |"
    assert rows[1] == "| crashes | 1: Attention@24/e |  | signal 11 |"
    assert rows[2].startswith("| deviates | 2: Attention@23/b, Attention@23/c | 0.5 / NaN or infinite | qk_matmul_output in")
    assert rows[3].endswith("| no \\| kernel |")


def test_rich_says_the_same() -> None:
    text = " ".join(render(MIXED).split())
    for words in ("6 cases, 1 passed", "not known so far", "signal 11", "qk-mode-2-lowest"):
        assert words in text
    with pytest.raises(ValueError, match="'yaml'"):
        render(MIXED, "yaml")  # type: ignore[arg-type]


def test_command_line(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["conformance", "--only", "RotaryEmbedding", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["providers"]["cpu"]["counts"]["passed"] == 6
    assert main(["conformance", "--only", "nothing like it"]) == 1
    assert main(["conformance", "--provider", "warp"]) == 1
    capsys.readouterr()

    def start(provider: str, names: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        lines = [{"runtime": "9.9"}]
        for name in names:
            lines += [{"case": name}, {"result": CaseResult(name=name, status="deviates", max_difference=1.0).as_json()}]
        return subprocess.CompletedProcess([], 0, "\n".join(map(json.dumps, lines)), "")

    monkeypatch.setattr(run, "start", start)
    assert main(["conformance", "--only", "RotaryEmbedding", "--format", "markdown"]) == 3
    assert "not known so far" in capsys.readouterr().out


# ---- warnings -------------------------------------------------------------------------------------------------------------


def attention_model(*, softcap: bool = False, masked: bool = False, half: bool = False) -> onnx.ModelProto:
    """tinymodels.attention with what some runtimes get wrong."""
    model = tinymodels.attention(24, length=4)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    if softcap:
        node.attribute.append(helper.make_attribute("softcap", 5.0))
    if masked:
        node.input.append("mask")
        model.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [4, 4]))
    if half:
        for tensor in model.graph.initializer:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


def warned(model: onnx.ModelProto, target: str) -> tuple[str, ...]:
    return deviations.warnings(ir.from_proto(model), parse_target(target))


def test_warnings_name_site_and_version() -> None:
    model = attention_model(softcap=True, masked=True)
    [text] = warned(model, "onnxruntime-cpu@1.24.4")
    site = attnquant.recognize(model).sites[0].id
    assert f"ONNX Runtime 1.24.4 does not follow the specification at {site}: softcap comes behind the mask" in text
    assert "(softcap-behind-mask)" in text
    assert text.endswith("Right from 1.27 on.")
    assert warned(model, "onnxruntime-cpu@1.27.0") == ()
    assert warned(model, "openvino") == ()
    assert warned(model, "onnxruntime-cuda@1.24.4") == (), "not measured there"
    assert warned(attention_model(softcap=True), "onnxruntime-cpu@1.24.4") == (), "without a mask there is nothing to cap"


def test_types_that_the_graph_only_implies_count() -> None:
    [text] = warned(attention_model(half=True), "onnxruntime-cpu@1.24.4")
    assert "half-scores-overflow" in text
    model = attention_model(masked=True)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    node.output.extend(["", "", "qk"])
    node.attribute.append(helper.make_attribute("qk_matmul_output_mode", 2))
    assert warned(model, "onnxruntime-cpu@1.32.0") == ()
    model.graph.input[-1].type.tensor_type.elem_type = TensorProto.BOOL
    [text] = warned(model, "onnxruntime-cpu@1.32.0")
    assert "qk-mode-2-lowest" in text
    assert "Right from" not in text


def test_quantize_warns() -> None:
    rng = np.random.default_rng(1)
    data = [{"x": rng.normal(size=(1, 4, 16)).astype(np.float32), "mask": np.zeros((4, 4), np.float32)} for _ in range(3)]
    model = attention_model(softcap=True, masked=True)
    old = attnquant.quantize(model, data, target="onnxruntime-cpu@1.24.4")
    assert [note for note in old.notes if "softcap-behind-mask" in note]
    assert "softcap-behind-mask" in render(old, "markdown")
    report = attnquant.verify(model, old.model, data, target="onnxruntime-cpu@1.24.4")
    assert [note for note in report.notes if "softcap-behind-mask" in note]
    new = attnquant.quantize(model, data, target="onnxruntime-cpu@1.31.1")
    assert not [note for note in new.notes if "specification" in note]


def test_every_deviation_is_met_by_a_case_of_the_suite() -> None:
    calls = [worker.call_of(case) for case in all_cases().values()]
    for row in DEVIATIONS:
        versions = [".".join(map(str, row.since or (1, 24))), *([f"{row.until[0]}.{row.until[1]}.0"] if row.until else [])]
        assert any(row in known(call, versions[0]) for call in calls), row.id
        assert not any(row in known(call, version) for call in calls for version in versions[1:]), row.id


def test_features_of_a_call() -> None:
    lowest = np.full((2, 2), np.finfo(np.float32).min, np.float32)
    call = Call(operator=deviations.ATTENTION, attributes={"is_causal": 1, "softcap": 0.0}, mask=lowest,
                inputs=frozenset({"Q", "attn_mask"}), outputs=frozenset({"Y", "qk_matmul_output"}))
    assert call.features == {"mask", "causal", "shown 0", "lowest rows"}
    assert known(call, "not a version") == ()


# ---- the page -----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "conformance.md").read_text(encoding="utf-8")


def test_the_page_names_every_id() -> None:
    listed = re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE, re.MULTILINE)
    for row in DEVIATIONS:
        assert listed.count(row.id) == 2, f"{row.id}: a row of figures and a clause"
    assert {row.id for row in DISAGREEMENTS} | {row.id for row in DEVIATIONS} == set(listed)


@pytest.mark.skipif(specification.release_of(onnx.__version__) < (1, 23), reason="the page quotes onnx 1.23")
def test_the_page_quotes_the_specification() -> None:
    schemas = [onnx.defs.get_schema("Attention", version) for version in (23, 24, 25)] + [onnx.defs.get_schema("Trilu")]
    parts = [part for schema in schemas for part in (*schema.attributes.values(), *schema.inputs, *schema.outputs)]
    text = " ".join([*(schema.doc for schema in schemas), *(part.description for part in parts)])
    said = " ".join(re.sub(r"\[([^]]*)\]\(http[^)]*\)", r"\1", text).replace("`", "").split())
    cells = [line.rsplit("|", 2)[1] for line in PAGE.splitlines() if line.startswith("| `") and '"' in line]
    quotes = [part for cell in cells for quote in re.findall(r'"([^"]+)"', cell) for part in quote.split("...")]
    assert len(quotes) > 20
    for quote in quotes:
        assert " ".join(quote.replace("`", "").split()) in said, quote


def test_the_page_has_the_figures_of_the_installed_runtime(report: ConformanceReport) -> None:
    columns, rows = tables.counts([report])
    written = PAGE.partition("<!-- counts")[2].partition("<!-- end of counts")[0]
    lines = {line[0]: line for text in written.splitlines() if (line := text.strip("| ").split(" | "))}
    if columns[2] not in lines["operator"]:
        pytest.skip(f"the page has no ONNX Runtime {columns[2]}")
    place = lines["operator"].index(columns[2])
    for row in rows:
        assert [lines[row[0]][1], lines[row[0]][place]] == row[1:], row[0]


def test_tables_go_between_their_marks() -> None:
    page = "a\n<!-- x: written by python -m benchmarks.conformance -->\nold\n<!-- end of x -->\nb\n"
    assert tables.filled(page, {"x": "new"}) == page.replace("old", "new")
    with pytest.raises(SystemExit, match="lacks"):
        tables.filled(page, {"y": "new"})
