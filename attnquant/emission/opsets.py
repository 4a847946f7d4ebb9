"""Opsets within which a quantized model is valid and a target takes it."""

import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.graph import bodies, constant, is_onnx
from attnquant.model import opset
from attnquant.target import Target, release

PER_CHANNEL = 13
"""The first opset whose DequantizeLinear has an axis."""
HALF_SCALES = 19
"""The first opset whose DequantizeLinear takes a half precision scale."""
INLINED_SINCE, INLINED_FROM = (1, 32), 25
"""ONNX Runtime and opset from which on ai.onnx Attention has no CPU kernel (measured with 1.32.0; 1.31.1 has one)."""


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


def notes(model: ir.Model, target: Target) -> tuple[str, ...]:
    """A sentence where the target runs an operator of this opset slowly. Nothing is changed."""
    version = opset(model) or 0
    if target.name != "onnxruntime-cpu" or release(target.version) < INLINED_SINCE or version < INLINED_FROM:
        return ()
    count = sum(is_onnx(node, "Attention") for _, body in bodies(model) for node in body)
    if not count:
        return ()
    return (
        f"{target} has no kernel for Attention of opset {version} and inlines all {count} of them: 1.8 to 3.3 times slower. "
        f"Export the model at opset 23 or 24.",
    )


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
