"""Control flow of a model: what is inside stays float, and ONNX Runtime captures no CUDA graph of such a session."""

from collections.abc import Iterator

import onnx_ir as ir

from attnquant.audit.problem import Problem
from attnquant.graph import bodies, is_onnx

FLOW = ("If", "Loop", "Scan")


def control_flow(model: ir.Model) -> Iterator[Problem]:
    """One warning that names every If, Loop and Scan, of the main graph, of their own bodies and of functions."""
    found = [(path, node) for path, body in bodies(model) for node in body if is_onnx(node, *FLOW)]
    if not found:
        return
    rows = [f"{node.op_type} {node.name!r}" + (f" in {path}" if path else "") for path, node in found]
    reason = (
        f"the model has {', '.join(rows)}: what is inside stays float, and ONNX Runtime captures no CUDA graph of a session "
        "with control flow. Export the model without it to get both."
    )
    tensor = next((value.name or "" for value in found[0][1].outputs), "")
    yield Problem(kind="control flow", node=found[0][1].name or "", tensor=tensor, reason=reason, severity="warning")
