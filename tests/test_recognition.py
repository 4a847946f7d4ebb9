"""Recognition of attention operators: every field against hand-written truth, or against what ONNX Runtime computes."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant import recognition
from attnquant.errors import DataError, ModelError
from attnquant.model import load, name_nodes
from attnquant.operators import site_of
from attnquant.patterns.inference import study
from attnquant.recognition import recognize
from attnquant.roles import PortRole
from attnquant.site import AttentionSite, Port

QUERY, KEY, VALUE = PortRole.QUERY, PortRole.KEY, PortRole.VALUE
PAST_KEY, PRESENT_KEY = PortRole.PAST_KEY, PortRole.PRESENT_KEY
MS = '"" : 21, "com.microsoft" : 1'
ONNX = '"" : 24'
ATTENTION = "Attention <q_num_heads: int = 2, kv_num_heads: int = 2>"


def model(body: str, *, imports: str = ONNX, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model in ONNX text, with random weights of the shapes given; int64 vectors are written as Constant nodes."""
    made = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]>\n{body}")
    random = np.random.default_rng(0)
    for name, shape in weights.items():
        made.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32) * 0.3, name))
    return made


def only(source: Any, **options: Any) -> AttentionSite:
    sites = recognize(source, **options).sites
    assert len(sites) == 1
    return sites[0]


def tensors(site: AttentionSite, *roles: PortRole) -> list[str]:
    return [site.ports[role].tensor for role in roles]


def projected(attention: str, *, inputs: str = "", outputs: str = "") -> onnx.ModelProto:
    """Hidden x projected to q, k and v in front of `attention`, which makes y."""
    text = f"""projected (float[B,S,16] x{inputs}) => (float[B,S,16] y{outputs}) {{
        [project_q] q = MatMul (x, wq)
        [project_k] k = MatMul (x, wk)
        [project_v] v = MatMul (x, wv)
        {attention}
    }}"""
    return model(text, wq=(16, 16), wk=(16, 16), wv=(16, 16))


# --- what the operator states, against what ONNX Runtime computes ---------------------------------------------------------


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def attention_of(site: AttentionSite, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """numpy attention from nothing but a site's fields; q, k, v are (batch, sequence, heads x size)."""
    assert site.q_heads is not None
    assert site.kv_heads is not None
    assert site.scale is not None
    assert site.window is not None

    def heads(tensor: np.ndarray, count: int, size: int | None) -> np.ndarray:
        assert tensor.shape[-1] == count * (size or 0)
        return tensor.reshape(*tensor.shape[:2], count, -1).transpose(0, 2, 1, 3)

    q, k = heads(q, site.q_heads, site.qk_head_dim), heads(k, site.kv_heads, site.qk_head_dim)
    v = heads(v, site.kv_heads, site.v_head_dim)
    repeat = site.q_heads // site.kv_heads
    scores = site.scale * q @ np.repeat(k, repeat, 1).transpose(0, 1, 3, 2)
    if site.softcap:
        scores = site.softcap * np.tanh(scores / site.softcap)
    query, key = np.arange(scores.shape[-2])[:, None], np.arange(scores.shape[-1])[None, :]
    left, right = site.window
    seen = (key <= query) | (not site.causal)
    seen &= ((left < 0) | (key >= query - left)) & ((right < 0) | (key <= query + right))
    scores = np.where(seen, scores, -np.inf)
    if site.sinks:
        sink = np.zeros((*scores.shape[:-1], 1))
        weights = softmax(np.concatenate([scores, sink], -1))[..., :-1]
    else:
        weights = softmax(scores)
    context = weights @ np.repeat(v, repeat, 1)
    return np.asarray(context.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1))


STANDARD = [
    ("q_num_heads: int = 4, kv_num_heads: int = 4", 16, 16),
    ("q_num_heads: int = 4, kv_num_heads: int = 2", 8, 8),
    ("q_num_heads: int = 4, kv_num_heads: int = 2", 8, 12),
    ("q_num_heads: int = 2, kv_num_heads: int = 2, scale: float = 0.7", 16, 16),
    ("q_num_heads: int = 2, kv_num_heads: int = 2, is_causal: int = 1, softcap: float = 0.5", 16, 16),
]
CONTRIB = [
    ("MultiHeadAttention", "num_heads: int = 4", 16, 16),
    ("MultiHeadAttention", "num_heads: int = 4, scale: float = 0.0", 16, 8),
    ("MultiHeadAttention", "num_heads: int = 2, scale: float = 0.9, unidirectional: int = 1", 16, 16),
    ("GroupQueryAttention", "num_heads: int = 2, kv_num_heads: int = 2", 16, 16),
    ("GroupQueryAttention", "num_heads: int = 2, kv_num_heads: int = 1, scale: float = 0.4", 8, 8),
    ("GroupQueryAttention", "num_heads: int = 2, kv_num_heads: int = 2, scale: float = 0.0, softcap: float = 0.5", 16, 16),
    ("GroupQueryAttention", "num_heads: int = 2, kv_num_heads: int = 2, local_window_size: int = 2", 16, 16),
    ("GroupQueryAttention", "num_heads: int = 2, kv_num_heads: int = 2, smooth_softmax: int = 1", 16, 16),
]


