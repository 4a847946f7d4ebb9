"""Axes of operands put together: what the results of elementwise operations and of weights look like."""

from attnquant.patterns.facts import Facts
from attnquant.patterns.sizes import Axes, Axis, Factor, Origin, Size, axis, size_of


def broadcast(facts: Facts, values: list[Axes | None]) -> Axes | None:
    """Axes of an elementwise operation: where sizes differ, the one that is not 1; unequal symbols are taken for equal."""
    known = [axes for axes in values if axes is not None]
    if len(known) != len(values) or not known:
        return None
    rank = max(len(axes) for axes in known)
    result: list[Axis] = []
    for index in range(-rank, 0):
        candidates = [axes[index] for axes in known if len(axes) >= -index and axes[index]]
        result.append(merged(facts, candidates))
    return tuple(result)


def merged(facts: Facts, candidates: list[Axis]) -> Axis:
    if not candidates:
        return ()
    first = candidates[0]
    if len(candidates) == 1 or all(one == first for one in candidates[1:]):
        return first
    told = [one for one in candidates if all(factor.origin != "unknown" for factor in one)] or candidates
    numbers = [one for one in candidates if isinstance(size_of(one), int)]
    if numbers:
        size = size_of(numbers[0])
        fitting = [one for one in told if size_of(one) == size]
        return fitting[0] if fitting else resized(told[0], size)
    sizes = [size_of(one) for one in candidates]
    same = all(size == sizes[0] for size in sizes) or facts.unite(sizes)
    return told[0] if same else resized(told[0], facts.fresh())


def resized(one: Axis, size: Size) -> Axis:
    """An axis of another size, of the same origin where that is one."""
    if size_of(one) == size:
        return one
    origins = {factor.origin for factor in one}
    return axis(size, origins.pop() if len(origins) == 1 else "unknown")


def with_origin(one: Axis, origin: Origin) -> Axis:
    return tuple(Factor(factor.size, origin) for factor in one)
