"""Linears that a target computes in float whatever is quantized: known before calibration, so that they stay as they are."""

import onnx_ir as ir

from attnquant.emission.linears import MOVES
from attnquant.graph import constant, is_onnx
from attnquant.placement import KeptFloat
from attnquant.target import Target

LEFT = "weight on the left: no int8 kernel"
STACKED = "stacked weight: no int8 kernel with a scale per channel"
TRANSPOSED_CONVOLUTION = "transposed convolution: no int8 kernel"


def without_kernel(model: ir.Model, target: Target) -> tuple[KeptFloat, ...]:
    """Linears of a float model's main graph that the target can't execute in int8, and why.

    For ONNX Runtime on CPU these are products with the weight on the left, weights that are more than one matrix, and
    transposed convolutions (docs/targets.md). Other targets: none known.
    """
    if target.name != "onnxruntime-cpu":
        return ()
    found = ((node, _reason(node)) for node in model.graph)
    return tuple(KeptFloat(node=node.name or "", reason=reason) for node, reason in found if reason is not None)


def _reason(node: ir.Node) -> str | None:
    if is_onnx(node, "ConvTranspose"):
        return TRANSPOSED_CONVOLUTION
    if not is_onnx(node, "MatMul"):
        return None
    left, right = (_shape_of_constant(value) for value in node.inputs[:2])
    if left is not None and right is None:
        return LEFT
    if left is None and right is not None and any(size != 1 for size in right[:-2]):
        return STACKED
    return None


def _shape_of_constant(value: ir.Value | None) -> tuple[int, ...] | None:
    """Shape of a constant, as it arrives behind operators that move it; None for what is computed."""
    array = constant(value)
    if array is not None:
        return tuple(array.shape)
    node = None if value is None else value.producer()
    if value is None or node is None or not is_onnx(node, *MOVES):
        return None
    if _shape_of_constant(node.inputs[0]) is None or value.shape is None:
        return None
    sizes = [size for size in value.shape if isinstance(size, int)]
    return tuple(sizes) if len(sizes) == len(value.shape) else None