def agrees_with_runtime(made: onnx.ModelProto, k_width: int, v_width: int) -> None:
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((2, 5, width)).astype(np.float32) for width in (16, k_width, v_width))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), options)
    feeds = {"q": q, "k": k, "v": v, "lengths": np.array([4, 4], np.int32), "total": np.array([5], np.int32)}
    got = session.run(["y"], {item.name: feeds[item.name] for item in session.get_inputs()})[0]
    np.testing.assert_allclose(got, attention_of(only(made), q, k, v), atol=2e-6)


@pytest.mark.parametrize(("attributes", "k_width", "v_width"), STANDARD)
@pytest.mark.parametrize("opset", [23, 24])
def test_standard_attention_states_what_it_computes(attributes: str, k_width: int, v_width: int, opset: int) -> None:
    text = f"""g (float[B,S,16] q, float[B,S,{k_width}] k, float[B,S,{v_width}] v) => (float[B,S,W] y) {{
        [attn] y = Attention <{attributes}> (q, k, v)
    }}"""
    made = model(text, imports=f'"" : {opset}')
    assert only(made).form == f"ai.onnx::Attention@{opset}"
    agrees_with_runtime(made, k_width, v_width)


@pytest.mark.parametrize(("op_type", "attributes", "k_width", "v_width"), CONTRIB)
def test_contrib_attention_states_what_it_computes(op_type: str, attributes: str, k_width: int, v_width: int) -> None:
    grouped = op_type == "GroupQueryAttention"
    inputs, more = (", int32[B] lengths, int32[1] total", ", , , lengths, total") if grouped else ("", "")
    made = model(
        f"""g (float[B,S,16] q, float[B,S,{k_width}] k, float[B,S,{v_width}] v{inputs}) => (float[B,S,W] y) {{
            [attn] y{", pk, pv" if grouped else ""} = com.microsoft.{op_type} <{attributes}> (q, k, v{more})
        }}""",
        imports=MS,
    )
    assert only(made).form == f"com.microsoft::{op_type}@1"
    agrees_with_runtime(made, k_width, v_width)


def test_contrib_attention_with_its_projection_inside() -> None:
    made = model(
        """g (float[B,S,16] x) => (float[B,S,16] y) {
            [attn] y = com.microsoft.Attention <num_heads: int = 4, unidirectional: int = 1> (x, w, b)
        }""",
        imports=MS,
        w=(16, 48),
        b=(48,),
    )
    site = only(made)
    assert set(site.ports) == {PortRole.CONTEXT}
    assert (site.kind, site.past, site.packed) == ("self", "none", "none")
    weights = {item.name: numpy_helper.to_array(item) for item in made.graph.initializer}
    x = np.random.default_rng(2).standard_normal((2, 5, 16)).astype(np.float32)
    got = onnxruntime.InferenceSession(made.SerializeToString()).run(None, {"x": x})[0]
    q, k, v = np.split(x @ weights["w"] + weights["b"], 3, -1)
    np.testing.assert_allclose(got, attention_of(site, q, k, v), atol=2e-6)


def test_window_of_the_standard_operator() -> None:
    text = """g (float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v) => (float[B,4,S,8] y) {
        [attn] y = Attention <left_window_size: int = 3> (q, k, v)
    }"""
    site = only(model(text, imports='"" : 25'))
    assert site.form == "ai.onnx::Attention@25"
    assert site.window == (3, -1)


# --- ports, caches, self and cross -----------------------------------------------------------------------------------------


def test_ports_name_the_edges_of_the_operator() -> None:
    site = only(projected(f"[attn] y = {ATTENTION} (q, k, v, mask)", inputs=", bool[S,S] mask"))
    assert site.id == "/attn"
    assert site.nodes == ("attn",)
    assert dict(site.ports) == {
        QUERY: Port(node="attn", index=0, tensor="q"),
        KEY: Port(node="attn", index=1, tensor="k"),
        VALUE: Port(node="attn", index=2, tensor="v"),
        PortRole.MASK: Port(node="attn", index=3, tensor="mask"),
        PortRole.CONTEXT: Port(node="attn", index=0, tensor="y"),
    }
    assert (site.kind, site.past, site.q_heads, site.qk_head_dim) == ("self", "none", 2, 8)


