"""Attention fused to operators: exact graphs by hand, numbers against numpy, committed models of exporters."""

from collections import Counter
from itertools import pairwise
from typing import Any

import attention_oracle as oracle
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from corpora import Entry, entries, runnable, snr
from decomposed_cases import CASES, mask_input
from decomposed_graphs import DIM, HEADS, STEPS, WIDTH, Graph, finish, plain
from onnx import TensorProto, helper

from attnquant import check, quantize, recognize, runtime
from attnquant.errors import ModelError
from attnquant.model import load
from attnquant.rewrite import RewriteResult, expand, fuse
from attnquant.roles import PortRole

# ---- exact graphs -------------------------------------------------------------------------------------------------------

STANDARD = "ai.onnx::Attention@23"
HEADS_OP, GROUPED = "com.microsoft::MultiHeadAttention", "com.microsoft::GroupQueryAttention"
OPERATORS = (STANDARD, "ai.onnx::Attention@24", HEADS_OP, GROUPED)
TYPES = {TensorProto.FLOAT: np.float32, TensorProto.FLOAT16: np.float16, TensorProto.BOOL: np.bool_,
         TensorProto.INT64: np.int64, TensorProto.INT32: np.int32}  # fmt: skip


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Random inputs, batch 2 and 5 for every other size that is not said; a mask leaves the first key of each row."""
    made, random = {}, np.random.default_rng(3)
    for item in model.graph.input:
        tensor = item.type.tensor_type
        dims = [dim.dim_value or (2 if dim.dim_param == "batch" else 5) for dim in tensor.shape.dim]
        kind = TYPES[tensor.elem_type]
        if kind is np.bool_:
            array = random.random(dims) > 0.3
            array[..., 0] = True
        else:
            array = random.standard_normal(dims) if kind in (np.float32, np.float16) else np.ones(dims)
        made[item.name] = np.asarray(array).astype(kind)
    return made


def operator(result: RewriteResult) -> ir.Node:
    return next(node for node in result.model.graph if node.op_type.endswith("Attention"))


def attributes(node: ir.Node) -> dict[str, float]:
    return {name: item.value for name, item in node.attributes.items()}


def names(node: ir.Node) -> list[str]:
    return ["" if value is None else str(value.name) for value in node.inputs]


def counts(result: RewriteResult) -> dict[str, int]:
    return dict(Counter(node.op_type for node in result.model.graph))


def test_textbook_to_attention_is_one_node_between_linears() -> None:
    """Heads, transposes, scale and softmax go; the operator reads what the linears made."""
    graph = plain()
    linears = [node.output[0] for node in graph.nodes if node.op_type == "Add"][:3]
    result = fuse(graph.proto(), to=STANDARD)
    assert [(row.status, row.reasons) for row in result.rows] == [("fused", ())]
    assert counts(result) == {"MatMul": 4, "Add": 4, "Attention": 1}
    node = operator(result)
    assert names(node) == linears
    assert attributes(node) == {"scale": 0.25, "q_num_heads": 4, "kv_num_heads": 4}
    assert (node.domain, len(node.outputs)) == ("", 1)
    assert result.model.opset_imports[""] == 23
    assert result.rows[0].tensors[PortRole.QUERY] == linears[0]


def test_textbook_to_multi_head_attention() -> None:
    graph = plain()
    linears = [node.output[0] for node in graph.nodes if node.op_type == "Add"][:3]
    result = fuse(graph.proto(), to=HEADS_OP)
    assert counts(result) == {"MatMul": 4, "Add": 4, "MultiHeadAttention": 1}
    node = operator(result)
    assert names(node) == linears
    assert attributes(node) == {"num_heads": 4, "scale": 0.25}
    assert (node.domain, dict(result.model.opset_imports)) == ("com.microsoft", {"": 18, "com.microsoft": 1})


def test_textbook_to_group_query_attention() -> None:
    """Not causal, and every sample has all keys."""
    graph = plain()
    linears = [node.output[0] for node in graph.nodes if node.op_type == "Add"][:3]
    node = operator(fuse(graph.proto(), to=GROUPED))
    assert names(node)[:5] == [*linears, "", ""]
    assert len(node.inputs) == 7
    assert attributes(node) == {"num_heads": 4, "kv_num_heads": 4, "scale": 0.25, "causal": 0}
    model = fuse(graph.proto(), to=GROUPED).model
    lengths = [value for value in operator(RewriteResult(model=model, rows=())).inputs[5:7] if value is not None]
    model.graph.outputs.extend(lengths)
    found = runtime.run(model, feeds_of(graph.proto()), threads=1)
    seqlens, total = (found[str(value.name)] for value in lengths)
    np.testing.assert_array_equal(seqlens, np.array([4, 4], np.int32))
    np.testing.assert_array_equal(total, np.array(5, np.int32))
    assert (seqlens.dtype, total.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize(
    ("to", "expected"),
    [(STANDARD, {"is_causal": 1}), (HEADS_OP, {"unidirectional": 1}), (GROUPED, {})],
)
def test_a_constant_causal_mask_becomes_an_attribute(to: str, expected: dict[str, int]) -> None:
    graph, _ = CASES["mask_causal_constant"]()
    result = fuse(graph.proto(), to=to)
    found = attributes(operator(result))
    assert {name: value for name, value in found.items() if name in ("is_causal", "unidirectional", "causal")} == expected
    assert "Where" not in counts(result)
    assert len(operator(result).inputs) == (7 if to == GROUPED else 3)  # no mask
    equal(graph.proto(), result)


def test_softcap_and_sinks_go_where_there_are_some() -> None:
    capped, _ = CASES["softcap"]()
    assert attributes(operator(fuse(capped.proto(), to=STANDARD)))["softcap"] == pytest.approx(50.0)
    assert attributes(operator(fuse(capped.proto(), to=GROUPED)))["softcap"] == pytest.approx(50.0)
    assert refusals(fuse(capped.proto(), to=HEADS_OP)) == ["softcap: com.microsoft MultiHeadAttention has none (runtime)"]
    sunk, _ = CASES["sinks"]()
    assert len(operator(fuse(sunk.proto(), to=GROUPED)).inputs) == 12
    assert refusals(fuse(sunk.proto(), to=STANDARD)) == ["attention sinks: ai.onnx Attention has none (specification)"]
    plus_one, _ = CASES["softmax_by_hand_plus_one"]()
    assert attributes(operator(fuse(plus_one.proto(), to=GROUPED)))["smooth_softmax"] == 1


def refusals(result: RewriteResult) -> list[str]:
    assert {row.status for row in result.rows} == {"refused"}
    return [row.reasons[0] for row in result.rows]


def equal(model: onnx.ModelProto, result: RewriteResult, feeds: dict[str, np.ndarray] | None = None) -> None:
    """The fused model loads and gives the original's outputs within 1e-4 of the largest value, 2e-3 in half precision."""
    feeds = feeds or feeds_of(model)
    close(runtime.run(load(model), feeds, threads=1), runtime.run(result.model, feeds, threads=1))


