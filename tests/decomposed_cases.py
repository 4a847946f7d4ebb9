"""Attention in every form that patterns recognises, the truth written beside each graph (see decomposed_graphs).

A case function returns (graph, truth); truth says what differs from `TRUTH`, by the fields of AttentionSite and, under the
names q, k, v, p, mask, context ..., the tensors at the ports. The registry `CASES` is in the order of the file.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from decomposed_graphs import DIM, HEADS, STEPS, WIDTH, Graph, finish, plain, projected
from onnx import TensorProto, numpy_helper

TRUTH: dict[str, Any] = {
    "q": "q", "k": "kt", "v": "v", "p": "p", "context": "context", "scores": "scaled",
    "kind": "self", "past": "none", "q_heads": HEADS, "kv_heads": HEADS, "kv_repeat": None, "qk_head_dim": DIM,
    "v_head_dim": DIM,
    "scale": 0.25, "causal": False, "softcap": None, "sinks": False, "cross_covariance": False,
    "traits": (),
}  # fmt: skip
MASKED = {"causal": None}
Case = tuple[Graph, dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def start(opset: int = 18) -> tuple[Graph, str, str, str]:
    graph = Graph(opset=opset)
    graph.input("x")
    return (graph, *projected(graph))


def mask_input(graph: Graph, boolean: bool = False) -> str:
    return graph.input("m", ("batch", 1, STEPS, STEPS), TensorProto.BOOL if boolean else TensorProto.FLOAT)


# --- scale ---


@case
def scale_after_mul() -> Case:
    return plain(), {}


@case
def scale_after_div() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Div", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const([4.0]), name="scaled")
    return finish(graph, scores), {}


@case
def scale_left_operand_of_mul() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.const(0.25), graph.op("MatMul", q, graph.transposed(k, name="kt")), name="scaled")
    return finish(graph, scores), {}


@case
def scale_on_q() -> Case:
    graph, q, k, _ = start()
    scaled = graph.op("Mul", q, graph.const(0.25), name="qs")
    return finish(graph, graph.op("MatMul", scaled, graph.transposed(k, name="kt"), name="scores")), {
        "q": "qs",
        "scores": "scores",
    }


@case
def scale_on_k_by_div() -> Case:
    graph, q, k, _ = start()
    scaled = graph.op("Div", graph.transposed(k), graph.const(4.0), name="ks")
    return finish(graph, graph.op("MatMul", q, scaled, name="scores")), {"k": "ks", "scores": "scores"}


@case
def scale_on_both_by_square_roots() -> Case:
    graph, q, k, _ = start()
    left = graph.op("Mul", q, graph.const(0.5), name="qs")
    right = graph.op("Mul", graph.transposed(k), graph.const(0.5), name="ks")
    return finish(graph, graph.op("MatMul", left, right, name="scores")), {"q": "qs", "k": "ks", "scores": "scores"}


@case
def scale_on_q_before_heads_and_after_product() -> Case:
    graph = Graph()
    graph.input("x")
    early = graph.op("Mul", graph.linear("x"), graph.const(0.5))
    q, k = graph.heads(early, name="q"), graph.heads(graph.linear("x"), name="k")
    graph.heads(graph.linear("x"), name="v")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.5), name="scaled")
    return finish(graph, scores), {}


@case
def scale_none() -> Case:
    graph, q, k, _ = start()
    return finish(graph, graph.op("MatMul", q, graph.transposed(k, name="kt"), name="scores")), {
        "scale": 1.0,
        "scores": "scores",
    }


@case
def scale_from_shape() -> Case:
    graph, q, k, _ = start()
    size = graph.op("Gather", graph.op("Shape", q), graph.const(3, np.int64))
    root = graph.op("Sqrt", graph.op("Cast", size, to=TensorProto.FLOAT))
    scores = graph.op("Div", graph.op("MatMul", q, graph.transposed(k, name="kt")), root, name="scaled")
    return finish(graph, scores), {"scale": DIM**-0.5}


@case
def scale_square_roots_from_shape() -> Case:
    """What torch exports for scaled_dot_product_attention with dynamic shapes."""
    graph, q, k, _ = start()
    last = graph.op("Slice", graph.op("Shape", q), graph.ints(-1), graph.ints(2**63 - 1))
    scale = graph.op("Div", graph.const([1.0]), graph.op("Sqrt", graph.op("Cast", last, to=TensorProto.FLOAT)))
    left = graph.op("Mul", q, graph.op("Sqrt", scale), name="qs")
    right = graph.op("Mul", graph.transposed(k), graph.op("Sqrt", scale), name="ks")
    scores = graph.op("MatMul", left, right, name="scores")
    return finish(graph, scores), {"q": "qs", "k": "ks", "scores": "scores", "scale": DIM**-0.5}


@case
def scale_learned_for_each_head() -> Case:
    """Cosine attention: the factor differs between heads, so that there is no one scale."""
    graph, q, k, _ = start()
    unit = [graph.op("Div", one, graph.op("ReduceL2", one, graph.ints(-1))) for one in (q, k)]
    product = graph.op("MatMul", unit[0], graph.transposed(unit[1], name="kt"))
    scores = graph.op("Mul", product, graph.op("Exp", graph.weight(HEADS, 1, 1)), name="scaled")
    return finish(graph, scores), {"q": unit[0], "scale": None}


# --- masks, bias, softcap, sinks ---


@case
def mask_added() -> Case:
    return plain(lambda graph, s: graph.op("Add", s, mask_input(graph), name="masked")), {"mask": "m", **MASKED}


@case
def mask_where_keeps() -> Case:
    fill = float("-inf")
    graph = plain(lambda g, s: g.op("Where", mask_input(g, True), s, g.const(fill)))
    return graph, {"mask": "m", **MASKED}


@case
def mask_where_hides() -> Case:
    return plain(lambda g, s: g.op("Where", mask_input(g, True), g.const(-1e9), s)), {"mask": "m", **MASKED}


@case
def masks_two_added() -> Case:
    def shape(graph: Graph, scores: str) -> str:
        return graph.op("Add", graph.op("Add", scores, graph.weight(1, HEADS, STEPS, STEPS)), mask_input(graph))

    return plain(shape), {"mask": "m", **MASKED}


@case
def mask_multiplied_and_subtracted() -> Case:
    """The oldest GPT-2: w * b - 10000 * (1 - b)."""

    def shape(graph: Graph, scores: str) -> str:
        lower = np.tril(np.ones((1, 1, STEPS, STEPS)))
        return graph.op("Sub", graph.op("Mul", scores, graph.const(lower)), graph.const(1e4 * (1 - lower), name="hidden"))

    return plain(shape), {"mask": "hidden", "causal": True}


@case
def mask_clamped_from_below() -> Case:
    """OPT: max(scores + mask, lowest)."""

    def shape(graph: Graph, scores: str) -> str:
        return graph.op("Max", graph.op("Add", scores, mask_input(graph)), graph.const(-3e38))

    return plain(shape), {"mask": "m", **MASKED}


@case
def mask_causal_constant() -> Case:
    mask = np.triu(np.full((STEPS, STEPS), -np.inf), 1)
    return plain(lambda g, s: g.op("Add", s, g.const(mask, name="m"), name="masked")), {"mask": "m", "causal": True}


@case
def mask_causal_where() -> Case:
    keep = np.tril(np.ones((1, 1, STEPS, STEPS), bool))
    return plain(lambda g, s: g.op("Where", g.const(keep, np.bool_, "m"), s, g.const(-1e9))), {"mask": "m", "causal": True}


def _causal_from_sizes(make: Callable[[Graph, str], str]) -> Graph:
    """Scores of any length; `make` masks them, given the length as a vector of one element."""
    graph = Graph()
    graph.input("x", ("batch", "steps", WIDTH))
    q, k, _ = projected(graph)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    graph.op("Shape", "x", name="steps", start=1, end=2)
    return finish(graph, make(graph, scores))


def _filled(graph: Graph, value: float) -> str:
    square = graph.op("Concat", "steps", "steps", axis=0)
    tensor = numpy_helper.from_array(np.array([value], np.float32))
    return graph.op("ConstantOfShape", square, value=tensor)


@case
def mask_causal_from_sizes_added() -> Case:
    """torch.full((s, s), -inf).triu(1)."""

    def masked(graph: Graph, scores: str) -> str:
        upper = graph.op("Trilu", _filled(graph, -np.inf), graph.const(1, np.int64), name="m", upper=1)
        return graph.op("Add", scores, upper)

    return _causal_from_sizes(masked), {"mask": "m", "causal": True}


@case
def mask_causal_from_sizes_selected() -> Case:
    """torch.ones(s, s).tril(): kept where it is one, with two axes in front."""

    def masked(graph: Graph, scores: str) -> str:
        lower = graph.op("Cast", graph.op("Trilu", _filled(graph, 1), upper=0), to=TensorProto.BOOL)
        return graph.op("Where", graph.op("Unsqueeze", lower, graph.ints(0, 1), name="m"), scores, graph.const(-np.inf))

    return _causal_from_sizes(masked), {"mask": "m", "causal": True}


@case
def mask_causal_from_ranges() -> Case:
    """Positions compared: column > row is hidden."""

    def masked(graph: Graph, scores: str) -> str:
        length = graph.op("Squeeze", "steps", graph.ints(0))
        places = graph.op("Range", graph.const(0, np.int64), length, graph.const(1, np.int64))
        row, column = graph.op("Unsqueeze", places, graph.ints(1)), graph.op("Unsqueeze", places, graph.ints(0))
        return graph.op("Where", graph.op("Greater", column, row, name="m"), graph.const(-np.inf), scores)

    return _causal_from_sizes(masked), {"mask": "m", "causal": True}


@case
def mask_from_sizes_but_not_causal() -> Case:
    """Each position sees the next one too."""

    def masked(graph: Graph, scores: str) -> str:
        upper = graph.op("Trilu", _filled(graph, -np.inf), graph.const(2, np.int64), name="m", upper=1)
        return graph.op("Add", scores, upper)

    return _causal_from_sizes(masked), {"mask": "m", "causal": False}


@case
def mask_constant_but_not_causal() -> Case:
    bias = np.random.default_rng(1).standard_normal((1, HEADS, STEPS, STEPS))
    return plain(lambda g, s: g.op("Add", g.const(bias, name="m"), s)), {"mask": "m", "causal": False}


@case
def bias_gathered_from_a_table() -> Case:
    """Relative position bias: a table indexed by constant distances, moved to [1, H, S, S]."""

    def shape(graph: Graph, scores: str) -> str:
        distance = np.abs(np.subtract.outer(np.arange(STEPS), np.arange(STEPS)))
        rows = graph.op("Gather", graph.weight(STEPS, HEADS), graph.const(distance, np.int64))
        return graph.op(
            "Add", scores, graph.op("Unsqueeze", graph.op("Transpose", rows, perm=[2, 0, 1]), graph.ints(0), name="bias")
        )

    return plain(shape), {"mask": "bias", **MASKED}


@case
def bias_from_the_query() -> Case:
    """Relative positions as keys (Shaw, BoTNet, SAM): the bias is a product as well, but with a constant."""
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    bias = graph.op("MatMul", q, graph.weight(DIM, STEPS), name="bias")
    return finish(graph, graph.op("Add", bias, scores)), {"mask": "bias", **MASKED}


@case
def bias_from_the_query_and_positions() -> Case:
    """Transformer-XL: content and position products of activations; the one behind a relative shift is the bias."""
    graph, q, k, _ = start()
    shape = graph.op("Shape", "x", start=1, end=2)
    steps = graph.op(
        "Cast", graph.op("Range", graph.const(0, np.int64), graph.op("Squeeze", shape), graph.const(1, np.int64)), to=1
    )
    table = graph.op("Sin", graph.op("Mul", graph.op("Unsqueeze", steps, graph.ints(1)), graph.weight(1, WIDTH)))
    r = graph.op("Transpose", graph.op("Reshape", graph.linear(table), graph.ints(-1, HEADS, DIM)), perm=[1, 2, 0])
    position = graph.op("MatMul", graph.op("Add", q, graph.weight(HEADS, 1, DIM)), r)
    padded = graph.op("Pad", position, graph.ints(0, 0, 0, 1, 0, 0, 0, 0))
    turned = graph.op("Reshape", padded, graph.ints(0, HEADS, STEPS + 1, STEPS))
    shifted = graph.op(
        "Reshape", graph.op("Slice", turned, graph.ints(1), graph.ints(99), graph.ints(2)), graph.ints(0, 0, STEPS, STEPS)
    )
    content = graph.op("MatMul", graph.op("Add", q, graph.weight(HEADS, 1, DIM), name="qu"), graph.transposed(k, name="kt"))
    scores = graph.op("Mul", graph.op("Add", shifted, content), graph.const(0.25))
    return finish(graph, scores), {"q": "qu", "mask": shifted, "scores": content, **MASKED}


@case
def softcap() -> Case:
    """Gemma 2: 50 * tanh(scaled / 50), then the mask."""

    def shape(graph: Graph, scores: str) -> str:
        capped = graph.op("Tanh", graph.op("Div", scores, graph.const(50.0)))
        return graph.op("Add", graph.op("Mul", capped, graph.const(50.0)), mask_input(graph))

    return plain(shape), {"softcap": 50.0, "mask": "m", **MASKED}


@case
def sinks() -> Case:
    """GPT-OSS: a learned logit for each head appended, the maximum subtracted, its probability cut off."""
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    batch = graph.op("Shape", "x", start=0, end=1)
    shape = graph.op("Concat", batch, graph.ints(HEADS, STEPS, 1), axis=0)
    sink = graph.op("Expand", graph.op("Reshape", graph.weight(HEADS), graph.ints(1, -1, 1, 1)), shape)
    joined = graph.op("Concat", graph.op("Add", scores, mask_input(graph)), sink, axis=-1)
    shifted = graph.op("Sub", joined, graph.op("ReduceMax", joined, graph.ints(-1)))
    all_p = graph.op("Softmax", shifted, axis=-1)
    p = graph.op("Slice", all_p, graph.ints(0), graph.ints(-1), graph.ints(3), name="p")
    return finish(graph, "", probabilities=p), {"sinks": True, "mask": "m", **MASKED}


# --- between softmax and V ---


@case
def guard_isnan_where() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    soft = graph.op("Softmax", graph.op("Add", scores, mask_input(graph)), axis=-1)
    p = graph.op("Where", graph.op("IsNaN", soft, name="nan"), graph.const(0.0), soft, name="p")
    return finish(graph, "", probabilities=p), {"mask": "m", "within": "nan", **MASKED}


@case
def guard_isinf_before_softmax() -> Case:
    def shape(graph: Graph, scores: str) -> str:
        return graph.op("Where", graph.op("IsInf", scores, name="inf"), graph.const(0.0), scores)

    return plain(shape), {"within": "inf"}


@case
def casts_around_softmax() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    soft = graph.op("Softmax", graph.op("Cast", scores, to=TensorProto.DOUBLE), axis=-1)
    return finish(graph, "", probabilities=graph.op("Cast", soft, to=TensorProto.FLOAT, name="p")), {}


@case
def dropout_and_head_mask() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    dropped = graph.op("Dropout", graph.op("Softmax", scores, axis=-1))
    masked = graph.op("Mul", dropped, graph.input("head_mask", (1, HEADS, 1, 1)), name="p")
    return finish(graph, "", probabilities=masked), {}


@case
def masked_again_and_normalised_again() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    kept = graph.op("Mul", graph.op("Softmax", scores, axis=-1), mask_input(graph))
    p = graph.op("Div", kept, graph.op("ReduceSum", kept, graph.ints(-1)), name="p")
    return finish(graph, "", probabilities=p), {}


@case
def probabilities_are_an_output() -> Case:
    graph = plain()
    graph.output("p")
    return graph, {}


@case
def talking_heads() -> Case:
    """CaiT: a linear layer over the heads before and after the softmax."""

    def mixed(graph: Graph, value: str, name: str = "") -> str:
        last = graph.op("Transpose", value, perm=[0, 2, 3, 1])
        return graph.op("Transpose", graph.linear(last, HEADS, HEADS), name=name, perm=[0, 3, 1, 2])

    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    soft = graph.op("Softmax", mixed(graph, scores), axis=-1)
    return finish(graph, "", probabilities=mixed(graph, soft, "p")), {"traits": ("talking heads",)}


@case
def talking_heads_by_convolution() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    soft = graph.op("Softmax", graph.op("Conv", scores, graph.weight(HEADS, HEADS, 1, 1)), axis=-1)
    p = graph.op("Conv", soft, graph.weight(HEADS, HEADS, 1, 1), name="p")
    return finish(graph, "", probabilities=p), {"traits": ("talking heads",)}


# --- softmax written out ---


def by_hand(graph: Graph, normalise: Callable[[Graph, str], str]) -> Case:
    graph.input("x")
    q, k, _ = projected(graph)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, "", probabilities=normalise(graph, scores)), {}


@case
def softmax_by_hand() -> Case:
    def normalise(graph: Graph, scores: str) -> str:
        powers = graph.op("Exp", scores)
        return graph.op("Div", powers, graph.op("ReduceSum", powers, graph.ints(-1)), name="p")

    return by_hand(Graph(), normalise)


@case
def softmax_by_hand_with_maximum() -> Case:
    def normalise(graph: Graph, scores: str) -> str:
        powers = graph.op("Exp", graph.op("Sub", scores, graph.op("ReduceMax", scores, graph.ints(-1), name="max")))
        return graph.op("Div", powers, graph.op("ReduceSum", powers, graph.ints(-1)), name="p")

    graph, truth = by_hand(Graph(), normalise)
    return graph, {**truth, "within": "max"}


@case
def softmax_by_hand_with_reciprocal() -> Case:
    def normalise(graph: Graph, scores: str) -> str:
        powers = graph.op("Exp", scores)
        return graph.op("Mul", graph.op("Reciprocal", graph.op("ReduceSum", powers, graph.ints(-1))), powers, name="p")

    return by_hand(Graph(), normalise)


@case
def softmax_by_hand_with_mask_and_epsilon() -> Case:
    def normalise(graph: Graph, scores: str) -> str:
        powers = graph.op("Mul", graph.op("Exp", scores), mask_input(graph))
        total = graph.op("Add", graph.op("ReduceSum", powers, graph.ints(-1)), graph.const(1e-6))
        return graph.op("Div", powers, total, name="p")

    return by_hand(Graph(), normalise)


@case
def softmax_by_hand_plus_one() -> Case:
    """Softmax with a sink of logit 0 written out: exp(s) / (1 + sum exp(s))."""

    def normalise(graph: Graph, scores: str) -> str:
        powers = graph.op("Exp", scores)
        total = graph.op("Add", graph.const(1.0), graph.op("ReduceSum", powers, graph.ints(-1)))
        return graph.op("Div", powers, total, name="p")

    graph, truth = by_hand(Graph(), normalise)
    return graph, {**truth, "sinks": True}


@case
def softmax_by_logsumexp() -> Case:
    def normalise(graph: Graph, scores: str) -> str:
        total = graph.op("ReduceLogSumExp", scores, graph.ints(-1))
        return graph.op("Exp", graph.op("Sub", scores, total), name="p")

    return by_hand(Graph(), normalise)


@case
def softmax_by_logsoftmax() -> Case:
    return by_hand(Graph(), lambda graph, scores: graph.op("Exp", graph.op("LogSoftmax", scores, axis=-1), name="p"))


@case
def softmax_of_opset_11() -> Case:
    """Before opset 13 the axis of a Softmax means all axes from there on; 3 is the last of four."""
    graph = Graph(opset=11)
    graph.input("x")
    q, k, _ = projected(graph)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, "", probabilities=graph.op("Softmax", scores, name="p", axis=3)), {}


# --- products and layouts ---


@case
def einsum_with_heads_first() -> Case:
    graph, q, k, v = start()
    scores = graph.op("Mul", graph.op("Einsum", q, k, equation="bhid,bhjd->bhij"), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.merged(graph.op("Einsum", p, v, name="context", equation="bhij,bhjd->bhid"))
    graph.output("y")
    return graph, {"k": "k"}


@case
def einsum_without_transposes() -> Case:
    graph = Graph()
    graph.input("x")
    q, k, v = (graph.op("Reshape", graph.linear("x"), graph.ints(0, -1, HEADS, DIM), name=name) for name in "qkv")
    scores = graph.op("Mul", graph.op("Einsum", q, k, equation="nqhd,nkhd->nhqk"), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("Einsum", p, v, name="context", equation="nhqk,nkhd->nqhd")
    graph.linear(graph.op("Reshape", context, graph.ints(0, -1, WIDTH)), name="y")
    graph.output("y")
    return graph, {"k": "k"}


@case
def einsum_with_ellipsis() -> Case:
    graph, q, k, v = start()
    scores = graph.op("Mul", graph.op("Einsum", q, k, equation="...id, ...jd -> ...ij"), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.merged(graph.op("Einsum", p, v, name="context", equation="...ij,...jd->...id"))
    graph.output("y")
    return graph, {"k": "k"}


@case
def einsum_projections() -> Case:
    """Heads come out of the projections: one three-dimensional weight each."""
    graph = Graph()
    graph.input("x")
    q, k, _ = (
        graph.op("Einsum", "x", graph.weight(WIDTH, HEADS, DIM), name=name, equation="bse,ehd->bhsd") for name in "qkv"
    )
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores), {}


@case
def bmm_of_three_axes() -> Case:
    """torch.bmm on [B * H, S, d], merged with B and H computed from shapes."""
    graph = Graph()
    graph.input("x")
    batch = graph.op("Shape", "x", start=0, end=1)
    rows = graph.op("Mul", batch, graph.ints(HEADS))
    shape = graph.op("Concat", rows, graph.ints(STEPS, DIM), axis=0)
    q, k, v = (graph.op("Reshape", graph.heads(graph.linear("x")), shape, name=name) for name in "qkv")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, 3, name="kt")), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, v, name="context")
    graph.merged(graph.op("Reshape", context, graph.ints(-1, HEADS, STEPS, DIM)))
    graph.output("y")
    return graph, {}


@case
def one_head_without_batch() -> Case:
    """Gemm both times: alpha is the scale, C the mask."""
    graph = Graph()
    graph.input("x", (STEPS, WIDTH))
    q, k, v = (graph.linear("x", DIM, name=name) for name in "qkv")
    mask = graph.input("m", (STEPS, STEPS))
    scores = graph.op("Gemm", q, k, mask, name="scaled", transB=1, alpha=0.25)
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.op("Gemm", p, v, name="context")
    graph.output("context")
    return graph, {"k": "k", "mask": "m", "q_heads": 1, "kv_heads": 1, **MASKED}


@case
def fused_matmul() -> Case:
    """ONNX Runtime's own product, with the transpose and the scale inside."""
    graph = Graph(contrib=True)
    graph.input("x")
    q, k, _ = projected(graph)
    return finish(graph, graph.op("FusedMatMul", q, k, name="scaled", domain="com.microsoft", transB=1, alpha=0.25)), {
        "k": "k"
    }


