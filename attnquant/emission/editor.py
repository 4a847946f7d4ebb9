"""Adding nodes and constants to a graph under free names. An initializer is never edited: something else may read it."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnquant.graph import bodies, tensor_name


def set_input(node: ir.Node, index: int, value: ir.Value | None) -> None:
    """Let a node read `value` at `index`; optional inputs in between are added as missing."""
    if index >= len(node.inputs):
        node.resize_inputs(index + 1)
    node.replace_input_with(index, value)


def replace_reads(old: ir.Value, new: ir.Value, *, but: Collection[ir.Node] = ()) -> None:
    """Let every reader of `old` except the nodes `but` read `new`. Graph outputs are not touched."""
    for use in tuple(old.uses()):
        if use.node not in but:
            use.node.replace_input_with(use.idx, new)


def replace_node(node: ir.Node, op_type: str, inputs: Sequence[ir.Value | None]) -> ir.Value:
    """Put an ai.onnx node in the place of one with one output, no graph's: the same name, the same readers; its output."""
    assert node.graph is not None
    new = ir.Node("", op_type, inputs, name=node.name)
    old, made = node.outputs[0], new.outputs[0]
    made.name, made.type, made.shape = old.name, old.type, old.shape
    node.graph.insert_before(node, new)
    replace_reads(old, made)
    node.graph.remove(node, safe=True)
    return made


class Editor:
    """Additions to the main graph of a model."""

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self._tensors: set[str] = set()
        self._nodes: set[str] = set()
        for _, body in bodies(model):
            self._tensors.update(tensor_name(value) for value in body.inputs)
            self._tensors.update(tensor_name(value) for node in body for value in node.outputs)
            self._nodes.update(node.name or "" for node in body)
            if isinstance(body, ir.Graph):
                self._tensors.update(body.initializers)
        self._shared: dict[tuple[str, str, tuple[int, ...], bytes], ir.Value] = {}

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """An initializer; one that was added before under the same name with the same content is used again."""
        array = np.ascontiguousarray(array).reshape(np.shape(array))
        key = (name, array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            self._shared[key] = self._add(array, _free(name, self._tensors))
        return self._shared[key]

    def before(
        self,
        reader: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        attributes: Mapping[str, ir.Attr] | None = None,
        like: ir.Value | None = None,
    ) -> ir.Value:
        """The output of a new ai.onnx node in front of `reader`; its type and shape are those of `like`."""
        node = self.make(op_type, inputs, name, attributes=attributes, like=like)
        self.graph.insert_before(reader, node)
        return node.outputs[0]

    def after(
        self, writer: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], name: str, *, like: ir.Value | None = None
    ) -> ir.Value:
        """The output of a new ai.onnx node right behind `writer`; its type and shape are those of `like`."""
        node = self.make(op_type, inputs, name, like=like)
        self.graph.insert_after(writer, node)
        return node.outputs[0]

    def same_shape(self, writer: ir.Node, value: ir.Value, name: str) -> ir.Value:
        """A Reshape of `value`, whose rank is known, to its own shape, right behind `writer`: no fusion sees through it."""
        assert value.shape is not None
        sizes = np.asarray([0] * (len(value.shape) - 1) + [-1], np.int64)
        shape = self.constant(sizes, f"same_shape_{len(value.shape)}")
        return self.after(writer, "Reshape", [value, shape], name, like=value)

    def make(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        attributes: Mapping[str, ir.Attr] | None = None,
        like: ir.Value | None = None,
    ) -> ir.Node:
        """A new ai.onnx node with one output, named after the node; the caller puts it into the graph."""
        node = ir.Node("", op_type, inputs, list((attributes or {}).values()), name=_free(name, self._nodes))
        output = node.outputs[0]
        output.name = _free(f"{node.name}_output", self._tensors)
        if like is not None:
            output.type, output.shape = like.type, None if like.shape is None else like.shape.copy()
        return node

    def switch(self, name: str) -> ir.Value:
        """A new input of the graph: one truth value, by which a Where chooses."""
        made = ir.Value(name=self.free_tensor(name), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        self.graph.inputs.append(made)
        return made

    def free_tensor(self, name: str) -> str:
        """A tensor name that is free, from now on taken."""
        return _free(name, self._tensors)

    def _add(self, array: np.ndarray, name: str) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        value = ir.Value(
            name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
        )
        self.graph.register_initializer(value)
        return value


def _free(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free
