"""How each operator moves, splits and merges axes: the rules of the pass in `patterns.inference`, one small function each.

A rule gets the facts and a node and returns the axes of the node's first output, None where it can't tell. Sizes follow the
ONNX operator specification (onnx.ai/onnx/operators); origins say what a size means.
"""

from collections.abc import Callable

import onnx_ir as ir

from attnquant.patterns import layers, moves
from attnquant.patterns.broadcasting import broadcast, resized, with_origin
from attnquant.patterns.facts import Facts, Level, axes_argument, inputs_at, integer, integers, permutation
from attnquant.patterns.sizes import Axes, Axis, Origin, Size, Symbols, axis, divide, product, regroup, size_of

Rule = Callable[[Facts, ir.Node], Axes | None]


def infer(facts: Facts, node: ir.Node) -> Axes | None:
    """Axes of the node's first output, None where no rule applies."""
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else _CONTRIB_RULES.get(node.op_type)
    return None if rule is None else rule(facts, node)


def split_outputs(facts: Facts, node: ir.Node) -> list[Axes | None]:
    """Axes of every output of a Split."""
    axes = facts.axes_of(inputs_at(node, 0))
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
        part = resized(axes[position], facts.fresh() if size is None or size == -1 else size)
        outputs.append((*axes[:position], part, *axes[position + 1 :]))
    return outputs


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
    elements = given if given is not None else getattr(facts.elements_of(shape), "items", None)
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
    rest = broadcast(facts, [(*axes[:position], (), *axes[position + 1 :]) for axes in known])
    if rest is None:
        return None
    one = axis(len(inputs), "repeat") + joined[0] if copied else resized(_told(joined), total)
    return (*rest[:position], one, *rest[position + 1 :])


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
        result[position] = resized(axes[position], _sliced(facts, whole, start, end, step))
    return tuple(result)


def _bounds(facts: Facts, node: ir.Node, name: str, index: int) -> tuple[object, ...] | None:
    given = integers(node, name)
    if given is not None:
        return given
    value = inputs_at(node, index)
    found = facts.elements_of(value)
    return None if found is None else found.items


def _sliced(facts: Facts, whole: Size, start: object, end: object, step: object) -> Size:
    if (
        start == 0
        and step == 1
        and isinstance(end, int | Symbols)
        and (end == whole or (isinstance(end, int) and end >= 2**31 - 1))
    ):
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
    if facts.level(inputs_at(node, 0)) == Level.CONSTANT and position == 0 and len(axes) == 2 and indices:
        return (*indices, with_origin(axes[1], "feature"))
    picked = tuple(with_origin(one, _single_origin(axes[position])) for one in indices)
    return axes[:position] + picked + axes[position + 1 :]


def _gather_nd(facts: Facts, node: ir.Node) -> Axes | None:
    axes, indices = _first(facts, node), facts.axes_of(inputs_at(node, 1))
    picked = facts.axis_size(inputs_at(node, 1), -1)
    batch = integer(node, "batch_dims", 0)
    if axes is None or not indices or not isinstance(picked, int) or picked + batch > len(axes):
        return None
    origin = _single_origin(axes[batch]) if picked == 1 else "unknown"
    rows = tuple(with_origin(one, origin) for one in indices[batch:-1])
    return (*axes[:batch], *rows, *axes[batch + picked :])


def _single_origin(one: Axis) -> Origin:
    origins = {factor.origin for factor in one}
    return origins.pop() if len(origins) == 1 else "unknown"


def _pad(facts: Facts, node: ir.Node) -> Axes | None:
    axes = _first(facts, node)
    if axes is None:
        return None
    value = inputs_at(node, 1)
    found = facts.elements_of(value)
    pads = integers(node, "pads") or (found.items if found is not None else None)
    if pads is None or len(pads) != 2 * len(axes):
        return tuple(resized(one, facts.fresh()) for one in axes)
    result: list[Axis] = []
    for one, before, after in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        size = size_of(one)
        if before == 0 and after == 0:
            result.append(one)
        elif isinstance(size, int) and isinstance(before, int) and isinstance(after, int):
            result.append(resized(one, size + before + after))
        else:
            result.append(resized(one, facts.fresh()))
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
    "Identity Cast CastLike Dropout Softmax LogSoftmax LayerNormalization RMSNormalization InstanceNormalization "
    "GroupNormalization BatchNormalization LpNormalization MeanVarianceNormalization Relu Gelu Sigmoid Tanh Erf Exp Log "
    "Sqrt Neg Abs Reciprocal Clip LeakyRelu Elu Selu Softplus HardSigmoid HardSwish Mish Swish Celu Not IsNaN IsInf Floor "
    "Ceil Round Sign Sin Cos Trilu CumSum QuantizeLinear DequantizeLinear DynamicQuantizeLinear ScatterND ScatterElements "
    "TensorScatter RotaryEmbedding Softsign ThresholdedRelu Hardmax"
)
_ELEMENTWISE = (
    "Add Sub Mul Div Pow Where Max Min Mod PRelu Equal Less Greater LessOrEqual GreaterOrEqual And Or Xor Sum Mean"
)
_REDUCE = (
    "ReduceMax ReduceMin ReduceSum ReduceMean ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp ReduceLogSum"
)

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_FIRST.split(), _first),
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_REDUCE.split(), _reduce),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), layers.pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), layers.global_pool),
    "Resize": layers.resize,
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
    "GatherND": _gather_nd,
    "Pad": _pad,
    "MatMul": layers.matmul,
    "MatMulInteger": layers.matmul,
    "Gemm": layers.gemm,
    "Conv": layers.conv,
    "ConvInteger": layers.conv,
    "Einsum": layers.einsum,
    "ConstantOfShape": _constant_of_shape,
    "Shape": _shape_of_shape,
    "Range": _scalar_range,
}

_CONTRIB_RULES: dict[str, Rule] = {
    "FusedMatMul": layers.fused_matmul,
    "FusedGemm": layers.gemm,
    "MatMulNBits": layers.matmul_nbits,
    "DynamicQuantizeMatMul": layers.matmul,
    "MatMulIntegerToFloat": layers.matmul,
    **dict.fromkeys(
        [
            "Gelu",
            "FastGelu",
            "BiasGelu",
            "QuickGelu",
            "QuantizeLinear",
            "DequantizeLinear",
            "SkipLayerNormalization",
            "SimplifiedLayerNormalization",
            "SkipSimplifiedLayerNormalization",
            "RotaryEmbedding",
            "LayerNormalization",
        ],
        _first,
    ),
}
