"""Multiplying a tensor by a constant at its source: in the scale of a norm, the columns of a linear, or another constant.

A factor is an array with the rank of the tensor, of size 1 along every axis where it is the same. It is carried backwards
through what only moves elements, constant sums, and the value side of an attention, up to a constant that can take it.
Everything is checked before anything is edited.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, set_input
from attnquant.emission.linears import dequantize_behind
from attnquant.graph import along, constant, is_onnx, operator, sizes_only, tensor_name, weight_axis

_NORMS = {
    ("ai.onnx", "LayerNormalization"): (1, 2),
    ("ai.onnx", "RMSNormalization"): (1,),
    ("ai.onnx", "SimplifiedLayerNormalization"): (1,),
    ("com.microsoft", "SimplifiedLayerNormalization"): (1,),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (2,),
    ("com.microsoft", "SkipLayerNormalization"): (2, 3),
}
"""Norms over the last axis: where their scale is and, behind it, their bias."""



def absorb(value: ir.Value, factor: np.ndarray, reader: ir.Node, editor: Editor) -> str | None:
    """Multiply `value` by `factor` (rank of `value`) where it comes from; `reader` is the one reader that is to see it.

    Returns None when it is done, or why it can't be, and then nothing has changed. Constants are replaced, never edited.
    """
    work = _Absorption(editor=editor)
    reason = work.scale(value, np.asarray(factor, np.float64), reader)
    if reason is None:
        for edit in work.edits:
            edit()
    return reason


def takes_factor(value: ir.Value, readers: Collection[ir.Node], editor: Editor) -> bool:
    """Whether `absorb` could give `value` a factor per channel of its last axis, if one node stood between it and `readers`.

    Nothing is changed.
    """
    others = [use.node for use in value.uses() if use.node not in readers and not sizes_only(use.node)]
    size = None if value.shape is None or not len(value.shape) else value.shape[-1]
    if others or value.is_graph_output() or not isinstance(size, int) or value.shape is None:
        return False
    factor = np.ones([1] * (len(value.shape) - 1) + [size])
    return _Absorption(editor=editor).at_source(value, factor) is None


@dataclass(slots=True, kw_only=True)
class _Absorption:
    """One way back from a tensor, collected as edits to be made if all of it works."""

    editor: Editor
    edits: list[Callable[[], None]] = field(default_factory=list)

    def scale(self, value: ir.Value, factor: np.ndarray, reader: ir.Node) -> str | None:
        """Plan the multiplication of a computed tensor; the reason if there is no way."""
        others = [use.node for use in value.uses() if use.node is not reader and not sizes_only(use.node)]
        if others or value.is_graph_output():
            what = f"{others[0].op_type} {others[0].name!r}" if others else "the caller"
            return f"{what} reads the same tensor"
        if sum(use.node is reader for use in value.uses()) > 1:
            return f"{reader.op_type} {reader.name!r} reads it twice"
        return self.at_source(value, factor)

    def at_source(self, value: ir.Value, factor: np.ndarray) -> str | None:
        """As `scale`, whoever reads the tensor."""
        node = value.producer()
        if node is None:
            return "it is an input of the graph"
        if operator(node) in _NORMS and value is node.outputs[0]:
            return self._norm(node, factor)
        step = _STEPS.get(node.op_type) if is_onnx(node) or node.domain in ("", "ai.onnx") else None
        if step is None:
            return f"it comes from {node.op_type} {node.name!r}"
        return step(self, node, factor)

    def _norm(self, node: ir.Node, factor: np.ndarray) -> str | None:
        axis = node.attributes.get("axis")
        if axis is not None and axis.as_int() not in (-1, factor.ndim - 1):
            return f"{node.name!r} normalizes more than the last axis"
        if not _is_vector(factor):
            return f"{node.name!r} has one scale per channel of the last axis"
        places = [place for place in _NORMS[operator(node)] if place < len(node.inputs) and node.inputs[place] is not None]
        if any(constant(node.inputs[place]) is None for place in places):
            return f"the scale of {node.name!r} is computed"
        for place in places:
            self._replace(node, place, factor.reshape(-1))
        return None

    def _add(self, node: ir.Node, factor: np.ndarray) -> str | None:
        place = _constant_operand(node)
        if place is None:
            return f"{node.op_type} {node.name!r} adds two computed tensors"
        inner = node.inputs[1 - place]
        if inner is None or _rank(inner) != factor.ndim:
            return f"{node.op_type} {node.name!r} broadcasts"
        reason = self.scale(inner, factor, node)
        if reason is None:
            self._replace(node, place, factor)
        return reason

    def _mul(self, node: ir.Node, factor: np.ndarray) -> str | None:
        place = _constant_operand(node)
        if place is None:
            return self._product(node, factor)
        inner = node.inputs[1 - place]
        if inner is None or _rank(inner) != factor.ndim:
            return f"{node.op_type} {node.name!r} broadcasts"
        array = constant(node.inputs[place])
        if array is None or array.size == 1:
            # A number may be part of a formula that the runtime knows, GELU's half for one; as a vector it is not any more.
            return f"{node.op_type} {node.name!r} multiplies by a number"
        self._replace(node, place, factor)
        return None

    def _product(self, node: ir.Node, factor: np.ndarray) -> str | None:
        """Of two computed factors one takes it: the up projection of a gated feed-forward."""
        for inner in reversed(node.inputs):
            planned = len(self.edits)
            if inner is not None and _fits(inner, factor) and self.scale(inner, factor, node) is None:
                return None
            del self.edits[planned:]
        return f"{node.op_type} {node.name!r} multiplies two tensors that can't take it"

    def _reshape(self, node: ir.Node, factor: np.ndarray) -> str | None:
        inner = node.inputs[0]
        before = None if inner is None else _reshaped(factor, node.outputs[0], inner)
        if inner is None or before is None:
            return f"the sizes around {node.op_type} {node.name!r} are not known"
        return self.scale(inner, before, node)

    def _transpose(self, node: ir.Node, factor: np.ndarray) -> str | None:
        inner = node.inputs[0]
        order = node.attributes.get_ints("perm", list(reversed(range(factor.ndim))))
        return "no input" if inner is None else self.scale(inner, factor.transpose(np.argsort(order)), node)

    def _identity(self, node: ir.Node, factor: np.ndarray) -> str | None:
        inner = node.inputs[0]
        return "no input" if inner is None else self.scale(inner, factor, node)

    def _clipped(self, node: ir.Node, factor: np.ndarray) -> str | None:
        """max(0, x) times a positive number is max(0, x times that number), and the same where x < 0 has a slope."""
        inner = node.inputs[0]
        if inner is None or not np.all(factor > 0):
            return f"the factor behind {node.op_type} {node.name!r} is not positive everywhere"
        return self.scale(inner, factor, node)

    def _matmul(self, node: ir.Node, factor: np.ndarray) -> str | None:
        right = node.inputs[1]
        if right is None or constant(node.inputs[0]) is not None:
            return f"{node.name!r} has its weight on the left"
        if constant(right) is not None or dequantize_behind(right) is not None:
            return self._weight(node, factor)
        # Probabilities times V: what scales a column of V scales the same column of the product.
        if factor.ndim < 2 or factor.shape[-2] != 1 or not _fits(right, factor):
            return f"{node.name!r} multiplies two computed tensors"
        return self.scale(right, factor, node)

    def _gemm(self, node: ir.Node, factor: np.ndarray) -> str | None:
        if constant(node.inputs[1]) is None and dequantize_behind(node.inputs[1]) is None:
            return f"{node.name!r} multiplies two computed tensors"
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if bias is not None and constant(bias) is None:
            return f"{node.name!r} adds a computed tensor"
        reason = self._weight(node, factor)
        if reason is None and bias is not None:
            self._replace(node, 2, factor)
        return reason

    def _attention(self, node: ir.Node, factor: np.ndarray) -> str | None:
        value = node.inputs[2] if len(node.inputs) > 2 else None
        if value is None or any(len(node.inputs) > place and node.inputs[place] is not None for place in (4, 5)):
            return f"{node.name!r} has a cache"
        if any(output.uses() or output.is_graph_output() for output in node.outputs[1:3]):
            return f"{node.name!r} hands out its values"
        heads = [node.attributes.get_int(f"{name}_num_heads") for name in ("q", "kv")]
        if factor.ndim == 4 and not (factor.shape[2] == 1 and _fits(value, factor)):
            return f"{node.name!r} repeats its values"
        if factor.ndim == 3 and (not heads[0] or heads[0] != heads[1] or not _is_vector(factor)):
            return f"{node.name!r} repeats its values"
        if sum(item is value for item in node.inputs) > 1:
            return f"{node.name!r} reads the same tensor as query or key"
        return self.scale(value, factor, node)

    def _weight(self, node: ir.Node, factor: np.ndarray) -> str | None:
        """A constant weight takes a factor per output channel, in its float values or in its scale and signs."""
        if not _is_vector(factor):
            return f"{node.name!r} has one scale per channel of the last axis"
        columns = factor.reshape(-1)
        flipped = weight_axis(node) == 0
        weight, dequantize = constant(node.inputs[1]), dequantize_behind(node.inputs[1])
        stored = weight if dequantize is None else constant(dequantize.inputs[0])
        if columns.size == 1 and stored is not None and stored.ndim > 1:
            columns = np.repeat(columns, stored.shape[-2 if flipped else -1])
        if weight is not None:
            if weight.ndim < 2 or weight.shape[-2 if flipped else -1] != columns.size or columns.size == 1:
                return f"the columns of {node.name!r} are not the channels"
            if len(node.inputs[1].uses()) > 1:  # type: ignore[union-attr]
                return f"the weight of {node.name!r} is shared"
            self._replace(node, 1, columns[:, None] if flipped else columns)
            return None
        if dequantize is None or dequantize is not (node.inputs[1].producer() if node.inputs[1] else None):
            return f"the weight of {node.name!r} is computed"
        return self._quantized(node, dequantize, columns, 0 if flipped else None)

    def _quantized(self, node: ir.Node, dequantize: ir.Node, columns: np.ndarray, axis: int | None) -> str | None:
        weight, scale = constant(dequantize.inputs[0]), constant(dequantize.inputs[1])
        if weight is None or scale is None or len(dequantize.outputs[0].uses()) > 1:
            return f"the weight of {node.name!r} is shared or computed"
        axis = weight.ndim - 1 if axis is None else axis
        own = dequantize.attributes.get_int("axis", 1) % weight.ndim
        if (scale.size > 1 and own != axis) or weight.shape[axis] != columns.size or scale.ndim > 1:
            return f"the scales of {node.name!r} are not per output channel"
        zero_point = constant(dequantize.inputs[2]) if len(dequantize.inputs) > 2 else None
        if not np.all(np.isfinite(columns)) or np.any(columns == 0):
            return "the factor is zero somewhere"
        symmetric = weight.dtype == np.int8 and weight.min() > -128 and (zero_point is None or not zero_point.any())
        if np.any(columns < 0) and not symmetric:
            return "the factor is negative somewhere"
        scaled = (scale.astype(np.float64).reshape(-1) * np.abs(columns)).astype(scale.dtype)

        def edit() -> None:
            set_input(dequantize, 1, self.editor.constant(scaled, f"{tensor_name(dequantize.inputs[1])}_scaled"))
            dequantize.attributes["axis"] = ir.AttrInt64("axis", axis)
            if zero_point is not None and zero_point.size != columns.size:
                spread = np.full(columns.shape, zero_point.reshape(-1)[0])
                set_input(dequantize, 2, self.editor.constant(spread, f"{tensor_name(dequantize.inputs[2])}_spread"))
            if np.any(columns < 0):
                signed = weight * along(np.sign(columns).astype(np.int8), axis, weight.ndim)
                set_input(dequantize, 0, self.editor.constant(signed, f"{tensor_name(dequantize.inputs[0])}_signed"))

        self.edits.append(edit)
        return None

    def _replace(self, node: ir.Node, place: int, factor: np.ndarray) -> None:
        """Plan the product of a constant input with a factor, in the constant's own rank where that holds it."""
        old = constant(node.inputs[place])
        if old is None:
            msg = f"input {place} of node {node.name!r} is no constant"
            raise ValueError(msg)
        product = old.astype(np.float64) * factor
        keep = max(old.ndim, 1)
        if product.ndim > keep and all(size == 1 for size in product.shape[:-keep]):
            product = product.reshape(product.shape[-keep:])
        product = product.astype(old.dtype)
        name = f"{tensor_name(node.inputs[place])}_scaled"
        self.edits.append(lambda: set_input(node, place, self.editor.constant(product, name)))


