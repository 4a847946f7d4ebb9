"""The catalogue of operators: typed rows only, one for each attention operator and each cache or rotary operator around it.

A new operator is one row in the module of its domain.
"""

from attnquant.metatypes import ai_onnx, com_microsoft
from attnquant.roles import OperatorSpec

CATALOGUE: dict[tuple[str, str], OperatorSpec] = {
    (row.domain, row.op_type): row for row in (*ai_onnx.ROWS, *com_microsoft.ROWS)
}
"""Every row by (domain, op_type); the default domain is written "ai.onnx"."""

NOT_ATTENTION: dict[tuple[str, str], str] = {
    ("ai.onnx", "DisentangledAttention_TRT"): "adds products that are already made; Q, K and V are not among its inputs",
    ("com.microsoft", "LinearAttentionGate"): "makes the decay of a linear attention, no context",
    ("com.microsoft", "SparseAttentionIndexer"): "chooses the keys that another operator attends to, makes no context",
    ("com.microsoft", "PackedSparseAttentionIndexer"): "chooses the keys that another operator attends to, makes no context",
    ("com.microsoft", "PackedSparseAttentionIndexerMerge"): "merges choices of keys, makes no context",
    ("com.microsoft", "GatedDeltaNetStateReplay"): "restores the state of a linear attention, makes no context",
}
"""Operators that sound like attention and are none, with the reason."""


def find(domain: str, op_type: str, version: int) -> OperatorSpec | None:
    """The row in force at an opset version of the domain, None where the catalogue has none.

    A version before the operator's first, or after the newest one the row was compared with, finds nothing.
    """
    row = CATALOGUE.get((domain or "ai.onnx", op_type))
    return row if row is not None and row.since(version) is not None else None


def for_form(form: str) -> OperatorSpec | None:
    """The row behind `AttentionSite.form`, None for "decomposed"."""
    domain, _, rest = form.partition("::")
    return CATALOGUE.get((domain, rest.partition("@")[0]))
