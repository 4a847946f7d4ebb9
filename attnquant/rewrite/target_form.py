"""The operators that attention can be fused to."""

from dataclasses import dataclass

from attnquant.errors import ModelError

TARGETS = (
    "ai.onnx::Attention@23",
    "ai.onnx::Attention@24",
    "com.microsoft::MultiHeadAttention",
    "com.microsoft::GroupQueryAttention",
)
MINIMUM = 13


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One operator, as `fuse(to=...)` names it."""

    domain: str
    op_type: str
    opset: int
    """The least opset of ai.onnx that a model with it has."""

    @property
    def form(self) -> str:
        """As in AttentionSite.form, without the version."""
        return f"{self.domain}::{self.op_type}"


def parse(name: str) -> Target:
    """One of TARGETS; a version 1 behind com.microsoft is allowed. Raises ModelError for anything else."""
    plain = name.removesuffix("@1") if name.startswith("com.microsoft::") else name
    if plain not in TARGETS:
        msg = f"to={name!r}: expected one of {', '.join(TARGETS)}. ONNX Runtime has no kernel for Attention of opset 25."
        raise ModelError(msg)
    form, _, version = plain.partition("@")
    domain, _, op_type = form.partition("::")
    return Target(domain=domain, op_type=op_type, opset=int(version or MINIMUM))
