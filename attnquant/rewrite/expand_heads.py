"""com.microsoft MultiHeadAttention and Attention written out, as the CPU kernels of ONNX Runtime compute them."""

import math

import numpy as np
import onnx_ir as ir

from attnquant.graph import constant
from attnquant.rewrite import positions
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.product import Operands, attend, heads_first, heads_merged
from attnquant.rewrite.result import Refused
from attnquant.rewrite.subject import Expansion, Subject
from attnquant.roles import PortRole

_ROLES = (PortRole.QUERY, PortRole.KEY, PortRole.VALUE)


def expand_multi_head(draft: Draft, subject: Subject) -> Expansion:
    """Draft a MultiHeadAttention. Raises Refused for shared buffers, beam search, and masks of padded batches on CUDA."""
    for name in ("past_sequence_length", "cache_indirection"):
        if subject.input(name) is not None:
            raise Refused(f"input {name!r} (a cache shared by past and present) is not written out")
    heads = _heads(subject)
    whole = _operands(draft, subject, heads)
    flat = _biased(draft, subject, whole)
    query, key, value = (item if subject.facts.rank(item) == 4 or item in whole[3:] else
                         heads_first(draft, item, heads, role.value) for role, item in zip(_ROLES, flat, strict=True))
    past_key, past_value = subject.input("past_key"), subject.input("past_value")
    padding = subject.input("key_padding_mask")
    return _attended(draft, subject, whole[:3], (query, key, value), (past_key, past_value), padding)


def expand_packed_weight(draft: Draft, subject: Subject) -> Expansion:
    """Draft an Attention with its projection. Raises Refused for rotary embedding and shared buffers."""
    one = subject.operator
    if one.number("do_rotary", 0) or one.number("past_present_share_buffer", 0):
        raise Refused("rotary embedding or a shared cache inside com.microsoft Attention is not written out")
    heads, widths = _heads(subject), _widths(subject)
    projected = draft.op("MatMul", [subject.input("input"), subject.input("weights")], "projection")
    if (bias := subject.input("bias")) is not None:
        projected = draft.op("Add", [projected, bias], "projection_bias")
    parts = draft.split(projected, widths, -1, "projected")
    query, key, value = (heads_first(draft, part, heads, role.value) for role, part in zip(_ROLES, parts, strict=True))
    past: tuple[ir.Value | None, ir.Value | None] = (None, None)
    if (stacked := subject.input("past")) is not None:
        past = (_taken(draft, stacked, 0, "past_key"), _taken(draft, stacked, 1, "past_value"))
    made = _attended(draft, subject, (parts[0], parts[1], parts[2]), (query, key, value), past, subject.input("mask_index"))
    keys, values = made.outputs[1], made.outputs[2]
    assert keys is not None
    assert values is not None
    stack = [draft.unsqueeze(keys, [0], "keys_stacked"), draft.unsqueeze(values, [0], "values_stacked")]
    outputs = {0: made.outputs[0], 1: draft.op("Concat", stack, "present", axis=0)}
    return Expansion(outputs=outputs, query=made.query, key=made.key, value=made.value, product=made.product)


def _taken(draft: Draft, stacked: ir.Value, index: int, label: str) -> ir.Value:
    return draft.op("Gather", [stacked, draft.integer(index, f"{label}_index")], label, axis=0)


def _heads(subject: Subject) -> int:
    heads = subject.site.q_heads
    if not heads:
        raise Refused("the operator has no num_heads")
    return heads


def _widths(subject: Subject) -> tuple[int, int, int]:
    stated = subject.operator.node.attributes.get("qkv_hidden_sizes")
    if stated is not None and not stated.is_ref():
        first, second, third = (int(width) for width in stated.as_ints())
        return first, second, third
    weights = subject.input("weights")
    total = None if weights is None else subject.width(weights, -1)
    if total is None or total % 3:
        raise Refused("the width of the packed weight is not known")
    return total // 3, total // 3, total // 3


def _operands(draft: Draft, subject: Subject, heads: int) -> tuple[ir.Value, ...]:
    """Q, K and V as they come, packed ones taken apart into (batch, heads, S, size); those are repeated behind the three."""
    query = subject.tensor(PortRole.QUERY)
    if subject.site.packed == "qkv":
        parts = _unpacked(draft, query, 3)
        return (*parts, *parts)
    key = subject.tensor(PortRole.KEY)
    if subject.site.packed == "kv":
        parts = _unpacked(draft, key, 2)
        return (query, *parts, *parts)
    return query, key, subject.tensor(PortRole.VALUE)


