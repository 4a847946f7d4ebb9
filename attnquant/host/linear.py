"""What takes stock NNCF time with the square of a model's layers, in time with their number; the results are the same.

What is listed or made again for every node or quantizer is made once, what is searched for is counted, and a path is
followed no further than to its end.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import networkx as nx

from attnquant.host.plan import current_plan
from attnquant.host.seams import Seam

_BUILDER = "nncf.onnx.graph.nncf_graph_builder"
_WRITER = "nncf.onnx.graph.model_transformer"

Made = dict[int, tuple[Any, Any]]
"""{identity of what is read: (it, what was made of it)}"""

_READ: ContextVar[Made | None] = ContextVar("attnquant_host_read", default=None)
"""Makers of the tensors of models while a graph is built from one."""
_PLACED: ContextVar[Made | None] = ContextVar("attnquant_host_placed", default=None)
"""Edges behind the inputs of graphs while quantizers are placed in one."""
_WRITTEN: ContextVar[Made | None] = ContextVar("attnquant_host_written", default=None)
"""Places of the nodes of models while quantizers are written into one."""

Function = Callable[..., Any]


def _within(variable: ContextVar[Made | None]) -> Callable[[Any], Any]:
    """The replacement of a function during which `variable` holds what is made."""

    def replaced(original: Any) -> Any:
        static = isinstance(original, staticmethod)
        function = original.__func__ if static else original

        def replacement(*arguments: Any, **keywords: Any) -> Any:
            token = variable.set({})
            try:
                return function(*arguments, **keywords)
            finally:
                variable.reset(token)

        return staticmethod(replacement) if static else replacement

    return replaced


def _once(variable: ContextVar[Made | None]) -> Callable[[Any], Any]:
    """The replacement of a function of one argument that is called once for each while `variable` holds something."""

    def replaced(original: Any) -> Any:
        static = isinstance(original, staticmethod)
        function = original.__func__ if static else original

        def replacement(source: Any) -> Any:
            made = variable.get()
            if made is None:
                return function(source)
            if id(source) not in made:
                made[id(source)] = source, function(source)
            return made[id(source)][1]

        return staticmethod(replacement) if static else replacement

    return replaced


def read(original: "staticmethod[..., Any]") -> "staticmethod[..., Any]":
    """The replacement of GraphConverter.create_nncf_graph: models that differ in nothing but weights have one graph."""
    function = _within(_READ)(original).__func__

    def replacement(onnx_model: Any) -> Any:
        plan = current_plan()
        return function(onnx_model) if plan is None else plan.memory.graph(onnx_model, lambda: function(onnx_model))

    return staticmethod(replacement)


def numbered(original: Function) -> Function:
    """The replacement of NNCFGraph.add_nncf_node, which looks for the largest number given so far.

    While a graph is built from a model nothing is taken away and nobody chooses a number: they are 0, 1, 2, ...
    """

    def replacement(self: Any, node_name: str, node_type: str, node_metatype: Any, *rest: Any, **keywords: Any) -> Any:
        if _READ.get() is not None and not rest:
            keywords.setdefault("node_id_override", len(self._node_id_to_key_dict))
        return original(self, node_name, node_type, node_metatype, *rest, **keywords)

    return replacement


class _Places:
    """Where the nodes of a model are that grows by two in front of each node that is asked for."""

    def __init__(self, model: Any) -> None:
        self._first: dict[str, int] = {}
        for place, node in enumerate(model.graph.node):
            self._first.setdefault(node.name, place)
        self._grown: list[int] = []

    def next(self, name: str) -> int | None:
        """The place of a node, in front of which two others come to stand now."""
        place = self._first.get(name)
        if place is None:
            return None
        before = 2 * bisect_right(self._grown, place)
        insort(self._grown, place)
        return place + before


def index(original: Function) -> Function:
    """The replacement of get_node_index where a quantizer and its dequantizer are put in front of the node found."""

    def replacement(model: Any, node_name: str) -> int | None:
        made = _WRITTEN.get()
        if made is None:
            found: int | None = original(model, node_name)
            return found
        if id(model) not in made:
            made[id(model)] = model, _Places(model)
        places: _Places = made[id(model)][1]
        return places.next(node_name)

    return replacement


def shortest_paths(graph: nx.DiGraph, source: str, target: str) -> Iterator[list[str]]:
    """Every shortest path of a directed graph, as networkx finds them, which looks at all that is behind the source.

    :raises networkx.NetworkXNoPath: there is none.
    """
    reached: dict[str, list[str]] = {source: []}
    border = [source]
    while border and target not in reached:
        found: dict[str, list[str]] = {}
        for node in border:
            for other in graph.succ[node]:
                if other not in reached:
                    found.setdefault(other, []).append(node)
        reached.update(found)
        border = list(found)
    if target not in reached:
        msg = f"no path from {source!r} to {target!r}"
        raise nx.NetworkXNoPath(msg)
    waiting = [[target]]
    while waiting:
        path = waiting.pop()
        if path[0] == source:
            yield path
        waiting += [[before, *path] for before in reached[path[0]]]


class _Networkx:
    """networkx with one function in another writing."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.all_shortest_paths = shortest_paths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


