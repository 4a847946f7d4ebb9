"""NNCF's calibration statistics, reduced where they arise: only scalars and vectors leave the session.

Stock NNCF makes every observed activation, and every weight, a graph output, and reduces the arrays of each sample in numpy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import nncf
import numpy as np
import onnx
import onnx_ir as ir
from nncf.common.graph.transformations.commands import TargetType
from nncf.common.logging import nncf_logger
from nncf.common.logging.track_progress import track
from nncf.common.tensor_statistics.aggregator import EMPTY_DATASET_ERROR
from nncf.common.tensor_statistics.collectors import (
    AggregatorBase,
    MaxAggregator,
    MinAggregator,
    TensorCollector,
    TensorReducerBase,
)
from nncf.onnx.graph.node_utils import get_input_edge, get_input_edges_mapping
from nncf.onnx.graph.onnx_helper import get_array_from_tensor, get_name_to_node_map
from nncf.tensor import Tensor

from attnquant import runtime
from attnquant.errors import ModelError
from attnquant.graph import is_onnx, tensor_name
from attnquant.host.memory import of_model
from attnquant.host.plan import HostPlan, current_plan
from attnquant.host.reductions import Reduction, Reductions, reduction, settled

Arrays = Mapping[str, np.ndarray]
Observed = Sequence[tuple[str, TensorCollector]]
"""Tensors of the main graph with what wants to know them."""
Source = tuple[str, int]
"""A tensor and the hash of a reducer."""

_SHAPE = Reduction(op_type="Shape")


def collect(original: Callable[..., None]) -> Callable[..., None]:
    """The replacement of ONNXStatisticsAggregator.collect_statistics."""

    def replacement(self: Any, model: onnx.ModelProto, graph: Any) -> None:
        plan = current_plan()
        if plan is None:
            original(self, model, graph)
        elif self.statistic_points:
            _collect(self, model, graph, plan)

    return replacement


def _collect(aggregator: Any, model: onnx.ModelProto, graph: Any, plan: HostPlan) -> None:
    expected = aggregator._get_iterations_number()
    samples = 0
    register = Registrar(model, list(_observed(aggregator, model, graph)), plan)
    data = islice(aggregator.dataset.get_inference_data(), expected)
    for sample in track(data, total=expected, description="Statistics collection"):
        register.sample(sample)
        samples += 1
    register.finish()
    if samples == 0:
        raise nncf.ValidationError(EMPTY_DATASET_ERROR)
    if aggregator.stat_subset_size is not None and aggregator.stat_subset_size > samples:
        nncf_logger.warning(
            f"Dataset contains only {samples} samples, smaller than the requested subset size {aggregator.stat_subset_size}."
        )


def _observed(aggregator: Any, model: onnx.ModelProto, graph: Any) -> Iterator[tuple[str, TensorCollector]]:
    """(tensor, collector) of every statistic point."""
    inputs, nodes = get_input_edges_mapping(graph), get_name_to_node_map(model)
    for _, point, collector in aggregator.statistic_points.get_tensor_collectors():
        target = point.target_point
        if target.target_node_name in inputs:
            yield get_input_edge(target.target_node_name, inputs, nodes), collector
        elif target.type == TargetType.POST_LAYER_OPERATION:
            yield nodes[target.target_node_name].output[target.port_id], collector
        else:
            yield nodes[target.target_node_name].input[target.port_id], collector


class Sink:
    """What one aggregator is to be told. Running minima and maxima are taken here and told it once, at the end."""

    def __init__(self, aggregator: AggregatorBase) -> None:
        self._aggregator = aggregator
        over_samples = 0 in aggregator._aggregation_axes
        folds = {MinAggregator: np.minimum, MaxAggregator: np.maximum}
        self._fold = folds.get(type(aggregator)) if over_samples else None
        self._total: np.ndarray | None = None
        self._count = 0

    def add(self, array: np.ndarray) -> None:
        """One sample's value."""
        limit = self._aggregator.num_samples
        if limit is not None and self._count >= limit:
            return
        self._count += 1
        if self._fold is None or (self._total is not None and self._total.shape != array.shape):
            self._aggregator.register_reduced_input(Tensor(array))
        elif self._total is None:
            self._total = array
        else:
            self._total = self._fold(self._total, array)

    def finish(self) -> None:
        """Tell the aggregator what it has not been told yet."""
        if self._total is not None:
            self._aggregator.register_reduced_input(Tensor(self._total))


