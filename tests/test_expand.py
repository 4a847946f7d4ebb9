"""Attention operators written out: against numpy written from the specification, and against ONNX Runtime's own kernels."""

from typing import Any

import attention_oracle as oracle
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from corpora import Entry, entries
from onnx import TensorProto, helper

from attnquant import recognize, runtime
from attnquant.errors import ModelError
from attnquant.graph import bodies
from attnquant.model import load
from attnquant.rewrite import RewriteResult, expand
from attnquant.roles import PortRole

RNG = np.random.default_rng(5)
TYPES = {
    "float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bool": TensorProto.BOOL, "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
}  # fmt: skip
PLAIN = {"", "ai.onnx"}
BATCH, SEQ, PAST, HEADS, SIZE = 2, 3, 4, 4, 16


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def dims(item: np.ndarray, dynamic: bool) -> list[int | str]:
    return [f"first_{size}" if dynamic and axis == 0 else size for axis, size in enumerate(item.shape)]


def one(
    op_type: str,
    inputs: dict[str, np.ndarray | None],
    outputs: dict[str, str],
    *,
    domain: str = "",
    opset: int = 24,
    dynamic: bool = True,
    constants: tuple[str, ...] = (),
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one operator whose inputs are graph inputs; None leaves one out."""
    graph = helper.make_graph(
        [helper.make_node(op_type, [name if item is not None else "" for name, item in inputs.items()], list(outputs),
                          name="attention", domain=domain, **attributes)],
        "one",
        [helper.make_tensor_value_info(name, TYPES[str(item.dtype)], dims(item, dynamic)) for name, item in inputs.items()
         if item is not None and name not in constants],
        [helper.make_tensor_value_info(name, TYPES[kind], None) for name, kind in outputs.items() if name],
        [onnx.numpy_helper.from_array(item, name) for name, item in given(inputs).items() if name in constants],
    )
    domains = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def given(inputs: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    return {name: item for name, item in inputs.items() if item is not None}


def expanded(model: onnx.ModelProto) -> RewriteResult:
    result = expand(model)
    assert [row.status for row in result.rows] == ["expanded"]
    for _, body in bodies(result.model):
        assert {node.domain for node in body} <= PLAIN
        assert not {node.op_type for node in body} & {"If", "Loop", "Scan", "Attention"}
    return result


def observed(
    result: RewriteResult, feeds: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[PortRole, np.ndarray]]:
    """Outputs, and the tensors that the row names."""
    copy = load(result.model)
    names = result.rows[0].tensors
    outside = {value.name for value in copy.graph.inputs} | {value.name for value in copy.graph.outputs}
    copy.graph.outputs.extend(
        value for node in copy.graph for value in node.outputs if value.name in set(names.values()) - outside
    )
    found = {**feeds, **runtime.run(copy, feeds, threads=1)}
    return found, {role: found[name] for role, name in names.items() if name in found}


def close(got: np.ndarray, expected: np.ndarray, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


def standard(kv_heads: int = HEADS, *, keys: int = SEQ) -> dict[str, np.ndarray | None]:
    return {"q": array(BATCH, HEADS, SEQ, SIZE), **{name: array(BATCH, kv_heads, keys, SIZE) for name in "kv"}}


def causal(rows: int, columns: int, offset: int = 0) -> np.ndarray:
    return np.tril(np.ones((rows, columns), bool), offset)


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_four_axes_and_grouped_heads(opset: int, kv_heads: int) -> None:
    """Every tensor that can be observed is the one of the specification."""
    inputs = standard(kv_heads)
    model = one("Attention", inputs, {"y": "float32"}, opset=opset, scale=0.3)
    found, named = observed(expanded(model), given(inputs))
    reference = oracle.attend(inputs["q"], inputs["k"], inputs["v"], scale=0.3)
    close(found["y"], reference.context)
    close(named[PortRole.SCORES], reference.scores)
    close(named[PortRole.PROBABILITIES], reference.probabilities)
    close(named[PortRole.CONTEXT], reference.context)
    assert named[PortRole.QUERY] is found["q"]
    assert named[PortRole.KEY] is found["k"]
    assert named[PortRole.VALUE] is found["v"]


def test_three_axes() -> None:
    """Heads come from the attributes, and the size of V's heads may be another."""
    inputs = {"q": array(BATCH, SEQ, HEADS * SIZE), "k": array(BATCH, 5, 2 * SIZE), "v": array(BATCH, 5, 2 * 3)}
    model = one("Attention", inputs, {"y": "float32"}, q_num_heads=HEADS, kv_num_heads=2)
    found, _ = observed(expanded(model), inputs)
    heads = [oracle.split_heads(item, count) for item, count in zip(inputs.values(), (HEADS, 2, 2), strict=True)]
    close(found["y"], oracle.merge_heads(oracle.attend(*heads).context))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(
    "shape", [(SEQ, 5), (HEADS, SEQ, 5), (1, SEQ, 5), (BATCH, 1, SEQ, 5), (1, 1, 1, 5), (BATCH, HEADS, SEQ, 5)]
)
@pytest.mark.parametrize("is_causal", [0, 1])
def test_masks(kind: str, shape: tuple[int, ...], is_causal: int) -> None:
    """Masks of two to four axes, broadcast from the right, alone and with is_causal; softcap before the mask."""
    inputs = standard(keys=5)
    mask = np.ascontiguousarray(RNG.random(shape) > 0.3)
    mask[..., 0] = True
    inputs["mask"] = mask if kind == "bool" else np.where(mask, array(*shape), -np.inf).astype(np.float32)
    model = one("Attention", inputs, {"y": "float32"}, is_causal=is_causal, softcap=2.0)
    found, _ = observed(expanded(model), given(inputs))
    allowed = causal(SEQ, 5) if is_causal else np.ones((1, 1), bool)
    bias = inputs["mask"] if kind == "float" else None
    if kind == "bool":
        allowed = allowed & mask
    reference = oracle.attend(inputs["q"], inputs["k"], inputs["v"], bias=bias, allowed=allowed, softcap=2.0)
    close(found["y"], reference.context)


@pytest.mark.parametrize("constant", [True, False])
def test_fully_masked_rows_are_zero(constant: bool) -> None:
    inputs = standard()
    mask = np.ones((SEQ, SEQ), bool)
    mask[1] = False
    inputs["mask"] = mask
    model = one("Attention", inputs, {"y": "float32"}, constants=("mask",) if constant else ())
    found, named = observed(expanded(model), given(inputs))
    reference = oracle.attend(inputs["q"], inputs["k"], inputs["v"], allowed=mask)
    assert not reference.context[:, :, 1].any()
    close(found["y"], reference.context)
    close(named[PortRole.PROBABILITIES], reference.probabilities)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_past_present_and_every_kind_of_scores(mode: int) -> None:
    """The operator's own cache, and qk_matmul_output as onnx 1.22 defined its modes."""
    inputs: dict[str, np.ndarray | None] = {
        **standard(2), "mask": np.where(RNG.random((SEQ, PAST + SEQ)) > 0.2, 0.5, -np.inf).astype(np.float32),
        "past_k": array(BATCH, 2, PAST, SIZE), "past_v": array(BATCH, 2, PAST, SIZE),
    }
    outputs = dict.fromkeys(("y", "present_k", "present_v", "qk"), "float32")
    model = one("Attention", inputs, outputs, is_causal=1, softcap=1.5, qk_matmul_output_mode=mode)
    found, named = observed(expanded(model), given(inputs))
    key, value = (np.concatenate([inputs[f"past_{role}"], inputs[role]], axis=2) for role in "kv")
    reference = oracle.attend(
        inputs["q"], key, value, bias=inputs["mask"], allowed=causal(SEQ, PAST + SEQ, PAST), softcap=1.5
    )
    close(found["y"], reference.context)
    np.testing.assert_array_equal(found["present_k"], key)
    np.testing.assert_array_equal(found["present_v"], value)
    expected = (reference.scores, reference.capped, reference.masked, reference.probabilities)[mode]
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(found["qk"]), finite)
    close(found["qk"][finite], expected[finite])
    close(named[PortRole.SCORES], reference.scores)


