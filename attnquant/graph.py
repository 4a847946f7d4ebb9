"""Reading ONNX graphs: iteration with paths, constants, and Q/DQ pairs made transparent. Nothing here edits a model."""

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

Body = ir.Graph | ir.Function

_NOT_FOLDED = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "If", "Loop", "Scan")


def bodies(model: ir.Model) -> Iterator[tuple[str, Body]]:
    """Yield (path, graph) for the main graph "", every subgraph and every model-local function, outermost first."""
    yield from _nested("", model.graph)
    for function in model.functions.values():
        yield from _nested(f"{function.domain}::{function.name}", function)


def _nested(path: str, body: Body) -> Iterator[tuple[str, Body]]:
    yield path, body
    for node in body:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _nested(f"{path}/{node.name}/{attribute.name}", attribute.as_graph())
            elif attribute.type == ir.AttributeType.GRAPHS:
                for position, graph in enumerate(attribute.as_graphs()):
                    yield from _nested(f"{path}/{node.name}/{attribute.name}[{position}]", graph)


def operator(node: ir.Node) -> tuple[str, str]:
    """(domain, op_type), the default domain written "ai.onnx"."""
    return node.domain or "ai.onnx", node.op_type


def is_onnx(node: ir.Node | None, *op_types: str) -> bool:
    """True for a node of the default domain with one of these operator types."""
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in op_types


def sizes_only(node: ir.Node | None) -> bool:
    """True for a node that looks at its input's shape and never at its values."""
    return is_onnx(node, "Shape", "Size")


def fed(model: ir.Model) -> set[ir.Value]:
    """Tensors of the main graph that depend on the values of its inputs, not on constants and sizes alone."""
    found = {value for value in model.graph.inputs if not value.is_initializer()}
    for node in model.graph:
        if sizes_only(node):
            continue
        kinds = {attribute.type for attribute in node.attributes.values()}
        if kinds & {ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS} or any(value in found for value in node.inputs):
            found.update(node.outputs)
    return found


def tensor_name(value: ir.Value | None) -> str:
    """Name of a value, "" for a missing optional input."""
    return "" if value is None or value.name is None else value.name


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array behind an initializer or a Constant node, None for anything computed or fed."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def is_constant(value: ir.Value | None) -> bool:
    """True for a missing input, an initializer that can't be fed, and what is computed from such: a transposed weight."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if item is None or item in seen or (item.is_initializer() and not item.is_graph_input()):
            continue
        seen.add(item)
        producer = item.producer()
        if producer is None or producer.domain not in ("", "ai.onnx") or is_onnx(producer, *_NOT_FOLDED):
            return False
        waiting += producer.inputs
    return True


def constant_values(graph: ir.Graph) -> set[ir.Value]:
    """Every value of a sorted graph of which `is_constant` is true and that a node reads, in one pass over it."""
    found: set[ir.Value] = set()
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        found.update(value for value in inputs if value.is_initializer() and not value.is_graph_input())
        if node.domain in ("", "ai.onnx") and not is_onnx(node, *_NOT_FOLDED) and found.issuperset(inputs):
            found.update(node.outputs)
    return found


def along(array: np.ndarray, axis: int | None, rank: int) -> np.ndarray:
    """A scale or zero point, one for a tensor or one a position of `axis`, as it broadcasts over a tensor of `rank`."""
    shape = [1] * rank
    if axis is not None and array.size > 1:
        shape[axis] = -1
    return array.reshape(shape)


def weight_axis(linear: ir.Node) -> int:
    """Axis of the stored matrix on the right of a MatMul or Gemm that becomes the output's last."""
    return 0 if is_onnx(linear, "Gemm") and linear.attributes.get_int("transB") else 1


def weight_matrix(linear: ir.Node) -> np.ndarray | None:
    """(inputs, outputs) of a MatMul or Gemm with a constant float32 matrix on the right; None for others."""
    weight = constant(linear.inputs[1]) if is_onnx(linear, "MatMul", "Gemm") else None
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or linear.attributes.get_int("transA"):
        return None
    return weight if weight_axis(linear) == 1 else weight.T


def is_weight_dequantize(node: ir.Node | None) -> bool:
    """DequantizeLinear of a constant."""
    return is_onnx(node, "DequantizeLinear") and node is not None and constant(node.inputs[0]) is not None


def is_blocked(node: ir.Node) -> bool:
    """Whether a QuantizeLinear or DequantizeLinear has a scale for each block; an explicit block_size of 0 is none."""
    return node.attributes.get_int("block_size", 0) != 0


def before_qdq(value: ir.Value | None) -> ir.Value | None:
    """The float tensor behind a chain of QuantizeLinear -> DequantizeLinear pairs; `value` itself where there is none."""
    while value is not None:
        dequantize = value.producer()
        if not is_onnx(dequantize, "DequantizeLinear") or dequantize is None or dequantize.inputs[0] is None:
            return value
        quantize = dequantize.inputs[0].producer()
        if not is_onnx(quantize, "QuantizeLinear") or quantize is None:
            return value
        value = quantize.inputs[0]
    return None
