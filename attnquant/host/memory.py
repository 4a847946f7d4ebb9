"""What quantizations of one model have in common: NNCF is asked for it once, though choices are compared by making each."""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

_MOST = 2**26
"""Bytes of remembered statistics: a few hundred samples of a model of 100 layers."""


@dataclass(slots=True, kw_only=True)
class HostMemory:
    """Results of the host for one prepared model under one set of arguments; only SmoothQuant's strength may differ."""

    setups: dict[bytes, Any] = field(default_factory=dict)
    statistics: dict[bytes, Any] = field(default_factory=dict)
    size: int = 0
    """Bytes of `statistics`."""

    def setup(self, plan: Any, algorithm: Any, graph: Any, find: Callable[[], Any]) -> Any:
        """NNCF's quantizer setup for a graph: the same for graphs that differ in nothing but weights."""
        key = _digest(_structure(graph), sorted(plan.ignored), plan.points, algorithm._target_device, algorithm._model_type)
        if key not in self.setups:
            self.setups[key] = copy.deepcopy(find())
        return copy.deepcopy(self.setups[key])

    def remembered(self, model: bytes, sample: Mapping[str, np.ndarray], find: Callable[[], Any]) -> Any:
        """Statistics of one sample, {source: tensors}; `model` is what `of_model` gives."""
        arrays = [(name, array.dtype.str, array.shape, array.tobytes()) for name, array in sorted(sample.items())]
        key = _digest(model, arrays)
        if key in self.statistics:
            return self.statistics[key]
        found = find()
        size = sum(tensor.data.nbytes for tensors in found.values() for tensor in tensors)
        if self.size + size <= _MOST:
            self.statistics[key] = found
            self.size += size
        return found


def of_model(model: onnx.ModelProto, sources: Sequence[Any]) -> bytes:
    """A fingerprint of a model and of what is asked of it. Weights in files count by name: no name is used twice."""
    return _digest(model.graph.SerializeToString(deterministic=True), sorted(map(repr, sources)))


def _structure(graph: Any) -> list[Any]:
    """Nodes and edges of an NNCFGraph."""
    nodes = [(node.node_id, node.node_name, node.node_type, node.metatype.__name__) for node in graph.get_all_nodes()]
    edges = [
        (edge.from_node.node_id, edge.to_node.node_id, edge.output_port_id, edge.input_port_id, str(edge.dtype),
         tuple(edge.tensor_shape))
        for edge in graph.get_all_edges()
    ]  # fmt: skip
    return [nodes, edges]


def _digest(*parts: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
        digest.update(b"\0")
    return digest.digest()
