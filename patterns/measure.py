"""Heads, head sizes and the kind of attention from the axes of the operands."""

from dataclasses import dataclass

from attnquant.patterns.facts import Facts
from attnquant.patterns.products import Product
from attnquant.patterns.sizes import Axes, Axis, known, product, size_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of one attention, None where the graph does not say."""

    q_heads: int | None
    kv_heads: int | None
    qk_head_dim: int | None
    v_head_dim: int | None
    cross_covariance: bool


def measure(facts: Facts, scores: Product, query_side: int, values: Product, value_side: int) -> Sizes:
    """Sizes from the two products; `query_side` and `value_side` tell which operand is Q and which is V."""
    key_side = 1 - query_side
    query, key = facts.axes_of(scores.value(query_side)), facts.axes_of(scores.value(key_side))
    value = facts.axes_of(values.value(value_side))
    across = _cross_covariance(scores, query_side, query, key)
    q_heads = _heads(scores, query_side, query, rows=not across)
    kv_heads = _heads(scores, key_side, key, rows=False)
    if kv_heads is None or not _told(key):
        aligned = _aligned(scores, query_side, query, key)
        kv_heads = kv_heads if aligned is None else aligned
    if q_heads is not None and not _told(query) and _told(key) and kv_heads is not None:
        q_heads = _aligned(scores, key_side, key, query) or q_heads
    if q_heads is None and query is not None and not _told(query):
        q_heads = _shared(scores, query_side, query, kv_heads)
    if across:
        qk = _size(query, _free(scores, query_side))
        v = _size(value, values.contracted[value_side])
    else:
        qk = _first(_size(query, scores.contracted[query_side]), _size(key, scores.contracted[key_side]))
        v = _size(value, _free(values, value_side))
    return Sizes(q_heads=q_heads, kv_heads=kv_heads, qk_head_dim=qk, v_head_dim=v, cross_covariance=across)


def _first(*options: int | None) -> int | None:
    return next((option for option in options if option is not None), None)


def _free(product_: Product, side: int) -> tuple[int, ...]:
    """Axes of an operand that are its own: rows of Q, positions of K, channels of V."""
    pairs = (product_.sources[axis] for axis in product_.free(side))
    return tuple(axis for pair in pairs if (axis := pair[side]) is not None)


def _size(axes: Axes | None, places: tuple[int, ...]) -> int | None:
    if axes is None or not places or any(-place > len(axes) for place in places):
        return None
    return known(product(size_of(axes[place]) for place in places))


def _told(axes: Axes | None) -> bool:
    """The axes say which of their factors are channels."""
    return axes is not None and any(factor.origin == "feature" for one in axes for factor in one)


def _cross_covariance(scores: Product, side: int, query: Axes | None, key: Axes | None) -> bool:
    """Channels attend to channels: the product sums over positions and has channels as rows (XCiT, El-Nouby et al. 2021)."""
    for axes, own in ((query, side), (key, 1 - side)):
        if axes is None:
            continue
        summed = [factor for place in scores.contracted[own] if -place <= len(axes) for factor in axes[place]]
        rows = [factor for place in _free(scores, own) if -place <= len(axes) for factor in axes[place]]
        if summed and rows and all(one.origin == "token" for one in summed) and all(one.origin == "feature" for one in rows):
            return True
    return False


def _heads(scores: Product, side: int, axes: Axes | None, *, rows: bool) -> int | None:
    """Heads of an operand: its channels outside the summed axis; the third axis from the end where channels are not told."""
    if axes is None:
        return None
    summed, own = set(scores.contracted[side]), set(_free(scores, side))
    places = [place for place in range(-len(axes), 0) if place not in summed and (rows or place not in own)]
    if not _told(axes):
        batch = [place for place in places if place not in own]
        return known(size_of(axes[batch[-1]])) if len(axes) >= 4 and batch else None
    total = 1
    for place in places:
        for factor in _counted(axes[place], leading=place == -len(axes), rank=len(axes)):
            if not isinstance(factor, int):
                return None
            total *= factor
    return total


def _counted(one: Axis, *, leading: bool, rank: int) -> list[object]:
    """Sizes of the factors of an axis that are heads: channels, and copies of them."""
    features = any(factor.origin == "feature" for factor in one)
    if leading and (not features or rank < 4):
        start = next((index for index, factor in enumerate(one) if factor.origin == "feature"), len(one))
        one = one[start:]
    return [factor.size for factor in one if factor.origin in ("feature", "repeat")]


def _shared(scores: Product, side: int, axes: Axes, heads: int | None) -> int | None:
    """The key's heads, where a constant query has as many on its own axes or is the same for all."""
    own = {*scores.contracted[side], *_free(scores, side)}
    count = known(product(size_of(axes[place]) for place in range(-len(axes), 0) if place not in own))
    return heads if count in (1, heads) else None


def _aligned(scores: Product, side: int, axes: Axes | None, other: Axes | None) -> int | None:
    """Heads of the other operand from the axis where this one has its heads, for 4-D and larger products."""
    if axes is None or other is None or len(other) < 4:
        return None
    taken = {*scores.contracted[side], *_free(scores, side)}
    places = [
        place for place in range(-len(axes), 0) if place not in taken and any(f.origin == "feature" for f in axes[place])
    ]
    if len(places) != 1 or -places[0] > len(other):
        return None
    return known(size_of(other[places[0]]))
