"""Linears that a target computes in float whatever is quantized: known before calibration, so that they stay as they are."""

from collections.abc import Container

import onnx_ir as ir

from attnquant.emission import interleaves
from attnquant.emission.clips import CLIPS
from attnquant.emission.linears import MOVES
from attnquant.graph import constant, is_constant, is_onnx
from attnquant.placement import KeptFloat
from attnquant.target import Target

LEFT = "weight on the left: no int8 kernel"
STACKED = "stacked weight: no int8 kernel with a scale per channel"
TRANSPOSED_CONVOLUTION = "transposed convolution: no int8 kernel"
COMPUTED = "weight computed from constants: the runtime folds it in float"
CONVOLUTION = "convolution whose result is not quantized: no int8 kernel"

_TYPES = ("Cast", "QuantizeLinear", "DequantizeLinear")
_QUANTIZED = ("MatMul", "Gemm", "Add", "MaxPool", "AveragePool", "GlobalAveragePool", "Concat", "Resize")
"""Readers in front of which the host puts a quantizer, beside convolutions."""
_CARRIED = (*CLIPS, *interleaves.MOVES)
"""What the quantizer of a convolution's result may stand behind: it ends up right behind the convolution and its Clip."""


def without_kernel(model: ir.Model, target: Target) -> tuple[KeptFloat, ...]:
    """Linears of a float model's main graph that the target can't execute in int8, and why.

    For ONNX Runtime on CPU these are products with the weight on the left, weights that are more than one matrix or that
    the graph computes (a projected table of positions), transposed convolutions, and convolutions whose result goes
    elsewhere than into other quantized linears: their kernel takes integers and gives integers (docs/targets.md). Other
    targets: none known.
    """
    if target.name != "onnxruntime-cpu":
        return ()
    reasons = {node: reason for node in model.graph if (reason := _reason(node)) is not None}
    convolutions = [node for node in model.graph if is_onnx(node, "Conv")]
    while lonely := [node for node in convolutions if node not in reasons and not _feeds_quantizers(node, reasons)]:
        reasons.update(dict.fromkeys(lonely, CONVOLUTION))
    return tuple(KeptFloat(node=node.name or "", reason=reasons[node]) for node in model.graph if node in reasons)


def _feeds_quantizers(node: ir.Node, left_alone: Container[ir.Node]) -> bool:
    """Whether every reader of a convolution, behind a Relu, Clip or crop or not, is a linear that is quantized."""
    value = node.outputs[0]
    while len(readers := _readers(value)) == 1 and is_onnx(readers[0], *_CARRIED) and not value.is_graph_output():
        value = readers[0].outputs[0]
    if not readers or value.is_graph_output():
        return False
    return all(is_onnx(reader, "Conv", *_QUANTIZED) and reader not in left_alone for reader in readers)


def _readers(value: ir.Value) -> list[ir.Node]:
    """What reads the numbers of a tensor."""
    return [use.node for use in value.uses() if not is_onnx(use.node, "Shape")]


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
    if [is_constant(value) for value in node.inputs[:2]] == [False, True] and _is_computed(node.inputs[1]):
        return COMPUTED
    return None


def _is_computed(value: ir.Value | None) -> bool:
    """Whether more than moves and changes of type lies between a constant weight and its product."""
    while value is not None and constant(value) is None and is_onnx(value.producer(), *MOVES, *_TYPES):
        node = value.producer()
        value = None if node is None else node.inputs[0]
    return value is not None and constant(value) is None


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
