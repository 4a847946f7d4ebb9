"""Weights that came as int8 and could overflow a kernel become uint8 with a zero point 128 higher: the same numbers, exact.

Weights that attnquant quantizes itself get scales at which nothing overflows (`weights`). Integers of somebody else use all
8 bits and keep their scales: on x86 CPUs without VNNI their products with uint8 activations saturate in 16 bits, those of
uint8 weights do not, at the same speed (docs/torch.md). A table that is a linear's weight too (tied embeddings) stays one
tensor: its rows are read 128 higher as well.
"""

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_reads, set_input
from attnquant.emission.linears import dequantize_behind
from attnquant.emission.unsigned import raised, shift_constant, shifted_zero_point
from attnquant.emission.weights import PAIR_LIMIT, channel_axis, needed_behind
from attnquant.graph import constant, is_blocked, is_onnx, tensor_name
from attnquant.target import Target

_LARGEST = PAIR_LIMIT + 1.0
"""Sum of two integers of one sign from which on a product saturates: 255 * 129 is above 2^15."""


def apply(model: ir.Model, target: Target) -> int:
    """Make int8 weights uint8 where a product with a quantized activation could saturate, in place; returns how many.

    Nothing changes where the CPU is known to have VNNI: there the kernels of both types are exact.
    Requires: weights folded, tables of Gather read as integers.
    Ensures: the same real numbers, bit for bit. A tensor that anything reads but DequantizeLinear, at once or behind Gather,
    and Gather with a Cast to float32, stays as it is, so that no weight is stored twice.
    """
    if target.vnni:
        return 0
    editor = Editor(model)
    changed = 0
    for value in list(model.graph.initializers.values()):
        if value.dtype != ir.DataType.INT8 or value.is_graph_input() or value.is_graph_output():
            continue
        readers = [use.node for use in value.uses() if use.idx == 0]
        weights = [node for node in readers if _is_plain(node, model.graph)]
        tables = [node for node in readers if _is_table(node, model.graph)]
        if len(weights) + len(tables) == len(value.uses()) and any(_overflows(node) for node in weights):
            changed += sum(shift_constant(node, editor) for node in weights)
            for gather in tables:
                _shift_rows(gather, editor)
    return changed


def _is_table(node: ir.Node, graph: ir.Graph) -> bool:
    """Gather of the main graph whose rows are dequantized, or cast to float32 and multiplied by scales of their own."""
    rows = node.outputs[0]
    return is_onnx(node, "Gather") and node.graph is graph and not rows.is_graph_output() and all(
        use.idx == 0 and (_is_dequantized(use.node, graph) or _is_cast(use.node, graph)) for use in rows.uses()
    )  # fmt: skip


def _is_dequantized(node: ir.Node, graph: ir.Graph) -> bool:
    return _is_plain(node, graph) and constant(node.inputs[1]) is not None


def _is_cast(node: ir.Node, graph: ir.Graph) -> bool:
    wanted = is_onnx(node, "Cast") and node.attributes.get_int("to", 0) == ir.DataType.FLOAT
    return wanted and node.graph is graph and not node.outputs[0].is_graph_output()


def _shift_rows(gather: ir.Node, editor: Editor) -> None:
    """Let a Gather read the integers 128 higher, and what reads its rows subtract that."""
    table, rows = gather.inputs[0], gather.outputs[0]
    integers = constant(table)
    assert integers is not None
    set_input(gather, 0, editor.constant(raised(integers), f"{tensor_name(table)}_uint8"))
    rows.type = ir.TensorType(ir.DataType.UINT8)
    for use in tuple(rows.uses()):
        if is_onnx(use.node, "DequantizeLinear"):
            set_input(use.node, 2, shifted_zero_point(use.node, editor))
            continue
        wide, offset = use.node.outputs[0], editor.constant(np.asarray(128, np.float32), f"{gather.name}_offset")
        lower = editor.make("Sub", [wide, offset], f"{gather.name}/signed", like=wide)
        editor.graph.insert_after(use.node, lower)
        replace_reads(wide, lower.outputs[0], but={lower})


def _is_plain(node: ir.Node, graph: ir.Graph) -> bool:
    """DequantizeLinear of the main graph with a constant zero point, or none."""
    zero_point = node.inputs[2] if len(node.inputs) > 2 else None
    known = zero_point is None or constant(zero_point) is not None
    return is_onnx(node, "DequantizeLinear") and node.graph is graph and not is_blocked(node) and known


def _overflows(node: ir.Node) -> bool:
    integers, scale = constant(node.inputs[0]), constant(node.inputs[1])
    if integers is None or scale is None or integers.ndim < 2:
        return False
    numbers = integers.astype(np.float32)
    found = needed_behind(node.outputs[0], numbers, channel_axis(node, numbers, scale))
    return any(np.any(needed * PAIR_LIMIT > _LARGEST) for reader, index, needed in found if _is_quantized(reader, index))


def _is_quantized(reader: ir.Node, index: int) -> bool:
    """Whether the other operand of a product with a weight is quantized: without, the kernel is another."""
    return dequantize_behind(reader.inputs[0 if is_onnx(reader, "Conv") else 1 - index]) is not None
