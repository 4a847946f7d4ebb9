"""Attention written out in operators, every form with its truth, what must not be taken for one, and how it is found."""

import re
from collections.abc import Callable
from pathlib import Path
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
    assert {role: site.ports[role].tensor for role, tensor in expected.items() if tensor} == {
        r: t for r, t in expected.items() if t
    }
    assert set(site.ports) - {role for role, tensor in expected.items() if tensor is None} == {
        r for r, t in expected.items() if t
    }
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
    if {"sinks", "mask", "masked", "plus", "talking", "normalised"} & set(name.split("_")):
        return
    last = {"channel_first": -2, "channel_first_without_transposing_p": -2, "one_head_channels_in_the_second_axis": 1}.get(
        name, -1
    )
    np.testing.assert_allclose(arrays[p].sum(axis=last), 1, rtol=1e-5)


# --- what is no attention ---


def classifier(graph: Graph) -> None:
    graph.op("Softmax", graph.linear("x"), name="y", axis=-1)


def softmax_pooling(graph: Graph) -> None:
    """Weights for positions from a linear layer."""
    weights = graph.op("Softmax", graph.linear("x", 1), axis=1)
    graph.op("MatMul", graph.op("Transpose", weights, perm=[0, 2, 1]), "x", name="y")


def linear_layer_over_positions(graph: Graph) -> None:
    """A constant on the left that sums over positions: a mixer, no query."""
    mixed = graph.op("MatMul", graph.weight(1, STEPS, STEPS), graph.linear("x"))
    weights = graph.op("Softmax", mixed, axis=-1)
    graph.op("MatMul", weights, graph.op("Transpose", graph.linear("x"), perm=[0, 2, 1]), name="y")


def memory_as_keys(graph: Graph) -> None:
    """The normalised axis is the constant's: a memory is looked up, and there is nothing to quantize in it."""
    scores = graph.op("MatMul", graph.linear("x"), graph.weight(1, WIDTH, STEPS))
    graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.linear("x"), name="y")


def matrix_on_the_right(graph: Graph) -> None:
    """Scores of positions from a linear layer, then a sum over positions: softmax pooling with several heads."""
    scores = graph.op("MatMul", graph.linear("x"), graph.weight(WIDTH, 3))
    weights = graph.op("Softmax", scores, axis=1)
    graph.op("MatMul", graph.op("Transpose", weights, perm=[0, 2, 1]), graph.linear("x"), name="y")


def gated_pooling(graph: Graph) -> None:
    gate = graph.op("Mul", graph.op("Tanh", graph.linear("x")), graph.op("Sigmoid", graph.linear("x")))
    weights = graph.op("Softmax", graph.linear(gate, 1), axis=1)
    graph.op("ReduceSum", graph.op("Mul", weights, graph.linear("x")), graph.ints(1), name="y")


def expert_router(graph: Graph) -> None:
    experts = [graph.op("Unsqueeze", graph.linear("x"), graph.ints(2)) for _ in range(4)]
    weights = graph.op("Unsqueeze", graph.op("Softmax", graph.linear("x", 4), axis=-1), graph.ints(2))
    graph.op("MatMul", weights, graph.op("Concat", *experts, axis=2), name="y")


def linear_attention(graph: Graph) -> None:
    """Softmax of Q over channels and of K over positions; no softmax between the products (Shen et al. 2018)."""
    q = graph.op("Softmax", graph.heads(graph.linear("x")), axis=-1)
    k = graph.op("Softmax", graph.heads(graph.linear("x"), order=(0, 2, 3, 1)), axis=-1)
    state = graph.op("MatMul", k, graph.heads(graph.linear("x")))
    graph.merged(graph.op("MatMul", q, state))


def memory_layer(graph: Graph) -> None:
    """External attention: keys and values are weights."""
    graph.op(
        "MatMul",
        graph.op("Softmax", graph.op("MatMul", "x", graph.weight(WIDTH, 9)), axis=-1),
        graph.weight(9, WIDTH),
        name="y",
    )


