"""Rotary embedding in front of Q and K moved into an operator that rotates by tables of positions (Su et al. 2021).

The operator counts positions from the length of the cache on. So the graph's own have to be that: 0, 1, ... behind the past.
What the graph computes for these few positions is computed for all positions up to now instead, once for all layers.
"""

from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.patterns.facts import Facts, inputs_at
from attnquant.patterns.sizes import Size
from attnquant.rewrite import caches
from attnquant.rewrite.masking import size
from attnquant.rewrite.shop import Job
from attnquant.rewrite.views import View, peeled

_PLACE_BY_PLACE = ("Cos", "Sin", "Mul", "Add", "Div", "Neg", "Cast", "Identity", "Unsqueeze", "Transpose", "MatMul")
"""What may lie between positions and tables: operators that do to each position what they do to the others."""
_LIMIT = 24
_HALF = 8
"""The runtime rotates inside where half of the rotated channels and of the head size are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """Q and K before rotation, and the tables (positions, half of the rotated channels)."""

    query: View
    key: View
    cos: ir.Value
    sin: ir.Value
    interleaved: bool


def inside(job: Job, query: View, key: View, past: ir.Value | None) -> Inside | None:
    """The rotation that the operator can take over; None where there is none, or tables or positions do not allow it."""
    nodes = [view.value.producer() for view in (query, key)]
    first, second = nodes
    if first is None or second is None or not all(_rotates(job.facts, node) for node in nodes):
        return None
    if any(_number(first, name) != _number(second, name) for name in ("interleaved", "rotary_embedding_dim")):
        return None
    places = _Places(job, past)
    tables = [_table(job, places, first, index) for index in (1, 2)]
    others = [_table(job, places, second, index) for index in (1, 2)]
    cos, sin = tables
    if cos is None or sin is None or [_signed(item) for item in tables] != [_signed(item) for item in others]:
        return None
    query, key = (peeled(job.facts, View(value=_data(node), order=view.order, factor=view.factor))
                  for node, view in ((first, query), (second, key)))  # fmt: skip
    made = [_made(job, places, table, query) for table in (cos, sin)]
    return Inside(query=query, key=key, cos=made[0], sin=made[1], interleaved=bool(_number(first, "interleaved")))


@dataclass(frozen=True, slots=True)
class _Table:
    """Cosines or sines: a table itself, or what has to be computed for all positions."""

    value: ir.Value
    half: int
    whole: bool
    signature: object


class _Places:
    """Which tensors are the positions of the new tokens, one after the other behind the past."""

    def __init__(self, job: Job, past: ir.Value | None) -> None:
        self.facts = job.facts
        self.count = size(job.facts, job.reading.query, -2)
        self.past = past
        self.starts = {0} if past is None else _sizes(job, past)

    def are(self, value: ir.Value | None) -> bool:
        """`value` is (S,): 0, 1, ... behind the past."""
        node = None if value is None else value.producer()
        if node is None or self.count is None:
            return False
        if is_onnx(node, "Range"):
            begin, end, step = (_scalar(self.facts, inputs_at(node, index)) for index in range(3))
            return self.past is None and (begin, end, step) == (0, self.count, 1)
        if not is_onnx(node, "Add"):
            return False
        for count, start in (node.inputs, reversed(node.inputs)):
            maker = None if count is None else count.producer()
            if maker is None or not is_onnx(maker, "Range") or _scalar(self.facts, start) not in self.starts:
                continue
            if [_scalar(self.facts, item) for item in maker.inputs] == [0, self.count, 1]:
                return True
        return False


def _sizes(job: Job, past: ir.Value) -> set[Size | None]:
    """The length of the cache, and of all that are as long."""
    own, inputs = caches.length(job.facts, past), job.draft.editor.graph.inputs
    same = [item for item in inputs if job.facts.rank(item) == 4 and caches.length(job.facts, item) == own]
    return {job.facts.axis_size(item, 2) for item in (past, *same)} - {None}


def _scalar(facts: Facts, value: ir.Value | None) -> object:
    array, elements = constant(value), facts.elements_of(value)
    if array is not None:
        return array.item() if array.size == 1 else None
    return elements.items[0] if elements is not None and len(elements.items) == 1 else None


def _rotates(facts: Facts, node: ir.Node | None) -> bool:
    return node is not None and is_onnx(node, "RotaryEmbedding") and facts.rank(inputs_at(node, 0)) == 4


def _data(node: ir.Node) -> ir.Value:
    value = inputs_at(node, 0)
    assert value is not None
    return value


def _number(node: ir.Node, name: str) -> int:
    attribute = node.attributes.get(name)
    return 0 if attribute is None else attribute.as_int()


def _table(job: Job, places: _Places, node: ir.Node, index: int) -> _Table | None:
    value, positions = inputs_at(node, index), inputs_at(node, 3)
    half, width = (None if item is None else job.facts.axis_size(item, -1) for item in (value, inputs_at(node, 0)))
    if value is None or not isinstance(half, int) or half % _HALF or not isinstance(width, int) or width % (2 * _HALF):
        return None
    if positions is not None:
        direct = positions.producer()
        while direct is not None and is_onnx(direct, "Unsqueeze", "Identity") and not places.are(positions):
            positions, direct = inputs_at(direct, 0), None if inputs_at(direct, 0) is None else _maker(inputs_at(direct, 0))
        same = constant(value) is not None and job.facts.rank(value) == 2 and places.are(positions)
        return _Table(value, half, True, tensor_name(value)) if same else None
    signature = _signature(places, value, [_LIMIT])
    return None if signature is None else _Table(value, half, False, signature)


def _maker(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _signed(table: _Table | None) -> object:
    return None if table is None else table.signature


def _signature(places: _Places, value: ir.Value | None, left: list[int]) -> object:
    """How a tensor comes from positions and constants, None where it doesn't, place by place."""
    if value is None or places.are(value):
        return "places" if value is not None else None
    if constant(value) is not None:
        return tensor_name(value)
    node = value.producer()
    left[0] -= 1
    if node is None or left[0] < 0 or not is_onnx(node, *_PLACE_BY_PLACE):
        return None
    behind = [_signature(places, item, left) for item in node.inputs]
    if None in behind:
        return None
    return node.op_type, *(f"{name}={item.value}" for name, item in sorted(node.attributes.items())), *behind


def _made(job: Job, places: _Places, table: _Table, query: View) -> ir.Value:
    """The table (positions, half) up to the last position of now."""
    if table.whole:
        return table.value
    key = ("table", table.signature, places.count, caches.length(job.facts, places.past))
    if key in job.shared:
        return job.shared[key]
    if key in job.draft.shared:
        return job.draft.shared[key]
    made = job.draft.reshape(_replayed(job, places, table.value, query), [-1, table.half], "rotary_table")
    job.draft.shared[key] = made
    return made


def _replayed(job: Job, places: _Places, value: ir.Value, query: View) -> ir.Value:
    """The same computation for all positions."""
    draft = job.draft
    if places.are(value):
        rows = draft.dim(query.value, query.order[-2], "rotary_rows")
        if places.past is not None:
            rows = draft.op("Add", [draft.dim(places.past, 2, "rotary_past"), rows], "rotary_length")
        return draft.count(rows, "rotary_places")
    node = value.producer()
    if node is None or constant(value) is not None:
        return value
    inputs = [None if item is None else _replayed(job, places, item, query) for item in node.inputs]
    return draft.clone(node, inputs, f"rotary_{node.op_type}")
