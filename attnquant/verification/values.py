"""What `verify` found, as frozen values and as JSON (docs/json.md)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from attnquant.account import UNKNOWN, installed_versions
from attnquant.check import CheckReport
from attnquant.roles import PortRole


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRow:
    """One output of the model, quantized against float."""

    name: str
    snr_db: float | None = None
    """Over all samples, at most 200 (equal); None where the output is not floating point."""
    cosine: float | None = None
    max_abs: float | None = None
    top1: float | None = None
    """Share of rows with the same largest class; None where the output is not taken for logits."""
    kl: float | None = None
    """Mean KL divergence from the float model, nats."""
    equal: float | None = None
    """Share of equal elements of an output that is not floating point."""
    logits: bool = False
    samples: tuple[float | None, ...] = ()
    """SNR of each sample in dB, or its share of equal elements."""
    worst: int | None = None
    """Index of the worst sample."""
    names: tuple[str, ...] = ()
    """Names of the samples, as far as they have any."""
    fault: str = ""
    """Why the output can't be compared."""

    def sample_name(self, index: int) -> str:
        """Name of a sample, "sample 3" where it has none."""
        return self.names[index] if index < len(self.names) else f"sample {index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerRow:
    """A quantizer of an attention and the values that reached it."""

    role: PortRole
    node: str
    tensor: str
    dtype: str
    range: tuple[float, float] | None
    """Lowest and highest value it can hold."""
    values: tuple[float, float] | None
    """Lowest and highest value that reached it."""
    clipped: float | None
    """Share of the values beyond the range."""
    unused: float | None
    """Share of the range that no value reaches."""
    histogram: tuple[int, ...] = ()
    edges: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteVerdict:
    """One attention of the quantized model on one provider."""

    id: str
    node: str
    form: str
    snr_db: Mapping[PortRole, float | None]
    """Against the float model, at every observed role: errors of earlier layers are in it."""
    smoothed: tuple[PortRole, ...] = ()
    """Roles whose SNR leaves out a factor for each channel, which smoothing put between two linear layers."""
    local_snr_db: float | None = None
    """Context against a float computation from the same inputs: the attention's own error."""
    expected_snr_db: float | None = None
    """The same with Q and K of 8 bits and the ranges of the data: what quantizing costs here at least."""
    attribution_db: float | None = None
    """What the SNR of the worst output gains when this attention alone is float."""
    dead_rows: Mapping[str, float | None] = field(default_factory=dict)
    """Share of the queries that see no key, by model: "float", "quantized"."""
    quantizers: tuple[QuantizerRow, ...] = ()
    suspect: bool = False
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderReport:
    """What was measured on one execution provider."""

    outputs: tuple[OutputRow, ...]
    sites: tuple[SiteVerdict, ...]

    @property
    def snr_db(self) -> float | None:
        """SNR of the worst float output; None where there is none."""
        return min((row.snr_db for row in self.outputs if row.snr_db is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """What `verify` found."""

    placement: CheckReport
    providers: Mapping[str, ProviderReport]
    between: Mapping[tuple[str, str], tuple[OutputRow, ...]] = field(default_factory=dict)
    """The quantized model on the second provider against the first."""
    samples: int
    min_snr: float | None = None
    notes: tuple[str, ...] = ()
    float_model: str = UNKNOWN
    quantized_model: str = UNKNOWN
    command: str = ""
    versions: Mapping[str, str] = field(default_factory=installed_versions)

    @property
    def placement_ok(self) -> bool:
        """The graph is quantized as the setup it carries, or else the recipe, asks for."""
        return self.placement.ok

    @property
    def suspects(self) -> tuple[SiteVerdict, ...]:
        """Suspect attentions, each once."""
        found = {site.id: site for report in self.providers.values() for site in report.sites if site.suspect}
        return tuple(found.values())

    @property
    def failures(self) -> tuple[str, ...]:
        """Everything that makes the verification fail, one sentence each."""
        found = [f"{name} is suspect" for name in (site.id for site in self.suspects)]
        for name, report in self.providers.items():
            found += [f"{name}: output {row.name!r}: {row.fault}" for row in report.outputs if row.fault]
            worst = report.snr_db
            if self.min_snr is not None and (worst is None or worst < self.min_snr):
                got = "no float output to measure" if worst is None else f"{worst:.1f} dB"
                found.append(f"{name}: expected an SNR of {self.min_snr:g} dB at least, got {got}")
        if not self.placement_ok:
            found += [f"placement: {reason}" for reason in self.placement.violations]
        return tuple(found)

    @property
    def ok(self) -> bool:
        """No attention is suspect, the placement is as asked, and the SNR is not below `min_snr`."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """JSON values as `attnquant verify --format json` prints them (docs/json.md)."""
        return {
            "float": self.float_model,
            "quantized": self.quantized_model,
            "versions": dict(self.versions),
            "command": self.command,
            "ok": self.ok,
            "failures": list(self.failures),
            "placement_ok": self.placement_ok,
            "placement": list(self.placement.violations),
            "samples": self.samples,
            "min_snr_db": self.min_snr,
            "providers": {name: _provider(report) for name, report in self.providers.items()},
            "between": [
                {"providers": list(pair), "outputs": [_output(row) for row in rows]} for pair, rows in self.between.items()
            ],
            "notes": list(self.notes),
        }


def _provider(report: ProviderReport) -> dict[str, Any]:
    return {
        "snr_db": report.snr_db,
        "outputs": [_output(row) for row in report.outputs],
        "sites": [_site(row) for row in report.sites],
    }


def _output(row: OutputRow) -> dict[str, Any]:
    content = asdict(row)
    worst = content.pop("worst")
    del content["names"]
    name = None if worst is None else row.sample_name(worst)
    of_worst = None if worst is None else {"index": worst, "name": name, "value": row.samples[worst]}
    return {**content, "max_abs": finite(row.max_abs), "samples": list(row.samples), "worst_sample": of_worst}


def _site(row: SiteVerdict) -> dict[str, Any]:
    return {
        "id": row.id,
        "node": row.node,
        "form": row.form,
        "snr_db": {role.value: value for role, value in row.snr_db.items()},
        "smoothed": [role.value for role in row.smoothed],
        "local_snr_db": row.local_snr_db,
        "expected_snr_db": row.expected_snr_db,
        "attribution_db": row.attribution_db,
        "dead_rows": dict(row.dead_rows),
        "quantizers": [
            {**asdict(item), "role": item.role.value, "histogram": list(item.histogram)} for item in row.quantizers
        ],
        "suspect": row.suspect,
        "reasons": list(row.reasons),
    }


def finite(number: float | None) -> float | None:
    """JSON has no infinity."""
    return None if number is None or abs(number) == float("inf") else number
