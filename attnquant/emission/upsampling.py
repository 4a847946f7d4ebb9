"""Transposed convolutions whose kernel is a multiple of their stride become convolutions: the same sums, a faster kernel.

Each of the stride x stride phases of the output is a convolution of its own with a part of the kernel. One Conv computes
them all as channels, DepthToSpace interleaves them, Slice crops the padding. A BatchNormalization behind goes into the
weights and an activation stays behind the Conv, where the runtime fuses it: it fuses neither with ConvTranspose. The idea is
that of sub-pixel convolution (Shi et al., arXiv:1609.05158 and 1609.07009).
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.emission.clean import drop_dead_initializers
from attnquant.emission.editor import Editor, replace_reads
from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.model import copy
from attnquant.target import Target

_ACTIVATIONS = ("Relu", "LeakyRelu")
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16))


def as_convolutions(model: ir.Model, target: Target) -> ir.Model:
    """A copy with such transposed convolutions of the main graph rewritten; the model itself where there are none.

    The Conv takes the node's name, the last tensor of the chain keeps its own. Written out are two-dimensional ones without
    groups and dilations, equal strides, constant weights. Targets other than ONNX Runtime on CPU keep the operator.

    Requires: unique node names. Ensures: the same function up to the order of the sums.
    """
    if target.name != "onnxruntime-cpu" or not any(_read(node) for node in model.graph):
        return model
    changed = copy(model)
    editor = Editor(changed)
    for node in list(changed.graph):
        if (found := _read(node)) is not None:
            _rewrite(found, editor)
    drop_dead_initializers(changed)
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Upsampling:
    """A transposed convolution and what is computed with it."""

    node: ir.Node
    weight: np.ndarray
    """(in, out, taps * stride, taps * stride)"""
    bias: np.ndarray
    """(out,)"""
    stride: int
    crop: tuple[int, int, int, int]
    """Rows and columns to drop: at the beginning of both axes, then at their ends."""
    normalization: ir.Node | None
    activation: ir.Node | None

    @property
    def last(self) -> ir.Node:
        """The node whose result the rest of the graph reads."""
        return self.activation or self.normalization or self.node


def _read(node: ir.Node) -> _Upsampling | None:
    weight = _weight(node)
    if weight is None:
        return None
    stride = node.attributes.get_ints("strides", (1, 1))[0]
    crop = _crop(node)
    bias = constant(node.inputs[2]) if _has_bias(node) else np.zeros(weight.shape[1], weight.dtype)
    if bias is None or min(crop) < 0:
        return None
    normalization = _alone_behind(node, "BatchNormalization")
    if normalization is not None and not _is_fixed(normalization):
        normalization = None
    activation = _alone_behind(normalization or node, *_ACTIVATIONS)
    return _Upsampling(
        node=node, weight=weight, bias=bias, stride=stride, crop=crop, normalization=normalization, activation=activation
    )


def _weight(node: ir.Node) -> np.ndarray | None:
    """The constant weight of a transposed convolution that splits into whole phases."""
    weight = constant(node.inputs[1]) if is_onnx(node, "ConvTranspose") else None
    if weight is None or weight.ndim != 4 or weight.dtype not in _FLOATS:
        return None
    attributes = node.attributes
    if attributes.get_string("auto_pad", "NOTSET") != "NOTSET" or "output_shape" in attributes:
        return None
    if attributes.get_int("group", 1) != 1 or tuple(attributes.get_ints("dilations", (1, 1))) != (1, 1):
        return None
    stride, other = attributes.get_ints("strides", (1, 1))
    return None if stride < 2 or other != stride or any(size % stride for size in weight.shape[2:]) else weight


def _has_bias(node: ir.Node) -> bool:
    return len(node.inputs) > 2 and node.inputs[2] is not None


def _crop(node: ir.Node) -> tuple[int, int, int, int]:
    top, left, bottom, right = node.attributes.get_ints("pads", (0, 0, 0, 0))
    more = node.attributes.get_ints("output_padding", (0, 0))
    return top, left, bottom - more[0], right - more[1]


def _alone_behind(node: ir.Node, *op_types: str) -> ir.Node | None:
    value = node.outputs[0]
    uses = tuple(value.uses())
    alone = len(uses) == 1 and uses[0].idx == 0 and not value.is_graph_output() and uses[0].node.graph is node.graph
    return uses[0].node if alone and is_onnx(uses[0].node, *op_types) else None


def _is_fixed(node: ir.Node) -> bool:
    """Whether a BatchNormalization is a constant factor and addend."""
    training = node.attributes.get_int("training_mode", 0)
    return not training and len(node.outputs) == 1 and all(constant(value) is not None for value in node.inputs[1:5])


def _rewrite(found: _Upsampling, editor: Editor) -> None:
    node, stride = found.node, found.stride
    weight, bias = _phases(*_normalized(found), stride)
    taps = [size // stride for size in found.weight.shape[2:]]
    attributes = [ir.AttrInt64s("kernel_shape", taps), ir.AttrInt64s("pads", [size - 1 for size in taps] * 2)]
    name = node.name or ""
    constants = (weight, f"{tensor_name(node.inputs[1])}_phases"), (bias, f"{name}_bias_phases")
    operands = (node.inputs[0], *(editor.constant(array, called) for array, called in constants))
    made = [ir.Node("", "Conv", operands, attributes, name=name)]
    made[0].outputs[0].name = editor.free_tensor(f"{name}/phases")
    if found.activation is not None:
        slopes = found.activation.attributes.values()
        made.append(ir.Node("", found.activation.op_type, made[0].outputs, slopes, name=found.activation.name))
        made[1].outputs[0].name = editor.free_tensor(f"{found.activation.name}/phases")
    interleave = {"blocksize": ir.AttrInt64("blocksize", stride), "mode": ir.AttrString("mode", "CRD")}
    made.append(editor.make("DepthToSpace", made[-1].outputs, f"{name}/interleave", attributes=interleave))
    if any(found.crop):
        made.append(editor.make("Slice", [made[-1].outputs[0], *_bounds(found.crop, editor)], f"{name}/crop"))
    _put(made, found, editor)


def _put(made: list[ir.Node], found: _Upsampling, editor: Editor) -> None:
    """The new nodes in place of the old; the last tensor takes the old one's name, type, shape and readers."""
    old, new = found.last.outputs[0], made[-1].outputs[0]
    new.type, new.shape = old.type, None if old.shape is None else old.shape.copy()
    for node in made:
        if node.outputs[0] is not new:
            node.outputs[0].type = old.type
        editor.graph.insert_before(found.last, node)
    replace_reads(old, new)
    for index, output in enumerate(editor.graph.outputs):
        if output is old:
            editor.graph.outputs[index] = new
    gone = [node for node in (found.activation, found.normalization, found.node) if node is not None]
    name = old.name
    for node in gone:
        editor.graph.remove(node, safe=True)
    old.name, new.name = f"{name}/replaced", name