def close(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> None:
    assert list(expected) == list(got)
    for name, item in expected.items():
        assert (got[name].shape, got[name].dtype) == (item.shape, item.dtype)
        x, y = item.astype(np.float64), got[name].astype(np.float64)
        tolerance = 2e-3 if item.dtype == np.float16 else 1e-4
        np.testing.assert_allclose(y, x, rtol=0, atol=tolerance * np.abs(x).max(initial=0.0))


# ---- every form that recognition knows ------------------------------------------------------------------------------------

NOWHERE = {
    "scale_learned_for_each_head": "is no positive constant",
    "temperature_is_an_input": "is no positive constant",
    "mask_multiplied_and_subtracted": "no mask that an operator takes",
    "bias_from_the_query_and_positions": "scaled or cut between masks",
    "bias_gathered_from_products": "scaled or cut between masks",
    "bias_written_into_the_scores": "which no operator shows",
    "guard_isinf_before_softmax": "replaces scores by a test of their values",
    "dropout_and_head_mask": "the probabilities go through Mul",
    "masked_again_and_normalised_again": "the probabilities go through Mul",
    "probabilities_mixed_with_positions": "the probabilities go through Mul",
    "talking_heads": "talking heads",
    "talking_heads_by_convolution": "talking heads",
    "softmax_by_hand_with_reciprocal": "which no operator shows",
    "softmax_by_hand_with_mask_and_epsilon": "inside a softmax that is written out",
    "normalised_after_the_product_with_values": "normalised behind the product with V",
    "one_head_channels_in_the_second_axis": "normalised axis",
    "one_head_without_batch": "Gemm",
    "einsum_without_transposes": "axes in another order",
    "grouped_einsum": "several axes at once",
    "multi_query_einsum": "several axes at once",
    "swapped_operands_of_qk": "go through Transpose",
    "channel_first": "go through Transpose",
    "softmax_between_transposes": "go through Transpose",
    "cross_covariance": "cross-covariance",
    "maximum_minus_scores": "which no operator shows",
    "scores_subtracted_from_a_mask": "no mask that an operator takes",
    "constant_query": "broadcast against each other",
    "constant_object_queries": "broadcast against each other",
    "constant_query_masked": "broadcast against each other",
    "constant_query_of_one_head": "broadcast against each other",
    "constant_latents_without_a_batch_axis": "broadcast against each other",
    "constant_query_on_the_right": "broadcast against each other",
    "constant_query_by_einsum": "several axes at once",
}
"""Cases that no operator takes, with the words of the reason."""
ELSEWHERE = {
    STANDARD: {"sinks", "softmax_by_hand_plus_one"},
    HEADS_OP: {"sinks", "softmax_by_hand_plus_one", "softcap", "probabilities_are_an_output"},
    GROUPED: {
        "probabilities_are_an_output", "different_head_sizes", "grouped_by_packed_query",
        "grouped_by_packed_query_with_mask",
        "past_by_concat_cached_transposed", "past_by_scatter_elements", "past_by_scatter_nd", "past_by_tensor_scatter",
        "past_given_whole", "past_by_where", "constant_prefix", "cross_attention", "cross_attention_to_an_encoder_inside",
        "self_attention_with_reduced_keys", "learned_queries_computed_at_run_time", "joint_attention_of_two_streams",
        "constant_query_expanded", "constant_query_by_bmm", "queries_and_keys_pooled_by_convolution",
        "queries_pooled_by_maximum",
    },
}  # fmt: skip
"""Cases that some operator takes and this one does not."""

NOTE = "several new tokens behind a cache run at batch 1 only (runtime)"


@pytest.mark.parametrize("name", CASES)
def test_every_form(name: str) -> None:
    """Fused without data: equal to the original, or refused with its reason and left as it was."""
    graph, _ = CASES[name]()
    if name == "past_by_scatter_elements":  # its cache is of one sample, and says so in one place only
        for item in graph.inputs:
            item.type.tensor_type.shape.dim[0].dim_value = 1
    model = graph.proto()
    feeds = feeds_of(model)
    expected = runtime.run(load(model), feeds, threads=1)
    for to in (STANDARD, HEADS_OP, GROUPED):
        result = fuse(model, to=to)
        assert all(node.domain in ("", "com.microsoft") for node in result.model.graph)
        if name in NOWHERE:
            assert all(NOWHERE[name] in reason for reason in refusals(result))
        elif name in ELSEWHERE[to]:
            assert refusals(result)
        else:
            assert {(row.status, row.reasons) for row in result.rows} == {("fused", ())}
            close(expected, runtime.run(result.model, feeds, threads=1))
        if name in NOWHERE or name in ELSEWHERE[to]:
            assert Counter(node.op_type for node in result.model.graph if node.domain) == Counter(
                node.op_type for node in load(model).graph if node.domain
            )


# ---- against numpy --------------------------------------------------------------------------------------------------------


def bare(
    *,
    kv_heads: int = HEADS,
    keys: int = STEPS,
    mask: onnx.ValueInfoProto | None = None,
    past: int = 0,
    softcap: float = 0.0,
) -> Graph:
    """The product alone: q [B, H, S, d], k and v [B, kv_heads, T, d] are inputs, y [B, H, S, d] the output."""
    graph = Graph()
    graph.input("q", ("batch", HEADS, STEPS, DIM))
    k, v = (graph.input(name, ("batch", kv_heads, keys, DIM)) for name in "kv")
    if past:
        old = [graph.input(f"past_{name}", ("batch", kv_heads, past, DIM)) for name in "kv"]
        pairs = zip(old, (k, v), strict=True)
        k, v = (graph.op("Concat", first, last, name=f"present_{last}", axis=2) for first, last in pairs)
        graph.output("present_k")
        graph.output("present_v")
    if kv_heads != HEADS:
        k, v = (repeated(graph, item, kv_heads) for item in (k, v))
    scores = graph.op("Mul", graph.op("MatMul", "q", graph.transposed(k)), graph.const(0.3))
    if softcap:
        inner = graph.op("Tanh", graph.op("Div", scores, graph.const(softcap)))
        scores = graph.op("Mul", inner, graph.const(softcap))
    if mask is not None:
        graph.inputs.append(mask)
        hidden = graph.const(-np.inf)
        boolean = mask.type.tensor_type.elem_type == TensorProto.BOOL
        scores = graph.op("Where", "m", scores, hidden) if boolean else graph.op("Add", scores, "m")
    graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v, name="y")
    graph.output("y")
    return graph


