"""Where Q and K of an attention come from: their common hidden tensor, and the cache on K's way.

A port is walked back over everything that keeps the meaning of its tensor (reshapes, biases, norms, rotary arithmetic,
caches) to the projections, and over chained projections (low-rank K and V) to the hidden tensors in front of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import onnx_ir as ir

from attnquant.dims import Read, Sizes
from attnquant.graph import is_onnx, tensor_name
from attnquant.roles import PortRole
from attnquant.site import Kind, Past, Port

LIMIT: Final = 400
"""Values looked at on the way back from one port; beyond it nothing is said."""

MOVES = frozenset({
    "Cast", "CastLike", "DequantizeLinear", "Dropout", "Expand", "Flatten", "Identity", "QuantizeLinear", "Reshape",
    "Squeeze", "Tile", "Transpose", "Unsqueeze",
})
"""Operators that hand their first input on as it is."""
PICKS = frozenset({"Gather", "Slice", "Split"})
"""Operators that hand on a part of their first input."""
NORMS = frozenset({
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization",
    "MRotaryEmbedding", "RMSNormalization", "RotaryEmbedding", "SimplifiedLayerNormalization",
})
ELEMENTWISE = frozenset({
    "Abs", "Add", "Clip", "Div", "Max", "Mul", "Neg", "Pow", "ReduceL2", "ReduceMean", "ReduceSum", "Reciprocal", "Sqrt",
    "Sub", "Where",
})
SCATTERS: Final = {"TensorScatter": 1, "ScatterND": 2, "ScatterElements": 2}
"""Operators that write a cache, with the input that brings the new rows."""
PROJECTIONS: Final = {
    "Conv": 1, "DynamicQuantizeMatMul": 1, "FusedGemm": 1, "FusedMatMul": 1, "Gemm": 1, "MatMul": 1, "MatMulBnb4": 1,
    "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "MatMulNBits": 1, "QGemm": 3, "QLinearMatMul": 3,
}
"""Products with a weight, with the input that holds it."""
POSITIONAL = frozenset({"Cos", "Sin", "Shape", "Size", "Range", "ConstantOfShape"})
"""Operators behind which there is no hidden tensor: rotary tables and shape arithmetic."""

_STATIC = MOVES | PICKS | ELEMENTWISE | {"Concat", "Constant"}


Keys = frozenset[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One way back from a port, or the part of it walked so far."""

    passed: Keys = frozenset()
    """Keys of the tensors on the way that could be the common source."""
    partly: Keys = frozenset()
    """Keys of tensors of which only a part comes this way (a slice of the hidden tensor)."""
    projected: bool = False
    picked: bool = False
    """A part was taken since the last projection."""
    is_input: bool = False
    """The way ends at an input of the graph or body."""

    def meets(self, other: "Branch") -> bool:
        """True if both come from one tensor; two parts of one tensor are not the same."""
        return bool(self.passed & other.passed or self.passed & other.partly or self.partly & other.passed)


def is_static(value: ir.Value | None, depth: int = 8) -> bool:
    """True for constants and for what is computed from constants alone; a missing input counts as static."""
    if value is None or value.const_value is not None:
        return True
    node = value.producer()
    if node is None or depth == 0 or node.op_type not in _STATIC:
        return False
    return node.op_type == "Constant" or all(is_static(operand, depth - 1) for operand in node.inputs)


def kind_of(query: ir.Value | None, key: ir.Value | None, *, inputs_tell: bool) -> Kind | None:
    """Compare the sources of Q and K: "self" for the same hidden tensors, "cross" for others, None where it can't be told.

    `inputs_tell` is False inside functions and bodies, whose inputs may hold anything.
    """
    left, right = _branches(query), _branches(key)
    if left is None or right is None or not (left or right):
        return None
    if any(branch.projected for branch in right):
        right = [branch for branch in right if branch.projected or not branch.is_input]  # the others are caches
    if any(one.meets(other) for one in left for other in right):
        complete = all(any(one.meets(other) for other in right) for one in left) and \
            all(any(one.meets(other) for one in left) for other in right)
        return "self" if complete else None
    bare = any(branch.is_input and not branch.projected for branch in (*left, *right))
    if bare and not (inputs_tell and any(branch.projected for branch in left)):
        return None
    return "cross"


