"""NNCF's pattern matching, indexed by operator: the same subgraphs, found in a fraction of the time.

Stock NNCF runs a subgraph isomorphism (VF2) of the whole graph for each of about 190 patterns: seconds a layer. A match is
connected and consists of nodes whose operator occurs in the pattern, so it lies inside one connected component of the graph
reduced to such nodes; these components are a few nodes each. Matches in different components never share a node. Stock VF2
tries nodes in the order of a set of strings, another one in every process; here it is the order of the graph.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import networkx as nx
from networkx.algorithms.isomorphism import MultiDiGraphMatcher
from nncf.common.graph import graph_matching
from nncf.common.graph.patterns import GraphPattern

Nodes = dict[str, str]
"""{node of the graph: node of the pattern}"""

_UNTYPED = (GraphPattern.ANY_PATTERN_NODE_TYPE, GraphPattern.NON_PATTERN_NODE_TYPE)


def find_subgraphs(graph: nx.MultiDiGraph, pattern_graph: GraphPattern, strict: bool = True) -> list[list[str]]:
    """What nncf.common.graph.graph_matching.find_subgraphs_matching_pattern returns; parameters are the same."""
    index = _Index(graph)
    found: list[list[str]] = []
    taken: set[str] = set()
    patterns = sorted(pattern_graph.get_weakly_connected_subgraphs(), key=graph_matching._sort_patterns_by_len, reverse=True)
    for pattern in patterns:
        for match in index.matches(pattern):
            if strict and not graph_matching._is_subgraph_matching_strict(graph, pattern, match):
                continue
            kept = graph_matching._copy_subgraph_excluding_non_pattern_node(match, pattern_graph)
            if taken.isdisjoint(kept):
                taken.update(kept)
                found.append(list(nx.lexicographical_topological_sort(graph.subgraph(kept))))
    return found


class _Index:
    """The nodes of one graph by metatype and type."""

    def __init__(self, graph: nx.MultiDiGraph) -> None:
        self.graph = graph
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.by_operator: dict[Any, list[str]] = defaultdict(list)
        for node, attributes in graph.nodes(data=True):
            for name in {GraphPattern.METATYPE_ATTR, GraphPattern.NODE_TYPE_ATTR} & attributes.keys():
                self.by_operator[attributes[name]].append(node)

    def matches(self, pattern: nx.MultiDiGraph) -> list[Nodes]:
        """Every match of a connected pattern, by the place of its first node in the graph."""
        first = next(iter(pattern.nodes))
        found: list[Nodes] = []
        for component in self._components(pattern):
            matcher = MultiDiGraphMatcher(component, pattern, node_match=graph_matching._are_nodes_matched)
            matcher.G1_nodes = dict.fromkeys(component)  # iterated and nothing else: a set would shuffle the matches
            found.extend(dict(match) for match in matcher.subgraph_isomorphisms_iter())
        images = [next(node for node, role in match.items() if role == first) for match in found]
        order = sorted(range(len(found)), key=lambda position: self.place[images[position]])
        return [found[position] for position in order]

    def _components(self, pattern: nx.MultiDiGraph) -> Iterator[nx.MultiDiGraph]:
        kinds = [attributes.get(GraphPattern.METATYPE_ATTR) for _, attributes in pattern.nodes(data=True)]
        typed = [kind for kind in kinds if kind is not None and not any(untyped in kind for untyped in _UNTYPED)]
        if not typed:
            yield self.graph
            return
        candidates = [{node for operator in kind for node in self.by_operator.get(operator, ())} for kind in typed]
        if not all(candidates):
            return
        reach = self._grown(set().union(*candidates), len(kinds) - len(typed))
        for nodes in self._connected(reach):
            if len(nodes) >= len(kinds) and not any(candidate.isdisjoint(nodes) for candidate in candidates):
                yield self._induced(nodes)

    def _neighbours(self, node: str) -> Iterator[str]:
        yield from self.graph.pred[node]
        yield from self.graph.succ[node]

    def _grown(self, nodes: set[str], steps: int) -> set[str]:
        """With everything within so many steps: a pattern's untyped nodes match any node beside its typed ones."""
        border = nodes
        for _ in range(steps):
            border = {other for node in border for other in self._neighbours(node)} - nodes
            nodes = nodes | border
        return nodes

    def _connected(self, nodes: set[str]) -> Iterator[set[str]]:
        left = set(nodes)
        while left:
            component, border = set(), [left.pop()]
            while border:
                node = border.pop()
                component.add(node)
                near = [other for other in self._neighbours(node) if other in left]
                left.difference_update(near)
                border.extend(near)
            yield component

    def _induced(self, nodes: set[str]) -> nx.MultiDiGraph:
        """The induced subgraph with nodes and edges in the order of the whole graph, which decides the order of VF2."""
        ordered = sorted(nodes, key=self.place.__getitem__)
        induced = nx.MultiDiGraph()
        induced.add_nodes_from((node, self.graph.nodes[node]) for node in ordered)
        for node in ordered:
            for other, edges in self.graph.succ[node].items():
                if other in nodes:
                    induced.add_edges_from((node, other, key, data) for key, data in edges.items())
        return induced


def matching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of find_subgraphs_matching_pattern."""

    def replacement(graph: Any, pattern_graph: Any, strict: bool = True) -> Any:
        return find_subgraphs(graph, pattern_graph, strict)

    return replacement


def remembered(original: "staticmethod[..., Any]") -> "staticmethod[..., Any]":
    """The same pattern graph once for each backend, device and model type: building it takes a second."""
    return staticmethod(_remembering(original.__func__))


@cache
def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    @cache
    def replacement(backend: Any, device: Any, model_type: Any = None) -> Any:
        return function(backend, device, model_type)

    return replacement
