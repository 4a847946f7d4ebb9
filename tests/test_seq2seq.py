"""Encoder, decoder and decoder with past: wired, recorded while they generate, quantized together."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import attnquant
from attnquant import model as models
from attnquant import report, seq2seq
from attnquant.cli import main
from attnquant.roles import PortRole
from tests import seq2seqmodels as tiny
from tests.tinymodels import run

TOKENS = 16
Change = Callable[[onnx.ModelProto], None]


def trio(**changes: Change) -> list[ir.Model]:
    """Encoder, decoder and with_past, loaded, some changed."""
    protos = {"encoder": tiny.encoder(), "decoder": tiny.decoder(past=False), "with_past": tiny.decoder(past=True)}
    for name, change in changes.items():
        copied = onnx.ModelProto()
        copied.CopyFrom(protos[name])
        change(copied)
        protos[name] = copied
    return [models.load(proto) for proto in protos.values()]


def recorded(data: Sequence[Mapping[str, np.ndarray]], parts: list[ir.Model], **options: object) -> seq2seq.Recording:
    settings = {"start": tiny.START, "end": tiny.END, "max_tokens": TOKENS, "samples": 300, **options}
    return seq2seq.record(*parts, wiring=seq2seq.wire(*parts), data=data, **settings)  # type: ignore[arg-type]


@cache
def recording() -> seq2seq.Recording:
    return recorded(tiny.pieces(4), trio())


def named(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip([value.name for value in model.graph.output], run(model, feeds), strict=True))


def whole(piece: Mapping[str, np.ndarray], tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """The decoder's answer to all of these tokens at once: no cache goes in."""
    (hidden,) = run(tiny.encoder(), dict(piece))
    feeds = {"input_ids": np.array([tokens]), "encoder_attention_mask": piece["attention_mask"]}
    return named(tiny.decoder(past=False), {**feeds, "encoder_hidden_states": hidden})


def test_caches_are_paired_by_attention() -> None:
    wiring = seq2seq.wire(*trio())
    expected = [
        seq2seq.Cache(
            kind=kind, role=PortRole(part), first=f"present.{layer}.{kind}.{part}", past=f"past.{layer}.{kind}.{part}",
            present=f"present.{layer}.{kind}.{part}" if kind == "self" else "",
        )
        for layer in range(2) for kind in ("self", "cross") for part in ("key", "value")
    ]  # fmt: skip
    assert list(wiring.caches) == expected
    assert (wiring.hidden, wiring.decoder.hidden, wiring.with_past.hidden) == (
        "last_hidden_state", "encoder_hidden_states", ""
    )  # fmt: skip
    assert wiring.with_past.shared == {"encoder_attention_mask": "attention_mask"}
    assert (wiring.with_past.positions, wiring.with_past.flat) == (("cache_position",), {"cache_position"})


def test_caches_that_are_handed_on_are_the_same_caches() -> None:
    parts = trio()
    handed = models.load(tiny.decoder(past=True, passed_on=True))
    assert seq2seq.wire(parts[0], parts[1], handed) == seq2seq.wire(*parts)


def test_names_that_say_nothing_are_not_needed() -> None:
    """The graphs alone: caches of the decoder with past called in another order than they are read."""
    names = {name: f"memory_{9 - index}" for index, name in enumerate(tiny.cache_names("past"))}

    def renamed(model: onnx.ModelProto) -> None:
        for value in model.graph.input:
            value.name = names.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    caches = seq2seq.wire(*trio(with_past=renamed)).caches
    assert [cache.first for cache in caches] == tiny.cache_names("present")
    assert [cache.past for cache in caches] == list(names.values())


def test_what_is_said_is_what_the_decoder_says_without_a_cache() -> None:
    for piece, said in zip(tiny.pieces(4), recording().said, strict=True):
        tokens = list(tiny.START)
        while len(tokens) <= TOKENS and tokens[-1] != tiny.END:
            tokens.append(int(whole(piece, tokens)["logits"][0, -1].argmax()))
        assert said == tuple(tokens[1:])
    assert len({tokens for said in recording().said for tokens in said}) > 8, "a model that says one thing tests nothing"


def test_every_step_is_recorded_with_the_caches_of_its_beginning() -> None:
    """A step's caches against those that the decoder makes of all tokens before it at once."""
    samples = iter(recording().decoder_with_past(300))
    for piece, said in zip(tiny.pieces(4), recording().said, strict=True):
        tokens = [*tiny.START, *said]
        for past in range(1, len(tokens) - 1):
            sample, made = next(samples), whole(piece, tokens[:past])
            assert sample.keys() == {value.name for value in tiny.decoder(past=True).graph.input}
            assert sample["input_ids"].tolist() == [[tokens[past]]]
            assert sample["cache_position"].tolist() == [past]
            assert (sample["encoder_attention_mask"] == piece["attention_mask"]).all()
            for held in recording().wiring.caches:
                assert sample[held.past].shape == made[held.first].shape
                np.testing.assert_allclose(sample[held.past], made[held.first], atol=2e-5)
    assert next(samples, None) is None


