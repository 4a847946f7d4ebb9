"""Signed int8 activations become uint8 with the zero point 128 higher: the same quantizer, in the form that x86 fuses.

ONNX Runtime on x86 has kernels for uint8 activations. It turns a signed pair into an unsigned one by itself only where the
quantized tensor has one reader; from opset 21 on a move between Q and DQ then does not even load (docs/targets.md).
"""

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, set_input
from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.target import Target

_RESHAPES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity")
MOVES = (*_RESHAPES, "Slice", "Gather", "Expand", "Split", "Concat")
"""Operators that hand integers on unchanged. Pad is not among them: it fills in a constant."""

_DATA = {"Concat": slice(None)}
"""Inputs that carry data, where not the first one alone."""


def apply(model: ir.Model, target: Target) -> int:
    """Shift the zero points of int8 activations, in place; returns how many QuantizeLinear changed.

    Requires: QuantizeLinear and DequantizeLinear of ai.onnx; zero points constant.
    Ensures: every quantizer rounds and clips the same real numbers as before. Weights on the right, graph outputs that are
    integers, and whatever an operator other than a move or DequantizeLinear reads as int8 stay signed.
    """
    editor = Editor(model)
    done: set[ir.Node] = set()
    changed = 0
    for node in list(model.graph):
        if node in done or not _is_signed_quantize(node):
            continue
        group = _group(node)
        done.update(group)
        if all(_is_shiftable(member) for member in group):
            for member in group:
                _shift(member, editor)
            changed += sum(is_onnx(member, "QuantizeLinear") for member in group)
    return changed + sum(shift_constant(node, editor) for node in list(model.graph) if _is_left_constant(node))


def raised(integers: np.ndarray) -> np.ndarray:
    """int8 integers or zero points as uint8, 128 higher."""
    return (integers.astype(np.int16) + 128).astype(np.uint8)


def _is_left_constant(node: ir.Node) -> bool:
    """int8 integers of a constant that MatMuls read on the left alone, where the kernel takes uint8: a constant query."""
    if not is_onnx(node, "DequantizeLinear"):
        return False
    integers, output = constant(node.inputs[0]), node.outputs[0]
    left = [is_onnx(use.node, "MatMul") and use.idx == 0 for use in output.uses()]
    return integers is not None and integers.dtype == np.int8 and bool(left) and all(left) and not output.is_graph_output()


def shift_constant(node: ir.Node, editor: Editor) -> bool:
    """Let a DequantizeLinear of int8 integers read them 128 higher, with a zero point 128 higher: the same numbers; True."""
    integers = constant(node.inputs[0])
    assert integers is not None
    set_input(node, 2, shifted_zero_point(node, editor))
    set_input(node, 0, editor.constant(raised(integers), f"{tensor_name(node.inputs[0])}_uint8"))
    return True


def _is_signed_quantize(node: ir.Node) -> bool:
    if not is_onnx(node, "QuantizeLinear") or constant(node.inputs[0]) is not None:
        return False
    zero_point = constant(node.inputs[2]) if len(node.inputs) > 2 else None
    if zero_point is not None:
        return zero_point.dtype == np.int8
    return node.attributes.get_int("output_dtype", 0) == ir.DataType.INT8


def _group(start: ir.Node) -> list[ir.Node]:
    """Every node that reads or makes integers connected to the output of `start`."""
    found = {start: None}
    waiting = [start]
    while waiting:
        for value in _integers(waiting.pop()):
            neighbours: Iterable[ir.Node | None] = (value.producer(), *(use.node for use in value.uses()))
            for other in neighbours:
                if other is not None and other not in found:
                    found[other] = None
                    waiting.append(other)
    return list(found)


def _integers(node: ir.Node) -> list[ir.Value]:
    """The int8 tensors at a node, as far as a group goes on there."""
    if is_onnx(node, "QuantizeLinear"):
        return list(node.outputs)
    if is_onnx(node, "DequantizeLinear"):
        return [value for value in node.inputs[:1] if value is not None]
    if is_onnx(node, *MOVES):
        return [value for value in (*_moved(node), *node.outputs) if value is not None]
    return []


def _moved(node: ir.Node) -> list[ir.Value | None]:
    return list(node.inputs[_DATA.get(node.op_type, slice(0, 1))])


def _is_shiftable(node: ir.Node) -> bool:
    if any(value.is_graph_output() for value in node.outputs if not is_onnx(node, "DequantizeLinear")):
        return False
    if is_onnx(node, "QuantizeLinear"):
        return _is_signed_quantize(node)
    if is_onnx(node, "DequantizeLinear"):
        return len(node.inputs) < 3 or node.inputs[2] is None or constant(node.inputs[2]) is not None
    # Integers from elsewhere (a constant, an input of the graph) can't be shifted here.
    return is_onnx(node, *MOVES) and all(value is not None and value.producer() is not None for value in _moved(node))


def _shift(node: ir.Node, editor: Editor) -> None:
    if is_onnx(node, "QuantizeLinear", "DequantizeLinear"):
        set_input(node, 2, shifted_zero_point(node, editor))
    if "output_dtype" in node.attributes and is_onnx(node, "QuantizeLinear"):
        node.attributes["output_dtype"] = ir.AttrInt64("output_dtype", ir.DataType.UINT8.value)
    if not is_onnx(node, "DequantizeLinear"):
        for value in node.outputs:
            value.type = ir.TensorType(ir.DataType.UINT8)


def shifted_zero_point(node: ir.Node, editor: Editor) -> ir.Value:
    """A zero point 128 higher than that of a QuantizeLinear or DequantizeLinear of int8."""
    old = node.inputs[2] if len(node.inputs) > 2 else None
    zero_point = constant(old)
    if zero_point is None:
        scale = constant(node.inputs[1])
        zero_point = np.zeros(() if scale is None else scale.shape, np.int8)
    return editor.constant(raised(zero_point), f"{tensor_name(old) or f'{node.name}_zero_point'}_uint8")
