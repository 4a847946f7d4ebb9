"""A second writing of one attention beside the first, in the same graph and from the same inputs.

The float twin reads what stands in front of the quantizers; the rounded twin reads Q and K rounded to 8 bits with the
range of the very sample. What the model's attention differs from the float twin is its own error, whatever came in from
earlier layers; what the rounded twin differs from it is what 8 bits cost here at least.
"""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attnquant.audit.flow import MOVES, SCALES, Flow, carried, is_dequantize
from attnquant.dtypes import TypeMap
from attnquant.emission.editor import Editor
from attnquant.graph import is_onnx

_STEPS = 127
"""Steps from zero to the end of a symmetric 8-bit range."""
_DEPTH = 300
"""How far a twin follows moves; further back a quantizer is another node's business."""


def region(context: ir.Value, operands: frozenset[ir.Value]) -> frozenset[ir.Node]:
    """The nodes on a way from an operand to the context; not masks and shapes, which depend on no operand."""
    behind: dict[ir.Node, bool] = {}
    waiting = [node for node in (context.producer(),) if node is not None]
    order: list[ir.Node] = []
    while waiting:
        node = waiting.pop()
        if node in behind:
            continue
        behind[node] = False
        order.append(node)
        waiting += [
            maker for value in node.inputs
            if value is not None and value not in operands and (maker := value.producer()) is not None
        ]  # fmt: skip
    inside: set[ir.Node] = set()
    ready = [use.node for value in operands for use in value.uses()]
    while ready:
        node = ready.pop()
        if node in behind and node not in inside:
            inside.add(node)
            ready += [use.node for output in node.outputs for use in output.uses() if output not in operands]
    return frozenset(inside)


class Twins:
    """Writes one attention again, in front of whose operands something is changed."""

    def __init__(
        self, editor: Editor, flow: Flow, inside: frozenset[ir.Node], changed: Mapping[ir.Value, ir.Value] | None = None
    ) -> None:
        self._editor, self._flow, self._inside = editor, flow, inside
        self._made: dict[ir.Value, ir.Value] = dict(changed or {})
        self.bypassed = 0
        """Quantizers that were left out."""

    def of(self, value: ir.Value, depth: int = 0) -> ir.Value:
        """The twin of a tensor: the tensor itself where nothing of it changes."""
        if value in self._made:
            return self._made[value]
        node = value.producer()
        if node is None or depth > _DEPTH or not self._flow.is_data(value):
            return value
        made = value
        if is_dequantize(node):
            hit = self._flow.origin(node)
            if hit is not None and hit.quantize is not None:
                self.bypassed += 1
                made = self._in_front(node.inputs[0], hit.quantize, depth)
        elif node in self._inside or is_onnx(node, *MOVES) or self._scales(node):
            inputs = self._inputs(node, depth)
            if inputs != list(node.inputs):
                outputs = self._copy(node, inputs)
                self._made.update(zip(node.outputs, outputs, strict=True))
                made = outputs[value.index() or 0]
        self._made[value] = made
        return made

    def _scales(self, node: ir.Node) -> bool:
        return is_onnx(node, *SCALES) and sum(self._flow.is_data(value) for value in node.inputs) == 1

    def _inputs(self, node: ir.Node, depth: int) -> list[ir.Value | None]:
        carrying = set(carried(node)) if is_onnx(node, *MOVES) and node not in self._inside else set(range(len(node.inputs)))
        return [
            self.of(value, depth + 1) if value is not None and index in carrying else value
            for index, value in enumerate(node.inputs)
        ]

    def _in_front(self, integers: ir.Value | None, quantize: ir.Node, depth: int) -> ir.Value:
        """What a quantizer reads, with the moves between it and its dequantizer."""
        source = quantize.inputs[0]
        assert source is not None
        node = None if integers is None else integers.producer()
        if node is None or node is quantize or integers is None:
            return self.of(source, depth + 1)
        moved = self._in_front(node.inputs[0], quantize, depth + 1)
        return self._copy(node, [moved, *node.inputs[1:]])[integers.index() or 0]

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None]) -> list[ir.Value]:
        copy = ir.Node(
            node.domain, node.op_type, inputs, list(node.attributes.values()), overload=node.overload,
            num_outputs=len(node.outputs),
        )  # fmt: skip
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name = self._editor.free_tensor(f"{old.name}/twin") if old.name else ""
        copy.name = next(new.name for new in copy.outputs if new.name)
        self._editor.graph.append(copy)
        return list(copy.outputs)


def rounded(editor: Editor, types: TypeMap, value: ir.Value) -> ir.Value:
    """A tensor rounded to 8 bits, symmetric, one scale, the range that of its largest absolute value in the sample."""
    dtype = types.dtype(value) or value.dtype or ir.DataType.FLOAT

    def op(op_type: str, inputs: list[ir.Value], **attributes: int) -> ir.Value:
        made = {name: ir.AttrInt64(name, number) for name, number in attributes.items()}
        node = editor.make(op_type, inputs, "attnquant_rounded", attributes=made)
        editor.graph.append(node)
        return node.outputs[0]

    wide = value if dtype == ir.DataType.FLOAT else op("Cast", [value], to=int(ir.DataType.FLOAT))
    largest = op("ReduceMax", [op("Abs", [wide])], keepdims=0)
    step = op("Div", [largest, editor.constant(np.array(_STEPS, np.float32), "attnquant_steps")])
    step = op("Max", [step, editor.constant(np.array(np.finfo(np.float32).tiny, np.float32), "attnquant_least")])
    result = op("Mul", [op("Round", [op("Div", [wide, step])]), step])
    return result if dtype == ir.DataType.FLOAT else op("Cast", [result], to=int(dtype))