@case
def swapped_operands_of_qk() -> Case:
    """K Q^T with the softmax over the rows: the key is the left operand."""
    graph, q, k, v = start()
    product = graph.op("MatMul", k, graph.transposed(q, name="qt"))
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, axis=-2)
    graph.merged(graph.op("MatMul", graph.transposed(p, name="pt"), v, name="context"))
    graph.output("y")
    return graph, {"q": "qt", "k": "k", "p": "pt"}


@case
def channel_first() -> Case:
    """Convolutions and [B, H, d, N]: Q^T K, then V P^T (timm's Attention2d)."""
    graph = Graph()
    graph.input("x", ("batch", WIDTH, 4, 4))
    q, k, v = (
        graph.op(
            "Reshape", graph.op("Conv", "x", graph.weight(WIDTH, WIDTH, 1, 1)), graph.ints(0, HEADS, DIM, -1), name=name
        )
        for name in "qkv"
    )
    product = graph.op("MatMul", graph.transposed(q, name="qt"), k)
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, axis=-1)
    context = graph.op("MatMul", v, graph.transposed(p, name="pt"), name="context")
    graph.op("Reshape", context, graph.ints(0, WIDTH, 4, 4), name="y")
    graph.output("y")
    return graph, {"q": "qt", "k": "k", "p": "pt"}


