"""What a parsed ModelProto must keep to before it becomes a graph: sizes, nesting, and bytes that match their tensors."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from attnquant.errors import ModelError

MAX_ITEMS = 1_000_000
"""Nodes, initializers and declared values of one model, all graphs together."""
MAX_NESTING = 25
"""Subgraphs inside each other; protobuf parses about 30 and Python's recursion ends soon after."""
MAX_DENSE_BYTES = 2**30
"""What the sparse tensors of one model may unfold into, together."""

_UNSUPPORTED = frozenset({ir.DataType.UNDEFINED})
_KNOWN = frozenset(item.value for item in ir.DataType)
_INT32_DATA = frozenset(
    {
        ir.DataType.INT32,
        ir.DataType.INT16,
        ir.DataType.UINT16,
        ir.DataType.INT8,
        ir.DataType.UINT8,
        ir.DataType.BOOL,
        ir.DataType.FLOAT16,
        ir.DataType.BFLOAT16,
        ir.DataType.FLOAT8E4M3FN,
        ir.DataType.FLOAT8E4M3FNUZ,
        ir.DataType.FLOAT8E5M2,
        ir.DataType.FLOAT8E5M2FNUZ,
        ir.DataType.INT4,
        ir.DataType.UINT4,
        ir.DataType.FLOAT4E2M1,
    }
)
_FIELDS: dict[str, frozenset[ir.DataType]] = {
    "float_data": frozenset({ir.DataType.FLOAT, ir.DataType.COMPLEX64}),
    "int32_data": _INT32_DATA,
    "int64_data": frozenset({ir.DataType.INT64}),
    "double_data": frozenset({ir.DataType.DOUBLE, ir.DataType.COMPLEX128}),
    "uint64_data": frozenset({ir.DataType.UINT64, ir.DataType.UINT32}),
    "string_data": frozenset({ir.DataType.STRING}),
}


def check_limits(proto: onnx.ModelProto, where: str) -> None:
    """Raise ModelError for what is no model, or one beyond the limits above; `where` names it in messages."""
    if not proto.HasField("graph"):
        msg = f"{where} is not an ONNX model: it has no graph. Expected a file written by an ONNX exporter."
        raise ModelError(msg)
    versions = [item.version for item in proto.opset_import]
    if proto.ir_version < 3 or min(versions, default=0) < 1:
        msg = (
            f"{where} is not an ONNX model of a known kind: expected an IR version of at least 3 and opset imports, got "
            f"ir_version={proto.ir_version!r} and versions {versions[:10]!r}. Export it again."
        )
        raise ModelError(msg)
    items = 0
    for graph, depth in graphs(proto):
        items += len(graph.node) + (
            len(graph.initializer) + len(graph.value_info) if isinstance(graph, onnx.GraphProto) else 0
        )
        if items > MAX_ITEMS:
            msg = f"{where} has more than {MAX_ITEMS:,} nodes and tensors: expected a model of at most this size. Split it."
            raise ModelError(msg)
        if depth > MAX_NESTING:
            msg = (
                f"{where} nests subgraphs more than {MAX_NESTING} deep, in graph {graph.name!r}: expected fewer. Flatten "
                "its control flow."
            )
            raise ModelError(msg)


def check_contents(proto: onnx.ModelProto) -> None:
    """Raise ModelError, naming node or tensor, for names used twice and for tensors whose data do not match."""
    for graph, _ in graphs(proto):
        _check_graph(graph)


def graphs(proto: onnx.ModelProto) -> Iterator[tuple[Any, int]]:
    """(graph or function, nesting), every one of a model, without recursion."""
    stack: list[tuple[Any, int]] = [(function, 0) for function in proto.functions]
    stack.append((proto.graph, 0))
    while stack:
        graph, depth = stack.pop()
        yield graph, depth
        for attribute, _ in _attributes(graph):
            inner = [attribute.g] if attribute.type == onnx.AttributeProto.GRAPH else attribute.graphs
            stack.extend((sub, depth + 1) for sub in inner)