def _branches(port: ir.Value | None) -> list[Branch] | None:
    """Every way back from a port, None if there is too much to walk."""
    seen: set[ir.Value] = set()
    found: list[Branch] = []
    todo: list[tuple[ir.Value, Branch]] = [] if port is None else [(port, Branch())]
    while todo:
        value, way = todo.pop()
        if value in seen or is_static(value):
            continue
        seen.add(value)
        if len(seen) > LIMIT:
            return None
        node = value.producer()
        if _is_positional(node, way.projected):
            continue
        way = _marked(way, value, node)
        steps, projection = _steps(node, way.projected)
        if not steps:
            found.append(replace(way, is_input=node is None))
        elif projection:
            way = replace(way, projected=True, picked=False)
        todo.extend((operand, way) for operand in steps)
    return found


def _marked(way: Branch, value: ir.Value, node: ir.Node | None) -> Branch:
    """The way with `value` on it."""
    if node is not None and node.op_type in MOVES:
        return way
    key = _key(value)
    way = replace(way, partly=way.partly | {key}) if way.picked else replace(way, passed=way.passed | {key})
    if way.projected and node is not None and node.op_type in PICKS:
        return replace(way, picked=True)
    return way


def _is_positional(node: ir.Node | None, projected: bool) -> bool:
    """Rotary tables and shape arithmetic: no hidden tensor lies behind."""
    if node is None:
        return False
    return node.op_type in POSITIONAL or (not projected and node.op_type in PICKS and is_static(node.inputs[0]))


def _steps(node: ir.Node | None, projected: bool) -> tuple[list[ir.Value], bool]:
    """The tensors behind a node, and whether it is a projection; none where the way ends."""
    operands: list[ir.Value | None] = []
    weight = None if node is None else PROJECTIONS.get(node.op_type)
    projection = node is not None and weight is not None and weight < len(node.inputs) and is_static(node.inputs[weight])
    if node is None:
        pass
    elif projection or node.op_type in MOVES | PICKS | NORMS:
        operands = list(node.inputs[:1])
    elif projected:
        operands = _one_way(node)
    elif node.op_type == "Where":
        operands = list(node.inputs[1:])
    elif node.op_type in ELEMENTWISE or node.op_type == "Concat":
        operands = list(node.inputs)
    elif node.op_type in SCATTERS:
        operands = [node.inputs[0], node.inputs[SCATTERS[node.op_type]]]
    return [operand for operand in operands if operand is not None and not is_static(operand)], projection


def _one_way(node: ir.Node) -> list[ir.Value | None]:
    """In front of a projection only the unmistakable is walked: a constant factor or bias, or a norm written out."""
    moving = [operand for operand in node.inputs if not is_static(operand)]
    if node.op_type not in ELEMENTWISE or not moving:
        return []
    if len(moving) == 1:
        return list(moving)
    return moving[:1] if node.op_type in ("Mul", "Div") and _is_norm_factor(moving[1]) else []


def _is_norm_factor(value: ir.Value | None) -> bool:
    for _ in range(6):
        node = None if value is None else value.producer()
        if node is None or node.op_type not in ELEMENTWISE | MOVES:
            return False
        if node.op_type in ("ReduceMean", "ReduceSum", "ReduceL2"):
            return True
        value = next((operand for operand in node.inputs if not is_static(operand)), None)
    return False


def _key(value: ir.Value) -> object:
    """Identity of a tensor; the same sum or product written twice has the same key."""
    node = value.producer()
    if node is not None and node.op_type in ("Add", "Mul", "Sub") and is_onnx(node, node.op_type):
        operands = [tensor_name(operand) for operand in node.inputs]
        return (node.op_type, *(operands if node.op_type == "Sub" else sorted(operands)))
    return value


def trunk(port: ir.Value | None) -> Iterator[ir.Value]:
    """K or V from its port back to its projection, without side branches: caches, repeats and moves are walked through."""
    for _ in range(LIMIT):
        if port is None or is_static(port):
            return
        yield port
        node = port.producer()
        port = None if node is None else _trunk_step(node)


def _trunk_step(node: ir.Node) -> ir.Value | None:
    if node.op_type in MOVES or node.op_type in PICKS or node.op_type in NORMS:
        return node.inputs[0]
    if node.op_type in SCATTERS:
        return node.inputs[SCATTERS[node.op_type]]
    moving = [operand for operand in node.inputs if not is_static(operand)]
    if node.op_type == "Concat" and len(moving) == 2:
        caches = [operand for operand in moving if input_behind(operand) is not None]
        return next((operand for operand in moving if operand not in caches), None) if caches else None
    if node.op_type not in ("Add", "Sub", "Mul", "Div"):
        return None
    content = [operand for operand in moving if not _is_table(operand)]
    makers = [None if operand is None else operand.producer() for operand in content]
    rotated = node.op_type == "Add" and all(is_onnx(maker, "Mul") for maker in makers)  # x cos + rotate(x) sin
    return content[0] if len(content) == 1 or (content and rotated) else None


