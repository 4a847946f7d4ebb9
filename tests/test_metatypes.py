"""The catalogue against the schemas that the installed onnx and ONNX Runtime publish."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from attnquant import metatypes, roles
from attnquant.metatypes import CATALOGUE, NOT_ATTENTION, ai_onnx
from attnquant.roles import OperatorSpec, PortRole, PortSpec

RELAXED = {
    ("GroupQueryAttention", "present_key"): "1.27",
    ("GroupQueryAttention", "present_value"): "1.27",
    ("PagedAttention", "value_cache"): "1.29",
    ("GatedDeltaNet", "key"): "1.31",
    ("GatedDeltaNet", "value"): "1.31",
}
"""Ports that were required before the ONNX Runtime release named."""
SOUNDS_RELATED = re.compile(r"attention|rotary|tensorscatter|qkv|causalconv|deltanet|kvcache", re.IGNORECASE)


def release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


RUNTIME = release(onnxruntime.__version__)


def schemas() -> Iterator[tuple[str, Any]]:
    for schema in onnx.defs.get_all_schemas_with_history():
        yield f"onnx {onnx.__version__}", schema
    for schema in get_all_operator_schema():
        yield f"onnxruntime {onnxruntime.__version__}", schema


PUBLISHED: dict[tuple[str, str, int], list[tuple[str, Any]]] = {}
for source, found in schemas():
    PUBLISHED.setdefault((found.domain or "ai.onnx", found.name, found.since_version), []).append((source, found))

VERSIONS = [
    pytest.param(row, version, id=f"{row.domain}-{row.op_type}-{version}")
    for row in CATALOGUE.values()
    for version in row.versions
]


def expected(ports: tuple[PortSpec, ...], op_type: str, version: int) -> list[tuple[str, bool]]:
    """Name and optionality of each port of a version, as the installed release should have them."""
    return [
        (port.name, port.optional and release(RELAXED.get((op_type, port.name), "0.0")) <= RUNTIME)
        for port in ports
        if port.since <= version and release(port.release or "0.0") <= RUNTIME
    ]


def published(formals: Any) -> list[tuple[str, bool]]:
    return [(formal.name, "Optional" in str(formal.option)) for formal in formals]


@pytest.mark.parametrize(("row", "version"), VERSIONS)
def test_row_equals_the_published_schema(row: OperatorSpec, version: int) -> None:
    found = PUBLISHED.get((row.domain, row.op_type, version), [])
    if not found:
        standard = row.domain.startswith("ai.onnx")
        assert standard or release(row.release or "0.0") > RUNTIME, "an installed runtime of this release should publish it"
        assert not standard or version > onnx.defs.onnx_opset_version() or row.domain == "ai.onnx.preview"
        installed = f"onnx {onnx.__version__} nor onnxruntime {onnxruntime.__version__}"
        pytest.skip(f"neither {installed} publishes {row.form(version)}")
    for source, schema in found:
        assert published(schema.inputs) == expected(row.inputs, row.op_type, version), source
        assert published(schema.outputs) == expected(row.outputs, row.op_type, version), source


def test_rows_know_every_published_version() -> None:
    for domain, op_type, since in PUBLISHED:
        row = CATALOGUE.get((domain, op_type))
        assert row is None or since in row.versions or since > row.until


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=lambda row: f"{row.domain}-{row.op_type}")
def test_attribute_names_are_published(row: OperatorSpec) -> None:
    found = [schema for version in row.versions for _, schema in PUBLISHED.get((row.domain, row.op_type, version), [])]
    if not found or RUNTIME < (1, 31):
        pytest.skip("the installed packages don't publish the newest form of this operator")
    have = {name for schema in found for name in schema.attributes}
    names = row.attributes
    stated = [names.q_heads, names.kv_heads, names.scale, names.causal, names.softcap, names.local_window, names.side_window]
    stated += [names.rotary, names.sinks, names.hidden_sizes, names.v_head_dim, names.scores_mode, *(names.window or ())]
    assert {name for name in stated if name} - have == set()


def test_every_published_attention_is_catalogued_or_explained() -> None:
    related = {(domain, name) for domain, name, _ in PUBLISHED if SOUNDS_RELATED.search(name)}
    assert {key for key in related if key not in CATALOGUE and key not in NOT_ATTENTION} == set()
    assert not set(CATALOGUE) & set(NOT_ATTENTION)
    assert all(reason.strip() for reason in NOT_ATTENTION.values())


@pytest.mark.parametrize("row", CATALOGUE.values(), ids=lambda row: f"{row.domain}-{row.op_type}")
def test_row_is_consistent(row: OperatorSpec) -> None:
    for ports in (row.inputs, row.outputs):
        assert [port.index for port in ports] == list(range(len(ports)))
        held = [role for port in ports for role in port.roles if role != PortRole.MASK]
        assert len(held) == len(set(held))
    assert list(row.versions) == sorted(set(row.versions))
    assert row.versions[-1] <= row.until
    if row.family != "attention":
        assert not row.quantized
        assert all(port.role is None for port in (*row.inputs, *row.outputs))
        return
    assert row.output(PortRole.CONTEXT) is row.outputs[0]
    assert bool(row.quantized) != bool(row.reason), "quantized by default, or a reason why not"
    assert all(row.input(role) is not None for role in row.quantized)
    key, value = row.input(PortRole.KEY), row.input(PortRole.VALUE)
    assert not row.packed or (key is not None and value is not None and value.optional)
    assert row.inner_weight is None or row.inner_weight[0] in [port.name for port in row.inputs]
    assert not row.sink_port or row.sink_port in [port.name for port in row.inputs]


def test_score_outputs_are_those_of_the_specification() -> None:
    """qk_matmul_output_mode: 0 is Q K^T before mask and softcap, 3 behind the softmax; 1 and 2 lie between."""
    standard = metatypes.find("", "Attention", 23)
    assert standard is not None
    assert standard.score_roles == ((0, PortRole.SCORES), (3, PortRole.PROBABILITIES))


def test_same_name_in_two_domains_has_other_ports() -> None:
    standard, contrib = metatypes.find("", "Attention", 23), metatypes.find("com.microsoft", "Attention", 1)
    assert standard is not None
    assert contrib is not None
    assert [port.role for port in standard.inputs[:3]] == [PortRole.QUERY, PortRole.KEY, PortRole.VALUE]
    assert [port.role for port in contrib.inputs[:3]] == [None, None, None]
    assert standard.quantized == (PortRole.QUERY, PortRole.KEY)
    assert contrib.quantized == ()


@pytest.mark.parametrize(
    ("domain", "version", "form"),
    [
        ("", 22, None),
        ("", 23, "ai.onnx::Attention@23"),
        ("ai.onnx", 24, "ai.onnx::Attention@24"),
        ("", 26, "ai.onnx::Attention@25"),
        ("", ai_onnx.OPSET, "ai.onnx::Attention@25"),
        ("", ai_onnx.OPSET + 1, None),
        ("com.microsoft", 1, "com.microsoft::Attention@1"),
        ("com.microsoft", 2, None),
        ("org.example", 1, None),
    ],
)
def test_find_goes_by_domain_and_version(domain: str, version: int, form: str | None) -> None:
    row = metatypes.find(domain, "Attention", version)
    assert (row.form(version) if row else None) == form
    assert form is None or metatypes.for_form(form) is row


def test_the_rows_were_compared_with_the_newest_opset_of_onnx() -> None:
    """Fails with a newer onnx: compare the rows with its schemas, then raise the number."""
    assert onnx.defs.onnx_opset_version() <= ai_onnx.OPSET


def test_ports_of_later_versions_are_not_ports_of_earlier_ones() -> None:
    row = metatypes.find("", "Attention", 24)
    assert row is not None
    assert [port.name for port in row.inputs if port.since > 23] == ["nonpad_kv_seqlen"]


def test_vocabulary_imports_nothing_foreign() -> None:
    tree = ast.parse(Path(roles.__file__).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(modules) <= {"dataclasses", "enum", "typing"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