def test_cache_inside_the_operator() -> None:
    caches = ", float[B,2,P,8] pk, float[B,2,P,8] pv"
    made = projected(
        "[attn] y, nk, nv = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v, , pk, pv)",
        inputs=caches,
        outputs=", float[B,2,T,8] nk, float[B,2,T,8] nv",
    )
    site = only(made)
    assert site.past == "inner"
    assert tensors(site, PAST_KEY, PortRole.PAST_VALUE, PRESENT_KEY, PortRole.PRESENT_VALUE) == ["pk", "pv", "nk", "nv"]
    assert site.kind == "self"


def test_concatenated_cache_in_front_of_the_operator() -> None:
    made = projected(
        """[join_k] nk = Concat <axis: int = 1> (pk, k)
        [join_v] nv = Concat <axis: int = 1> (pv, v)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, nk, nv)""",
        inputs=", float[B,P,16] pk, float[B,P,16] pv",
        outputs=", float[B,T,16] nk, float[B,T,16] nv",
    )
    site = only(made)
    assert site.past == "concat"
    assert site.kind == "self"
    assert site.ports[PAST_KEY] == Port(node="join_k", index=0, tensor="pk")
    assert site.ports[PRESENT_KEY] == Port(node="join_k", index=0, tensor="nk")


def test_scattered_cache_in_front_of_the_operator() -> None:
    made = projected(
        """[write_k] nk = TensorScatter <axis: int = 1> (pk, k, at)
        [write_v] nv = TensorScatter <axis: int = 1> (pv, v, at)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, nk, nv, , , , lengths)""",
        inputs=", float[B,M,16] pk, float[B,M,16] pv, int64[B] at, int64[B] lengths",
        outputs=", float[B,M,16] nk, float[B,M,16] nv",
    )
    site = only(made)
    assert (site.past, site.kind) == ("scatter", "self")
    assert tensors(site, PAST_KEY, PRESENT_KEY) == ["pk", "nk"]


def test_keys_fed_as_graph_inputs_are_a_cache_of_another_source() -> None:
    text = """g (float[B,S,16] x, float[B,2,T,8] pk, float[B,2,T,8] pv) => (float[B,S,16] y) {
        shape = Constant <value_ints: ints = [0, 0, 2, 8]> ()
        q = MatMul (x, wq)
        split = Reshape (q, shape)
        heads = Transpose <perm: ints = [0, 2, 1, 3]> (split)
        [attn] context = Attention (heads, pk, pv)
        back = Transpose <perm: ints = [0, 2, 1, 3]> (context)
        flat = Constant <value_ints: ints = [0, 0, 16]> ()
        y = Reshape (back, flat)
    }"""
    site = only(model(text, wq=(16, 16)))
    assert (site.past, site.kind) == ("input", "cross")
    assert (site.q_heads, site.kv_heads, site.qk_head_dim, site.v_head_dim) == (2, 2, 8, 8)
    assert site.scale == pytest.approx(8**-0.5)


@pytest.mark.parametrize(
    ("memory", "front", "kind"),
    [
        ("x", "", "self"),
        ("memory", "", "cross"),
        ("normed", "normed = LayerNormalization (x, one)", "self"),
        ("moved", "moved = Cast <to: int = 1> (x)", "self"),
        ("doubled", "doubled = Add (x, memory)", "cross"),
    ],
)
def test_self_or_cross_goes_by_the_common_hidden_tensor(memory: str, front: str, kind: str) -> None:
    text = f"""g (float[B,S,16] x, float[B,S,16] memory) => (float[B,S,16] y) {{
        one = Constant <value_floats: floats = [{", ".join(["1.0"] * 16)}]> ()
        {front}
        q = MatMul (x, wq)
        k = MatMul ({memory}, wk)
        v = MatMul ({memory}, wv)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v)
    }}"""
    assert only(model(text, wq=(16, 16), wk=(16, 16), wv=(16, 16))).kind == kind


def test_low_rank_keys_are_followed_to_the_hidden_tensor() -> None:
    """Multi-head latent attention: K goes through two projections with a norm and a Split between them, Q through one."""
    text = """g (float[B,S,16] x) => (float[B,S,16] y) {
        sizes = Constant <value_ints: ints = [4, 2]> ()
        q = MatMul (x, wq)
        low = MatMul (x, down)
        latent, rest = Split <axis: int = -1> (low, sizes)
        normed = RMSNormalization (latent, gain)
        k = MatMul (normed, wk)
        v = MatMul (normed, wv)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v)
    }"""
    assert only(model(text, wq=(16, 16), down=(16, 6), gain=(4,), wk=(4, 16), wv=(4, 16))).kind == "self"


