"""Shape arithmetic followed element by element: Shape, Gather, Concat, Div, Sqrt ... on tensors of a few elements.

Sizes stay symbolic where the graph does not say them: a Reshape to (Shape(x)[0], -1, 16) is understood without a run.
"""

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import SMALL, Element, Elements, Facts, Number, attribute, axes_argument, inputs_at, integer
from attnquant.patterns.sizes import Symbols, divide, product, size_of, times

INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def tensor_of(node: ir.Node) -> ir.TensorProtocol | None:
    """Tensor of a Constant node; None where it refers to an attribute of its function, is sparse or holds strings."""
    name, attribute_ = next(iter(node.attributes.items()), ("", None))
    if attribute_ is None or attribute_.is_ref():
        return None
    if name == "value":
        tensor: ir.TensorProtocol = attribute_.value
        return tensor
    if name in ("value_int", "value_ints"):
        return ir.Tensor(np.array(attribute_.value, np.int64))
    return ir.Tensor(np.array(attribute_.value, np.float32)) if name in ("value_float", "value_floats") else None


def of_constant(tensor: ir.TensorProtocol | None) -> Elements | None:
    """Elements of a small constant; a large one is never read, nor is a vector of floats, which is no size."""
    if tensor is None or tensor.size > SMALL or tensor.dtype == ir.DataType.STRING:
        return None
    if tensor.size > 1 and tensor.dtype.is_floating_point():
        return None
    array = tensor.numpy()
    if array.dtype.kind not in "iufb":
        array = array.astype(np.float32)
    if array.ndim > 1 and array.size > 1:
        return None
    return Elements(tuple(item.item() for item in array.reshape(-1)), array.ndim != 1)


def infer(facts: Facts, node: ir.Node) -> Elements | None:
    """Elements of the node's first output, None where they are not followed."""
    rule = _RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    return None if rule is None else rule(facts, node)


def _of(facts: Facts, node: ir.Node, index: int) -> Elements | None:
    return facts.elements_of(inputs_at(node, index))


def _shape(facts: Facts, node: ir.Node) -> Elements | None:
    axes = facts.axes_of(inputs_at(node, 0))
    if axes is None or len(axes) > SMALL:
        return None
    sizes = [size_of(one) for one in axes]
    end = attribute(node, "end")
    return Elements(tuple(sizes[integer(node, "start", 0) : end if isinstance(end, int) else None]), False)


def _size(facts: Facts, node: ir.Node) -> Elements | None:
    axes = facts.axes_of(inputs_at(node, 0))
    return None if axes is None else Elements((product(size_of(one) for one in axes),), True)


def _gather(facts: Facts, node: ir.Node) -> Elements | None:
    data, indices = _of(facts, node, 0), _of(facts, node, 1)
    if data is None or indices is None or data.scalar or integer(node, "axis", 0) not in (0, -1):
        return None
    picked: list[Element] = []
    for index in indices.items:
        if not isinstance(index, int) or not -len(data.items) <= index < len(data.items):
            return None
        picked.append(data.items[index])
    return Elements(tuple(picked), indices.scalar)


def _slice(facts: Facts, node: ir.Node) -> Elements | None:
    data = _of(facts, node, 0)
    if data is None or data.scalar:
        return None
    if "starts" in node.attributes:
        starts, ends = attribute(node, "starts"), attribute(node, "ends")
        bounds = [
            starts[0] if isinstance(starts, list | tuple) else None,
            ends[0] if isinstance(ends, list | tuple) else None,
            1,
        ]
    else:
        given = [_of(facts, node, 1), _of(facts, node, 2)]
        step = _of(facts, node, 4)
        bounds = [None if one is None or len(one.items) != 1 else one.items[0] for one in given]
        bounds.append(1 if step is None else step.items[0])
    start, stop, stride = bounds
    if not isinstance(start, int) or not isinstance(stop, int) or not isinstance(stride, int):
        return None
    if stride < 0 and stop < -len(data.items):
        return Elements(data.items[start::stride], False)
    return Elements(data.items[start:stop:stride], False)


def _concat(facts: Facts, node: ir.Node) -> Elements | None:
    parts = [_of(facts, node, index) for index in range(len(node.inputs))]
    known = [part for part in parts if part is not None and not part.scalar]
    if len(known) != len(parts):
        return _partial_concat(facts, node, parts)
    items = tuple(item for part in known for item in part.items)
    return Elements(items, False) if len(items) <= SMALL else None


