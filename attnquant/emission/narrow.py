"""Back from a quantized float32 twin to the half precision of the original.

Each port of each node has a type it needs: what it had in the original, float32 in an island, and what flows in for nodes
that quantization added. Where a tensor and a port differ, one Cast per tensor and type is put behind the tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnquant.dtypes import HALF, TypeMap, infer_types, type_string
from attnquant.emission.clean import drop_dead_initializers
from attnquant.emission.islands import islands
from attnquant.emission.widen import PREFIX, Key, NodeTypes, WidenRecord
from attnquant.graph import bodies, is_onnx, tensor_name
from attnquant.model import copy
from attnquant.schemas import signature
from attnquant.target import Target

Use = tuple[ir.Node, int]

_FLOAT = ir.DataType.FLOAT
_NUMPY = {ir.DataType.FLOAT16: np.float16, ir.DataType.BFLOAT16: ml_dtypes.bfloat16, _FLOAT: np.float32}
_LARGEST = {ir.DataType.FLOAT16: 65504.0, ir.DataType.BFLOAT16: 2.0**127 * (2 - 2.0**-7)}
_OPSET_OF_HALF_SCALES = 19
_SCALE_TOLERANCE = 2.0**-8
"""Largest relative error of a scale rounded to half precision; fp16 exceeds it below its normal range (6e-5)."""


def narrow(quantized: ir.Model, record: WidenRecord, target: Target) -> ir.Model:
    """The quantized model in the types of the original; the argument is not changed.

    Initializers that quantization left alone are the original's own, bit for bit. On ONNX Runtime CPU the int8 linears and
    all Q/DQ pairs are float32 islands; elsewhere their scales are half precision where the opset (19) and their size allow
    it. Initializers that nothing reads are dropped. With an empty record only that is done.
    """
    model = copy(quantized)
    if record:
        types = infer_types(model)
        _restore_bodies(model, record)
        _restore_borders(model.graph, record)
        _drop_border_casts(model.graph, record)
        _Narrowing(model=model, record=record, wide=types, target=target).run()
        _drop_casts(model.graph, record)
    drop_dead_initializers(model)
    return model


@dataclass(slots=True, kw_only=True)
class _Narrowing:
    """One run over the main graph. `made` is the type each float tensor ends up with."""

    model: ir.Model
    record: WidenRecord
    wide: TypeMap
    target: Target
    made: dict[ir.Value, ir.DataType] = field(default_factory=dict)
    own: set[ir.Node] = field(default_factory=set)
    island: frozenset[ir.Node] = frozenset()
    paths: dict[ir.Graph, str] = field(default_factory=dict)
    scales: dict[ir.Node, ir.DataType] = field(default_factory=dict)
    """Type of the scales of each Q and DQ that quantization made."""

    def run(self) -> None:
        graph = self.model.graph
        self.paths = {body: path for path, body in bodies(self.model) if isinstance(body, ir.Graph)}
        self.own = {node for node in graph if ("", node.name or "") not in self.record.nodes}
        if self.target.name == "onnxruntime-cpu":
            self.island = islands(graph, self.own)
            for node in self.island:
                if is_onnx(node, "Cast"):
                    node.attributes["to"] = ir.AttrInt64("to", _FLOAT.value)
        self._choose_scales()
        for value in (*graph.inputs, *graph.initializers.values()):
            self._set(value, value.dtype)
        for node in graph:
            for index, value in enumerate(node.outputs):
                self._set(value, self._makes(node, index))
        for value in list(self.made):
            self._settle(value)
        for value, dtype in self.made.items():
            if value.dtype != dtype and not value.is_graph_output():
                value.type = ir.TensorType(dtype)
        for node in graph:
            for value in node.outputs:
                if isinstance(value.type, ir.SequenceType | ir.OptionalType) and not value.is_graph_output():
                    value.type = None  # Its elements are half precision again; the runtime infers it.

    def _path(self, node: ir.Node) -> str:
        return "" if node.graph is None else self.paths.get(node.graph, "")

    def _set(self, value: ir.Value, dtype: ir.DataType | None) -> None:
        if dtype is not None and self._is_float(value):
            self.made[value] = dtype

    def _is_float(self, value: ir.Value | None) -> bool:
        return self.wide.dtype(value) in HALF | {_FLOAT}

    def _recorded(self, path: str, node: ir.Node) -> NodeTypes | None:
        found = self.record.nodes.get((path, node.name or ""))
        return found if found is not None and found.op_type == node.op_type else None

    def _needs(self, path: str, node: ir.Node, index: int) -> ir.DataType | None:
        """Type that input `index` of a node has to have; None where any will do."""
        if node in self.island:
            return None if is_onnx(node, "Cast") else _FLOAT
        if node in self.scales:
            return self.scales[node]
        if is_onnx(node, "Cast"):
            return None
        recorded = self._recorded(path, node)
        if recorded is not None:
            return recorded.inputs[index] if index < len(recorded.inputs) else None
        return self._added_type(node)

    def _makes(self, node: ir.Node, index: int) -> ir.DataType | None:
        if node in self.island:
            return _FLOAT
        if node in self.scales:
            return self.scales[node]
        recorded = self._recorded("", node)
        if recorded is not None and index < len(recorded.outputs):
            return recorded.outputs[index]
        made = self.wide.dtype(node.outputs[index])
        return made if is_onnx(node, "Cast") else self._added_type(node) or made

    def _added_type(self, node: ir.Node) -> ir.DataType | None:
        """Type of an added node: that of its first computed float operand, where the operator takes it, else float32."""
        operands = [value for value in node.inputs if value is not None and value in self.made]
        flowing = next((self.made[value] for value in operands if not value.is_initializer()), None)
        published = signature(node.domain, node.op_type, self.model.opset_imports.get(node.domain, 1))
        if flowing is None or published is None:
            return flowing
        inputs = [published.input(index) for index, value in enumerate(node.inputs) if value in operands]
        outputs = [published.output(index) for index, value in enumerate(node.outputs) if self._is_float(value)]
        text = type_string(flowing)
        return flowing if all(formal is None or text in published.allowed(formal) for formal in inputs + outputs) else _FLOAT

    def _choose_scales(self) -> None:
        for node in self.model.graph:
            if node in self.own and is_onnx(node, "DequantizeLinear"):
                self.scales[node] = self._scale_dtype(node)
        for node in self.model.graph:
            if node in self.own and is_onnx(node, "QuantizeLinear"):
                readers = [use.node for use in node.outputs[0].uses()]
                self.scales[node] = next((self.scales[reader] for reader in readers if reader in self.scales), _FLOAT)

    def _scale_dtype(self, node: ir.Node) -> ir.DataType:
        opset = self.model.opset_imports.get("", 1)
        wanted = self._read_as(node.outputs[0])
        if node in self.island or opset < _OPSET_OF_HALF_SCALES or wanted not in HALF:
            return _FLOAT
        scale = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        return wanted if scale is not None and _fits(scale.numpy(), wanted) else _FLOAT

    def _read_as(self, value: ir.Value) -> ir.DataType | None:
        """Type in which the original's nodes read a tensor, looking through added nodes."""
        for node, index in value.uses():
            recorded = self._recorded("", node)
            if recorded is not None:
                return recorded.inputs[index] if index < len(recorded.inputs) else None
            found = next((self._read_as(output) for output in node.outputs if output.uses()), None)
            if found is not None:
                return found
        return None

    def _settle(self, value: ir.Value) -> None:
        """Give every reader of a tensor the type it needs."""
        wanted: dict[ir.DataType, list[Use]] = {}
        for node, index in tuple(value.uses()):
            needed = self._needs(self._path(node), node, index)
            if needed is not None and needed != self.made[value]:
                wanted.setdefault(needed, []).append((node, index))
        declared = value.dtype if value.is_graph_output() else None
        if value.is_initializer() and value.name is not None and ("", value.name) not in self.record.initializers:
            self._settle_constant(value, wanted)
            return
        for dtype, uses in wanted.items():
            if dtype != declared:
                self._cast(value, dtype, uses)
        if declared is not None and declared != self.made[value]:
            self._cast_output(value, declared, wanted.get(declared, []))

    def _settle_constant(self, value: ir.Value, wanted: Mapping[ir.DataType, list[Use]]) -> None:
        """A constant that quantization made: converted, and copied where it is read in two types."""
        kept = len(tuple(value.uses())) - sum(len(uses) for uses in wanted.values())
        for position, (dtype, uses) in enumerate(wanted.items()):
            if value.const_value is None:
                continue
            data = converted(value.const_value, dtype)
            if position == 0 and not kept:
                value.const_value, value.type = data, ir.TensorType(dtype)
                self.made[value] = dtype
                continue
            name = f"{PREFIX}{dtype.name.lower()}/{value.name}"
            twin = ir.Value(name=name, type=ir.TensorType(dtype), shape=value.shape, const_value=data)
            self.model.graph.register_initializer(twin)
            for node, index in uses:
                node.replace_input_with(index, twin)

    def _cast(self, value: ir.Value, dtype: ir.DataType, uses: Iterable[Use]) -> None:
        own = f"{PREFIX}{dtype.name.lower()}/{value.name}"
        name, output = self.record.bypassed.get((tensor_name(value), dtype), (own, own))
        made = ir.Value(name=output, type=ir.TensorType(dtype), shape=value.shape)
        self._place(value, ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)], outputs=[made], name=name))
        for node, index in uses:
            node.replace_input_with(index, made)

    def _cast_output(self, value: ir.Value, dtype: ir.DataType, uses: Iterable[Use]) -> None:
        """The graph output keeps its name; the tensor behind it gets one of its own."""
        graph = self.model.graph
        name, declared = value.name, value.type
        value.name, value.type = f"{PREFIX}{self.made[value].name.lower()}/{name}", ir.TensorType(self.made[value])
        made = ir.Value(name=name, type=declared, shape=value.shape)
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", dtype.value)], outputs=[made], name=f"{PREFIX}cast/{name}")
        self._place(value, node)
        for place, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[place] = made
        for node, index in uses:
            node.replace_input_with(index, made)

    def _place(self, value: ir.Value, node: ir.Node) -> None:
        producer = value.producer()
        if producer is not None:
            self.model.graph.insert_after(producer, node)
        else:
            self.model.graph.insert_before(self.model.graph[0], node)