def test_two_parts_of_one_tensor_are_two_sources() -> None:
    text = """g (float[B,S,16] x) => (float[B,R,16] y) {
        sizes = Constant <value_ints: ints = [3, 4]> ()
        image, words = Split <axis: int = 1> (x, sizes)
        q = MatMul (image, wq)
        k = MatMul (words, wk)
        v = MatMul (words, wv)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v)
    }"""
    assert only(model(text, wq=(16, 16), wk=(16, 16), wv=(16, 16))).kind == "cross"


def test_rotary_embeddings_do_not_hide_the_source() -> None:
    made = projected(
        """rq = RotaryEmbedding <num_heads: int = 2> (q, cos, sin)
        rk = RotaryEmbedding <num_heads: int = 2> (k, cos, sin)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (rq, rk, v)""",
        inputs=", float[B,S,4] cos, float[B,S,4] sin",
    )
    assert only(made).kind == "self"


def test_unprojected_inputs_leave_the_kind_open() -> None:
    text = """g (float[B,S,16] q, float[B,S,16] k, float[B,S,16] v) => (float[B,S,16] y) {
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v)
    }"""
    site = only(model(text))
    assert site.kind is None
    assert site.past == "none"


@pytest.mark.parametrize(("ports", "same"), [("x, x, x", "x"), ("q, k, k", "k")])
def test_one_tensor_on_several_ports(ports: str, same: str) -> None:
    site = only(projected(f"[attn] y = {ATTENTION} ({ports})"))
    assert tensors(site, KEY, VALUE) == [same, same]
    assert [site.ports[role].index for role in (QUERY, KEY, VALUE)] == [0, 1, 2]
    assert site.kind == "self"


def test_grouped_heads_repeated_in_front() -> None:
    text = """g (float[B,S,16] x) => (float[B,S,16] y) {
        two = Constant <value_ints: ints = [2]> ()
        q4 = Constant <value_ints: ints = [0, 0, 4, 4]> ()
        k2 = Constant <value_ints: ints = [0, 0, 2, 4]> ()
        wide = Constant <value_ints: ints = [1, 1, 2, 1, 1]> ()
        full = Constant <value_ints: ints = [0, 4, -1, 4]> ()
        flat = Constant <value_ints: ints = [0, 0, 16]> ()
        qp = MatMul (x, wq)
        qs = Reshape (qp, q4)
        q = Transpose <perm: ints = [0, 2, 1, 3]> (qs)
        kp = MatMul (x, wk)
        ks = Reshape (kp, k2)
        k = Transpose <perm: ints = [0, 2, 1, 3]> (ks)
        [lift] k5 = Unsqueeze (k, two)
        kw = Expand (k5, wide)
        kr = Reshape (kw, full)
        [attn] c = Attention (q, kr, kr)
        ct = Transpose <perm: ints = [0, 2, 1, 3]> (c)
        y = Reshape (ct, flat)
    }"""
    site = only(model(text, wq=(16, 16), wk=(16, 8)))
    assert (site.q_heads, site.kv_heads, site.kv_repeat) == (4, 4, 2)
    assert site.branch[KEY] == site.branch[VALUE] == Port(node="lift", index=0, tensor="k")
    assert site.ports[KEY].tensor == "kr"


@pytest.mark.parametrize(
    ("operator", "packed", "dim"),
    [
        ("GroupQueryAttention <num_heads: int = 4, kv_num_heads: int = 2> (p, , , , , lengths, total)", "qkv", 16),
        ("MultiHeadAttention <num_heads: int = 4> (p5)", "qkv", 8),
        ("MultiHeadAttention <num_heads: int = 4> (x, p5kv)", "kv", 16),
    ],
)
def test_packed_inputs_share_a_port(operator: str, packed: str, dim: int) -> None:
    text = f"""g (float[B,S,64] x, int32[B] lengths, int32[1] total) => (float[B,S,W] y) {{
        s5 = Constant <value_ints: ints = [0, 0, 4, 3, 8]> ()
        s5kv = Constant <value_ints: ints = [0, 0, 4, 2, 16]> ()
        p = MatMul (x, w)
        p3 = MatMul (x, w3)
        p5 = Reshape (p3, s5)
        p5kv = Reshape (p, s5kv)
        [attn] y{", pk, pv" if operator.startswith("Group") else ""} = com.microsoft.{operator}
    }}"""
    site = only(model(text, imports=MS, w=(64, 128), w3=(64, 96)))
    assert site.packed == packed
    assert site.ports[KEY] == site.ports[VALUE]
    assert (site.ports[QUERY] == site.ports[KEY]) == (packed == "qkv")
    assert site.qk_head_dim == site.v_head_dim == dim
    assert site.kind == "self"


