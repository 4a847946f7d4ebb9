"""Weights that the graph packs, slices or turns out of constants become constants: linears can be int8 only with those.

Exporters leave Concat(Wq, Wk, Wv) > Transpose or Split(in_proj_weight) in front of MatMul. Runtimes fold them when they load
a model; a quantizer has to see the weight itself.
"""

from collections.abc import Mapping, Set

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.dtypes import TypeMap, infer_types
from attnquant.graph import is_onnx, tensor_name
from attnquant.model import copy

_SEEN_THROUGH = ("Transpose", "Reshape", "Identity")
"""Moves of one constant that the host and `weights` follow by themselves; a tied weight stays one tensor behind them."""
_MOVES = (*_SEEN_THROUGH, "Concat", "Split", "Slice", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that hand on every value as it is and make nothing larger. Not Cast: a half precision file stays one."""
_INTEGERS = frozenset(
    {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.INT16, ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.BOOL}
)
_FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE})
_UNREPEATABLE = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial")


def fold_computed(model: ir.Model) -> ir.Model:
    """A copy in which float tensors moved out of constants are initializers; the model itself where there are none.

    Types are those of the data, bit for bit; nodes and constants that nothing reads any more are gone, every other node
    keeps its name, and initializers that something else reads stay as they are. Requires unique node names.

    :raises ModelError: ONNX Runtime can't compute the constants.
    """
    folded = copy(model)
    values = _ends(folded, infer_types(folded))
    if not values:
        return model
    arrays = _computed(folded, values)
    for value in values:
        _replace(folded.graph, value, arrays[tensor_name(value)])
    _drop_idle(folded.graph, {node.name for node in model.graph if _is_idle(node)})
    return folded


def _ends(model: ir.Model, types: TypeMap) -> list[ir.Value]:
    """Float tensors of the main graph that are moved out of constants and read by something that is not such a move."""
    constant: set[ir.Value] = {value for value in model.graph.initializers.values() if not value.is_graph_input()}
    moved: list[ir.Value] = []
    for node in model.graph:
        if not _is_foldable(node, constant, types):
            continue
        constant.update(node.outputs)
        moved.extend(value for value in node.outputs if types.dtype(value) in _FLOATS and not is_onnx(node, "Constant"))
    return [
        value
        for value in moved
        if not value.is_graph_output()
        and not _is_seen_through(value)
        and any(not any(output in constant for output in node.outputs) for node, _ in value.uses())
    ]


def _is_foldable(node: ir.Node, constant: Set[ir.Value], types: TypeMap) -> bool:
    """All inputs constant, and on float tensors nothing but a move; sizes may be computed by any operator."""
    if node.domain not in ("", "ai.onnx") or is_onnx(node, *_UNREPEATABLE, "If", "Loop", "Scan"):
        return False
    if not all(value is None or value in constant for value in node.inputs):
        return False
    floats = any(types.dtype(value) not in _INTEGERS for value in (*node.inputs, *node.outputs) if value is not None)
    return is_onnx(node, "Constant", "Shape", *_MOVES) or not floats


def _is_seen_through(value: ir.Value | None) -> bool:
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or not is_onnx(node, *_SEEN_THROUGH, "Constant"):
            return False
        value = node.inputs[0] if node.inputs else None
    return True


def _computed(model: ir.Model, values: list[ir.Value]) -> Mapping[str, np.ndarray]:
    """The values, by ONNX Runtime, from a copy that has nothing but what they are made of."""
    probe = copy(model)
    types = infer_types(probe)
    made = {tensor_name(value): value for node in probe.graph for value in node.outputs}
    probe.graph.outputs.clear()
    for value in values:
        output = made[tensor_name(value)]
        dtype = types.dtype(output)
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        probe.graph.outputs.append(output)
    for node in reversed(list(probe.graph)):
        if _is_idle(node):
            probe.graph.remove(node, safe=True)
    for name, item in list(probe.graph.initializers.items()):
        if not item.uses():
            del probe.graph.initializers[name]
    probe.graph.inputs.clear()
    return runtime.run(probe, {}, threads=1)


def _replace(graph: ir.Graph, value: ir.Value, array: np.ndarray) -> None:
    name = tensor_name(value)
    value.name = f"{name}.computed"
    tensor = ir.tensor(array, name=name)
    made = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(made)
    value.replace_all_uses_with(made)


def _is_idle(node: ir.Node) -> bool:
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def _drop_idle(graph: ir.Graph, before: Set[str | None]) -> None:
    """Remove the moves that nothing reads any more and the constants behind them; the nodes `before` were so before."""
    for node in reversed(list(graph)):
        if _is_idle(node) and node.name not in before:
            sources = [value for value in node.inputs if value is not None and value.is_initializer()]
            graph.remove(node, safe=True)
            for source in sources:
                if not source.uses() and not source.is_graph_input() and not source.is_graph_output():
                    graph.initializers.pop(tensor_name(source), None)
