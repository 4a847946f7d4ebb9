"""Is this a model that a runtime will take? Contradictions in types and shapes, each named with its tensor and the remedy.

onnx.checker objects to models that every runtime accepts (an output without a shape) and is silent on others that none
does, so the rules here follow the published schemas, and ONNX Runtime has the last word.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnquant import metatypes, runtime
from attnquant.dtypes import TypeConflict, TypeMap, infer_types
from attnquant.errors import ModelError
from attnquant.graph import bodies, is_onnx, operator, tensor_name
from attnquant.model import load
from attnquant.roles import PortRole
from attnquant.schemas import history, known_domain

_SMALL = 1024
"""Bytes of an initializer that shapes may be computed from; larger ones are not needed to read types and shapes."""
_PAST = frozenset({PortRole.PAST_KEY, PortRole.PAST_VALUE})


def validate(model: ir.Model) -> None:
    """Raise ModelError, naming node or tensor and what to do, for a model that no runtime could load or that lies.

    Checked: the structure (as `model.load`) and unique tensor names; operators that nobody publishes; element types, of
    initializers, ports and declarations, against the schemas of the imported opset; that ONNX Runtime accepts the graph;
    and the fixed dimensions of declared outputs against those it infers. What is undeclared is accepted, nothing is filled
    in, weights are not read, and a missing CPU kernel is no fault of the model.
    """
    own = load(model)
    _check_names(own)
    _check_border(own)
    types = infer_types(own)
    _check_operators(own, types)
    if types.conflicts:
        raise ModelError(_sentence(own, types.conflicts))
    _check_shapes(own)


def require_loading(model: ir.Model) -> None:
    """Raise ModelError, naming the node, for a model that the runtime refuses when it reads the weights too.

    A missing kernel is no fault.
    """
    try:
        _session_shapes(model)
    except ModelError as error:
        if not _is_missing_kernel(error):
            raise _refused(model, error) from error.__cause__


def check_outputs(model: ir.Model, outputs: Mapping[str, np.ndarray]) -> None:
    """Compare the results of one run with the declared outputs: the last word on shapes that nothing can infer.

    :param outputs: {graph output: array}.
    :raises ModelError: an array has another rank, fixed dimension or element type than its declaration.
    """
    for value in model.graph.outputs:
        array = outputs.get(tensor_name(value))
        if array is None:
            continue
        if value.shape is not None and _contradicts(value.shape, array.shape):
            raise ModelError(_shape_sentence(value, value.shape, array.shape, "a run gives"))
        made = ir.DataType.from_numpy(array.dtype)
        if value.dtype is not None and isinstance(value.type, ir.TensorType) and made != value.dtype:
            msg = f"Graph output {value.name!r} is declared {value.dtype.name}, but a run gives {made.name}."
            raise ModelError(f"{msg} Correct the declaration.")


def _check_names(model: ir.Model) -> None:
    for path, body in bodies(model):
        values = {*body.inputs, *(body.initializers.values() if isinstance(body, ir.Graph) else ())}
        values |= {value for node in body for value in node.outputs}
        counts = Counter(tensor_name(value) for value in values)
        twice = sorted(name for name, count in counts.items() if name and count > 1)
        if twice:
            msg = f"Tensor {twice[0]!r} is made more than once in graph {path!r}: expected one maker for each name."
            raise ModelError(f"{msg} Rename one of them, or export the model again.")


def _check_border(model: ir.Model) -> None:
    """Runtimes refuse element type 0 in a declaration."""
    for path, body in bodies(model):
        for value in (*body.inputs, *body.outputs):
            if value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                msg = f"Tensor {value.name!r} of graph {path!r} is declared without an element type: expected one."
                raise ModelError(f"{msg} Add it, or export the model again.")


def _check_operators(model: ir.Model, types: TypeMap) -> None:
    for path, node in types.unknown:
        domain, op_type = operator(node)
        where = f"Node {node.name!r}" + (f" in graph {path!r}" if path else "")
        if not known_domain(node.domain):
            msg = f"{where} uses operator {op_type!r} of domain {domain!r}: expected one that onnx or ONNX Runtime has, or a"
            raise ModelError(f"{msg} function of the model. Export without custom operators.")
        version, since = model.opset_imports.get(node.domain), [row.since for row in history(node.domain, op_type)]
        msg = f"{where} uses operator {op_type!r}, which domain {domain!r} does not have at version {version!r}"
        msg += f" (it came with {since[0]})." if since else "."
        raise ModelError(f"{msg} Correct the opset import, or install the ONNX Runtime that the model was made for.")


def _sentence(model: ir.Model, conflicts: Sequence[TypeConflict]) -> str:
    first = conflicts[0]
    node = f" at node {first.node!r}" if first.node else ""
    where = f" in graph {first.path!r}" if first.path else ""
    more = f" ({len(conflicts) - 1} more such contradictions follow.)" if len(conflicts) > 1 else ""
    return f"Tensor {first.tensor!r}{node}{where} {first.reason}. {_remedy(model, first)}{more}"


def _remedy(model: ir.Model, conflict: TypeConflict) -> str:
    """What to do about it, by what makes the tensor."""
    if conflict.later is not None:
        return f"This type needs opset {conflict.later}: raise the model's opset, or convert the tensor."
    body = next((body for path, body in bodies(model) if path == conflict.path), model.graph)
    makers = {tensor_name(value): node for node in body for value in node.outputs}
    maker = makers.get(conflict.tensor)
    if is_onnx(maker, "DequantizeLinear") and maker is not None and len(maker.inputs) > 1:
        scale = tensor_name(maker.inputs[1])
        return f"Its type is that of scale {scale!r} of {maker.name!r}: convert the scale (opset 19), or add a Cast behind."
    if maker is None:
        return "Convert its data, or declare the type they have, and export the model again."
    return "Correct the declaration, or add a Cast, and export the model again."


def _check_shapes(model: ir.Model) -> None:
    declared = {
        tensor_name(value): (value, value.shape)
        for value in model.graph.outputs
        if value.shape is not None and value.producer() is not None
    }
    for name, inferred in _inferred_shapes(model).items():
        value, shape = declared.get(name, (None, None))
        if value is not None and shape is not None and inferred and _contradicts(shape, inferred):
            maker = value.producer()
            made = "its maker gives" if maker is None else f"node {maker.name!r} ({maker.op_type}) makes"
            raise ModelError(_shape_sentence(value, shape, inferred, made))


def _shape_sentence(value: ir.Value, shape: ir.Shape, made: Sequence[object], maker: str) -> str:
    dims = [dim if isinstance(dim, int) else dim.value for dim in shape.dims]
    msg = f"Graph output {value.name!r} declares the shape {dims!r}, but {maker} {list(made)!r}."
    return f"{msg} Correct the declaration, or leave the dimension symbolic."


def _contradicts(shape: ir.Shape, made: Sequence[object]) -> bool:
    """True for another rank or another fixed dimension; symbolic names may differ."""
    if len(shape) != len(made):
        return True
    pairs = zip(shape.dims, made, strict=True)
    return any(isinstance(want, int) and isinstance(got, int) and want != got for want, got in pairs)


def _inferred_shapes(model: ir.Model) -> dict[str, list[object]]:
    """Shapes of the graph outputs as ONNX Runtime infers them where none is declared; none where it lacks a kernel.

    :raises ModelError: ONNX Runtime refuses the graph.
    """
    stripped = _undeclared(model)
    dropped = _drop_weights(stripped)
    attempts = [stripped, _undeclared(model)] if dropped else [stripped]  # some kernels insist on constant weights
    for attempt in attempts:
        try:
            return _session_shapes(attempt)
        except ModelError as error:
            if _is_missing_kernel(error):
                return {}
            refusal = error
    if _loads(model):  # inference goes wrong without what the outputs declare: the run is left to judge them
        return {}
    raise _refused(model, refusal) from refusal.__cause__


def _loads(model: ir.Model) -> bool:
    try:
        _session_shapes(model)
    except ModelError:
        return False
    return True


def _refused(model: ir.Model, error: ModelError) -> ModelError:
    """The runtime's error, with the node where it does not name one."""
    names = {name for node in model.graph for name in (node.name, *map(tensor_name, (*node.inputs, *node.outputs))) if name}
    node = None if any(f"({name})" in str(error) or f"'{name}'" in str(error) for name in names) else _culprit(model)
    where = "" if node is None else f" It is node {node.name!r} ({node.op_type}) that it refuses."
    return ModelError(f"{str(error).rstrip('. ')}.{where} Correct this node or its inputs, or export the model again.")