def test_keys_of_a_contrib_operator_may_be_a_four_dimensional_cache() -> None:
    text = """g (float[B,S,32] x, float[B,4,T,8] pk, float[B,4,T,8] pv) => (float[B,S,32] y) {
        q = MatMul (x, w)
        [attn] y = com.microsoft.MultiHeadAttention <num_heads: int = 4> (q, pk, pv)
    }"""
    site = only(model(text, imports=MS, w=(32, 32)))
    assert (site.kind, site.past, site.kv_heads, site.qk_head_dim) == ("cross", "input", 4, 8)


@pytest.mark.parametrize(("mode", "role"), [(0, PortRole.SCORES), (3, PortRole.PROBABILITIES), (2, None)])
def test_score_output_means_what_its_mode_says(mode: int, role: PortRole | None) -> None:
    attributes = f"q_num_heads: int = 2, kv_num_heads: int = 2, qk_matmul_output_mode: int = {mode}"
    site = only(projected(f"[attn] y, , , qk = Attention <{attributes}> (q, k, v)", outputs=", float[B,2,S,S] qk"))
    extra = set(site.ports) - {QUERY, KEY, VALUE, PortRole.CONTEXT}
    assert extra == ({role} if role else set())
    assert role is None or site.ports[role] == Port(node="attn", index=3, tensor="qk")


# --- heads that only a run tells -------------------------------------------------------------------------------------------

HIDDEN_SHAPE = """g (float[B,S,16] x, int64[4] shape) => (float[B,4,S,4] y) {
    p = MatMul (x, w)
    r = Reshape (p, shape)
    q = Transpose <perm: ints = [0, 2, 1, 3]> (r)
    [attn] y = Attention (q, q, q)
}"""


def test_heads_come_from_a_run_where_the_graph_does_not_say() -> None:
    made = model(HIDDEN_SHAPE, w=(16, 16))
    del made.graph.output[0].type.tensor_type.shape.dim[:]
    blind = only(made)
    assert (blind.q_heads, blind.qk_head_dim, blind.v_head_dim, blind.scale) == (None, None, None, None)
    feeds = {"x": np.zeros((2, 3, 16), np.float32), "shape": np.array([2, 3, 4, 4])}
    site = only(made, feeds=feeds)
    assert (site.q_heads, site.kv_heads, site.qk_head_dim, site.v_head_dim, site.scale) == (4, 4, 4, 4, 0.5)


def test_feeds_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(DataError, match="shape"):
        recognize(model(HIDDEN_SHAPE, w=(16, 16)), feeds={"x": np.zeros((2, 3, 16), np.float32)})


# --- bodies and functions --------------------------------------------------------------------------------------------------


def test_branches_of_if() -> None:
    text = f"""g (float[B,S,16] x, bool flag) => (float[B,S,16] y) {{
        q = MatMul (x, w)
        [outer] z = {ATTENTION} (q, x, x)
        [choose] y = If (flag) <
            then_branch = a () => (float[B,S,16] ya) {{ [inner] ya = {ATTENTION} (q, z, z) }},
            else_branch = b () => (float[B,S,16] yb) {{ [inner] yb = {ATTENTION} (q, q, q) }}
        >
    }}"""
    sites = recognize(model(text, w=(16, 16))).sites
    assert sorted(site.id for site in sites) == ["/choose/else_branch/inner", "/choose/then_branch/inner", "/outer"]
    assert sites[0].id == "/outer"
    assert {site.path for site in sites} == {"", "/choose/then_branch", "/choose/else_branch"}
    assert {site.ports[KEY].tensor for site in sites} == {"x", "z", "q"}


def test_body_of_loop() -> None:
    text = f"""g (float[B,S,16] x, int64 count, bool go) => (float[B,S,16] y) {{
        [again] y = Loop (count, go, x) <
            body = body (int64 i, bool c, float[B,S,16] state) => (bool c2, float[B,S,16] next) {{
                c2 = Identity (c)
                [attn] next = {ATTENTION} (state, state, state)
            }}
        >
    }}"""
    site = only(model(text))
    assert (site.id, site.path) == ("/again/body/attn", "/again/body")
    assert (site.kind, site.past) == ("self", "none")