@pytest.mark.parametrize("is_causal", [0, 1])
@pytest.mark.parametrize("lengths", [(6, 3), (2, 1), (0, 6)])
@pytest.mark.parametrize("width", [6, 5])
def test_static_cache(is_causal: int, lengths: tuple[int, int], width: int) -> None:
    """nonpad_kv_seqlen: causal from the end of each sample; a mask that is shorter than the cache hides the rest."""
    inputs = standard(2, keys=6)
    mask = RNG.random((BATCH, 1, SEQ, width)) > 0.2
    inputs |= {"mask": mask, "past_k": None, "past_v": None, "nonpad": np.array(lengths)}
    model = one("Attention", inputs, {"y": "float32"}, is_causal=is_causal)
    found, _ = observed(expanded(model), given(inputs))
    allowed = np.pad(mask, [(0, 0)] * 3 + [(0, 6 - width)])
    ends = np.array(lengths).reshape(-1, 1, 1, 1)
    allowed = allowed & (np.arange(6) < ends)
    if is_causal:
        allowed = allowed & (np.arange(6) <= np.arange(SEQ)[:, None] + ends - SEQ)
    close(found["y"], oracle.attend(inputs["q"], inputs["k"], inputs["v"], allowed=allowed).context)


def test_half_precision_with_a_softmax_in_single() -> None:
    """Half precision stays half precision outside the softmax; large products do not overflow."""
    inputs = {name: (item * 30).astype(np.float16) for name, item in given(standard()).items()}
    model = one("Attention", inputs, {"y": "float16"}, softmax_precision=TensorProto.FLOAT, scale=0.01)
    result = expanded(model)
    found, named = observed(result, inputs)
    reference = oracle.attend(inputs["q"], inputs["k"], inputs["v"], scale=0.01)
    close(found["y"], reference.context, 5e-3)
    assert named[PortRole.PROBABILITIES].dtype == np.float16
    softmax = next(node for node in result.model.graph if node.op_type == "Softmax")
    assert softmax.inputs[0].producer().op_type == "Cast"


