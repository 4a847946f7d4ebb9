"""How each operator moves, splits and merges axes: the rules of the pass in `patterns.inference`, one small function each.

A rule gets the facts and a node and returns the axes of the node's first output, None where it can't tell. Sizes follow the
ONNX operator specification (onnx.ai/onnx/operators); origins say what a size means.
"""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from attnquant.patterns import moves
from attnquant.patterns.facts import Facts, Level, attribute, axes_argument, inputs_at, integer, integers, permutation
from attnquant.patterns.sizes import Axes, Axis, Factor, Origin, Size, Symbols, axis, divide, product, regroup, size_of

Rule = Callable[[Facts, ir.Node], Axes | None]


def infer(facts: Facts, node: ir.Node) -> Axes | None:
    """Axes of the node's first output, None where no rule applies."""
    if node.domain in ("", "ai.onnx"):
        rule = _RULES.get(node.op_type)
    else:
        rule = _CONTRIB_RULES.get(node.op_type)
    return None if rule is None else rule(facts, node)


def split_outputs(facts: Facts, node: ir.Node) -> list[Axes | None]:
    """Axes of every output of a Split."""
    axes = facts.axes_of(node.inputs[0])
    count = len(node.outputs)
    position = integer(node, "axis", 0)
    if axes is None or not -len(axes) <= position < len(axes):
        return [None] * count
    sizes = integers(node, "split")
    if sizes is None and (value := inputs_at(node, 1)) is not None and (given := facts.elements_of(value)) is not None:
        sizes = tuple(item if isinstance(item, int) else -1 for item in given.items)
    whole = size_of(axes[position])
    even = divide(whole, count)
    position %= len(axes)
    outputs: list[Axes | None] = []
    for index in range(count):
        size = sizes[index] if sizes is not None and len(sizes) == count else even
        part = _resized(axes[position], facts.fresh() if size is None or size == -1 else size)
        outputs.append(axes[:position] + (part,) + axes[position + 1 :])
    return outputs


def broadcast(facts: Facts, values: list[Axes | None]) -> Axes | None:
    """Axes of an elementwise operation: where sizes differ, the one that is not 1; unequal symbols give a symbol of their own."""
    known = [axes for axes in values if axes is not None]
    if len(known) != len(values) or not known:
        return None
    rank = max(len(axes) for axes in known)
    result: list[Axis] = []
    for index in range(-rank, 0):
        candidates = [axes[index] for axes in known if len(axes) >= -index and axes[index]]
        result.append(_merged(facts, candidates))
    return tuple(result)


def _merged(facts: Facts, candidates: list[Axis]) -> Axis:
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
        return fitting[0] if fitting else _resized(told[0], size)
    sizes = [size_of(one) for one in candidates]
    same = all(size == sizes[0] for size in sizes) or facts.unite(sizes)
    return told[0] if same else _resized(told[0], facts.fresh())


def _resized(one: Axis, size: Size) -> Axis:
    """An axis of another size, of the same origin where that is one."""
    if size_of(one) == size:
        return one
    origins = {factor.origin for factor in one}
    return axis(size, origins.pop() if len(origins) == 1 else "unknown")


def _first(facts: Facts, node: ir.Node) -> Axes | None:
    return facts.axes_of(inputs_at(node, 0))


def _elementwise(facts: Facts, node: ir.Node) -> Axes | None:
    return broadcast(facts, [facts.axes_of(value) for value in node.inputs if value is not None])


