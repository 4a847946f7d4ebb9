"""NNCF's calibration statistics, reduced where they arise: only scalars and vectors leave the session.

Stock NNCF makes every observed activation, and every weight, a graph output, and reduces the arrays of each sample in numpy.
"""

from collections import defaultdict
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
from nncf.common.tensor_statistics.collectors import TensorCollector
from nncf.onnx.graph.node_utils import get_input_edge, get_input_edges_mapping
from nncf.onnx.graph.onnx_helper import get_array_from_tensor, get_name_to_node_map
from nncf.tensor import Tensor

from attnquant.errors import ModelError
from attnquant.host.bars import on_terminals
from attnquant.host.known import SHAPE, WHOLE, Found
from attnquant.host.memory import HostMemory
from attnquant.host.observation import Observation, tensors
from attnquant.host.plan import HostPlan, current_plan
from attnquant.host.requests import keys, request
from attnquant.host.sinks import Group, Sink

Arrays = Mapping[str, np.ndarray]
Observed = Sequence[tuple[str, TensorCollector]]
"""Tensors of the main graph with what wants to know them."""
Source = tuple[str, int]
"""A tensor and the hash of a reducer."""


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
    for sample in on_terminals(track)(data, total=expected, description="Statistics collection"):
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


class Registrar:
    """Runs samples and hands to the aggregators of collectors what their reducers make of the observed tensors."""

    def __init__(self, model: onnx.ModelProto, observed: Observed, plan: HostPlan) -> None:
        constants = {tensor.name: tensor for tensor in model.graph.initializer}
        observed = [(edge, collector) for edge, collector in observed if collector.enabled]
        sinks: dict[Source, list[tuple[int, Sink]]] = defaultdict(list)
        for edge, collector in observed:
            for (reducer, port, _), aggregator in collector.aggregators.items():
                sinks[edge, reducer].append((port, Sink(aggregator)))
        self._fixed = [
            (found, sinks[edge, hash(reducer)])
            for edge, collector in observed
            if edge in constants
            for reducer in collector.reducers
            if (found := reducer([Tensor(get_array_from_tensor(model, constants[edge]))])) is not None
        ]
        activations = [(edge, collector) for edge, collector in observed if edge not in constants]
        source, self._memory = ir.from_proto(model), plan.memory if plan.remembers else HostMemory()
        values = tensors(source)
        requests = {
            (edge, hash(reducer)): request(reducer, values[edge])
            for edge, collector in activations
            for reducer in collector.reducers
        }
        self._groups = [(one.needs[0][0], Group(one, sinks[place])) for place, one in requests.items()]
        wanted = list(dict.fromkeys(keys(requests.values())))
        self._memory.asked.update(dict.fromkeys(key for key in wanted if key[1] != WHOLE))
        self._wanted = wanted
        also = [key for key in self._memory.asked if key[0] in values]
        self._observation = cache(lambda inside: Observation(source, [*wanted, *also], plan.folder, inside=inside))

    def sample(self, sample: Arrays) -> None:
        """Register one sample.

        :raises ModelError: the model fails to run.
        """
        found = self._memory.remembered(sample, self._wanted, lambda: self._run(sample)) if self._groups else {}
        for tensor, group in self._groups:
            if found[tensor][SHAPE].all():
                group.add(found)
        for value, sinks in self._fixed:
            for port, sink in sinks:
                sink.add(value[port].data)

    def _run(self, sample: Arrays) -> Found:
        try:
            return self._observation(True).run(sample)
        except ModelError:
            # Some releases of the runtime have no minimum of a tensor without elements; numpy is not asked for one.
            return self._observation(False).run(sample)

    def finish(self) -> None:
        """Complete the statistics of the samples."""
        for _, group in self._groups:
            group.finish()
        for _, sinks in self._fixed:
            for _, sink in sinks:
                sink.finish()
