"""Is every QuantizeLinear and DequantizeLinear sound by itself: scale, zero point, types, axis, and what its opset allows.

Sources: ONNX operators QuantizeLinear and DequantizeLinear, versions 10, 13, 19, 21.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.audit.flow import Flow, is_quantize
from attnquant.audit.problem import Kind, Problem
from attnquant.graph import constant, tensor_name

_BITS = {"int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "int32": 32}
_NARROW_SINCE = 21
"""Opset that brought 4-bit and 16-bit integers, and blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a QuantizeLinear or DequantizeLinear is set to; None where it is not constant."""

    dtype: str
    """"int8", "uint8", ... or "" where it can't be told."""
    scale: np.ndarray | None
    zero_point: np.ndarray | None
    axis: int
    block: int

    @property
    def bits(self) -> int | None:
        """Width of the integers."""
        return _BITS.get(self.dtype)

    @property
    def symmetric(self) -> bool | None:
        """Zero is in the middle: zero point 0 of signed, 2^(bits - 1) of unsigned integers. None where it can't be told."""
        if self.zero_point is None or self.bits is None:
            return None
        return bool(np.all(self.zero_point.astype(np.int64) == neutral(self.dtype)))

    @property
    def granularity(self) -> str:
        """"tensor" or "channel"."""
        return "tensor" if self.scale is None or self.scale.size == 1 else "channel"


def neutral(dtype: str) -> int:
    """The zero point in the middle of an integer type."""
    return 1 << (_BITS[dtype] - 1) if dtype.startswith("u") else 0


def parameters(node: ir.Node) -> Parameters:
    """What a QuantizeLinear, DynamicQuantizeLinear or DequantizeLinear is set to."""
    if node.op_type == "DynamicQuantizeLinear":
        return Parameters(dtype="uint8", scale=None, zero_point=None, axis=1, block=0)
    scale_value = _input(node, 1)
    zero_value = _input(node, 2)
    scale, zero_point = constant(scale_value), constant(zero_value)
    dtype = _dtype(node, zero_value)
    if zero_value is None and scale is not None:
        zero_point = np.zeros(scale.shape, np.int64)
    return Parameters(
        dtype=dtype,
        scale=scale,
        zero_point=zero_point,
        axis=_integer(node, "axis", 1),
        block=_integer(node, "block_size", 0),
    )


def unsound(flow: Flow, opset: int | None) -> Iterator[Problem]:
    """Every problem of every quantizer and dequantizer of the model; `opset` is that of ai.onnx."""
    for node in (*flow.quantizes, *flow.dequantizes):
        found = parameters(node)
        yield from _scale(node, found)
        yield from _shapes(node, found)
        if node.domain in ("", "ai.onnx") and opset is not None:
            yield from _opset(node, found, opset)
    for node in flow.dequantizes:
        hit = flow.origin(node)
        maker = hit.quantize if hit is not None else None if node.inputs[0] is None else node.inputs[0].producer()
        if maker is not None and maker.op_type == "QuantizeLinear":
            yield from _pair(maker, node)


def problem_at(node: ir.Node, kind: Kind, reason: str) -> Problem:
    """A violation at a quantizer or dequantizer; its tensor is the float one."""
    value = node.inputs[0] if is_quantize(node) else node.outputs[0]
    return Problem(kind=kind, node=node.name or "", tensor=tensor_name(value), reason=reason)


def _scale(node: ir.Node, found: Parameters) -> Iterator[Problem]:
    scale = found.scale
    if scale is None:
        return
    if scale.size == 0 or scale.dtype.kind in "biuc":
        yield problem_at(node, "scale", f"expected floating point scales, got {scale.size} of type {scale.dtype}.")
        return
    wide = scale.astype(np.float64).ravel()
    limits = np.finfo(scale.dtype) if scale.dtype.kind == "f" else np.finfo(np.float32)
    checks = (
        (np.isnan(wide), "a NaN scale"),
        (np.isinf(wide), "an infinite scale"),
        (wide == 0, "a scale of zero"),
        (wide < 0, "a negative scale"),
        ((wide > 0) & (wide < float(limits.tiny)), f"a denormal scale, below {limits.tiny:g}"),
    )
    for bad, what in checks:
        if bad.any():
            count = f" in {int(bad.sum())} of {bad.size} channels" if bad.size > 1 else ""
            yield problem_at(node, "scale", f"expected a positive finite scale, got {what}{count} ({wide[bad][0]:g}).")
            return
    if found.bits is not None and found.bits <= 16:
        top = wide.max() * ((1 << found.bits) - 1)
        if top > float(limits.max):
            reason = f"the scale {wide.max():g} makes a range of {top:g}, beyond what {scale.dtype} holds: it saturates."
            yield problem_at(node, "scale", reason)