def similarity(graph: Graph) -> None:
    """Probabilities over pairs, and nothing behind them."""
    scores = graph.op("MatMul", graph.linear("x"), graph.transposed(graph.linear("x"), 3))
    graph.op("Softmax", scores, name="y", axis=-1)


def linear_layer_behind_similarity(graph: Graph) -> None:
    scores = graph.op("MatMul", graph.linear("x"), graph.transposed(graph.linear("x"), 3))
    graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.weight(STEPS, WIDTH), name="y")


def slots(graph: Graph) -> None:
    """Slots compete for positions: normalised over the queries (Locatello et al. 2020)."""
    q, k, v = (graph.linear("x") for _ in range(3))
    weights = graph.op("Softmax", graph.op("MatMul", q, graph.transposed(k, 3)), axis=1)
    graph.op("MatMul", weights, v, name="y")


def softmax_over_heads(graph: Graph) -> None:
    q, k, v = projected(graph)
    weights = graph.op("Softmax", graph.op("MatMul", q, graph.transposed(k)), axis=1)
    graph.merged(graph.op("MatMul", weights, v))


def attention_map_squared(graph: Graph) -> None:
    scores = graph.op("MatMul", graph.linear("x"), graph.transposed(graph.linear("x"), 3))
    p = graph.op("Softmax", scores, axis=-1)
    graph.op("MatMul", p, p, name="y")


def quotient_without_exponential(graph: Graph) -> None:
    scores = graph.op("Relu", graph.op("MatMul", graph.linear("x"), graph.transposed(graph.linear("x"), 3)))
    p = graph.op("Div", scores, graph.op("ReduceSum", scores, graph.ints(-1)))
    graph.op("MatMul", p, graph.linear("x"), name="y")


def mixture_of_positions(graph: Graph) -> None:
    """A linear layer over positions between the product and the softmax (synthesizers, mixers)."""
    scores = graph.op("MatMul", graph.linear("x"), graph.transposed(graph.linear("x"), 3))
    mixed = graph.op("MatMul", scores, graph.weight(STEPS, STEPS))
    graph.op("MatMul", graph.op("Softmax", mixed, axis=-1), graph.linear("x"), name="y")


REJECTED: dict[Callable[[Graph], None], str] = {
    classifier: "constant",
    softmax_pooling: "no product of two activations",
    linear_layer_over_positions: "constant",
    memory_as_keys: "constant",
    matrix_on_the_right: "constant",
    gated_pooling: "constant",
    expert_router: "constant",
    linear_attention: "constant",
    memory_layer: "constant",
    similarity: "no product with V",
    linear_layer_behind_similarity: "a linear layer, not P V",
    slots: "does not sum over the normalised axis",
    softmax_over_heads: "belongs to both operands",
    attention_map_squared: "multiplied with themselves",
    mixture_of_positions: "constant",
}


@pytest.mark.parametrize("make", REJECTED, ids=lambda make: make.__name__)
def test_no_attention(make: Callable[[Graph], None]) -> None:
    """No site, and a near miss that says why and names nodes of the graph."""
    graph = Graph()
    graph.input("x")
    make(graph)
    graph.output("y")
    runtime.run(ir.from_proto(graph.proto()), feeds(graph.proto()), threads=1)
    found, misses = find_decomposed(ir.from_proto(graph.proto()))
    assert found == []
    assert any(REJECTED[make] in miss.reason for miss in misses)
    names = {node.name for node in graph.nodes}
    assert all(set(miss.nodes) <= names and miss.nodes for miss in misses)


def test_quotient_without_exponential_is_no_softmax() -> None:
    graph = Graph()
    graph.input("x")
    quotient_without_exponential(graph)
    graph.output("y")
    assert find_decomposed(ir.from_proto(graph.proto())) == ([], [])