def _unpacked(draft: Draft, packed: ir.Value, count: int) -> list[ir.Value]:
    """(batch, S, heads, count, size) as `count` tensors (batch, heads, S, size)."""
    turned = draft.transpose(packed, [3, 0, 2, 1, 4], "unpacked")
    return [_taken(draft, turned, index, ("query", "key", "value")[index + 3 - count]) for index in range(count)]


def _biased(draft: Draft, subject: Subject, whole: tuple[ir.Value, ...]) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Q, K and V with the bias of their projection; K and V of four axes come from a cache and have it already."""
    bias = subject.input("bias")
    query, key, value = whole[:3]
    if bias is None:
        return query, key, value
    if whole[3:]:
        raise Refused("a bias on packed Q, K and V is not written out")
    heads, site = _heads(subject), subject.site
    if site.qk_head_dim is None or site.v_head_dim is None:
        raise Refused("the head sizes are not known: pass one set of inputs as feeds")
    widths = (heads * site.qk_head_dim, heads * site.qk_head_dim, heads * site.v_head_dim)
    parts = draft.split(bias, widths, 0, "bias")
    flat = [subject.facts.rank(item) != 4 for item in (query, key, value)]
    return tuple(  # type: ignore[return-value]
        draft.op("Add", [item, part], f"{role.value}_biased") if add else item
        for role, item, part, add in zip(_ROLES, (query, key, value), parts, flat, strict=True)
    )


def _attended(
    draft: Draft,
    subject: Subject,
    named: tuple[ir.Value, ...],
    operands: tuple[ir.Value, ir.Value, ir.Value],
    past: tuple[ir.Value | None, ir.Value | None],
    padding: ir.Value | None,
) -> Expansion:
    query, key, value = operands
    if past[0] is not None and past[1] is not None:
        key = draft.op("Concat", [past[0], key], "present_key", axis=2)
        value = draft.op("Concat", [past[1], value], "present_value", axis=2)
    site, one = subject.site, subject.operator
    biases = [item for item in (_padding(draft, subject, padding, key), subject.input("attention_bias")) if item is not None]
    allowed = []
    if one.number("unidirectional", 0):
        offset = None if past[0] is None else draft.dim(past[0], 2, "past")
        rows = positions.query_rows(draft, query, offset)
        allowed.append(positions.before(draft, rows, positions.key_columns(draft, key)))
    made = Operands(
        query=query, key=key, value=value, q_heads=site.q_heads, kv_heads=site.q_heads, qk_head_dim=site.qk_head_dim,
        v_head_dim=site.v_head_dim, scale=one.number("scale", 0.0) or None, biases=tuple(biases), allowed=tuple(allowed),
    )
    product = attend(draft, made)
    outputs = {0: heads_merged(draft, product.context), 1: key, 2: value, 3: product.masked}
    return Expansion(outputs=outputs, query=named[0], key=named[1], value=named[2], product=product)


def _padding(draft: Draft, subject: Subject, mask: ir.Value | None, key: ir.Value) -> ir.Value | None:
    """The bias of a padding mask: 0 for what is kept, mask_filter_value for the rest."""
    if mask is None:
        return None
    rank = subject.rank_of(mask, "padding mask")
    if rank == 1:
        size, batch = subject.width(mask, 0), subject.width(subject.operator.node.inputs[0] or mask, 0)
        if size is not None and batch is not None and size != batch:
            raise Refused(f"a padding mask of {size!r} numbers for a batch of {batch!r} is not written out")
        lengths = positions.for_each_sample(draft, mask, "lengths")
        kept = positions.filled(draft, lengths, positions.key_columns(draft, key))
    elif rank in (2, 3):
        kept = draft.cast(mask, ir.DataType.BOOL, "padding")
        kept = draft.unsqueeze(kept, [1, 2] if rank == 2 else [1], "padding_each")
    else:
        raise Refused(f"a padding mask of {rank} axes is not written out")
    fill = subject.operator.number("mask_filter_value", -10000.0)
    if fill is None or not math.isfinite(fill):
        raise Refused(f"mask_filter_value {fill!r}: expected a finite number")
    if (array := constant(mask)) is not None and rank > 1 and bool((np.asarray(array) > 0).all()):
        return None
    return draft.op("Where", [kept, draft.number(0.0, "kept"), draft.number(fill, "fill")], "padding_bias")