def _partial_concat(facts: Facts, node: ir.Node, parts: list[Elements | None]) -> Elements | None:
    """A Concat with unknown parts: their elements are unknown, where their number is known."""
    items: list[Element] = []
    for value, part in zip(node.inputs, parts, strict=True):
        if part is not None and not part.scalar:
            items.extend(part.items)
            continue
        size = facts.axis_size(value, 0) if facts.rank(value) == 1 else None
        if not isinstance(size, int) or size > SMALL or value is None or value.dtype not in INTEGERS:
            return None
        items.extend([None] * size)
    return Elements(tuple(items), False) if len(items) <= SMALL else None


def _unsqueeze(facts: Facts, node: ir.Node) -> Elements | None:
    data, axes = _of(facts, node, 0), axes_argument(facts, node)
    if data is None or len(data.items) != 1 or axes is None:
        return None
    return Elements(data.items, not (data.scalar and len(axes) == 1))


def _squeeze(facts: Facts, node: ir.Node) -> Elements | None:
    data = _of(facts, node, 0)
    return Elements(data.items, True) if data is not None and len(data.items) == 1 else None


def _reshape(facts: Facts, node: ir.Node) -> Elements | None:
    data, shape = _of(facts, node, 0), _of(facts, node, 1)
    if data is None or shape is None or len(shape.items) > 1:
        return None
    return Elements(data.items, not shape.items)


def _same(facts: Facts, node: ir.Node) -> Elements | None:
    return _of(facts, node, 0)


def _dequantized(facts: Facts, node: ir.Node) -> Elements | None:
    """Behind a QuantizeLinear the float elements (the pair is transparent), of a constant (x - zero point) * scale."""
    data = _of(facts, node, 0)
    value = inputs_at(node, 0)
    source = None if value is None else value.producer()
    if data is None or is_onnx(source, "QuantizeLinear"):
        return data
    scale, zero = _of(facts, node, 1), _of(facts, node, 2)
    offset = zero.items[0] if zero is not None and len(zero.items) == 1 else 0
    factor = scale.items[0] if scale is not None and len(scale.items) == 1 else None
    if isinstance(factor, Symbols | None) or isinstance(offset, Symbols | None):
        return None
    items = tuple(None if isinstance(item, Symbols | None) else (item - offset) * factor for item in data.items)
    return Elements(items, data.scalar)


def _cast(facts: Facts, node: ir.Node) -> Elements | None:
    data = _of(facts, node, 0)
    if data is None or integer(node, "to", 1) not in (6, 7):
        return data
    return Elements(
        tuple(int(item) if isinstance(item, float) and math.isfinite(item) else item for item in data.items), data.scalar
    )


def _clip(facts: Facts, node: ir.Node) -> Elements | None:
    data = _of(facts, node, 0)
    if data is None:
        return None
    bounds = []
    for index, name in ((1, "min"), (2, "max")):
        given, old = _of(facts, node, index), attribute(node, name)
        if inputs_at(node, index) is not None and (given is None or len(given.items) != 1):
            return None
        bounds.append(given.items[0] if given is not None else old if isinstance(old, float) else None)
    low, high = bounds
    items = data.items
    if low is not None:
        items = tuple(_numeric(max)(item, low) for item in items)
    if high is not None:
        items = tuple(_numeric(min)(item, high) for item in items)
    return Elements(items, data.scalar)


def _constant_of_shape(facts: Facts, node: ir.Node) -> Elements | None:
    shape = _of(facts, node, 0)
    if shape is None or len(shape.items) > 1:
        return None
    given = node.attributes.get("value")
    fill = given.value.numpy().reshape(-1)[0].item() if given is not None and not given.is_ref() else 0.0
    size = shape.items[0] if shape.items else 1
    return Elements((fill,) * size, not shape.items) if isinstance(size, int) and 0 <= size <= SMALL else None


def _where(facts: Facts, node: ir.Node) -> Elements | None:
    condition, yes, no = (_of(facts, node, index) for index in range(3))
    if condition is None or yes is None or no is None:
        return None
    length = max(len(condition.items), len(yes.items), len(no.items))
    rows = [_stretched(part, length) for part in (condition, yes, no)]
    if any(len(row) != length for row in rows):
        return None
    items = tuple((a if test else b) if isinstance(test, bool | int) else None for test, a, b in zip(*rows, strict=True))
    return Elements(items, condition.scalar and yes.scalar and no.scalar)


def _stretched(part: Elements, length: int) -> tuple[Element, ...]:
    return part.items * length if len(part.items) == 1 else part.items


def _range(facts: Facts, node: ir.Node) -> Elements | None:
    bounds = [_of(facts, node, index) for index in range(3)]
    numbers = [bound.items[0] for bound in bounds if bound is not None and len(bound.items) == 1]
    if len(numbers) != 3 or not all(isinstance(item, int) for item in numbers):
        return None
    start, stop, step = (item for item in numbers if isinstance(item, int))
    if not step or len(range(start, stop, step)) > SMALL:
        return None
    return Elements(tuple(range(start, stop, step)), False)