def _culprit(model: ir.Model) -> ir.Node | None:
    """The first node that the runtime does not take, behind all nodes before it; None where it can't be told."""
    nodes = list(model.graph)
    good, bad = 0, len(nodes)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _loads(_beginning(model, middle)) else (good, middle)
    return nodes[bad - 1] if bad and not _loads(_beginning(model, bad)) else None


def _beginning(model: ir.Model, count: int) -> ir.Model:
    """The first nodes of a model; its outputs are what the last of them makes."""
    part = load(model)
    nodes = list(part.graph)
    part.graph.outputs.clear()
    part.graph.outputs.extend(value for value in nodes[count - 1].outputs if tensor_name(value))
    part.graph.remove(nodes[count:], safe=False)
    return part


def _session_shapes(model: ir.Model) -> dict[str, list[object]]:
    with runtime.session(model, threads=1, optimize=False) as session:
        return {item.name: item.shape for item in session.get_outputs()}


def _is_missing_kernel(error: ModelError) -> bool:
    return type(error.__cause__).__name__ == "NotImplemented"


def _undeclared(model: ir.Model) -> ir.Model:
    """A copy whose outputs declare no shape, and whose caches may grow.

    ONNX Runtime takes the sequence length of `past` for that of `present`, so it must not be a number there.
    """
    probe = load(model)
    for value in probe.graph.outputs:
        if value.producer() is not None:
            value.shape = None
    for node in probe.graph:
        for past in _past(node, probe.opset_imports.get(node.domain, 1)):
            if past.is_graph_input() and past.shape is not None and len(past.shape) > 1:
                dims = list(past.shape.dims)
                past.shape = ir.Shape([*dims[:-2], None, dims[-1]])
    return probe


def _past(node: ir.Node, version: int) -> list[ir.Value]:
    """Cache inputs of an attention operator."""
    row = metatypes.find(node.domain, node.op_type, version)
    if row is None or row.family != "attention":
        return []
    places = [port.index for port in row.inputs if _PAST & set(port.roles) and port.index < len(node.inputs)]
    return [value for value in (node.inputs[place] for place in places) if value is not None]


def _drop_weights(model: ir.Model) -> int:
    """Turn large initializers into graph inputs, in place: types and shapes do not depend on them. Returns how many."""
    graph = model.graph
    large = [value for value in graph.initializers.values() if _bytes(value) > _SMALL]
    for value in large:
        tensor = value.const_value
        if tensor is None or value.is_graph_output():
            continue
        value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(list(tensor.shape.numpy()))
        del graph.initializers[tensor_name(value)]
        value.const_value = None
        if not value.is_graph_input():
            graph.inputs.append(value)
    return len(large)


def _bytes(value: ir.Value) -> int:
    return 0 if value.const_value is None else value.const_value.nbytes
