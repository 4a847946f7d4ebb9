"""enable(), disable(), extended(): NNCF's own `nncf.quantize`, right for every attention of an ONNX model or a torch module.

The entry seam sends ONNX models through attnquant's pipeline, which calls NNCF for the rest. Everything can be undone.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from attnquant import model as models
from attnquant.errors import HostError
from attnquant.host.run import HostArguments, dataset_feeds
from attnquant.host.seams import Seam, SeamSwitch
from attnquant.quantization import quantize_loaded
from attnquant.recipe import load as load_recipe
from attnquant.saving import to_proto
from attnquant.target import Target, parse_target

_SWITCH = SeamSwitch()
_enabled_for: list[Target] = []
"""Targets of the nested blocks, the innermost last."""

_PARAMETERS = (
    "model",
    "calibration_dataset",
    "mode",
    "preset",
    "target_device",
    "subset_size",
    "fast_bias_correction",
    "model_type",
    "ignored_scope",
    "advanced_parameters",
)


def enable(target: str | Target | None = None) -> None:
    """From now on `nncf.quantize` is right for the attentions of ONNX models and returns the target's form.

    :param target: As in `attnquant.quantize`.
    :raises HostError: the installed NNCF is unknown, or a seam does not fit; nothing has been changed.
    """
    _switch([parse_target(target) if not isinstance(target, Target) else target])


def disable() -> None:
    """Leave NNCF as it was before `enable`."""
    _switch([])


@contextmanager
def extended(target: str | Target | None = None) -> Iterator[None]:
    """`enable` inside the block, as it was before after it."""
    outer = list(_enabled_for)
    enable(target)
    try:
        yield
    finally:
        _switch(outer)


def _switch(targets: list[Target]) -> None:
    _SWITCH.switch_off()
    _enabled_for[:] = []
    if targets:
        _SWITCH.switch_on([_entry_seam(targets[-1]), *_torch_seams()])
        _enabled_for[:] = targets


def _torch_seams() -> tuple[Seam, ...]:
    """The changes for torch, where NNCF has loaded torch already: nothing here loads it."""
    if "torch" not in sys.modules:
        return ()
    from attnquant.host.torch_seams import SEAMS

    return SEAMS


def _entry_seam(target: Target) -> Seam:
    return Seam(
        name="ONNX entry",
        why="nncf.quantize on an ONNX model goes through recognition, placement and emission for the target.",
        module="nncf.onnx.quantization.quantize_model",
        attribute="quantize_impl",
        parameters=_PARAMETERS,
        replace=lambda original: _entry(original, target),
    )


def _entry(original: Callable[..., Any], target: Target) -> Callable[..., Any]:
    def quantize_impl(
        model: Any,
        calibration_dataset: Any,
        mode: Any = None,
        preset: Any = None,
        target_device: Any = None,
        subset_size: int = 300,
        fast_bias_correction: bool = True,
        model_type: Any = None,
        ignored_scope: Any = None,
        advanced_parameters: Any = None,
    ) -> Any:
        if mode is not None:
            msg = (
                f"FP8 mode {mode!r} is refused for ONNX models: it quantizes V too, and the result is no valid graph. "
                "Call nncf.quantize without `mode`."
            )
            raise HostError(msg)
        arguments = HostArguments(
            preset=preset,
            target_device=target_device,
            subset_size=subset_size,
            fast_bias_correction=fast_bias_correction,
            model_type=model_type,
            ignored_scope=ignored_scope,
            advanced_parameters=advanced_parameters,
        )
        result = quantize_loaded(
            models.load(model),
            dataset_feeds(calibration_dataset, subset_size),
            recipe=load_recipe("int8"),
            target=target,
            arguments=arguments,
        )
        return to_proto(result.model)

    quantize_impl.__attnquant_original__ = original  # type: ignore[attr-defined]
    return quantize_impl
