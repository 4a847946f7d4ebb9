"""Nodes for one site, drafted beside the graph and put into it all at once, so that a refusal leaves the graph as it was."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor
from attnquant.graph import tensor_name

Operand = ir.Value | None


class Draft:
    """New nodes in front of `reader`, named after it. Operators are those of ai.onnx 13 and later."""

    def __init__(self, editor: Editor, reader: ir.Node, dtype: ir.DataType) -> None:
        self.editor, self.reader, self.dtype = editor, reader, dtype
        self.nodes: list[ir.Node] = []
        self.shared: dict[object, ir.Value] = {}
        """Tensors that other sites may read once this draft is in the graph."""
        self.notes: list[str] = []
        """What the caller should know of the result."""

    def op(self, op_type: str, inputs: Sequence[Operand], label: str, **attributes: Any) -> ir.Value:
        """The one output of a new node."""
        made = {item.name: item for item in ir.convenience.convert_attributes(attributes)}
        node = self.editor.make(op_type, inputs, f"{self.reader.name}/{label}", attributes=made)
        self.nodes.append(node)
        return node.outputs[0]

    def operator(
        self, domain: str, op_type: str, inputs: Sequence[Operand], label: str, *, outputs: int, **attributes: Any
    ) -> list[ir.Value]:
        """The outputs of a new node of any domain; missing inputs at the end are left away."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        self.op(op_type, given, label, **attributes)
        node = self.nodes[-1]
        node.domain = domain
        node.resize_outputs(outputs)
        for index, output in enumerate(node.outputs[1:], start=1):
            output.name = self.editor.free_tensor(f"{node.name}_output_{index}")
        return list(node.outputs)

    def clone(self, node: ir.Node, inputs: Sequence[Operand], label: str) -> ir.Value:
        """A node of one output like `node`, reading `inputs`."""
        made = self.editor.make(node.op_type, inputs, f"{self.reader.name}/{label}", attributes=node.attributes)
        made.domain = node.domain
        self.nodes.append(made)
        return made.outputs[0]

    def split(self, value: ir.Value, sizes: Sequence[int], axis: int, label: str) -> list[ir.Value]:
        """`value` cut into parts of these sizes."""
        first = self.op("Split", [value, self.ints(sizes, f"{label}_sizes")], label, axis=axis)
        node = self.nodes[-1]
        node.resize_outputs(len(sizes))
        for index, output in enumerate(node.outputs[1:], start=1):
            output.name = self.editor.free_tensor(f"{tensor_name(first)}_{index}")
        return list(node.outputs)

    def ints(self, values: Sequence[int], label: str) -> ir.Value:
        """A constant int64 vector."""
        return self.editor.constant(np.array(values, np.int64), f"{self.reader.name}/{label}")

    def integer(self, value: int, label: str) -> ir.Value:
        """A constant int64 scalar."""
        return self.editor.constant(np.array(value, np.int64), f"{self.reader.name}/{label}")

    def number(self, value: float, label: str, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant scalar of the attention's element type, or of another one."""
        return self.editor.constant(np.array(value, (dtype or self.dtype).numpy()), f"{self.reader.name}/{label}")

    def dim(self, value: ir.Value, axis: int, label: str) -> ir.Value:
        """The size of one axis as an int64 scalar."""
        shape = self.op("Shape", [value], f"{label}_shape")
        return self.op("Gather", [shape, self.integer(axis, f"{label}_axis")], label, axis=0)

    def dims(self, value: ir.Value, axis: int, label: str) -> ir.Value:
        """The size of one axis as an int64 vector of one element."""
        shape = self.op("Shape", [value], f"{label}_shape")
        return self.op("Gather", [shape, self.ints([axis], f"{label}_axis")], label, axis=0)

    def count(self, size: ir.Value, label: str) -> ir.Value:
        """0, 1, ... size - 1 as an int64 vector."""
        zero, one = self.integer(0, "zero"), self.integer(1, "one")
        return self.op("Range", [zero, size, one], label)

    def unsqueeze(self, value: ir.Value, axes: Sequence[int], label: str) -> ir.Value:
        return self.op("Unsqueeze", [value, self.ints(axes, f"{label}_axes")], label)

    def reshape(self, value: ir.Value, shape: Sequence[int], label: str) -> ir.Value:
        return self.op("Reshape", [value, self.ints(shape, f"{label}_shape")], label)

    def transpose(self, value: ir.Value, order: Sequence[int], label: str) -> ir.Value:
        return self.op("Transpose", [value], label, perm=list(order))

    def slice(self, value: ir.Value, start: int, end: int, axis: int, label: str) -> ir.Value:
        bounds = [self.ints([bound], f"{label}_{word}") for bound, word in ((start, "start"), (end, "end"), (axis, "axis"))]
        return self.op("Slice", [value, *bounds], label)

    def cast(self, value: ir.Value, dtype: ir.DataType, label: str) -> ir.Value:
        return self.op("Cast", [value], label, to=int(dtype))

    def put(self, made: Mapping[int, ir.Value]) -> None:
        """Put the nodes into the graph and `made` in the place of the reader's outputs, under their names; the reader goes.

        :param made: {output index of the reader: new tensor}; every output that is read or returned has to be in it.
        """
        graph, renamed = self.editor.graph, {}
        for index, value in made.items():
            old = self.reader.outputs[index]
            own = value.producer() in self.nodes and value not in renamed
            new = value if own else self.op("Identity", [value], f"output_{index}")
            renamed[new] = (tensor_name(old), old)
        graph.insert_before(self.reader, self.nodes)
        for value, (name, old) in renamed.items():
            value.type, value.shape = old.type, old.shape
            old.replace_all_uses_with(value, replace_graph_outputs=True)
            old.name, value.name = None, name
        graph.remove(self.reader, safe=True)