def test_body_of_scan() -> None:
    text = f"""g (float[T,S,16] x) => (float[T,S,16] y) {{
        [each] y = Scan <num_scan_inputs: int = 1,
            body = step (float[S,16] row) => (float[S,16] out) {{
                axes = Constant <value_ints: ints = [0]> ()
                one = Unsqueeze (row, axes)
                [attn] seen = {ATTENTION} (one, one, one)
                out = Squeeze (seen, axes)
            }}
        > (x)
    }}"""
    assert only(model(text)).id == "/each/body/attn"


FUNCTION = """
<domain: "org.example", opset_import: [OPSET]>
Block (h, w) => (r) {
    q = MatMul (h, w)
    [attn] r = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, q, h)
}
"""


def calling(opset: str) -> onnx.ModelProto:
    text = """g (float[B,S,16] x, float[16,16] w) => (float[B,S,16] y) {
        [first] z = org.example.Block (x, w)
        [second] y = org.example.Block (z, w)
    }""" + FUNCTION.replace("OPSET", opset)
    return model(text, imports='"" : 20, "org.example" : 1')


def test_functions_import_their_own_opsets() -> None:
    site = only(calling('"" : 23'))
    assert (site.id, site.path) == ("org.example::Block/attn", "org.example::Block")
    assert site.form == "ai.onnx::Attention@23"
    found = recognize(calling('"" : 22'))
    assert found.sites == ()
    assert "came with version 23" in found.near_misses[0].reason


def test_function_in_place_of_an_operator_is_read_instead_of_it() -> None:
    """A model-local function takes the place of an operator of its name; its own opsets count, not those of a namesake."""
    text = """g (float[B,S,16] x) => (float[B,S,16] y) {
        [call] y = com.microsoft.MultiHeadAttention <num_heads: int = 2> (x, x, x)
    }
    <domain: "com.microsoft", opset_import: ["" : 22]>
    MultiHead (q) => (r) { r = Identity (q) }
    <domain: "com.microsoft", opset_import: ["" : 23]>
    MultiHeadAttention <num_heads> (q, k, v) => (r) {
        [attn] r = Attention <q_num_heads: int = @num_heads, kv_num_heads: int = @num_heads> (q, k, v)
    }"""
    site = only(model(text, imports=MS))
    assert site.id == "com.microsoft::MultiHeadAttention/attn"
    assert site.form == "ai.onnx::Attention@23"


def test_nested_in_a_function() -> None:
    text = """g (float[B,S,16] x, bool flag) => (float[B,S,16] y) {
        [call] y = org.example.Maybe (x, flag)
    }
    <domain: "org.example", opset_import: ["" : 23]>
    Maybe (h, flag) => (r) {
        [pick] r = If (flag) <
            then_branch = a () => (float[B,S,16] ya) {
                [attn] ya = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (h, h, h)
            },
            else_branch = b () => (float[B,S,16] yb) { yb = Identity (h) }
        >
    }"""
    site = only(model(text, imports='"" : 20, "org.example" : 1'))
    assert site.id == "org.example::Maybe/pick/then_branch/attn"


def test_attributes_that_the_caller_gives_stay_open() -> None:
    text = """g (float[B,S,16] x) => (float[B,S,16] y) {
        [call] y = org.example.Scaled <factor: float = 0.5> (x)
    }
    <domain: "org.example", opset_import: ["" : 23]>
    Scaled <factor> (h) => (r) {
        [attn] r = Attention <q_num_heads: int = 2, kv_num_heads: int = 2, scale: float = @factor> (h, h, h)
    }"""
    site = only(model(text, imports='"" : 23, "org.example" : 1'))
    assert site.scale is None
    assert site.q_heads == 2


# --- near misses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imports", "call", "reason"),
    [
        ('"" : 24, "org.example" : 1', "org.example.FlashAttention (x, x, x)", "not in the catalogue"),
        ('"" : 24, "com.microsoft" : 1', "com.microsoft.FutureAttention (x, x, x)", "not in the catalogue"),
        ('"" : 99', f"{ATTENTION} (x, x, x)", "newer than the catalogue"),
        ('"" : 22', f"{ATTENTION} (x, x, x)", "came with version 23"),
        ('"" : 24, "com.microsoft" : 2', "com.microsoft.MultiHeadAttention <num_heads: int = 2> (x, x, x)", "newer"),
        ('"" : 24, "org.example" : 1', "org.example.Attention (x, x, x)", "not in the catalogue"),
        ('"" : 27', "LinearAttention <q_num_heads: int = 2, kv_num_heads: int = 2> (x, x, x)", "recurrent state"),
        ('"" : 20', "DisentangledAttention_TRT (x, x, x)", "products that are already made"),
    ],
)
def test_unknown_attention_is_a_near_miss_with_its_reason(imports: str, call: str, reason: str) -> None:
    outputs = "y, state" if call.startswith("Linear") else "y"
    text = f"g (float[B,S,16] x) => (float[B,S,16] y) {{ [attn] {outputs} = {call} }}"
    found = recognize(model(text, imports=imports))
    assert found.sites == ()
    assert [miss.nodes for miss in found.near_misses] == [("attn",)]
    assert reason in found.near_misses[0].reason


