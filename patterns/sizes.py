"""Sizes of tensors as products of numbers and symbols, and axes as the factors they were merged from.

A graph rarely says that an axis has 4 heads; it says that 64 channels were reshaped to (-1, 16), or (batch * 4) rows to
(batch, 4). So an axis is kept as its factors in row-major order, each with what it came from; a Reshape regroups factors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal, NamedTuple

Origin = Literal["token", "feature", "repeat", "unknown"]
"""Where a factor came from: positions and batch, channels of a projection, a broadcast copy, or the graph does not say."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """`coefficient` times a product of unknown sizes, each an integer name (at least one)."""

    coefficient: int
    names: tuple[int, ...]


Size = int | Symbols


class Factor(NamedTuple):
    """One factor of an axis."""

    size: Size
    origin: Origin


Axis = tuple[Factor, ...]
"""Factors in row-major order; an axis of size 1 has none."""
Axes = tuple[Axis, ...]


def make_size(coefficient: int, names: tuple[int, ...]) -> Size:
    return Symbols(coefficient, names) if names and coefficient else coefficient


def parts(size: Size) -> tuple[int, tuple[int, ...]]:
    """(coefficient, symbol names)."""
    return (size, ()) if isinstance(size, int) else (size.coefficient, size.names)


def times(left: Size, right: Size) -> Size:
    (a, names), (b, others) = parts(left), parts(right)
    return make_size(a * b, tuple(sorted(names + others)))


def divide(left: Size, right: Size) -> Size | None:
    """left / right where that is exact whatever the symbols stand for, else None."""
    (a, names), (b, others) = parts(left), parts(right)
    if not b or a % b:
        return None
    rest = list(names)
    for name in others:
        if name not in rest:
            return None
        rest.remove(name)
    return make_size(a // b, tuple(rest))


def common(left: Size, right: Size) -> Size:
    """The greatest common divisor, symbols included."""
    (a, names), (b, others) = parts(left), parts(right)
    shared, rest = [], list(others)
    for name in names:
        if name in rest:
            rest.remove(name)
            shared.append(name)
    return make_size(gcd(a, b), tuple(shared))


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = times(total, size)
    return total


def size_of(axis: Axis) -> Size:
    return axis[0].size if len(axis) == 1 else product(factor.size for factor in axis)


def sizes_of(axes: Axes) -> tuple[Size, ...]:
    return tuple(size_of(axis) for axis in axes)


def axis(size: Size, origin: Origin) -> Axis:
    return () if size == 1 else (Factor(size, origin),)


def known(size: Size | None) -> int | None:
    return size if isinstance(size, int) else None


def regroup(axes: Axes, targets: Sequence[Size | None]) -> Axes | None:
    """The axes after a Reshape to `targets`, where None (at most one) stands for -1; None where that does not divide.

    Factors are taken from the left for the targets before the -1 and from the right for those after it; what is left between
    is the -1. Without a -1, the target where both ends give up takes the rest.
    """
    pool = [factor for one in axes for factor in one]
    head: list[Axis] = []
    tail: list[Axis] = []
    left, right = 0, len(targets)
    while left < right and (size := targets[left]) is not None and (taken := _take(pool, size, last=False)) is not None:
        head.append(taken)
        left += 1
    while left < right and (size := targets[right - 1]) is not None and (taken := _take(pool, size, last=True)) is not None:
        tail.insert(0, taken)
        right -= 1
    if right - left > 1 or (right == left and not _is_one(pool)):
        return None
    middle = [_rest(pool, targets[left])] if right - left == 1 else []
    return tuple(head + middle + tail)


def _rest(pool: list[Factor], target: Size | None) -> Axis:
    """What is left for one target: as it is for -1, of the target's size where the exporter froze that."""
    if target is None or product(factor.size for factor in pool) == target:
        return tuple(pool)
    origins = {factor.origin for factor in pool}
    return axis(target, origins.pop() if len(origins) == 1 else "unknown")


def _is_one(pool: list[Factor]) -> bool:
    """True where nothing but unknown sizes is left over: a size the exporter froze at 1."""
    return all(isinstance(factor.size, Symbols) and factor.size.coefficient == 1 for factor in pool)


def _take(pool: list[Factor], size: Size, *, last: bool) -> Axis | None:
    """Remove factors worth `size` from one end of the pool, splitting one where needed; None, and no change, if none fit."""
    taken: list[Factor] = []
    rest, remaining = size, list(pool)
    while rest != 1:
        if not remaining:
            return None
        factor = remaining.pop(-1 if last else 0)
        shared = common(rest, factor.size)
        if shared == 1:
            return None
        left_over = divide(factor.size, shared)
        needed = divide(rest, shared)
        if left_over is None or needed is None or (left_over != 1 and needed != 1):
            return None
        taken.append(Factor(shared, factor.origin))
        if left_over != 1:
            remaining.insert(len(remaining) if last else 0, Factor(left_over, factor.origin))
        rest = needed
    pool[:] = remaining
    return tuple(reversed(taken)) if last else tuple(taken)
