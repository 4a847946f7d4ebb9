"""The float32 twin of a half precision model, and the record that `narrow` goes back with.

NNCF takes fp16 and bf16 edges for integers and writes float32 scales, so it works on the twin.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attnquant.dtypes import DTYPE_ATTRIBUTES, HALF, TypeMap, infer_types
from attnquant.errors import ModelError
from attnquant.graph import Body, bodies, is_onnx, is_weight_dequantize, tensor_name
from attnquant.model import copy, name_nodes

PREFIX = "attnquant."
"""Reserved beginning of the names that attnquant gives to nodes and tensors of its own."""

_FLOAT = ir.DataType.FLOAT
Key = tuple[str, str]
"""(graph path, name) of a node or an initializer."""
Forwarded = Set[tuple[ir.OperatorIdentifier, str]]
"""(function, attribute) pairs that hold a data type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTypes:
    """A node of the original: the element types its ports have there, and what the twin changed in it."""

    op_type: str
    domain: str
    inputs: tuple[ir.DataType | None, ...]
    outputs: tuple[ir.DataType | None, ...]
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    """Attributes as they were, of those that the twin has differently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenRecord:
    """How a float32 twin differs from its half precision original; empty (false) if nothing had to change."""

    dtypes: frozenset[ir.DataType] = frozenset()
    """The half precision types of the original."""
    nodes: Mapping[Key, NodeTypes] = field(default_factory=dict)
    initializers: Mapping[Key, ir.TensorProtocol] = field(default_factory=dict)
    """Every initializer of the original, by reference."""
    interface: Mapping[Key, tuple[ir.DataType | None, ir.TypeProtocol | None]] = field(default_factory=dict)
    """(graph path, tensor) of inputs and outputs of subgraphs: their element type and declared type."""
    casts: Mapping[str, str] = field(default_factory=dict)
    """Casts at the model's inputs and outputs: node name: tensor name inside the twin."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Half precision graph inputs and outputs: what the float32 tensor of the same meaning is called in the twin."""
    borders: Mapping[str, ir.TypeProtocol] = field(default_factory=dict)
    """bfloat16 graph inputs and outputs, which the twin declares float32: their types."""
    bypassed: Mapping[tuple[str, ir.DataType], tuple[str, str]] = field(default_factory=dict)
    """Casts of dequantized weights, left out of the twin: {(tensor, type): (node name, output name)}."""

    def __bool__(self) -> bool:
        return bool(self.dtypes)


def widen(model: ir.Model) -> tuple[ir.Model, WidenRecord]:
    """The float32 twin: every fp16 and bf16 tensor is float32, except the graph's own inputs and outputs.

    Names and shapes are kept. fp16 inputs and outputs keep their type too, with a Cast right behind or in front of them, so
    that the same feeds work; bf16 ones become float32, because ONNX Runtime takes no bfloat16 arrays (see `twin_feeds`).
    Node names are kept; a Cast that no longer changes anything becomes an Identity of the same name, and is left out behind
    a weight's DequantizeLinear, where hosts would not see that the weight is quantized.
    A model without half precision comes back itself, with an empty record. The argument is never changed.

    :raises ModelError: half precision that has no float32 twin: reinterpreted bits, sequences at the model's border.
    """
    half = _half_dtypes(model)
    if not half:
        return model, WidenRecord()
    twin = copy(model)
    name_nodes(twin)
    types = infer_types(twin)
    _check(twin, types)
    forwarded = _forwarded_attributes(twin)
    record = _Recorder(types=types, forwarded=forwarded)
    for path, body in bodies(twin):
        record.body(path, body)
    for _, body in bodies(twin):
        _widen_body(body, types, forwarded)
    for graph in _subgraphs(twin):
        for value in (*graph.inputs, *graph.outputs):
            _widen_type(value)
    borders = _widen_borders(twin.graph)
    bypassed = _bypass_weight_casts(twin.graph, types)
    casts, renamed = _cast_borders(twin.graph)
    return twin, WidenRecord(
        dtypes=half,
        nodes=record.nodes,
        initializers=record.initializers,
        interface=record.interface,
        casts=casts,
        renamed=renamed,
        borders=borders,
        bypassed=bypassed,
    )