def test_encoder_and_decoder_are_recorded_with_their_inputs() -> None:
    for piece, ours, first in zip(tiny.pieces(4), recording().encoder(), recording().decoder(), strict=True):
        assert {name: array.tolist() for name, array in ours.items()} == {k: v.tolist() for k, v in piece.items()}
        assert first["input_ids"].tolist() == [list(tiny.START)]
        np.testing.assert_array_equal(first["encoder_hidden_states"], run(tiny.encoder(), piece)[0])
        np.testing.assert_array_equal(first["encoder_attention_mask"], piece["attention_mask"])


def test_a_piece_may_begin_with_tokens_of_its_own_and_steps_are_taken_evenly() -> None:
    first, second = tiny.pieces(2)
    made = recorded([{**first, "decoder_input_ids": np.array([[5, 6, 7]])}, second], trio(), end=None)
    assert [sample["input_ids"].tolist() for sample in made.decoder()] == [[[5, 6, 7]], [[1]]]
    assert (made.steps, [len(said) for said in made.said]) == (2 * (TOKENS - 1), [TOKENS] * 2)
    lengths = [int(sample["cache_position"][0]) for sample in made.decoder_with_past(10)]
    assert lengths == [5, 8, 11, 14, 17, 3, 6, 9, 12, 15]


def test_what_does_not_fit_in_memory_is_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnquant.feeds.MAX_HELD_BYTES", 0)
    stored = recorded(tiny.pieces(4), trio())
    for ours, theirs in zip(stored.decoder_with_past(300), recording().decoder_with_past(300), strict=True):
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array)


# ---- Quantized


@cache
def quantized() -> attnquant.Seq2SeqResult:
    return attnquant.quantize_seq2seq(
        tiny.encoder(), tiny.decoder(past=False), tiny.decoder(past=True), iter(tiny.pieces(24)),
        start=tiny.START, end=tiny.END, max_tokens=TOKENS,
    )  # fmt: skip


def test_all_three_are_quantized_and_caches_stay_float() -> None:
    for name, part in quantized().parts.items():
        found = attnquant.check(part.model)
        assert found.ok, (name, found.problems)
        assert all(row.quantized.keys() == {PortRole.QUERY, PortRole.KEY} for row in found.account(name).rows)
    kinds = [(site.kind, site.past) for site in quantized().decoder_with_past.sites]
    assert kinds == [("self", "concat"), ("cross", "input")] * 2
    floats = {value.name: value for value in quantized().decoder_with_past.model.graph.outputs}
    for held in seq2seq.wire(*trio()).caches:
        assert not held.present or floats[held.present].dtype == ir.DataType.FLOAT


def test_caches_pass_the_quantized_decoder_untouched() -> None:
    """What went in comes back bit for bit; the new position is that of a quantized linear."""
    step = next(iter(recording().decoder_with_past(3)))
    made = named(models.to_proto(quantized().decoder_with_past.model), step)
    floats = named(tiny.decoder(past=True), step)
    for held in recording().wiring.caches:
        if held.present:
            length = step[held.past].shape[2]
            np.testing.assert_array_equal(made[held.present][:, :, :length], step[held.past])
            new, expected = made[held.present][:, :, length:], floats[held.present][:, :, length:]
            assert new.shape == expected.shape == (1, 4, 1, 8)
            assert 0 < np.abs(new - expected).max() < 0.2 * np.abs(expected).max()


def test_the_quantized_models_generate_as_float_does(tmp_path: Path) -> None:
    """Step by step on caches of their own, from the files, given float's tokens; pieces that did not calibrate."""
    quantized().save(tmp_path / "new")
    paths = [str(tmp_path / "new" / name) for name in seq2seq.FILES.values()]
    reference = recorded(data := tiny.pieces(4, seed=9), trio())
    signal = error = same = steps = 0.0
    for piece, said in zip(data, reference.said, strict=True):
        (hidden,) = run(paths[0], piece)
        mask = piece["attention_mask"]
        feeds = {"input_ids": np.array([tiny.START]), "encoder_attention_mask": mask, "encoder_hidden_states": hidden}
        logits, *made = run(paths[1], feeds)
        caches = dict(zip(tiny.cache_names("past"), made, strict=True))
        for index, token in enumerate(said):
            expected = whole(piece, [*tiny.START, *said[:index]])["logits"][0, -1]
            signal, error = signal + (expected**2).sum(), error + ((expected - logits[0, -1]) ** 2).sum()
            same, steps = same + (logits[0, -1].argmax() == token), steps + 1
            step = {"input_ids": np.array([[token]]), "cache_position": np.array([index + 1])}
            logits, *made = run(paths[2], {**step, "encoder_attention_mask": mask, **caches})
            caches |= dict(zip(tiny.cache_names("past", ("self",)), made, strict=True))
    assert 10 * np.log10(signal / error) > 20
    assert same / steps > 0.85
    assert quantized().said[0] == recorded(tiny.pieces(1), trio()).said[0]


