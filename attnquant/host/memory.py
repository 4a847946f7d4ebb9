"""What quantizations of one model have in common: NNCF is asked for it once, though choices are compared by making each."""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from attnquant.host.known import SHAPE, WHOLE, Found, Key, has, told

_MOST = 2**27
"""Bytes of remembered statistics: a few hundred samples of a model of 100 layers."""

_FEW = 8
"""Elements of a tensor that may be a Resize's factors: one for each axis, and as many again."""
_WEIGHTS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)


@dataclass(slots=True, kw_only=True)
class HostMemory:
    """Results of the host for one prepared model under one set of arguments; range estimator and SmoothQuant may differ."""

    setups: dict[bytes, Any] = field(default_factory=dict)
    graphs: dict[bytes, Any] = field(default_factory=dict)
    statistics: dict[bytes, Found] = field(default_factory=dict)
    asked: dict[Key, None] = field(default_factory=dict)
    """What was asked so far, in order: a pass over the samples finds all of it."""
    size: int = 0
    """Bytes of `statistics`."""

    def together(self, keys: Sequence[Key]) -> list[list[np.ndarray]]:
        """Of each sample seen, the values of these keys; samples that lack one, or have no elements, are left out."""
        known = [found for found in self.statistics.values() if all(has(found, key) for key in keys)]
        return [[told(found, key) for key in keys] for found in known if all(found[name][SHAPE].all() for name, _ in keys)]

    def graph(self, model: onnx.ModelProto, find: Callable[[], Any]) -> Any:
        """NNCF's graph of a model; nothing in NNCF's ONNX backend changes one that it did not copy before."""
        key = _digest(*_read_of(model))
        if key not in self.graphs:
            self.graphs[key] = find()
        return self.graphs[key]

    def setup(self, plan: Any, algorithm: Any, graph: Any, find: Callable[[], Any]) -> Any:
        """NNCF's quantizer setup for a graph: the same for graphs that differ in nothing but weights."""
        key = _digest(_structure(graph), sorted(plan.ignored), plan.points, algorithm._target_device, algorithm._model_type)
        if key not in self.setups:
            self.setups[key] = copy.deepcopy(find())
        return copy.deepcopy(self.setups[key])

    def remembered(self, sample: Mapping[str, np.ndarray], wanted: Iterable[Key], find: Callable[[], Found]) -> Found:
        """What is known of one sample, at least `wanted` of every tensor with elements; `find` runs it."""
        arrays = [((name, array.dtype.str, array.shape), array.tobytes()) for name, array in sorted(sample.items())]
        key = _digest(*(part for both in arrays for part in both))  # bytes by themselves: repr of caches takes seconds
        known = self.statistics.get(key, {})
        if known and all(has(known, one) for one in wanted):
            return known
        found = find()
        for name, of_tensor in known.items():
            found[name] = {**found.get(name, {}), **of_tensor}
        kept = {name: {one: array for one, array in of.items() if one != WHOLE} for name, of in found.items()}
        size = _bytes(kept) - _bytes(known)
        if self.size + size <= _MOST:
            self.statistics[key] = kept
            self.size += size
        return found


def _read_of(model: onnx.ModelProto) -> Iterator[bytes]:
    """All of a model but the values of its weights: whole numbers may be sizes, and a few numbers a Resize's factors."""
    graph = model.graph
    for part in (*model.opset_import, *graph.input, *graph.output, *graph.value_info, *graph.node):
        yield part.SerializeToString(deterministic=True)
    for tensor in graph.initializer:
        if tensor.data_type in _WEIGHTS and math.prod(tensor.dims) > _FEW:
            yield repr((tensor.name, tensor.data_type, tuple(tensor.dims))).encode()
        else:
            yield tensor.SerializeToString(deterministic=True)


def _bytes(found: Found) -> int:
    return sum(array.nbytes for of_tensor in found.values() for array in of_tensor.values())


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