@dataclass(slots=True, kw_only=True)
class _Recorder:
    types: TypeMap
    forwarded: Forwarded
    nodes: dict[Key, NodeTypes] = field(default_factory=dict)
    initializers: dict[Key, ir.TensorProtocol] = field(default_factory=dict)
    interface: dict[Key, tuple[ir.DataType | None, ir.TypeProtocol | None]] = field(default_factory=dict)

    def body(self, path: str, body: Body) -> None:
        for node in body:
            self.nodes[path, node.name or ""] = NodeTypes(
                op_type=node.op_type,
                domain=node.domain,
                inputs=tuple(self.types.dtype(value) for value in node.inputs),
                outputs=tuple(self.types.dtype(value) for value in node.outputs),
                attributes={name: attr for name, attr in node.attributes.items() if self._changes(node, attr)},
            )
        if isinstance(body, ir.Graph):
            for name, value in body.initializers.items():
                if value.const_value is not None:
                    self.initializers[path, name] = value.const_value
        if path:
            for value in (*body.inputs, *body.outputs):
                self.interface[path, tensor_name(value)] = (self.types.dtype(value), value.type)

    def _changes(self, node: ir.Node, attribute: ir.Attr) -> bool:
        if is_onnx(node, "Cast") or _attribute_dtypes(attribute):
            return True
        return attribute.type == ir.AttributeType.INT and _holds_dtype(node, attribute.name, self.forwarded)


def _half_dtypes(model: ir.Model) -> frozenset[ir.DataType]:
    """Half precision types that appear anywhere in the model."""
    found: set[ir.DataType] = set()
    for _, body in bodies(model):
        values = [*body.inputs, *body.outputs, *(output for node in body for output in node.outputs)]
        if isinstance(body, ir.Graph):
            values += body.initializers.values()
        found.update(value.dtype for value in values if value.type is not None and value.dtype is not None)
        found.update(v.const_value.dtype for v in values if v.const_value is not None)
        for node in body:
            for attribute in node.attributes.values():
                found.update(_attribute_dtypes(attribute))
    return frozenset(found & HALF)


def _attribute_dtypes(attribute: ir.Attr) -> set[ir.DataType]:
    if attribute.is_ref():
        return set()
    if attribute.type == ir.AttributeType.TENSOR:
        return {attribute.as_tensor().dtype}
    if attribute.type == ir.AttributeType.TENSORS:
        return {tensor.dtype for tensor in attribute.as_tensors()}
    if attribute.type == ir.AttributeType.INT and attribute.name in DTYPE_ATTRIBUTES:
        return {dtype for dtype in HALF if dtype.value == attribute.as_int()}
    return set()


def _check(model: ir.Model, types: TypeMap) -> None:
    for _, body in bodies(model):
        for node in body:
            ports = (*node.inputs, *node.outputs)
            if is_onnx(node, "BitCast") and any(types.dtype(value) in HALF for value in ports):
                msg = f"Node {node.name!r} (BitCast) reinterprets bits of a half precision tensor: expected arithmetic only."
                raise ModelError(msg + " Take the node out of the model, or quantize a float32 export.")
    for value in (*model.graph.inputs, *model.graph.outputs):
        if isinstance(value.type, ir.SequenceType | ir.OptionalType) and value.dtype in HALF:
            msg = f"Graph input or output {value.name!r} is a sequence or optional of half precision; expected a tensor."
            raise ModelError(msg + " Export the model with plain tensors.")


def _forwarded_attributes(model: ir.Model) -> Forwarded:
    """Attributes of functions that end up as a data type inside: (function, attribute), through calls of calls."""
    found: set[tuple[ir.OperatorIdentifier, str]] = set()
    grown = True
    while grown:
        before = len(found)
        for identifier, function in model.functions.items():
            for node in function.all_nodes():
                for attribute in node.attributes.values():
                    if attribute.is_ref() and _holds_dtype(node, attribute.name, found):
                        found.add((identifier, attribute.ref_attr_name or ""))
        grown = len(found) > before
    return frozenset(found)


