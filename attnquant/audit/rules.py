"""What a target will not load, not fuse, or run at a cost that Q/DQ was meant to save; sources in docs/targets.md."""

from collections.abc import Iterator

import onnx_ir as ir

from attnquant.audit.flow import MOVES, SCALES, Flow, Hit, is_dequantize, is_quantize
from attnquant.audit.problem import Problem, Severity
from attnquant.audit.quantizers import parameters, problem_at
from attnquant.graph import bodies, constant, is_onnx, tensor_name
from attnquant.metatypes import CATALOGUE
from attnquant.target import Target, release

_UNLOADABLE_SINCE = 21
"""Opset from which ONNX Runtime on x86 does not load some moves right behind an int8 DequantizeLinear."""
_UNLOADABLE = ("Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""The moves that it gives a Q/DQ pair of their own, signed by attribute and unsigned by zero point."""
_LOADS_UP_TO = (1, 24)
"""Newest release (of those measured: 1.24.4, 1.27 to 1.32) that still loads them."""
_FUSED = frozenset({
    "Add", "ArgMax", "AveragePool", "Concat", "ConvTranspose", "Gather", "GlobalAveragePool", "LeakyRelu", "MaxPool", "Mul",
    "Resize", "Sigmoid", "Softmax", "Split", "Where",
})  # fmt: skip
"""Operators that ONNX Runtime's CPU fuses with Q/DQ besides the products."""
_ANGLES = MOVES | SCALES | {"Add", "Einsum", "MatMul", "Sub"}
"""What rotary and sinusoidal angles are computed with, from positions."""
_PRODUCTS = ("Conv", "Gemm", "MatMul")


def positions(flow: Flow) -> Iterator[Problem]:
    """Quantized position ids: angles of rotary or sinusoidal embeddings, off by more than a turn at 8 bits."""
    reported: set[ir.Node] = set()
    for _, body in bodies(flow.model):
        for node in body:
            if not is_onnx(node, "Cos", "Sin"):
                continue
            for hit in _angle_hits(flow, node.inputs[0]):
                if hit.dequantize not in reported:
                    reported.add(hit.dequantize)
                    reason = f"position ids are quantized in front of {node.op_type} {node.name!r}: angles need float."
                    yield problem_at(hit.quantize or hit.dequantize, "positions", reason)


def _angle_hits(flow: Flow, value: ir.Value | None) -> Iterator[Hit]:
    """Quantized activations behind an angle, over products that do not sum (an outer product with the frequencies)."""
    stack, seen = [value], {value}
    while stack and len(seen) < 100:
        at = stack.pop()
        node = None if at is None else at.producer()
        if node is None:
            continue
        if is_dequantize(node):
            hit = flow.origin(node)
            if hit is not None:
                yield hit
        elif is_onnx(node, *_ANGLES) and not (is_onnx(node, "MatMul") and _sums(flow, node)):
            fresh = [other for other in node.inputs if flow.is_data(other) and other not in seen]
            seen.update(fresh)
            stack.extend(fresh)


def _sums(flow: Flow, node: ir.Node) -> bool:
    """A MatMul over more than one element: a linear, no outer product."""
    for index, axis in ((0, -1), (1, -2)):
        shape = _constant_shape(node.inputs[index]) if not flow.is_data(node.inputs[index]) else None
        if shape is not None:
            return len(shape) < 2 or shape[axis] != 1
    return True


def _constant_shape(value: ir.Value | None) -> tuple[object, ...] | None:
    array = constant(value)
    if array is not None:
        return array.shape
    node = None if value is None else value.producer()
    if node is not None and (is_dequantize(node) or is_quantize(node)):
        return _constant_shape(node.inputs[0])
    return None if value is None or value.shape is None else tuple(value.shape)


def embeddings(flow: Flow) -> Iterator[Problem]:
    """Tables that are dequantized whole, at every run, for the few rows that a Gather takes."""
    for _, body in bodies(flow.model):
        for node in body:
            if not is_onnx(node, "Gather") or flow.is_data(node.inputs[0]) or not flow.is_data(node.inputs[1]):
                continue
            maker = None if node.inputs[0] is None else node.inputs[0].producer()
            while maker is not None and is_onnx(maker, *MOVES) and maker.inputs[0] is not None:
                maker = maker.inputs[0].producer()
            if maker is not None and is_dequantize(maker):
                reason = f"every run dequantizes the whole table for Gather {node.name!r}: gather integers, then dequantize."
                yield Problem(kind="embedding", node=maker.name or "", tensor=tensor_name(maker.inputs[0]), reason=reason)


def target_rules(flow: Flow, target: Target, opset: int | None, *, emitted: bool) -> Iterator[Problem]:
    """What the target will not load or fuse.

    :param emitted: attnquant made the model for this target: then every activation has the target's type.
    """
    if opset is not None and target.max_opset is not None and opset > target.max_opset:
        reason = f"expected opset {target.max_opset} or earlier for {target}, got {opset}. Export at an earlier opset."
        yield Problem(kind="opset", node="", tensor="", reason=reason)
    if target.name.startswith("onnxruntime"):
        yield from embeddings(flow)
    if target.activations == "uint8":
        types = {node: parameters(node).dtype for node in flow.quantizes if flow.is_data(node.inputs[0])}
        signed = [node for node, dtype in types.items() if dtype == "int8"]
        # Some tools make signed quantizers throughout, and unsigned ones only of what is never negative.
        unsigned = emitted or len(types) - len(signed) > 2 * len(signed)
        for node in signed:
            found = _signed(flow, node, target, opset, unsigned=unsigned)
            if found is not None:
                yield found
    if target.name == "onnxruntime-cpu":
        yield from _not_fused(flow, target)


def _signed(flow: Flow, node: ir.Node, target: Target, opset: int | None, *, unsigned: bool) -> Problem | None:
    """An int8 activation where uint8 is the type that always loads and fuses.

    A violation where it keeps the model from loading, or where the model is uint8 otherwise; a warning where it costs speed;
    nothing where the runtime converts it, as it does for one reader.
    """
    ways = list(flow.ahead(node.outputs[0], {"DequantizeLinear"} | MOVES))
    second = [way[1][0] for way in ways if len(way) > 1 and is_dequantize(way[0][0])]
    moved = next((step for step in second if is_onnx(step, *_UNLOADABLE)), None)
    readers = {way[-1][0] for way in ways if is_onnx(way[-1][0], *_PRODUCTS)}
    if moved is None and len(ways) == 1 and _is_key(*ways[0][-1]):
        return None
    newer = not target.version or release(target.version)[:2] > _LOADS_UP_TO
    severity: Severity = "violation" if unsigned else "warning"
    if moved is not None and newer and opset is not None and opset >= _UNLOADABLE_SINCE:
        severity, why = "violation", f"{moved.op_type} {moved.name!r} behind it: at opset {opset} that does not load"
    elif len(readers) > 1:
        names = ", ".join(sorted(repr(reader.name) for reader in readers))
        why = f"{len(readers)} products read it ({names}) and run in float"
    elif unsigned:
        why = "the model is uint8 otherwise"
    else:
        return None
    reason = f"expected uint8 for {target}, got int8: {why}. Shift the zero point by 128."
    found = problem_at(node, "target type", reason)
    return Problem(kind=found.kind, node=found.node, tensor=found.tensor, reason=reason, severity=severity)


def _is_key(product: ir.Node, index: int) -> bool:
    """Whether a product of two activations reads a tensor on its right, where its kernel takes uint8 and int8 (x86)."""
    left = None if product.inputs[0] is None else product.inputs[0].producer()
    return index == 1 and is_onnx(product, "MatMul") and left is not None and is_dequantize(left)


def _not_fused(flow: Flow, target: Target) -> Iterator[Problem]:
    for node in flow.dequantizes:
        hit = flow.origin(node)
        if hit is None or hit.quantize is None:
            continue
        ways = list(flow.ahead(node.outputs[0], MOVES))
        readers = [way[-1][0] for way in ways if not is_quantize(way[-1][0])]
        if readers and not any(_fuses(reader, target) for reader in readers):
            kinds = ", ".join(sorted({reader.op_type for reader in readers}))
            yield _warning(node, f"{target} fuses it with none of its readers ({kinds}): it is rounded and runs in float.")
        elif _is_half(node.inputs[1]) and any(is_onnx(reader, *_PRODUCTS) for reader in readers):
            yield _warning(node, f"{target} runs half precision scales as Cast, DequantizeLinear and a float product.")
    for _, body in bodies(flow.model):
        for node in body:
            if is_onnx(node, "MatMul") and (bias := _float_bias(flow, node)) is not None:
                yield _warning(node, f"static shapes and the float bias of {bias.name!r} make {target} run a float Gemm.")


def _fuses(reader: ir.Node, target: Target) -> bool:
    if (reader.domain or "ai.onnx", reader.op_type) in CATALOGUE:
        return True
    return reader.op_type in target.int8_operators or is_onnx(reader, *_FUSED)


def _warning(node: ir.Node, reason: str) -> Problem:
    return Problem(
        kind="not fused", node=node.name or "", tensor=tensor_name(node.outputs[0]), reason=reason, severity="warning"
    )


def _float_bias(flow: Flow, node: ir.Node) -> ir.Node | None:
    """The Add of a float constant behind a MatMul between Q/DQ whose activation has a fully static shape."""
    if not all(value is not None and is_dequantize(value.producer()) for value in node.inputs[:2]):
        return None
    data = [value for value in node.inputs if flow.is_data(value)]
    uses = node.outputs[0].uses()
    if len(data) != 1 or len(uses) != 1 or not _is_static(data[0]):
        return None
    (use,) = uses
    add = use.node
    if not is_onnx(add, "Add") or constant(add.inputs[1 - use.idx]) is None:
        return None
    return None if any(is_quantize(after.node) for after in add.outputs[0].uses()) else add


def _is_half(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _is_static(value: ir.Value | None) -> bool:
    return value is not None and value.shape is not None and all(isinstance(size, int) for size in value.shape)
