"""A torch module as a float ONNX model, held against the module on its example inputs."""

import contextlib
import io
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import runtime
from attnquant.errors import DataError, ModelError
from attnquant.exporting.axes import four_axes
from attnquant.exporting.inputs import Inputs, example, example_from
from attnquant.feeds import Feeds
from attnquant.measures import CEILING, Likeness, is_float, worst_snr

OPSET = 23
"""The first with an Attention operator."""
_OTHER_OPSET = 24
"""ONNX Runtime rejects the RotaryEmbedding of the exporter at OPSET for more than one sample."""
MINIMUM_DB = 60.0
"""Of the exported model against the module; float exports reach more than 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A module as ONNX."""

    model: ir.Model
    inputs: Inputs
    snr_db: float
    """Against the module on the example inputs, the worst float output."""


def is_module(value: object) -> bool:
    """Whether this is a torch.nn.Module; torch is not imported to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def export(module: Any, inputs: Inputs, *, dynamic_shapes: Mapping[str, Any] | None = None) -> Exported:
    """Export a float module in eval mode by torch's exporter (dynamo); its training flags are as before afterwards.

    :param inputs: One call, as `exporting.example` makes it.
    :param dynamic_shapes: {input: {axis: torch.export.Dim}} as torch.export takes it; None makes the first axis of every
        input the batch, {} fixes all sizes to those of the example.
    :raises HostError: onnxscript or ONNX Runtime is missing.
    :raises ModelError: torch can't export the module, or the result is not what the module computes.
    """
    if dynamic_shapes is None:
        inputs = _two_at_least(inputs)
        dynamic_shapes = _batch_first(inputs)
    with _evaluating(module):
        expected = _outputs(module, inputs)
        for opset in (OPSET, _OTHER_OPSET):
            model = _exported(module, inputs, dynamic_shapes, opset)
            try:
                return Exported(model=model, inputs=inputs, snr_db=_compared(model, inputs, expected))
            except ModelError:
                if opset == _OTHER_OPSET:
                    raise
    raise AssertionError


def from_data(
    module: Any, data: Feeds, *, example_inputs: Any = None, dynamic_shapes: Mapping[str, Any] | None = None
) -> Exported:
    """The same, with the first calibration sample as the call where no example inputs are given.

    :raises DataError: there is no sample, or it is not what the module takes.
    """
    if example_inputs is not None:
        return export(module, example(module, example_inputs), dynamic_shapes=dynamic_shapes)
    for first in data.raw():
        return export(module, example_from(module, first), dynamic_shapes=dynamic_shapes)
    msg = "Calibration data: expected at least one sample, got none. Give samples, or example_inputs."
    raise DataError(msg)


def _exported(module: Any, inputs: Inputs, shapes: Mapping[str, Any], opset: int) -> ir.Model:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dynamic = {name: shapes.get(name, {}) for name in inputs.names} if shapes else None
    plain = sdpa_kernel(SDPBackend.MATH)
    with tempfile.TemporaryDirectory(prefix="attnquant-export-") as folder, _quiet(), plain, four_axes():
        # Other kernels for the CPU return a context of other strides when a bias is added, which the exporter can't view.
        path = Path(folder) / "module.onnx"
        try:
            program = torch.onnx.export(
                module, (), kwargs=dict(inputs.values), dynamo=True, opset_version=opset, dynamic_shapes=dynamic,
                input_names=list(inputs.names), verbose=False,
            )  # fmt: skip
            program.save(str(path))
        except ImportError as problem:
            msg = f"Exporting a module needs onnxscript ({problem}): run `pip install attnquant[torch]`."
            raise ModelError(msg) from problem
        except Exception as problem:
            msg = (
                f"torch can't export {type(module).__name__} with inputs {_shown(inputs)}: {models.root_cause(problem)} "
                "Expected a module that torch.export takes. Where it fixes a size, name the axes that vary as "
                "dynamic_shapes={input: {axis: Dim}}, or fix all by dynamic_shapes={}; "
                "else export it yourself and pass the file."
            )
            raise ModelError(msg) from problem
        model = models.load(path)
        _require_free(module, model, dynamic_shapes=dynamic or {})
        # The folder goes: what lies beside the file has to be in memory.
        ir.external_data.load_to_model(model)
        return model


def _require_free(module: Any, model: ir.Model, *, dynamic_shapes: Mapping[str, Any]) -> None:
    """Raises ModelError where an axis that was to vary is fixed: the exporter does that without a word."""
    for value in model.graph.inputs:
        axes = dynamic_shapes.get(value.name or "") or {}
        fixed = [axis for axis in axes if value.shape is not None and isinstance(value.shape[axis], int)]
        if fixed:
            msg = (
                f"torch can't export {type(module).__name__} with axes {fixed} of input {value.name!r} of any size: the "
                f"module fixes them, and got {list(value.shape or ())}. Fix all by dynamic_shapes={{}}."
            )
            raise ModelError(msg)


def _compared(model: ir.Model, inputs: Inputs, expected: Sequence[np.ndarray]) -> float:
    """SNR of the exported model on the example inputs. Raises ModelError where it does not run or differs."""
    got = list(runtime.run(model, inputs.arrays).values())
    if [one.shape for one in got] != [one.shape for one in expected]:
        msg = (
            f"The exported model gives {[one.shape for one in got]}, the module {[one.shape for one in expected]}. Expected "
            "the same outputs: let forward return tensors only."
        )
        raise ModelError(msg)
    likeness = [Likeness() for _ in expected]
    for found, ours, theirs in zip(likeness, got, expected, strict=True):
        if is_float(theirs):
            found.add(theirs, ours)
    worst = worst_snr(likeness)
    if worst is None:
        return CEILING
    if worst < MINIMUM_DB:
        msg = (
            f"The exported model is {worst:.1f} dB from the module on the example inputs, expected {MINIMUM_DB:.0f} or "
            "more. This is a fault of torch's exporter or of ONNX Runtime: try other example inputs, or export it yourself."
        )
        raise ModelError(msg)
    return worst


def _outputs(module: Any, inputs: Inputs) -> list[np.ndarray]:
    """What the module gives, flat. Raises ModelError where it fails."""
    import torch
    from torch.utils import _pytree

    try:
        with torch.no_grad():
            result = module(**inputs.values)
    except Exception as problem:
        msg = (
            f"{type(module).__name__} fails on the example inputs {_shown(inputs)}: {models.root_cause(problem)} Expected "
            "inputs that it takes: pass example_inputs."
        )
        raise ModelError(msg) from problem
    leaves = [leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if torch.bfloat16 in {tensor.dtype for tensor in (*leaves, *inputs.values.values())}:
        msg = (
            f"{type(module).__name__} with inputs {_shown(inputs)}: expected float32 or float16, got bfloat16, which ONNX "
            "Runtime does not run. Convert module and data by `.float()`."
        )
        raise ModelError(msg)
    return [leaf.detach().cpu().numpy() for leaf in leaves]


def _two_at_least(inputs: Inputs) -> Inputs:
    """The example with two samples where it has one: torch takes a size of one for a constant."""
    import torch

    sizes = {value.shape[0] for value in inputs.values.values() if value.dim()}
    if sizes != {1}:
        return inputs
    values = inputs.values.items()
    return Inputs(values={name: torch.cat([value, value]) if value.dim() else value for name, value in values})


def _batch_first(inputs: Inputs) -> dict[str, Any]:
    import torch

    batch = torch.export.Dim("batch")
    return {name: {0: batch} if value.dim() else {} for name, value in inputs.values.items()}


def _shown(inputs: Inputs) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.values.items())


@contextlib.contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Eval mode, and every part's own training flag again afterwards."""
    flags = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in flags:
            part.training = training


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints and warns of itself."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