# ---- Half precision


def halved(source: onnx.ModelProto, dtype: ir.DataType) -> onnx.ModelProto:
    """The same in another precision: weights, inputs and outputs."""
    model = models.load(source)
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(dtype)
            if value.const_value is not None:
                array = np.maximum(value.const_value.numpy(), -3e4).astype(dtype.numpy())
                value.const_value = ir.tensor(array, dtype=dtype, name=value.name)
    model.graph.opset_imports[""] = 23 if dtype == ir.DataType.BFLOAT16 else 18
    return models.to_proto(model)


@pytest.mark.parametrize(("dtype", "same"), [(ir.DataType.FLOAT16, 8), (ir.DataType.BFLOAT16, 3)])
def test_half_precision_stays(dtype: ir.DataType, same: int) -> None:
    """bfloat16, for which no CPU has kernels, generates in float32 with its weights."""
    parts = [halved(part, dtype) for part in (tiny.encoder(), tiny.decoder(past=False), tiny.decoder(past=True))]
    result = attnquant.quantize_seq2seq(*parts, tiny.pieces(4), start=tiny.START, end=tiny.END, max_tokens=8)
    assert result.said[0][:same] == recording().said[0][:same]
    for name, part in result.parts.items():
        assert attnquant.check(part.model).ok, name
        assert {value.dtype for value in part.model.graph.outputs} == {dtype}


# ---- On the command line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    parts = tiny.encoder(), tiny.decoder(past=False), tiny.decoder(past=True)
    for part, name in zip(parts, seq2seq.FILES.values(), strict=True):
        onnx.save(part, tmp_path / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "int8").mkdir()
    for index, piece in enumerate(tiny.pieces(8)):
        np.savez(tmp_path / "data" / f"{index}.npz", **piece)
    return tmp_path


def arguments(folder: Path, output: Path, *more: str) -> list[str]:
    files = [str(folder / name) for name in seq2seq.FILES.values()]
    known = ["-o", str(output), "--data", str(folder / "data"), "--start", "1", "--end", "2"]
    return ["quantize-seq2seq", *files, *known, *more]


def test_the_command_writes_three_models_and_three_accounts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, folder / "int8", "--max-tokens", "8", "--format", "json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: [site["status"] for site in account["sites"]] for name, account in found.items()} == {
        "encoder": ["quantized"] * 2, "decoder": ["quantized"] * 4, "decoder_with_past": ["quantized"] * 4
    }  # fmt: skip
    written = attnquant.quantize_seq2seq(
        *(folder / name for name in seq2seq.FILES.values()), tiny.pieces(8), start=[1], end=2, max_tokens=8
    )
    for name, part in written.parts.items():
        saved = onnx.load(folder / "int8" / seq2seq.FILES[name])
        assert saved.graph == models.to_proto(part.model).graph
    text = report.render(written, "markdown")
    assert text.count("Linears: ") == 3
    assert "decoder_with_past" in text


def test_the_command_makes_its_folder_and_overwrites_no_input(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("mine")
    assert main(arguments(folder, taken)) == 1
    assert "expected a folder or a new name, got a file" in capsys.readouterr().err
    assert taken.read_text() == "mine"
    assert main(arguments(folder, tmp_path / "none" / "int8")) == 1
    assert "expected an existing folder" in capsys.readouterr().err
    assert main(arguments(folder, tmp_path / "new", "--max-tokens", "8")) == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == set(seq2seq.FILES.values())


def test_the_command_says_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(folder, folder)) == 1
    assert "is the model itself" in capsys.readouterr().err
    assert main([*arguments(folder, folder / "int8"), "--start", "one"]) == 1
    assert "--start: expected token ids like 50257,50362, got 'one'" in " ".join(capsys.readouterr().err.split())
    onnx.save(tiny.encoder(), folder / "decoder_model.onnx")
    assert main(arguments(folder, folder / "int8")) == 1
    assert "attention_mask" in capsys.readouterr().err
    assert not list((folder / "int8").iterdir())
