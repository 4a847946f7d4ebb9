"""What a report says about one model, as a frozen value: its attentions, what became of each and why.

Made from a Recognition, alone or with the QuantizerSetup placed on it; `as_json` is the published JSON (docs/json.md).
"""

import importlib.metadata
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from attnquant.pace import GateReport
from attnquant.placement import QUANTIZED_ALREADY, QuantizationPoint, QuantizerSetup
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite, NearMiss, Recognition

Status = Literal["found", "quantized", "skipped", "violates"]

UNKNOWN = "?"
_PACKAGES = ("attnquant", "nncf", "onnx", "onnx-ir", "onnxruntime", "onnxruntime-gpu")


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide a result, those that are installed, read without importing any."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def account_of_recognition(recognition: Recognition, *, model: str = UNKNOWN, target: str | None = None) -> "Account":
    """The account of what `recognize` found, before anything is done to it."""
    rows = tuple(SiteRow(site=site, status="found") for site in recognition.sites)
    return Account(model=model, rows=rows, near_misses=recognition.near_misses, target=target)


def account_of_setup(recognition: Recognition, setup: QuantizerSetup, *, model: str = UNKNOWN) -> "Account":
    """The account of a quantization by what the setup asks for; what a graph really holds is for `check` to say."""
    points: dict[str, list[QuantizationPoint]] = {}
    skips: dict[str, dict[PortRole, str]] = {}
    for point in setup.points:
        points.setdefault(point.site, []).append(point)
    for skip in setup.skipped:
        skips.setdefault(skip.site, {})[skip.role] = skip.reason
    return Account(
        model=model,
        rows=tuple(_row(site, points.get(site.id, []), skips.get(site.id, {})) for site in recognition.sites),
        near_misses=recognition.near_misses,
        notes=quantization_notes(setup.target, recognition.sites),
        target=setup.target or None,
    )


def quantization_notes(target: str, sites: Iterable[AttentionSite]) -> tuple[str, ...]:
    """What the target really computes in int8. Known, because measured, for ONNX Runtime on CPU only (docs/targets.md)."""
    decomposed = {site.form == DECOMPOSED for site in sites}
    if not decomposed:
        return ("No attention was found: the linears alone are quantized.",)
    if not target.startswith("onnxruntime-cpu"):
        return ()
    notes = ["On ONNX Runtime CPU the speed comes from the int8 linears."]
    if False in decomposed:
        notes.append(
            "Attention operators run as float kernels there: the quantizers of Q and K cost a little of their time and keep "
            "the numbers of targets whose attention is int8."
        )
    if True in decomposed:
        notes.append("Decomposed attention computes Q K^T as an int8 MatMul, softmax and P V in float.")
    return tuple(notes)


def as_json(account: "Account") -> dict[str, Any]:
    """The account as JSON values."""
    linears = account.linears
    return {
        "model": account.model,
        "versions": dict(account.versions),
        "target": account.target,
        "sites": [_site_json(row) for row in account.rows],
        "near_misses": [{"nodes": list(miss.nodes), "reason": miss.reason} for miss in account.best_near_misses],
        "linears": linears and {"int8": linears.int8, "total": linears.total, "exceptions": list(linears.exceptions)},
        "unplanned": list(account.unplanned),
        "notes": list(account.notes),
        "gate": account.gate and account.gate.as_json(),
    }


def kept(role: PortRole, reason: str) -> str:
    """Why nothing was added for a role, as a reason of a site whose other roles are quantized."""
    return f"{role}: {reason}" if reason == QUANTIZED_ALREADY else f"{role} float: {reason}"


def _row(site: AttentionSite, points: list[QuantizationPoint], skips: Mapping[PortRole, str]) -> "SiteRow":
    asked = {role: skips[role] for role in (PortRole.QUERY, PortRole.KEY) if role in skips}
    if not points:
        return SiteRow(site=site, status="skipped", reasons=tuple(dict.fromkeys(asked.values())))
    reasons = [kept(role, reason) for role, reason in asked.items()]
    reasons += [f"{point.role}: {point.note}" for point in points if point.note]
    return SiteRow(
        site=site,
        status="quantized",
        reasons=tuple(reasons),
        quantized={
            point.role: Quantizer(dtype=point.dtype, granularity=point.granularity, symmetric=point.symmetric)
            for point in points
        },
    )


def _site_json(row: "SiteRow") -> dict[str, Any]:
    site = row.site
    return {
        "id": site.id,
        "form": site.form,
        "kind": site.kind,
        "traits": list(site.traits),
        "past": site.past,
        "node": site.node,
        "heads": {
            "q_heads": site.q_heads,
            "kv_heads": site.kv_heads,
            "kv_repeat": site.kv_repeat,
            "qk_head_dim": site.qk_head_dim,
            "v_head_dim": site.v_head_dim,
        },
        "scale": _finite(site.scale),
        "causal": site.causal,
        "window": None if site.window is None else list(site.window),
        "softcap": _finite(site.softcap),
        "sinks": site.sinks,
        "ports": {role.value: _port_json(row, role) for role in PortRole if role in site.ports},
        "status": row.status,
        "reasons": list(row.reasons),
    }


def _finite(number: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if number is not None and math.isfinite(number) else None


def _port_json(row: "SiteRow", role: PortRole) -> dict[str, Any]:
    quantizer = row.quantized.get(role)
    return {
        "tensor": row.site.ports[role].tensor,
        "quantized": quantizer
        and {"dtype": quantizer.dtype, "granularity": quantizer.granularity, "symmetric": quantizer.symmetric},
    }


class Outcome(Protocol):
    """A QuantizationResult or a Plan, as far as its account goes."""

    @property
    def recognition(self) -> Recognition:
        """The attentions and near misses of the float model."""

    @property
    def setup(self) -> QuantizerSetup:
        """What was placed on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """What a port is quantized to."""

    dtype: str
    granularity: str
    symmetric: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteRow:
    """One attention and what became of it."""

    site: AttentionSite
    status: Status
    reasons: tuple[str, ...] = ()
    quantized: Mapping[PortRole, Quantizer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Linears:
    """Linears with a constant weight: how many are int8, and of every other one its name and the reason."""

    int8: int
    total: int
    exceptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Everything a report says about one model."""

    model: str
    rows: tuple[SiteRow, ...]
    near_misses: tuple[NearMiss, ...] = ()
    linears: Linears | None = None
    unplanned: tuple[str, ...] = ()
    """Quantizers that no setup asked for."""
    notes: tuple[str, ...] = ()
    target: str | None = None
    gate: GateReport | None = None
    """What the speed gate measured, where it was asked for."""
    versions: Mapping[str, str] = field(default_factory=installed_versions)

    @property
    def best_near_misses(self) -> tuple[NearMiss, ...]:
        """The near misses, the most telling first."""
        return tuple(sorted(self.near_misses, key=lambda miss: -miss.progress))


@dataclass(frozen=True, slots=True, kw_only=True)
class Accounts:
    """The accounts of several models that belong together, by the name of the part."""

    parts: Mapping[str, Account]
