"""Raising the version of the ONNX operators that a model uses."""

import onnx
import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.model import opset, to_proto

MINIMUM = 13
"""The first opset whose DequantizeLinear has an axis: per-channel weights need it."""


def upgraded(model: ir.Model, version: int = MINIMUM) -> ir.Model:
    """The model at an opset of at least `version`; itself if it is there already. The argument is not changed.

    :raises ModelError: onnx can't convert it.
    """
    current = opset(model)
    if current is None or current >= version:
        return model
    try:
        converted = ir.from_proto(onnx.version_converter.convert_version(to_proto(model), version))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        msg = f"The model uses opset {current}; expected {version} or later, and onnx's converter fails: {reason}"
        raise ModelError(f"{msg}. Export the model again at opset {version} or later.") from error
    return converted
