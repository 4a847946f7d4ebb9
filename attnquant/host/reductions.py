"""NNCF's reducers as ONNX nodes: what they make of a tensor is computed in the graph, and the tensor stays there."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from nncf.common.tensor_statistics import collectors as host
from nncf.tensor import Tensor

from attnquant.emission.editor import Editor
from attnquant.graph import tensor_name
from attnquant.host.known import Reduction

_AXES_AS_INPUT = 18
"""The opset from which ReduceMin, ReduceMax and ReduceMean take their axes as an input (onnx, Changelog.md)."""
_DTYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_REDUCERS: dict[type[host.TensorReducerBase], str] = {
    host.MinReducer: "ReduceMin",
    host.MaxReducer: "ReduceMax",
    host.AbsMaxReducer: "ReduceMax",
    host.MeanReducer: "ReduceMean",
    host.BatchMeanReducer: "ReduceMean",
    host.MeanPerChReducer: "ReduceMean",
    host.ShapeReducer: "Shape",
}


def reduction(reducer: host.TensorReducerBase, dtype: ir.DataType | None, rank: int | None) -> Reduction | None:
    """The node that computes what `reducer` computes of a tensor, None where it isn't known.

    Minima and maxima are the same to the last bit, except that NaN are passed over; means differ by the order of their sum.

    :param dtype: Element type of the tensor; None if unknown.
    :param rank: Its rank; None if unknown: then only reductions whose axes don't depend on it are found.
    """
    op_type = _REDUCERS.get(type(reducer))
    if op_type == "Shape":
        return Reduction(op_type="Shape")
    if op_type is None or reducer.inplace or dtype not in _DTYPES:
        return None
    if isinstance(reducer, host.BatchMeanReducer):
        return Reduction(op_type=op_type, axes=(0,)) if rank else None
    if isinstance(reducer, host.MeanPerChReducer):
        return _mean_per_channel(reducer._channel_axis, rank)
    absolute = isinstance(reducer, host.AbsMaxReducer)
    axes = reducer._axes
    if axes is not None and reducer._axes_mode != host.AxesMode.REDUCTION:
        if rank is None or any(not -rank <= axis < rank for axis in axes):
            return None
        axes = host.determine_reduction_axes(rank, axes, reducer._axes_mode)
    if axes is not None:
        axes = tuple(sorted(axes))
    # No axes to reduce: the result is the tensor itself.
    return None if axes == () else Reduction(op_type=op_type, axes=axes, absolute=absolute)


def _mean_per_channel(axis: int, rank: int | None) -> Reduction | None:
    """nncf.common.tensor_statistics.statistical_functions.mean_per_channel."""
    if not rank:
        return None
    if rank < 3:
        return Reduction(op_type="ReduceMean", axes=(0,), keepdims=False)
    if not -rank <= axis < rank:
        return None
    axes = tuple(place for place in range(rank) if place != axis % rank)
    return Reduction(op_type="ReduceMean", axes=axes, keepdims=False)


def settled(reducer: host.TensorReducerBase, array: np.ndarray) -> list[Tensor]:
    """What the reducer gives where its node gave `array`."""
    if isinstance(reducer, host.ShapeReducer):
        array = array.astype(np.int32)
    return [Tensor(array)]


class Reductions:
    """Adds reductions at the end of a model's main graph, each once."""

    def __init__(self, model: ir.Model) -> None:
        self._editor = Editor(model)
        self._opset = model.opset_imports.get("", 1)
        self._made: dict[tuple[str, Reduction | str], ir.Value] = {}

    def of(self, value: ir.Value, wanted: Reduction) -> ir.Value:
        """The output of the node that reduces `value`."""
        key = (tensor_name(value), wanted)
        if key not in self._made:
            self._made[key] = self._reduced(value, wanted)
        return self._made[key]

    def _reduced(self, value: ir.Value, wanted: Reduction) -> ir.Value:
        if wanted.op_type == "Shape":
            return self._node("Shape", [value], {}, ir.DataType.INT64)
        if wanted.absolute:
            value = self._absolute(value)
        inputs = [value]
        attributes = {"keepdims": ir.AttrInt64("keepdims", int(wanted.keepdims))}
        if wanted.axes is not None and self._opset < _AXES_AS_INPUT:
            attributes["axes"] = ir.AttrInt64s("axes", wanted.axes)
        elif wanted.axes is not None:
            inputs.append(self._editor.constant(np.asarray(wanted.axes, np.int64), "reduced_axes"))
        return self._node(wanted.op_type, inputs, attributes, value.dtype)

    def _absolute(self, value: ir.Value) -> ir.Value:
        key = (tensor_name(value), "Abs")
        if key not in self._made:
            self._made[key] = self._node("Abs", [value], {}, value.dtype)
        return self._made[key]

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value], attributes: Mapping[str, ir.Attr], dtype: ir.DataType | None
    ) -> ir.Value:
        node = self._editor.make(op_type, inputs, f"{op_type}_of_{tensor_name(inputs[0])}", attributes=attributes)
        node.outputs[0].type = None if dtype is None else ir.TensorType(dtype)
        self._editor.graph.append(node)
        return node.outputs[0]