def test_cache_and_rotary_operators_are_no_near_misses() -> None:
    text = """g (float[B,S,16] x, float[M,4] cos, float[M,4] sin, int64[B,S] at) => (float[B,S,16] y) {
        y = RotaryEmbedding <num_heads: int = 2> (x, cos, sin, at)
    }"""
    found = recognize(model(text))
    assert found.sites == found.near_misses == ()


def test_contrib_domain_left_out_of_the_imports() -> None:
    """ONNX Runtime then takes its newest version of com.microsoft."""
    text = """g (float[B,S,16] x) => (float[B,S,16] y) {
        [attn] y = com.microsoft.MultiHeadAttention <num_heads: int = 2> (x, x, x)
    }"""
    made = model(text, imports='"" : 21')
    onnxruntime.InferenceSession(made.SerializeToString())
    assert only(made).form == "com.microsoft::MultiHeadAttention@1"


# --- quantized models, names, sources --------------------------------------------------------------------------------------


def with_pairs(made: onnx.ModelProto, edges: list[tuple[str, int]]) -> onnx.ModelProto:
    """The model with a Q/DQ pair on the edges (node name, input index), and every MatMul weight behind DequantizeLinear."""
    made = copy.deepcopy(made)
    made.graph.initializer.append(numpy_helper.from_array(np.float32(0.02), "s"))
    made.graph.initializer.append(numpy_helper.from_array(np.uint8(128), "z"))
    nodes: list[onnx.NodeProto] = []
    for node in made.graph.node:
        for index, name in enumerate(node.input):
            if (node.name, index) in edges:
                mark = f"{node.name}_{index}"
                nodes.append(helper.make_node("QuantizeLinear", [name, "s", "z"], [f"{mark}_q"]))
                nodes.append(helper.make_node("DequantizeLinear", [f"{mark}_q", "s", "z"], [f"{mark}_dq"]))
                node.input[index] = f"{mark}_dq"
        if node.op_type == "MatMul":
            array = next(numpy_helper.to_array(item) for item in made.graph.initializer if item.name == node.input[1])
            integer = numpy_helper.from_array(np.clip(array / 0.02, -127, 127).astype(np.int8), f"{node.name}_w")
            made.graph.initializer.append(integer)
            nodes.append(helper.make_node("DequantizeLinear", [integer.name, "s"], [f"{node.name}_wdq"]))
            node.input[1] = f"{node.name}_wdq"
        nodes.append(node)
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    onnx.checker.check_model(made)
    return made


def comparable(site: AttentionSite) -> dict[str, Any]:
    skipped = ("ports", "branch")
    fields = {name: getattr(site, name) for name in AttentionSite.__dataclass_fields__ if name not in skipped}
    fields["places"] = {role: (port.node, port.index) for role, port in site.ports.items()}
    return fields


def test_pairs_of_quantize_and_dequantize_are_transparent() -> None:
    made = projected(
        """[join_k] nk = Concat <axis: int = 1> (pk, k)
        [join_v] nv = Concat <axis: int = 1> (pv, v)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, nk, nv)""",
        inputs=", float[B,P,16] pk, float[B,P,16] pv",
        outputs=", float[B,T,16] nk, float[B,T,16] nv",
    )
    edges = [("project_q", 0), ("project_k", 0), ("project_v", 0), ("attn", 0), ("attn", 1)]
    before, after = only(made), only(with_pairs(made, edges))
    assert comparable(before) == comparable(after)
    assert tensors(after, QUERY, KEY, VALUE) == ["attn_0_dq", "attn_1_dq", "nv"]
    assert tensors(after, PAST_KEY, PRESENT_KEY) == tensors(before, PAST_KEY, PRESENT_KEY)


def test_pairs_around_the_second_of_two_uses() -> None:
    made = projected(f"[attn] y = {ATTENTION} (q, k, k)")
    site = only(with_pairs(made, [("attn", 0), ("attn", 1)]))
    assert tensors(site, KEY, VALUE) == ["attn_1_dq", "k"]
    assert comparable(site) == comparable(only(made))