@case
def channel_first_without_transposing_p() -> Case:
    """K^T Q, softmax over the rows, V P: no transpose behind the softmax."""
    graph = Graph()
    graph.input("x", ("batch", WIDTH, 16))
    q, k, v = (
        graph.op("Reshape", graph.op("Conv", "x", graph.weight(WIDTH, WIDTH, 1)), graph.ints(0, HEADS, DIM, -1), name=name)
        for name in "qkv"
    )
    product = graph.op("MatMul", graph.transposed(k, name="kt"), q)
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=2)
    graph.op("Reshape", graph.op("MatMul", v, p, name="context"), graph.ints(0, WIDTH, 16), name="y")
    graph.output("y")
    return graph, {}


@case
def key_transposed_in_three_axes() -> Case:
    """The round trip that torch's exporter makes: [B, H, S, d] -> [B * H, S, d] -> [B * H, d, S] -> [B, H, d, S]."""
    graph, q, k, _ = start()
    flat = graph.op("Reshape", k, graph.ints(-1, STEPS, DIM))
    turned = graph.op("Reshape", graph.transposed(flat, 3), graph.ints(-1, HEADS, DIM, STEPS), name="kt")
    return finish(graph, graph.op("Mul", graph.op("MatMul", q, turned), graph.const(0.25), name="scaled")), {}


