"""A model in bfloat16: initializers, constants and declared types cast; Casts around what takes no bfloat16."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir

from attnquant.dtypes import HALF, TypeMap, infer_types
from attnquant.graph import bodies
from attnquant.model import copy, name_nodes

BF16 = ir.DataType.BFLOAT16
TYPED = ("to", "dtype")


def as_bfloat16(model: ir.Model) -> ir.Model:
    """A copy whose half precision tensors (fp16 where it has any, else float32) are bfloat16; declared shapes are kept.

    A node whose published schema takes no bfloat16, and a Constant that holds plain numbers, work in float32 between Casts.
    """
    made = copy(model)
    name_nodes(made)
    types = infer_types(made)
    source = ir.DataType.FLOAT16 if HALF & {types.dtype(value) for value in types.types} else ir.DataType.FLOAT
    versions = dict(made.opset_imports)
    plain = [(body, node) for _, body in bodies(made) for node in body if not _takes(node, versions)]
    ports = [(body, node, *_ports(node, types, source)) for body, node in plain]
    _cast_all(made, types, source, {node for _, node in plain})
    for body, node, inputs, outputs in ports:
        for index in inputs:
            cast = _cast(node.inputs[index], ir.DataType.FLOAT, f"{node.name}_in{index}")
            body.insert_before(node, cast)
            node.replace_input_with(index, cast.outputs[0])
        for index in outputs:
            _cast_behind(body, node, index)
    return made


def _takes(node: ir.Node, versions: dict[str, int]) -> bool:
    """True where every float port of the node may be bfloat16, or nothing is published about it."""
    if node.op_type == "Constant" and "value" not in node.attributes:
        return not any(name.startswith("value_float") for name in node.attributes)
    try:
        schema = onnx.defs.get_schema(node.op_type, versions.get(node.domain, 1), node.domain)
    except onnx.defs.SchemaError:
        return True
    allowed = {row.type_param_str: set(row.allowed_type_strs) for row in schema.type_constraints}
    formals = [allowed.get(item.type_str, {item.type_str}) for item in (*schema.inputs, *schema.outputs)]
    return all("tensor(bfloat16)" in kinds for kinds in formals if "tensor(float)" in kinds and len(kinds) > 1)


def _ports(node: ir.Node, types: TypeMap, source: ir.DataType) -> tuple[list[int], list[int]]:
    inputs = [index for index, value in enumerate(node.inputs) if types.dtype(value) == source]
    return inputs, [index for index, value in enumerate(node.outputs) if types.dtype(value) == source]


def _cast_all(model: ir.Model, types: TypeMap, source: ir.DataType, plain: set[ir.Node]) -> None:
    found = [value for value in types.types if types.dtype(value) == source]
    for value in found:
        value.type = ir.TensorType(BF16)
        if value.const_value is not None and value.producer() is None:
            value.const_value = _tensor(value.const_value)
    for _, body in bodies(model):
        for node in body:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype == source and node not in plain:
                    node.attributes[name] = ir.AttrTensor(name, _tensor(attribute.as_tensor()))
                if attribute.type == ir.AttributeType.INT and name in TYPED and attribute.as_int() == source.value:
                    node.attributes[name] = ir.AttrInt64(name, (ir.DataType.FLOAT if node in plain else BF16).value)


def _tensor(tensor: ir.TensorProtocol) -> ir.Tensor:
    """Rounded; the lowest float, by which masks hide, becomes the lowest bfloat16 as exporters write it, not infinity."""
    array, largest = tensor.numpy().astype(np.float32), float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    finite = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return ir.Tensor(finite.astype(ml_dtypes.bfloat16), name=tensor.name)


def _cast(value: ir.Value | None, to: ir.DataType, name: str) -> ir.Node:
    made = ir.Value(name=f"{name}_cast", type=ir.TensorType(to), shape=None if value is None else value.shape)
    return ir.Node("", "Cast", [value], [ir.AttrInt64("to", to.value)], outputs=[made], name=name)


def _cast_behind(body: ir.Graph | ir.Function, node: ir.Node, index: int) -> None:
    """The output keeps its name, behind a Cast; the node writes another tensor."""
    old = node.outputs[index]
    name, readers = old.name, tuple(old.uses())
    old.name, old.type = f"{name}_float", ir.TensorType(ir.DataType.FLOAT)
    cast = _cast(old, BF16, f"{node.name}_out{index}")
    cast.outputs[0].name = name
    body.insert_after(node, cast)
    for reader, port in readers:
        reader.replace_input_with(port, cast.outputs[0])
    for place, value in enumerate(list(body.outputs)):
        if value is old:
            body.outputs[place] = cast.outputs[0]
