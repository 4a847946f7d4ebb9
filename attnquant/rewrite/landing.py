"""Putting an operator into the place of a decomposed attention: its outputs, and the nodes that nothing reads any more."""

from collections.abc import Iterable

import onnx_ir as ir

from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.patterns.facts import Facts, inputs_at, permutation
from attnquant.patterns.sizes import times
from attnquant.rewrite.draft import Draft
from attnquant.rewrite.reading import Reading
from attnquant.rewrite.result import Refused


def land_heads_first(draft: Draft, facts: Facts, reading: Reading, made: ir.Value) -> dict[ir.Value, ir.Value]:
    """{old tensor: new}: the context from (batch, heads, S, channels)."""
    return {reading.context: _shaped(draft, facts, reading, made)}


def land_flat(draft: Draft, facts: Facts, reading: Reading, made: ir.Value, heads: int) -> dict[ir.Value, ir.Value]:
    """{old tensor: new}: the context from (batch, S, heads * channels), or what merges the heads behind it."""
    found = _merging(facts, reading)
    if found is not None:
        return {found.outputs[0]: _merged(draft, facts, found, made)}
    if reading.value.rank == 3 and not reading.split:
        context = draft.transpose(made, [0, 2, 1], "context_turned") if reading.context_turned else made
        return {reading.context: context}
    apart = draft.transpose(draft.reshape(made, [0, 0, heads, -1], "context_heads"), [0, 2, 1, 3], "context_heads_first")
    return {reading.context: _shaped(draft, facts, reading, apart)}


def _shaped(draft: Draft, facts: Facts, reading: Reading, made: ir.Value) -> ir.Value:
    """(batch, heads, S, channels) in the layout of the product with V."""
    rank = facts.rank(reading.context)
    if reading.context_turned:
        made = draft.transpose(made, [0, 1, 3, 2], "context_turned")
    if rank == 4:
        return made
    if rank == 5:
        query = reading.query
        dims = [draft.dims(query.value, query.order[axis], f"query_{axis}") for axis in (0, 1)]
        shape = draft.op("Concat", [*dims, _last(draft, made, 1)], "context_shape", axis=0)
        return draft.op("Reshape", [made, shape], "context_windows")
    if rank == 3 and reading.split:
        shape = draft.op("Concat", [draft.ints([-1], "rest"), _last(draft, made, 2)], "context_shape", axis=0)
        return draft.op("Reshape", [made, shape], "context_merged")
    if rank in (2, 3):
        return draft.op("Squeeze", [made, draft.ints([1] if rank == 3 else [0, 1], "one_head")], "context_without_heads")
    raise Refused(f"a context of {rank} axes")


def _last(draft: Draft, made: ir.Value, start: int) -> ir.Value:
    shape = draft.op("Shape", [made], "context_dims")
    return draft.op("Slice", [shape, draft.ints([start], "from"), draft.ints([4], "to")], "context_tail")


def _merging(facts: Facts, reading: Reading) -> ir.Node | None:
    """The Reshape behind the context that merges the heads, where nothing else reads the context."""
    if reading.context_turned or facts.rank(reading.context) != 4:
        return None
    turn = _only_reader(reading.context)
    if turn is None or not is_onnx(turn, "Transpose") or permutation(turn, 4) != (0, 2, 1, 3):
        return None
    merge = _only_reader(turn.outputs[0])
    if merge is None or not is_onnx(merge, "Reshape") or inputs_at(merge, 0) is not turn.outputs[0]:
        return None
    shape = constant(inputs_at(merge, 1))
    merged = _is_flat(facts, turn.outputs[0], merge.outputs[0])
    return merge if merged or (shape is not None and not (shape[2:] == 0).any()) else None


def _is_flat(facts: Facts, heads: ir.Value, merged: ir.Value) -> bool:
    width, parts = facts.axis_size(merged, 2), (facts.axis_size(heads, 2), facts.axis_size(heads, 3))
    if facts.rank(merged) != 3 or width is None or parts[0] is None or parts[1] is None:
        return False
    return times(parts[0], parts[1]) == width


def _merged(draft: Draft, facts: Facts, merge: ir.Node, made: ir.Value) -> ir.Value:
    turned = inputs_at(merge, 0)
    if turned is not None and _is_flat(facts, turned, merge.outputs[0]):
        return made
    return draft.op("Reshape", [made, inputs_at(merge, 1)], "output")


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def put(draft: Draft, facts: Facts, places: dict[ir.Value, ir.Value]) -> None:
    """Put the draft in front of its reader, and every new tensor in the place and under the name of the old one."""
    graph = draft.editor.graph
    graph.insert_before(draft.reader, draft.nodes)
    for old, new in places.items():
        name = tensor_name(old)
        new.type, new.shape = old.type, old.shape
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name, new.name = draft.editor.free_tensor(f"{name}_before"), name
        facts.axes[new] = facts.axes.get(old)
        facts.levels[new] = facts.level(old)
    prune(graph, [node for node in (old.producer() for old in places) if node is not None])


def prune(graph: ir.Graph, idle: Iterable[ir.Node]) -> None:
    """Remove these nodes where nothing reads them, and then what only they read."""
    waiting = list(idle)
    while waiting:
        node = waiting.pop()
        if node.graph is not graph or any(value.uses() or value.is_graph_output() for value in node.outputs):
            continue
        makers = [value.producer() for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        waiting.extend(maker for maker in makers if maker is not None)
