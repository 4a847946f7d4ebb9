"""Masks that follow from positions: causal, sliding window, padding by lengths. True: attend."""

import onnx_ir as ir

from attnquant.rewrite.draft import Draft


def before(draft: Draft, rows: ir.Value, columns: ir.Value) -> ir.Value:
    """Key `columns` (T,) is not after query `rows` (..., S, 1)."""
    return draft.op("LessOrEqual", [columns, rows], "causal")


def within(draft: Draft, rows: ir.Value, columns: ir.Value, left: int) -> ir.Value:
    """Key `columns` is at most `left` positions before query `rows`."""
    first = draft.op("Sub", [rows, draft.integer(left, "window")], "window_start")
    return draft.op("GreaterOrEqual", [columns, first], "window_mask")


def query_rows(draft: Draft, query: ir.Value, offset: ir.Value | None) -> ir.Value:
    """Positions of the queries (batch, heads, S, size): (S, 1), or with an offset of (batch, 1, 1, 1): (batch, 1, S, 1)."""
    rows = draft.unsqueeze(draft.count(draft.dim(query, 2, "queries"), "query_index"), [1], "query_column")
    return rows if offset is None else draft.op("Add", [rows, offset], "query_position")


def key_columns(draft: Draft, key: ir.Value) -> ir.Value:
    """Positions of the keys (batch, heads, T, size): (T,)."""
    return draft.count(draft.dim(key, 2, "keys"), "key_position")


def filled(draft: Draft, lengths: ir.Value, columns: ir.Value) -> ir.Value:
    """Key `columns` lies before the sample's length, int64 (batch, 1, 1, 1)."""
    return draft.op("Less", [columns, lengths], "filled")


def for_each_sample(draft: Draft, lengths: ir.Value, label: str) -> ir.Value:
    """A vector of the batch, of any integer type, as int64 (batch, 1, 1, 1)."""
    return draft.reshape(draft.cast(lengths, ir.DataType.INT64, f"{label}_int64"), [-1, 1, 1, 1], f"{label}_each")
