"""Raising the version of the ONNX operators that a model uses."""

import onnx
import onnx_ir as ir

from attnquant.border import declare
from attnquant.errors import ModelError
from attnquant.graph import bodies
from attnquant.model import copy, opset, root_cause, to_proto
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
        converted = _converted(model, version)
    except Exception:
        try:
            converted = _converted(model, version, declared=False)
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


_STRANGE = "attnquant.unconverted"


def _converted(model: ir.Model, version: int, *, declared: bool = True) -> ir.Model:
    """Converted by onnx; operators that ONNX Runtime put into the domain of the standard stay as they are.

    :param declared: False leaves out what is declared of inner tensors: onnx stumbles over what no runtime minds.
    """
    own = copy(model)
    standard = [node for _, body in bodies(own) for node in body if node.domain == ""]
    strange = [node for node in standard if not onnx.defs.has(node.op_type) and node.op_identifier() not in own.functions]
    for node in strange:
        node.domain = _STRANGE
    if strange:
        own.opset_imports[_STRANGE] = 1
    proto = to_proto(own)
    if not declared:
        del proto.graph.value_info[:]
    converted = ir.from_proto(onnx.version_converter.convert_version(proto, version))
    for node in (node for _, body in bodies(converted) for node in body if node.domain == _STRANGE):
        node.domain = ""
    converted.opset_imports.pop(_STRANGE, None)
    declare(converted, model)
    return converted
