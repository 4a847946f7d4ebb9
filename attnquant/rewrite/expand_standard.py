"""ai.onnx Attention of opset 23 and 24 written out, as the specification of onnx 1.23 has it."""

import numpy as np
import onnx_ir as ir

from attnquant.graph import constant
from attnquant.operators import Operator
from attnquant.rewrite import positions
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.product import Operands, Product, attend, heads_first, heads_merged
from attnquant.rewrite.result import Refused
from attnquant.rewrite.subject import Expansion, Subject
from attnquant.roles import PortRole

_SHOWN = {0: "scores", 1: "capped", 2: "masked", 3: "probabilities"}


def expand_standard(draft: Draft, subject: Subject) -> Expansion:
    """Draft the attention. Raises Refused for what opset 25 added, and where ranks or heads are not known."""
    one, site = subject.operator, subject.site
    if one.version > 24 and site.window != (-1, -1):
        raise Refused(f"sliding windows {site.window!r} of opset 25 are not written out")
    values = {role: subject.tensor(role) for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE)}
    flat = subject.rank(PortRole.QUERY) == 3
    query, key, value = (_with_heads(draft, subject, role, flat) for role in values)
    past_key, past_value = one.value(PortRole.PAST_KEY), one.value(PortRole.PAST_VALUE)
    if past_key is not None and past_value is not None:
        key = draft.op("Concat", [past_key, key], "present_key", axis=2)
        value = draft.op("Concat", [past_value, value], "present_value", axis=2)
    biases, allowed, dead = _masks(draft, subject, query, key)
    product = attend(
        draft,
        Operands(
            query=query, key=key, value=value, q_heads=site.q_heads, kv_heads=site.kv_heads,
            qk_head_dim=site.qk_head_dim, v_head_dim=site.v_head_dim, scale=one.number("scale"),
            softcap=one.number("softcap", 0.0) or 0.0, biases=biases, allowed=allowed, dead_rows=dead,
            precision=_precision(one),
        ),
    )
    context = heads_merged(draft, product.context) if flat else product.context
    outputs = {0: context, 1: key, 2: value, 3: _shown(one, product)}
    return Expansion(outputs=outputs, query=values[PortRole.QUERY], key=values[PortRole.KEY],
                     value=values[PortRole.VALUE], product=product)


def _with_heads(draft: Draft, subject: Subject, role: PortRole, flat: bool) -> ir.Value:
    value = subject.tensor(role)
    if not flat:
        return value
    heads = subject.site.q_heads if role == PortRole.QUERY else subject.site.kv_heads
    if heads is None:
        raise Refused("three axes without q_num_heads and kv_num_heads")
    return heads_first(draft, value, heads, role.value)


def _precision(one: Operator) -> ir.DataType | None:
    number = one.integer("softmax_precision", 0)
    return ir.DataType(number) if number else None


def _shown(one: Operator, product: Product) -> ir.Value:
    mode = one.integer("qk_matmul_output_mode", 0)
    if mode not in _SHOWN:
        raise Refused(f"qk_matmul_output_mode {mode!r}: expected 0 to 3")
    return {"scores": product.scores, "capped": product.capped, "masked": product.masked,
            "probabilities": product.probabilities}[_SHOWN[mode]]


def _masks(
    draft: Draft, subject: Subject, query: ir.Value, key: ir.Value
) -> tuple[tuple[ir.Value, ...], tuple[ir.Value, ...], bool]:
    """(biases, boolean masks, whether a row may be hidden whole)."""
    one = subject.operator
    biases: list[ir.Value] = []
    allowed: list[ir.Value] = []
    lengths = _lengths(draft, subject)
    mask, dead = one.value(PortRole.MASK), lengths is not None
    columns = positions.key_columns(draft, key) if lengths is not None or one.number("is_causal", 0) else None
    if mask is not None:
        boolean = subject.dtype(mask) == ir.DataType.BOOL
        dead = dead or bool(one.number("is_causal", 0)) or _may_hide_rows(mask)
        mask = _lengthened(draft, subject, mask, key, boolean) if lengths is not None else mask
        (allowed if boolean else biases).append(mask)
    if columns is not None and one.number("is_causal", 0):
        offset = None
        if (past := one.value(PortRole.PAST_KEY)) is not None:
            offset = draft.dim(past, 2, "past")
        elif lengths is not None:
            offset = draft.op("Sub", [lengths, draft.dim(query, 2, "new_queries")], "before_queries")
        allowed.append(positions.before(draft, positions.query_rows(draft, query, offset), columns))
    if columns is not None and lengths is not None:
        allowed.append(positions.filled(draft, lengths, columns))
    return tuple(biases), tuple(allowed), dead


def _lengths(draft: Draft, subject: Subject) -> ir.Value | None:
    node = subject.operator.node
    value = node.inputs[6] if len(node.inputs) > 6 else None
    return None if value is None else positions.for_each_sample(draft, value, "nonpad")


def _may_hide_rows(mask: ir.Value) -> bool:
    """False for a constant mask with something to attend to in every row."""
    array = constant(mask)
    if array is None or not array.size or array.ndim == 0:
        return True
    return not bool((array if array.dtype == bool else np.asarray(array, np.float32) != -np.inf).any(-1).all())


def _lengthened(draft: Draft, subject: Subject, mask: ir.Value, key: ir.Value, boolean: bool) -> ir.Value:
    """Opset 24: a mask may be shorter than the cache; what it does not reach is hidden."""
    rank = subject.facts.rank(mask)
    if rank is None:
        raise Refused("the rank of the mask is not known")
    own, all_keys = subject.facts.axis_size(mask, -1), subject.facts.axis_size(subject.tensor(PortRole.KEY), -2)
    if own is not None and own == all_keys and subject.rank(PortRole.KEY) == 4:
        return mask
    never = draft.editor.constant(np.array(False), f"{draft.reader.name}/never") if boolean else None
    fill = never or draft.number(-np.inf, "hidden")
    missing = draft.op("Sub", [draft.dims(key, 2, "cache"), draft.dims(mask, rank - 1, "mask_length")], "mask_missing")
    pads = draft.op("Concat", [draft.ints([0] * (2 * rank - 1), "no_pads"), missing], "mask_pads", axis=0)
    return draft.op("Pad", [mask, pads, fill], "mask_padded")
