"""Inner tensors of a model and their sizes, measured by running it once."""

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
    return {value: np.shape(array) for value, array in arrays(model, values, feeds).items()}


def arrays(
    model: ir.Model, values: Iterable[ir.Value], feeds: Mapping[str, np.ndarray], *, optimize: bool = True
) -> dict[ir.Value, np.ndarray]:
    """Tensors of the main graph on one set of inputs; empty where ONNX Runtime can't run the model.

    :param optimize: False for Q/DQ models as the host writes them, which not every runtime loads optimized.
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
        with runtime.session(copy, threads=1, optimize=optimize) as made:
            found = {**feeds, **runtime.run_session(made, feeds)}
    except ModelError as problem:
        logger.warning("What the graph does not state about its attentions stays unknown: %s", problem)
        return {}
    return {value: found[name] for name, value in wanted.items() if name in found}