def _normalized(found: _Upsampling) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias with the normalization in them, computed in double precision."""
    if found.normalization is None:
        return found.weight, found.bias
    scale, shift, mean, variance = (
        np.asarray(constant(value), np.float64) for value in found.normalization.inputs[1:5]
    )
    factor = scale / np.sqrt(variance + found.normalization.attributes.get_float("epsilon", 1e-5))
    weight = (found.weight * factor[None, :, None, None]).astype(found.weight.dtype)
    return weight, ((found.bias - mean) * factor + shift).astype(found.weight.dtype)


def _phases(weight: np.ndarray, bias: np.ndarray, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Weight (out * stride², in, taps, taps) and bias of the convolution; phases of a channel lie side by side.

    Output row stride * i + phase takes input row i - tap times kernel row phase + stride * tap.
    """
    inputs, outputs, rows, columns = weight.shape
    split = weight.reshape(inputs, outputs, rows // stride, stride, columns // stride, stride)
    turned = split[:, :, ::-1, :, ::-1, :].transpose(1, 3, 5, 0, 2, 4)
    shape = (outputs * stride**2, inputs, rows // stride, columns // stride)
    return np.ascontiguousarray(turned).reshape(shape), np.repeat(bias, stride**2)


def _bounds(crop: tuple[int, int, int, int], editor: Editor) -> tuple[ir.Value, ir.Value, ir.Value]:
    beyond = np.iinfo(np.int64).max
    ends = [-size if size else beyond for size in crop[2:]]
    return (
        editor.constant(np.asarray(crop[:2], np.int64), "crop_starts"),
        editor.constant(np.asarray(ends, np.int64), "crop_ends"),
        editor.constant(np.asarray([2, 3], np.int64), "crop_axes"),
    )