def test_two_softmaxes_into_one_product_are_one_site_and_a_near_miss() -> None:
    """Differential attention written as (P1 + P2) V: an id stands for one attention, and the other is not passed over."""
    graph = Graph()
    graph.input("x")
    first, key, v = projected(graph)
    second, other = (graph.heads(graph.linear("x")) for _ in range(2))
    maps = [
        graph.op("Softmax", graph.op("MatMul", q, graph.transposed(k)), axis=-1, name=f"map_{name}")
        for name, q, k in (("one", first, key), ("two", second, other))
    ]
    mixed = graph.op("Add", maps[0], graph.op("Mul", maps[1], graph.const(0.5)))
    finish(graph, "", v, mixed)
    found, misses = find_decomposed(ir.from_proto(graph.proto()))
    assert len(found) == 1
    (miss,) = misses
    assert "that of another softmax too" in miss.reason
    makers = {output: node.name for node in graph.nodes for output in node.output}
    assert len({makers[name] for name in maps} & set(miss.nodes)) == 1


def test_progress_orders_near_misses() -> None:
    """What comes closest to attention has the highest progress."""
    made = []
    for make in (softmax_pooling, expert_router, similarity, linear_layer_behind_similarity):
        graph = Graph()
        graph.input("x")
        make(graph)
        graph.output("y")
        made.append(max(miss.progress for miss in find_decomposed(ir.from_proto(graph.proto()))[1]))
    assert made == sorted(made)
    assert len(set(made)) == len(made)


# --- where attention is found ---


def inside(graph: Graph) -> onnx.GraphProto:
    """The nodes of a case as the body of a control flow operator, its weights included, without inputs."""
    return onnx.helper.make_graph(graph.nodes, "body", [], graph.outputs, graph.constants)


def test_in_both_branches_of_an_if() -> None:
    graph = plain()
    outer = Graph()
    outer.input("x")
    outer.input("flag", (), onnx.TensorProto.BOOL)
    outer.op("If", "flag", name="choice", then_branch=inside(graph), else_branch=inside(plain()))
    outer.output("choice")
    found = sites(outer)
    assert {(site.path, site.id) for site in found} == {
        ("/choice/then_branch", "/choice/then_branch/context"),
        ("/choice/else_branch", "/choice/else_branch/context"),
    }
    assert {site.q_heads for site in found} == {HEADS}


def test_in_the_body_of_a_loop() -> None:
    """The state is an input of the body: an activation of unknown shape, whose heads the reshapes still tell."""
    graph = plain()
    state = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)
    count = onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, [])
    go = onnx.helper.make_tensor_value_info("go", onnx.TensorProto.BOOL, [])
    graph.op("Identity", "go", name="on")
    result = [onnx.helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []), *graph.outputs]
    body = onnx.helper.make_graph(graph.nodes, "body", [count, go, state], result, graph.constants)
    outer = Graph()
    outer.input("x0")
    outer.op("Loop", outer.const(3, np.int64), "", "x0", name="loop", body=body)
    outer.output("loop")
    (site,) = sites(outer)
    assert (site.path, site.past, site.q_heads, site.qk_head_dim) == ("/loop/body", "none", HEADS, DIM)


def test_in_a_function_with_weights_as_inputs() -> None:
    """What every call gives a constant for is a weight: no operand of a product."""
    graph = plain()
    weights = [tensor for tensor in graph.constants if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims]
    inner = [tensor for tensor in graph.constants if tensor not in weights]
    fixed = [onnx.helper.make_node("Constant", [], [tensor.name], name=tensor.name, value=tensor) for tensor in inner]
    names = ["x", *(tensor.name for tensor in weights)]
    imports = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("own", "Block", names, ["y"], [*fixed, *graph.nodes], imports)
    call = onnx.helper.make_node("Block", names, ["z"], name="call", domain="own")
    output = onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    main = onnx.helper.make_graph([call], "main", graph.inputs, [output], weights)
    opsets = [*imports, onnx.helper.make_opsetid("own", 1)]
    model = onnx.helper.make_model(main, opset_imports=opsets, functions=[function], ir_version=10)
    (site,) = find_decomposed(ir.from_proto(model))[0]
    assert (site.path, site.id, site.q_heads) == ("own::Block", "own::Block/context", HEADS)
    assert site.kind == "self"


