"""Opsets within which a quantized model is valid and a target takes it."""

import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.graph import bodies, constant, is_onnx
from attnquant.model import opset
from attnquant.target import Target

PER_CHANNEL = 13
"""The first opset whose DequantizeLinear has an axis."""
HALF_SCALES = 19
"""The first opset whose DequantizeLinear takes a half precision scale."""


def apply(model: ir.Model, target: Target) -> int:
    """Check the model's opset against its quantizers and the target; changes nothing and returns 0.

    :raises ModelError: the target does not load the opset, or the opset lacks the quantizers; the message names a node.
    """
    version = opset(model)
    if version is None:
        return 0
    if target.max_opset is not None and version > target.max_opset:
        msg = (
            f"The model uses opset {version}; {target} loads opset {target.max_opset} at most. Export the model at opset "
            f"{target.max_opset} or earlier, or use a newer runtime."
        )
        raise ModelError(msg)
    for _, body in bodies(model):
        for node in body:
            if is_onnx(node, "QuantizeLinear", "DequantizeLinear"):
                _check(node, version)
    return 0


def _check(node: ir.Node, version: int) -> None:
    scale = node.inputs[1]
    array = constant(scale)
    needed, what = 10, "a scale per tensor"
    if array is not None and array.size > 1:
        needed, what = PER_CHANNEL, "a scale per channel"
    if scale is not None and scale.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        needed, what = HALF_SCALES, f"a scale of type {scale.dtype.name}"
    if version < needed:
        msg = (
            f"Node {node.name!r} ({node.op_type}) has {what}, which needs opset {needed}; the model uses opset {version}. "
            f"Export the model at opset {needed} or later."
        )
        raise ModelError(msg)