def _shapes(node: ir.Node, found: Parameters) -> Iterator[Problem]:
    zero_value = _input(node, 2)
    if found.scale is None or found.block:
        return
    zero_point = constant(zero_value)
    if zero_point is not None and zero_point.size != found.scale.size:
        reason = f"expected as many zero points as scales ({found.scale.size}), got {zero_point.size}."
        yield problem_at(node, "zero point", reason)
    shape = _shape(node)
    if found.scale.size == 1 or shape is None:
        return
    axis = found.axis + len(shape) if found.axis < 0 else found.axis
    if not 0 <= axis < len(shape):
        yield problem_at(node, "scale", f"expected an axis of a tensor with {len(shape)} dimensions, got {found.axis}.")
    elif isinstance(shape[axis], int) and shape[axis] != found.scale.size:
        reason = f"expected {shape[axis]} scales, one for each channel of axis {axis}, got {found.scale.size}."
        yield problem_at(node, "scale", reason)


def _opset(node: ir.Node, found: Parameters, opset: int) -> Iterator[Problem]:
    needs = [(10, f"{node.op_type}")]
    if found.granularity == "channel":
        needs.append((13, "a scale for each channel"))
    scale = _input(node, 1)
    if scale is not None and scale.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        needs.append((19, f"a {scale.dtype.name.lower()} scale"))
    if found.bits in (4, 16):
        needs.append((_NARROW_SINCE, found.dtype))
    if found.block:
        needs.append((_NARROW_SINCE, "blocks"))
    for since, what in needs:
        if opset < since:
            yield problem_at(node, "opset", f"expected opset {since} or later for {what}, got {opset}.")


def _pair(quantize: ir.Node, dequantize: ir.Node) -> Iterator[Problem]:
    """Both sides of a pair must map alike; a difference scales or shifts every value."""
    there, back = parameters(quantize), parameters(dequantize)
    if there.dtype and back.dtype and there.dtype != back.dtype and _input(dequantize, 2) is not None:
        reason = f"expected the zero point of the {there.dtype} that {quantize.name!r} makes, got {back.dtype}."
        yield problem_at(dequantize, "type", reason)
    elif _differ(there.zero_point, back.zero_point):
        reason = f"expected zero point {_show(there.zero_point)} as at {quantize.name!r}, got {_show(back.zero_point)}."
        yield problem_at(dequantize, "zero point", reason)
    if _differ(there.scale, back.scale):
        reason = f"expected scale {_show(there.scale)} as at {quantize.name!r}, got {_show(back.scale)}."
        yield problem_at(dequantize, "scale", reason)


def _differ(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return False
    if one.size != other.size or "c" in (one.dtype.kind, other.dtype.kind):
        return True
    first, second = one.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    return not np.allclose(first, second, rtol=1e-3, atol=0, equal_nan=True)


def _show(array: np.ndarray | None) -> str:
    if array is None:
        return "?"
    flat = array.astype(np.float64).ravel()
    return f"{flat[0]:g}" if flat.size == 1 else f"[{flat[0]:g}, ...]"


def _dtype(node: ir.Node, zero_value: ir.Value | None) -> str:
    """The integer type: by the zero point, the attribute, or the tensor; unsigned by default (QuantizeLinear)."""
    tensor = node.outputs[0] if is_quantize(node) else node.inputs[0]
    for value in (zero_value, None if is_quantize(node) else tensor):
        array = None if value is None else value.const_value
        dtype = array.dtype if array is not None else value.dtype if value is not None else None
        if dtype is not None:
            return str(dtype.name).lower()
    if is_quantize(node):
        asked = _integer(node, "output_dtype", 0)
        return str(ir.DataType(asked).name).lower() if asked else "uint8"
    maker = None if tensor is None else tensor.producer()
    while maker is not None and not is_quantize(maker) and maker.inputs and maker.inputs[0] is not None:
        maker = maker.inputs[0].producer()
    return parameters(maker).dtype if maker is not None and is_quantize(maker) else ""


def _shape(node: ir.Node) -> tuple[object, ...] | None:
    for value in (node.inputs[0], node.outputs[0]):
        if value is not None and value.shape is not None:
            return tuple(value.shape)
    return None


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _integer(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    value = None if attribute is None or attribute.is_ref() else attribute.value
    return value if isinstance(value, int) else default
