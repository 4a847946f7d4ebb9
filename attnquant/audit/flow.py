"""Walks through a Q/DQ graph: which tensors are constant, and what lies quantized on the way into a tensor or out of one.

A model is read once; every walk is bounded by what is near, so that an audit stays linear in the number of nodes.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

import onnx_ir as ir

from attnquant.graph import bodies, is_onnx, sizes_only

MOVES = frozenset({
    "Cast", "CastLike", "Concat", "Dropout", "Expand", "Flatten", "Gather", "GatherND", "Identity", "Pad", "Reshape",
    "ScatterElements", "ScatterND", "Slice", "Split", "Squeeze", "TensorScatter", "Tile", "Transpose", "Unsqueeze",
})  # fmt: skip
"""Operators that hand on elements of their data as they are."""
SCALES = frozenset({"Mul", "Div"})
"""By a constant they leave an operand what it is."""
GUARDS = MOVES | SCALES | {"Add", "And", "Clip", "Equal", "IsNaN", "Max", "Min", "Not", "Or", "Sub", "Where"}
"""What stands between a softmax and the product with V."""
MASKING = GUARDS | {"CumSum", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Neg", "Trilu", "Xor"}
"""What masks are computed with."""
CACHED = MOVES | SCALES | {"Add", "Neg", "RotaryEmbedding", "Sub"}
"""What stands between a projection and its present output."""

_LIMIT = 400
"""Nodes looked at on one walk."""
_RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
_QUANTIZE = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
_QDQ_DOMAINS = ("", "ai.onnx", "com.microsoft")


Edge = tuple[ir.Node, int]
"""(node, index of its input)."""


class Level(IntEnum):
    """What a tensor depends on; a node's outputs have the highest of its inputs."""

    CONSTANT = 0
    SHAPE = 1
    """Constants and sizes of tensors."""
    DATA = 2


def is_quantize(node: ir.Node | None) -> bool:
    """QuantizeLinear or DynamicQuantizeLinear, ONNX Runtime's own included."""
    return node is not None and node.op_type in _QUANTIZE and node.domain in _QDQ_DOMAINS


def is_dequantize(node: ir.Node | None) -> bool:
    """DequantizeLinear, ONNX Runtime's own included."""
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in _QDQ_DOMAINS


def carried(node: ir.Node) -> Iterator[int]:
    """Inputs whose elements a move hands on: the first, all of a Concat, cache and update of a scatter."""
    if is_onnx(node, "Concat"):
        yield from range(len(node.inputs))
        return
    yield 0
    if is_onnx(node, "ScatterElements", "ScatterND"):
        yield 2
    elif is_onnx(node, "TensorScatter"):
        yield 1


@dataclass(frozen=True, slots=True)
class Hit:
    """A quantized activation met on a walk."""

    dequantize: ir.Node
    quantize: ir.Node | None
    """None where the integers come in from outside the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a walk back from an operand met."""

    hits: tuple[Hit, ...] = ()
    leaves: tuple[tuple[ir.Value, ir.Node | None], ...] = ()
    """Ends of paths without a quantizer: the float tensor, and the node that reads it on the way (None: the operand)."""

    @property
    def complete(self) -> bool:
        """Quantized on every path that carries data."""
        return bool(self.hits) and not self.leaves

    @property
    def constant(self) -> bool:
        """No path carries data."""
        return not self.hits and not self.leaves


