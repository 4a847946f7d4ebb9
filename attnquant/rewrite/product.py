"""softmax(scale * Q K^T + mask) V written out in operators of ai.onnx (Vaswani et al. 2017), from operands with heads first.

The order is that of ai.onnx Attention from onnx 1.22 on: scale, softcap, biases, masks, softmax, product with V.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.rewrite.draft import Draft
from attnquant.rewrite.result import Refused

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """What the product takes."""

    query: ir.Value
    """(batch, q_heads, S, head size)"""
    key: ir.Value
    """(batch, kv_heads, T, head size)"""
    value: ir.Value
    """(batch, kv_heads, T, v head size)"""
    q_heads: int | None
    kv_heads: int | None
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    scale: float | None = None
    """None: 1 / sqrt(head size)."""
    softcap: float = 0.0
    biases: tuple[ir.Value, ...] = ()
    """Added to the scores; broadcast to (batch, q_heads, S, T)."""
    allowed: tuple[ir.Value, ...] = ()
    """Boolean, True: attend; broadcast to (batch, q_heads, S, T)."""
    dead_rows: bool = False
    """A query may see no key at all: its row of probabilities is then zero."""
    sink: ir.Value | None = None
    """(1, q_heads or 1, 1, 1): one more logit for each row, whose probability is dropped."""
    precision: ir.DataType | None = None
    """Element type of the softmax, where it is another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The tensors of the written-out product, each (batch, q_heads, S, T) but the context."""

    scores: ir.Value
    """Scaled."""
    capped: ir.Value
    masked: ir.Value
    probabilities: ir.Value
    context: ir.Value
    """(batch, q_heads, S, v head size)"""


def attend(draft: Draft, operands: Operands) -> Product:
    """Draft the product. Raises Refused where heads that have to be repeated are not known."""
    key = repeated(draft, operands, operands.key, operands.qk_head_dim, "key")
    value = repeated(draft, operands, operands.value, operands.v_head_dim, "value")
    scores = _scores(draft, operands, key)
    capped = scores if not operands.softcap else _capped(draft, scores, operands.softcap)
    masked = capped
    for index, bias in enumerate(operands.biases):
        masked = draft.op("Add", [masked, bias], f"add_mask_{index}")
    if operands.allowed:
        allowed = both(draft, operands.allowed)
        masked = draft.op("Where", [allowed, masked, draft.number(-np.inf, "hidden")], "mask")
    probabilities = _softmax(draft, operands, masked)
    context = draft.op("MatMul", [probabilities, value], "context")
    return Product(scores=scores, capped=capped, masked=masked, probabilities=probabilities, context=context)


def both(draft: Draft, allowed: tuple[ir.Value, ...]) -> ir.Value:
    """Where all of these boolean masks are true."""
    first, *others = allowed
    for index, other in enumerate(others):
        first = draft.op("And", [first, other], f"allowed_{index}")
    return first


def heads_first(draft: Draft, value: ir.Value, heads: int, label: str) -> ir.Value:
    """(batch, S, heads * head size) as (batch, heads, S, head size)."""
    return draft.transpose(draft.reshape(value, [0, 0, heads, -1], f"{label}_heads"), [0, 2, 1, 3], f"{label}_heads_first")


def heads_merged(draft: Draft, context: ir.Value) -> ir.Value:
    """(batch, heads, S, head size) as (batch, S, heads * head size)."""
    return draft.reshape(draft.transpose(context, [0, 2, 1, 3], "context_heads_last"), [0, 0, -1], "output")


def repeated(draft: Draft, operands: Operands, value: ir.Value, width: int | None, label: str) -> ir.Value:
    """Every head of K or V as often as query heads share it: 0, 0, 1, 1, ..."""
    heads, own = operands.q_heads, operands.kv_heads
    if heads is None or own is None:
        raise Refused("the graph does not say how many heads there are: pass one set of inputs as feeds")
    if heads == own:
        return value
    if width is None or heads % own:
        raise Refused(f"{own} heads of K and V of size {width} can't be repeated for {heads} query heads")
    room = draft.unsqueeze(value, [2], f"{label}_copies")
    copies = draft.op("Expand", [room, draft.ints([1, 1, heads // own, 1, 1], "copies")], f"{label}_repeated")
    return draft.reshape(copies, [0, heads, -1, width], f"{label}_all_heads")


def _scores(draft: Draft, operands: Operands, key: ir.Value) -> ir.Value:
    """Scaled behind the product, or in half precision in front of it, where the sums would overflow."""
    query, turned = operands.query, draft.transpose(key, [0, 1, 3, 2], "key_transposed")
    factor = _factor(draft, operands)
    if factor is None:
        return draft.op("MatMul", [query, turned], "scores")
    if draft.dtype in _HALF:
        return draft.op("MatMul", [draft.op("Mul", [query, factor], "query_scaled"), turned], "scores")
    return draft.op("Mul", [draft.op("MatMul", [query, turned], "product"), factor], "scores")


def _factor(draft: Draft, operands: Operands) -> ir.Value | None:
    if operands.scale is not None:
        return None if operands.scale == 1.0 else draft.number(operands.scale, "scale")
    if operands.qk_head_dim is not None:
        return draft.number(operands.qk_head_dim**-0.5, "scale")
    width = draft.cast(draft.dim(operands.query, 3, "head_size"), draft.dtype, "head_size_float")
    return draft.op("Reciprocal", [draft.op("Sqrt", [width], "head_size_root")], "scale_computed")


def _capped(draft: Draft, scores: ir.Value, cap: float) -> ir.Value:
    bound = draft.number(cap, "softcap")
    inner = draft.op("Tanh", [draft.op("Div", [scores, bound], "capped_inner")], "capped_tanh")
    return draft.op("Mul", [inner, bound], "capped")


def _softmax(draft: Draft, operands: Operands, masked: ir.Value) -> ir.Value:
    dtype = operands.precision or draft.dtype
    if dtype != draft.dtype:
        masked = draft.cast(masked, dtype, "masked_cast")
    if operands.sink is None:
        result = draft.op("Softmax", [masked], "probabilities", axis=-1)
    else:
        result = _with_sink(draft, masked, operands.sink)
    if operands.dead_rows and operands.sink is None:
        empty = draft.op("IsNaN", [result], "no_key")
        result = draft.op("Where", [empty, draft.number(0.0, "no_probability", dtype), result], "probabilities_or_zero")
    return result if dtype == draft.dtype else draft.cast(result, draft.dtype, "probabilities_cast")


def _with_sink(draft: Draft, masked: ir.Value, sink: ir.Value) -> ir.Value:
    shape = draft.op("Shape", [masked], "masked_shape")
    rows = draft.op("Concat", [draft.op("Slice", [shape, draft.ints([0], "from"), draft.ints([3], "to")], "rows"),
                               draft.ints([1], "one_more")], "sink_shape", axis=0)
    column = draft.op("Expand", [sink, rows], "sink")
    result = draft.op("Softmax", [draft.op("Concat", [masked, column], "with_sink", axis=-1)], "with_sink_softmax", axis=-1)
    return draft.slice(result, 0, -1, 3, "probabilities")
