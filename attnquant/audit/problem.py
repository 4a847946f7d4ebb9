"""What an audit can find wrong."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "placement",
    "setup",
    "scale",
    "zero point",
    "type",
    "opset",
    "positions",
    "embedding",
    "target type",
    "not fused",
    "cache",
    "control flow",
]
Severity = Literal["violation", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding at one node."""

    kind: Kind
    node: str
    tensor: str
    reason: str
    severity: Severity = "violation"
    site: str | None = None
    """Id of the attention it concerns, None outside all of them."""

    def __str__(self) -> str:
        """One line: where, what."""
        return f"{self.kind} at node {self.node!r}, tensor {self.tensor!r}: {self.reason}"
