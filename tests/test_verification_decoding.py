"""Decoders with caches: prefill against decode steps with the rolled cache, and padded slots that nobody may read."""

from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import attnquant
from attnquant.errors import DataError, ModelError
from attnquant.verification.decoding import EQUAL_DB, decode
from tests.layeredmodels import DECOMPOSED, FORMS, HEAD, HEADS, decoder, encoder, samples, tokens
from tests.tinymodels import run

TARGET = "onnxruntime-cpu@1.31.1"
STEPS = 3
POISON = 50.0


@cache
def quantized(form: str) -> onnx.ModelProto:
    return ir.to_proto(attnquant.quantize(decoder(form), tokens(8, past=4), target=TARGET).model)


def by_hand(model: onnx.ModelProto, prompt: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(prefill, steps) logits of the last STEPS tokens, with loops of this test's own."""
    before, count = prompt["past.0.key"].shape[2], prompt["input_ids"].shape[1]
    names = [value.name for value in model.graph.output]

    def call(start: int, end: int, caches: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        feeds = {
            "input_ids": prompt["input_ids"][:, start:end],
            "attention_mask": prompt["attention_mask"][:, : before + end],
        }
        return dict(zip(names, run(model, {**feeds, **caches}), strict=True))

    def rolled(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name.replace("present", "past"): array for name, array in outputs.items() if name != "logits"}

    empty = {name: array for name, array in prompt.items() if name.startswith("past")}
    whole = call(0, count, empty)["logits"][:, -STEPS:]
    state, found = call(0, count - STEPS, empty), []
    for index in range(count - STEPS, count):
        state = call(index, index + 1, rolled(state))
        found.append(state["logits"][:, 0])
    return whole, np.stack(found, axis=1)


def snr(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    error = ((x - y) ** 2).sum()
    return 200.0 if error == 0 else float(min(200.0, 10 * np.log10((x**2).sum() / error)))


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("form", FORMS)
def test_steps_say_what_prefill_says(form: str, past: int) -> None:
    prompts = tokens(2, past=past, new=9, seed=8)
    report = decode(decoder(form), quantized(form), prompts, steps=STEPS)
    assert report.ok, report.failures
    assert [step.position for step in report.steps] == [-3, -2, -1]
    ours, theirs = ([by_hand(model, prompt) for prompt in prompts] for model in (decoder(form), quantized(form)))
    for index, step in enumerate(report.steps):
        x, x_steps, y, y_steps = (
            np.stack([pair[way][:, index] for pair in side]) for side in (ours, theirs) for way in (0, 1)
        )
        assert step.float_db is not None
        assert step.float_db > EQUAL_DB
        assert step.quantized_db == pytest.approx(snr(y, y_steps), abs=0.1)
        assert step.error_db == pytest.approx(snr(x_steps, y_steps), abs=0.1)
        assert step.prefill_error_db == pytest.approx(snr(x, y), abs=0.1)
    assert set(report.to_json()["steps"][0]) == {"position", "float_db", "quantized_db", "error_db", "prefill_error_db"}


def test_a_cache_that_is_not_what_prefill_saw_is_named() -> None:
    """The quantized model hands on caches of half the size: prefill says nothing of it, every step does."""
    broken = onnx.ModelProto()
    broken.CopyFrom(quantized(DECOMPOSED))
    broken.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "half"))
    for output in broken.graph.output[1:]:
        broken.graph.node.append(onnx.helper.make_node("Mul", [output.name, "half"], [f"{output.name}.halved"]))
    report = decode(decoder(DECOMPOSED), renamed(broken), tokens(2, new=9, seed=8), steps=STEPS)
    assert not report.ok
    assert len(report.failures) == STEPS
    assert all("the quantized model's step" in failure for failure in report.failures)


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """present.N.x.halved become the outputs present.N.x."""
    for output in model.graph.output[1:]:
        name = output.name
        for node in model.graph.node:
            node.input[:] = [f"{other}.whole" if other == name else other for other in node.input]
            node.output[:] = [f"{other}.whole" if other == name else other for other in node.output]
            node.output[:] = [name if other == f"{name}.halved" else other for other in node.output]
    return model


def test_errors() -> None:
    with pytest.raises(DataError, match="Ask for fewer steps"):
        decode(decoder(DECOMPOSED), quantized(DECOMPOSED), tokens(1, new=3), steps=3)
    with pytest.raises(ModelError, match="found none"):
        decode(encoder(DECOMPOSED), encoder(DECOMPOSED), samples(1), steps=1)


# ---- padded caches ------------------------------------------------------------------------------------------------------


def padded(frontiers: list[int], slots: int = 7) -> dict[str, np.ndarray]:
    """One decode step over caches of a fixed size; in each row of the batch the slots from its frontier on are padding."""
    (sample,) = tokens(1, past=slots, new=1, batch=len(frontiers), seed=11)
    for row, frontier in enumerate(frontiers):
        sample["attention_mask"][row, frontier:slots] = 0
    return sample


def poisoned(sample: dict[str, np.ndarray], row: int, slot: int) -> dict[str, np.ndarray]:
    """K and V of one slot of one row, in every layer and head, set to POISON."""
    changed = {name: array.copy() for name, array in sample.items()}
    for name, array in changed.items():
        if name.startswith("past"):
            assert array.shape[1::2] == (HEADS, HEAD)
            array[row, :, slot] = POISON
    return changed


@pytest.mark.parametrize("kind", ["float", "quantized"])
@pytest.mark.parametrize("form", FORMS)
def test_poison_beyond_the_frontier_changes_nothing(form: str, kind: str) -> None:
    model = decoder(form) if kind == "float" else quantized(form)
    frontiers = [4, 2, 6]
    sample = padded(frontiers)
    clean = run(model, sample)[0]
    assert np.isfinite(clean).all()
    for row, frontier in enumerate(frontiers):
        for slot in range(7):
            logits = run(model, poisoned(sample, row, slot))[0]
            others = [index for index in range(len(frontiers)) if index != row]
            np.testing.assert_array_equal(logits[others], clean[others])
            if slot >= frontier:
                np.testing.assert_array_equal(logits[row], clean[row])
            else:  # the control: the same poison where the model looks
                assert np.abs(logits[row] - clean[row]).max() > 0.05