def _holds_dtype(node: ir.Node, name: str, forwarded: Forwarded) -> bool:
    return name in DTYPE_ATTRIBUTES or (node.op_identifier(), name) in forwarded


def _widen_body(body: Body, types: TypeMap, forwarded: Forwarded) -> None:
    if isinstance(body, ir.Graph):
        for value in body.initializers.values():
            if value.const_value is not None and value.const_value.dtype in HALF and not _is_border(value):
                value.const_value = widened(value.const_value)
                value.type = ir.TensorType(_FLOAT)  # Setting dtype would reach into the argument's type.
    for node in body:
        noop = is_onnx(node, "Cast") and _becomes_noop(node, types)
        for attribute in list(node.attributes.values()):
            _widen_attribute(node, attribute, forwarded)
        if noop:
            # NNCF cuts no-op Casts out of the graph and stumbles where one ends in a graph output; an Identity it keeps.
            node.op_type = "Identity"
            node.attributes.clear()
        for value in node.outputs:
            if not value.is_graph_output():
                _widen_type(value)


def _bypass_weight_casts(graph: ir.Graph, types: TypeMap) -> dict[tuple[str, ir.DataType], tuple[str, str]]:
    bypassed = {}
    for node in list(graph):
        source, made = node.inputs[:1], node.outputs[0]
        dtype = types.dtype(made)
        if not is_onnx(node, "Identity") or source[0] is None or dtype is None or made.is_graph_output():
            continue
        if is_weight_dequantize(source[0].producer()) and types.dtype(source[0]) != dtype:
            bypassed[tensor_name(source[0]), dtype] = (node.name or "", tensor_name(made))
            made.replace_all_uses_with(source[0])
            graph.remove(node, safe=True)
    return bypassed


def _is_border(value: ir.Value) -> bool:
    return value.is_graph_input() or value.is_graph_output()


def _becomes_noop(node: ir.Node, types: TypeMap) -> bool:
    source, made = types.dtype(node.inputs[0]), types.dtype(node.outputs[0])
    wide = HALF | {_FLOAT}
    return source != made and source in wide and made in wide


def _widen_attribute(node: ir.Node, attribute: ir.Attr, forwarded: Forwarded) -> None:
    if attribute.is_ref():
        return
    name = attribute.name
    if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
        node.attributes[name] = ir.AttrTensor(name, widened(attribute.as_tensor()))
    elif attribute.type == ir.AttributeType.TENSORS:
        tensors = [widened(tensor) if tensor.dtype in HALF else tensor for tensor in attribute.as_tensors()]
        node.attributes[name] = ir.AttrTensors(name, tensors)
    elif attribute.type == ir.AttributeType.INT and _holds_dtype(node, name, forwarded):
        if attribute.as_int() in {dtype.value for dtype in HALF}:
            node.attributes[name] = ir.AttrInt64(name, _FLOAT.value)
    elif attribute.type == ir.AttributeType.TYPE_PROTO:
        declared = attribute.value.type
        if declared.dtype in HALF:
            msg = f"Node {node.name!r} ({node.op_type}) declares a half precision type as attribute {name!r}; expected none."
            raise ModelError(msg + " Export the model without optional or sequence types.")


def widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The same values in float32, exact, computed when they are needed so that a big model is not held twice."""
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name),
        dtype=_FLOAT,
        shape=ir.Shape(list(tensor.shape.numpy())),
        name=tensor.name,
    )


def _widen_type(value: ir.Value) -> None:
    if value.type is None or value.dtype not in HALF:
        return
    value.type = _wide_type(value.type)


def _wide_type(declared: ir.TypeProtocol) -> ir.TypeProtocol:
    if isinstance(declared, ir.SequenceType):
        return ir.SequenceType(_wide_type(declared.elem_type))
    if isinstance(declared, ir.OptionalType):
        return ir.OptionalType(_wide_type(declared.elem_type))
    return ir.TensorType(_FLOAT)


def _subgraphs(model: ir.Model) -> list[ir.Graph]:
    return [body for path, body in bodies(model) if path and isinstance(body, ir.Graph)]


def runnable(model: ir.Model) -> tuple[ir.Model, WidenRecord]:
    """The twin of a model with bfloat16, for which no CPU has the kernels; any other model itself, with an empty record.

    :raises ModelError: as `widen`.
    """
    return widen(model) if ir.DataType.BFLOAT16 in _half_dtypes(model) else (model, WidenRecord())


def twin_feeds(sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A sample for the twin: bfloat16 arrays (ml_dtypes) in float32, the others as they are."""
    bfloat16 = ir.DataType.BFLOAT16.numpy()
    return {name: array.astype(np.float32) if array.dtype == bfloat16 else array for name, array in sample.items()}


def _widen_borders(graph: ir.Graph) -> dict[str, ir.TypeProtocol]:
    """Declare bfloat16 inputs and outputs float32, in place; returns what they were."""
    borders = {}
    for value in dict.fromkeys((*graph.inputs, *graph.outputs)):
        if value.type is not None and value.dtype == ir.DataType.BFLOAT16:
            borders[tensor_name(value)] = value.type
            value.type = ir.TensorType(_FLOAT)
            if value.const_value is not None:
                value.const_value = widened(value.const_value)
    return borders


def _cast_borders(graph: ir.Graph) -> tuple[dict[str, str], dict[str, str]]:
    """Put a Cast behind every half precision input and in front of every half precision output."""
    casts: dict[str, str] = {}
    renamed: dict[str, str] = {}
    taken = {tensor_name(value) for node in graph.all_nodes() for value in node.outputs} | set(graph.initializers)
    taken |= {tensor_name(value) for value in graph.inputs}
    behind = []
    for value in _half_sources(graph):
        node = _cast(value, _FLOAT, f"{PREFIX}widen/{value.name}", _fresh(f"{PREFIX}f32/{value.name}", taken))
        for user, index in tuple(value.uses()):
            if user is not node:
                user.replace_input_with(index, node.outputs[0])
        behind.append(node)
        casts[node.name or ""] = renamed[tensor_name(value)] = tensor_name(node.outputs[0])
    first = next(iter(graph), None)
    if first is not None:
        graph.insert_before(first, behind)
    moved: dict[ir.Value, ir.Value] = {}
    for place, value in enumerate(list(graph.outputs)):
        if value in moved:  # an output that is listed twice
            graph.outputs[place] = moved[value]
        if value.type is None or value.dtype not in HALF or value.producer() is None or value in moved:
            continue
        name, declared, shape = tensor_name(value), value.type, value.shape
        value.name, value.type = _fresh(f"{PREFIX}f32/{name}", taken), ir.TensorType(_FLOAT)
        node = _cast(value, ir.DataType(declared.dtype), f"{PREFIX}widen/{name}", name)
        node.outputs[0].type, node.outputs[0].shape = declared, None if shape is None else shape.copy()
        graph.append(node)
        graph.outputs[place] = moved[value] = node.outputs[0]
        casts[node.name or ""] = renamed[name] = tensor_name(value)
    return casts, renamed


def _half_sources(graph: ir.Graph) -> list[ir.Value]:
    """Used half precision values of the graph's border that no node makes: inputs, and initializers that are outputs."""
    borders = [*graph.inputs, *(value for value in graph.initializers.values() if value.is_graph_output())]
    return [value for value in dict.fromkeys(borders) if value.dtype in HALF and value.uses()]


def _cast(value: ir.Value, to: ir.DataType, name: str, output: str) -> ir.Node:
    made = ir.Value(name=output, type=ir.TensorType(to), shape=None if value.shape is None else value.shape.copy())
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", to.value)], outputs=[made], name=name)


def _fresh(name: str, taken: set[str]) -> str:
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}.{count}"
    taken.add(candidate)
    return candidate
