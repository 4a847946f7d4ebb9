"""Axes behind products, convolutions and pools. A weight brings channels: that is what makes an axis a feature axis."""

from collections.abc import Sequence

import onnx_ir as ir

from attnquant.patterns.broadcasting import broadcast, merged, with_origin
from attnquant.patterns.facts import Facts, Level, attribute, inputs_at, integer, integers
from attnquant.patterns.products import einsum_terms
from attnquant.patterns.sizes import Axes, Axis, Size, Symbols, axis, size_of


def _first(facts: Facts, node: ir.Node) -> Axes | None:
    return facts.axes_of(inputs_at(node, 0))


def matmul(facts: Facts, node: ir.Node) -> Axes | None:
    left, right = facts.axes_of(inputs_at(node, 0)), facts.axes_of(inputs_at(node, 1))
    return _product(facts, left, right, _sides(facts, node))


def gemm(facts: Facts, node: ir.Node) -> Axes | None:
    left, right = facts.axes_of(inputs_at(node, 0)), facts.axes_of(inputs_at(node, 1))
    if left is None or right is None or len(left) != 2 or len(right) != 2:
        return None
    left = left[::-1] if integer(node, "transA", 0) else left
    right = right[::-1] if integer(node, "transB", 0) else right
    return _product(facts, left, right, _sides(facts, node))


def fused_matmul(facts: Facts, node: ir.Node) -> Axes | None:
    left, right = facts.axes_of(inputs_at(node, 0)), facts.axes_of(inputs_at(node, 1))
    if left is None or right is None or integer(node, "transBatchA", 0) or integer(node, "transBatchB", 0):
        return None
    if integer(node, "transA", 0):
        left = left[:-2] + left[-2:][::-1]
    if integer(node, "transB", 0):
        right = right[:-2] + right[-2:][::-1]
    return _product(facts, left, right, _sides(facts, node))


def matmul_nbits(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    return None if axes is None else (*axes[:-1], axis(integer(node, "N", 1), "feature"))


def einsum(facts: Facts, node: ir.Node) -> Axes | None:
    terms = einsum_terms(facts, node)
    if terms is None:
        return None
    found: dict[str, list[Axis]] = {}
    weighted = any(facts.level(value) < Level.LEARNED for value in node.inputs)
    for value, letters in zip(node.inputs, terms[:-1], strict=True):
        axes = facts.axes_of(value)
        if axes is None or len(axes) != len(letters):
            return None
        weight = facts.level(value) < Level.LEARNED
        for letter, one in zip(letters, axes, strict=True):
            found.setdefault(letter, []).append(
                with_origin(one, "feature") if weight else _positions(one) if weighted else one
            )
    return tuple(merged(facts, [one for one in found.get(letter, []) if one]) for letter in terms[-1])


def conv(facts: Facts, node: ir.Node) -> Axes | None:
    axes, weight = _first(facts, node), facts.axes_of(inputs_at(node, 1))
    if weight is None or len(weight) < 3:
        return None
    batch = _positions(axes[0]) if axes else axis(facts.fresh(), "token")
    kernel = [size_of(one) for one in weight[2:]]
    if axes is None or len(axes) != len(weight):
        return (batch, with_origin(weight[0], "feature"), *(axis(facts.fresh(), "token") for _ in kernel))
    return (batch, with_origin(weight[0], "feature"), *_slid(facts, node, axes[2:], kernel))


def pool(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    kernel = integers(node, "kernel_shape")
    if axes is None or kernel is None or len(axes) != len(kernel) + 2:
        return None
    return axes[:2] + tuple(_slid(facts, node, axes[2:], kernel))


def global_pool(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    return None if axes is None else axes[:2] + ((),) * (len(axes) - 2)


def resize(facts: Facts, node: ir.Node) -> Axes | None:
    """Batch and channels stay; spatial sizes from `sizes` where they are given."""
    axes = _first(facts, node)
    if axes is None or len(axes) < 3:
        return None
    sizes = facts.elements_of(inputs_at(node, 3))
    if sizes is not None and len(sizes.items) == len(axes):
        spatial = [item if isinstance(item, int | Symbols) else facts.fresh() for item in sizes.items[2:]]
    else:
        spatial = [facts.fresh() for _ in axes[2:]]
    return axes[:2] + tuple(axis(size, "token") for size in spatial)


def _sides(facts: Facts, node: ir.Node) -> tuple[bool, bool]:
    """(left, right) operand is a constant, hence a weight; of two, the one that depends on less, and the right one."""
    left, right = facts.level(inputs_at(node, 0)), facts.level(inputs_at(node, 1))
    return left < Level.LEARNED and left < right, right < Level.LEARNED and right <= left


def _product(facts: Facts, left: Axes | None, right: Axes | None, weights: tuple[bool, bool]) -> Axes | None:
    if left is None or right is None:
        known = left if left is not None else right
        return None if known is None or len(known) < 2 else tuple(axis(facts.fresh(), "unknown") for _ in known)
    if len(left) < 2 or len(right) < 2:
        return None
    leading = broadcast(facts, [left[:-2], right[:-2]]) if not any(weights) else (right[:-2] if weights[0] else left[:-2])
    if any(weights) and max(len(left), len(right)) - 2 > len(leading or ()):
        leading = broadcast(facts, [left[:-2], right[:-2]])
    if leading is None:
        return None
    if not any(weights):
        return (*leading, left[-2], right[-1])
    rows = with_origin(left[-2], "feature") if weights[0] else _positions(left[-2])
    columns = with_origin(right[-1], "feature") if weights[1] else _positions(right[-1])
    return (*map(_positions, leading), rows, columns)


def _positions(one: Axis) -> Axis:
    """An axis that a linear layer leaves alone: copies and what is not told are positions from there on."""
    if all(factor.origin in ("token", "feature") for factor in one):
        return one
    return tuple(factor if factor.origin == "feature" else factor._replace(origin="token") for factor in one)


def _slid(facts: Facts, node: ir.Node, axes: Axes, kernel: Sequence[Size]) -> list[Axis]:
    """Spatial axes behind a sliding window; a window of one position that never skips keeps its axis."""
    count = len(axes)
    strides, dilations = integers(node, "strides") or (1,) * count, integers(node, "dilations") or (1,) * count
    pads = integers(node, "pads") or (0,) * (2 * count)
    automatic = attribute(node, "auto_pad", "NOTSET")
    result: list[Axis] = []
    for index, (one, window, stride, dilation) in enumerate(zip(axes, kernel, strides, dilations, strict=True)):
        before = size_of(one)
        padding = pads[index] + pads[index + count]
        if automatic in ("SAME_UPPER", "SAME_LOWER") and isinstance(before, int):
            result.append(axis(-(-before // stride), "token"))
        elif window == 1 and stride == 1 and not padding:
            result.append(with_origin(one, "token"))
        elif isinstance(before, int) and isinstance(window, int) and automatic in ("NOTSET", "VALID"):
            span = before + (padding if automatic == "NOTSET" else 0) - dilation * (window - 1) - 1
            span += stride - 1 if integer(node, "ceil_mode", 0) else 0
            result.append(axis(span // stride + 1, "token"))
        else:
            result.append(axis(facts.fresh(), "token"))
    return result
