"""One buffer for past and present: what a generation loop gets is what the model with separate caches gives."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from attnquant import model as models
from attnquant.errors import ModelError
from attnquant.kvcache import quantize_caches
from attnquant.recipe import KvCacheConfig
from attnquant.rewrite import expand, fuse
from attnquant.rewrite.buffers import BUFFER_KEY
from attnquant.target import parse_target
from tests.layeredmodels import DECOMPOSED, VOCABULARY, decoder, tokens

CORPUS = Path(__file__).parent / "corpus"
GROUPED = "com.microsoft::GroupQueryAttention"
ROOM, PROMPT, STEPS = 24, 5, 4
LLAMA = CORPUS / "llama_past_sdpa-dynamonoopt-18.onnx"


def pairs(session: onnxruntime.InferenceSession) -> list[tuple[str, str]]:
    """(past, present) names, in the order of the model."""
    past = [item.name for item in session.get_inputs() if "past" in item.name]
    return list(zip(past, [item.name for item in session.get_outputs()][1:], strict=True))


def feeds_of(session: onnxruntime.InferenceSession, ids: np.ndarray, start: int, stop: int) -> dict[str, np.ndarray]:
    known = {"input_ids": ids[:, start:stop], "attention_mask": np.ones((len(ids), stop), np.int64)}
    known["position_ids"] = np.broadcast_to(np.arange(start, stop), (len(ids), stop - start)).copy()
    return {item.name: known[item.name] for item in session.get_inputs() if item.name in known}


def spans(session: onnxruntime.InferenceSession, ids: np.ndarray) -> list[tuple[int, int]]:
    """The prompt, two tokens at once where the batch allows, then single ones; or single ones alone where it must."""
    if session.get_inputs()[0].shape[1] == 1:
        return [(step, step + 1) for step in range(PROMPT + STEPS)]
    second = PROMPT + (2 if len(ids) == 1 else 1)
    return [(0, PROMPT), (PROMPT, second)] + [(step, step + 1) for step in range(second, PROMPT + STEPS)]


def calls(session: onnxruntime.InferenceSession, ids: np.ndarray, dtype: type = np.float32) -> list[np.ndarray]:
    shapes = {item.name: item.shape for item in session.get_inputs()}
    cache = {past: np.zeros((len(ids), shapes[past][1], 0, shapes[past][3]), dtype) for past, _ in pairs(session)}
    found = []
    for start, stop in spans(session, ids):
        logits, *present = session.run(None, feeds_of(session, ids, start, stop) | cache)
        cache = {past: array for (past, _), array in zip(pairs(session), present, strict=True)}
        found.append(logits)
    return found


def in_one_buffer(session: onnxruntime.InferenceSession, ids: np.ndarray, dtype: type = np.float32) -> list[np.ndarray]:
    """The same by one buffer of ROOM positions for each cache, whose unused part is poisoned."""
    shapes = {item.name: item.shape for item in session.get_inputs()}
    buffers = {}
    for past, _ in pairs(session):
        poison = np.full((len(ids), shapes[past][1], ROOM, shapes[past][3]), 77, dtype)
        buffers[past] = onnxruntime.OrtValue.ortvalue_from_numpy(poison)
    found, logits = [], session.get_outputs()[0].name
    for start, stop in spans(session, ids):
        binding = session.io_binding()
        binding.bind_output(logits)
        for name, array in feeds_of(session, ids, start, stop).items():
            binding.bind_cpu_input(name, array)
        for past, present in pairs(session):
            binding.bind_ortvalue_input(past, buffers[past])
            binding.bind_ortvalue_output(present, buffers[past])
        session.run_with_iobinding(binding)
        found.append(binding.get_outputs()[0].numpy())
    return found


def opened(model: object) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(ir.to_proto(models.load(model)).SerializeToString())


def ids(batch: int, top: int = VOCABULARY) -> np.ndarray:
    return np.random.default_rng(1).integers(1, top, (batch, PROMPT + STEPS))


def close(expected: list[np.ndarray], got: list[np.ndarray]) -> None:
    for one, other in zip(expected, got, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4 * float(np.abs(one).max()))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_shared_buffer_gives_what_separate_caches_give(batch: int) -> None:
    sequence = ids(batch)
    made = fuse(decoder(DECOMPOSED), to=GROUPED, feeds=tokens(1, past=3, new=1)[0], shared_cache=True)
    assert made.model.metadata_props[BUFFER_KEY]
    session = opened(made.model)
    expected = calls(opened(decoder(DECOMPOSED)), sequence)
    close(expected, calls(session, sequence))
    close(expected, in_one_buffer(session, sequence))


def test_an_exported_decoder_shares_its_buffers() -> None:
    """Its positions and masks come from the length of the cache."""
    sequence = ids(1, 20)
    made = fuse(LLAMA, to=GROUPED, shared_cache=True)
    assert {row.status for row in made.rows} == {"fused"}
    expected = calls(opened(LLAMA), sequence)
    close(expected, in_one_buffer(opened(made.model), sequence))


def test_without_the_option_the_buffer_is_taken_for_tokens() -> None:
    """The negative control: what the option is for."""
    session, sequence = opened(fuse(LLAMA, to=GROUPED).model), ids(1, 20)
    expected = calls(opened(LLAMA), sequence)
    try:
        got = in_one_buffer(session, sequence)
    except Exception:  # the runtime's own error: a mask of another width
        return
    assert max(float(np.abs(one - other).max()) for one, other in zip(expected, got, strict=True)) > 0.01


@pytest.mark.parametrize(("dtype", "stored"), [("int8", np.int8), ("int4", np.uint8)])
def test_integer_caches_share_their_buffers_too(dtype: str, stored: type) -> None:
    sequence, data = ids(2), [tokens(1, past=9, new=1, seed=seed)[0] for seed in range(4)]
    model = fuse(decoder(DECOMPOSED), to=GROUPED, feeds=data[0], shared_cache=True).model
    quantize_caches(model, data, KvCacheConfig(dtype=dtype), parse_target("onnxruntime-cpu@1.32.0"))  # type: ignore[arg-type]
    close(calls(opened(model), sequence, stored), in_one_buffer(opened(model), sequence, stored))


def without(name: str, other: str = "other") -> onnx.ModelProto:
    """The decoder with another name for an input."""
    proto = onnx.ModelProto()
    proto.CopyFrom(decoder(DECOMPOSED))
    next(item for item in proto.graph.input if item.name == name).name = other
    for node in proto.graph.node:
        node.input[:] = [other if item == name else item for item in node.input]
    return proto


@pytest.mark.parametrize("name", ["attention_mask", "input_ids"])
def test_without_mask_or_tokens_it_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="Shared buffers: expected"):
        fuse(without(name), to=GROUPED, shared_cache=True)


def test_a_cache_that_something_else_reads_is_refused_by_name() -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(decoder(DECOMPOSED))
    proto.graph.node.add(op_type="ReduceMax", name="peek", input=["past.0.key"], output=["peeked"])
    proto.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("peeked", onnx.TensorProto.FLOAT, None))
    with pytest.raises(ModelError, match=r"'past.0.key'.*'peek'"):
        fuse(proto, to=GROUPED, shared_cache=True)


def with_shape(place: str, **bounds: int) -> onnx.ModelProto:
    """The decoder with an output "size": the shape of a cache, from the graph itself or from the body of an If."""
    proto, info = onnx.ModelProto(), onnx.helper.make_tensor_value_info
    proto.CopyFrom(decoder(DECOMPOSED))
    axes = len(range(4)[bounds.get("start", 0) : bounds.get("end", 4)])
    if place == "graph":
        proto.graph.node.append(onnx.helper.make_node("Shape", ["past.0.key"], ["size"], "peek", **bounds))
    else:
        bodies = {}
        for name in ("then", "else"):
            node = onnx.helper.make_node("Shape", ["past.0.key"], [f"{name}_size"], f"{name}_peek", **bounds)
            ends = [info(f"{name}_size", onnx.TensorProto.INT64, [axes])]
            bodies[f"{name}_branch"] = onnx.helper.make_graph([node], name, [], ends)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(True), "truth"))
        proto.graph.node.append(onnx.helper.make_node("If", ["truth"], ["size"], "choice", **bodies))
    proto.graph.output.append(info("size", onnx.TensorProto.INT64, [axes]))
    return proto


@pytest.mark.parametrize("place", ["graph", "body"])
@pytest.mark.parametrize(("bounds", "axes"), [({}, [2, 4, 7, 8]), ({"start": 2, "end": 3}, [7]), ({"start": -2}, [7, 8])])
def test_a_length_that_is_an_output_is_that_of_the_past(place: str, bounds: dict[str, int], axes: list[int]) -> None:
    """The cache has 7 positions, and the mask says so; then it has 9, and the mask says 7 all the same."""
    session = opened(fuse(with_shape(place, **bounds), to=GROUPED, shared_cache=True).model)
    feeds = tokens(1, past=7, new=1)[0]
    assert session.run(["size"], feeds)[0].tolist() == axes
    longer = tokens(1, past=9, new=1)[0] | {"attention_mask": feeds["attention_mask"]}
    assert session.run(["size"], longer)[0].tolist() == axes


def test_a_cache_that_is_an_output_is_refused() -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(decoder(DECOMPOSED))
    proto.graph.output.append(next(item for item in proto.graph.input if item.name == "past.1.value"))
    with pytest.raises(ModelError, match=r"'past.1.value'.*an output of the model"):
        fuse(proto, to=GROUPED, shared_cache=True)


def test_the_encoder_s_mask_is_not_taken_for_the_decoder_s() -> None:
    with pytest.raises(ModelError, match=r"one input .* that is a mask, got \[\]"):
        fuse(without("attention_mask", "encoder_attention_mask"), to=GROUPED, shared_cache=True)


def test_a_mask_of_the_new_tokens_alone_is_refused() -> None:
    proto = onnx.ModelProto()
    proto.CopyFrom(decoder(DECOMPOSED))
    mask = next(item for item in proto.graph.input if item.name == "attention_mask")
    mask.type.tensor_type.shape.dim[1].dim_param = "new"
    with pytest.raises(ModelError, match="past tokens are not in it"):
        fuse(proto, to=GROUPED, shared_cache=True)


def test_where_nothing_is_fused_the_rows_say_why() -> None:
    """Cross attention, which the operator does not take."""
    made = fuse(CORPUS / "torch_object_queries_sdpa-dynamostatic-23.onnx", to=GROUPED, shared_cache=True)
    assert {row.status for row in made.rows} == {"refused"}
    assert all(row.reasons for row in made.rows)
    assert BUFFER_KEY not in made.model.metadata_props


def test_what_is_written_out_again_does_not_claim_one_buffer() -> None:
    """The same values by caches apart; a Concat can't append in place."""
    shared = fuse(decoder(DECOMPOSED), to=GROUPED, shared_cache=True).model
    assert fuse(shared, to=GROUPED).model.metadata_props[BUFFER_KEY]
    plain = expand(shared).model
    assert BUFFER_KEY not in plain.metadata_props
    assert BUFFER_KEY not in fuse(shared, to="ai.onnx::Attention@23").model.metadata_props
    close(calls(opened(decoder(DECOMPOSED)), ids(2)), calls(opened(plain), ids(2)))


def test_other_operators_have_no_buffer_to_share() -> None:
    with pytest.raises(ModelError, match="GroupQueryAttention"):
        fuse(decoder(DECOMPOSED), to="ai.onnx::Attention@23", shared_cache=True)