def _transpose(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    order = permutation(node, None if axes is None else len(axes))
    if order is None:
        return None
    if axes is None or len(axes) != len(order):
        return tuple(axis(facts.fresh(), "unknown") for _ in order)
    return tuple(axes[index] for index in order)


def _reshape(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    shape = inputs_at(node, 1)
    given = integers(node, "shape")
    elements = given if given is not None else getattr(facts.elements_of(shape), 'items', None)
    if elements is None:
        count = facts.axis_size(shape, 0) if shape is not None and facts.rank(shape) == 1 else None
        return tuple(axis(facts.fresh(), "unknown") for _ in range(count)) if isinstance(count, int) else None
    keep_zero = not integer(node, "allowzero", 0)
    sizes: list[Size | None] = []
    for index, item in enumerate(elements):
        if isinstance(item, int | Symbols) and item not in (0, -1):
            sizes.append(item)
        elif item == 0 and keep_zero and axes is not None and index < len(axes):
            sizes.append(size_of(axes[index]))
        elif item == -1:
            sizes.append(None)
        else:
            sizes.append(facts.fresh())
    return _regrouped(facts, axes, sizes)


def _regrouped(facts: Facts, axes: Axes | None, sizes: list[Size | None]) -> Axes:
    if axes is not None and None not in sizes:
        before, after = product(size_of(one) for one in axes), product(size for size in sizes if size is not None)
        if before != after:
            facts.solve(before, after)
            axes = tuple(facts.resolved_axis(one) for one in axes)
            sizes = [None if size is None else facts.resolved(size) for size in sizes]
    moved = None if axes is None or sizes.count(None) > 1 else regroup(axes, sizes)
    if moved is not None:
        return moved
    return tuple(axis(facts.fresh() if size is None else size, "unknown") for size in sizes)


def _flatten(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    if axes is None:
        return None
    cut = integer(node, "axis", 1)
    return tuple(factor for one in axes[:cut] for factor in one), tuple(factor for one in axes[cut:] for factor in one)


def _squeeze(facts: Facts, node: ir.Node) -> Axes | None:
    axes, dropped = _first(facts, node), axes_argument(facts, node)
    if axes is None:
        return None
    if dropped is None:
        return tuple(one for one in axes if one) if inputs_at(node, 1) is None else None
    gone = {index % len(axes) for index in dropped} if axes else set()
    return tuple(one for index, one in enumerate(axes) if index not in gone)


def _unsqueeze(facts: Facts, node: ir.Node) -> Axes | None:
    axes, added = _first(facts, node), axes_argument(facts, node)
    if axes is None or added is None:
        return None
    rank = len(axes) + len(added)
    new = {index % rank for index in added}
    rest = iter(axes)
    return tuple(() if index in new else next(rest, ()) for index in range(rank))


def _expand(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    shape = inputs_at(node, 1)
    elements = facts.elements_of(shape)
    if axes is None or elements is None:
        return None
    rank = max(len(axes), len(elements.items))
    padded = ((),) * (rank - len(axes)) + axes
    targets = (1,) * (rank - len(elements.items)) + elements.items
    result: list[Axis] = []
    for one, target in zip(padded, targets, strict=True):
        wanted = target if isinstance(target, int | Symbols) else facts.fresh()
        result.append(one if one or target == 1 else axis(wanted, "repeat"))
    return tuple(result)


def _tile(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    value = inputs_at(node, 1)
    repeats = facts.elements_of(value)
    if axes is None or repeats is None or len(repeats.items) != len(axes):
        return None
    result: list[Axis] = []
    for one, times_ in zip(axes, repeats.items, strict=True):
        size = times_ if isinstance(times_, int | Symbols) else facts.fresh()
        result.append(axis(size, "repeat") + one)
    return tuple(result)


def _concat(facts: Facts, node: ir.Node) -> Axes | None:
    inputs = [facts.axes_of(value) for value in node.inputs]
    known = [axes for axes in inputs if axes is not None]
    position = integer(node, "axis", 0)
    if not known or any(len(axes) != len(known[0]) for axes in known) or not -len(known[0]) <= position < len(known[0]):
        return None
    position %= len(known[0])
    if len(inputs) == 1:
        return known[0]
    joined = [axes[position] for axes in known]
    sizes = [size_of(one) for one in joined]
    total: Size = facts.fresh()
    if len(known) == len(inputs) and all(isinstance(size, int) for size in sizes):
        total = sum(size for size in sizes if isinstance(size, int))
    elif len(known) == len(inputs) and all(size == sizes[0] for size in sizes):
        total = _multiple(sizes[0], len(sizes))
    copied = len({moves.provenance(facts, value) for value in node.inputs}) == 1
    rest = broadcast(facts, [axes[:position] + ((),) + axes[position + 1 :] for axes in known])
    if rest is None:
        return None
    one = axis(len(inputs), "repeat") + joined[0] if copied else _resized(_told(joined), total)
    return rest[:position] + (one,) + rest[position + 1 :]


def _told(joined: list[Axis]) -> Axis:
    """The joined axis that says most about where it comes from."""
    for one in joined:
        if one and all(factor.origin not in ("unknown", "repeat") for factor in one):
            return one
    return max(joined, key=len)


def _multiple(size: Size, count: int) -> Size:
    return size * count if isinstance(size, int) else Symbols(size.coefficient * count, size.names)


def _slice(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    if axes is None:
        return None
    positions = axes_argument(facts, node, 3)
    starts, ends = _bounds(facts, node, "starts", 1), _bounds(facts, node, "ends", 2)
    if starts is None or ends is None:
        return None
    if positions is None:
        positions = tuple(range(len(starts)))
    steps = _bounds(facts, node, "steps", 4) or (1,) * len(starts)
    result = list(axes)
    for position, start, end, step in zip(positions, starts, ends, steps, strict=False):
        if not -len(axes) <= position < len(axes):
            return None
        whole = size_of(axes[position])
        result[position] = _resized(axes[position], _sliced(facts, whole, start, end, step))
    return tuple(result)


def _bounds(facts: Facts, node: ir.Node, name: str, index: int) -> tuple[object, ...] | None:
    given = integers(node, name)
    if given is not None:
        return given
    value = inputs_at(node, index)
    found = facts.elements_of(value)
    return None if found is None else found.items


def _sliced(facts: Facts, whole: Size, start: object, end: object, step: object) -> Size:
    if start == 0 and step == 1 and isinstance(end, int | Symbols) and (end == whole or (isinstance(end, int) and end >= 2**31 - 1)):
        return whole
    if not isinstance(start, int) or not isinstance(step, int) or not step:
        return facts.fresh()
    if isinstance(whole, int) and isinstance(end, int):
        return len(range(*slice(start, end, step).indices(whole)))
    if isinstance(end, int) and step == 1 and (0 <= start < end < 2**31 - 1 or start < end < 0):
        return end - start
    if isinstance(end, int) and start == -1 and step == 1:
        return 1
    return facts.fresh()


def _gather(facts: Facts, node: ir.Node) -> Axes | None:
    axes, indices = _first(facts, node), facts.axes_of(inputs_at(node, 1))
    position = integer(node, "axis", 0)
    if axes is None or indices is None or not -len(axes) <= position < len(axes):
        return None
    position %= len(axes)
    if facts.level(node.inputs[0]) == Level.CONSTANT and position == 0 and len(axes) == 2 and indices:
        return indices + (_as(axes[1], "feature"),)
    picked = tuple(_as(one, _single_origin(axes[position])) for one in indices)
    return axes[:position] + picked + axes[position + 1 :]


def _single_origin(one: Axis) -> Origin:
    origins = {factor.origin for factor in one}
    return origins.pop() if len(origins) == 1 else "unknown"


def _as(one: Axis, origin: Origin) -> Axis:
    return tuple(Factor(factor.size, origin) for factor in one)


def _pad(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    if axes is None:
        return None
    value = inputs_at(node, 1)
    found = facts.elements_of(value)
    pads = integers(node, "pads") or (found.items if found is not None else None)
    if pads is None or len(pads) != 2 * len(axes):
        return tuple(_resized(one, facts.fresh()) for one in axes)
    result: list[Axis] = []
    for one, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        size = size_of(one)
        if before == 0 and after == 0:
            result.append(one)
        elif isinstance(size, int) and isinstance(before, int) and isinstance(after, int):
            result.append(_resized(one, size + before + after))
        else:
            result.append(_resized(one, facts.fresh()))
    return tuple(result)


def _reduce(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    if axes is None:
        return None
    dropped = axes_argument(facts, node)
    if dropped is None and inputs_at(node, 1) is not None:
        return None
    gone = {index % len(axes) for index in dropped} if dropped and axes else set(range(len(axes)))
    if integer(node, "keepdims", 1):
        return tuple(() if index in gone else one for index, one in enumerate(axes))
    return tuple(one for index, one in enumerate(axes) if index not in gone)


def _matmul(facts: Facts, node: ir.Node) -> Axes | None:
    left, right = facts.axes_of(inputs_at(node, 0)), facts.axes_of(inputs_at(node, 1))
    return _product(facts, left, right, _sides(facts, node))


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
    rows = _as(left[-2], "feature") if weights[0] else left[-2]
    columns = _as(right[-1], "feature") if weights[1] else right[-1]
    return leading + (rows, columns)


def _gemm(facts: Facts, node: ir.Node) -> Axes | None:
    left, right = facts.axes_of(inputs_at(node, 0)), facts.axes_of(inputs_at(node, 1))
    if left is None or right is None or len(left) != 2 or len(right) != 2:
        return None
    left = left[::-1] if integer(node, "transA", 0) else left
    right = right[::-1] if integer(node, "transB", 0) else right
    return _product(facts, left, right, _sides(facts, node))


def _fused_matmul(facts: Facts, node: ir.Node) -> Axes | None:
    left, right = facts.axes_of(inputs_at(node, 0)), facts.axes_of(inputs_at(node, 1))
    if left is None or right is None or integer(node, "transBatchA", 0) or integer(node, "transBatchB", 0):
        return None
    if integer(node, "transA", 0):
        left = left[:-2] + left[-2:][::-1]
    if integer(node, "transB", 0):
        right = right[:-2] + right[-2:][::-1]
    return _product(facts, left, right, _sides(facts, node))


def _matmul_nbits(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    return None if axes is None else axes[:-1] + (axis(integer(node, "N", 1), "feature"),)


def _conv(facts: Facts, node: ir.Node) -> Axes | None:
    axes, weight = _first(facts, node), facts.axes_of(inputs_at(node, 1))
    if weight is None:
        return None
    batch = axes[0] if axes else axis(facts.fresh(), "token")
    kernel = [size_of(one) for one in weight[2:]]
    if axes is None or len(axes) != len(weight):
        return (batch, _as(weight[0], "feature"), *(axis(facts.fresh(), "token") for _ in kernel))
    return (batch, _as(weight[0], "feature"), *_slid(facts, node, axes[2:], kernel))


def _pool(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    kernel = integers(node, "kernel_shape")
    if axes is None or kernel is None or len(axes) != len(kernel) + 2:
        return None
    return axes[:2] + tuple(_slid(facts, node, axes[2:], kernel))


def _global_pool(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    return None if axes is None else axes[:2] + ((),) * (len(axes) - 2)


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
            result.append(_as(one, "token"))
        elif isinstance(before, int) and isinstance(window, int) and automatic in ("NOTSET", "VALID"):
            span = before + (padding if automatic == "NOTSET" else 0) - dilation * (window - 1) - 1
            span += stride - 1 if integer(node, "ceil_mode", 0) else 0
            result.append(axis(span // stride + 1, "token"))
        else:
            result.append(axis(facts.fresh(), "token"))
    return result


def _resize(facts: Facts, node: ir.Node) -> Axes | None:
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


def _einsum(facts: Facts, node: ir.Node) -> Axes | None:
    from attnquant.patterns.products import einsum_terms

    terms = einsum_terms(facts, node)
    if terms is None:
        return None
    found: dict[str, list[Axis]] = {}
    for value, letters in zip(node.inputs, terms[:-1], strict=True):
        axes = facts.axes_of(value)
        if axes is None or len(axes) != len(letters):
            return None
        weight = facts.level(value) < Level.LEARNED
        for letter, one in zip(letters, axes, strict=True):
            found.setdefault(letter, []).append(_as(one, "feature") if weight else one)
    return tuple(_merged(facts, [one for one in found.get(letter, []) if one]) for letter in terms[-1])


def _gather_elements(facts: Facts, node: ir.Node) -> Axes | None:
    return facts.axes_of(inputs_at(node, 1))


def _constant_of_shape(facts: Facts, node: ir.Node) -> Axes | None:
    value = inputs_at(node, 0)
    elements = facts.elements_of(value)
    if elements is None:
        return None
    return tuple(axis(item if isinstance(item, int | Symbols) else facts.fresh(), "unknown") for item in elements.items)


def _shape_of_shape(facts: Facts, node: ir.Node) -> Axes | None:
    rank = facts.rank(inputs_at(node, 0))
    return None if rank is None else (axis(rank, "unknown"),)


def _scalar_range(facts: Facts, node: ir.Node) -> Axes | None:
    value = inputs_at(node, 1)
    stop = facts.elements_of(value)
    item = stop.items[0] if stop is not None and stop.items else None
    return (axis(item if isinstance(item, int | Symbols) else facts.fresh(), "token"),)


_FIRST = (
    "Identity Cast CastLike Dropout Softmax LogSoftmax LayerNormalization RMSNormalization InstanceNormalization GroupNormalization "
    "BatchNormalization LpNormalization MeanVarianceNormalization Relu Gelu Sigmoid Tanh Erf Exp Log Sqrt Neg Abs Reciprocal Clip "
    "LeakyRelu Elu Selu Softplus HardSigmoid HardSwish Mish Swish Celu Not IsNaN IsInf Floor Ceil Round Sign Sin Cos Trilu CumSum "
    "QuantizeLinear DequantizeLinear ScatterND ScatterElements TensorScatter RotaryEmbedding Softsign ThresholdedRelu Hardmax "
    "DynamicQuantizeLinear"
)
_ELEMENTWISE = "Add Sub Mul Div Pow Where Max Min Mod PRelu Equal Less Greater LessOrEqual GreaterOrEqual And Or Xor Sum Mean"
_REDUCE = "ReduceMax ReduceMin ReduceSum ReduceMean ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp ReduceLogSum"

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_FIRST.split(), _first),
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCE.split(), _reduce),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global_pool),
    "Resize": _resize,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": _concat,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Pad": _pad,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvInteger": _conv,
    "Einsum": _einsum,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape_of_shape,
    "Range": _scalar_range,
}

_CONTRIB_RULES: dict[str, Rule] = {
    "FusedMatMul": _fused_matmul,
    "FusedGemm": _gemm,
    "MatMulNBits": _matmul_nbits,
    "DynamicQuantizeMatMul": _matmul,
    "MatMulIntegerToFloat": _matmul,
    **dict.fromkeys(
        "Gelu FastGelu BiasGelu QuickGelu QuantizeLinear DequantizeLinear SkipLayerNormalization SimplifiedLayerNormalization "
        "SkipSimplifiedLayerNormalization RotaryEmbedding LayerNormalization".split(),
        _first,
    ),
}
