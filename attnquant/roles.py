"""The vocabulary of attention ports. No third-party import: everything else may depend on it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class PortRole(StrEnum):
    """What a tensor means to an attention; the same words are used in Python, TOML and JSON."""

    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    SCORES = "scores"
    """Q K^T, scaled, before mask and softmax."""
    PROBABILITIES = "probabilities"
    """Softmax output P."""
    CONTEXT = "context"
    """P V, the attention's result."""
    MASK = "mask"
    PAST_KEY = "past_key"
    PAST_VALUE = "past_value"
    PRESENT_KEY = "present_key"
    PRESENT_VALUE = "present_value"


Family = Literal["attention", "linear_attention", "rotary", "cache", "state", "projection"]
"""What an operator is for. Only "attention" (a product Q K^T under a softmax) makes an AttentionSite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortSpec:
    """One formal input or output of an operator, as published."""

    index: int
    name: str
    role: PortRole | None = None
    shares: tuple[PortRole, ...] = ()
    """Further roles held by the same tensor: `past` of com.microsoft Attention is past_key and past_value in one."""
    since: int = 1
    """Operator version that brought the port."""
    optional: bool = False
    release: str = ""
    """First ONNX Runtime release that publishes the port, where the operator version stayed; "" for 1.24 and before."""

    @property
    def roles(self) -> tuple[PortRole, ...]:
        """Every role that the port's tensor holds."""
        return () if self.role is None else (self.role, *self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeSpec:
    """Names of the attributes that state a property; "" where the operator has no such attribute."""

    q_heads: str = ""
    kv_heads: str = ""
    scale: str = ""
    zero_scale_is_default: bool = False
    """A scale of 0.0 means 1/sqrt(head size), as an absent one does."""
    causal: str = ""
    causal_default: bool | None = False
    """What holds without the attribute; None where only the input data say."""
    softcap: str = ""
    window: tuple[str, str] | None = None
    """(left, right) bounds beside the query's own position; -1 is unlimited."""
    local_window: str = ""
    """Number of visible keys up to and with the query's own; -1 is unlimited."""
    side_window: str = ""
    """Visible keys on each side of the query's own."""
    rotary: str = ""
    """Non-zero: the operator applies RoPE to Q and K itself."""
    sinks: str = ""
    """Non-zero: one is added to the softmax denominator."""
    hidden_sizes: str = ""
    """Widths of Q, K and V behind an inner projection."""
    v_head_dim: str = ""
    score_modifier: str = ""
    """A subgraph that may mask or cap the scores in any way."""
    scores_mode: str = ""
    """Selects what the score output holds, by `OperatorSpec.score_roles`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpec:
    """One operator of the catalogue: its published form and what it means to attention-aware quantization.

    `quantized` are the roles that the default policy quantizes at this operator's ports; where it is empty for an
    attention, `reason` says why.
    """

    domain: str
    op_type: str
    versions: tuple[int, ...]
    """Every since_version that the row describes, oldest first."""
    until: int
    """Newest opset version of the domain that the row was compared with: a later one may mean something else."""
    family: Family
    inputs: tuple[PortSpec, ...]
    outputs: tuple[PortSpec, ...]
    layout: str
    attributes: AttributeSpec = AttributeSpec()
    quantized: tuple[PortRole, ...] = ()
    reason: str = ""
    packed: tuple[str, ...] = ()
    """Packed forms the operator takes: "qkv" when K and V are left out, "kv" when V is."""
    score_roles: tuple[tuple[int, PortRole], ...] = ()
    """What the score output holds for each value of the scores_mode attribute; other values hold neither."""
    sink_port: str = ""
    """Name of the input that brings one sink logit a head."""
    release: str = ""
    """First ONNX Runtime release that publishes the operator; "" for 1.24 and before, and for operators of the standard."""
    inner_weight: tuple[str, int] | None = None
    """Weight of a projection inside the operator: port name, and how many hidden sizes its columns hold."""
    self_only: bool = False
    """Q, K and V all come from one input."""

    @property
    def since_version(self) -> int:
        """First version of the operator."""
        return self.versions[0]

    def since(self, version: int) -> int | None:
        """The operator version in force at an opset version; None before the first and after the last known one."""
        known = [since for since in self.versions if since <= version]
        return known[-1] if known and version <= self.until else None

    def form(self, version: int) -> str:
        """`AttentionSite.form` at an opset version, e.g. "ai.onnx::Attention@23"."""
        return f"{self.domain}::{self.op_type}@{self.since(version)}"

    def input(self, role: PortRole) -> PortSpec | None:
        """First input with this role."""
        return next((port for port in self.inputs if role in port.roles), None)

    def output(self, role: PortRole) -> PortSpec | None:
        """First output with this role."""
        return next((port for port in self.outputs if role in port.roles), None)
