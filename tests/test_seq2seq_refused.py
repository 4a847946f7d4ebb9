"""What quantize_seq2seq refuses, and that it names the tensor."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant import seq2seq
from attnquant.errors import DataError, ModelError
from tests import seq2seqmodels as tiny
from tests.layeredmodels import HEAD, HEADS
from tests.test_seq2seq import Change, recorded, trio


def renamed(**names: str) -> Change:
    """A change: tensors called otherwise everywhere, all at once; "." is written "__"."""
    wanted = {old.replace("__", "."): new.replace("__", ".") for old, new in names.items()}

    def change(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            value.name = wanted.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [wanted.get(name, name) for name in node.input]
            node.output[:] = [wanted.get(name, name) for name in node.output]

    return change


def without_output(name: str) -> Change:
    def change(model: onnx.ModelProto) -> None:
        kept = [value for value in model.graph.output if value.name != name]
        del model.graph.output[:]
        model.graph.output.extend(kept)

    return change


def with_input(name: str, kind: int, shape: list[object]) -> Change:
    return lambda model: model.graph.input.append(tiny.info(name, shape, kind))


def redeclared(name: str, shape: list[object], kind: int = TensorProto.FLOAT) -> Change:
    def change(model: onnx.ModelProto) -> None:
        (value,) = (value for value in (*model.graph.input, *model.graph.output) if value.name == name)
        value.CopyFrom(tiny.info(name, shape, kind))

    return change


def shifted(name: str) -> Change:
    """A change: a weight is another one."""

    def change(model: onnx.ModelProto) -> None:
        (tensor,) = (tensor for tensor in model.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), name))

    return change


def behind_if(name: str) -> Change:
    """A change: an output is what an If makes."""

    def change(model: onnx.ModelProto) -> None:
        renamed(**{name: "inner"})(model)
        del model.graph.output[-1]
        model.graph.output.append(tiny.info(name, [1, HEADS, None, HEAD]))
        branch = helper.make_graph([helper.make_node("Identity", ["inner"], ["out"])], "branch", [], [tiny.info("out", [])])
        model.graph.initializer.append(numpy_helper.from_array(np.array(True), "always"))
        model.graph.node.append(helper.make_node("If", ["always"], [name], then_branch=branch, else_branch=branch))

    return change


WIRING = [
    ("decoder", with_input("use_cache_branch", TensorProto.BOOL, [1]), "'use_cache_branch' belongs to a merged decoder"),
    ("decoder", behind_if("present.1.cross.value"), r"'present\.1\.cross\.value' belongs to a merged decoder"),
    ("decoder", with_input("mystery", TensorProto.FLOAT, [1]), "Input 'mystery' of the decoder, FLOAT"),
    ("with_past", with_input("beams", TensorProto.INT64, [1]), "Input 'beams' of the decoder_with_past, INT64"),
    (
        "decoder", without_output("present.1.cross.value"),
        r"cross-attention.*'present\.1\.cross\.key'\].*'past\.1\.cross\.value'",
    ),
    ("with_past", without_output("present.0.self.key"), r"'past\.0\.self\.key' of the decoder_with_past.*longer cache"),
    (
        "with_past", renamed(past__0__cross__key="past.1.cross.key", past__1__cross__key="past.0.cross.key"),
        r"'past\.1\.cross\.key' of the decoder_with_past: its name says.*'present\.1\.cross\.key'.*'present\.0\.cross\.key'",
    ),
    (
        "with_past", renamed(past__1__self__key="past.1.self.value", past__1__self__value="past.1.self.key"),
        r"'past\.1\.self\.value'.*its name says.*'present\.1\.self\.value'",
    ),
    (
        "with_past", redeclared("past.0.self.value", [1, HEADS, "past", 2 * HEAD]),
        r"Input 'past\.0\.self\.value' of the decoder_with_past is FLOAT.*'present\.0\.self\.value' of the decoder",
    ),
    (
        "decoder", redeclared("encoder_hidden_states", [1, "source", 99]),
        "Input 'encoder_hidden_states' of the decoder is FLOAT.*'last_hidden_state' of the encoder",
    ),
    ("with_past", redeclared("logits", [1, 48]), "Output 'logits' of the decoder_with_past.*expected logits"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "change", "words"), WIRING, ids=[words[:50] for _, _, words in WIRING])
def test_models_that_do_not_fit_together_are_refused_by_name(part: str, change: Change, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        seq2seq.wire(*trio(**{part: change}))


def test_another_models_decoder_is_found_by_what_it_says() -> None:
    parts = trio(with_past=shifted("decoder1.self.out.weight"))
    with pytest.raises(ModelError, match=r"^'logits' of the decoder, given 2 tokens.*60 dB"):
        recorded(tiny.pieces(1), parts)
    parts = trio(with_past=shifted("decoder0.value.weight"))
    with pytest.raises(ModelError, match=r"^'present\.0\.self\.value' of the decoder"):
        recorded(tiny.pieces(1), parts)


def test_a_cache_that_does_not_grow_is_refused() -> None:
    """The first position falls out of a window: present is as long as past."""

    def window(model: onnx.ModelProto) -> None:
        (concat,) = (node for node in model.graph.node if node.output[0] == "present.1.self.key")
        concat.input[0] = "shorter"
        model.graph.initializer.append(numpy_helper.from_array(np.array([1], np.int64), "one1"))
        model.graph.initializer.append(numpy_helper.from_array(np.array([99], np.int64), "end99"))
        model.graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "axis2"))
        cut = helper.make_node("Slice", ["past.1.self.key", "one1", "end99", "axis2"], ["shorter"], name="cut")
        model.graph.node.insert(list(model.graph.node).index(concat), cut)

    with pytest.raises(ModelError, match=r"'p(ast|resent)\.1\.self\.key'"):
        recorded(tiny.pieces(1), trio(with_past=window))


def test_a_cache_in_another_order_is_refused() -> None:
    """The new position in front: attention does not care, what is recorded would be wrong."""

    def reversed_concat(model: onnx.ModelProto) -> None:
        (concat,) = (node for node in model.graph.node if node.output[0] == "present.0.self.value")
        concat.input[:] = list(concat.input)[::-1]

    words = r"^Output 'present\.0\.self\.value' of the decoder_with_past.*expected what 'past\.0\.self\.value' had"
    with pytest.raises(ModelError, match=words):
        recorded(tiny.pieces(1), trio(with_past=reversed_concat))


def test_data_that_do_not_fit_are_refused() -> None:
    (piece,) = tiny.pieces(1)
    with pytest.raises(DataError, match=r"sample 0.*missing.*'attention_mask'"):
        recorded([{"input_ids": piece["input_ids"]}], trio())
    with pytest.raises(DataError, match=r"sample 0: expected tokens \(1, n\).*shape \(1, 0\)"):
        recorded([piece], trio(), start=())
    ended = recorded([piece], trio(), end=recorded([piece], trio()).said[0][0])
    with pytest.raises(DataError, match="expected a step of the decoder_with_past"):
        ended.decoder_with_past(300)
    with pytest.raises(DataError, match=r"max_tokens of at least 2, .* got 1"):
        attnquant.quantize_seq2seq(*trio(), [piece], start=tiny.START, max_tokens=1)


def test_rows_are_given_one_by_one() -> None:
    def batched(model: onnx.ModelProto) -> None:
        for name in ("input_ids", "attention_mask"):
            redeclared(name, ["batch", "source"], TensorProto.INT64)(model)

    double = {name: np.repeat(array, 2, axis=0) for name, array in tiny.pieces(1)[0].items()}
    with pytest.raises(DataError, match="sample 0: expected one row, got 2"):
        recorded([double], trio(encoder=batched))