def _reduce_prod(facts: Facts, node: ir.Node) -> Elements | None:
    data = _of(facts, node, 0)
    if data is None:
        return None
    total: Element = 1
    for item in data.items:
        total = _multiply(total, item)
    return Elements((total,), not integer(node, "keepdims", 1))


def _binary(operation: Callable[[Element, Element], Element]) -> Callable[[Facts, ir.Node], Elements | None]:
    def rule(facts: Facts, node: ir.Node) -> Elements | None:
        left, right = _of(facts, node, 0), _of(facts, node, 1)
        if left is None or right is None:
            return None
        length = max(len(left.items), len(right.items))
        a, b = _stretched(left, length), _stretched(right, length)
        if len(a) != length or len(b) != length:
            return None
        return Elements(tuple(operation(x, y) for x, y in zip(a, b, strict=True)), left.scalar and right.scalar)

    return rule


def _unary(operation: Callable[[float], float]) -> Callable[[Facts, ir.Node], Elements | None]:
    def rule(facts: Facts, node: ir.Node) -> Elements | None:
        data = _of(facts, node, 0)
        if data is None:
            return None
        return Elements(tuple(_apply(operation, item) for item in data.items), data.scalar)

    return rule


def _apply(operation: Callable[[float], float], item: Element) -> Element:
    if isinstance(item, Symbols | None):
        return None
    with np.errstate(all="ignore"):
        try:
            return operation(item)
        except (ValueError, ZeroDivisionError, OverflowError):
            return None


def _multiply(left: Element, right: Element) -> Element:
    if isinstance(left, Symbols | int) and isinstance(right, Symbols | int):
        return times(left, right)
    return None if isinstance(left, Symbols | None) or isinstance(right, Symbols | None) else left * right


def _divide(left: Element, right: Element) -> Element:
    if isinstance(left, Symbols | int) and isinstance(right, Symbols | int):
        exact = divide(left, right)
        if exact is not None or isinstance(left, Symbols) or isinstance(right, Symbols) or not right:
            return exact
        return int(left / right)
    return None if isinstance(left, Symbols | None) or isinstance(right, Symbols | None) or not right else left / right


def _equal(left: Element, right: Element) -> Element:
    if left is None or right is None:
        return None
    if isinstance(left, Symbols) or isinstance(right, Symbols):
        if left == right:
            return True
        other = right if isinstance(left, Symbols) else left
        return False if isinstance(other, int) and other < 0 else None
    return left == right


def _numeric(operation: Callable[[Number, Number], Number]) -> Callable[[Element, Element], Element]:
    def apply(left: Element, right: Element) -> Element:
        if isinstance(left, Symbols | None) or isinstance(right, Symbols | None):
            return None
        try:
            return operation(left, right)
        except (ValueError, ZeroDivisionError, OverflowError):
            return None

    return apply


def _add(left: Element, right: Element) -> Element:
    if isinstance(left, Symbols) and right == 0:
        return left
    if isinstance(right, Symbols) and left == 0:
        return right
    return _numeric(lambda a, b: a + b)(left, right)


def _subtract(left: Element, right: Element) -> Element:
    return left if isinstance(left, Symbols) and right == 0 else _numeric(lambda a, b: a - b)(left, right)


_RULES: dict[str, Callable[[Facts, ir.Node], Elements | None]] = {
    "Shape": _shape,
    "Size": _size,
    "Gather": _gather,
    "Slice": _slice,
    "Concat": _concat,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Identity": _same,
    "Clip": _clip,
    "Cast": _cast,
    "QuantizeLinear": _same,
    "DequantizeLinear": _dequantized,
    "CastLike": _same,
    "ConstantOfShape": _constant_of_shape,
    "Where": _where,
    "Range": _range,
    "ReduceProd": _reduce_prod,
    "Mul": _binary(_multiply),
    "Div": _binary(_divide),
    "Add": _binary(_add),
    "Sub": _binary(_subtract),
    "Equal": _binary(_equal),
    "Pow": _binary(_numeric(lambda a, b: a**b)),
    "Mod": _binary(_numeric(lambda a, b: a % b)),
    "Max": _binary(_numeric(max)),
    "Min": _binary(_numeric(min)),
    "Sqrt": _unary(math.sqrt),
    "Reciprocal": _unary(lambda item: 1.0 / item),
    "Neg": _unary(lambda item: -item),
    "Abs": _unary(abs),
    "Exp": _unary(math.exp),
    "Log": _unary(math.log),
    "Floor": _unary(math.floor),
    "Ceil": _unary(math.ceil),
}
