"""Caches are left alone: static ones with their masks and lengths, and what is declared of any, which is kept or refused."""

import re
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant import model as models
from attnquant import runtime
from attnquant.errors import AttnQuantError, DataError, ModelError
from attnquant.report import render
from tests.corpora import Entry, entries, runnable
from tests.layeredmodels import DECOMPOSED, HEAD, OPERATOR, decoder, tokens
from tests.layeredmodels import HEADS as DECODER_HEADS
from tests.tinymodels import weights

LAYERS, WIDTH, HEADS, PLACES = 2, 16, 2, 8
STATIC = [entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.name.startswith("c_static")]
RECIPES = ["int8", "vit", "llm-w8a8", "seq2seq"]
FLOW = ("If", "Loop", "Scan")


def graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """The graph and every graph inside it, at any depth, by this test's own walk over the file's form."""
    found = [graph]
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                found += graphs(inner)
    return found


def flow(model: onnx.ModelProto) -> Counter[tuple[str, str]]:
    """(operator, name) of all control flow, in functions too."""
    nodes = [node for graph in graphs(model.graph) for node in graph.node]
    for function in model.functions:
        nodes += [node for graph in graphs(helper.make_graph(function.node, "f", [], [])) for node in graph.node]
    return Counter((node.op_type, node.name) for node in nodes if node.op_type in FLOW)


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {item.name: helper.get_attribute_value(item) for item in node.attribute}