@case
def packed_projection_with_five_axes() -> Case:
    """ViT: one projection to [B, S, 3, H, d], moved to [3, B, H, S, d] and taken apart."""
    graph = Graph()
    graph.input("x")
    packed = graph.op("Reshape", graph.linear("x", 3 * WIDTH), graph.ints(0, STEPS, 3, HEADS, DIM))
    stacked = graph.op("Transpose", packed, perm=[2, 0, 3, 1, 4])
    q, k, _ = (
        graph.op("Gather", stacked, graph.const(index, np.int64), name=name, axis=0) for index, name in enumerate("qkv")
    )
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores), {}


@case
def packed_projection_split() -> Case:
    """GPT-2: one projection, a Split into Q, K and V."""
    graph = Graph()
    graph.input("x")
    split = graph.op("Split", graph.linear("x", 3 * WIDTH), outputs=3, axis=2, num_outputs=3)
    q, k, _ = (graph.heads(part, name=name) for part, name in zip((split, f"{split}.1", f"{split}.2"), "qkv", strict=True))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores), {}


@case
def windows_with_a_second_reshape() -> Case:
    """Swin: windows in the batch, the shifted mask added on [B, windows, H, N, N]."""
    graph = Graph()
    graph.input("x", (4, STEPS, WIDTH))
    q, k, _ = projected(graph)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    biased = graph.op("Add", scores, graph.weight(1, HEADS, STEPS, STEPS))
    apart = graph.op("Reshape", biased, graph.ints(2, 2, HEADS, STEPS, STEPS))
    masked = graph.op("Add", apart, graph.weight(1, 2, 1, STEPS, STEPS, name="m"))
    graph = finish(graph, graph.op("Reshape", masked, graph.ints(4, HEADS, STEPS, STEPS)))
    return graph, {"mask": "m"}


@case
def attention_over_windows_with_heads_in_front() -> Case:
    """Hiera: [B, H, windows, N, d]; the third axis from the end is no head axis."""
    graph = Graph()
    graph.input("x", ("batch", 12, WIDTH))
    q, k, v = (
        graph.op(
            "Transpose",
            graph.op("Reshape", graph.linear("x"), graph.ints(0, 4, 3, HEADS, DIM)),
            name=name,
            perm=[0, 3, 2, 1, 4],
        )
        for name in "qkv"
    )
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, 5, name="kt")), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, v, name="context")
    graph.op("Reshape", graph.op("Transpose", context, perm=[0, 3, 2, 1, 4]), graph.ints(0, 12, WIDTH), name="y")
    graph.output("y")
    return graph, {}


@case
def cross_covariance() -> Case:
    """XCiT: channels attend to channels; both products sum over what attention keeps."""
    graph = Graph()
    graph.input("x")
    q, k, v = (graph.heads(graph.linear("x"), order=(0, 2, 3, 1), name=name) for name in "qkv")
    unit = [graph.op("Div", one, graph.op("ReduceL2", one, graph.ints(-1))) for one in (q, k)]
    product = graph.op("MatMul", unit[0], graph.transposed(unit[1], name="kt"))
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, v, name="context")
    graph.linear(graph.op("Reshape", graph.op("Transpose", context, perm=[0, 3, 1, 2]), graph.ints(0, -1, WIDTH)), name="y")
    graph.output("y")
    return graph, {"q": unit[0], "cross_covariance": True, "traits": ("cross-covariance",)}


@case
def different_head_sizes() -> Case:
    """MLA (DeepSeek): low-rank keys and values, the rotary part of K shared by all heads, V narrower than K."""
    graph = Graph()
    graph.input("x")
    q = graph.heads(graph.linear("x", HEADS * 12), dim=12, name="q")
    low = graph.linear("x", 16)
    both = graph.heads(graph.linear(low, HEADS * 14, 16), dim=14)
    nope = graph.op("Slice", both, graph.ints(0), graph.ints(8), graph.ints(3))
    graph.op("Slice", both, graph.ints(8), graph.ints(14), graph.ints(3), name="v")
    shared = graph.heads(graph.linear("x", 4), heads=1, dim=4)
    shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), graph.ints(HEADS, STEPS, 4), axis=0)
    k = graph.op("Concat", nope, graph.op("Expand", shared, shape), axis=-1)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, "v", name="context")
    graph.op("Reshape", graph.op("Transpose", context, perm=[0, 2, 1, 3]), graph.ints(0, -1, HEADS * 6), name="y")
    graph.output("y")
    return graph, {"qk_head_dim": 12, "v_head_dim": 6}


