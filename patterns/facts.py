"""What one pass over a model says about its tensors: axes, small shape arithmetic, and what each depends on.

The pass visits every node once, in graph order, subgraphs where their node stands and functions after their callers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count

import numpy as np
import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.sizes import Axes, Axis, Origin, Size, Symbols, axis, common, divide, known, product, size_of, times

SMALL = 64
"""Integer and scalar tensors up to this many elements are followed element by element."""


class Level(IntEnum):
    """What a tensor depends on; a node's is the highest of its inputs'."""

    CONSTANT = 0
    SHAPE = 1
    """Constants and sizes of the inputs."""
    LEARNED = 2
    """The same, behind a projection: what a learned query becomes at run time."""
    DATA = 3
    """Values of the inputs."""


Number = int | float | bool
Element = Number | Symbols | None


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a small tensor, None where one is unknown; `scalar` tells rank 0 from rank 1."""

    items: tuple[Element, ...]
    scalar: bool


@dataclass(slots=True)
class Facts:
    """Tables filled by `patterns.inference`; reading a value that the pass never met gives the weakest answer."""

    measured: Mapping[ir.Value, np.ndarray] = field(default_factory=dict)
    """Tensors from a run: their sizes are put in place of symbols, their elements where the graph does not say them."""
    axes: dict[ir.Value, Axes | None] = field(default_factory=dict)
    elements: dict[ir.Value, Elements] = field(default_factory=dict)
    levels: dict[ir.Value, Level] = field(default_factory=dict)
    depths: dict[ir.Value, int] = field(default_factory=dict)
    names: dict[ir.Node, str] = field(default_factory=dict)
    paths: dict[ir.Node, str] = field(default_factory=dict)
    order: dict[ir.Node, int] = field(default_factory=dict)
    opset: int = 0
    main: ir.Graph | None = None
    functions: Mapping[ir.OperatorIdentifier, ir.Function] = field(default_factory=dict)
    projecting: set[ir.Node] = field(default_factory=set)
    """Calls of functions that hold a projection."""
    limit: int = 0
    """Steps after which calls of functions are no longer followed."""
    nesting: int = 0
    steps: int = 0
    """Nodes visited by this pass and by every walk: the cost, in the tests' currency."""
    equal: dict[int, Size] = field(default_factory=dict)
    """Symbols solved: what each is equal to, because tensors with both are added or because a Reshape keeps all elements."""
    _symbols: Iterator[int] = field(default_factory=count)
    _uses: dict[ir.Value, tuple[tuple[ir.Node, int], ...]] = field(default_factory=dict)

    def fresh(self) -> Size:
        return Symbols(1, (next(self._symbols),))

    def level(self, value: ir.Value | None) -> Level:
        return Level.CONSTANT if value is None else self.levels.get(value, Level.DATA)

    def depends_on_data(self, value: ir.Value | None) -> bool:
        return self.level(value) == Level.DATA

    def rank(self, value: ir.Value | None) -> int | None:
        axes = self.axes_of(value)
        return None if axes is None else len(axes)

    def axes_of(self, value: ir.Value | None) -> Axes | None:
        axes = None if value is None else self.axes.get(value)
        if axes is None or not self.equal or not any(self._is_solved(factor.size) for one in axes for factor in one):
            return axes
        return tuple(self.resolved_axis(one) for one in axes)

    def resolved_axis(self, one: Axis) -> Axis:
        """The axis in the symbols that stand for all symbols equal to them; a factor that turns out to be 1 is dropped."""
        sizes = [self.resolved(factor.size) for factor in one]
        return tuple(factor._replace(size=size) for factor, size in zip(one, sizes, strict=True) if size != 1)

    def elements_of(self, value: ir.Value | None) -> Elements | None:
        found = None if value is None else self.elements.get(value)
        if found is None or not self.equal:
            return found
        if not any(isinstance(item, Symbols) and self._is_solved(item) for item in found.items):
            return found
        items = tuple(self.resolved(item) if isinstance(item, Symbols) else item for item in found.items)
        return Elements(items, found.scalar)

    def resolved(self, size: Size) -> Size:
        """The size in the symbols that stand for all symbols equal to them."""
        if isinstance(size, int) or not self._is_solved(size):
            return size
        return times(size.coefficient, product(self._root(name) for name in size.names))

    def _is_solved(self, size: Size) -> bool:
        return not isinstance(size, int) and any(name in self.equal for name in size.names)

    def unite(self, sizes: list[Size]) -> bool:
        """Take sizes for equal, where each is a single symbol; True where that was done."""
        names = [name for size in sizes if (name := single(size)) is not None]
        if len(names) != len(sizes):
            return False
        first, *others = sorted(set(names))
        for name in others:
            self.equal[name] = Symbols(1, (first,))
        return True

    def solve(self, left: Size, right: Size) -> None:
        """Learn from left == right, where that leaves one symbol against one symbol or a number."""
        shared = common(left, right)
        a, b = divide(left, shared), divide(right, shared)
        if a is None or b is None or a == b:
            return
        if single(a) is not None and single(b) is not None:
            self.unite([a, b])
            return
        for one, other in ((a, b), (b, a)):
            if (name := single(one)) is not None and isinstance(other, int) and other > 0:
                self.equal[name] = other

    def _root(self, name: int) -> Size:
        found = self.equal.get(name)
        return Symbols(1, (name,)) if found is None else self.resolved(found)

    def axis_size(self, value: ir.Value | None, index: int) -> Size | None:
        """Size of axis `index` (negative: from the end), None where the rank is unknown or too small."""
        axes = self.axes_of(value)
        if axes is None or not -len(axes) <= index < len(axes):
            return None
        return size_of(axes[index])

    def uses(self, value: ir.Value) -> tuple[tuple[ir.Node, int], ...]:
        """(node, input index) of every reader, in graph order."""
        if value not in self._uses:
            uses = sorted(
                ((use.node, use.idx) for use in value.uses()), key=lambda use: (self.order.get(use[0], -1), use[1])
            )
            self._uses[value] = tuple(uses)
        return self._uses[value]

    def name(self, node: ir.Node) -> str:
        return self.names.get(node) or node.name or ""

    def declared(self, value: ir.Value, origin: Origin = "unknown") -> Axes | None:
        """Axes from the declared or measured shape; every unknown dimension is a symbol of its own, equal names or not."""
        measured = self.measured.get(value)
        if measured is not None:
            return tuple(axis(size, origin) for size in measured.shape)
        if value.shape is None:
            return None
        return tuple(axis(dim if isinstance(dim, int) else self.fresh(), origin) for dim in value.shape)

    def refined(self, axes: Axes | None, value: ir.Value) -> Axes | None:
        """Inferred axes, with the declared or measured numbers put in place of symbols."""
        if axes is None:
            return self.declared(value)
        measured = self.measured.get(value)
        numbers = measured.shape if measured is not None else _numbers(value)
        if numbers is None or len(numbers) != len(axes):
            return axes
        return tuple(one if number is None else _with_size(one, number) for one, number in zip(axes, numbers, strict=True))