def test_behind_projections_that_are_functions() -> None:
    """Linear layers as calls of one function: heads and kind are known all the same."""
    inner = [onnx.helper.make_node("MatMul", ["a", "w"], ["ab"]), onnx.helper.make_node("Add", ["ab", "b"], ["r"])]
    imports = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("own", "Linear", ["a", "w", "b"], ["r"], inner, imports)
    graph = Graph()
    graph.input("x")
    graph.input("memory", ("batch", "enc", WIDTH))
    q, k, v = (
        graph.heads(graph.op("Linear", source, graph.weight(WIDTH, WIDTH), graph.weight(WIDTH), domain="own"), name=name)
        for name, source in (("q", "x"), ("k", "memory"), ("v", "memory"))
    )
    proto = finish(graph, graph.op("MatMul", q, graph.transposed(k)), v).proto()
    proto.functions.append(function)
    proto.opset_import.append(onnx.helper.make_opsetid("own", 1))
    (site,) = find_decomposed(ir.from_proto(proto))[0]
    assert (site.q_heads, site.kv_heads, site.qk_head_dim, site.kind) == (HEADS, HEADS, DIM, "cross")


def test_two_values_of_one_attention() -> None:
    """Two products with the same probabilities are two sites with the same query and key."""
    graph = plain()
    graph.op("MatMul", "p", graph.heads(graph.linear("x")), name="context2")
    graph.output("context2")
    first, second = sites(graph)
    assert (first.node, second.node) == ("context", "context2")
    assert first.ports[PortRole.KEY] == second.ports[PortRole.KEY]


def test_sites_in_graph_order_with_kinds() -> None:
    """A decoder: self attention, then attention to an encoder's output; the second is found on top of the first."""
    graph = Graph()
    graph.input("x")
    graph.input("memory", ("batch", "enc", WIDTH))
    state = "x"
    for number, memory in enumerate((None, "memory", None, "memory")):
        q, k, v = (
            graph.heads(graph.linear(source), name=f"{role}{number}")
            for role, source in (("q", state), ("k", memory or state), ("v", memory or state))
        )
        p = graph.op("Softmax", graph.op("MatMul", q, graph.transposed(k)), axis=-1)
        context = graph.op("Transpose", graph.op("MatMul", p, v, name=f"context{number}"), perm=[0, 2, 1, 3])
        state = graph.op("Add", state, graph.linear(graph.op("Reshape", context, graph.ints(0, -1, WIDTH))))
    graph.op("Identity", state, name="y")
    graph.output("y")
    assert [(site.node, site.kind) for site in sites(graph)] == [
        ("context0", "self"), ("context1", "cross"), ("context2", "self"), ("context3", "cross")
    ]  # fmt: skip


def test_residual_scores_of_the_layer_before() -> None:
    """RealFormer: scores of the layer before are added; the product of this layer is the deeper one."""
    graph = plain()
    q, k = (graph.heads(graph.linear("y"), name=name) for name in ("q2", "k2"))
    own = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt2")), graph.const(0.25))
    p = graph.op("Softmax", graph.op("Add", "scaled", own), axis=-1)
    graph.op("MatMul", p, graph.heads(graph.linear("y")), name="context2")
    graph.output("context2")
    second = sites(graph)[1]
    assert (second.ports[PortRole.QUERY].tensor, second.ports[PortRole.KEY].tensor) == ("q2", "kt2")


def test_names_made_up_as_the_loader_does() -> None:
    """Nodes without a name, and with one taken, get the names that attnquant.model.name_nodes gives them."""
    from attnquant.model import name_nodes

    proto = plain().proto()
    for node in proto.graph.node:
        node.name = "same" if node.op_type == "MatMul" else ""
    named = ir.from_proto(proto)
    name_nodes(named)
    (expected,), (got,) = find_decomposed(named)[0], find_decomposed(ir.from_proto(proto))[0]
    assert got == expected
    assert len(set(got.nodes)) == len(got.nodes)


@pytest.mark.parametrize("name", ["sinks", "past_by_concat", "grouped_by_expand", "scale_from_shape"])
def test_model_is_not_changed(name: str) -> None:
    graph, _ = CASES[name]()
    proto = graph.proto()
    model = ir.from_proto(proto)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    find_decomposed(model)
    find_decomposed(model, feeds(proto))
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


# --- what only a run tells ---