def _is_table(value: ir.Value | None) -> bool:
    """True for a rotary table: nothing but cosines, sines and rows of constants reach it."""
    for _ in range(8):
        node = None if value is None else value.producer()
        if node is None:
            return False
        if _is_positional(node, False):
            return True
        if node.op_type not in MOVES | PICKS | ELEMENTWISE | {"Concat"}:
            return False
        value = next((operand for operand in node.inputs if not is_static(operand)), None)
    return False


def input_behind(value: ir.Value | None) -> ir.Value | None:
    """The graph or body input that reaches `value` over moves and picks alone, None if something is computed in between."""
    for _ in range(LIMIT):
        if value is None or is_static(value):
            return None
        node = value.producer()
        if node is None:
            return value
        if node.op_type not in MOVES and node.op_type not in PICKS:
            return None
        value = node.inputs[0]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """The cache on K's (or V's) way to the attention, outside the operator."""

    past: Past = "none"
    past_port: Port | None = None
    present_port: Port | None = None
    """The first tensor on the way back that is also an output of its graph."""


def cache_of(port: ir.Value | None) -> Cache:
    """Find concatenated, scattered or fed caches between a port and its projection, and the present output beside it."""
    past, past_port, present = "none", None, None
    for value in trunk(port):
        node = value.producer()
        present = present or _present(value)
        if past != "none":
            continue
        if node is None:
            return Cache(past="input", past_port=None, present_port=present)
        if node.op_type in SCATTERS and input_behind(node.inputs[0]) is not None:
            past, past_port = "scatter", operand_port(node, 0)
        elif node.op_type == "Concat":
            index = next((place for place, operand in enumerate(node.inputs) if input_behind(operand) is not None), None)
            if index is not None:
                past, past_port = "concat", operand_port(node, index)
    return Cache(past=past, past_port=past_port, present_port=present)  # type: ignore[arg-type]


def _present(value: ir.Value) -> Port | None:
    for candidate in (value, *(use.node.outputs[0] for use in value.uses() if is_onnx(use.node, "Identity", "Cast"))):
        node = candidate.producer()
        if node is not None and candidate.is_graph_output():
            return Port(node=node.name or "", index=candidate.index() or 0, tensor=tensor_name(candidate))
    return None


def operand_port(node: ir.Node, index: int) -> Port:
    """The edge into input `index` of a node."""
    return Port(node=node.name or "", index=index, tensor=tensor_name(node.inputs[index]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """repeat_kv in front of a port."""

    port: Port
    """The edge into its first operator."""
    before: ir.Value
    """The tensor on that edge."""
    factor: int | None


def find_repeat(port: ir.Value | None, read: Read) -> Repeat | None:
    """The repeat_kv in front of a port, its factor where known; None where there is none.

    repeat_kv (grouped heads) is Unsqueeze or Reshape to one more axis, Expand or Tile along it, Reshape back.
    """
    for value in trunk(port):
        node = value.producer()
        if node is None or node.op_type not in MOVES | {"Mul", "Div"}:
            return None
        if node.op_type in ("Expand", "Tile"):
            wider = node.inputs[0].producer() if node.inputs[0] is not None else None
            if wider is None or wider.op_type not in ("Unsqueeze", "Reshape"):
                return None
            before = wider.inputs[0]
            factor = _repeat_factor(read(node.inputs[0]), read(value))
            if factor == 1 or before is None:
                return None
            return Repeat(port=operand_port(wider, 0), before=before, factor=factor)
    return None


def _repeat_factor(before: Sizes | None, after: Sizes | None) -> int | None:
    """Size of the axis that Expand widens from 1, at position 2 of (batch, kv heads, repeat, sequence, head size)."""
    if before is None or after is None or len(before) != 5 or len(after) != 5:
        return None
    axes = [axis for axis in (2, 3) if before[axis] == 1]
    return after[axes[0]] if len(axes) == 1 else None


ROLE_PAIRS: Final = (
    (PortRole.KEY, PortRole.PAST_KEY, PortRole.PRESENT_KEY),
    (PortRole.VALUE, PortRole.PAST_VALUE, PortRole.PRESENT_VALUE),
)
"""Each cached role with its past and present."""