def single(size: Size) -> int | None:
    """The name of a size that is one symbol."""
    return size.names[0] if isinstance(size, Symbols) and size.coefficient == 1 and len(size.names) == 1 else None


def _numbers(value: ir.Value) -> tuple[int | None, ...] | None:
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape)


def _with_size(one: Axis, number: int) -> Axis:
    """The axis with its only symbol solved so that the size is `number`; as it is where that is not possible."""
    symbolic = [factor for factor in one if known(factor.size) is None]
    if len(symbolic) != 1:
        return one
    others = product(factor.size for factor in one if factor is not symbolic[0])
    size = divide(number, others)
    if size is None:
        return one
    return tuple(
        factor if factor is not symbolic[0] else factor._replace(size=size)
        for factor in one
        if factor is not symbolic[0] or size != 1
    )


def node_names(listed: Sequence[Sequence[ir.Node]]) -> dict[ir.Node, str]:
    """Names for nodes without one, or with one taken in their graph: those that `attnquant.model.name_nodes` would give.

    :param listed: Nodes of every body, in the order of `attnquant.graph.bodies`.
    """
    taken = {node.name for nodes in listed for node in nodes if node.name}
    made: dict[ir.Node, str] = {}
    index = 0
    for nodes in listed:
        seen: set[str] = set()
        for node in nodes:
            name = node.name or ""
            if not name or name in seen:
                name = f"{node.op_type}_{index}"
                while name in taken:
                    name += "_"
                made[node] = name
                taken.add(name)
            seen.add(name)
            index += 1
    return made


def attribute(node: ir.Node, name: str, default: object = None) -> object:
    """Value of an attribute, `default` where it is absent or refers to a function's attribute."""
    found = node.attributes.get(name)
    return default if found is None or found.is_ref() else found.value


def integer(node: ir.Node, name: str, default: int) -> int:
    value = attribute(node, name, default)
    return value if isinstance(value, int) else default


def number(node: ir.Node, name: str, default: float) -> float:
    value = attribute(node, name, default)
    return float(value) if isinstance(value, int | float) else default


def integers(node: ir.Node, name: str) -> tuple[int, ...] | None:
    value = attribute(node, name)
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else None


def permutation(node: ir.Node, rank: int | None) -> tuple[int, ...] | None:
    """The permutation of a Transpose; reversed axes where the attribute is missing."""
    given = integers(node, "perm")
    if given is not None:
        return given if sorted(given) == list(range(len(given))) else None
    return None if rank is None else tuple(reversed(range(rank)))


def inputs_at(node: ir.Node, index: int) -> ir.Value | None:
    """An input, None where it is left out or the node has fewer."""
    return node.inputs[index] if index < len(node.inputs) else None


def axes_argument(facts: Facts, node: ir.Node, index: int = 1) -> tuple[int, ...] | None:
    """The `axes` of Squeeze, Unsqueeze, Slice or a reduction: an attribute, or a constant input."""
    given = integers(node, "axes")
    if given is not None:
        return given
    found = facts.elements_of(inputs_at(node, index))
    if found is None or not all(isinstance(item, int) for item in found.items):
        return None
    return tuple(item for item in found.items if isinstance(item, int))


_WEIGHTED = (
    "MatMulNBits",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "MatMulBnb4",
    "QLinearConv",
    "ConvInteger",
)
"""Operators with the weight inside."""


def is_projection(facts: Facts, node: ir.Node) -> bool:
    """A product with a weight: a linear layer or a convolution. A weight may be cut by sizes: SHAPE counts as constant."""
    if is_onnx(node, "Conv", "ConvTranspose"):
        return facts.level(inputs_at(node, 1)) < Level.LEARNED
    if node.op_type in ("MatMul", "Gemm", "Einsum", "FusedMatMul", "FusedGemm", "MatMulInteger", "QLinearMatMul"):
        second = 3 if node.op_type == "QLinearMatMul" else 1
        sides = (facts.level(inputs_at(node, 0)), facts.level(inputs_at(node, second)))
        return min(sides) < Level.LEARNED and max(sides) > Level.CONSTANT
    return node.op_type in _WEIGHTED or node in facts.projecting
