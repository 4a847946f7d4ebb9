"""Attention written out in operators, every form with its truth, what must not be taken for one, and how it is found."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from decomposed_cases import CASES, TRUTH, mask_input
from decomposed_graphs import DIM, HEADS, STEPS, WIDTH, Graph, finish, plain, projected

from attnquant import runtime
from attnquant.patterns import find_decomposed
from attnquant.roles import PortRole
from attnquant.site import AttentionSite

TENSORS = {
    "q": PortRole.QUERY, "k": PortRole.KEY, "v": PortRole.VALUE, "p": PortRole.PROBABILITIES, "context": PortRole.CONTEXT,
    "scores": PortRole.SCORES, "mask": PortRole.MASK, "past_key": PortRole.PAST_KEY, "past_value": PortRole.PAST_VALUE,
    "present_key": PortRole.PRESENT_KEY, "present_value": PortRole.PRESENT_VALUE,
}  # fmt: skip
FIELDS = [name for name in TRUTH if name not in TENSORS and name != "scale"]


def sites(graph: Graph) -> list[AttentionSite]:
    return find_decomposed(ir.from_proto(graph.proto()))[0]


def feeds(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made = {}
    for value in proto.graph.input:
        shape = [dim.dim_value or (2 if dim.dim_param == "batch" else 7) for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype == np.float32:
            made[value.name] = random.standard_normal(shape).astype(dtype)
        else:
            made[value.name] = np.ones(shape, dtype)
    return made


@pytest.mark.parametrize("name", CASES)
def test_form(name: str) -> None:
    graph, changes = CASES[name]()
    truth = {**TRUTH, **changes}
    found = sites(graph)
    assert len(found) == 1
    site = found[0]
    assert {field: getattr(site, field) for field in FIELDS} == {field: truth[field] for field in FIELDS}
    assert site.scale == (None if truth["scale"] is None else pytest.approx(truth["scale"], rel=1e-6))
    expected = {role: truth[key] for key, role in TENSORS.items() if key in truth}
    assert {role: site.ports[role].tensor for role, tensor in expected.items() if tensor} == {r: t for r, t in expected.items() if t}
    assert set(site.ports) - {role for role, tensor in expected.items() if tensor is None} == {r for r, t in expected.items() if t}
    branch = truth.get("branch", ())
    assert tuple(port.tensor for port in site.branch.values()) == branch
    assert {"context", truth.get("within", "context")} <= set(site.nodes)


@pytest.mark.parametrize("name", CASES)
def test_ports_name_real_edges(name: str) -> None:
    """Every port is an edge of the graph: input ports are read there, output ports made there."""
    graph, _ = CASES[name]()
    nodes = {node.name: node for node in graph.nodes}
    made = {PortRole.SCORES, PortRole.CONTEXT, PortRole.PRESENT_KEY, PortRole.PRESENT_VALUE}
    for site in sites(graph):
        for role, port in [*site.ports.items(), *site.branch.items()]:
            edges = nodes[port.node].output if role in made else nodes[port.node].input
            assert edges[port.index] == port.tensor
        assert set(site.nodes) <= set(nodes)


@pytest.mark.parametrize("name", CASES)
def test_case_is_attention(name: str) -> None:
    """The cases themselves: each runs, and where nothing masks or mixes probabilities they sum to one over the positions."""
    graph, truth = CASES[name]()
    proto = graph.proto()
    p = truth.get("p", "p")
    taken = {output.name for output in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in (p, "context") if tensor not in taken)
    arrays = runtime.run(ir.from_proto(proto), feeds(proto), threads=1)
    if {"sinks", "mask", "masked", "plus", "talking"} & set(name.split("_")):
        return
    last = {"channel_first": -2, "channel_first_without_transposing_p": -2}.get(name, -1)
    np.testing.assert_allclose(arrays[p].sum(axis=last), 1, rtol=1e-5)
