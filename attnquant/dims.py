"""Known sizes of tensors: declared shapes, completed from constants, weights and reshapes. Nothing symbolic is compared.

A size that the graph does not state stays None; shape inference of the whole model is not run.
"""

from collections.abc import Callable
from typing import Final

import onnx_ir as ir

from attnquant.graph import constant, is_onnx

Sizes = tuple[int | None, ...]
Read = Callable[[ir.Value | None], Sizes | None]

DEPTH: Final = 48
"""How many operators a size is followed through."""

_SAME = frozenset({
    "BatchNormalization", "BiasGelu", "Cast", "CastLike", "Clip", "DequantizeLinear", "Dropout", "Elu", "Erf", "Exp",
    "FastGelu", "Gelu", "Identity", "InstanceNormalization", "LayerNormalization", "Log", "Neg", "Pow", "QuantizeLinear",
    "QuickGelu", "RMSNormalization", "Reciprocal", "Relu", "RotaryEmbedding", "ScatterElements", "ScatterND", "Sigmoid",
    "SimplifiedLayerNormalization", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Softmax", "Sqrt", "Swish",
    "Tanh", "TensorScatter",
})
"""Operators whose first output is as large as their first input, in any domain."""


def _declared(value: ir.Value) -> Sizes | None:
    tensor = ir.convenience.get_const_tensor(value)
    shape = value.shape if tensor is None else tensor.shape
    return None if shape is None else tuple(size if isinstance(size, int) else None for size in shape)


def _derived(value: ir.Value, read: Read) -> Sizes | None:
    node = value.producer()
    if node is None:
        return None
    if node.op_type in _SAME:
        return read(node.inputs[0]) if value.index() == 0 else None
    if node.domain not in ("", "ai.onnx") or (value.index() != 0 and node.op_type != "Split"):
        return None
    if node.op_type == "Split":
        return _split(value, node, read)
    rule = _RULES.get(node.op_type)
    return None if rule is None else rule(node, read)


def _elementwise(node: ir.Node, read: Read) -> Sizes | None:
    return _broadcast([read(operand) for operand in node.inputs])


def _broadcast(shapes: list[Sizes | None]) -> Sizes | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or not known:
        return None
    rank = max(len(shape) for shape in known)
    columns = zip(*[(1,) * (rank - len(shape)) + shape for shape in known], strict=True)
    return tuple(_one_size(column) for column in columns)


def _one_size(column: tuple[int | None, ...]) -> int | None:
    wide = {size for size in column if size is not None and size != 1}
    if wide:
        return wide.pop() if len(wide) == 1 else None
    return None if None in column else 1


def _product(node: ir.Node, read: Read) -> Sizes | None:
    left, right = read(node.inputs[0]), read(node.inputs[1])
    if right is None or len(right) < 2:
        return None
    if node.op_type == "Gemm":
        rows = None if left is None else left[-1 if node.attributes.get_int("transA", 0) else 0]
        return rows, right[0 if node.attributes.get_int("transB", 0) else 1]
    return None if left is None or len(left) < len(right) else (*left[:-1], right[-1])


def _gathered(node: ir.Node, read: Read) -> Sizes | None:
    table, picked = read(node.inputs[0]), read(node.inputs[1])
    if table is None or picked is None:
        return None
    axis = node.attributes.get_int("axis", 0) % len(table)
    return (*table[:axis], *picked, *table[axis + 1 :])


def _sliced(node: ir.Node, read: Read) -> Sizes | None:
    """Every axis that may be cut is unknown."""
    inner = read(node.inputs[0])
    axes = constant(node.inputs[3]) if len(node.inputs) > 3 else None
    if inner is None or axes is None:
        return None if inner is None else (None,) * len(inner)
    cut = {int(axis) % len(inner) for axis in axes.reshape(-1)}
    return tuple(None if axis in cut else size for axis, size in enumerate(inner))


def _reduced(node: ir.Node, read: Read) -> Sizes | None:
    inner, axes = read(node.inputs[0]), _axes(node)
    if inner is None or axes is None or not node.attributes.get_int("keepdims", 1):
        return None
    gone = {axis % len(inner) for axis in axes}
    return tuple(1 if axis in gone else size for axis, size in enumerate(inner))


def _convolved(node: ir.Node, read: Read) -> Sizes | None:
    image, kernel = read(node.inputs[0]), read(node.inputs[1])
    return None if image is None or kernel is None else (image[0], kernel[0], *(None,) * (len(image) - 2))


def _attended(node: ir.Node, read: Read) -> Sizes | None:
    query, value = read(node.inputs[0]), read(node.inputs[2])
    if query is None or len(query) != 4:
        return None if query is None else (*query[:-1], None)
    return (*query[:3], None if value is None else value[-1])