def _attributes(graph: Any) -> Iterator[tuple[onnx.AttributeProto, onnx.NodeProto | None]]:
    """Every attribute of a graph or function with its node; None for the default value of a function's attribute."""
    for node in graph.node:
        for attribute in node.attribute:
            yield attribute, node
    if isinstance(graph, onnx.FunctionProto):
        for attribute in graph.attribute_proto:
            yield attribute, None


def _place(attribute: onnx.AttributeProto, node: onnx.NodeProto | None) -> str:
    owner = "a function" if node is None else f"node {node.name!r} ({node.op_type})"
    return f"attribute {attribute.name!r} of {owner}"


def _check_graph(graph: Any) -> None:
    given: set[str] = set(graph.input) if isinstance(graph, onnx.FunctionProto) else set()
    if isinstance(graph, onnx.GraphProto):
        given = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
        _check_unique("initializer", [tensor.name for tensor in graph.initializer], graph.name)
        _check_unique("graph input", [value.name for value in graph.input], graph.name)
        for tensor in graph.initializer:
            check_tensor(tensor, f"initializer {tensor.name!r}")
        _check_listed(graph)
        _check_outputs(graph)
    for value in (*(graph.input if isinstance(graph, onnx.GraphProto) else ()), *_outputs(graph), *graph.value_info):
        _check_declared(value)
    for node in graph.node:
        names = [attribute.name for attribute in node.attribute]
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output, *names)
        if any(isinstance(text, bytes) for text in texts):
            msg = (
                f"Node {node.name!r} in graph {graph.name!r} has a name that is not UTF-8: expected text. Export the model "
                "again."
            )
            raise ModelError(msg)
        if not node.op_type or len(set(names)) != len(names):
            msg = (
                f"Node {node.name!r} in graph {graph.name!r} has operator type {node.op_type!r} and attributes "
                f"{names[:10]!r}: "
                "expected an operator type, and each attribute once. Export the model again."
            )
            raise ModelError(msg)
        for output in node.output:
            if output and output in given:
                msg = (
                    f"Tensor {output!r} in graph {graph.name!r} is made twice, the second time by node {node.name!r} "
                    f"({node.op_type}): "
                    "expected one node, input or initializer for each. Export the model again."
                )
                raise ModelError(msg)
            given.add(output)
    for attribute, owner in _attributes(graph):
        if attribute.type == onnx.AttributeProto.TENSOR and not attribute.ref_attr_name:
            check_tensor(attribute.t, _place(attribute, owner))
        for tensor in attribute.tensors:
            check_tensor(tensor, _place(attribute, owner))


def _outputs(graph: Any) -> Sequence[onnx.ValueInfoProto]:
    return graph.output if isinstance(graph, onnx.GraphProto) else ()


def _check_declared(value: onnx.ValueInfoProto) -> None:
    """An element type that ONNX does not have; 0, which says nothing, is left to the readers."""
    declared = value.type
    while declared.WhichOneof("value") in ("sequence_type", "optional_type"):
        declared = getattr(declared, str(declared.WhichOneof("value"))).elem_type
    kind = declared.WhichOneof("value")
    number = getattr(declared, kind).elem_type if kind in ("tensor_type", "sparse_tensor_type") else 0
    if number not in _KNOWN:
        msg = f"Tensor {value.name!r} is declared with element type {number!r}: expected one that ONNX has. Correct the "
        raise ModelError(f"{msg}declaration, or export the model again.")


def _check_listed(graph: onnx.GraphProto) -> None:
    """What is declared of an initializer is what its data are; beside it, runtimes don't mind another shape."""
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for place, value in (*(("input", value) for value in graph.input), *(("", value) for value in graph.value_info)):
        tensor, kind = tensors.get(value.name), value.type.WhichOneof("value")
        if tensor is None or kind is None:
            continue
        if kind != "tensor_type":
            raise ModelError(_listed_sentence(value, "a tensor", kind.removesuffix("_type")))
        declared = value.type.tensor_type
        if declared.elem_type not in (0, tensor.data_type) and declared.elem_type in _KNOWN:
            names = [ir.DataType(number).name for number in (tensor.data_type, declared.elem_type)]
            raise ModelError(_listed_sentence(value, *names))
        sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in declared.shape.dim]
        wrong = any(size not in (None, own) for size, own in zip(sizes, tensor.dims, strict=False))
        if place and declared.HasField("shape") and (wrong or len(sizes) != len(tensor.dims)):
            raise ModelError(_listed_sentence(value, str(list(tensor.dims)[:10]), str(sizes[:10])))


