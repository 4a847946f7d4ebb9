"""Raising the version of the ONNX operators that a model uses."""

import onnx
import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.model import opset, root_cause, to_proto
from attnquant.runtime import session

MINIMUM = 13
"""The first opset whose DequantizeLinear has an axis: per-channel weights need it."""


def upgraded(model: ir.Model, version: int = MINIMUM) -> ir.Model:
    """The model at an opset of at least `version`; itself if it is there already. The argument is not changed.

    :raises ModelError: onnx can't convert it.
    """
    current = opset(model)
    if current is None or current >= version:
        return model
    advice = f"Expected opset {version} or later, got {current!r}: export the model again at a later opset."
    try:
        converted = ir.from_proto(onnx.version_converter.convert_version(to_proto(model), version))
    except Exception as error:
        msg = f"onnx can't convert the model's opset: {root_cause(error)}. {advice}"
        raise ModelError(msg) from error
    try:
        # The converter leaves the bodies of If, Loop and Scan as they are; what they hold may not be valid any more.
        with session(converted, optimize=False):
            pass
    except ModelError as error:
        msg = f"The model does not load after a conversion to opset {version}: {error} {advice}"
        raise ModelError(msg) from error
    return converted