def _fits(scale: np.ndarray, dtype: ir.DataType) -> bool:
    wide = scale.astype(np.float32)
    back = wide.astype(_NUMPY[dtype]).astype(np.float32)
    return bool(np.all(np.abs(back - wide) <= _SCALE_TOLERANCE * np.abs(wide)))


def converted(tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.TensorProtocol:
    """The tensor in another float type, values beyond its range clipped to its largest finite one."""
    data = tensor.numpy().astype(np.float32)
    if dtype in HALF:
        largest = _LARGEST[dtype]
        data = np.where(np.isfinite(data), np.clip(data, -largest, largest), data)
    return ir.Tensor(data.astype(_NUMPY[dtype]), dtype=dtype, name=tensor.name)


def restored(tensor: ir.TensorProtocol, original: ir.TensorProtocol) -> ir.TensorProtocol:
    """The original tensor if the twin's still has its values, else the twin's in the original's type."""
    if tensor is original or tensor.dtype != _FLOAT or original.dtype not in HALF:
        return tensor
    same = tuple(tensor.shape) == tuple(original.shape)
    if same and np.array_equal(tensor.numpy(), original.numpy().astype(np.float32), equal_nan=True):
        return original
    return converted(tensor, original.dtype)


def _restore_bodies(model: ir.Model, record: WidenRecord) -> None:
    """Attributes, constants and casts as they were; types too, in subgraphs and functions, which quantization left alone."""
    for path, body in bodies(model):
        for node in body:
            known = record.nodes.get((path, node.name or ""))
            if known is not None and _is_same(node, known):
                _restore_node(node, known)
                if path:
                    _restore_types(node.outputs, known.outputs)
        if isinstance(body, ir.Graph):
            _restore_initializers(path, body, record.initializers)
        for value in (*body.inputs, *body.outputs) if path else ():
            declared = record.interface.get((path, tensor_name(value)))
            if declared is not None:
                value.type = declared[1]


def _is_same(node: ir.Node, known: NodeTypes) -> bool:
    was_cast = (node.op_type, known.op_type) == ("Identity", "Cast")
    return node.domain == known.domain and (node.op_type == known.op_type or was_cast)


def _restore_node(node: ir.Node, known: NodeTypes) -> None:
    node.op_type = known.op_type
    for name, attribute in known.attributes.items():
        current = node.attributes.get(name)
        if current is not None and attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
            tensor = restored(current.as_tensor(), attribute.as_tensor())
            node.attributes[name] = ir.AttrTensor(name, tensor)
        else:
            node.attributes[name] = attribute


def _restore_types(values: Iterable[ir.Value], dtypes: Iterable[ir.DataType | None]) -> None:
    for value, dtype in zip(values, dtypes, strict=False):
        if dtype is not None and value.type is not None:
            value.type = ir.TensorType(dtype)


def _restore_initializers(path: str, graph: ir.Graph, originals: Mapping[Key, ir.TensorProtocol]) -> None:
    for name, value in graph.initializers.items():
        original = originals.get((path, name))
        if original is not None and value.const_value is not None:
            value.const_value = restored(value.const_value, original)
            value.type = ir.TensorType(value.const_value.dtype)  # Setting dtype would reach into the argument's type.


def _restore_borders(graph: ir.Graph, record: WidenRecord) -> None:
    for value in (*graph.inputs, *graph.outputs):
        if tensor_name(value) in record.borders:
            value.type = record.borders[tensor_name(value)]


def _drop_border_casts(graph: ir.Graph, record: WidenRecord) -> None:
    """Take out the Casts that `widen` put at inputs and outputs; the outputs' names go back to what makes them."""
    for node in list(graph):
        if (node.name or "") not in record.casts or not is_onnx(node, "Cast") or node.inputs[0] is None:
            continue
        source, made = node.inputs[0], node.outputs[0]
        if made.is_graph_output():
            if source.producer() is None or source.is_graph_output():
                continue
            name, declared, shape = made.name, made.type, made.shape
            made.name = f"{PREFIX}dropped/{name}"
            source.name, source.type, source.shape = name, declared, shape
            made.replace_all_uses_with(source, replace_graph_outputs=True)
        else:
            made.replace_all_uses_with(source)
        graph.remove(node, safe=True)


def _drop_casts(graph: ir.Graph, record: WidenRecord) -> None:
    """Take out Casts that change nothing, and those that only undo another one; pairs of the original's own stay."""
    for node in list(graph):
        if not is_onnx(node, "Cast") or node.inputs[0] is None:
            continue
        source, made = node.inputs[0], node.outputs[0]
        if made.dtype not in HALF | {_FLOAT}:
            continue
        undone = _undone(node)
        if undone is not None and (_is_own(node, record) or _is_own(undone, record)):
            source = undone.inputs[0] or source
        changed = _is_own(node, record) or source is not node.inputs[0] or _converted(node, record)
        if source.dtype != made.dtype or not changed:
            continue
        if not made.is_graph_output():
            made.replace_all_uses_with(source)
        elif source.producer() is not None and not source.is_graph_output():
            name, made.name = made.name, f"{PREFIX}dropped/{made.name}"
            source.name, source.type, source.shape = name, made.type, made.shape
            made.replace_all_uses_with(source, replace_graph_outputs=True)
    for node in reversed(list(graph)):
        value = node.outputs[0]
        if is_onnx(node, "Cast") and not value.uses() and not value.is_graph_output():
            graph.remove(node, safe=True)


def _undone(node: ir.Node) -> ir.Node | None:
    """The Cast in front of a Cast that goes back to the type in front of both."""
    before = None if node.inputs[0] is None else node.inputs[0].producer()
    if before is None or not is_onnx(before, "Cast") or before.inputs[0] is None:
        return None
    return before if before.inputs[0].dtype == node.outputs[0].dtype else None


def _is_own(node: ir.Node, record: WidenRecord) -> bool:
    return ("", node.name or "") not in record.nodes


def _converted(node: ir.Node, record: WidenRecord) -> bool:
    """True for a Cast that did something in the original."""
    known = record.nodes["", node.name or ""]
    return known.inputs[:1] != known.outputs[:1]