def test_heads_from_a_run() -> None:
    """Q, K, V are inputs with no declared sizes: without feeds unknown, with them told."""
    graph = Graph()
    for name in "qkv":
        graph.input(name, (None, None, None, None))
    finish(graph, graph.op("Mul", graph.op("MatMul", "q", graph.transposed("k", name="kt")), graph.const(0.25)))
    model = ir.from_proto(graph.proto())
    (unknown,) = find_decomposed(model)[0]
    assert (unknown.q_heads, unknown.kv_heads, unknown.qk_head_dim, unknown.v_head_dim) == (None,) * 4
    sample = {name: np.ones((2, HEADS, STEPS, DIM), np.float32) for name in "qkv"}
    (told,) = find_decomposed(model, sample)[0]
    assert (told.q_heads, told.kv_heads, told.qk_head_dim, told.v_head_dim) == (HEADS, HEADS, DIM, DIM)
    assert told.ports == unknown.ports


def test_scale_from_a_run() -> None:
    """1 / sqrt of the size of an input that is not declared."""
    graph = Graph()
    graph.input("x", ("batch", STEPS, None))
    size = graph.op("Gather", graph.op("Shape", "x"), graph.const(2, np.int64))
    factor = graph.op("Reciprocal", graph.op("Sqrt", graph.op("Cast", size, to=onnx.TensorProto.FLOAT)))
    q, k, _ = projected(graph)
    finish(graph, graph.op("Mul", graph.op("MatMul", q, graph.transposed(k)), factor))
    model = ir.from_proto(graph.proto())
    assert find_decomposed(model)[0][0].scale is None
    sample = {"x": np.ones((2, STEPS, WIDTH), np.float32)}
    assert find_decomposed(model, sample)[0][0].scale == pytest.approx(WIDTH**-0.5)


def test_symbolic_shapes_are_not_trusted() -> None:
    """Declared symbols say whatever they like: the same name everywhere, or a new one for each axis."""
    graph, _ = CASES["mask_added"]()
    proto = onnx.shape_inference.infer_shapes(graph.proto())
    expected = find_decomposed(ir.from_proto(graph.proto()))[0]
    for rename in (lambda number: "s", lambda number: f"s{number}"):
        count = 0
        for value in [*proto.graph.value_info, *proto.graph.input]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = rename(count)
                    count += 1
        assert count > 4
        assert find_decomposed(ir.from_proto(proto))[0] == expected


# --- through Q/DQ ---