def rotary(graph: Graph, value: str, cos: str, sin: str, name: str) -> str:
    """x * cos + rotate_half(x) * sin of [B, H, S, d]."""
    low = graph.op("Slice", value, graph.ints(0), graph.ints(DIM // 2), graph.ints(3))
    high = graph.op("Slice", value, graph.ints(DIM // 2), graph.ints(DIM), graph.ints(3))
    half = graph.op("Concat", graph.op("Neg", high), low, axis=-1)
    return graph.op("Add", graph.op("Mul", value, cos), graph.op("Mul", half, sin), name=name)


@case
def rotary_on_q_and_k() -> Case:
    """Llama: x * cos + rotate_half(x) * sin, with the scale on Q in front of it."""
    graph = Graph()
    graph.input("x")
    cos, sin = graph.input("cos", ("batch", 1, STEPS, DIM)), graph.input("sin", ("batch", 1, STEPS, DIM))
    scaled = graph.op("Mul", graph.heads(graph.linear("x")), graph.const(0.25))
    q, k = rotary(graph, scaled, cos, sin, "q"), rotary(graph, graph.heads(graph.linear("x")), cos, sin, "k")
    graph.heads(graph.linear("x"), name="v")
    return finish(graph, graph.op("MatMul", q, graph.transposed(k, name="kt"), name="scores")), {"scores": "scores"}


# --- grouped heads ---


def grouped(graph: Graph, steps: int = STEPS) -> tuple[str, str, str]:
    """q with 4 heads, k and v with 2."""
    graph.input("x", ("batch", steps, WIDTH))
    q = graph.heads(graph.linear("x"), name="q")
    k, v = (graph.heads(graph.linear("x", 2 * DIM), heads=2, name=name) for name in ("k0", "v0"))
    return q, k, v


def grouped_case(repeat: Callable[[Graph, str, str], tuple[str, str]], **truth: object) -> Case:
    """`repeat` returns the repeated tensor and the tensor in front of the repeat."""
    graph = Graph()
    q, k, v = grouped(graph)
    k, key_branch = repeat(graph, k, "k")
    v, value_branch = repeat(graph, v, "v")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"kv_repeat": 2, "branch": (key_branch, value_branch), **truth}


@case
def grouped_by_expand() -> Case:
    def repeat(graph: Graph, value: str, name: str) -> tuple[str, str]:
        apart = graph.op("Unsqueeze", value, graph.ints(2))
        batch = graph.op("Shape", "x", start=0, end=1)
        shape = graph.op("Concat", batch, graph.ints(2, 2, STEPS, DIM), axis=0)
        return graph.op("Reshape", graph.op("Expand", apart, shape), graph.ints(0, HEADS, -1, DIM), name=name), value

    return grouped_case(repeat)


@case
def grouped_by_tile() -> Case:
    def repeat(graph: Graph, value: str, name: str) -> tuple[str, str]:
        apart = graph.op("Reshape", value, graph.ints(0, 2, 1, STEPS, DIM))
        tiled = graph.op("Tile", apart, graph.ints(1, 1, 2, 1, 1))
        return graph.op("Reshape", tiled, graph.ints(0, HEADS, STEPS, DIM), name=name), value

    return grouped_case(repeat)


@case
def grouped_by_gather() -> Case:
    def repeat(graph: Graph, value: str, name: str) -> tuple[str, str]:
        return graph.op("Gather", value, graph.ints(0, 0, 1, 1), name=name, axis=1), value

    return grouped_case(repeat)


@case
def grouped_by_concat_of_copies() -> Case:
    def repeat(graph: Graph, value: str, name: str) -> tuple[str, str]:
        apart = graph.op("Unsqueeze", value, graph.ints(2))
        return graph.op(
            "Reshape", graph.op("Concat", apart, apart, axis=2), graph.ints(0, HEADS, STEPS, DIM), name=name
        ), value

    return grouped_case(repeat)


@case
def grouped_in_front_of_rotary() -> Case:
    """Falcon: K is repeated first and rotated then, so that no quantizer in front of the repeat reaches the product."""
    graph = Graph()
    q, k, v = grouped(graph)
    cos, sin = graph.input("cos", ("batch", 1, STEPS, DIM)), graph.input("sin", ("batch", 1, STEPS, DIM))
    k = graph.op("Gather", k, graph.ints(0, 0, 1, 1), axis=1)
    v = graph.op("Gather", v, graph.ints(0, 0, 1, 1), name="v", axis=1)
    q, k = (rotary(graph, value, cos, sin, name) for value, name in ((q, "qr"), (k, "k")))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"q": "qr", "kv_repeat": 2, "branch": ("v0",)}


@case
def grouped_in_front_of_a_cache() -> Case:
    """The cache holds repeated heads: a quantizer in front of the repeat would leave the cached rows float."""
    graph = Graph()
    q, k, v = grouped(graph, 1)
    caches = []
    for name, value in (("key", k), ("value", v)):
        past = graph.input(f"past.{name}", ("batch", HEADS, STEPS, DIM))
        new = graph.op("Gather", value, graph.ints(0, 0, 1, 1), axis=1)
        caches.append(graph.op("Concat", past, new, name=f"present.{name}", axis=2))
        graph.output(f"present.{name}")
    product = graph.op("MatMul", q, graph.transposed(caches[0], name="kt"))
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    truth = {f"{one}_{role}": f"{one}.{role}" for one in ("past", "present") for role in ("key", "value")}
    return finish(graph, scores, caches[1]), {"v": caches[1], "past": "concat", "kv_repeat": 2, **truth}


@case
def grouped_by_broadcast() -> Case:
    """[B, 2, 2, S, d] times [B, 2, 1, d, S]: nothing is repeated."""
    graph = Graph()
    q, k, v = grouped(graph)
    q = graph.op("Reshape", q, graph.ints(0, 2, 2, STEPS, DIM), name="q5")
    k, v = graph.op("Unsqueeze", k, graph.ints(2)), graph.op("Unsqueeze", v, graph.ints(2), name="v5")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, 5, name="kt")), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, v, name="context")
    graph.merged(graph.op("Reshape", context, graph.ints(0, HEADS, STEPS, DIM)))
    graph.output("y")
    return graph, {"q": "q5", "v": "v5", "kv_heads": 2}


@case
def grouped_by_packed_query() -> Case:
    """Queries of a group side by side in the rows: [B, 2, 2 * S, d] times [B, 2, d, S]."""
    graph = Graph()
    q, k, v = grouped(graph)
    q = graph.op("Reshape", q, graph.ints(0, 2, 2 * STEPS, DIM), name="qp")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, v, name="context")
    graph.merged(graph.op("Reshape", context, graph.ints(0, HEADS, STEPS, DIM)))
    graph.output("y")
    return graph, {"q": "qp", "v": "v0", "kv_heads": 2}


@case
def grouped_einsum() -> Case:
    graph = Graph()
    q, k, v = grouped(graph)
    q = graph.op("Reshape", q, graph.ints(0, 2, 2, STEPS, DIM), name="q5")
    scores = graph.op("Mul", graph.op("Einsum", q, k, equation="bgrid,bgjd->bgrij"), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("Einsum", p, v, name="context", equation="bgrij,bgjd->bgrid")
    graph.merged(graph.op("Reshape", context, graph.ints(0, HEADS, STEPS, DIM)))
    graph.output("y")
    return graph, {"q": "q5", "k": "k0", "v": "v0", "kv_heads": 2}


@case
def multi_query() -> Case:
    """One head of K and V, broadcast by the product."""
    graph = Graph()
    graph.input("x")
    q = graph.heads(graph.linear("x"), name="q")
    k, _ = (graph.op("Unsqueeze", graph.linear("x", DIM), graph.ints(1), name=name) for name in "kv")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores), {"kv_heads": 1}


# --- past, present, cross ---


def cached(graph: Graph, update: Callable[[Graph, str, str, str], str]) -> tuple[str, str]:
    """Scaled scores and values behind caches; `update` puts something new into a cache and gives it a name."""
    graph.input("x", ("batch", 1, WIDTH))
    q = graph.heads(graph.linear("x"), name="q")
    caches = []
    for name in ("key", "value"):
        past = graph.input(f"past.{name}", ("batch", HEADS, STEPS, DIM))
        new = graph.heads(graph.linear("x"))
        caches.append(update(graph, past, new, f"present.{name}"))
        graph.output(f"present.{name}")
    k, v = caches
    product = graph.op("MatMul", q, graph.transposed(k, name="kt"))
    return graph.op("Mul", product, graph.const(0.25), name="scaled"), v


CACHED = {
    "v": "present.value", "past_key": "past.key", "past_value": "past.value", "present_key": "present.key",
    "present_value": "present.value",
}  # fmt: skip


@case
def past_by_concat() -> Case:
    graph = Graph()
    scores, v = cached(graph, lambda g, past, new, name: g.op("Concat", past, new, name=name, axis=2))
    return finish(graph, scores, v), {**CACHED, "past": "concat"}


@case
def past_by_concat_cached_transposed() -> Case:
    """The cache is laid out [B, H, d, S]; what is stored is the key as the product sees it."""
    graph = Graph()
    graph.input("x", ("batch", 1, WIDTH))
    q, new = graph.heads(graph.linear("x"), name="q"), graph.heads(graph.linear("x"), order=(0, 2, 3, 1))
    v = graph.heads(graph.linear("x"), name="v")
    k = graph.op("Concat", graph.input("past.key", ("batch", HEADS, DIM, STEPS)), new, name="kt", axis=3)
    whole = graph.op("Concat", graph.input("past.value", ("batch", HEADS, STEPS, DIM)), v, name="vv", axis=2)
    graph.op("Identity", k, name="present.key")
    graph.op("Identity", whole, name="present.value")
    graph.output("present.key")
    graph.output("present.value")
    scores = graph.op("Mul", graph.op("MatMul", q, k), graph.const(0.25), name="scaled")
    return finish(graph, scores, whole), {**CACHED, "v": "vv", "past": "concat"}


@case
def past_packed_in_one_input() -> Case:
    """Old GPT-2 exports: past [2, B, H, S, d], present the same, put together again."""
    graph = Graph()
    graph.input("x", ("batch", 1, WIDTH))
    past = graph.input("past", (2, "batch", HEADS, STEPS, DIM))
    q, caches = graph.heads(graph.linear("x"), name="q"), []
    for index, name in enumerate(("kk", "v")):
        old = graph.op("Gather", past, graph.const(index, np.int64), name=f"past{index}", axis=0)
        caches.append(graph.op("Concat", old, graph.heads(graph.linear("x")), name=name, axis=2))
    parts = [graph.op("Unsqueeze", one, graph.ints(0)) for one in caches]
    graph.op("Concat", *parts, name="present", axis=0)
    graph.output("present")
    product = graph.op("MatMul", q, graph.transposed(caches[0], name="kt"))
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    truth = {
        "past": "concat",
        "past_key": "past0",
        "past_value": "past1",
        "present_key": "present",
        "present_value": "present",
    }
    return finish(graph, scores, "v"), truth


