"""Emission: a quantized model in the form that a runtime loads and fuses. Every pass works in place on an onnx_ir model.

A pass is a module with `apply(model, target)`, which returns the number of changes; its docstring says what it requires and
ensures.
"""

from attnquant.emission.execution import ExecutionReport, executed
from attnquant.emission.folding import simplify
from attnquant.emission.narrow import narrow
from attnquant.emission.pipeline import EmissionReport, emit
from attnquant.emission.widen import widen

__all__ = ["EmissionReport", "ExecutionReport", "emit", "executed", "narrow", "simplify", "widen"]