def test_no_new_windows_of_opset_25() -> None:
    model = one("Attention", standard(), {"y": "float32"}, opset=25, left_window_size=1)
    row = expand(model).rows[0]
    assert row.status == "refused"
    assert "opset 25" in row.reasons[0]


def multi_head(**more: np.ndarray | None) -> dict[str, np.ndarray | None]:
    names = ("bias", "padding", "attention_bias", "past_k", "past_v")
    flat = {name: array(BATCH, SEQ, HEADS * SIZE) for name in "qkv"}
    inputs: dict[str, np.ndarray | None] = {**flat, **dict.fromkeys(names), **more}
    while inputs and list(inputs.values())[-1] is None:
        inputs.popitem()
    return inputs


def against_the_kernel(model: onnx.ModelProto, feeds: dict[str, np.ndarray], tolerance: float = 2e-5) -> None:
    """Outputs of the written-out model against those of ONNX Runtime's own kernel."""
    expected = runtime.run(load(model), feeds, threads=1)
    got = runtime.run(expanded(model).model, feeds, threads=1)
    assert expected.keys() == got.keys()
    for name, item in expected.items():
        close(got[name], item, tolerance)


PADDING = {
    "by_length": np.array([2, 3], np.int32),
    "by_key": np.array([[1, 1, 0], [0, 1, 1]], np.int32),
    "by_query": np.array([[[1, 0, 0], [1, 1, 0], [1, 1, 1]], [[0, 1, 1], [1, 1, 1], [1, 0, 1]]], np.int32),
}


@pytest.mark.parametrize("padding", [None, *PADDING])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head(padding: str | None, unidirectional: int, bias: bool) -> None:
    inputs = multi_head(
        bias=array(3 * HEADS * SIZE) if bias else None, padding=PADDING[padding] if padding else None,
        attention_bias=array(1, HEADS, SEQ, SEQ) if bias else None,
    )
    model = one("MultiHeadAttention", inputs, {"y": "float32"}, domain="com.microsoft", num_heads=HEADS,
                unidirectional=unidirectional, opset=17)
    against_the_kernel(model, given(inputs))


def test_multi_head_by_the_specification() -> None:
    """Scale, bias of the projection and causal mask, in numpy."""
    inputs = multi_head(bias=array(3 * HEADS * SIZE))
    model = one("MultiHeadAttention", inputs, {"y": "float32"}, domain="com.microsoft", num_heads=HEADS, unidirectional=1,
                scale=0.4)
    found, named = observed(expanded(model), given(inputs))
    parts = np.split(inputs["bias"], 3)
    heads = [oracle.split_heads(inputs[name] + part, HEADS) for name, part in zip("qkv", parts, strict=True)]
    reference = oracle.attend(*heads, scale=0.4, allowed=causal(SEQ, SEQ))
    close(found["y"], oracle.merge_heads(reference.context))
    close(named[PortRole.PROBABILITIES], reference.probabilities)