@case
def past_by_scatter_elements() -> Case:
    def update(graph: Graph, past: str, new: str, name: str) -> str:
        return graph.op(
            "ScatterElements", past, graph.const(np.full((1, HEADS, 1, DIM), 2), np.int64), new, name=name, axis=2
        )

    graph = Graph()
    scores, v = cached(graph, update)
    graph.inputs[0].type.tensor_type.shape.dim[0].dim_value = 1
    return finish(graph, scores, v), {**CACHED, "past": "scatter"}


@case
def past_by_scatter_nd() -> Case:
    """torch: cache[:, :, position] = new, written along the third axis moved to the front."""

    def update(graph: Graph, past: str, new: str, name: str) -> str:
        first = graph.op("Transpose", past, perm=[2, 0, 1, 3])
        written = graph.op("ScatterND", first, graph.const([[2]], np.int64), graph.op("Transpose", new, perm=[2, 0, 1, 3]))
        return graph.op("Transpose", written, name=name, perm=[1, 2, 0, 3])

    graph = Graph()
    scores, v = cached(graph, update)
    return finish(graph, scores, v), {**CACHED, "past": "scatter", "past_key": None, "past_value": None}


@case
def past_by_tensor_scatter() -> Case:
    graph = Graph(opset=24)
    graph.input("at", ("batch",), TensorProto.INT64)
    scores, v = cached(graph, lambda g, past, new, name: g.op("TensorScatter", past, new, "at", name=name, axis=2))
    return finish(graph, scores, v), {**CACHED, "past": "scatter"}


@case
def past_given_whole() -> Case:
    """Cross attention in a decoder with a cache: K and V are inputs, nothing is added to them."""
    graph = Graph()
    graph.input("x")
    q = graph.heads(graph.linear("x"), name="q")
    k = graph.input("past.key", ("batch", HEADS, "enc", DIM))
    graph.input("past.value", ("batch", HEADS, "enc", DIM))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    truth = {"past": "input", "kind": "cross", "v": "past.value", "past_key": "past.key", "past_value": "past.value"}
    return finish(graph, scores, "past.value"), truth


@case
def present_without_past() -> Case:
    """The first step of a decoder: K and V are outputs, behind single-input Concats."""
    graph = Graph()
    graph.input("x")
    q, k, v = projected(graph)
    k, v = graph.op("Concat", k, name="present.key", axis=2), graph.op("Concat", v, name="present.value", axis=2)
    graph.output(k)
    graph.output(v)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"v": v, "present_key": k, "present_value": v}


@case
def constant_prefix() -> Case:
    """add_bias_kv, add_zero_attn: constant rows are no past."""
    graph = Graph()
    graph.input("x", (2, STEPS, WIDTH))
    q, k, v = projected(graph)
    k, v = (graph.op("Concat", one, graph.weight(2, HEADS, 1, DIM), name=f"{one}1", axis=2) for one in (k, v))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"v": "v1"}


@case
def cross_attention() -> Case:
    graph = Graph()
    graph.input("x")
    graph.input("memory", ("batch", "enc", WIDTH))
    q, k, v = projected(graph, "x", "memory")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"kind": "cross"}


@case
def cross_attention_to_an_encoder_inside() -> Case:
    """The decoder state depends on the memory as well, through an earlier attention: cross all the same."""
    graph = Graph()
    graph.input("x")
    graph.input("memory", ("batch", "enc", WIDTH))
    norm = [graph.const(np.ones(WIDTH)), graph.const(np.zeros(WIDTH))]
    memory = graph.op("LayerNormalization", graph.op("Add", "memory", graph.linear("memory")), *norm)
    state = graph.op("Add", "x", graph.op("ReduceMean", graph.linear(memory), graph.ints(1)))
    q, k, v = projected(graph, graph.op("LayerNormalization", state, *norm), memory)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"kind": "cross"}


@case
def self_attention_with_reduced_keys() -> Case:
    """PVT: keys and values from a strided convolution of the same tensor."""
    graph = Graph()
    graph.input("x", ("batch", 16, WIDTH))
    q = graph.heads(graph.linear("x"), name="q")
    grid = graph.op("Reshape", graph.op("Transpose", "x", perm=[0, 2, 1]), graph.ints(0, WIDTH, 4, 4))
    small = graph.op("Conv", grid, graph.weight(WIDTH, WIDTH, 2, 2), strides=[2, 2])
    rows = graph.op("Transpose", graph.op("Reshape", small, graph.ints(0, WIDTH, -1)), perm=[0, 2, 1])
    k, v = (graph.heads(graph.linear(rows), name=name) for name in "kv")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {}


@case
def queries_and_keys_pooled_by_convolution() -> Case:
    """MViTv2: heads put in the batch, each channel convolved by itself, a norm, then the product."""
    graph = Graph()
    graph.input("x", ("batch", 16, WIDTH))
    norm = [graph.const(np.ones(DIM)), graph.const(np.zeros(DIM))]

    def pooled(name: str, stride: int) -> str:
        grid = graph.op("Reshape", graph.heads(graph.linear("x"), order=(0, 2, 3, 1)), graph.ints(-1, DIM, 4, 4))
        small = graph.op("Conv", grid, graph.weight(DIM, 1, 3, 3), group=DIM, pads=[1] * 4, strides=[stride] * 2)
        columns = graph.op("Reshape", small, graph.ints(-1, HEADS, DIM, 16 // stride**2))
        return graph.op("LayerNormalization", graph.transposed(columns), *norm, name=name)

    q, k, v = pooled("q", 1), pooled("k", 2), pooled("v", 2)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"traits": ("pooled",)}


@case
def queries_pooled_by_maximum() -> Case:
    """Hiera: the largest of every two neighbouring queries."""
    graph = Graph()
    graph.input("x", ("batch", 6, WIDTH))
    k, v = (graph.heads(graph.linear("x"), name=name) for name in "kv")
    pairs = graph.op("Reshape", graph.heads(graph.linear("x")), graph.ints(0, HEADS, 2, 3, DIM))
    q = graph.op("ReduceMax", pairs, graph.ints(2), name="q", keepdims=0)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"traits": ("pooled",)}


@case
def self_attention_of_learned_queries() -> Case:
    """DETR's first self attention: nothing but sizes depends on the input."""
    graph = Graph()
    graph.input("x")
    shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), graph.ints(STEPS, WIDTH), axis=0)
    q, k, v = projected(graph, graph.op("Expand", graph.weight(1, STEPS, WIDTH), shape))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {}


@case
def self_attention_of_learned_queries_from_zeros() -> Case:
    """DETR as torch exports it: zeros of the size of the batch, filled by an Expand of a scalar, plus the queries tiled."""
    graph = Graph()
    graph.input("x")
    batch = graph.op("Shape", "x", start=0, end=1)
    tiled = graph.op("Tile", graph.weight(1, STEPS, WIDTH), graph.op("Concat", batch, graph.ints(1, 1), axis=0))
    zeros = graph.op("Expand", graph.const(0.0), graph.op("Shape", tiled))
    state = graph.op("Add", zeros, tiled)
    q, k, v = (graph.heads(graph.linear(one), name=name) for one, name in ((state, "q"), (state, "k"), (zeros, "v")))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {}


@case
def learned_queries_computed_at_run_time() -> Case:
    """DETR's first cross attention: object queries of the size of the batch, projected: data only in K and V."""
    graph = Graph()
    graph.input("x")
    shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), graph.ints(3, WIDTH), axis=0)
    q, k, v = projected(graph, graph.op("Expand", graph.weight(1, 3, WIDTH), shape), "x")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"kind": "cross", "traits": ("learned query",)}


CONSTANT_QUERY = {"kind": "cross", "q": "q", "traits": ("learned query",)}


def _of_constant_query(graph: Graph, query: str, memory: str = "x") -> Graph:
    """Heads of a constant query against keys and values of the input; the query has its scale inside."""
    k, _ = (graph.heads(graph.linear(memory), name=name) for name in "kv")
    return finish(graph, graph.op("MatMul", query, graph.transposed(k, name="kt"), name="scores"))


@case
def constant_query() -> Case:
    """SigLIP's pooling at batch 1: the latent, its projection and scale are folded into one constant."""
    graph = Graph()
    graph.input("x")
    made = _of_constant_query(graph, graph.weight(1, HEADS, 1, DIM, name="q"))
    return made, {**CONSTANT_QUERY, "scores": "scores", "scale": 1.0}


