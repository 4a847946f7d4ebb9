"""Every model of a corpus, quantized: placement by an independent audit, loads and runs, int8 linears, accuracy.

`make test` takes the committed selection, `make corpus` the folder that ATTNQUANT_CORPUS names. References of the accuracy
lie in tests/accuracy; a run with ATTNQUANT_UPDATE_REFERENCES=1 rewrites those of its models, and fails.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import attnquant
from attnquant import runtime
from attnquant.check import check
from attnquant.errors import ModelError
from attnquant.graph import bodies
from attnquant.model import load
from attnquant.quantization import QuantizationResult, plan, quantize
from tests.corpora import Entry, entries, runnable, snr
from tests.placement_audit import audit, linear_coverage, ok_qk

CORPUS = entries("ATTNQUANT_CORPUS", "corpus")
CASES = entries("ATTNQUANT_CASES", "cases")
REFERENCES = Path(__file__).parent / "accuracy" / "corpus.json"
PACKED = "packed: V shares the port"


def floor(entry: Entry) -> float:
    half = any(array.dtype == np.float16 for sample in entry.samples for array in sample.values())
    return 20.0 if half or "fp16" in entry.path.name else 25.0


def compare_with_reference(name: str, value: float) -> None:
    """Within 1 dB of the stored figure; better by more is a change to be stored as well."""
    stored: dict[str, float] = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
    value = min(round(float(value), 2), 200.0)
    if os.environ.get("ATTNQUANT_UPDATE_REFERENCES"):
        REFERENCES.write_text(json.dumps(dict(sorted({**stored, name: value}.items())), indent=1) + "\n")
        pytest.fail(f"{name}: reference rewritten ({stored.get(name)} -> {value} dB)")
    if name in stored:
        assert value == pytest.approx(stored[name], abs=1.0), "see the module's docstring for how to store a new figure"


def interface(model: ir.Model) -> list[Any]:
    return [(value.name, value.dtype, str(value.shape)) for value in (*model.graph.inputs, *model.graph.outputs)]


def no_new_control_flow(before: ir.Model, after: ir.Model) -> None:
    flow = ("If", "Loop", "Scan")
    counts = [sum(node.op_type in flow for _, body in bodies(model) for node in body) for model in (before, after)]
    assert counts[0] == counts[1]


def agreed(entry: Entry, result: QuantizationResult) -> None:
    """What must hold of every quantized model."""
    proto = ir.to_proto(result.model)
    rows = audit(proto, entry.truth)
    packed = {item.site for item in result.setup.skipped if item.reason == PACKED}
    bad = [row for row in rows if row["form"] != "com.microsoft::Attention" and not packed and not ok_qk(row)]
    assert not bad, bad
    report = check(result.model)
    assert report.ok, report.problems
    assert not report.unplanned
    int8, total = linear_coverage(proto)
    explained = [linear for linear in report.linears if linear.reason]
    assert int8 >= 0.95 * total or int8 + len(explained) >= total, (int8, total, explained)
    before = load(entry.path)
    assert interface(before) == interface(result.model)
    no_new_control_flow(before, result.model)


@pytest.mark.parametrize("entry", CORPUS, ids=str)
def test_corpus(entry: Entry) -> None:
    float_run = runnable(entry.path)
    if isinstance(float_run, str):
        with pytest.raises(ModelError, match=r"fails to run|does not load"):
            quantize(entry.path, entry.samples)
        return
    samples, expected = float_run
    result = quantize(entry.path, samples)
    assert len(result.sites) == len(entry.truth["attentions"])
    agreed(entry, result)
    planned = plan(entry.path, feeds=samples[0]).setup
    assert (planned.points, planned.skipped) == (result.setup.points, result.setup.skipped)
    value = snr(expected, [runtime.run(result.model, sample, threads=1) for sample in samples])
    assert value >= floor(entry)
    compare_with_reference(entry.path.name, value)


def quantized(entry: Entry, way: str) -> ir.Model:
    samples, _ = runnable(entry.path)
    if way == "attnquant":
        result = quantize(entry.path, samples)
        agreed(entry, result)
        return result.model
    import nncf

    with attnquant.extended():
        model = onnx.load(entry.path)
        made = nncf.quantize(model, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER)
    assert not [row for row in audit(made, entry.truth) if row["q"] is not None and not ok_qk(row)]
    return ir.from_proto(made)


@pytest.mark.parametrize("way", ["attnquant", "nncf"])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_cases(entry: Entry, way: str) -> None:
    if entry.truth["expect"] == "error":
        with pytest.raises(ModelError) as caught:
            quantize(entry.path, entry.samples)
        assert any(f"'{name}'" in str(caught.value) for name in tensors_in(entry)), str(caught.value)
        return
    samples, expected = runnable(entry.path)
    model = quantized(entry, way)
    outputs = [runtime.run(model, sample, threads=1) for sample in samples]
    worst = min(snr([one], [other]) for one, other in zip(expected, outputs, strict=True))
    assert worst >= floor(entry), "every call by itself"
    compare_with_reference(entry.path.name, snr(expected, outputs))
    report = check(model)
    assert report.ok, report.problems
    statuses = {row.status for row in report.rows}
    assert statuses == {entry.truth["expect"]}
    if entry.truth["expect"] == "skipped":
        assert all(row.reasons for row in report.rows)


def tensors_in(entry: Entry) -> set[str]:
    graph = onnx.load(entry.path).graph
    return {name for node in graph.node for name in (*node.input, *node.output)} | {item.name for item in graph.initializer}


def test_one_placement_whatever_the_exporter() -> None:
    """The same module through every exporter: the same roles quantized and skipped, site by site."""
    families: dict[str, dict[str, list[Any]]] = {}
    for entry in CORPUS:
        float_run = runnable(entry.path)
        if isinstance(float_run, str) or not entry.path.name.startswith("torch_sdpa"):
            continue
        result = quantize(entry.path, float_run[0])
        roles = sorted((point.role.value, point.dtype, point.symmetric, point.granularity) for point in result.setup.points)
        families.setdefault(entry.truth["model"], {})[entry.path.name] = roles
    assert families
    for name, exports in families.items():
        assert len({str(roles) for roles in exports.values()}) == 1, (name, exports)
        assert all([role for role, *_ in roles] == ["key", "query"] for roles in exports.values())


def test_audit_sees_a_quantized_value(tmp_path: Path) -> None:
    """The oracle is no rubber stamp: a quantizer on V of a clean result is found by both audits."""
    entry = next(entry for entry in CASES if entry.path.name == "d_onnx23_3d.onnx")
    result = quantize(entry.path, entry.samples)
    node = next(node for node in result.model.graph if node.op_type == "Attention")
    query = node.inputs[0].producer()
    node.replace_input_with(2, query.outputs[0])
    assert not ok_qk(audit(ir.to_proto(result.model), entry.truth)[0])
    assert not check(result.model).ok


def test_poisoned_cache_slots() -> None:
    """Static cache: what lies beyond the frontier changes nothing, what lies inside does."""
    entry = next(entry for entry in CASES if entry.path.name == "c_static_causal1_nonpad.onnx")
    model = quantize(entry.path, entry.samples).model
    sample = entry.samples[entry.truth["calls"].index("decode")]
    clean = runtime.run(model, sample, threads=1)
    caches = [name for name in sample if "cache" in name]
    assert len(caches) == 2
    output, frontier = next(iter(clean)), int(sample["nonpad_kv_seqlen"].max())
    for slots, same in ((slice(frontier, None), True), (slice(0, 1), False)):
        poisoned = {name: array.copy() for name, array in sample.items()}
        for name in caches:
            poisoned[name][:, slots] = 50.0
        got = runtime.run(model, poisoned, threads=1)
        assert np.array_equal(got[output], clean[output]) is same
