"""Indexed pattern matching finds what NNCF's own matching finds."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
from nncf.common.graph import graph_matching

from attnquant import quantization
from attnquant.host import matching
from tests.corpora import entries

NAMES = (
    "bert_sdpa-hffusecpu-18.onnx",
    "torch_sdpa_boolmask-ts-17.onnx",
    "torch_sdpa_manualsoftmax-dynamo-18.onnx",
    "neg_gated_pool-ts-17.onnx",
)
ENTRIES = [entry for entry in entries("ATTNQUANT_NONE", "corpus") if entry.path.name in NAMES]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_same_subgraphs_as_the_host(entry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def both(graph: Any, pattern_graph: Any, strict: bool = True) -> Any:
        ours = find(graph, pattern_graph, strict)
        assert sorted(ours) == sorted(graph_matching.find_subgraphs_matching_pattern(graph, pattern_graph, strict))
        compared.append(len(ours))
        return ours

    find = matching.find_subgraphs
    monkeypatch.setattr(matching, "find_subgraphs", both)
    quantization.quantize(entry.path, entry.samples)
    assert len(compared) >= 2
    assert sum(compared) > 0


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs_and_patterns(seed: int) -> None:
    random = np.random.default_rng(seed)
    graph, pattern = nx.MultiDiGraph(), nx.MultiDiGraph()
    for number in range(30):
        graph.add_node(str(number), metatype=str(random.integers(3)), type="t")
        for other in {int(random.integers(number)) for _ in range(2)} if number else ():
            graph.add_edge(str(other), str(number))
    size = int(random.integers(2, 4))
    for number in range(size):
        kinds = [str(random.integers(3)), str(random.integers(3))]
        pattern.add_node(number, metatype=kinds if random.random() < 0.8 else ["ANY_PATTERN_NODE"])
        if number:
            pattern.add_edge(number - 1, number)
    matcher = nx.algorithms.isomorphism.MultiDiGraphMatcher(graph, pattern, node_match=graph_matching._are_nodes_matched)
    expected = sorted(sorted(match.items()) for match in matcher.subgraph_isomorphisms_iter())
    got = sorted(sorted(match.items()) for match in matching._Index(graph).matches(pattern))
    assert got == expected