def quantized(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A Q/DQ pair in front of every float input of every node, as a tool might put it at most."""
    typed = onnx.shape_inference.infer_shapes(proto)
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in [*typed.graph.value_info, *typed.graph.input, *typed.graph.output]
    }
    kinds |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    del made.graph.node[:]
    scale = onnx.helper.make_tensor("qdq_scale", onnx.TensorProto.FLOAT, [], [0.05])
    zero = onnx.helper.make_tensor("qdq_zero", onnx.TensorProto.UINT8, [], [128])
    made.graph.initializer.extend([scale, zero])
    for node in proto.graph.node:
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        for index, name in enumerate(copy.input):
            if kinds.get(name) != onnx.TensorProto.FLOAT:
                continue
            own = f"{node.name}/{index}"
            parameters = ["qdq_scale", "qdq_zero"]
            made.graph.node.append(
                onnx.helper.make_node("QuantizeLinear", [name, *parameters], [f"{own}/q"], name=f"{own}/Q")
            )
            made.graph.node.append(
                onnx.helper.make_node("DequantizeLinear", [f"{own}/q", *parameters], [f"{own}/dq"], name=f"{own}/DQ")
            )
            copy.input[index] = f"{own}/dq"
        made.graph.node.append(copy)
    return made


@pytest.mark.parametrize("name", CASES)
def test_through_quantizers(name: str) -> None:
    """Q/DQ on every float edge changes nothing but the tensors that the ports read."""
    graph, _ = CASES[name]()
    (expected,) = find_decomposed(ir.from_proto(graph.proto()))[0]
    (got,) = find_decomposed(ir.from_proto(quantized(graph.proto())))[0]
    assert {field: getattr(got, field) for field in (*FIELDS, "nodes", "id")} == {
        field: getattr(expected, field) for field in (*FIELDS, "nodes", "id")
    }
    assert (got.scale is None) == (expected.scale is None)
    assert got.scale is None or got.scale == pytest.approx(expected.scale)
    for edges, others in ((got.ports, expected.ports), (got.branch, expected.branch)):
        assert {role: (port.node, port.index) for role, port in edges.items()} == {
            role: (port.node, port.index) for role, port in others.items()
        }


# --- cost ---


def layers(count: int) -> Graph:
    graph = Graph()
    graph.input("x")
    mask = mask_input(graph)
    state = "x"
    for _ in range(count):
        q, k, v = (graph.heads(graph.linear(state)) for _ in range(3))
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k)), graph.const(0.25))
        p = graph.op("Softmax", graph.op("Add", scores, mask), axis=-1)
        context = graph.op("Transpose", graph.op("MatMul", p, v), perm=[0, 2, 1, 3])
        state = graph.op("Add", state, graph.linear(graph.op("Reshape", context, graph.ints(0, -1, WIDTH))))
    graph.op("Identity", state, name="y")
    graph.output("y")
    return graph


def test_cost_is_linear_in_nodes() -> None:
    """Counted in nodes looked at: the same for each layer however many there are, and few."""
    from attnquant.patterns import sdpa
    from attnquant.patterns.inference import study
    from attnquant.patterns.search import search

    costs = {}
    for count in (10, 20, 40):
        graph = layers(count)
        model = ir.from_proto(graph.proto())
        facts = study(model)
        found, _ = search(facts, model)
        assert len([sdpa.site(facts, one) for one in found]) == count
        costs[count] = facts.steps
        assert facts.steps <= 12 * len(graph.nodes)
    assert costs[40] - costs[20] == 2 * (costs[20] - costs[10])


def test_cost_of_softmaxes_without_attention_is_linear() -> None:
    """Walks that fail are bounded too: masks and probabilities that lead nowhere."""
    from attnquant.patterns.inference import study
    from attnquant.patterns.search import search

    costs: dict[int, int] = {}
    for count in (80, 160, 320):
        graph = Graph()
        graph.input("x")
        state = "x"
        for _ in range(count):
            state = graph.op("Add", state, graph.op("Softmax", graph.op("Mul", state, graph.op("Softmax", state)), axis=-1))
        graph.op("Identity", state, name="y")
        graph.output("y")
        model = ir.from_proto(graph.proto())
        facts = study(model)
        assert search(facts, model)[0] == []
        costs[count] = facts.steps
        assert facts.steps <= 250 * len(graph.nodes)
    assert costs[320] - costs[160] <= 2.05 * (costs[160] - costs[80])


def arrays_of(graph: Graph, *names: str) -> dict[str, Any]:
    proto = graph.proto()
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return runtime.run(ir.from_proto(proto), feeds(proto), threads=1)


def test_roles_by_value() -> None:
    """An oracle without patterns: numpy's attention of the tensors at the ports is the context."""
    graph, _ = CASES["mask_added"]()
    (site,) = sites(graph)
    tensors = {role: site.ports[role].tensor for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE, PortRole.CONTEXT)}
    got = arrays_of(graph, *tensors.values())
    scores = site.scale * got[tensors[PortRole.QUERY]] @ got[tensors[PortRole.KEY]] + feeds(graph.proto())["m"]
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    expected = powers / powers.sum(-1, keepdims=True) @ got[tensors[PortRole.VALUE]]
    np.testing.assert_allclose(got[tensors[PortRole.CONTEXT]], expected, rtol=1e-4, atol=1e-5)


def test_every_form_is_documented() -> None:
    """The table in docs/recognition.md names every case, and nothing else."""
    text = (Path(__file__).parents[1] / "docs" / "recognition.md").read_text()
    rows = [line for line in text.partition("## Forms")[2].partition("## Limits")[0].splitlines() if line.startswith("| ")]
    named = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row.split("|")[2])]
    assert sorted(named) == sorted(CASES)
