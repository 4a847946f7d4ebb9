"""Targets: names, versions, what is installed, and each rule as data."""

from importlib import metadata
from pathlib import Path

import pytest

from attnquant.emission.pipeline import PASSES
from attnquant.errors import AttnQuantError, HostError
from attnquant.target import NAMES, has_vnni, installed_runtimes, parse_target, release, runtime_conflict

CPU_ONLY = {"onnxruntime": "1.30.0"}
STATED = ("onnxruntime-cpu@1.31.1", "onnxruntime-cuda@1.31.1", "openvino@2026.0")


def test_the_default_is_onnxruntime_cpu_as_installed() -> None:
    target = parse_target(installed=lambda: CPU_ONLY)
    assert (target.name, target.version, str(target)) == ("onnxruntime-cpu", "1.30.0", "onnxruntime-cpu@1.30.0")


def test_onnxruntime_gpu_brings_the_cpu_provider_too() -> None:
    assert parse_target("onnxruntime-cpu", installed=lambda: {"onnxruntime-gpu": "1.31.0"}).version == "1.31.0"


@pytest.mark.parametrize("name", NAMES)
def test_a_stated_version_wins_over_the_installed_one(name: str) -> None:
    version = "2026.1" if name == "openvino" else "1.31.1"
    target = parse_target(f"{name}@{version}", installed=lambda: {"onnxruntime": "1.24.4"})
    assert (target.name, target.version) == (name, version)
    assert set(target.passes) <= set(PASSES)


def test_openvino_need_not_be_installed() -> None:
    assert parse_target("openvino", installed=dict).version == ""
    assert parse_target("openvino", installed=lambda: {"openvino": "2026.0.0"}).version == "2026.0.0"


@pytest.mark.parametrize("text", ["onnxruntime", "tensorrt", "onnxruntime-cpu@", "onnxruntime-cpu@new", "openvino@1@2"])
def test_unknown_targets_are_named_with_the_known_ones(text: str) -> None:
    with pytest.raises(AttnQuantError, match=r"expected one of onnxruntime-cpu, onnxruntime-cuda, openvino") as error:
        parse_target(text, installed=lambda: CPU_ONLY)
    assert repr(text) in str(error.value)


def test_a_runtime_that_is_too_old_is_refused() -> None:
    for name in ("onnxruntime-cpu", "onnxruntime-cuda"):
        with pytest.raises(AttnQuantError, match=r"version 1\.24 or later, got '1\.23\.2'"):
            parse_target(f"{name}@1.23.2")
        assert parse_target(f"{name}@1.24.0").version == "1.24.0"
    with pytest.raises(AttnQuantError, match=r"version 2024\.0 or later, got '2023\.3'"):
        parse_target("openvino@2023.3")
    assert parse_target("openvino@2024.0").version == "2024.0"


def test_no_runtime_is_one_sentence_with_its_remedy() -> None:
    with pytest.raises(HostError, match=r"pip install attnquant\[cpu\]"):
        parse_target("onnxruntime-cpu", installed=dict)
    with pytest.raises(HostError, match=r"pip install attnquant\[gpu\]"):
        parse_target("onnxruntime-cuda", installed=lambda: CPU_ONLY)


def test_both_runtimes_at_once_are_detected_and_explained() -> None:
    both = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}
    assert runtime_conflict(CPU_ONLY) is None
    assert runtime_conflict({"onnxruntime-gpu": "1.30.0"}) is None
    sentence = runtime_conflict(both)
    assert sentence is not None
    assert "1.31.1" in sentence
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in sentence
    with pytest.raises(HostError, match="write the same files"):
        parse_target("onnxruntime-cpu", installed=lambda: both)
    assert parse_target("onnxruntime-cpu@1.31.1", installed=lambda: both).version == "1.31.1"


@pytest.mark.parametrize(
    ("version", "opset"),
    [
        ("1.24.4", 25), ("1.26.9", 25), ("1.27", 26), ("1.27.0", 26), ("1.29.0", 26), ("1.31.1", 26), ("1.31.9", 26),
        ("1.32.0", 28),
    ],
)
def test_opsets_that_each_onnxruntime_loads(version: str, opset: int) -> None:
    """Measured: a one-node model was loaded at every opset by every version."""
    assert parse_target(f"onnxruntime-cpu@{version}").max_opset == opset
    assert parse_target("openvino@2026.0").max_opset is None


def test_activations_are_unsigned_on_x86_and_left_alone_elsewhere() -> None:
    cpu, cuda, openvino = (parse_target(text) for text in STATED)
    assert (cpu.activations, cuda.activations, openvino.activations) == ("uint8", "any", "any")
    assert "unsigned" in cpu.passes
    assert "unsigned" not in cuda.passes + openvino.passes


def test_biases_forks_and_stacks_are_rules_of_onnxruntime_cpu_alone() -> None:
    rules = {"biases", "forks", "stacks"}
    for target in map(parse_target, STATED):
        assert rules & set(target.passes) == (rules if target.name == "onnxruntime-cpu" else set())


@pytest.mark.parametrize(
    ("text", "opset"),
    [
        ("onnxruntime-cpu@1.26.9", 22), ("onnxruntime-cpu@1.27.0", None), ("onnxruntime-cpu@1.27", None),
        ("onnxruntime-cuda@1.26.9", None), ("openvino@2026.0", None),
    ],
)
def test_gemm_between_reshapes_is_int8_at_new_opsets_from_1_27_on(text: str, opset: int | None) -> None:
    assert parse_target(text).gemm_opset == opset


def test_int8_operators_and_the_instructions_of_the_cpu() -> None:
    cpu, cuda, openvino = (parse_target(text) for text in STATED)
    assert cpu.int8_operators == openvino.int8_operators == {"MatMul", "Gemm", "Conv"}
    assert cuda.int8_operators == set()
    assert (cpu.vnni, cuda.vnni, openvino.vnni) == (has_vnni(), None, None)


def test_installed_runtimes_are_those_that_metadata_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"onnxruntime-gpu": "1.31.1", "openvino": "2026.0"}

    def version(package: str) -> str:
        if package in known:
            return known[package]
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", version)
    assert installed_runtimes() == known


def test_every_target_says_what_becomes_of_attention() -> None:
    for text in STATED:
        sentence = parse_target(text).attention
        assert sentence.endswith(".")
        assert "Q and K" in sentence


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("flags\t\t: avx2 fma\n", False), ("flags\t\t: avx2 avx512_vnni\n", True), ("flags : avx_vnni\n", True), ("", None)],
)
def test_vnni_is_read_from_cpuinfo(tmp_path: Path, flags: str, expected: bool | None) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\n{flags}", encoding="utf-8")
    assert has_vnni(path) is expected
    assert has_vnni(tmp_path / "missing") is None


def test_overflow_fix_follows_vnni() -> None:
    from dataclasses import replace

    target = parse_target("onnxruntime-cpu@1.31.1")
    fixes = {vnni: replace(target, vnni=vnni).overflow_fix for vnni in (True, False, None)}
    assert fixes == {True: "disable", False: "enable", None: "disable"}


def test_numbers_of_a_version() -> None:
    assert release("1.31.1") == (1, 31, 1)
    assert release("1.32.0.dev20261101") == (1, 32, 0)
    assert release("") == ()