def untouched(before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Declarations verbatim; every TensorScatter as it was; attention's V, mask and lengths read the same tensors."""
    for old, new in ((before.graph.input, after.graph.input), (before.graph.output, after.graph.output)):
        assert [value.SerializeToString() for value in old] == [value.SerializeToString() for value in new]
    assert flow(after) == flow(before)
    nodes = {node.output[0]: node for graph in graphs(after.graph) for node in graph.node}
    for graph in graphs(before.graph):
        for node in graph.node:
            if node.op_type == "TensorScatter":
                assert nodes[node.output[0]].SerializeToString() == node.SerializeToString()
            elif node.op_type == "Attention":
                same = nodes[node.output[0]]
                assert attributes(same) == attributes(node)
                assert list(same.input[2:]) == list(node.input[2:])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("entry", STATIC, ids=str)
def test_cases(entry: Entry, recipe: str) -> None:
    samples, _ = runnable(entry.path)
    result = attnquant.quantize(entry.path, samples, recipe=recipe)
    untouched(onnx.load(entry.path), ir.to_proto(result.model))


@cache
def stacked(*, is_causal: int, masked: bool) -> onnx.ModelProto:
    """x [B, S, WIDTH] through LAYERS attentions with static caches, one mask and one nonpad_kv_seqlen for all of them."""
    nodes, constants = [], []
    if masked:
        nodes.append(helper.make_node("Cast", ["kept"], ["mask"], name="mask", to=TensorProto.BOOL))
    state = "x"
    for layer in range(LAYERS):
        for seed, part in enumerate("qkvo"):
            constants.append(numpy_helper.from_array(weights(9 * layer + seed, WIDTH, WIDTH), f"w{layer}{part}"))
            if part != "o":
                made = f"{part}{layer}"
                nodes.append(helper.make_node("MatMul", [state, f"w{layer}{part}"], [made], name=made))
        for part in "kv":
            names = [f"{part}_cache{layer}", f"{part}{layer}", "write_indices"]
            nodes.append(helper.make_node("TensorScatter", names, [f"{part}_new{layer}"], name=f"s{part}{layer}", axis=1))
        operands = [f"q{layer}", f"k_new{layer}", f"v_new{layer}", "mask" if masked else "", "", "", "nonpad_kv_seqlen"]
        attention = helper.make_node(
            "Attention", operands, [f"a{layer}"], name=f"attention{layer}", q_num_heads=HEADS, kv_num_heads=HEADS,
            is_causal=is_causal,
        )  # fmt: skip
        state = f"y{layer}"
        nodes += [attention, helper.make_node("MatMul", [f"a{layer}", f"w{layer}o"], [state], name=f"o{layer}")]
    rows = [f"{part}_{{}}{layer}" for layer in range(LAYERS) for part in "kv"]
    info, ints = helper.make_tensor_value_info, TensorProto.INT64
    graph = helper.make_graph(
        nodes, "stacked",
        [
            info("x", TensorProto.FLOAT, ["B", "S", WIDTH]), info("write_indices", ints, ["B"]),
            info("nonpad_kv_seqlen", ints, ["B"]),
            *([info("kept", ints, ["S", PLACES])] if masked else []),
            *(info(row.format("cache"), TensorProto.FLOAT, ["B", PLACES, WIDTH]) for row in rows),
        ],
        [
            info(state, TensorProto.FLOAT, ["B", "S", WIDTH]),
            *(info(row.format("new"), TensorProto.FLOAT, ["B", PLACES, WIDTH]) for row in rows),
        ],
        constants,
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)


def feeds(seed: int, *, masked: bool) -> dict[str, np.ndarray]:
    """Three new tokens behind 2 in one sample and 4 in the other."""
    rng, held = np.random.default_rng(seed), np.array([2, 4])
    found = {"x": rng.standard_normal((2, 3, WIDTH)), "write_indices": held, "nonpad_kv_seqlen": held + 3}
    if masked:
        found["kept"] = np.tril(np.ones((3, PLACES), np.int64), 2)
    for row in (f"{part}_cache{layer}" for layer in range(LAYERS) for part in "kv"):
        found[row] = rng.standard_normal((2, PLACES, WIDTH))
    return {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in found.items()}


@pytest.mark.parametrize("masked", [False, True], ids=["lengths alone", "mask"])
@pytest.mark.parametrize("is_causal", [0, 1])
def test_layers_share_one_mask_and_one_length(is_causal: int, masked: bool) -> None:
    before = stacked(is_causal=is_causal, masked=masked)
    result = attnquant.quantize(before, [feeds(seed, masked=masked) for seed in range(8)])
    after = ir.to_proto(result.model)
    untouched(before, after)
    found = [node for node in after.graph.node if node.op_type == "Attention"]
    assert len(found) == LAYERS
    assert len({(node.input[3], node.input[6]) for node in found}) == 1
    assert attnquant.check(result.model).ok
    sample = feeds(1, masked=masked)  # of the calibration: nothing of it is clipped
    expected, got = (runtime.run(one, sample) for one in (models.load(before), result.model))
    for name in expected:
        error = np.linalg.norm(expected[name] - got[name]) / np.linalg.norm(expected[name])
        assert error < 0.03, name
    cached = [name for name in expected if name.startswith("v_new0")]
    assert not np.array_equal(expected[cached[0]], sample["v_cache0"]), "something was written"


def test_the_walk_sees_control_flow_inside_control_flow() -> None:
    """A Loop in a branch of an If: this file's walk and the report know both."""
    info = helper.make_tensor_value_info
    one = info("z", TensorProto.FLOAT, None)
    body = helper.make_graph(
        [helper.make_node("Identity", ["going"], ["goes_on"]), helper.make_node("Relu", ["carried"], ["next"])], "body",
        [info("i", TensorProto.INT64, []), info("going", TensorProto.BOOL, []),
         info("carried", TensorProto.FLOAT, None)],
        [info("goes_on", TensorProto.BOOL, []),
         info("next", TensorProto.FLOAT, None)],
    )  # fmt: skip
    loop = helper.make_node("Loop", ["times", "", "y"], ["z"], name="inner", body=body)
    same = helper.make_graph([helper.make_node("Identity", ["y"], ["z"], name="same")], "same", [], [one])
    chosen = helper.make_node(
        "If", ["chosen"], ["out"], name="outer", then_branch=helper.make_graph([loop], "then", [], [one]), else_branch=same
    )
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="linear"), chosen], "model",
        [info("x", TensorProto.FLOAT, ["B", WIDTH]),
         info("times", TensorProto.INT64, []),
         info("chosen", TensorProto.BOOL, [])],
        [info("out", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(weights(0, WIDTH, WIDTH), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert flow(model) == {("If", "outer"): 1, ("Loop", "inner"): 1}
    rng = np.random.default_rng(0)
    data = [
        {"x": rng.standard_normal((4, WIDTH)).astype(np.float32), "times": np.array(2), "chosen": np.array(True)}
        for _ in range(2)
    ]
    result = attnquant.quantize(model, data)
    assert flow(ir.to_proto(result.model)) == flow(model)
    report = attnquant.check(result.model)
    (problem,) = [problem for problem in report.problems if problem.kind == "control flow"]
    assert problem.severity == "warning"
    assert report.ok
    assert "If 'outer', Loop 'inner' in /outer/then_branch: what is inside stays float" in problem.reason
    assert "Loop 'inner'" in " ".join(render(result, format="markdown").split())


def test_a_model_without_control_flow_is_not_told_of_any() -> None:
    model = stacked(is_causal=1, masked=False)
    assert not [problem for problem in attnquant.check(model).problems if problem.kind == "control flow"]


# ---- declarations -------------------------------------------------------------------------------------------------------

FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
Shape = list[int | str | None] | None


def declared(model: onnx.ModelProto, name: str, shape: Shape, kind: int = FLOAT) -> onnx.ModelProto:
    """A copy in which an input or output is declared otherwise."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    (value,) = [value for value in (*made.graph.input, *made.graph.output) if value.name == name]
    value.CopyFrom(helper.make_tensor_value_info(name, kind, shape))
    return made


@pytest.mark.parametrize("name", ["k_cache0", "v_cache1", "k_new0", "v_new1"])
@pytest.mark.parametrize("shape", [None, [None, None, None], ["B", "places", WIDTH]], ids=str)
def test_missing_and_partial_declarations_of_static_caches_stay(name: str, shape: Shape) -> None:
    model = declared(stacked(is_causal=1, masked=False), name, shape)
    result = attnquant.quantize(model, [feeds(seed, masked=False) for seed in range(2)])
    untouched(model, ir.to_proto(result.model))


@pytest.mark.parametrize(
    ("name", "shape", "kind", "told"),
    [
        ("k_new0", ["B", PLACES + 1, WIDTH], FLOAT, r"'k_new0' declares the shape .*node 'sk0' \(TensorScatter\) makes"),
        ("k_new0", ["B", PLACES], FLOAT, r"'k_new0' declares the shape .*node 'sk0'"),
        ("k_cache0", ["B", PLACES, WIDTH + 1], FLOAT, r"sk0.*TensorScatter"),
        ("v_new1", ["B", PLACES, WIDTH], HALF, r"'v_new1' at node 'sv1' is declared tensor\(float16\)"),
    ],
)
def test_wrong_declarations_of_static_caches_are_named(name: str, shape: Shape, kind: int, told: str) -> None:
    model = declared(stacked(is_causal=1, masked=False), name, shape, kind)
    with pytest.raises(ModelError, match=told):
        attnquant.quantize(model, [feeds(seed, masked=False) for seed in range(2)])


FULL: list[int | str | None] = ["batch", DECODER_HEADS, "all", HEAD]
DECLARED = [
    *((name, shape, FLOAT, False) for name in ("past.0.key", "present.1.value")
      for shape in (None, ["b", None, "x", None], ["b", DECODER_HEADS, None, HEAD])),
    ("present.0.key", ["batch", DECODER_HEADS + 1, "all", HEAD], FLOAT, True),
    ("present.0.key", ["batch", DECODER_HEADS, "all"], FLOAT, True),
    ("past.1.value", ["batch", DECODER_HEADS + 1, "past", HEAD], FLOAT, True),
    ("past.1.value", ["batch", DECODER_HEADS, "past", HEAD], HALF, True),
    ("present.1.key", FULL, HALF, True),
]  # fmt: skip


@pytest.mark.parametrize("recipe", ["int8", "llm-kv8"])
@pytest.mark.parametrize("form", [DECOMPOSED, OPERATOR])
@pytest.mark.parametrize(("name", "shape", "kind", "wrong"), DECLARED)
def test_growing_caches_are_as_declared_or_refused(
    name: str, shape: Shape, kind: int, wrong: bool, form: str, recipe: str
) -> None:
    """Right as far as it goes: verbatim (integer caches need heads and sizes as numbers). Wrong: its name or node told."""
    model = declared(decoder(form), name, shape, kind)
    data = [*tokens(2, past=0, new=9), *tokens(2, past=4, new=1)]
    known = shape is not None and isinstance(shape[1], int) and isinstance(shape[-1], int)
    if wrong or (recipe == "llm-kv8" and not known):
        with pytest.raises(ModelError if not wrong else AttnQuantError, match=re.escape(name.partition(".")[2])) as caught:
            attnquant.quantize(model, data, recipe=recipe, target="onnxruntime-cpu@1.32.0")
        assert isinstance(caught.value, ModelError | DataError)
        return
    after = ir.to_proto(attnquant.quantize(model, data, recipe=recipe, target="onnxruntime-cpu@1.32.0").model)
    for old, new in zip([*model.graph.input, *model.graph.output], [*after.graph.input, *after.graph.output], strict=True):
        assert new.name == old.name
        if recipe == "int8" or not old.name.startswith(("past", "present")):
            assert new == old
        else:
            assert new.type.tensor_type.elem_type == TensorProto.INT8
            assert new.type.tensor_type.shape == old.type.tensor_type.shape
