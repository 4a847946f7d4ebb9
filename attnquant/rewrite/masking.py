"""The masks of a decomposed attention as one mask for an operator, with what a row that sees no key gives kept as it is.

A term is either added to the scores (a bias) or decides which scores are kept. Values as low as HIDING hide. ONNX Runtime's
ai.onnx Attention takes the lowest finite number for a fully masked row, so that finite masks are raised to half of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from attnquant.dtypes import TypeMap
from attnquant.graph import constant, is_onnx
from attnquant.patterns.facts import Facts, inputs_at
from attnquant.patterns.scores import Step
from attnquant.patterns.sizes import Size
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.reading import Reading
from attnquant.rewrite.result import Refused
from attnquant.rewrite.views import View

HIDING = -1e4
"""Values from here down stand for minus infinity in models (BERT's own substitute is -10000)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One mask, in the layout of the scores."""

    value: ir.Value
    kind: Literal["bias", "keep", "hide"]
    """Added; or True for what is kept; or True for what is hidden."""
    negative: bool = False
    fill: float = 0.0
    """What stands in the place of hidden scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a mask is made in: the graph's facts, the reading, and what the caller allows."""

    facts: Facts
    types: TypeMap
    reading: Reading
    shared: dict[object, ir.Value]
    allow_dead_row_change: bool
    past: ir.Value | None = None
    """The cache that the operator puts in front of the keys, (batch, heads, past, size)."""


def terms(site: Site) -> tuple[Term, ...] | None:
    """The masks one by one; None where casts or reshapes lie between them, so that they have to be computed together.

    :raises Refused: scores that are multiplied or overwritten.
    """
    reading, found = site.reading, []
    for step in reading.tail:
        if is_onnx(step.node, "Cast", "Identity"):
            continue
        if step.kind == "clamp" and _is_low(step):
            continue
        if step.kind in ("layout", "scale"):
            return None
        found.append(_term(step))
    return tuple(_boolean(term) for term in found)


def _is_low(step: Step) -> bool:
    if not is_onnx(step.node, "Max", "Clip"):
        return False
    if is_onnx(step.node, "Clip") and inputs_at(step.node, 2) is not None:
        return False
    bounds = [constant(value) for place, value in enumerate(step.node.inputs) if place != step.index and value is not None]
    return bool(bounds) and all(bound is not None and bool((bound <= HIDING).all()) for bound in bounds)


def _term(step: Step) -> Term:
    node, other = step.node, inputs_at(step.node, step.other) if step.other is not None else None
    if other is not None and is_onnx(node, "Add"):
        return Term(value=other, kind="bias")
    if other is not None and is_onnx(node, "Sub") and step.index == 0:
        return Term(value=other, kind="bias", negative=True)
    if other is not None and is_onnx(node, "Where"):
        fill = constant(inputs_at(node, 3 - step.index))
        if fill is not None and fill.size and bool((fill == fill.flat[0]).all()) and float(fill.flat[0]) <= HIDING:
            return Term(value=other, kind="keep" if step.index == 1 else "hide", fill=float(fill.flat[0]))
    raise Refused(f"the scores go through {node.op_type} {node.name!r}, which is no mask that an operator takes")


def _boolean(term: Term) -> Term:
    """A bias that is Where(condition, 0, low) is the condition."""
    node = term.value.producer()
    if term.kind != "bias" or term.negative or node is None or not is_onnx(node, "Where"):
        return term
    condition, first, second = (inputs_at(node, index) for index in range(3))
    kept, hidden = constant(first), constant(second)
    if condition is None or kept is None or hidden is None or kept.size != 1 or hidden.size != 1:
        return term
    low, high = float(hidden.flat[0]), float(kept.flat[0])
    if high == 0 and low <= HIDING:
        return Term(value=condition, kind="keep", fill=low)
    return Term(value=condition, kind="hide", fill=high) if low == 0 and high <= HIDING else term


def never_empty(site: Site, found: tuple[Term, ...]) -> bool:
    """Constants prove that every row sees a key: at most one term hides anything, and keeps something of every row."""
    unclear = [term for term in found if not _has_open_rows(term)]
    return not unclear and sum(not _hides_nothing(term) for term in found) <= 1


def _has_open_rows(term: Term) -> bool:
    array = constant(term.value)
    return array is not None and array.ndim > 0 and array.size > 0 and bool((~_hidden(term, array)).any(-1).all())


def _hides_nothing(term: Term) -> bool:
    array = constant(term.value)
    return array is not None and not _hidden(term, array).any()


def _hidden(term: Term, array: np.ndarray) -> np.ndarray:
    if term.kind == "bias":
        numbers = np.asarray(array, np.float32)
        return np.asarray((-numbers if term.negative else numbers) <= HIDING)
    return ~array.astype(bool) if term.kind == "keep" else array.astype(bool)


def is_causal(site: Site, found: tuple[Term, ...]) -> bool:
    """The only mask is a constant that hides exactly what comes after each position, as many keys as queries."""
    array = constant(found[0].value) if len(found) == 1 else None
    if array is None or array.ndim < 2 or array.shape[-1] != array.shape[-2] or site.reading.turned:
        return False
    if found[0].kind == "bias" and bool((~_hidden(found[0], array) & (np.asarray(array) != 0)).any()):
        return False
    hidden = _hidden(found[0], array)
    return bool((hidden == np.triu(np.ones(hidden.shape[-2:], bool), 1)).all())


def boolean_mask(draft: Draft, site: Site, found: tuple[Term, ...]) -> ir.Value:
    """True for what is kept, for an operator that takes a mask of booleans (..., queries, keys)."""

    def make() -> tuple[ir.Value, int]:
        made: list[tuple[ir.Value, int]] = []
        for index, term in enumerate(found):
            value, rank = _canonical(draft, site, term.value, f"mask_{index}")
            made.append((draft.op("Not", [value], f"mask_{index}_kept") if term.kind == "hide" else value, rank))
        first, *others = (value for value, _ in made)
        for index, other in enumerate(others):
            first = draft.op("And", [first, other], f"masks_{index}")
        return first, max(rank for _, rank in made)

    return _shared(draft, site, ("boolean", found), make)


def bias_mask(draft: Draft, site: Site, found: tuple[Term, ...], *, lowest: bool, axes: int = 2) -> ir.Value:
    """What is added to the scores; with `lowest`, so that rows of the lowest finite number keep their mean.

    :param axes: How many axes the result has at least.
    """

    def make() -> tuple[ir.Value, int]:
        total, rank = _sum(draft, site, [term for term in found if term.kind == "bias"])
        biased = total is not None
        for index, term in enumerate(term for term in found if term.kind != "bias"):
            condition, own = _canonical(draft, site, term.value, f"mask_{index}")
            shown, fill = total or draft.number(0.0, "kept"), draft.number(_fill(draft, term, lowest), "fill")
            pair = [shown, fill] if term.kind == "keep" else [fill, shown]
            total, rank = draft.op("Where", [condition, *pair], f"mask_{index}_bias"), max(rank, own)
        assert total is not None
        if lowest and biased and not never_empty(site, found):
            total = raised(draft, total, keep_infinite=site.reading.zero_rows)
        return total, rank

    return _shared(draft, site, ("bias", lowest, site.reading.zero_rows, found), make, axes)


def _sum(draft: Draft, site: Site, biases: Sequence[Term]) -> tuple[ir.Value | None, int]:
    total: ir.Value | None = None
    most = 0
    for index, term in enumerate(biases):
        value, rank = _canonical(draft, site, term.value, f"bias_{index}")
        value, most = _typed(draft, site, value, term.value), max(most, rank)
        if term.negative:
            value = draft.op("Neg", [value], f"bias_{index}_negative")
        total = value if total is None else draft.op("Add", [total, value], f"biases_{index}")
    return total, most


def _shared(
    draft: Draft, site: Site, what: object, make: Callable[[], tuple[ir.Value, int]], axes: int = 2
) -> ir.Value:
    """The mask that another site of the same masks and sizes has made already, else a new one."""
    sizes = size(site.facts, site.reading.query, -2), size(site.facts, site.reading.key, -2)
    key = (what, sizes, site.past is None, axes)
    if None not in sizes and key in site.shared:
        return site.shared[key]
    mask, rank = make()
    mask = full(draft, site, mask)
    if max(rank, 2) < axes:
        mask = draft.unsqueeze(mask, list(range(axes - max(rank, 2))), "mask_axes")
    draft.shared[key] = mask
    return mask


def _fill(draft: Draft, term: Term, lowest: bool) -> float:
    smallest = float(np.finfo(draft.dtype.numpy()).min) if draft.dtype != ir.DataType.BFLOAT16 else -3.3e38
    if np.isinf(term.fill):
        return term.fill
    return max(term.fill, smallest / 2 if lowest else smallest)


def raised(draft: Draft, bias: ir.Value, *, keep_infinite: bool) -> ir.Value:
    """Finite numbers at least half of the lowest; where NaN become zeros, minus infinity stays."""
    half = draft.number(float(np.finfo(draft.dtype.numpy()).min) / 2, "half_of_lowest")
    raised = draft.op("Max", [bias, half], "bias_raised")
    if not keep_infinite:
        return raised
    infinite = draft.op("Equal", [bias, draft.number(-np.inf, "infinite")], "bias_infinite")
    return draft.op("Where", [infinite, bias, raised], "bias_raised_or_infinite")


def _typed(draft: Draft, site: Site, value: ir.Value, source: ir.Value) -> ir.Value:
    return value if site.types.dtype(source) == draft.dtype else draft.cast(value, draft.dtype, "bias_cast")


def _canonical(draft: Draft, site: Site, mask: ir.Value, label: str) -> tuple[ir.Value, int]:
    """A mask in the layout of the scores as one that broadcasts to (batch, heads, queries, keys), and its rank."""
    facts, reading = site.facts, site.reading
    rank = facts.rank(mask)
    if rank is None:
        raise Refused("the graph does not say how many axes the mask has: pass one set of inputs as feeds")
    if reading.turned and rank == 1:
        mask, rank = draft.unsqueeze(mask, [1], f"{label}_column"), 2
    elif reading.turned and rank:
        mask = draft.transpose(mask, [*range(rank - 2), rank - 1, rank - 2], f"{label}_turned")
    scores = facts.rank(reading.match.scores.product.node.outputs[0])
    if scores == 3 and rank == 3 and facts.axis_size(mask, 0) != 1:
        apart = _regrouped(draft, site, mask, label) if reading.split else draft.unsqueeze(mask, [1], f"{label}_heads")
        return apart, 4
    if scores == 5 and rank >= 4 and any(facts.axis_size(mask, axis) != 1 for axis in range(rank - 3)):
        raise Refused("a mask over windows in front of the heads: no operator takes one")
    if scores == 5 and rank == 5:
        return draft.op("Squeeze", [mask, draft.ints([0], f"{label}_axes")], f"{label}_merged"), 4
    return mask, rank


def _regrouped(draft: Draft, site: Site, mask: ir.Value, label: str) -> ir.Value:
    """(batch * heads, S, T) as (batch, heads, S, T)."""
    tail = [draft.dims(mask, axis, f"{label}_{axis}") for axis in (1, 2)]
    query = site.reading.query
    shape = [*(draft.dims(query.value, query.order[axis], f"query_{axis}") for axis in (0, 1)), *tail]
    return draft.op("Reshape", [mask, draft.op("Concat", shape, f"{label}_shape", axis=0)], f"{label}_by_heads")


def full(draft: Draft, site: Site, mask: ir.Value) -> ir.Value:
    """The mask with as many rows and columns as there are queries and keys: operators of the runtime broadcast neither."""
    facts, rows = site.facts, site.reading.query
    rank = facts.rank(mask) if mask in facts.axes else None
    have = (None, None) if rank is None or rank < 2 else (facts.axis_size(mask, -2), facts.axis_size(mask, -1))
    if have[0] is not None and have[0] == size(facts, rows, -2) and have[1] not in (None, 1):
        return mask
    count = draft.dims(rows.value, rows.order[-2], "queries")
    width = _width(draft, site)
    return draft.op("Expand", [mask, draft.op("Concat", [count, width], "mask_shape", axis=0)], "mask_expanded")


def _width(draft: Draft, site: Site) -> ir.Value:
    """How many keys there are, past ones included, as a tensor of one element."""
    key = site.reading.key
    width = draft.dims(key.value, key.order[-2], "keys")
    if site.past is not None:
        width = draft.op("Add", [draft.dims(site.past, 2, "past"), width], "all_keys")
    return width


def size(facts: Facts, view: View, axis: int) -> Size | None:
    """Size of an axis of a view in its own layout."""
    return facts.axis_size(view.value, view.order[axis])


def replayed(draft: Draft, site: Site) -> ir.Value:
    """The sum of all masks, by the graph's own operators on zeros in the place of the scores: reshapes in between (Swin)."""
    reading = site.reading
    node = reading.match.scores.product.node
    if not is_onnx(node, "MatMul") or reading.turned:
        raise Refused("masks between reshapes behind a product that is no plain MatMul")
    left = draft.op("Shape", [node.inputs[0]], "scores_shape")
    most = draft.op("Slice", [left, draft.ints([0], "first"), draft.ints([-1], "last")], "rows_shape")
    last = _width(draft, site)  # not of the product's own operand: a cache inside makes that from the operator's outputs
    shape = draft.op("Concat", [most, last], "scores_shape", axis=0)
    value = draft.op("Expand", [draft.number(0.0, "zero"), shape], "zeros")
    for index, step in enumerate(reading.tail):
        if step.kind == "layout" and not is_onnx(step.node, "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze"):
            raise Refused(f"the scores go through {step.node.op_type} {step.node.name!r} between masks")
        if step.kind == "mask":
            _term(step)
        elif step.kind not in ("layout", "clamp"):
            raise Refused(f"the scores are scaled or cut between masks in {step.node.name!r}")
        inputs = [value if place == step.index else item for place, item in enumerate(step.node.inputs)]
        value = draft.clone(step.node, inputs, f"masks_{index}")
    if not _same_axes(site.facts, reading.match.anchor.scores, node.outputs[0]):
        query = reading.query
        if query.rank != 4:
            raise Refused("masks between reshapes of scores without an axis of heads")
        dims = [draft.dims(query.value, query.order[axis], f"scores_{axis}") for axis in range(3)]
        value = draft.op("Reshape", [value, draft.op("Concat", [*dims, last], "mask_shape", axis=0)], "mask_by_heads")
    return value


def _same_axes(facts: Facts, one: ir.Value, other: ir.Value) -> bool:
    """Both have the same four axes, as far as the graph says."""
    sizes = [[facts.axis_size(value, axis) for axis in range(4)] for value in (one, other) if facts.rank(value) == 4]
    return len(sizes) == 2 and sizes[0] == sizes[1]
