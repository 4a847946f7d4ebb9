"""What a runtime and its version can load and fuse: rules as data. docs/targets.md says where each comes from.

A target is only described here; `attnquant.emission` acts on it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from attnquant.errors import AttnQuantError, HostError

NAMES = ("onnxruntime-cpu", "onnxruntime-cuda", "openvino")
"""Targets by the name that users write, "@VERSION" behind it or not."""

ActivationType = Literal["uint8", "int8", "any"]
OverflowFix = Literal["disable", "enable"]
Versions = dict[str, str]

_RUNTIMES = {"onnxruntime-cpu": ("onnxruntime", "onnxruntime-gpu"), "onnxruntime-cuda": ("onnxruntime-gpu",)}
_OLDEST = {"onnxruntime-cpu": (1, 24), "onnxruntime-cuda": (1, 24), "openvino": (2024, 0)}

_OPSETS = (((1, 32), 28), ((1, 27), 26), ((1, 24), 25))
"""(version of ONNX Runtime, newest opset that it loads), newest first."""
_GEMM_BETWEEN_RESHAPES = (1, 27)
"""From this ONNX Runtime on, a Gemm between reshapes is int8 at opsets 23 and later too (1.24.4: not)."""

_ATTENTION = {
    "onnxruntime-cpu": (
        "ONNX Runtime's CPU has no int8 attention operator: Q and K are rounded to int8, and QK^T is computed in int8 only "
        "where it is a MatMul of its own; softmax and PV are float32. The speed comes from the int8 linears."
    ),
    "onnxruntime-cuda": (
        "ONNX Runtime's CUDA provider computes Q/DQ models in floating point: Q and K are rounded to int8, no faster."
    ),
    "openvino": "OpenVINO computes QK^T in int8 where Q and K are quantized; softmax and PV stay in floating point.",
}

_SIGNED_KEYS = (1, 31)
"""ONNX Runtime from which K may be signed: its tests (tests/test_emission_keys.py) were run with 1.31.1 and 1.32.0 alone."""
_CPU_PASSES = (
    "opsets", "unsigned", "smooth", "sharing", "embedding", "exact", "lefts", "stacks", "forks", "outputs", "keys",
    "biases", "clips", "gelus", "interleaves", "residuals", "clean",
)  # fmt: skip
_PASSES = {
    "onnxruntime-cpu": _CPU_PASSES,
    "onnxruntime-cuda": ("opsets", "smooth", "sharing", "embedding", "outputs", "clean"),
    "openvino": ("opsets", "smooth", "sharing", "clean"),
}


def parse_target(text: str | None = None, *, installed: Callable[[], Versions] | None = None) -> "Target":
    """The target behind "NAME" or "NAME@VERSION"; None is "onnxruntime-cpu".

    Without a version it is the installed runtime's. OpenVINO need not be installed: its rules do not depend on the version.

    :param installed: {package: version} of the runtimes; by default what importlib.metadata finds.
    :raises AttnQuantError: the name or the version is not known.
    :raises HostError: the version of ONNX Runtime is asked for and none, or more than one, is installed.
    """
    name, at, version = (text or NAMES[0]).strip().partition("@")
    if name not in NAMES or (at and not re.fullmatch(r"\d+(\.\d+)*(\.?(dev|rc|post)\d+)?", version)):
        msg = f"Target: expected one of {', '.join(NAMES)}, with @VERSION or without, got {text!r}."
        raise AttnQuantError(msg)
    if not at:
        version = _installed_version(name, (installed or installed_runtimes)())
    if version and release(version) < _OLDEST[name]:
        oldest = ".".join(map(str, _OLDEST[name]))
        msg = f"Target {name}: expected version {oldest} or later, got {version!r}. Upgrade the runtime."
        raise AttnQuantError(msg)
    return _target(name, version)


def installed_runtimes() -> Versions:
    """{package: version} of the installed packages that bring a runtime."""
    found = {}
    for package in ("onnxruntime", "onnxruntime-gpu", "openvino"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def runtime_conflict(installed: Versions | None = None) -> str | None:
    """A sentence on onnxruntime and onnxruntime-gpu being installed at once; None where they are not."""
    found = installed_runtimes() if installed is None else installed
    if "onnxruntime" not in found or "onnxruntime-gpu" not in found:
        return None
    return (
        f"Both onnxruntime {found['onnxruntime']} and onnxruntime-gpu {found['onnxruntime-gpu']} are installed; they write "
        "the same files, and which one runs depends on the order. Run `pip uninstall -y onnxruntime onnxruntime-gpu`, then "
        "`pip install attnquant[cpu]` or `pip install attnquant[gpu]`."
    )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, as far as they go: "1.31.1" is (1, 31, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def processor(cpuinfo: str | Path = "/proc/cpuinfo") -> dict[str, str]:
    """What Linux says of this machine's first processor, {"model name": ..., "flags": ...}; empty elsewhere."""
    try:
        lines = Path(cpuinfo).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = [line.partition(":") for line in lines if ":" in line]
    return {name.strip(): value.strip() for name, _, value in reversed(pairs)}