def _transposed(node: ir.Node, read: Read) -> Sizes | None:
    inner = read(node.inputs[0])
    if inner is None:
        return None
    order = node.attributes.get_ints("perm", tuple(reversed(range(len(inner)))))
    return tuple(inner[axis] for axis in order) if len(order) == len(inner) else None


def _reshaped(node: ir.Node, read: Read) -> Sizes | None:
    target = shape_entries(node.inputs[1])
    if target is None:
        return None
    inner = read(node.inputs[0])
    out: list[int | None] = []
    for axis, entry in enumerate(target):
        if entry == 0 and not node.attributes.get_int("allowzero", 0):
            out.append(inner[axis] if inner is not None and axis < len(inner) else None)
        else:
            out.append(entry if isinstance(entry, int) and entry >= 0 else None)
    _fill_free_axis(target, out, inner)
    return tuple(out)


def _fill_free_axis(target: tuple[int | str, ...], out: list[int | None], inner: Sizes | None) -> None:
    """Work out the -1 of a Reshape, where every other axis is known or taken over from the input as it is."""
    if inner is None or target.count(-1) != 1:
        return
    kept = 0
    while kept < min(len(target), len(inner)) and target[kept] in (0, f"axis {kept}"):
        kept += 1
    free = target.index(-1)
    rest_in, rest_out = inner[kept:], [size for axis, size in enumerate(out) if axis >= kept and axis != free]
    if None in rest_in or None in rest_out or free < kept:
        return
    total, others = _count(rest_in), _count(rest_out)
    if others and total % others == 0:
        out[free] = total // others


def _count(factors: Sizes | list[int | None]) -> int:
    total = 1
    for factor in factors:
        total *= factor or 0
    return total


def _unsqueezed(node: ir.Node, read: Read) -> Sizes | None:
    inner, axes = read(node.inputs[0]), _axes(node)
    if inner is None or axes is None:
        return None
    rank = len(inner) + len(axes)
    places = {axis % rank for axis in axes}
    rest = iter(inner)
    return tuple(1 if axis in places else next(rest) for axis in range(rank)) if len(places) == len(axes) else None


def _squeezed(node: ir.Node, read: Read) -> Sizes | None:
    inner, axes = read(node.inputs[0]), _axes(node)
    if inner is None or axes is None:
        return None
    places = {axis % len(inner) for axis in axes}
    return tuple(size for axis, size in enumerate(inner) if axis not in places)


def _axes(node: ir.Node) -> tuple[int, ...] | None:
    if len(node.inputs) > 1:
        stated = constant(node.inputs[1])
        return None if stated is None else tuple(int(axis) for axis in stated.reshape(-1))
    axes = node.attributes.get_ints("axes")
    return None if axes is None else tuple(axes)


def _expanded(node: ir.Node, read: Read) -> Sizes | None:
    target, inner = shape_entries(node.inputs[1]), read(node.inputs[0])
    if target is None:
        return None
    wanted: Sizes = tuple(entry if isinstance(entry, int) else None for entry in target)
    return _broadcast([wanted, inner]) if inner is not None else tuple(size if size != 1 else None for size in wanted)


def _joined(node: ir.Node, read: Read) -> Sizes | None:
    parts = [read(operand) for operand in node.inputs]
    known = [part for part in parts if part is not None]
    if not known or any(len(part) != len(known[0]) for part in known):
        return None
    axis = node.attributes.get_int("axis", 0) % len(known[0])
    columns = list(zip(*known, strict=True))
    total = _sum(columns[axis]) if len(known) == len(parts) else None
    return tuple(total if index == axis else _agreed(column) for index, column in enumerate(columns))


def _sum(column: tuple[int | None, ...]) -> int | None:
    return None if None in column else sum(size for size in column if size is not None)


def _agreed(column: tuple[int | None, ...]) -> int | None:
    known = {size for size in column if size is not None}
    return known.pop() if len(known) == 1 else None


def _split(value: ir.Value, node: ir.Node, read: Read) -> Sizes | None:
    inner = read(node.inputs[0])
    if inner is None:
        return None
    axis, index = node.attributes.get_int("axis", 0) % len(inner), value.index() or 0
    stated = constant(node.inputs[1]) if len(node.inputs) > 1 else None
    listed = node.attributes.get_ints("split") if stated is None else [int(size) for size in stated]
    own = inner[axis]
    if listed is not None:
        piece: int | None = listed[index] if index < len(listed) else None
    elif len(node.inputs) > 1 and node.inputs[1] is not None:
        piece = None
    else:
        piece = own // len(node.outputs) if own is not None and own % len(node.outputs) == 0 else None
    return (*inner[:axis], piece, *inner[axis + 1 :])


