"""Products of two tensors (MatMul, Gemm, FusedMatMul, Einsum) as a map from axes of the result to axes of the operands.

Axes are counted from the end (-1 is the last), so that a MatMul needs no rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import Facts, attribute, inputs_at, integer, number

Pair = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """result[..., i, j] = factor * sum over the contracted axes of left * right."""

    node: ir.Node
    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    """Axes of the left and of the right operand that are summed over."""
    sources: Mapping[int, Pair]
    """Axis of the result: axis of the left and of the right operand it comes from; an axis not listed comes from both."""
    factor: float = 1.0
    addend: int | None = None
    """Input that is added to the product (the C of a Gemm)."""

    def source(self, axis: int) -> Pair:
        return self.sources.get(axis, (axis, axis))

    def free(self, side: int) -> tuple[int, ...]:
        """Axes of the result that come from one operand alone."""
        return tuple(axis for axis, pair in self.sources.items() if pair[side] is not None and pair[1 - side] is None)

    def value(self, side: int) -> ir.Value:
        value = self.node.inputs[side]
        assert value is not None
        return value


def as_product(facts: Facts, node: ir.Node | None) -> Product | None:
    """The node as a product of its first two inputs; None where it is none, or one whose axes can't be told."""
    if node is None or inputs_at(node, 0) is None or inputs_at(node, 1) is None:
        return None
    if is_onnx(node, "MatMul"):
        return _plain(facts, node)
    if is_onnx(node, "Gemm"):
        return _transposable(node, integer(node, "transA", 0), integer(node, "transB", 0), gemm=True)
    fused = node.op_type in ("FusedMatMul", "TransposeMatMul")
    if fused and not integer(node, "transBatchA", 0) and not integer(node, "transBatchB", 0):
        return _transposable(node, integer(node, "transA", 0), integer(node, "transB", 0), gemm=False)
    return _einsum(facts, node) if is_onnx(node, "Einsum") else None


def _plain(facts: Facts, node: ir.Node) -> Product | None:
    ranks = facts.rank(inputs_at(node, 0)), facts.rank(inputs_at(node, 1))
    if 1 in ranks or 0 in ranks:
        return None
    return _transposable(node, 0, 0, gemm=False)


def _transposable(node: ir.Node, first: int, second: int, *, gemm: bool) -> Product:
    return Product(
        node=node,
        contracted=((-2,) if first else (-1,), (-1,) if second else (-2,)),
        sources={-2: (-1 if first else -2, None), -1: (None, -2 if second else -1)},
        factor=number(node, "alpha", 1.0),
        addend=2 if gemm and inputs_at(node, 2) is not None else None,
    )


def einsum_terms(facts: Facts, node: ir.Node) -> list[str] | None:
    """Subscripts of every operand and of the result, the ellipsis in letters of its own; None where they don't parse."""
    equation = attribute(node, "equation")
    if not isinstance(equation, str) or "->" not in equation:
        return None
    left, result = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(node.inputs):
        return None
    if "..." not in equation:
        return [*terms, result]
    width = 0
    for value, term in zip(node.inputs, terms, strict=True):
        if "..." in term:
            rank = facts.rank(value)
            if rank is None or rank < len(term) - 3:
                return None
            width = max(width, rank - len(term) + 3)
    extra = "".join(chr(ord("\u03b1") + index) for index in range(width))
    written: list[str] = []
    for value, term in zip([*node.inputs, None], [*terms, result], strict=True):
        rank = facts.rank(value) if value is not None else None
        count = width if rank is None else rank - len(term) + 3
        written.append(term.replace("...", extra[width - count :]))
    return written


def _einsum(facts: Facts, node: ir.Node) -> Product | None:
    terms = einsum_terms(facts, node)
    if terms is None or len(terms) != 3 or any(len(set(term)) != len(term) for term in terms):
        return None
    left, right, result = terms

    def place(term: str, letter: str) -> int | None:
        return term.index(letter) - len(term) if letter in term else None

    summed = [letter for letter in left if letter in right and letter not in result]
    if not summed or any(letter not in result and letter not in summed for letter in left + right):
        return None
    return Product(
        node=node,
        contracted=(
            tuple(left.index(letter) - len(left) for letter in summed),
            tuple(right.index(letter) - len(right) for letter in summed),
        ),
        sources={index - len(result): (place(left, letter), place(right, letter)) for index, letter in enumerate(result)},
    )
