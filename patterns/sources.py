"""Self or cross attention: whether query and key come from the same hidden tensor, looked for behind their projections.

An operand is walked back over everything that keeps the meaning of its tensor (layout, biases, norms, rotary arithmetic,
caches) to its projections, and over chained projections (low-rank keys) to the hidden tensors in front of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import onnx_ir as ir

from attnquant.graph import is_onnx, tensor_name
from attnquant.patterns import moves
from attnquant.patterns.facts import Facts, Level, inputs_at, is_projection
from attnquant.site import Kind

LIMIT = 160
"""Tensors looked at for one operand; beyond it nothing is said."""
PROJECTIONS = 2
"""Linear layers that one operand may have on its way: MLA and spatial reduction have two."""

_NORMS = (
    "BatchNormalization",
    "GroupNormalization",
    "InstanceNormalization",
    "LayerNormalization",
    "LpNormalization",
    "MRotaryEmbedding",
    "RMSNormalization",
    "RotaryEmbedding",
    "SimplifiedLayerNormalization",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
)
_LIGHT = (
    "Abs",
    "AveragePool",
    "Clip",
    "Erf",
    "Exp",
    "Gelu",
    "GlobalAveragePool",
    "HardSwish",
    "Max",
    "MaxPool",
    "Min",
    "Neg",
    "Pow",
    "Reciprocal",
    "ReduceL2",
    "ReduceMax",
    "ReduceMean",
    "ReduceSum",
    "ReduceSumSquare",
    "Relu",
    "Sigmoid",
    "Softplus",
    "Sqrt",
    "Tanh",
)
_SUMS = ("Add", "Concat", "Div", "Mul", "Sub", "Sum", "Where")
_PARTS = ("Gather", "GatherND", "Slice", "Split")
_SCATTERS = {"TensorScatter": 1, "ScatterND": 2, "ScatterElements": 2}
_POSITIONAL = ("ConstantOfShape", "Cos", "Range", "Shape", "Sin", "Size")
"""Behind these there is no hidden tensor: rotary tables and shape arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way back from an operand, as far as it is walked."""

    passed: frozenset[object] = frozenset()
    """Keys of the tensors on the way that could be the common source."""
    partly: frozenset[object] = frozenset()
    """Keys of tensors of which only a part comes this way: a slice of the hidden tensor."""
    projections: int = 0
    cut: bool = False
    """A part was taken since the last projection."""
    end: ir.Value | None = None
    """The input of a graph or function where the way ends."""
    lost: bool = False
    """It ends in front of a projection, at an operator that is not looked through."""

    def meets(self, other: "Way") -> bool:
        """True if both come from one tensor; two parts of one tensor are not the same."""
        return bool(self.passed & other.passed or self.passed & other.partly or self.partly & other.passed)


def kind(facts: Facts, query: ir.Value, key: ir.Value) -> Kind | None:
    """ "self" where query and key come from the same hidden tensors, "cross" where from others, None where it can't be told.

    What is fed in unprojected beside something projected is a cache. Inputs alone tell nothing: they may be projections of
    one tensor. A constant query is not of the key's tensor.
    """
    if facts.level(query) < Level.LEARNED <= facts.level(key):
        return "cross"
    left, right = _ways(facts, query), _ways(facts, key)
    if left is None or right is None or not (left or right):
        return None
    left, right = _without_tables(left, right), _without_tables(right, left)
    if any(way.projections for way in right):
        right = [way for way in right if way.projections or way.end is None]
    if any(one.meets(other) for one in left for other in right):
        return "self" if _covered(left, right) and _covered(right, left) else None
    if any(way.lost for way in (*left, *right)):
        return None
    bare = [way.end for way in (*left, *right) if way.end is not None and not way.projections]
    fed = all(end.graph is facts.main for end in bare)
    if bare and not (fed and any(way.projections for way in left)):
        return None
    return "cross"


def _without_tables(ways: list[Way], others: list[Way]) -> list[Way]:
    """Without inputs that both operands read beside something projected: rotary tables that are fed in."""
    if not any(way.projections for way in ways) or not any(way.projections for way in others):
        return ways
    fed = {way.end for way in others if way.end is not None and not way.projections}
    return [way for way in ways if way.projections or way.end not in fed]


def _covered(ways: list[Way], others: list[Way]) -> bool:
    return all(any(way.meets(other) for other in others) for way in ways)


def _ways(facts: Facts, operand: ir.Value) -> list[Way] | None:
    """Every way back from an operand, None if there is too much to walk."""
    seen: set[ir.Value] = set()
    found: list[Way] = []
    waiting = [(operand, Way())]
    while waiting:
        value, way = waiting.pop()
        if value in seen or facts.level(value) < Level.LEARNED:
            continue
        seen.add(value)
        facts.steps += 1
        if len(seen) > LIMIT:
            return None
        node = value.producer()
        if node is None:
            found.append(replace(_marked(way, value, None), end=value))
            continue
        if _is_positional(facts, node, way):
            continue
        marked = _marked(way, value, node)
        behind = _behind(facts, node, way)
        if is_projection(facts, node):
            marked = replace(marked, projections=way.projections + 1, cut=False)
            if not behind and (learned := _learned(facts, node)) is not None:
                found.append(_marked(marked, learned, learned.producer()))
                continue
        if not behind:
            lost = not way.projections and not is_projection(facts, node) and not is_onnx(node, *_SUMS)
            found.append(replace(marked, projections=way.projections, lost=lost))
        waiting.extend((one, marked) for one in behind)
    return found


def _marked(way: Way, value: ir.Value, node: ir.Node | None) -> Way:
    """The way with `value` on it."""
    if node is not None and moves.is_transparent(node) and not is_onnx(node, *_PARTS):
        return way
    key = _key(value)
    marked = replace(way, partly=way.partly | {key}) if way.cut else replace(way, passed=way.passed | {key})
    return replace(marked, cut=True) if way.projections and is_onnx(node, *_PARTS) else marked


def _key(value: ir.Value) -> object:
    """Identity of a tensor; the same sum or product written twice has the same key."""
    node = value.producer()
    if node is None or not is_onnx(node, "Add", "Mul", "Sub"):
        return value
    operands = [tensor_name(operand) for operand in node.inputs]
    return (node.op_type, *(operands if node.op_type == "Sub" else sorted(operands)))


def _is_positional(facts: Facts, node: ir.Node, way: Way) -> bool:
    """A rotary table, or rows of a constant one."""
    table = is_onnx(node, *_PARTS) and facts.level(inputs_at(node, 0)) < Level.LEARNED
    return is_onnx(node, *_POSITIONAL) or (table and not way.projections)


def _behind(facts: Facts, node: ir.Node, way: Way) -> list[ir.Value]:
    """The tensors behind a node that its output is made of; none where the way ends."""
    return [value for value in _operands(facts, node, way) if value is not None and facts.level(value) >= Level.LEARNED]


def _learned(facts: Facts, node: ir.Node) -> ir.Value | None:
    """What a projection reads that depends on sizes alone: queries of the model's own, of the size of the batch."""
    value = inputs_at(node, 0)
    if facts.level(value) != Level.SHAPE:
        return None
    for _ in range(8):
        maker = None if value is None else value.producer()
        if maker is None or not moves.is_transparent(maker):
            break
        value = inputs_at(maker, 0)
    return value