def test_nodes_without_names_get_names() -> None:
    made = projected("a = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v)\n y = Attention "
                     "<q_num_heads: int = 2, kv_num_heads: int = 2> (a, k, v)")
    for node in made.graph.node:
        node.name = ""
    sites = recognize(made).sites
    assert [site.ports[PortRole.CONTEXT].tensor for site in sites] == ["a", "y"]
    assert len({site.id for site in sites}) == 2
    assert all(len(site.id) > 1 and site.node == site.ports[QUERY].node for site in sites)
    assert recognize(made).sites == sites


def test_sites_come_in_graph_order() -> None:
    made = projected("""[zeta] a = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (q, k, v)
        [alpha] b = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (a, k, v)
        [mid] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (b, k, v)""")
    assert [site.node for site in recognize(made).sites] == ["zeta", "alpha", "mid"]


def test_every_kind_of_source_is_read_and_none_changed(tmp_path: Path) -> None:
    made = projected(f"[attn] y = {ATTENTION} (q, k, v)")
    made.graph.node[0].name = ""
    path = tmp_path / "model.onnx"
    onnx.save(made, path)
    loaded = ir.load(path)
    text = ir.to_proto(loaded).SerializeToString(deterministic=True)
    before = made.SerializeToString(deterministic=True)
    found = [recognize(source) for source in (made, path, str(path), loaded)]
    assert all(recognition == found[0] for recognition in found)
    assert made.SerializeToString(deterministic=True) == before == path.read_bytes()
    assert ir.to_proto(loaded).SerializeToString(deterministic=True) == text


def test_what_is_no_model_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"no model at all")
    with pytest.raises(ModelError):
        recognize(path)
    with pytest.raises(ModelError):
        recognize(tmp_path / "missing.onnx")


def layers(count: int) -> onnx.ModelProto:
    """Residual layers, each three projections and an attention."""
    nodes, hidden = [], "x"
    for index in range(count):
        ports = [f"{role}{index}" for role in "qkv"]
        nodes += [helper.make_node("MatMul", [hidden, "w"], [port]) for port in ports]
        nodes.append(helper.make_node("Attention", ports, [f"c{index}"], q_num_heads=2, kv_num_heads=2))
        nodes.append(helper.make_node("Add", [hidden, f"c{index}"], [f"h{index}"]))
        hidden = f"h{index}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "S", 8]) for name in ("x", hidden)]
    weights = [numpy_helper.from_array(np.zeros((8, 8), np.float32), "w")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)


def test_recognition_is_linear_in_the_nodes() -> None:
    """A chain of layers: the walks back from an attention may look at no more than its own layer."""
    steps = []
    for count in (10, 40):
        loaded = load(layers(count))
        name_nodes(loaded)
        facts = study(loaded)
        operators, _ = recognition.find_operators(loaded)
        assert [site_of(one, facts).kind for one in operators] == ["self"] * count
        steps.append(facts.steps)
    assert steps[1] <= 4.1 * steps[0]


def test_cross_covariance_inside_an_operator() -> None:
    """XCiT as torch exports it with fused attention: the operator's rows are channels, its columns positions."""
    text = """g (float[B,S,16] x) => (float[B,2,8,S] y) {
        shape = Constant <value_ints: ints = [0, -1, 2, 8]> ()
        a = MatMul (x, wq)
        b = MatMul (x, wk)
        c = MatMul (x, wv)
        a4 = Reshape (a, shape)
        b4 = Reshape (b, shape)
        c4 = Reshape (c, shape)
        q = Transpose <perm: ints = [0, 2, 3, 1]> (a4)
        k = Transpose <perm: ints = [0, 2, 3, 1]> (b4)
        v = Transpose <perm: ints = [0, 2, 3, 1]> (c4)
        [attn] y = Attention <scale: float = 1.0> (q, k, v)
    }"""
    site = only(model(text, wq=(16, 16), wk=(16, 16), wv=(16, 16)))
    assert site.cross_covariance
    assert site.traits == ("cross-covariance",)
    plain = only(model(text.replace("[0, 2, 3, 1]", "[0, 2, 1, 3]"), wq=(16, 16), wk=(16, 16), wv=(16, 16)))
    assert not plain.cross_covariance
    assert plain.traits == ()


def test_learned_query_of_an_operator() -> None:
    text = """g (float[B,S,16] x) => (float[B,3,16] y) {
        k = MatMul (x, wk)
        v = MatMul (x, wv)
        [attn] y = Attention <q_num_heads: int = 2, kv_num_heads: int = 2> (probe, k, v)
    }"""
    site = only(model(text, probe=(1, 3, 16), wk=(16, 16), wv=(16, 16)))
    assert (site.kind, site.traits) == ("cross", ("learned query",))