@case
def constant_object_queries() -> Case:
    """DETR's first cross attention at batch 1, K scaled as well (torch scales both by the root)."""
    graph = Graph()
    graph.input("x")
    k, _ = (graph.heads(graph.linear("x"), name=name) for name in "kv")
    kt = graph.op("Mul", graph.transposed(k), graph.const(0.5), name="kt")
    scores = graph.op("MatMul", graph.weight(1, HEADS, 3, DIM, name="q"), kt, name="scores")
    return finish(graph, scores), {**CONSTANT_QUERY, "scores": "scores", "scale": 0.5}


@case
def constant_query_expanded() -> Case:
    """The same behind its projection, of the size of the batch: nothing but sizes depends on the input."""
    graph = Graph()
    graph.input("x")
    shape = graph.op("Concat", graph.op("Shape", "x", start=0, end=1), graph.ints(HEADS, 1, DIM), axis=0)
    query = graph.op("Expand", graph.weight(1, HEADS, 1, DIM), shape)
    query = graph.op("Mul", query, graph.const(0.5), name="q")
    return _of_constant_query(graph, query), {**CONSTANT_QUERY, "scores": "scores", "scale": 0.5}


@case
def constant_query_on_the_right() -> Case:
    """K Q^T, normalised over its rows."""
    graph = Graph()
    graph.input("x")
    k, v = (graph.heads(graph.linear("x"), name=name) for name in "kv")
    scores = graph.op("MatMul", k, graph.weight(1, HEADS, DIM, 2, name="q"), name="scores")
    p = graph.op("Transpose", graph.op("Softmax", scores, axis=-2), name="p", perm=[0, 1, 3, 2])
    return finish(graph, "", v, p), {**CONSTANT_QUERY, "k": "k", "scores": "scores", "scale": 1.0}


@case
def constant_query_masked() -> Case:
    graph = Graph()
    graph.input("x")
    k, _ = (graph.heads(graph.linear("x"), name=name) for name in "kv")
    scores = graph.op("MatMul", graph.weight(1, HEADS, 1, DIM, name="q"), graph.transposed(k, name="kt"), name="scores")
    scores = graph.op("Mul", scores, graph.const(0.25), name="scaled")
    mask = graph.input("m", ("batch", 1, 1, STEPS))
    return finish(graph, graph.op("Add", scores, mask)), {**CONSTANT_QUERY, "mask": "m", **MASKED}


@case
def constant_query_of_one_head() -> Case:
    """A probe of attention pooling: (1, 1, width), one head, no split."""
    graph = Graph()
    graph.input("x")
    k, v = (graph.linear("x", name=name) for name in "kv")
    scores = graph.op("MatMul", graph.weight(1, 1, WIDTH, name="q"), graph.transposed(k, 3, name="kt"), name="scores")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.linear(graph.op("MatMul", p, v, name="context"), name="y")
    graph.output("y")
    one = {"q_heads": 1, "kv_heads": 1, "qk_head_dim": WIDTH, "v_head_dim": WIDTH, "scale": 1.0}
    return graph, {**CONSTANT_QUERY, "scores": "scores", **one}


@case
def constant_latents_without_a_batch_axis() -> Case:
    """Latents as (rows, channels) on the left, K^T behind them."""
    graph = Graph()
    graph.input("x")
    k, v = (graph.linear("x", name=name) for name in "kv")
    scores = graph.op("MatMul", graph.weight(3, WIDTH, name="q"), graph.transposed(k, 3, name="kt"), name="scores")
    p = graph.op("Softmax", graph.op("Mul", scores, graph.const(0.25), name="scaled"), name="p", axis=-1)
    graph.linear(graph.op("MatMul", p, v, name="context"), name="y")
    graph.output("y")
    return graph, {**CONSTANT_QUERY, "q_heads": 1, "kv_heads": 1, "qk_head_dim": WIDTH, "v_head_dim": WIDTH}


@case
def constant_query_by_bmm() -> Case:
    """(batch * heads, rows, channels) at batch 1: K is flattened to three axes, and so is the constant."""
    graph = Graph()
    graph.input("x", (1, STEPS, WIDTH))
    k, v = (
        graph.op("Reshape", graph.heads(graph.linear("x")), graph.ints(-1, STEPS, DIM), name=name) for name in "kv"
    )
    scores = graph.op("MatMul", graph.weight(HEADS, 2, DIM, name="q"), graph.transposed(k, 3, name="kt"), name="scores")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    context = graph.op("MatMul", p, v, name="context")
    graph.merged(graph.op("Reshape", context, graph.ints(1, HEADS, 2, DIM)))
    graph.output("y")
    return graph, {**CONSTANT_QUERY, "scores": "scores", "scale": 1.0}


@case
def constant_query_by_einsum() -> Case:
    graph = Graph()
    graph.input("x")
    k, v = (graph.op("Reshape", graph.linear("x"), graph.ints(0, -1, HEADS, DIM), name=name) for name in "kv")
    query = graph.weight(2, HEADS, DIM, name="q")
    scores = graph.op("Einsum", query, k, name="scores", equation="qhd,bkhd->bhqk")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.linear(
        graph.op("Reshape", graph.op("Einsum", p, v, name="context", equation="bhqk,bkhd->bqhd"), graph.ints(0, -1, WIDTH)),
        name="y",
    )
    graph.output("y")
    return graph, {**CONSTANT_QUERY, "k": "k", "scores": "scores", "scale": 1.0}


# --- further variants ---


@case
def maximum_minus_scores() -> Case:
    """DANet: what is least alike gets the largest weight."""
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    largest = graph.op("Expand", graph.op("ReduceMax", scores, graph.ints(-1)), graph.op("Shape", scores))
    return finish(graph, graph.op("Sub", largest, scores)), {"scale": -0.25}


@case
def scores_subtracted_from_a_mask() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, graph.op("Sub", mask_input(graph), scores)), {"scale": -0.25, "mask": "m", **MASKED}


@case
def softmax_on_two_axes() -> Case:
    """Old converters: the scores are flattened to rows for the softmax, and back."""
    graph, q, k, v = start(11)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    rows = graph.op("Softmax", graph.op("Reshape", scores, graph.ints(-1, STEPS)), axis=1)
    return finish(graph, "", v, graph.op("Reshape", rows, graph.ints(-1, HEADS, STEPS, STEPS), name="p")), {}


@case
def softmax_between_transposes() -> Case:
    """Before opset 13, a softmax over another axis than the last was moved there and back."""
    graph, q, k, v = start(11)
    product = graph.op("MatMul", k, graph.transposed(q, name="qt"))
    scores = graph.op("Mul", product, graph.const(0.25), name="scaled")
    soft = graph.op("Softmax", graph.transposed(scores), axis=3)
    back = graph.transposed(soft)
    graph.merged(graph.op("MatMul", graph.transposed(back, name="pt"), v, name="context"))
    graph.output("y")
    return graph, {"q": "qt", "k": "k", "p": "pt"}


@case
def normalised_after_the_product_with_values() -> Case:
    """exp(s) V / sum exp(s): the quotient is taken last; what multiplies V are the powers."""
    graph, q, k, v = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    powers = graph.op("Exp", graph.op("Sub", scores, graph.op("ReduceMax", scores, graph.ints(-1))), name="p")
    weighted = graph.op("MatMul", powers, v, name="context")
    graph.merged(graph.op("Div", weighted, graph.op("ReduceSum", powers, graph.ints(-1)), name="quotient"))
    graph.output("y")
    return graph, {"within": "quotient"}


@case
def grouped_by_packed_query_with_mask() -> Case:
    """Packed queries are unpacked for the mask and packed again."""
    graph = Graph()
    q, k, v = grouped(graph)
    q = graph.op("Reshape", q, graph.ints(0, 2, 2 * STEPS, DIM), name="qp")
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    masked = graph.op("Add", graph.op("Reshape", scores, graph.ints(0, HEADS, STEPS, STEPS)), mask_input(graph))
    p = graph.op("Reshape", graph.op("Softmax", masked, axis=-1), graph.ints(0, 2, 2 * STEPS, STEPS), name="p")
    context = graph.op("MatMul", p, v, name="context")
    graph.merged(graph.op("Reshape", context, graph.ints(0, HEADS, STEPS, DIM)))
    graph.output("y")
    return graph, {"q": "qp", "v": "v0", "kv_heads": 2, "mask": "m", **MASKED}