def _check_outputs(graph: onnx.GraphProto) -> None:
    """What is named twice among the outputs is declared once, or twice the same."""
    declared: dict[str, bytes] = {}
    for value in graph.output:
        text = value.type.SerializeToString(deterministic=True)
        if declared.setdefault(value.name, text) != text:
            msg = f"Graph output {value.name!r} of graph {graph.name!r} is declared twice, in two ways: expected one. "
            raise ModelError(f"{msg}Remove the wrong declaration, or export the model again.")


def _listed_sentence(value: onnx.ValueInfoProto, expected: str, got: str) -> str:
    msg = f"Initializer {value.name!r}: expected the declaration to be that of its data, {expected}, got {got}."
    return f"{msg} Correct the declaration, or export the model again."


def _check_unique(kind: str, names: Sequence[str], graph: str) -> None:
    wrong = [name for name, times in Counter(names).items() if times > 1 or not name]
    if wrong:
        msg = (
            f"Graph {graph!r} has {kind} names that are empty or used twice: {wrong[:3]!r}. Expected one {kind} for each "
            "name."
        )
        raise ModelError(msg)


def check_tensor(tensor: onnx.TensorProto, place: str) -> None:
    """Raise ModelError, naming `place`, where the data of a tensor are not what its type and shape say.

    Of external data, only what the file says about them is checked.
    """
    try:
        dtype = ir.DataType(tensor.data_type)
    except ValueError:
        dtype = ir.DataType.UNDEFINED
    if dtype in _UNSUPPORTED or any(size < 0 for size in tensor.dims):
        msg = (
            f"Tensor in {place}: expected a known element type and sizes of at least 0, got data_type={tensor.data_type!r} "
            "and "
            f"shape {list(tensor.dims)[:10]!r}. Export the model again."
        )
        raise ModelError(msg)
    present = [
        name
        for name in ("raw_data", *_FIELDS)
        if (tensor.HasField(name) if name == "raw_data" else len(getattr(tensor, name)))
    ]
    count = math.prod(tensor.dims)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        numbers = [entry.value for entry in tensor.external_data if entry.key in ("offset", "length")]
        if present or dtype == ir.DataType.STRING or not all(value.isascii() and value.isdigit() for value in numbers):
            msg = (
                f"Tensor in {place} says that its data are external: expected no data in the file, numbers as offset and "
                "length, and "
                f"no strings; got {present!r}, {numbers!r} and type {dtype.name}. Export the model again."
            )
            raise ModelError(msg)
        return
    if len(present) > 1:
        msg = f"Tensor in {place} holds its data twice, in {present!r}: expected one field. Export the model again."
        raise ModelError(msg)
    if not present:
        expected, got, unit = count, 0, "elements"
    elif present[0] == "raw_data":
        bits = 0 if dtype == ir.DataType.STRING else count * dtype.bitwidth
        expected, got, unit = -(-bits // 8), len(tensor.raw_data), "bytes"
    else:
        expected, got, unit = (
            _elements(dtype, present[0], count),
            len(getattr(tensor, present[0])),
            f"values in {present[0]}",
        )
    if expected != got:
        msg = (
            f"Tensor in {place}: its data do not match its type {dtype.name} and shape {list(tensor.dims)[:10]!r}: "
            f"expected {max(expected, 0)} {unit}, got {got}. The file is damaged or was written wrongly: export it again."
        )
        raise ModelError(msg)


def _elements(dtype: ir.DataType, field: str, count: int) -> int:
    """Numbers that `field` holds for `count` elements; -1 where this type is not stored there."""
    if dtype not in _FIELDS[field]:
        return -1
    if dtype in {ir.DataType.COMPLEX64, ir.DataType.COMPLEX128}:
        return 2 * count
    return -(-count * dtype.bitwidth // 8) if field == "int32_data" and dtype.bitwidth < 8 else count


def has_sparse(proto: onnx.ModelProto) -> bool:
    """True where a graph has sparse initializers or a Constant with a sparse value."""
    sparse = {onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS}
    return any(
        getattr(graph, "sparse_initializer", None) or any(attribute.type in sparse for attribute, _ in _attributes(graph))
        for graph, _ in graphs(proto)
    )


def make_dense(proto: onnx.ModelProto) -> None:
    """Replace, in place, sparse initializers and sparse Constants by the dense tensors that they stand for.

    Runtimes do the same when they load a model; onnx_ir can't read sparse tensors. Raises ModelError for indices outside the
    shape, sparse tensors elsewhere, and where the dense ones take more than MAX_DENSE_BYTES together.
    """
    room = MAX_DENSE_BYTES
    for graph, _ in graphs(proto):
        if isinstance(graph, onnx.GraphProto):
            for sparse in graph.sparse_initializer:
                tensor = _dense(sparse, f"sparse initializer {sparse.values.name!r}", room)
                room -= len(tensor.raw_data)
                graph.initializer.append(tensor)
            del graph.sparse_initializer[:]
        for attribute, node in _attributes(graph):
            place = _place(attribute, node)
            if attribute.type == onnx.AttributeProto.SPARSE_TENSOR and node is not None and node.op_type == "Constant":
                tensor = _dense(attribute.sparse_tensor, place, room)
                room -= len(tensor.raw_data)
                attribute.Clear()
                attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
                attribute.t.CopyFrom(tensor)
            elif attribute.type in (onnx.AttributeProto.SPARSE_TENSOR, onnx.AttributeProto.SPARSE_TENSORS):
                msg = (
                    f"The {place} is a sparse tensor: expected one only in a Constant. Export the model with dense tensors."
                )
                raise ModelError(msg)


def _dense(sparse: onnx.SparseTensorProto, place: str, room: int) -> onnx.TensorProto:
    dims = list(sparse.dims)
    for part in (sparse.values, sparse.indices):
        check_tensor(part, place)
        if part.data_location == onnx.TensorProto.EXTERNAL:
            msg = (
                f"The {place} keeps its data outside the file: expected inline values and indices. Export it as a dense "
                "tensor."
            )
            raise ModelError(msg)
    dtype = ir.DataType(sparse.values.data_type)
    count = math.prod(dims)
    numbers = dtype != ir.DataType.STRING and dtype.bitwidth >= 8
    if not numbers or any(size < 0 for size in dims) or count * dtype.itemsize > room:
        msg = (
            f"The {place} has shape {dims[:10]!r} and type {dtype.name}: expected numbers of at most {room:,} bytes when "
            "dense. Export it as a dense tensor."
        )
        raise ModelError(msg)
    values = ir.serde.deserialize_tensor(sparse.values).numpy()
    indices = ir.serde.deserialize_tensor(sparse.indices).numpy()
    number = values.size
    shaped = indices.shape in ((number,), (number, len(dims))) and indices.dtype == np.int64 and values.ndim == 1
    limits = np.array([count] if indices.ndim == 1 else dims)
    if not shaped or np.any(indices.reshape(number, -1) < 0) or np.any(indices.reshape(number, -1) >= limits):
        msg = (
            f"The {place}: expected {number} int64 indices inside shape {dims[:10]!r}, got indices of shape "
            f"{indices.shape!r} "
            f"and type {indices.dtype!s}, or outside. Export it as a dense tensor."
        )
        raise ModelError(msg)
    dense = np.zeros(dims, dtype=values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return onnx.TensorProto(name=sparse.values.name, data_type=sparse.values.data_type, dims=dims, raw_data=dense.tobytes())