SEAMS: tuple[Seam, ...] = (
    Seam(
        name="makers of tensors while a graph is built",
        why="The list of them is made again for every Gather: the time to read a model grows with the square of its layers. "
        "A graph is built before and behind every step of each quantization of one model, and only weights differ.",
        module=_BUILDER,
        attribute="GraphConverter.create_nncf_graph",
        parameters=("onnx_model",),
        replace=read,
    ),
    Seam(
        name="makers of tensors listed once",
        why="The other half of the seam before: inside the building of a graph the list is kept, elsewhere it is made anew.",
        module="nncf.onnx.graph.metatypes.onnx_metatypes",
        attribute="get_parents_node_mapping",
        parameters=("model",),
        replace=_once(_READ),
    ),
    Seam(
        name="numbers of nodes",
        why="For the next number of a node all numbers so far are looked through, while a graph is built from a model.",
        module="nncf.common.graph.graph",
        attribute="NNCFGraph.add_nncf_node",
        parameters=(
            "self", "node_name", "node_type", "node_metatype", "layer_attributes", "node_id_override", "layer_name",
            "ignored_algorithms", "is_in_iteration_scope", "is_integer_input", "is_shared",
        ),
        replace=numbered,
    ),
    Seam(
        name="edges behind the inputs while quantizers are placed",
        why="They are listed again for every quantizer, and a mask has an edge to every layer.",
        module="nncf.quantization.algorithms.min_max.algorithm",
        attribute="MinMaxQuantization.apply",
        parameters=("self", "model", "graph", "statistic_points", "dataset"),
        replace=_within(_PLACED),
    ),
    Seam(
        name="edges behind the inputs listed once",
        why="The other half of the seam before: the graph stays as it is while quantizers are placed in it.",
        module="nncf.quantization.algorithms.min_max.onnx_backend",
        attribute="ONNXMinMaxAlgoBackend._get_input_edges_mapping",
        parameters=("nncf_graph",),
        replace=_once(_PLACED),
    ),
    Seam(
        name="places of nodes while quantizers are written",
        why="For every quantizer the nodes of the whole model are looked through for the one in front of which it comes.",
        module=_WRITER,
        attribute="ONNXModelTransformer._apply_quantizer_insertion_transformations",
        parameters=("self", "model", "transformations"),
        replace=_within(_WRITTEN),
    ),
    Seam(
        name="places of nodes counted",
        why="The other half of the seam before: two nodes more in front of every node that was asked for earlier.",
        module=_WRITER,
        attribute="get_node_index",
        parameters=("model", "node_name"),
        replace=index,
    ),
    Seam(
        name="paths between quantizers",
        why="To join two quantizers the path between them is searched for through all of the model that is behind it.",
        module="nncf.common.quantization.quantizer_propagation.graph",
        attribute="nx",
        parameters=None,
        replace=_Networkx,
    ),
)