def repeated(graph: Graph, value: str, heads: int, size: int = DIM) -> str:
    room = graph.op("Unsqueeze", value, graph.ints(2))
    copies = graph.op("Expand", room, graph.ints(1, 1, HEADS // heads, 1, 1))
    return graph.op("Reshape", copies, graph.ints(0, HEADS, -1, size))


def mask_of(kind: int, *shape: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info("m", kind, list(shape))


MASKS = {
    "none": None,
    "bool": mask_of(TensorProto.BOOL, "batch", 1, STEPS, STEPS),
    "bool_heads": mask_of(TensorProto.BOOL, "batch", HEADS, STEPS, STEPS),
    "bool_padding": mask_of(TensorProto.BOOL, "batch", 1, 1, STEPS),
    "bool_two_axes": mask_of(TensorProto.BOOL, STEPS, STEPS),
    "float": mask_of(TensorProto.FLOAT, "batch", 1, STEPS, STEPS),
    "float_heads": mask_of(TensorProto.FLOAT, 1, HEADS, STEPS, STEPS),
    "float_padding": mask_of(TensorProto.FLOAT, "batch", 1, 1, STEPS),
    "float_column": mask_of(TensorProto.FLOAT, 1, 1, STEPS, 1),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("to", OPERATORS)
def test_masks_by_the_specification(name: str, to: str) -> None:
    """Masks of any shape that broadcasts to the scores: the operators broadcast neither rows nor columns."""
    model = bare(mask=MASKS[name]).proto()
    feeds = feeds_of(model)
    mask = feeds.get("m")
    boolean = mask is not None and mask.dtype == bool
    reference = oracle.attend(
        feeds["q"], feeds["k"], feeds["v"], scale=0.3, allowed=mask if boolean else None, bias=None if boolean else mask
    )
    result = fuse(model, to=to)
    assert operator(result).attributes["scale"].value == pytest.approx(0.3)
    close({"y": reference.context.astype(np.float32)}, runtime.run(result.model, feeds, threads=1))


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("to", OPERATORS)
def test_repeat_kv_goes_where_the_operator_takes_grouped_heads(to: str, kv_heads: int) -> None:
    model = bare(kv_heads=kv_heads, softcap=0.0 if to == HEADS_OP else 2.0).proto()
    feeds = feeds_of(model)
    result = fuse(model, to=to)
    reference = oracle.attend(feeds["q"], feeds["k"], feeds["v"], scale=0.3, softcap=0.0 if to == HEADS_OP else 2.0)
    close({"y": reference.context.astype(np.float32)}, runtime.run(result.model, feeds, threads=1))
    kinds = counts(result)
    if to == HEADS_OP:
        assert "Expand" in kinds  # it takes as many heads of K and V as of Q
    elif to == GROUPED:
        assert (kinds["Expand"], attributes(operator(result))["kv_num_heads"]) == (1, kv_heads)  # of seqlens_k
    else:
        assert kinds == {"Attention": 1}
        assert names(operator(result)) == ["q", "k", "v"]


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
@pytest.mark.parametrize("to", OPERATORS)
def test_a_cache_moves_inside(to: str, kv_heads: int) -> None:
    """The Concats go; present is the operator's output under the name that it had. One sample: GQA's chunks (runtime)."""
    mask = mask_of(TensorProto.BOOL, 1, 1, STEPS, 3 + STEPS)
    model = bare(kv_heads=kv_heads, past=3, mask=mask).proto()
    feeds = {name: item[:1] for name, item in feeds_of(model).items()}
    result = fuse(model, to=to)
    key, value = (np.concatenate([feeds[f"past_{name}"], feeds[name]], axis=2) for name in "kv")
    reference = oracle.attend(feeds["q"], key, value, scale=0.3, allowed=feeds["m"])
    expected = {"present_k": key, "present_v": value, "y": reference.context.astype(np.float32)}
    close(expected, runtime.run(result.model, feeds, threads=1))
    assert [row.reasons for row in result.rows] == [(NOTE,) if to == GROUPED else ()]
    inside = to != HEADS_OP or kv_heads == HEADS  # MultiHeadAttention's cache has as many heads as Q
    node = operator(result)
    assert [str(value.name) for value in node.outputs[1:3]] == (["present_k", "present_v"] if inside else [])
    if inside:
        place = {STANDARD: 4, "ai.onnx::Attention@24": 4, HEADS_OP: 6, GROUPED: 3}[to]
        assert names(node)[place : place + 2] == ["past_k", "past_v"]


def test_a_key_that_is_stored_transposed_is_taken() -> None:
    """(B, H, d, S) and (B, S, H, d): the layouts that exporters leave K in."""
    for order, turned in (((0, 1, 3, 2), (0, 1, 2, 3)), ((0, 2, 1, 3), (0, 2, 3, 1))):
        graph = Graph()
        graph.input("q", ("batch", HEADS, STEPS, DIM))
        graph.input("v", ("batch", HEADS, STEPS, DIM))
        sizes = ("batch", HEADS, STEPS, DIM)
        graph.input("k", [sizes[axis] for axis in order])
        key = graph.op("Transpose", "k", perm=list(turned)) if turned != (0, 1, 2, 3) else "k"
        scores = graph.op("Mul", graph.op("MatMul", "q", key), graph.const(0.25))
        graph.op("MatMul", graph.op("Softmax", scores, axis=-1), "v", name="y")
        graph.output("y")
        model = graph.proto()
        feeds = feeds_of(model)
        for to in OPERATORS:
            result = fuse(model, to=to)
            assert [row.status for row in result.rows] == ["fused"]
            key_heads_first = feeds["k"].transpose(np.argsort(order))
            reference = oracle.attend(feeds["q"], key_heads_first, feeds["v"], scale=0.25)
            close({"y": reference.context.astype(np.float32)}, runtime.run(result.model, feeds, threads=1))


# ---- rows that see no key -------------------------------------------------------------------------------------------------


def with_dead_row(fill: float) -> tuple[Graph, dict[str, np.ndarray]]:
    """A boolean mask that hides a whole row behind this number, and its inputs."""
    graph = plain(lambda g, scores: g.op("Where", mask_input(g, boolean=True), scores, g.const(fill)))
    feeds = feeds_of(graph.proto())
    feeds["m"][:, :, 2] = False
    return graph, feeds


@pytest.mark.parametrize("to", OPERATORS)
@pytest.mark.parametrize("fill", [np.finfo(np.float32).min, -1e9])
def test_a_row_without_a_key_keeps_the_mean_of_the_values(to: str, fill: float) -> None:
    """Hidden by a finite number, it is the mean of V in the graph, and zeros in ONNX Runtime's Attention: kept as it was."""
    graph, feeds = with_dead_row(fill)
    equal(graph.proto(), fuse(graph.proto(), to=to), feeds)


def test_a_row_without_a_key_may_change_where_the_caller_says_so() -> None:
    graph, feeds = with_dead_row(np.finfo(np.float32).min)
    result = fuse(graph.proto(), to=STANDARD, allow_dead_row_change=True)
    assert names(operator(result))[3] == "m"  # the boolean mask itself
    expected, got = (runtime.run(item, feeds, threads=1)["y"] for item in (load(graph.proto()), result.model))
    np.testing.assert_allclose(np.delete(got, 2, 1), np.delete(expected, 2, 1), atol=1e-5)
    assert np.abs(got[:, 2] - expected[:, 2]).max() > 1e-2
    refused = fuse(graph.proto(), to=STANDARD, allow_dead_row_change=True, feeds=feeds)
    assert "differs by" in refusals(refused)[0]
    equal(graph.proto(), refused, feeds)


@pytest.mark.parametrize("to", OPERATORS)
def test_zeros_of_a_guard_stay_zeros(to: str) -> None:
    """torch's sdpa with a boolean mask: NaN of a row that sees no key become zeros."""
    graph, _ = CASES["guard_isnan_where"]()
    model = graph.proto()
    feeds = feeds_of(model)
    mask = next(item for item in feeds.values() if item.dtype == bool or item.ndim == 4)
    mask[:, :, 1] = False if mask.dtype == bool else -np.inf
    equal(model, fuse(model, to=to), feeds)


# ---- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["Attention", "ai.onnx::Attention", "ai.onnx::Attention@25", "com.microsoft::Attention", ""])
def test_names_of_no_operator_are_an_error(to: str) -> None:
    with pytest.raises(ModelError, match=r"expected one of ai\.onnx::Attention@23"):
        fuse(plain().proto(), to=to)


def test_attention_is_refused_in_a_model_of_opset_25() -> None:
    model = plain(opset=25).proto()
    result = fuse(model, to="ai.onnx::Attention@24")
    assert refusals(result) == ["the model is of opset 25: no kernel for Attention beyond opset 24 (runtime)"]
    assert counts(result) == dict(Counter(node.op_type for node in model.graph.node))
    assert [row.status for row in fuse(model, to=HEADS_OP).rows] == ["fused"]


def test_unknown_sites_are_an_error_and_others_stay() -> None:
    graph = plain()
    with pytest.raises(ModelError, match=r"'/other'.*'/context'"):
        fuse(graph.proto(), to=STANDARD, sites=["/other"])
    result = fuse(graph.proto(), to=STANDARD, sites=[])
    assert result.rows == ()
    assert "Attention" not in counts(result)


def test_heads_that_the_runtime_does_not_take_are_refused() -> None:
    graph = Graph()
    for name in "qkv":
        graph.input(name, ("batch", HEADS, STEPS, 12))
    scores = graph.op("MatMul", "q", graph.transposed("k"))
    graph.op("MatMul", graph.op("Softmax", scores, axis=-1), "v", name="y")
    graph.output("y")
    assert refusals(fuse(graph.proto(), to=GROUPED)) == ["a head size of 12: the operator takes multiples of 8 (runtime)"]
    equal(graph.proto(), fuse(graph.proto(), to=STANDARD))


def test_the_model_is_not_changed() -> None:
    model = load(plain().proto())
    before = ir.to_proto(model).SerializeToString()
    for to in OPERATORS:
        fuse(model, to=to)
    assert ir.to_proto(model).SerializeToString() == before


# ---- models of exporters --------------------------------------------------------------------------------------------------

MODELS = [
    entry
    for entry in (*entries("ATTNQUANT_FUSED", "corpus"), *entries("ATTNQUANT_FUSED", "cases"))
    if entry.truth.get("expect") != "error"
]


@pytest.mark.parametrize("entry", MODELS, ids=str)
def test_models_of_exporters(entry: Entry) -> None:
    """Every attention outside control flow fits some operator; fused and written out again, all calls give the same."""
    found = runnable(entry.path)
    if isinstance(found, str):  # the runtime's Attention does not take its mask
        assert {row.status for row in fuse(entry.path, to=HEADS_OP).rows} == {"fused"}
        return
    samples, expected = found
    sites = recognize(entry.path, feeds=samples[0]).sites
    inside = {site.id for site in sites if site.path}
    taken: set[str] = set()
    for to in OPERATORS:
        result = fuse(entry.path, to=to, feeds=samples[0])
        taken |= {row.site for row in result.rows if row.status == "fused"}
        form = to.partition("@")[0]
        fused = sum(site.form.partition("@")[0] == form and not site.path for site in recognize(result.model).sites)
        assert fused == sum(row.status == "fused" and row.site not in inside for row in result.rows)
        back = expand(result.model).model
        for sample, outputs in zip(samples, expected, strict=True):
            close(outputs, runtime.run(result.model, sample, threads=1))
            close(outputs, runtime.run(back, sample, threads=1))
    assert taken >= {site.id for site in sites} - inside


def of(name: str) -> Entry:
    return next(entry for entry in MODELS if entry.path.name == name)


@pytest.mark.parametrize("to", [STANDARD, HEADS_OP])
def test_a_fused_decoder_with_cache_is_quantized(to: str) -> None:
    """BART: all attentions fused, then Q and K quantized at the operators; placement right, 25 dB and more."""
    samples, expected = runnable(of("bart_decoder_past_sdpa-dynamo-20.onnx").path)
    result = fuse(of("bart_decoder_past_sdpa-dynamo-20.onnx").path, to=to, feeds=samples[0])
    assert {row.status for row in result.rows} == {"fused"}
    made = quantize(result.model, samples)
    report = check(made.model, setup=made.setup)
    assert report.ok
    assert {site.form.partition("@")[0] for site in made.sites} == {to.partition("@")[0]}
    got = [runtime.run(made.model, sample, threads=1) for sample in samples]
    assert snr(expected, got) >= 25


# ---- GroupQueryAttention of decoders --------------------------------------------------------------------------------------

LLAMA = "llama_past_sdpa-dynamonoopt-18.onnx"


def test_lengths_are_made_once_for_all_layers() -> None:
    samples, _ = runnable(of(LLAMA).path)
    result = fuse(of(LLAMA).path, to=GROUPED)
    nodes = [node for node in result.model.graph if node.op_type == "GroupQueryAttention"]
    assert len(nodes) == 2
    assert len({node.inputs[5] for node in nodes}) == len({node.inputs[6] for node in nodes}) == 1
    assert len({node.inputs[10] for node in nodes}) == 1  # and so is the bias
    assert {attributes(node)["kv_num_heads"] for node in nodes} == {2}
    for node, layer in zip(nodes, (0, 1), strict=True):
        assert names(node)[3:5] == [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        assert [value.name for value in node.outputs[1:]] == [f"present.{layer}.key", f"present.{layer}.value"]
    seqlens, total = nodes[0].inputs[5:7]
    result.model.graph.outputs.extend(value for value in (seqlens, total) if value is not None)
    found = runtime.run(result.model, samples[0], threads=1)
    past = samples[0]["past_key_values.0.key"].shape[2]
    np.testing.assert_array_equal(found[seqlens.name], np.full(2, past))
    np.testing.assert_array_equal(found[total.name], past + 1)


def test_left_padding_goes_into_the_bias() -> None:
    """Hidden keys at the front of one sample, other for each sample, in a decoding step behind a cache."""
    samples, _ = runnable(of(LLAMA).path)
    feeds = dict(samples[0])
    feeds["attention_mask"] = np.ones_like(feeds["attention_mask"])
    feeds["attention_mask"][0, :3] = 0
    feeds["attention_mask"][1, :1] = 0
    model = load(of(LLAMA).path)
    whole = runtime.run(model, {**feeds, "attention_mask": np.ones_like(feeds["attention_mask"])}, threads=1)
    expected = runtime.run(model, feeds, threads=1)
    first = next(iter(expected))
    assert np.abs(expected[first] - whole[first]).max() > 1e-3  # the padding says something
    close(expected, runtime.run(fuse(model, to=GROUPED).model, feeds, threads=1))


def rotary(*, positions: str = "counted", keys: int = 2, layers: int = 1, size: int = 16) -> Graph:
    """Decoder layers of opset 23: RotaryEmbedding of Q and K, past by Concat, repeat_kv; x has Q, K and V of all layers."""
    graph = Graph(opset=23)
    width = (HEADS + 2 * keys) * size
    graph.input("x", (1, "new", layers * width))
    parts: dict[str, str] = {}
    for layer in range(layers):
        start = layer * width
        for name, heads in (("q", HEADS), ("k", keys), ("v", keys)):
            ends = graph.ints(start), graph.ints(start + heads * size), graph.ints(2)
            flat = graph.op("Slice", "x", *ends, name=f"{name}{layer}_flat")
            parts[f"{name}{layer}"] = graph.heads(flat, heads, dim=size)
            start += heads * size
        for name in "kv":
            graph.input(f"past_{name}{layer}", (1, keys, "past", size))

    def length(value: str, axis: int) -> str:
        return graph.op("Squeeze", graph.op("Shape", value, start=axis, end=axis + 1))

    if positions == "input":
        at = graph.input("positions", ("new",), TensorProto.INT64)
    else:
        count = graph.op("Range", graph.const(0, np.int64), length("x", 1), graph.const(1, np.int64))
        at = graph.op("Add", count, length("past_k0", 2) if positions == "counted" else graph.const(1, np.int64))
    place = graph.op("Cast", graph.op("Unsqueeze", at, graph.ints(0, 2)), to=TensorProto.FLOAT)
    angles = graph.op("Mul", place, graph.const([[0.5 ** np.arange(size // 2)]]))
    for layer in range(layers):
        q, k = (
            graph.op("RotaryEmbedding", parts[f"{name}{layer}"], graph.op("Cos", angles), graph.op("Sin", angles))
            for name in "qk"
        )
        new = {"k": k, "v": parts[f"v{layer}"]}
        whole = {
            name: graph.op("Concat", f"past_{name}{layer}", item, name=f"present_{name}{layer}", axis=2)
            for name, item in new.items()
        }
        key, value = (repeated(graph, item, keys, size) for item in whole.values())
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(key)), graph.const(0.3))
        graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value, name=f"y{layer}")
        for name in (f"y{layer}", f"present_k{layer}", f"present_v{layer}"):
            graph.output(name)
    return graph


@pytest.mark.parametrize(("new", "past"), [(1, 6), (3, 6), (4, 0)])
def test_rotary_embedding_moves_inside(new: int, past: int) -> None:
    """Tables for all positions up to now, made once; the operator rotates what the linears made."""
    model = rotary(layers=2).proto()
    result = fuse(model, to=GROUPED)
    kinds = counts(result)
    assert "RotaryEmbedding" not in kinds
    assert (kinds["Cos"], kinds["Sin"], kinds["GroupQueryAttention"]) == (1, 1, 2)
    nodes = [node for node in result.model.graph if node.op_type == "GroupQueryAttention"]
    assert attributes(nodes[1]) == {
        "num_heads": 4, "kv_num_heads": 2, "scale": pytest.approx(0.3), "do_rotary": 1, "rotary_interleaved": 0, "causal": 0
    }  # fmt: skip
    assert nodes[0].inputs[5:9] == nodes[1].inputs[5:9]
    random = np.random.default_rng(4)
    feeds = {}
    for item in model.graph.input:
        dims = [dim.dim_value or {"new": new, "past": past}[dim.dim_param] for dim in item.type.tensor_type.shape.dim]
        feeds[item.name] = random.standard_normal(dims).astype(np.float32)
    assert [names(node)[:3] for node in nodes] == [[f"{name}{layer}_flat" for name in "qkv"] for layer in range(2)]
    got = runtime.run(result.model, feeds, threads=1)
    parts = {f"{name}{layer}": item for layer, half in enumerate(np.split(feeds["x"], 2, axis=2))
             for name, item in zip("qkv", np.split(half, [64, 96], axis=2), strict=True)}  # fmt: skip
    parts = {name: oracle.split_heads(item, item.shape[2] // 16) for name, item in parts.items()}
    angles = np.outer(np.arange(past + new), 0.5 ** np.arange(8))
    places = np.arange(past, past + new)[None]
    for layer in range(2):
        query, key = (oracle.rotate(parts[f"{name}{layer}"], np.cos(angles), np.sin(angles), places) for name in "qk")
        keys = np.concatenate([feeds[f"past_k{layer}"], key], axis=2)
        values = np.concatenate([feeds[f"past_v{layer}"], parts[f"v{layer}"]], axis=2)
        reference = oracle.attend(query, keys, values, scale=0.3)
        np.testing.assert_allclose(got[f"y{layer}"], reference.context, atol=1e-5)
        np.testing.assert_allclose(got[f"present_k{layer}"], keys, atol=1e-5)
    close(runtime.run(load(model), feeds, threads=1), got)


@pytest.mark.parametrize("more", [{"positions": "input"}, {"positions": "shifted"}, {"size": 8}], ids=str)
def test_rotary_embedding_stays_outside_where_it_would_be_another(more: dict[str, Any]) -> None:
    """Positions that the operator would not count, or heads that it does not rotate (runtime)."""
    model = rotary(**more).proto()
    result = fuse(model, to=GROUPED)
    assert [row.status for row in result.rows] == ["fused"]
    assert counts(result)["RotaryEmbedding"] == 2
    assert "do_rotary" not in attributes(operator(result))


@pytest.mark.parametrize("version", [23, 24])
def test_an_operator_takes_over_what_stands_in_front_of_it(version: int) -> None:
    """torch exports Attention behind Concat and repeat_kv: both go in."""
    graph = Graph(opset=version)
    graph.input("q", ("batch", HEADS, STEPS, DIM))
    whole = []
    for name in "kv":
        graph.input(name, ("batch", 2, STEPS, DIM))
        graph.input(f"past_{name}", ("batch", 2, 3, DIM))
        whole.append(graph.op("Concat", f"past_{name}", name, name=f"present_{name}", axis=2))
        graph.output(f"present_{name}")
    key, value = (repeated(graph, item, 2) for item in whole)
    graph.op("Attention", "q", key, value, name="y", scale=0.3)
    graph.output("y")
    model = graph.proto()
    result = fuse(model, to=f"ai.onnx::Attention@{version}")
    assert counts(result) == {"Attention": 1}
    assert names(operator(result)) == ["q", "k", "v", "", "past_k", "past_v"]
    equal(model, result)
    again = fuse(result.model, to=f"ai.onnx::Attention@{version}")
    assert [row.reasons for row in again.rows] == [("it is this operator already",)]
    assert counts(again) == {"Attention": 1}


def test_two_values_of_one_softmax_become_one_operator_and_a_product() -> None:
    """DiffLlama: V in two halves; the operator hands its probabilities to the product that stays."""
    graph = plain()
    graph.op("MatMul", "p", graph.heads(graph.linear("x")), name="context2")
    graph.output("context2")
    model = graph.proto()
    feeds = feeds_of(model)
    result = fuse(model, to=STANDARD, feeds=feeds)
    assert [row.status for row in result.rows] == ["fused", "refused"]
    assert "attention that was fused before it" in result.rows[1].reasons[0]
    expected, got = (runtime.run(load(one), feeds, threads=1) for one in (model, result.model))
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5 * np.abs(array).max())


def test_parts_of_a_packed_projection_whose_width_is_computed() -> None:
    """torch's chunk as TorchScript writes it: onnx doesn't know the widths and takes the operator's context for empty."""
    graph = Graph()
    graph.input("x")
    packed = graph.linear("x", wide=3 * WIDTH)
    total = graph.op("Gather", graph.op("Shape", packed), graph.const(2, np.int64))
    third = graph.op("Unsqueeze", graph.op("Div", total, graph.const(3, np.int64)), graph.ints(0))
    ends = [graph.ints(0)] + [graph.op("Mul", third, graph.ints(number)) for number in (1, 2, 3)]
    parts = [graph.op("Slice", packed, start, end, graph.ints(2)) for start, end in pairwise(ends)]
    q, k, v = (graph.heads(part, name=name) for part, name in zip(parts, "qkv", strict=True))
    finish(graph, graph.op("MatMul", q, graph.transposed(k)), v)
    model = graph.proto()
    for part in parts:
        shape = ["batch", STEPS, f"{part}_width"]
        model.graph.value_info.append(helper.make_tensor_value_info(part, TensorProto.FLOAT, shape))
    feeds = feeds_of(model)
    result = fuse(model, to=STANDARD, feeds=feeds)
    assert [(row.status, row.reasons) for row in result.rows] == [("fused", ())]
    expected, got = (runtime.run(load(one), feeds, threads=1)["y"] for one in (model, result.model))
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("to", [STANDARD, HEADS_OP])
def test_a_bias_on_merged_heads_beside_a_cache(to: str) -> None:
    """Bloom: bmm over batch * heads, alibi added there, the mask behind a Reshape; the operator takes the cache over."""
    past, heads = 3, ("batch", HEADS, "past", DIM)
    graph = Graph()
    graph.input("x")
    for name, shape in (("past_key", heads), ("past_value", heads), ("alibi", (2 * HEADS, 1, past + STEPS))):
        graph.input(name, shape)
    q = graph.heads(graph.linear("x"), name="q")
    joined = []
    for name in ("key", "value"):
        joined.append(graph.op("Concat", f"past_{name}", graph.heads(graph.linear("x")), axis=2, name=f"present_{name}"))
        graph.output(f"present_{name}")
    q3, k3, v3 = (graph.op("Reshape", one, graph.ints(2 * HEADS, -1, DIM)) for one in (q, *joined))
    scores = graph.op("Mul", graph.op("MatMul", q3, graph.transposed(k3, rank=3)), graph.const(0.25))
    apart = graph.op("Reshape", graph.op("Add", scores, "alibi"), graph.ints(2, HEADS, STEPS, past + STEPS))
    mask = graph.input("mask", ("batch", 1, STEPS, past + STEPS))
    p = graph.op("Softmax", graph.op("Add", apart, mask), axis=-1)
    context = graph.op("MatMul", graph.op("Reshape", p, graph.ints(2 * HEADS, STEPS, past + STEPS)), v3)
    graph.merged(graph.op("Reshape", context, graph.ints(2, HEADS, STEPS, DIM)))
    graph.output("y")
    model, random = graph.proto(), np.random.default_rng(1)
    shapes = {"x": (2, STEPS, WIDTH), "alibi": (2 * HEADS, 1, past + STEPS), "mask": (2, 1, STEPS, past + STEPS)}
    shapes |= dict.fromkeys(("past_key", "past_value"), (2, HEADS, past, DIM))
    feeds = {item.name: random.standard_normal(shapes[item.name]).astype(np.float32) for item in model.graph.input}
    result = fuse(model, to=to, feeds=feeds)
    assert [(row.status, row.reasons) for row in result.rows] == [("fused", ())]
    assert "past_key" in names(operator(result))
    expected, got = (runtime.run(load(one), feeds, threads=1) for one in (model, result.model))
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=1e-5 * np.abs(array).max())
