"""The border of a graph: what its inputs and outputs are declared to be is a contract, whatever happens inside."""

import onnx_ir as ir


def declare(made: ir.Model, model: ir.Model) -> None:
    """Declare inputs and outputs as `model` does, in place: NNCF and onnx's converter infer and write over what was said."""
    sides = ((made.graph.inputs, model.graph.inputs), (made.graph.outputs, model.graph.outputs))
    for ours, theirs in sides:
        declared = {value.name: value for value in theirs}
        for value in ours:
            if (own := declared.get(value.name)) is not None:
                value.type, value.shape = own.type, None if own.shape is None else own.shape.copy()