_STEPS: dict[str, Callable[[_Absorption, ir.Node, np.ndarray], str | None]] = {
    "Add": _Absorption._add,
    "Sub": _Absorption._add,
    "Mul": _Absorption._mul,
    "Reshape": _Absorption._reshape,
    "Flatten": _Absorption._reshape,
    "Squeeze": _Absorption._reshape,
    "Unsqueeze": _Absorption._reshape,
    "Transpose": _Absorption._transpose,
    "Identity": _Absorption._identity,
    "Relu": _Absorption._clipped,
    "LeakyRelu": _Absorption._clipped,
    "MatMul": _Absorption._matmul,
    "Gemm": _Absorption._gemm,
    "Attention": _Absorption._attention,
}
"""How a factor passes each operator of ai.onnx, against the flow."""


def _is_vector(factor: np.ndarray) -> bool:
    """Whether a factor differs along the last axis only."""
    return bool(factor.size == factor.shape[-1])


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _constant_operand(node: ir.Node) -> int | None:
    """Which operand of a binary operator is constant; the second one, for Sub."""
    places = [place for place in (0, 1) if constant(node.inputs[place]) is not None]
    return places[0] if len(places) == 1 and (places == [1] or node.op_type != "Sub") else None


def _fits(value: ir.Value, factor: np.ndarray) -> bool:
    """Whether a tensor has the sizes of a factor wherever that differs."""
    shape = value.shape
    if shape is None or len(shape) != factor.ndim:
        return False
    return all(size in (1, own) for size, own in zip(factor.shape, tuple(shape), strict=True))


