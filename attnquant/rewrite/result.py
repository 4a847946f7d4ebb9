"""What a rewriting gives back: the new model, and one row for each attention that it touched or refused."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import onnx_ir as ir

from attnquant import model as models
from attnquant.roles import PortRole

Status = Literal["fused", "expanded", "refused"]


class Refused(Exception):  # noqa: N818 (an outcome, not an error)
    """This site can't be rewritten; the message is the sentence of its row. It never leaves the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRow:
    """One attention and what became of it."""

    site: str
    """Id of the AttentionSite in the model that was given."""
    node: str
    """Name of the node that made the context there."""
    status: Status
    reasons: tuple[str, ...] = ()
    tensors: Mapping[PortRole, str] = field(default_factory=dict)
    """Names in the new model. Of an expanded site: query, key and value as the operator read them, packed ones taken apart;
    scores (scaled, before softcap and mask), probabilities and context, (batch, heads, S, ...) each. Of a fused site: the
    operator's ports."""

    def as_json(self) -> dict[str, Any]:
        """{"id", "node", "status", "reasons", "tensors"}"""
        return {
            "id": self.site,
            "node": self.node,
            "status": self.status,
            "reasons": list(self.reasons),
            "tensors": {role.value: name for role, name in self.tensors.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteResult:
    """A rewritten model and its rows, in graph order."""

    model: ir.Model
    rows: tuple[RewriteRow, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model, all of it or nothing. Raises ModelError where it can't be written (`attnquant.model.save`)."""
        models.save(self.model, path)

    def as_json(self, model: str = "?") -> dict[str, Any]:
        """The rows as JSON values: {"model", "sites": [{"id", "node", "status", "reasons", "tensors"}]}."""
        return {"model": model, "sites": [row.as_json() for row in self.rows]}