class Registrar:
    """Runs samples and hands to the aggregators of collectors what their reducers make of the observed tensors."""

    def __init__(self, model: onnx.ModelProto, observed: Observed, plan: HostPlan) -> None:
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        observed = [(edge, collector) for edge, collector in observed if collector.enabled]
        self._routes = [
            ((edge, reducer), port, Sink(aggregator))
            for edge, collector in observed
            for (reducer, port, _), aggregator in collector.aggregators.items()
        ]
        self._fixed = {
            (edge, hash(reducer)): found
            for edge, collector in observed
            if edge in constants
            for reducer in collector.reducers
            if (found := reducer([Tensor(get_array_from_tensor(model, constants[edge]))])) is not None
        }
        activations = [(edge, collector) for edge, collector in observed if edge not in constants]
        self._inside = Observation(model, activations, plan.folder)
        self._outside = cache(lambda: Observation(model, activations, plan.folder, inside=False))
        self._memory = plan.memory
        # What SmoothQuant asks of the float model is the same for every strength; it alone asks nothing of weights.
        self._model = None if self._fixed else of_model(model, [source for source, _, _ in self._routes])

    def sample(self, sample: Arrays) -> None:
        """Register one sample.

        :raises ModelError: the model fails to run.
        """
        if self._model is None:
            found = self._run(sample) | self._fixed
        else:
            found = self._memory.remembered(self._model, sample, lambda: self._run(sample))
        for source, port, sink in self._routes:
            if (value := found.get(source)) is not None:
                sink.add(value[port].data)

    def _run(self, sample: Arrays) -> dict[Source, Sequence[Tensor]]:
        try:
            return self._inside.run(sample)
        except ModelError:
            # Some releases of the runtime have no minimum of a tensor without elements; numpy is not asked for one.
            return self._outside().run(sample)

    def finish(self) -> None:
        """Complete the statistics of the samples."""
        for _, _, sink in self._routes:
            sink.finish()


class Observation:
    """A session of the observed part of a model with the reductions at its end.

    :param folder: Where the external data of `model` lie.
    :param inside: False fetches every tensor and lets the reducers run here.
    :raises ModelError: the runtime does not load the model.
    """

    def __init__(self, model: onnx.ModelProto, observed: Observed, folder: str | None, *, inside: bool = True) -> None:
        source = ir.from_proto(model)
        values = {tensor_name(value): value for value in (*source.graph.inputs, *_made(source.graph))}
        reductions, outputs = Reductions(source), {}
        self._sources: dict[Source, tuple[TensorReducerBase, str]] = {}
        """Each reducer with the output that holds its result, or its tensor."""
        self._shapes: dict[str, str] = {}
        """{tensor: output that holds its shape}"""
        for edge, collector in observed:
            value = values[edge]
            dtype, rank = _kind(value)
            shape = reductions.of(value, _SHAPE)
            self._shapes[edge] = tensor_name(shape)
            outputs[tensor_name(shape)] = shape
            for reducer in collector.reducers:
                node = reduction(reducer, dtype, rank) if inside else None
                output = value if node is None else reductions.of(value, node)
                self._sources[edge, hash(reducer)] = reducer, tensor_name(output)
                outputs[tensor_name(output)] = output
        self._fed = {tensor_name(value) for value in source.graph.inputs} & outputs.keys()
        self._wanted = [name for name in outputs if name not in self._fed]
        source.graph.outputs[:] = [outputs[name] for name in self._wanted]
        _prune(source.graph)
        self._session = runtime.session_of(ir.to_proto(source), folder) if self._wanted else None

    def run(self, sample: Arrays) -> dict[Source, Sequence[Tensor]]:
        """What the reducers give for one sample; nothing of a tensor without elements.

        :raises ModelError: the runtime can't run it.
        """
        found = {} if self._session is None else runtime.run_session(self._session, sample, self._wanted)
        found |= {name: np.array(sample[name]) for name in self._fed}
        empty = {edge for edge, shape in self._shapes.items() if not found[shape].all()}
        return {
            (edge, key): reducer([Tensor(found[output])]) if output == edge else settled(reducer, found[output])
            for (edge, key), (reducer, output) in self._sources.items()
            if edge not in empty
        }


def _kind(value: ir.Value) -> tuple[ir.DataType | None, int | None]:
    """Element type and rank, if known. SmoothQuant's own Mul has neither: those of what it scales."""
    node = value.producer()
    if value.dtype is None and node is not None and is_onnx(node, "Mul"):
        operands = [_kind(operand) for operand in node.inputs if operand is not None]
        ranks = [rank for _, rank in operands if rank is not None]
        return operands[0][0], max(ranks) if len(ranks) == len(operands) else None
    return value.dtype, None if value.shape is None else value.shape.rank()


def _prune(graph: ir.Graph) -> None:
    """Drop nodes behind what is observed. Those before it keep all their outputs: kernels expect some of them together."""
    for node in reversed(graph):
        if not any(value.is_graph_output() or value.uses() for value in node.outputs):
            graph.remove(node, safe=True)


def _made(graph: ir.Graph) -> Iterator[ir.Value]:
    return (value for node in graph for value in node.outputs)