def _reshaped(factor: np.ndarray, after: ir.Value, before: ir.Value) -> np.ndarray | None:
    """The factor in front of an operator that keeps the order of the elements; None if sizes are missing.

    Elements of the trailing axes keep their order among themselves if the products of the trailing sizes are equal.
    """
    if after.shape is None or before.shape is None or len(after.shape) != factor.ndim:
        return None
    varying = [axis for axis, size in enumerate(factor.shape) if size > 1]
    start = varying[0] if varying else factor.ndim
    tail = list(after.shape[start:])
    if not all(isinstance(size, int) for size in tail):
        return None
    sizes = [size for size in tail if isinstance(size, int)]
    count = math.prod(sizes)
    for length in range(len(before.shape) + 1):
        end = before.shape[len(before.shape) - length :]
        known = [size for size in end if isinstance(size, int)]
        if len(known) != length:
            return None
        if math.prod(known) == count and (length or count == 1):
            if known == sizes:
                return factor.reshape([1] * (len(before.shape) - length) + list(factor.shape[start:]))
            full = np.broadcast_to(factor.reshape(factor.shape[start:]), sizes)
            return _collapsed(full.reshape([1] * (len(before.shape) - length) + known))
    return None


def _collapsed(factor: np.ndarray) -> np.ndarray:
    """A factor with size 1 along every axis where it is the same."""
    for axis in range(factor.ndim):
        first = factor.take([0], axis=axis)
        factor = first if np.array_equal(np.broadcast_to(first, factor.shape), factor) else factor
    return factor
