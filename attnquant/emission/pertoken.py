"""Linears whose activations get a scale per token: rows are divided by their largest magnitude and multiplied back behind.

QuantizeLinear has no scale per row that is computed, but Linear(x) = m * Linear(x / m) for any factor m of a row. With m the
row's largest magnitude, the quantizer in between sees [-1, 1] whatever comes, and the product stays one of the int8 kernel.
"""

from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_reads, set_input
from attnquant.emission.linears import quantized_linears
from attnquant.graph import constant, is_onnx
from attnquant.model import opset

_LEAST = 2.0**-14
"""What a row is divided by at least: the smallest normal number of half precision, so that rows of zeros stay zeros."""
_SCALE = np.asarray(1 / 127, np.float32)


def scale_tokens(model: ir.Model, linears: Collection[str]) -> frozenset[str]:
    """Divide the rows of these MatMul and Gemm by their largest magnitude and multiply behind, in place.

    Requires: float32, node names unique, the weight on the right, no transA and beta 1.
    Ensures: the same real numbers; nodes keep their names; one division for all linears that read a tensor.

    :returns: names of the added nodes, which are to stay float.
    """
    editor = Editor(model)
    divided: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    added: list[ir.Node] = []
    for node in list(model.graph):
        value = node.inputs[0] if node.name in linears and is_onnx(node, "MatMul", "Gemm") else None
        if value is None:
            continue
        if value not in divided:
            divided[value] = _divided(value, node, editor, opset(model) or 0, added)
        rows, largest = divided[value]
        node.replace_input_with(0, rows)
        added += _behind(node, largest, editor)
    return frozenset(node.name or "" for node in added)


def settle_tokens(model: ir.Model, linears: Collection[str]) -> None:
    """Make a Q/DQ model that the host wrote from one of `scale_tokens` exact again, in place.

    SmoothQuant's factors behind a division go in front of it, where the largest magnitude is that of what is quantized and
    where they can be folded; the quantizers get the range [-1, 1] that they then see.

    Requires: weights folded to integers.
    """
    editor = Editor(model)
    scale = editor.constant(_SCALE, "per_token_scale")
    zero_point = editor.constant(np.zeros((), np.int8), "per_token_zero_point")
    for linear in quantized_linears(model):
        source = linear.activation.inputs[0]
        quantize = None if source is None else source.producer()
        if linear.node.name not in linears or quantize is None or not is_onnx(quantize, "QuantizeLinear"):
            continue
        if _hoisted(quantize, editor):
            for node in (quantize, linear.activation):
                set_input(node, 1, scale)
                set_input(node, 2, zero_point)
            quantize.outputs[0].type = ir.TensorType(ir.DataType.INT8)


def _hoisted(quantize: ir.Node, editor: Editor) -> bool:
    """Whether a division is what is quantized, once a constant factor in between has been put in front of it."""
    source = None if quantize.inputs[0] is None else quantize.inputs[0].producer()
    if source is not None and _magnitude(source) is not None:
        return True
    places = [place for place in (0, 1) if is_onnx(source, "Mul") and constant(source.inputs[place]) is not None]  # type: ignore[union-attr]
    if source is None or len(places) != 1:
        return False
    rows = source.inputs[1 - places[0]]
    divide = None if rows is None else rows.producer()
    magnitude = None if divide is None else _magnitude(divide)
    if rows is None or divide is None or magnitude is None or len(rows.uses()) != 1:
        return False
    replace_reads(source.outputs[0], rows)
    source.replace_input_with(1 - places[0], divide.inputs[0])
    editor.graph.remove(source)
    editor.graph.insert_before(magnitude, source)
    for node in (magnitude, divide):
        node.replace_input_with(0, source.outputs[0])
    return True


def _magnitude(divide: ir.Node) -> ir.Node | None:
    """The Abs of the same rows at the start of what a division by their largest magnitude reads; None for another node."""
    value = divide.inputs[1] if is_onnx(divide, "Div") else None
    for op_type in ("Max", "ReduceMax", "Abs"):
        node = None if value is None else value.producer()
        if node is None or not is_onnx(node, op_type):
            return None
        value = node.inputs[0]
    return node if value is divide.inputs[0] else None


def row_magnitudes(value: ir.Value, editor: Editor, version: int, *names: str) -> tuple[ir.Node, ir.Node]:
    """Abs and ReduceMax of these names: the largest magnitude of each row, the last axis kept; not yet in the graph.

    :param version: Of the opset.
    """
    magnitude = editor.make("Abs", [value], names[0], like=value)
    attributes = {"keepdims": ir.AttrInt64("keepdims", 1)}
    inputs: list[ir.Value | None] = [magnitude.outputs[0]]
    if version >= 18:
        inputs.append(editor.constant(np.array([-1]), "last_axis"))
    else:
        attributes["axes"] = ir.AttrInt64s("axes", [-1])
    most = editor.make("ReduceMax", inputs, names[1], attributes=attributes, like=value)
    if most.outputs[0].shape is not None:
        most.outputs[0].shape = ir.Shape([*most.outputs[0].shape.dims[:-1], 1])
    return magnitude, most


def _divided(
    value: ir.Value, reader: ir.Node, editor: Editor, version: int, added: list[ir.Node]
) -> tuple[ir.Value, ir.Value]:
    """(rows divided by their largest magnitude, these magnitudes with the last axis kept)."""
    name = f"{reader.name}/token"
    magnitude, most = row_magnitudes(value, editor, version, f"{name}/magnitude", f"{name}/most")
    least = editor.constant(np.asarray(_LEAST, np.float32), "least_magnitude")
    bounded = editor.make("Max", [most.outputs[0], least], f"{name}/largest", like=most.outputs[0])
    rows = editor.make("Div", [value, bounded.outputs[0]], f"{name}/divided", like=value)
    made = [magnitude, most, bounded, rows]
    editor.graph.insert_before(reader, made)
    added += made
    return rows.outputs[0], bounded.outputs[0]


def _behind(node: ir.Node, largest: ir.Value, editor: Editor) -> Iterator[ir.Node]:
    """Multiply the result of a linear, and add a Gemm's bias only then."""
    output = node.outputs[0]
    product = editor.make("Mul", [output, largest], f"{node.name}/token/product", like=output)
    made = [product]
    bias = node.inputs[2] if is_onnx(node, "Gemm") and len(node.inputs) > 2 else None
    if bias is not None:
        made.append(editor.make("Add", [product.outputs[0], bias], f"{node.name}/token/biased", like=output))
        node.resize_inputs(2)
    last = made[-1].outputs[0]
    replace_reads(output, last, but=made[:1])
    if output.is_graph_output():
        _hand_out(editor.graph, output, last)
    editor.graph.insert_after(node, made)
    yield from made


def _hand_out(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let `new` be the graph output in the place and under the name of `old`."""
    place = list(graph.outputs).index(old)
    graph.outputs[place] = new
    old.name, new.name = new.name, old.name