@case
def multi_query_from_one_projection() -> Case:
    """Falcon: one projection to 4 query heads, one key head and one value head, taken apart along the heads."""
    graph = Graph()
    graph.input("x")
    fused = graph.op("Reshape", graph.linear("x", (HEADS + 2) * DIM), graph.ints(0, -1, HEADS + 2, DIM))
    first = graph.op("Slice", fused, graph.ints(0), graph.ints(-2), graph.ints(2))
    q = graph.op("Transpose", first, name="q", perm=[0, 2, 1, 3])
    heads_first = graph.op("Transpose", fused, perm=[2, 0, 1, 3])
    k, v = (
        graph.op(
            "Transpose", graph.op("GatherND", heads_first, graph.const([[index]], np.int64)), name=name, perm=[1, 0, 2, 3]
        )
        for index, name in ((-2, "k"), (-1, "v"))
    )
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, v), {"kv_heads": 1}


@case
def multi_query_einsum() -> Case:
    """K and V without a head axis."""
    graph = Graph()
    graph.input("x")
    q = graph.heads(graph.linear("x"), name="q")
    k, v = (graph.linear("x", DIM, name=name) for name in "kv")
    scores = graph.op("Mul", graph.op("Einsum", q, k, equation="bhid,bjd->bhij"), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.merged(graph.op("Einsum", p, v, name="context", equation="bhij,bjd->bhid"))
    graph.output("y")
    return graph, {"k": "k", "kv_heads": 1}


@case
def one_head_channels_in_the_second_axis() -> Case:
    """Apple's layout [B, C, 1, S], one head at a time, softmax over the second axis."""
    graph = Graph()
    graph.input("x", ("batch", WIDTH, 1, STEPS))
    q, k, v = (graph.op("Conv", "x", graph.weight(DIM, WIDTH, 1, 1), name=name) for name in ("q", "k0", "v"))
    k = graph.op("Transpose", k, name="k", perm=[0, 3, 2, 1])
    scores = graph.op("Mul", graph.op("Einsum", q, k, equation="bchq,bkhc->bkhq"), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=1)
    graph.op("Einsum", p, v, name="context", equation="bkhq,bchk->bchq")
    graph.output("context")
    return graph, {"k": "k", "q_heads": 1, "kv_heads": 1}


@case
def joint_attention_of_two_streams() -> Case:
    """Diffusion transformers: queries, keys and values of text and image side by side."""
    graph = Graph()
    graph.input("x")
    graph.input("text", ("batch", 7, WIDTH))
    q, k, v = (
        graph.op("Concat", *(graph.heads(graph.linear(one)) for one in ("text", "x")), name=name, axis=2) for name in "qkv"
    )
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    p = graph.op("Softmax", scores, name="p", axis=-1)
    graph.op("MatMul", p, v, name="context")
    graph.output("context")
    return graph, {}


@case
def past_by_where() -> Case:
    """A cache of fixed size, the new row put in by a mask over positions."""

    def update(graph: Graph, past: str, new: str, name: str) -> str:
        here = graph.op("Equal", graph.const(np.arange(STEPS).reshape(1, 1, STEPS, 1), np.int64), graph.const(2, np.int64))
        return graph.op("Where", here, new, past, name=name)

    graph = Graph()
    scores, v = cached(graph, update)
    return finish(graph, scores, v), {**CACHED, "past": "scatter"}


@case
def temperature_is_an_input() -> Case:
    graph, q, k, v = start()
    product = graph.op("MatMul", q, graph.transposed(k, name="kt"))
    return finish(graph, graph.op("Div", product, graph.input("t", (1,)), name="scaled"), v), {"scale": None}


@case
def temperature_learned_and_clipped() -> Case:
    """exp(min(parameter, log 100)), folded by nobody."""
    graph, q, k, v = start()
    scale = graph.op("Exp", graph.op("Clip", graph.const(0.5), "", graph.const(4.6)))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), scale, name="scaled")
    return finish(graph, scores, v), {"scale": float(np.exp(0.5))}


@case
def keys_are_values() -> Case:
    graph, q, k, _ = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    return finish(graph, scores, k), {"v": "k"}


@case
def no_projections_at_all() -> Case:
    """A non-local block: softmax(x x^T) x."""
    graph = Graph()
    graph.input("x")
    scores = graph.op("MatMul", "x", graph.transposed("x", 3, name="xt"), name="scores")
    graph.op("MatMul", graph.op("Softmax", scores, name="p", axis=-1), "x", name="context")
    graph.output("context")
    truth = {"q": "x", "k": "xt", "v": "x", "scores": "scores", "scale": 1.0, "q_heads": 1, "kv_heads": 1}
    return graph, {**truth, "qk_head_dim": WIDTH, "v_head_dim": WIDTH}


@case
def bias_gathered_from_products() -> Case:
    """Disentangled attention (DeBERTa): content to position by GatherElements of a product of activations."""
    graph, q, k, v = start()
    table = graph.linear(graph.op("Mul", graph.op("ReduceMean", "x", graph.ints(0, 1)), graph.weight(STEPS, WIDTH)))
    positions = graph.op("Transpose", graph.op("Reshape", table, graph.ints(-1, HEADS, DIM)), perm=[1, 2, 0])
    toward = graph.op("MatMul", q, positions)
    distance = np.abs(np.subtract.outer(np.arange(STEPS), np.arange(STEPS))).reshape(1, 1, STEPS, STEPS)
    index = graph.op("Expand", graph.const(distance, np.int64), graph.op("Shape", toward))
    bias = graph.op("GatherElements", toward, index, name="bias", axis=-1)
    product = graph.op("MatMul", q, graph.transposed(k, name="kt"))
    scores = graph.op("Mul", graph.op("Add", bias, product), graph.const(0.25))
    return finish(graph, scores, v), {"mask": "bias", "scores": product, **MASKED}


@case
def bias_on_a_grid() -> Case:
    """SAM: [B * H, N, N] to [B * H, N, h, w], a bias for rows and one for columns, and back."""
    graph = Graph()
    graph.input("x", ("batch", 6, WIDTH))
    q, k, v = projected(graph)
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    grid = graph.op("Reshape", scores, graph.ints(0, HEADS, 6, 2, 3))
    rows = graph.op("Unsqueeze", graph.op("MatMul", q, graph.weight(DIM, 2)), graph.ints(4))
    columns = graph.op("Unsqueeze", graph.op("MatMul", q, graph.weight(DIM, 3)), graph.ints(3), name="columns")
    biased = graph.op("Add", graph.op("Add", grid, rows), columns)
    return finish(graph, graph.op("Reshape", biased, graph.ints(0, HEADS, 6, 6)), v), {"mask": "columns", **MASKED}


@case
def bias_written_into_the_scores() -> Case:
    """MViT: the scores of all but the class token are replaced by scores with a bias."""
    graph, q, k, v = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    last = graph.op("Transpose", scores, perm=[2, 0, 1, 3])
    part = graph.op("Slice", last, graph.ints(1), graph.ints(STEPS), graph.ints(0))
    biased = graph.op(
        "Add", part, graph.op("Unsqueeze", graph.op("ReduceMean", "x", graph.ints(1, 2), keepdims=0), graph.ints(0, 2, 3))
    )
    rows = graph.const(np.arange(1, STEPS).reshape(-1, 1), np.int64)
    written = graph.op("ScatterND", last, rows, graph.op("Identity", biased, name="written"))
    return finish(graph, graph.op("Transpose", written, perm=[1, 2, 0, 3]), v), {"mask": "written", **MASKED}


@case
def probabilities_mixed_with_positions() -> Case:
    """ConViT: (1 - g) softmax(scores) + g softmax(positions), normalised again."""
    graph, q, k, v = start()
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transposed(k, name="kt")), graph.const(0.25), name="scaled")
    gate = graph.op("Sigmoid", graph.weight(1, HEADS, 1, 1))
    content = graph.op("Mul", graph.op("Sub", graph.const(1.0), gate), graph.op("Softmax", scores, axis=-1))
    places = graph.op("Mul", gate, graph.op("Softmax", graph.weight(1, HEADS, STEPS, STEPS), axis=-1))
    mixed = graph.op("Add", content, places)
    p = graph.op("Div", mixed, graph.op("ReduceSum", mixed, graph.ints(-1)), name="p")
    return finish(graph, "", v, p), {}
