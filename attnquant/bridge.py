"""export_onnx(): a torch module that NNCF quantized becomes a Q/DQ model in the form that a target loads and fuses."""

from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import measures, runtime
from attnquant import model as models
from attnquant.emission import emit
from attnquant.emission.turned import turn_weights
from attnquant.emission.weights import fold_weights
from attnquant.errors import HostError, ModelError, VerificationError
from attnquant.saving import save
from attnquant.target import Target, parse_target

LEAST_DB = 20.0
"""SNR in dB of the ONNX model against the torch module below which nothing is written."""
_OLDEST = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """A written model and how close it is to the torch module."""

    model: ir.Model
    snr_db: float
    """ONNX Runtime against the quantized torch module on the example inputs: the worst float output."""
    notes: tuple[str, ...]
    """What the emission could not do and why."""


def export_onnx(
    quantized_module: Any,
    example_inputs: Any,
    path: str | PathLike[str],
    opset: int = 23,
    dynamic_shapes: Any = None,
    *,
    target: str | Target | None = None,
) -> ExportResult:
    """Write a module quantized by `nncf.quantize` as ONNX, with the same quantizers.

    :param quantized_module: nn.Module, or a program of torch.export (`.module()`); it is not changed.
    :param example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
    :param path: Written atomically, after the model was loaded and compared.
    :param opset: Native Attention from 23 on; written out in MatMul and Softmax before.
    :param dynamic_shapes: As for torch.export.export.
    :param target: As in `quantize`.
    :raises HostError: torch or NNCF is missing, the module is not quantized, or torch can't export it.
    :raises ModelError: the model can't be read or written.
    :raises VerificationError: it does not load, or is not the module's function; nothing is written.
    """
    bridge = _bridge()
    if opset < _OLDEST:
        msg = f"Opset {opset!r} is refused: torch's exporter writes opset {_OLDEST} and later. Give 23 for native Attention."
        raise HostError(msg)
    if not bridge.count_quantizers(quantized_module):
        msg = "The module holds no quantizer of NNCF: expected the result of nncf.quantize. Quantize it first."
        raise HostError(msg)
    chosen = target if isinstance(target, Target) else parse_target(target)
    arguments = _arguments(example_inputs)
    expected = bridge.run(quantized_module, arguments)
    model = models.load(bridge.exported(quantized_module, arguments, opset, dynamic_shapes))
    models.name_nodes(model)
    turn_weights(model)
    fold_weights(model, overflow_safe=chosen.name == "onnxruntime-cpu", keep_scales=True)
    report = emit(model, chosen)
    snr = _compared(model, bridge.inputs(arguments), expected)
    save(model, path)
    return ExportResult(model=model, snr_db=snr, notes=report.notes)


def _bridge() -> Any:
    try:
        from attnquant.host import torch_bridge
    except ImportError as error:
        msg = f"export_onnx needs torch, onnxscript and nncf: {error}. Install them with `pip install '.[torch]'`."
        raise HostError(msg) from error
    return torch_bridge


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, tuple | list) else (example,)), {}


def _compared(model: ir.Model, arrays: list[np.ndarray], expected: list[np.ndarray]) -> float:
    names = [value.name or "" for value in model.graph.inputs]
    try:
        outputs = list(runtime.run(model, dict(zip(names, arrays, strict=False))).values())
    except ModelError as error:
        msg = f"The exported model was not written: {error}"
        raise VerificationError(msg) from error
    shapes = [array.shape for array in outputs], [array.shape for array in expected]
    if shapes[0] != shapes[1]:
        msg = f"The exported model was not written: its outputs have the shapes {shapes[0]!r}, expected {shapes[1]!r}."
        raise VerificationError(msg)
    worst = min(_snr(one, other) for one, other in zip(expected, outputs, strict=True))
    if worst < LEAST_DB:
        msg = (
            f"The exported model was not written: its outputs are {worst:.1f} dB from the torch module's, expected at least "
            f"{LEAST_DB:.0f} dB. Please report this with the module."
        )
        raise VerificationError(msg)
    return worst


def _snr(expected: np.ndarray, found: np.ndarray) -> float:
    if not measures.is_float(expected):
        return measures.CEILING if np.array_equal(expected, found) else -measures.CEILING
    signal, other = expected.astype(np.float64), found.astype(np.float64)
    return measures.decibel(float(np.square(signal).sum()), float(np.square(signal - other).sum()))