def _operands(facts: Facts, node: ir.Node, way: Way) -> Iterator[ir.Value | None]:
    if is_projection(facts, node):
        if way.projections < PROJECTIONS:
            yield from node.inputs
    elif is_onnx(node, *_SCATTERS):
        yield from (inputs_at(node, 0), inputs_at(node, _SCATTERS[node.op_type]))
    elif moves.is_transparent(node) or node.op_type in _NORMS or is_onnx(node, *_LIGHT):
        yield inputs_at(node, 0)
    elif is_onnx(node, *_SUMS):
        inputs = node.inputs[1:] if node.op_type == "Where" else node.inputs
        moving = [value for value in inputs if facts.level(value) >= Level.LEARNED]
        # In front of a projection only the unmistakable is walked: a constant bias or factor, or a norm written out.
        if not way.projections or len(moving) == 1:
            yield from moving
        elif is_onnx(node, "Div", "Mul", "Sub") and _is_statistic(facts, moving[1]):
            yield moving[0]


def _is_statistic(facts: Facts, value: ir.Value | None) -> bool:
    """A mean or a root of one, as norms subtract and divide by."""
    for _ in range(8):
        node = None if value is None else value.producer()
        if node is None or not (moves.is_transparent(node) or is_onnx(node, *_LIGHT, *_SUMS)):
            return False
        if is_onnx(node, "ReduceMean", "ReduceSum", "ReduceL2", "ReduceSumSquare"):
            return True
        value = next((one for one in node.inputs if facts.level(one) >= Level.LEARNED), None)
    return False
