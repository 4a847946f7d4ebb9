"""Sizes of inner tensors, measured by running the model once."""

import logging
from collections.abc import Iterable, Mapping

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import runtime
from attnquant.data import check_sample
from attnquant.errors import ModelError
from attnquant.graph import tensor_name

logger = logging.getLogger(__name__)


def sizes(model: ir.Model, values: Iterable[ir.Value], feeds: Mapping[str, np.ndarray]) -> dict[ir.Value, tuple[int, ...]]:
    """Sizes of tensors of the main graph on one set of inputs; empty where ONNX Runtime can't run the model.

    :raises DataError: the feeds don't fit the model's inputs.
    """
    wanted = {tensor_name(value): value for value in values}
    if not wanted:
        return {}
    check_sample(dict(feeds), model)
    copy = models.copy(model)
    missing = set(wanted) - {tensor_name(value) for value in copy.graph.outputs}
    copy.graph.outputs.extend(output for node in copy.graph for output in node.outputs if output.name in missing)
    try:
        arrays = {**feeds, **runtime.run(copy, feeds, threads=1)}
    except ModelError as problem:
        logger.warning("Heads and head sizes that the graph does not state stay unknown: %s", problem)
        return {}
    return {value: np.shape(arrays[name]) for name, value in wanted.items() if name in arrays}