def shape_entries(value: ir.Value | None) -> tuple[int | str, ...] | None:
    """A shape tensor entry by entry: a number, "axis N" for size N of some tensor, or "?"; None if its length is unknown."""
    return None if value is None else _entries(value, 12)


def _entries(value: ir.Value, depth: int) -> tuple[int | str, ...] | None:
    stated = constant(value)
    if stated is not None:
        return tuple(int(entry) for entry in stated.reshape(-1))
    node = value.producer()
    if node is not None and depth > 0:
        if is_onnx(node, "Concat"):
            return _concat_entries(node, depth)
        if is_onnx(node, "Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape") and node.inputs[0] is not None:
            inner = _entries(node.inputs[0], depth - 1)
            return inner if inner is None or len(inner) == 1 or is_onnx(node, "Cast", "Identity") else None
        axes = _shape_axes(node)
        if axes is not None:
            return axes
    shape = value.shape
    length = None if shape is None else (1 if len(shape) == 0 else shape[0] if len(shape) == 1 else None)
    return ("?",) * length if isinstance(length, int) else None


def _concat_entries(node: ir.Node, depth: int) -> tuple[int | str, ...] | None:
    out: list[int | str] = []
    for part in node.inputs:
        found = None if part is None else _entries(part, depth - 1)
        if found is None:
            return None
        out.extend(found)
    return tuple(out)


def _shape_axes(node: ir.Node) -> tuple[int | str, ...] | None:
    """"axis N" for Shape with bounds, or one element gathered or sliced from a Shape."""
    if is_onnx(node, "Shape"):
        end = node.attributes.get_int("end")
        start = node.attributes.get_int("start", 0)
        return None if end is None or start < 0 or end < start else tuple(f"axis {axis}" for axis in range(start, end))
    source = None if not node.inputs or node.inputs[0] is None else node.inputs[0].producer()
    if source is None or not is_onnx(source, "Shape") or source.attributes.get_int("start", 0) != 0:
        return None
    if is_onnx(node, "Gather"):
        index = constant(node.inputs[1])
        return None if index is None else tuple(f"axis {int(axis)}" for axis in index.reshape(-1))
    if is_onnx(node, "Slice") and len(node.inputs) in (3, 4):
        first, last = constant(node.inputs[1]), constant(node.inputs[2])
        if first is not None and last is not None and first.size == last.size == 1 and 0 <= first.item() <= last.item() < 16:
            return tuple(f"axis {axis}" for axis in range(int(first.item()), int(last.item())))
    return None


def heads_first(sizes: Sizes | None) -> tuple[int | None, int | None]:
    """(heads, head size) of a 4-D tensor laid out batch, heads, sequence, head size; two None for anything else."""
    return (sizes[1], sizes[3]) if sizes is not None and len(sizes) == 4 else (None, None)


_RULES: Final[dict[str, Callable[[ir.Node, Read], Sizes | None]]] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div", "Where"), _elementwise),
    **dict.fromkeys(("MatMul", "Gemm"), _product),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2"), _reduced),
    "Attention": _attended,
    "Concat": _joined,
    "Conv": _convolved,
    "Expand": _expanded,
    "Gather": _gathered,
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Squeeze": _squeezed,
    "Transpose": _transposed,
    "Unsqueeze": _unsqueezed,
}


class SizeReader:
    """Sizes of the tensors of one model, each worked out once; the model must not change meanwhile."""

    def __init__(self) -> None:
        self._known: dict[ir.Value, Sizes | None] = {}
        self._depth = 0

    def __call__(self, value: ir.Value | None) -> Sizes | None:
        """The sizes of a tensor along each axis, None where unknown; None altogether if not even the rank is known."""
        if value is None:
            return None
        if value not in self._known:
            self._known[value] = self._work_out(value)
        return self._known[value]

    def learn(self, value: ir.Value, sizes: Sizes) -> None:
        """Take the sizes of a tensor from elsewhere: a run of the model."""
        self._known[value] = sizes

    def _work_out(self, value: ir.Value) -> Sizes | None:
        declared = _declared(value)
        if (declared is not None and None not in declared) or self._depth >= DEPTH:
            return declared
        self._depth += 1
        found = _derived(value, self)
        self._depth -= 1
        if declared is None or found is None or len(found) != len(declared):
            return found if declared is None else declared
        return tuple(own if own is not None else other for own, other in zip(declared, found, strict=True))