@cache
def has_vnni(cpuinfo: str | Path = "/proc/cpuinfo") -> bool | None:
    """Whether this machine's x86 CPU multiplies u8 x s8 without saturation (AVX512-VNNI, AVX-VNNI or AMX-INT8).

    None where that can't be told: another operating system, or no x86.
    """
    flags = processor(cpuinfo).get("flags")
    if flags is None:
        return None
    return any(flag in flags.split() for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))


def _installed_version(name: str, found: Versions) -> str:
    if name == "openvino":
        return found.get("openvino", "")
    conflict = runtime_conflict(found)
    if conflict:
        raise HostError(conflict)
    version = next((found[package] for package in _RUNTIMES[name] if package in found), None)
    if version is None:
        extra = "gpu" if name == "onnxruntime-cuda" else "cpu"
        remedy = f"Run `pip install attnquant[{extra}]`, or name a version: {name}@1.31.1."
        msg = f"Target {name}: expected an installed ONNX Runtime, got none. {remedy}"
        raise HostError(msg)
    return version


def _target(name: str, version: str) -> "Target":
    numbers = release(version)
    on_cpu = name == "onnxruntime-cpu"
    opsets = None if name == "openvino" else next((opset for since, opset in _OPSETS if numbers >= since), None)
    return Target(
        name=name,
        version=version,
        passes=_PASSES[name],
        activations="uint8" if on_cpu else "any",
        max_opset=opsets,
        gemm_opset=22 if on_cpu and numbers < _GEMM_BETWEEN_RESHAPES else None,
        one_scale=name != "openvino",
        int8_operators=frozenset(("MatMul", "Gemm", "Conv")) if name != "onnxruntime-cuda" else frozenset(),
        scales_tokens=on_cpu,
        attention=_ATTENTION[name],
        vnni=has_vnni() if on_cpu else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A runtime, its version, and what follows from them."""

    name: str
    version: str
    """"" where it is not known; then the rules are those of every supported version."""
    passes: tuple[str, ...]
    """Passes of attnquant.emission, in order."""
    activations: ActivationType
    """Type of quantized activations that loads and fuses at default settings."""
    max_opset: int | None
    """Newest ai.onnx opset that the runtime takes; None: no limit known."""
    gemm_opset: int | None
    """Newest opset at which MatMul and Add of a known shape, which become a Gemm between reshapes, are int8; None: any."""
    one_scale: bool
    """Kernels take one scale for an activation: a scale per channel loads, and QLinearConv fails when it runs."""
    int8_operators: frozenset[str]
    """Operators (ai.onnx) that execute in int8 between Q/DQ pairs."""
    scales_tokens: bool
    """Whether a scale per token, a division in front and a product behind, was measured to pay (docs/accuracy.md)."""
    attention: str
    """What becomes of Q and K at run time: a sentence for the report."""
    vnni: bool | None = None
    """Whether the CPU that will run the model multiplies u8 x s8 without saturation; None: not known."""

    @property
    def signs_keys(self) -> bool:
        """Whether K is signed int8 in front of Q K^T: where products of u8 and s8 are the fastest and exact."""
        return self.name == "onnxruntime-cpu" and self.vnni is True and release(self.version) >= _SIGNED_KEYS

    @property
    def overflow_fix(self) -> OverflowFix:
        """NNCF's overflow_fix: weights keep one bit less where the CPU is known to saturate."""
        return "enable" if self.vnni is False else "disable"

    @property
    def elsewhere(self) -> bool:
        """Whether results are for other kernels than the CPU's, which runs them unfused only (`runtime.session`)."""
        return self.activations == "any"

    def __str__(self) -> str:
        """As the user writes it, with the version where it is known."""
        return f"{self.name}@{self.version}" if self.version else self.name
