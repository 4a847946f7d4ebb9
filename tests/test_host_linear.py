"""What is done once instead of once for every node gives what NNCF's own writing gives, and is done once."""

import functools
from collections import Counter
from typing import Any

import networkx as nx
import numpy as np
import pytest
from nncf.common.graph.graph import NNCFGraph
from nncf.onnx.graph import model_transformer
from nncf.quantization.algorithms.min_max.onnx_backend import ONNXMinMaxAlgoBackend

from attnquant.graph import bodies, constant_values, is_constant
from attnquant.host import linear, onnx_seams
from attnquant.host.linear import shortest_paths
from attnquant.model import load
from attnquant.quantization import quantize
from attnquant.saving import to_proto
from benchmarks.growth import _samples as samples
from benchmarks.scaling import decoder
from tests.corpora import entries

EACH = len(decoder(1)[0].graph)
NAMES = ("bert_", "t5_", "neg_")
ENTRIES = [entry for entry in entries("ATTNQUANT_NONE", "corpus") if entry.path.name.startswith(NAMES)][:12]


def quantized(layers: int) -> bytes:
    model, _ = decoder(EACH * (layers - 1) + 1)
    return to_proto(quantize(model, samples(2, 8)).model).SerializeToString()


def test_the_model_is_the_same_to_the_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = quantized(3)
    monkeypatch.setattr(onnx_seams, "SEAMS", tuple(seam for seam in onnx_seams.SEAMS if seam not in linear.SEAMS))
    assert quantized(3) == ours


def test_nothing_is_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def replacement(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += name != "get_node_index" or linear._WRITTEN.get() is not None
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, staticmethod(replacement) if owner is ONNXMinMaxAlgoBackend else replacement)

    counted(NNCFGraph, "get_all_node_ids")
    counted(model_transformer, "get_node_index")
    counted(ONNXMinMaxAlgoBackend, "_get_input_edges_mapping")
    calls["get_node_index"] = 0
    quantized(1)
    first = dict(calls)
    calls.clear()
    calls["get_node_index"] = 0
    quantized(3)
    assert dict(calls) == first, "three times the layers, as many searches"
    assert first["_get_input_edges_mapping"] > 0
    assert not first["get_node_index"]


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_constants_of_a_graph_are_those_of_its_values(entry: Any) -> None:
    model = load(entry.path)
    for _, body in bodies(model):
        read = {value for node in body for value in (*node.inputs, *node.outputs) if value is not None}
        ours = constant_values(model.graph) if body is model.graph else set()
        if ours:
            assert ours == {value for value in read if is_constant(value)}


@pytest.mark.parametrize("seed", range(20))
def test_paths_are_those_of_networkx(seed: int) -> None:
    random = np.random.default_rng(seed)
    graph = nx.DiGraph()
    graph.add_nodes_from(map(str, range(25)))
    graph.add_edges_from((str(random.integers(25)), str(random.integers(25))) for _ in range(45))
    for source in "0", "1", "2":
        for target in graph:
            try:
                expected = sorted(nx.all_shortest_paths(graph, source, target))
            except nx.NetworkXNoPath:
                with pytest.raises(nx.NetworkXNoPath):
                    list(shortest_paths(graph, source, target))
                continue
            assert sorted(shortest_paths(graph, source, target)) == expected