@pytest.mark.parametrize("causal_", [0, 1])
def test_multi_head_with_past_and_probabilities(causal_: int) -> None:
    inputs = multi_head(past_k=array(BATCH, HEADS, PAST, SIZE), past_v=array(BATCH, HEADS, PAST, SIZE))
    outputs = dict.fromkeys(("y", "present_k", "present_v"), "float32")
    model = one("MultiHeadAttention", inputs, outputs, domain="com.microsoft", num_heads=HEADS, unidirectional=causal_)
    against_the_kernel(model, given(inputs))


def test_multi_head_shows_its_scores() -> None:
    """Output qk, as the runtime defines it."""
    inputs = multi_head(padding=PADDING["by_key"])
    model = one("MultiHeadAttention", inputs, {"y": "float32", "": "float32", " ": "float32", "qk": "float32"},
                domain="com.microsoft", num_heads=HEADS)
    for name in model.graph.node[0].output[1:3]:
        assert not name.strip()
    model.graph.node[0].output[2] = ""
    del model.graph.output[1:-1]
    against_the_kernel(model, given(inputs))


@pytest.mark.parametrize("packed", ["qkv", "kv", "cache"])
def test_multi_head_packed(packed: str) -> None:
    """Packed operands, which the CPU kernel does not take, and K and V with heads first."""
    query, key, value = array(BATCH, HEADS, SEQ, SIZE), array(BATCH, HEADS, SEQ, SIZE), array(BATCH, HEADS, SEQ, SIZE)
    flat = oracle.merge_heads(query)
    inputs = {
        "qkv": {"q": np.stack([query, key, value], axis=3).swapaxes(1, 2)},
        "kv": {"q": flat, "k": np.stack([key, value], axis=3).swapaxes(1, 2)},
        "cache": {"q": flat, "k": key, "v": value},
    }[packed]
    model = one("MultiHeadAttention", inputs, {"y": "float32"}, domain="com.microsoft", num_heads=HEADS)
    found, named = observed(expanded(model), inputs)
    close(found["y"], oracle.merge_heads(oracle.attend(query, key, value).context))
    close(named[PortRole.VALUE], value)


@pytest.mark.parametrize("mask", [None, "by_length", "by_key", "by_query"])
@pytest.mark.parametrize("unidirectional", [0, 1])
@pytest.mark.parametrize("past", [False, True])
def test_attention_with_a_packed_weight(mask: str | None, unidirectional: int, past: bool) -> None:
    if past and mask is not None:
        return
    width = HEADS * SIZE
    inputs: dict[str, np.ndarray | None] = {
        "x": array(BATCH, SEQ, width), "w": array(width, 3 * width) / 6, "b": array(3 * width),
        "mask": PADDING[mask] if mask else None, "past": array(2, BATCH, HEADS, PAST, SIZE) if past else None,
    }
    outputs = dict.fromkeys(("y", "present"), "float32")
    model = one("Attention", inputs, outputs, domain="com.microsoft", num_heads=HEADS, unidirectional=unidirectional,
                constants=("w", "b"))
    feeds = {name: item for name, item in given(inputs).items() if name not in ("w", "b")}
    against_the_kernel(model, feeds)


