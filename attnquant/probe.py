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


def borne_out(
    model: ir.Model, feeds: Mapping[str, np.ndarray]
) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """(the model without the declared shapes of inner tensors that a run contradicts, the outputs of that run).

    Runtimes infer the shapes of inner tensors for themselves and run models whose declarations are those of another export;
    what calibrates and rewrites a model reads them. The argument is not changed; it is returned where all is right.

    :param feeds: One input set, {input name: array}.
    :raises ModelError: the model does not load or does not run.
    """
    doubtful = [value for node in model.graph for value in node.outputs if _is_sized(value)]
    if not doubtful:
        return model, runtime.run(model, feeds)
    measured = _measured(model, [tensor_name(value) for value in doubtful], feeds)
    if measured is None:  # what the shapes are asked with does not run: the model's own error, or none
        return model, runtime.run(model, feeds)
    shapes, outputs = measured
    wrong = {tensor_name(value) for value in doubtful if _differs(value.shape, shapes[tensor_name(value)])}
    if not wrong:
        return model, outputs
    logger.warning("Declared shapes of %d inner tensors are left out: a run gives others (%r)", len(wrong), min(wrong))
    own = models.copy(model)
    for value in (value for node in own.graph for value in node.outputs if value.name in wrong):
        value.shape = None
    return own, outputs


def _is_sized(value: ir.Value) -> bool:
    sized = value.shape is not None and any(isinstance(dim, int) for dim in value.shape.dims)
    return sized and bool(value.uses()) and not value.is_graph_output() and isinstance(value.type, ir.TensorType)


def _differs(declared: ir.Shape | None, made: np.ndarray) -> bool:
    dims = [] if declared is None else list(declared.dims)
    return len(dims) != len(made) or any(
        isinstance(dim, int) and dim != size for dim, size in zip(dims, made, strict=True)
    )


def _measured(
    model: ir.Model, names: list[str], feeds: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
    """({inner tensor: its shape}, outputs) of one run that believes no declaration of an inner tensor."""
    twin = models.copy(model)
    made = {tensor_name(value): value for node in twin.graph for value in node.outputs}
    for value in made.values():
        if not value.is_graph_output():
            value.shape = None
    asked = {}
    for name in names:
        node = ir.Node("", "Shape", [made[name]], name=f"{name}.attnquant_shape")
        node.outputs[0].name, node.outputs[0].type = f"{name}.attnquant_shape", ir.TensorType(ir.DataType.INT64)
        twin.graph.append(node)
        asked[name] = node.outputs[0]
    twin.graph.outputs.extend(asked.values())
    try:
        found = runtime.run(twin, feeds)
    except ModelError:
        return None
    return {name: found.pop(str(value.name)) for name, value in asked.items()}, found


def not_finite(model: ir.Model, samples: Iterable[Mapping[str, np.ndarray]]) -> str | None:
    """Sentences on the first node whose output holds infinite numbers and the first whose holds NaN, in the graph's order.

    Samples are run up to the first with NaN; float32 tensors of the main graph are asked. None where all is finite, or where
    the model does not run with what asks.
    """
    twin = models.copy(model)
    made = [(node, value) for node in twin.graph for value in node.outputs if value.dtype == ir.DataType.FLOAT]
    asked = {(kind, place): _counted(twin.graph, value, kind) for place, (_, value) in enumerate(made) for kind in _KINDS}
    twin.graph.outputs[:] = asked.values()
    found: dict[str, tuple[int, int]] = {}
    try:
        with runtime.session(twin, optimize=False) as session:
            for index, sample in enumerate(samples):
                counts = runtime.run_session(session, sample)
                for (kind, place), value in asked.items():
                    if counts[tensor_name(value)] and kind not in found:
                        found[kind] = (place, index)
                if "IsNaN" in found:
                    break
    except ModelError:
        return None
    told = []
    for place, index, word in sorted((*where, _KINDS[kind]) for kind, where in found.items()):
        node, value = made[place]
        told.append(f"Node {node.name!r} ({node.op_type}): output {value.name!r} holds {word} on sample {index}.")
    return " ".join(told) or None


_KINDS = {"IsNaN": "NaN", "IsInf": "infinite numbers"}


def _counted(graph: ir.Graph, value: ir.Value, kind: str) -> ir.Value:
    """How many elements are NaN or infinite, as a new tensor."""
    name = f"{value.name}.attnquant_{kind}"
    told = ir.Node("", kind, [value], name=name)
    cast = ir.Node("", "Cast", told.outputs, [ir.AttrInt64("to", ir.DataType.INT64.value)], name=f"{name}_cast")
    number = ir.Node("", "ReduceSum", cast.outputs, [ir.AttrInt64("keepdims", 0)], name=f"{name}_sum")
    for node, dtype in ((told, ir.DataType.BOOL), (cast, ir.DataType.INT64), (number, ir.DataType.INT64)):
        node.outputs[0].name, node.outputs[0].type = f"{node.name}_output", ir.TensorType(dtype)
        graph.append(node)
    return number.outputs[0]


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
