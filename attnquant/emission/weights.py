"""Weights as integers: QuantizeLinear of a constant is folded, with scales that no x86 kernel can overflow.

x86 CPUs without VNNI multiply u8 x s8 with vpmaddubsw: the products of two neighbours along the reduction, (0, 1), (2, 3),
and so on, are added in 16 bits and saturate silently. With activations up to 255 the sum stays exact if the positive weights
of every pair add up to at most 128, and the negative ones too. Giving each output channel the smallest scale for which this
holds costs about 1 dB on normally distributed weights, where halving the range costs 3.5 dB and saturation 5 dB, at the same
speed. Where the scales have to stay, the same integers are kept as uint8 with a zero point 128 higher:
the kernels of u8 x u8 are exact everywhere, the same ones with VNNI, and slower than u8 x s8 without (docs/torch.md).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import set_input
from attnquant.emission.unsigned import raised
from attnquant.graph import along, constant, is_onnx, tensor_name

PAIR_LIMIT = 127.0
"""Largest sum of two weights before rounding, which may add 1: 255 * 128 = 32,640 is below 2^15."""

_MOVES = ("Transpose", "Reshape", "Identity", "Squeeze", "Unsqueeze")


def fold_weights(model: ir.Model, *, overflow_safe: bool, keep_scales: bool = False) -> int:
    """Replace every QuantizeLinear of a constant float tensor by the integer tensor, in place; returns how many.

    Requires int8 per-tensor or per-channel quantizers with zero point 0, as the host writes them for weights; others are
    left alone, but for `keep_scales`, which takes any int8 or uint8 quantizer.
    Ensures that DequantizeLinear reads an initializer, and that its scale is never smaller than before.

    :param overflow_safe: Change what could saturate a kernel without VNNI: scales grow.
    :param keep_scales: Change the type instead: such weights become uint8, the same values bit for bit.
    """
    changes = 0
    for node in list(model.graph):
        if not is_onnx(node, "QuantizeLinear") or node.graph is None:
            continue
        found = scales_of(node, overflow_safe=overflow_safe, any_type=keep_scales)
        if found is None:
            continue
        if keep_scales:
            zero_point, symmetric = found.zero_point, not np.any(found.zero_point)
            is_int8 = zero_point.dtype == np.int8
            unsafe = overflow_safe and is_int8 and bool(np.any(found.needed > found.given) or not symmetric)
            integers = quantized(found.weight, found.given, zero_point, found.axis)
            _fold(model, node, integers, found.given, zero_point if unsafe else None)
        else:
            fold_one(model, node, quantized(found.weight, found.safe, found.zero_point, found.axis).clip(-127), found.safe)
        changes += 1
    return changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """A QuantizeLinear of a constant."""

    weight: np.ndarray
    """float32"""
    axis: int | None
    """Of the channels; None: one scale."""
    given: np.ndarray
    needed: np.ndarray
    """The smallest at which no pair can saturate, in the same shape; `given` where that is not asked for."""
    zero_point: np.ndarray

    @property
    def safe(self) -> np.ndarray:
        """Never smaller than given, and large enough."""
        return np.asarray(np.maximum(self.given, self.needed), np.float32)


def scales_of(node: ir.Node, *, overflow_safe: bool, any_type: bool = False) -> Scales | None:
    """What a QuantizeLinear of a constant float tensor says; None for others, and for what is not int8 around zero.

    :param any_type: Take any int8 or uint8 quantizer.
    """
    weight, given, zero_point = (_static(value) for value in (*node.inputs, None, None)[:3])
    if weight is None or given is None or zero_point is None or weight.dtype != np.float32:
        return None
    symmetric = zero_point.dtype == np.int8 and not np.any(zero_point)
    if not symmetric and not (any_type and zero_point.dtype in (np.int8, np.uint8)):
        return None
    axis = channel_axis(node, weight, given)
    needed = _safe_scale(node, weight, axis, given.shape) if overflow_safe else given
    return Scales(weight=weight, axis=axis, given=given, needed=needed, zero_point=zero_point)


def fold_one(model: ir.Model, node: ir.Node, integers: np.ndarray, scale: np.ndarray) -> None:
    """Give the readers of a QuantizeLinear int8 integers around zero and a scale, and drop it."""
    _fold(model, node, integers, scale, None)


def _static(value: ir.Value | None) -> np.ndarray | None:
    """The array of a constant, also behind operators that only move it."""
    array = constant(value)
    node = None if value is None else value.producer()
    if array is not None or node is None or not is_onnx(node, *_MOVES):
        return array
    inner = _static(node.inputs[0])
    if inner is None:
        return None
    if node.op_type == "Transpose":
        order = node.attributes.get("perm")
        return np.transpose(inner, None if order is None else order.as_ints())
    if node.op_type == "Identity":
        return inner
    shape = None if value is None or value.shape is None else value.shape
    static = None if shape is None else [dim for dim in shape if isinstance(dim, int)]
    return inner.reshape(static) if static is not None and shape is not None and len(static) == len(shape) else None


def channel_axis(node: ir.Node, weight: np.ndarray, scale: np.ndarray) -> int | None:
    """Axis of the channels, None where one scale serves the whole tensor."""
    if scale.size == 1:
        return None
    attribute = node.attributes.get("axis")
    return (1 if attribute is None else attribute.as_int()) % weight.ndim


def _safe_scale(node: ir.Node, weight: np.ndarray, axis: int | None, shape: tuple[int, ...]) -> np.ndarray:
    """Smallest scale per channel (float32, the scale's own shape) at which no pair along the reduction can saturate."""
    outputs = [dequantize.outputs[0] for dequantize, _ in node.outputs[0].uses()]
    found = [scale for output in outputs for _, _, scale in needed_behind(output, weight, axis)]
    if not found:
        return np.zeros(shape, np.float32)
    per_channel = np.max(np.stack(found), axis=0)
    return (per_channel if axis is not None else np.asarray(per_channel.max())).reshape(shape)


def needed_behind(
    value: ir.Value, weight: np.ndarray, axis: int | None
) -> Iterator[tuple[ir.Node, int, np.ndarray]]:
    """(product, its operand, the scales that it needs) for readers of `value`, also those behind a Transpose or Cast."""
    for reader, index in value.uses():
        if is_onnx(reader, "Identity", "Cast"):
            yield from needed_behind(reader.outputs[0], weight, axis)
        elif is_onnx(reader, "Transpose"):
            order = reader.attributes.get_ints("perm", list(reversed(range(weight.ndim))))
            moved = None if axis is None else list(order).index(axis)
            yield from needed_behind(reader.outputs[0], weight.transpose(order), moved)
        elif (scale := _needed(reader, index, weight, axis)) is not None:
            yield reader, index, scale


def _needed(reader: ir.Node, index: int, weight: np.ndarray, axis: int | None) -> np.ndarray | None:
    """The scale that one reader needs, per channel (or one value, broadcast); None where nothing is reduced or overflows.

    A constant on the left of a MatMul is an attention's query: `unsigned` makes it uint8, and u8 x u8 is exact.
    """
    if is_onnx(reader, "MatMul") and index == 0:
        return None
    channels = 1 if axis is None else weight.shape[axis]
    reduction = _reduction_axis(reader, index, weight.ndim)
    if reduction is None:
        return None
    if is_onnx(reader, "Conv") or reduction == axis:
        # The runtime orders a convolution's reduction by channel inside the window: any two weights may be neighbours.
        largest = np.abs(np.moveaxis(weight, axis or 0, 0).reshape(channels, -1)).max(axis=1)
        return np.asarray(largest * 2.0 / PAIR_LIMIT)
    pairs = _pairs(np.moveaxis(weight, reduction, -1))
    sums = np.maximum(np.maximum(pairs, 0.0).sum(axis=-1), np.maximum(-pairs, 0.0).sum(axis=-1)).max(axis=-1)
    if axis is None:
        return np.asarray([sums.max()]) / PAIR_LIMIT
    kept = [position for position in range(weight.ndim) if position != reduction]
    sums = np.moveaxis(sums, kept.index(axis), 0).reshape(channels, -1)
    return np.asarray(sums.max(axis=1) / PAIR_LIMIT)


def _pairs(weight: np.ndarray) -> np.ndarray:
    """(..., K) as (..., ceil(K / 2), 2), padded with 0."""
    size = weight.shape[-1]
    if size % 2:
        weight = np.concatenate([weight, np.zeros((*weight.shape[:-1], 1), weight.dtype)], axis=-1)
    return weight.reshape(*weight.shape[:-1], -1, 2)


def _reduction_axis(reader: ir.Node, index: int, rank: int) -> int | None:
    """Axis of a weight that the reader sums over; None for readers that sum nothing."""
    if is_onnx(reader, "MatMul") and rank >= 2:
        return rank - 2 if index == 1 else rank - 1
    if is_onnx(reader, "Gemm"):
        name = "transB" if index == 1 else "transA"
        transposed = reader.attributes.get(name)
        flipped = transposed is not None and bool(transposed.as_int())
        return (index == 1) == flipped
    return 1 if is_onnx(reader, "Conv") and index == 1 else None


def quantized(array: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, axis: int | None) -> np.ndarray:
    """The integers that QuantizeLinear makes of float numbers; where the scale is 0, the zero point."""
    spread, zero = (along(one, axis, array.ndim) for one in (scale, zero_point.astype(np.float32)))
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.rint(np.where(spread > 0, array / spread, 0.0)) + zero
    limits = np.iinfo(zero_point.dtype)
    return np.asarray(np.clip(levels, limits.min, limits.max), zero_point.dtype)


def _fold(model: ir.Model, node: ir.Node, integers: np.ndarray, scale: np.ndarray, shifted: np.ndarray | None) -> None:
    """Give the readers of `node` the integers and the scale, and drop the node.

    :param shifted: int8 zero points; where given, they and the integers become uint8, 128 higher.
    """
    arrays = {"folded": integers, "scale": scale}
    if shifted is not None:
        arrays = {"folded": raised(integers), "scale": scale, "zero_point": raised(shifted)}
    output = node.outputs[0]
    values = [_initializer(model, f"{tensor_name(output)}_{kind}", array) for kind, array in arrays.items()]
    for dequantize, _ in list(output.uses()):
        for place, value in enumerate(values):
            set_input(dequantize, place, value)
    model.graph.remove(node, safe=True)


def _initializer(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    made = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    made.dtype, made.shape = ir.DataType.from_numpy(array.dtype), ir.Shape(array.shape)
    model.graph.register_initializer(made)
    return made