def grouped(
    lengths: tuple[int, ...], total: int, *, new: int = SEQ, past: int | None = None, rotary: int = 0, kv_heads: int = 2,
    **more: np.ndarray | None,
) -> dict[str, np.ndarray | None]:
    """Inputs of a GroupQueryAttention; `lengths` with the new tokens."""
    batch = len(lengths)
    angles = np.outer(np.arange(16), 0.5 ** np.arange(rotary // 2)).astype(np.float32) if rotary else None
    cache = None if past is None else array(batch, kv_heads, past, SIZE)
    names = ("position_ids", "attention_bias", "head_sink")
    inputs: dict[str, np.ndarray | None] = {
        "q": array(batch, new, HEADS * SIZE), **{name: array(batch, new, kv_heads * SIZE) for name in "kv"},
        "past_k": cache, "past_v": None if cache is None else array(*cache.shape),
        "seqlens_k": np.array(lengths, np.int32) - 1, "total": np.array(total, np.int32),
        "cos": None if angles is None else np.cos(angles), "sin": None if angles is None else np.sin(angles),
        **dict.fromkeys(names), **more,
    }
    while list(inputs.values())[-1] is None:
        inputs.popitem()
    return inputs


def grouped_model(inputs: dict[str, np.ndarray | None], **attributes: Any) -> onnx.ModelProto:
    outputs = dict.fromkeys(("y", "present_k", "present_v"), "float32")
    kv_heads = attributes.pop("kv_num_heads", 2)
    return one("GroupQueryAttention", inputs, outputs, domain="com.microsoft", num_heads=HEADS, kv_num_heads=kv_heads,
               opset=17, **attributes)


GROUPED: dict[str, tuple[dict[str, np.ndarray | None], dict[str, Any]]] = {
    "prompt": (grouped((3, 3), 3), {}),
    "prompt_rotary": (grouped((3, 3), 3, rotary=16), {"do_rotary": 1}),
    "prompt_rotary_interleaved": (grouped((3, 3), 3, rotary=16), {"do_rotary": 1, "rotary_interleaved": 1}),
    "prompt_softcap_scale": (grouped((3, 3), 3), {"softcap": 1.5, "scale": 0.7}),
    "prompt_window": (grouped((6, 6), 6, new=6), {"local_window_size": 2}),
    "prompt_one_kv_head": (grouped((3, 3), 3, kv_heads=1), {"kv_num_heads": 1}),
    "prompt_bias": (grouped((3, 3), 3, attention_bias=array(2, 1, 3, 3)), {"softcap": 1.5}),
    "prompt_not_causal": (grouped((3, 3), 3), {"causal": 0}),
    "decode": (grouped((5, 5), 5, new=1, past=4), {}),
    "decode_rotary": (grouped((5, 5), 5, new=1, past=4, rotary=16), {"do_rotary": 1}),
    "decode_ragged": (grouped((5, 3), 5, new=1, past=4, rotary=16), {"do_rotary": 1}),
    "decode_shared_buffer": (grouped((5, 3), 5, new=1, past=9), {}),
    "decode_window_sink": (grouped((5, 5), 5, new=1, past=4, head_sink=array(HEADS)), {"local_window_size": 3}),
    "decode_smooth": (grouped((5, 5), 5, new=1, past=4), {"smooth_softmax": 1}),
    "chunk": (grouped((7,), 7, past=4, rotary=16), {"do_rotary": 1, "local_window_size": 4}),
    "chunk_positions": (grouped((7,), 7, past=4, rotary=16, position_ids=np.array([[9, 10, 11]])), {"do_rotary": 1}),
    "prompt_with_empty_buffer": (grouped((3, 3), 3, past=8), {}),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_against_the_kernel(name: str) -> None:
    """Prompts, decoding, chunks, ragged batches; unwritten places of a cache may hold anything."""
    inputs, attributes = GROUPED[name]
    model = grouped_model(dict(inputs), **attributes)
    feeds = given(inputs)
    expected = runtime.run(load(model), feeds, threads=1)
    got = runtime.run(expanded(model).model, feeds, threads=1)
    close(got["y"], expected["y"], 2e-5)
    for name_ in ("present_k", "present_v"):
        assert got[name_].shape == expected[name_].shape
        for row, last in enumerate(feeds["seqlens_k"]):
            close(got[name_][row, :, : last + 1], expected[name_][row, :, : last + 1])


def test_grouped_by_the_specification() -> None:
    """A decoding step of a ragged batch with rotary embedding, window and softcap, in numpy."""
    inputs = grouped((5, 3), 5, new=1, past=4, rotary=16)
    model = grouped_model(inputs, do_rotary=1, softcap=2.0, local_window_size=3)
    found, named = observed(expanded(model), given(inputs))
    for row, length in enumerate((5, 3)):
        place = np.array([[length - 1]])
        query = oracle.split_heads(inputs["q"][row : row + 1], HEADS)
        key, value = (oracle.split_heads(inputs[role][row : row + 1], 2) for role in "kv")
        query, key = (oracle.rotate(item, inputs["cos"], inputs["sin"], place) for item in (query, key))
        old_k, old_v = (inputs[name][row : row + 1, :, : length - 1] for name in ("past_k", "past_v"))
        keys, values = np.concatenate([old_k, key], axis=2), np.concatenate([old_v, value], axis=2)
        seen = np.arange(length) >= length - 3
        reference = oracle.attend(query, keys, values, softcap=2.0, allowed=seen)
        close(found["y"][row : row + 1], oracle.merge_heads(reference.context))
        close(named[PortRole.SCORES][row : row + 1, :, :, :length], reference.scores)
        close(found["present_k"][row : row + 1, :, :length], keys)


def test_grouped_packed() -> None:
    inputs = grouped((3, 3), 3)
    inputs |= {"q": array(BATCH, SEQ, (HEADS + 4) * SIZE), "k": None, "v": None}
    model = grouped_model(inputs)
    against_the_kernel(model, given(inputs))


STATIC = [entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.name.startswith("c_")]


@pytest.mark.parametrize("entry", STATIC, ids=str)
def test_static_caches_of_exporters(entry: Entry) -> None:
    """Every call of the static-cache cases gives what the operator gives; what is inside control flow is refused."""
    model = load(entry.path)
    result = expand(model)
    inside = [site.id for site in recognize(model).sites if site.path]
    assert [row.site for row in result.rows if row.status == "refused"] == inside
    for sample in entry.samples:
        expected, got = (runtime.run(item, sample, threads=1) for item in (model, result.model))
        for name, item in expected.items():
            close(got[name], item, 2e-3 if item.dtype == np.float16 else 1e-5)


def test_site_is_found_again_with_its_facts() -> None:
    """Recognition reads the written-out form as the attention that it was."""
    inputs = standard(2)
    result = expanded(one("Attention", inputs, {"y": "float32"}, scale=0.3, softcap=4.0))
    site = recognize(result.model).sites[0]
    assert (site.q_heads, site.kv_heads, site.kv_repeat, site.qk_head_dim) == (HEADS, HEADS, 2, SIZE)
    assert site.scale == pytest.approx(0.3)
    assert site.softcap == pytest.approx(4.0)
    tensors = result.rows[0].tensors
    assert site.ports[PortRole.SCORES].tensor == tensors[PortRole.SCORES]
    assert site.ports[PortRole.PROBABILITIES].tensor == tensors[PortRole.PROBABILITIES]
    assert site.branch[PortRole.KEY].tensor == tensors[PortRole.KEY] == "k"


def test_feeds_refuse_what_changes_an_output() -> None:
    """A float mask that hides a row by the lowest number: zeros in the kernel, the mean of V by the specification."""
    inputs = standard()
    inputs["mask"] = np.where(np.eye(SEQ)[:, :1] > 0, np.finfo(np.float32).min, 0).astype(np.float32).repeat(SEQ, 1)
    model = one("Attention", inputs, {"y": "float32"})
    free, compared = expand(model), expand(model, feeds=given(inputs))
    assert free.rows[0].status == "expanded"
    assert compared.rows[0].status == "refused"
    assert "differs by" in compared.rows[0].reasons[0]
    assert [node.op_type for node in compared.model.graph] == ["Attention"]


def test_sites_choose_and_unknown_ones_are_an_error() -> None:
    model = load(one("Attention", standard(), {"y": "float32"}))
    assert expand(model, sites=["/attention"]).rows[0].status == "expanded"
    assert expand(model, sites=[]).rows == ()
    with pytest.raises(ModelError, match=r"'/other'.*'/attention'"):
        expand(model, sites=["/other"])


def test_the_model_is_not_changed() -> None:
    model = load(one("Attention", standard(), {"y": "float32"}))
    before = ir.to_proto(model).SerializeToString()
    expand(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_feeds_tell_how_many_axes_a_mask_has() -> None:
    """onnxruntime.transformers.optimizer takes the mask from EmbedLayerNormalization, of which onnx infers nothing."""
    inputs = {"x": array(BATCH, SEQ, 16), "w": array(16, 48) / 4, "b": array(48), "mask": np.array([3, 2], np.int32)}
    model = one("Attention", inputs, {"y": "float32"}, domain="com.microsoft", num_heads=HEADS, constants=("w", "b"))
    model.graph.input[1].type.tensor_type.ClearField("shape")
    feeds = {name: inputs[name] for name in ("x", "mask")}
    (row,) = expand(model).rows
    assert (row.status, "how many axes the padding mask has" in row.reasons[0]) == ("refused", True)
    result = expand(model, feeds=feeds)
    assert [row.status for row in result.rows] == ["expanded"]
    expected, got = (runtime.run(load(item), feeds, threads=1)["y"] for item in (model, result.model))
    np.testing.assert_allclose(got, expected, atol=1e-5)
