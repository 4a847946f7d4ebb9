"""com.microsoft GroupQueryAttention written out: rotary embedding, a cache filled at each length, windows, sinks."""

import onnx_ir as ir

from attnquant.rewrite import positions, rotation
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.product import Operands, attend, heads_first, heads_merged
from attnquant.rewrite.result import Refused
from attnquant.rewrite.subject import Expansion, Subject
from attnquant.roles import PortRole

_UNWRITTEN = ("k_scale", "v_scale", "q_norm_weight", "k_norm_weight", "query_seqlens")


def expand_grouped(draft: Draft, subject: Subject) -> Expansion:
    """Draft the attention. Raises Refused for quantized caches, norms inside and caches of the size of the window."""
    one, site = subject.operator, subject.site
    given = [name for name in _UNWRITTEN if subject.input(name) is not None]
    if given or one.number("sliding_window_cache", 0):
        raise Refused(f"{given[0] if given else 'sliding_window_cache'!r}: this form of the cache is not written out")
    named = _named(draft, subject)
    heads = (site.q_heads, site.kv_heads, site.kv_heads)
    split = [heads_first(draft, value, count or 0, role) for value, count, role in zip(named, heads, _WORDS, strict=True)]
    query, key, value = split
    lengths = draft.op("Add", [positions.for_each_sample(draft, _needed(subject, "seqlens_k"), "seqlens"),
                               draft.integer(1, "one")], "lengths")
    start = _start(draft, subject, query, lengths)
    if one.number("do_rotary", 0):
        angles = rotation.tables(draft, subject, query, start)
        query, key = (rotation.rotated(draft, item, angles, role) for item, role in ((query, "query"), (key, "key")))
    past_key, past_value = one.value(PortRole.PAST_KEY), one.value(PortRole.PAST_VALUE)
    if past_key is not None and past_value is not None:
        places = _places(draft, query, past_key, start, _total(draft, subject))
        key, value = _written(draft, past_key, key, places, "key"), _written(draft, past_value, value, places, "value")
    rows = positions.query_rows(draft, query, start)
    columns = positions.key_columns(draft, key)
    product = attend(draft, _operands(draft, subject, (query, key, value), (rows, columns, lengths)))
    mode = one.integer("qk_output", 0)
    shown = {1: product.masked, 2: product.probabilities}.get(mode or 0)
    outputs = {0: heads_merged(draft, product.context), 1: key, 2: value, 3: shown}
    return Expansion(outputs=outputs, query=named[0], key=named[1], value=named[2], product=product)


_WORDS = ("query", "key", "value")


def _needed(subject: Subject, name: str) -> ir.Value:
    value = subject.input(name)
    if value is None:
        raise Refused(f"the operator has no {name}")
    return value


def _named(draft: Draft, subject: Subject) -> list[ir.Value]:
    """Q, K and V, (batch, S, heads * size) each."""
    site, one = subject.site, subject.operator
    if site.q_heads is None or site.kv_heads is None:
        raise Refused("the operator has no num_heads or kv_num_heads")
    query, key, value = (one.value(role) for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE))
    if query is not None and key is not None and value is not None:
        return [query, key, value]
    if query is None or site.qk_head_dim is None:
        raise Refused("packed Q, K and V of unknown width: pass one set of inputs as feeds")
    widths = [count * site.qk_head_dim for count in (site.q_heads, site.kv_heads, site.kv_heads)]
    return draft.split(query, widths, -1, "unpacked")


def _total(draft: Draft, subject: Subject) -> ir.Value:
    total = draft.cast(_needed(subject, "total_sequence_length"), ir.DataType.INT64, "total_int64")
    return draft.op("Reshape", [total, draft.ints([], "scalar")], "total")


def _start(draft: Draft, subject: Subject, query: ir.Value, lengths: ir.Value) -> ir.Value:
    """Where each sample's new tokens begin: its length less the new tokens, or 0 where all tokens are new (a prompt)."""
    new = draft.dim(query, 2, "new_tokens")
    behind = draft.op("Sub", [lengths, new], "behind")
    prompt = draft.op("Equal", [new, _total(draft, subject)], "is_prompt")
    return draft.op("Where", [prompt, draft.integer(0, "zero"), behind], "start")


def _places(draft: Draft, query: ir.Value, past: ir.Value, start: ir.Value, total: ir.Value) -> ir.Value:
    """For each place of present the place in (past, new) along the sequence: (batch, places, 1)."""
    size, new = draft.dim(past, 2, "past_size"), draft.dim(query, 2, "new_tokens")
    count = draft.op("Max", [size, total], "present_size")
    place = draft.count(count, "place")
    begin = draft.reshape(start, [-1, 1], "start_row")
    index = draft.op("Sub", [place, begin], "new_index")
    last = draft.op("Sub", [new, draft.integer(1, "one")], "last_new")
    zero = draft.integer(0, "zero")
    clipped = draft.op("Min", [draft.op("Max", [index, zero], "new_index_low"), last], "new_index_clipped")
    is_new = draft.op("And", [draft.op("GreaterOrEqual", [index, zero], "from_new"),
                              draft.op("Less", [index, new], "before_end")], "is_new")
    kept = draft.op("Min", [place, draft.op("Max", [draft.op("Sub", [size, draft.integer(1, "one")], "last_old"), zero],
                                            "last_old_or_zero")], "old_index")
    chosen = draft.op("Where", [is_new, draft.op("Add", [clipped, size], "new_place"), kept], "source_place")
    return draft.unsqueeze(chosen, [2], "source_places")


def _written(draft: Draft, past: ir.Value, new: ir.Value, places: ir.Value, word: str) -> ir.Value:
    """The cache (batch, heads, places, size) with the new tokens where each sample's begin."""
    both = draft.op("Concat", [past, new], f"{word}_past_and_new", axis=2)
    turned = draft.transpose(both, [0, 2, 1, 3], f"{word}_by_place")
    taken = draft.op("GatherND", [turned, places], f"{word}_in_place", batch_dims=1)
    return draft.transpose(taken, [0, 2, 1, 3], f"present_{word}")


def _operands(
    draft: Draft, subject: Subject, operands: tuple[ir.Value, ...], places: tuple[ir.Value, ir.Value, ir.Value]
) -> Operands:
    one, site = subject.operator, subject.site
    rows, columns, lengths = places
    allowed = []
    if one.number("causal", 1):
        allowed.append(positions.before(draft, rows, columns))
    else:
        allowed.append(positions.filled(draft, lengths, columns))
    if site.window is not None and site.window[0] >= 0:
        allowed.append(positions.within(draft, rows, columns, site.window[0]))
    bias = subject.input("attention_bias")
    return Operands(
        query=operands[0], key=operands[1], value=operands[2], q_heads=site.q_heads, kv_heads=site.kv_heads,
        qk_head_dim=site.qk_head_dim, v_head_dim=site.qk_head_dim, scale=one.number("scale", 0.0) or None,
        softcap=one.number("softcap", 0.0) or 0.0, biases=() if bias is None else (bias,), allowed=tuple(allowed),
        sink=_sink(draft, subject),
    )


def _sink(draft: Draft, subject: Subject) -> ir.Value | None:
    sink = subject.input("head_sink")
    if sink is not None:
        return draft.reshape(sink, [1, -1, 1, 1], "head_sinks")
    if (subject.operator.number("smooth_softmax", 0) or 0) > 0:
        return draft.reshape(draft.number(0.0, "smooth"), [1, 1, 1, 1], "smooth_sink")
    return None
