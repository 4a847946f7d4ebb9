"""Do nodes have the operands that their operator can't do without? Everything behind reads inputs by position."""

from functools import cache

import onnx
import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.graph import bodies


def require_operands(model: ir.Model) -> None:
    """Hold every node of the ai.onnx domains against the schema of the opset that its graph imports.

    Unknown operators, versions and domains are passed: nothing is known about them.

    :raises ModelError: a required input is missing, or there are fewer outputs than the operator always makes.
    """
    functions = {f"{one.domain}::{one.name}": one.opset_imports for one in model.functions.values()}
    for path, body in bodies(model):
        # A body inside a function is read by the function's imports; its path begins with the function's.
        own = next((imports for name, imports in functions.items() if path == name or path.startswith(f"{name}/")), None)
        imports = model.opset_imports if own is None else own
        for node in body:
            version = imports.get(node.domain)
            if version is None or node.op_identifier() in model.functions:
                continue
            places, outputs = _required(node.domain, node.op_type, version)
            required = len(places)
            given = sum(index < len(node.inputs) and node.inputs[index] is not None for index in places)
            if given < required or len(node.outputs) < outputs:
                msg = (
                    f"Node {node.name!r} in graph {path!r}: {node.op_type} at opset {version} needs {required} inputs and "
                    f"{outputs} outputs, got {given} of the inputs and {len(node.outputs)} outputs. Export the model again."
                )
                raise ModelError(msg)


@cache
def _required(domain: str, op_type: str, version: int) -> tuple[tuple[int, ...], int]:
    """(inputs that must be connected, number of outputs that must be there); none where nobody knows.

    `min_input` counts what has to be listed. Some of that may be listed as "": the trip count and condition of a Loop.
    """
    try:
        schema = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        return (), 0
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    needed = (index for index, one in enumerate(schema.inputs[: schema.min_input]) if one.option != optional)
    return tuple(needed), schema.min_output
