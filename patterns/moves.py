"""Following one axis through the operators that only move, cut or copy data, in both directions."""

from collections.abc import Sequence

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import Facts, axes_argument, inputs_at, integer, integers, permutation
from attnquant.patterns.sizes import Axes, Size, product, size_of

KEEP = [
    "Identity",
    "Cast",
    "CastLike",
    "Dropout",
    "QuantizeLinear",
    "DequantizeLinear",
    "Slice",
    "Expand",
    "Clip",
    "Pad",
    "ScatterND",
    "ScatterElements",
    "TensorScatter",
    "BatchNormalization",
    "Tile",
    "Neg",
]
"""Operators that leave every axis where it is (sizes may change); their data is input 0."""
LAYOUT = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Gather", "GatherND", "Split")
"""Operators that move axes; their data is input 0."""
TRANSPARENT = (*KEEP, *LAYOUT)
CUTS = ("Slice", "Pad", "Gather", "GatherND", "Split", "ScatterND", "ScatterElements", "TensorScatter", "Reshape", "Tile")
"""Transparent operators that an attention does not need between its products: a path without them is preferred."""


def is_transparent(node: ir.Node) -> bool:
    """Only moves, cuts, copies or converts its first input (Q/DQ of other domains too)."""
    return is_onnx(node, *TRANSPARENT) or node.op_type in ("QuantizeLinear", "DequantizeLinear")


def provenance(facts: Facts, value: ir.Value | None) -> tuple[object, ...]:
    """What a tensor was copied from and how it was laid out: equal for two copies of one tensor, computed once or twice."""
    steps: list[tuple[object, ...]] = []
    for _ in range(8):
        node = None if value is None else value.producer()
        if node is None:
            break
        if is_onnx(node, "Transpose") and (order := permutation(node, facts.rank(value))) is not None:
            _compose(steps, order)
        elif is_onnx(node, "Unsqueeze", "Squeeze", "Reshape"):
            target = inputs_at(node, 1)
            elements = facts.elements_of(target)
            steps.append((node.op_type, integers(node, "axes"), target if elements is None else elements))
        elif not _is_copy(node):
            break
        value = inputs_at(node, 0)
    return (value, *steps)


def without_round_trips(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """Back through copies, Q/DQ and Transposes that undo each other."""
    settled = value
    order: tuple[int, ...] = ()
    for _ in range(16):
        node = None if value is None else value.producer()
        if is_onnx(node, "Transpose") and node is not None and (own := permutation(node, facts.rank(value))) is not None:
            order = _composed(own, order) if order else own
            if not order:
                break
        elif node is None or not _is_copy(node):
            break
        value = inputs_at(node, 0)
        if list(order) == sorted(order):
            settled, order = value, ()
    return settled


def _is_copy(node: ir.Node) -> bool:
    return is_onnx(node, "Identity", "Cast") or node.op_type in ("QuantizeLinear", "DequantizeLinear")


def _compose(steps: list[tuple[object, ...]], order: tuple[int, ...]) -> None:
    """Put a Transpose in front of the steps that follow it; two that undo each other vanish."""
    later = steps[-1][1] if steps and steps[-1][0] == "Transpose" else ()
    if isinstance(later, tuple) and (both := _composed(order, later)):
        steps.pop()
        order = both
    if list(order) != sorted(order):
        steps.append(("Transpose", order))


def _composed(first: tuple[int, ...], later: tuple[int, ...]) -> tuple[int, ...]:
    """One permutation for a Transpose and the one behind it; none where their ranks differ."""
    return tuple(first[index] for index in later) if len(first) == len(later) else ()


def back(facts: Facts, node: ir.Node, axis: int, output: ir.Value | None = None) -> int | None:
    """The input axis that an output axis comes from, both counted from the end; None where that can't be told."""
    return _moved(facts, node, axis, output, backwards=True)


def forward(facts: Facts, node: ir.Node, axis: int, output: ir.Value | None = None) -> int | None:
    """The output axis that an input axis becomes, both counted from the end; None where it is gone or can't be told."""
    return _moved(facts, node, axis, output, backwards=False)


def _moved(facts: Facts, node: ir.Node, axis: int, output: ir.Value | None, *, backwards: bool) -> int | None:
    if not is_onnx(node, *LAYOUT):
        return axis
    result = node.outputs[0] if output is None else output
    if is_onnx(node, "Split", "GatherND"):
        return axis if is_onnx(node, "Split") or _is_kept(facts, node, axis) else None
    if is_onnx(node, "Transpose"):
        order = permutation(node, facts.rank(result))
        return _permuted(order, axis) if backwards else _unpermuted(order, axis)
    if is_onnx(node, "Unsqueeze", "Squeeze", "Gather"):
        moved = _inserted(facts, node, axis, backwards=backwards)
        if moved is not None or is_onnx(node, "Gather"):
            return moved
    source, target = facts.axes_of(inputs_at(node, 0)), facts.axes_of(result)
    return reshaped(target, source, axis) if backwards else reshaped(source, target, axis)


def _is_kept(facts: Facts, node: ir.Node, axis: int) -> bool:
    """An axis of a GatherND behind those that its indices pick from."""
    rank, picked = facts.rank(inputs_at(node, 0)), facts.axis_size(inputs_at(node, 1), -1)
    return rank is not None and isinstance(picked, int) and -axis <= rank - picked - integer(node, "batch_dims", 0)


def _permuted(order: Sequence[int] | None, axis: int) -> int | None:
    if order is None or not -len(order) <= axis < 0:
        return None
    return order[axis + len(order)] - len(order)


def _unpermuted(order: Sequence[int] | None, axis: int) -> int | None:
    if order is None or not -len(order) <= axis < 0:
        return None
    return order.index(axis + len(order)) - len(order)


def _inserted(facts: Facts, node: ir.Node, axis: int, *, backwards: bool) -> int | None:
    """Axis moves of Unsqueeze, Squeeze and a Gather of one position, from where the axis was put in or taken out."""
    rank = facts.rank(inputs_at(node, 0))
    if rank is None:
        return None
    changed: tuple[int, ...]
    longer, adds = rank, is_onnx(node, "Unsqueeze")
    if is_onnx(node, "Gather"):
        indices = facts.rank(inputs_at(node, 1))
        if indices != 0:
            return axis if indices == 1 else None
        changed = (integer(node, "axis", 0) % rank,)
    else:
        given = axes_argument(facts, node)
        if given is None:
            return None
        longer = rank + len(given) if adds else rank
        changed = tuple(index % longer for index in given)
    kept = [index for index in range(longer) if index not in changed]
    from_long = adds == backwards
    if from_long:
        place = axis + longer
        return kept.index(place) - len(kept) if place in kept else None
    return kept[axis + len(kept)] - longer if -len(kept) <= axis < 0 else None


def reshaped(source: Axes | None, target: Axes | None, axis: int) -> int | None:
    """Where an axis of `source` is in `target`, a reshape of the same elements: the axis with as many elements behind it.

    Of an axis that is split, the last part. Where sizes are not known, the axis with the same number of axes behind it.
    """
    if source is None or target is None or not -len(source) <= axis < 0:
        return axis if target is None or -len(target) <= axis else None
    behind = _behind(source, axis)
    places = [index for index in range(-len(target), 0) if _behind(target, index) == behind]
    size = size_of(source[axis])
    for index in places:
        if size_of(target[index]) == size:
            return index
    for index in places:
        if size_of(target[index]) != 1:
            return index
    return axis if -len(target) <= axis else None


def _behind(axes: Axes, axis: int) -> Size:
    return product(size_of(one) for one in axes[len(axes) + axis + 1 :])
