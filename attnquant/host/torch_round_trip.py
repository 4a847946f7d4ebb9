"""QuantizeLinear and DequantizeLinear as one operator of torch, which torch.export keeps and the ONNX exporter writes."""

from typing import Any

import torch


@torch.library.custom_op("attnquant::round_trip", mutates_args=())  # type: ignore[untyped-decorator]
def _round_trip(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int) -> torch.Tensor:
    """QuantizeLinear and DequantizeLinear; only ever exported."""
    shape = [-1 if scale.ndim and position == axis else 1 for position in range(x.ndim)]
    limits = torch.iinfo(zero_point.dtype)
    step, zero = scale.reshape(shape), zero_point.to(torch.float32).reshape(shape)
    return (torch.clamp(torch.round(x / step) + zero, limits.min, limits.max) - zero) * step


@_round_trip.register_fake  # type: ignore[untyped-decorator]
def _(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.empty_like(x)


OPERATOR: Any = torch.ops.attnquant.round_trip.default
"""(x, scale (float32 scalar or vector), zero point (int8 or uint8, its shape), axis) -> x rounded, float32."""


def translations(opset: int) -> dict[Any, Any]:
    """What torch.onnx.export makes of the operator."""
    import onnxscript

    op = getattr(onnxscript, f"opset{opset}")

    def round_trip(x: Any, scale: Any, zero_point: Any, axis: int) -> Any:
        return op.DequantizeLinear(op.QuantizeLinear(x, scale, zero_point, axis=axis), scale, zero_point, axis=axis)

    return {OPERATOR: round_trip}