@dataclass(slots=True)
class Flow:
    """A model, indexed once."""

    model: ir.Model
    levels: dict[ir.Value, Level] = field(default_factory=dict)
    quantizes: list[ir.Node] = field(default_factory=list)
    dequantizes: list[ir.Node] = field(default_factory=list)
    _near: dict[tuple[ir.Value, int], tuple[Hit, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for _, body in bodies(self.model):
            for node in body:
                level = self._level(node)
                self.levels.update(dict.fromkeys(node.outputs, level))
                if is_quantize(node):
                    self.quantizes.append(node)
                elif is_dequantize(node):
                    self.dequantizes.append(node)

    def level(self, value: ir.Value | None) -> Level:
        """What a tensor depends on; a missing input and an initializer are constant."""
        if value is None or value.const_value is not None:
            return Level.CONSTANT
        return self.levels.get(value, Level.DATA)

    def is_data(self, value: ir.Value | None) -> bool:
        """True if the tensor depends on the values of the graph's inputs."""
        return self.level(value) is Level.DATA

    def _level(self, node: ir.Node) -> Level:
        if node.op_type in _RANDOM or any(
            attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for attribute in node.attributes.values()
        ):
            return Level.DATA
        if sizes_only(node):
            return min(Level.SHAPE, self.level(node.inputs[0]))
        if is_onnx(node, "CastLike"):
            return self.level(node.inputs[0])  # of the other input the type alone counts
        return max((self.level(value) for value in node.inputs), default=Level.CONSTANT)

    def origin(self, dequantize: ir.Node) -> Hit | None:
        """The quantizer behind a DequantizeLinear of data, moves of the integers passed; None behind other integers.

        Integers that come in from outside (a cache kept in int8) count as quantized.
        """
        value = dequantize.inputs[0]
        while self.is_data(value) and value is not None:
            node = value.producer()
            if node is None:
                return Hit(dequantize, None)
            if is_quantize(node):
                return Hit(dequantize, node)
            if not is_onnx(node, *MOVES):
                return None
            value = node.inputs[0]
        return None

    def trace(self, value: ir.Value | None) -> Trace:
        """Walk back from an operand through moves and scalar factors, on every path that carries data."""
        hits: list[Hit] = []
        leaves: list[tuple[ir.Value, ir.Node | None]] = []
        stack: list[tuple[ir.Value | None, ir.Node | None]] = [(value, None)]
        seen: set[ir.Value] = set()
        while stack:
            at, reader = stack.pop()
            if at is None or at in seen or not self.is_data(at):
                continue
            seen.add(at)
            node = at.producer()
            if is_dequantize(node) and node is not None and (hit := self.origin(node)) is not None:
                hits.append(hit)
            elif node is not None and len(seen) <= _LIMIT and (step := self._step(node)):
                stack.extend((node.inputs[index], node) for index in reversed(step) if index < len(node.inputs))
            else:
                leaves.append((at, reader))
        return Trace(hits=tuple(hits), leaves=tuple(leaves))

    def _step(self, node: ir.Node) -> list[int]:
        """Inputs to go on to from a node that leaves its operand what it is; empty at any other node."""
        if is_onnx(node, *MOVES):
            return list(carried(node))
        if is_onnx(node, *SCALES):
            data = [index for index, value in enumerate(node.inputs) if self.is_data(value)]
            return data if len(data) == 1 else []
        return []

    def near(self, value: ir.Value | None, through: Collection[str]) -> tuple[Hit, ...]:
        """Every quantized activation on any path into a tensor within the given operators."""
        if value is None:
            return ()
        key = (value, id(through))
        if key not in self._near:
            self._near[key] = tuple(self._walk(value, through))
        return self._near[key]

    def _walk(self, value: ir.Value, through: Collection[str]) -> Iterator[Hit]:
        stack, seen = [value], {value}
        while stack and len(seen) <= _LIMIT:
            node = stack.pop().producer()
            if node is None:
                continue
            if is_dequantize(node):
                hit = self.origin(node)
                if hit is not None:
                    yield hit
            elif is_onnx(node, *through):
                for other in node.inputs:
                    if other is not None and other not in seen and self.is_data(other):
                        seen.add(other)
                        stack.append(other)

    def ahead(self, value: ir.Value, through: Collection[str]) -> Iterator[tuple[Edge, ...]]:
        """The way to every reader of a tensor behind the given operators: the edges passed, the reader's own last.

        Graph outputs are no readers.
        """
        stack: list[tuple[ir.Value, tuple[Edge, ...]]] = [(value, ())]
        seen = {value}
        while stack and len(seen) <= _LIMIT:
            at, way = stack.pop()
            for use in at.uses():
                edges = (*way, (use.node, use.idx))
                if not self.goes_on(use.node, use.idx, through):
                    yield edges
                    continue
                for output in use.node.outputs:
                    if output not in seen:
                        seen.add(output)
                        stack.append((output, edges))

    def goes_on(self, node: ir.Node, index: int, through: Collection[str]) -> bool:
        if node.op_type not in through or node.domain not in _QDQ_DOMAINS:
            return False
        if node.op_type in SCALES:
            return sum(self.is_data(value) for value in node.inputs) == 1
        return node.op_type not in MOVES or index in carried(node)
