"""Is this model one that a runtime will take? Contradictions in types and shapes, each named with its tensor and remedy.

onnx.checker objects to models that every runtime accepts (an output without a shape) and is silent on others that none
does, so the rules here follow the published schemas, and ONNX Runtime has the last word.
"""

from collections.abc import Sequence

import onnx_ir as ir

from attnquant import runtime
from attnquant.dtypes import TypeConflict, TypeMap, infer_types
from attnquant.errors import ModelError
from attnquant.graph import operator, tensor_name
from attnquant.model import copy
from attnquant.schemas import known_domain


def validate(model: ir.Model) -> None:
    """Raise ModelError, naming node or tensor and what to do, for a model that no runtime could load or that lies.

    Checked: operators nobody publishes, element types (initializers against data and readers, opset limits of types,
    declared outputs against what their operators make), declared shapes of outputs against what their operators make, and
    that ONNX Runtime loads the model. Undeclared types and shapes are fine, and nothing is filled in.
    """
    types = infer_types(model)
    _check_operators(model, types)
    if types.conflicts:
        raise ModelError(_sentence(types.conflicts[0]))
    _check_output_shapes(model)
    with runtime.session(model, threads=1):
        pass


def _check_operators(model: ir.Model, types: TypeMap) -> None:
    for path, node in types.unknown:
        domain, op_type = operator(node)
        version = model.opset_imports.get(node.domain)
        where = f"Node {node.name!r} in graph {path!r}" if path else f"Node {node.name!r}"
        if not known_domain(node.domain):
            msg = f"{where} uses operator {op_type!r} of domain {domain!r}: expected one that onnx, ONNX Runtime or the model"
            raise ModelError(f"{msg} defines. Export without custom operators.")
        msg = f"{where} uses operator {op_type!r}, which domain {domain!r} does not have at version {version!r}."
        raise ModelError(f"{msg} Correct the opset import, or install the ONNX Runtime that the model was made for.")


def _sentence(conflict: TypeConflict) -> str:
    node = f"node {conflict.node!r}" if conflict.node else "the model's outputs or initializers"
    where = f" (graph {conflict.path!r})" if conflict.path else ""
    return (
        f"Tensor {conflict.tensor!r} at {node}{where} {conflict.reason}. "
        "Expected types that agree; convert the tensor or add a Cast, and export the model again."
    )


def _check_output_shapes(model: ir.Model) -> None:
    """Compare declared output shapes with those that the runtime infers when they are not declared."""
    probe = copy(model)
    declared = {}
    for value in probe.graph.outputs:
        if value.shape is not None and value.producer() is not None:
            declared[tensor_name(value)] = (value.shape, value.producer())
            value.shape = None
    if not declared:
        return
    with runtime.session(probe, threads=1) as session:
        made = {item.name: item.shape for item in session.get_outputs()}
    for name, (shape, node) in declared.items():
        inferred = made.get(name) or []
        if inferred and _contradicts(shape, inferred):
            maker = "" if node is None else f"node {node.name!r} ({node.op_type})"
            msg = f"Graph output {name!r} declares the shape {_dims(shape)}, but {maker} makes {list(inferred)!r}."
            raise ModelError(f"{msg} Correct the declaration, or leave the dimension symbolic.")


def _contradicts(shape: ir.Shape, inferred: Sequence[object]) -> bool:
    """True for another rank or another fixed dimension; symbolic names may differ (present is no longer than past + new)."""
    if len(shape) != len(inferred):
        return True
    pairs = zip(shape.dims, inferred, strict=True)
    return any(isinstance(want, int) and isinstance(got, int) and want != got for want, got in pairs)


def _dims(shape: ir.Shape) -> list[int | str | None]:
    return [dim if isinstance(dim, int) else dim.value for dim in shape.dims]
