"""Greedy generation by the float models, and what each of them was given meanwhile, kept once for each piece of data.

A cache of self-attention is kept at its last length: what a step was given is the beginning of it. Caches of attention to
the encoder are the same at every step. A piece takes little more than its last step, and is read without running a model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import data as samples_of
from attnquant import runtime
from attnquant.emission.widen import runnable, twin_feeds
from attnquant.errors import DataError, ModelError
from attnquant.feeds import Feeds, Sample
from attnquant.measures import Likeness
from attnquant.seq2seq.caches import DECODER, WITH_PAST
from attnquant.seq2seq.wiring import Inputs, Wiring
from attnquant.verification.decoding import EQUAL_DB, HALF_DB

PROMPT = "decoder_input_ids"
"""What a sample may hold beside the encoder's inputs: tokens (1, n) that the decoder begins with."""
_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the three models are given while they generate, as calibration samples that can be read again and again."""

    wiring: Wiring
    kept: Feeds
    """For each piece: the encoder's inputs, its answer, tokens, length of the prompt, and each cache at its last length."""
    said: tuple[tuple[int, ...], ...]
    """The tokens that were generated from each piece, the closing one included."""
    axes: Mapping[str, int]
    """{past input: axis of its positions}; caches of self-attention."""

    @property
    def steps(self) -> int:
        """How often the decoder with past ran."""
        return sum(len(tokens) - 1 for tokens in self.said)

    def encoder(self) -> Feeds:
        """Samples of the encoder."""
        return self.kept.map(lambda piece: _under(piece, "encoder"))

    def decoder(self) -> Feeds:
        """Samples of the decoder: the prompts."""
        return self.kept.map(self._prompt)

    def decoder_with_past(self, most: int) -> Feeds:
        """Samples of the decoder with past, at most so many: steps taken evenly from all."""
        steps = self.steps
        if not steps:
            msg = f"Generation: expected a step of the {WITH_PAST}, got none as every piece ended with its first token. "
            raise DataError(msg + "Give other data, or another start.")

        def read() -> Iterator[Sample]:
            index = 0
            for piece, tokens in zip(self.kept, self.said, strict=True):
                for step in range(len(tokens) - 1):
                    if (index + 1) * most // steps > index * most // steps or most >= steps:
                        yield self._step(piece, step)
                    index += 1

        return Feeds.lazy(read)

    def _prompt(self, piece: Sample) -> Arrays:
        return _given(self.wiring.decoder, piece, 0, int(piece["prompt"]))

    def _step(self, piece: Sample, step: int) -> Arrays:
        past = int(piece["prompt"]) + step
        feeds = _given(self.wiring.with_past, piece, past, 1)
        for name, array in _under(piece, "cache").items():
            axis = self.axes.get(name)
            feeds[name] = array if axis is None else np.ascontiguousarray(array.take(range(past), axis=axis))
        return feeds


def record(
    encoder: ir.Model,
    decoder: ir.Model,
    with_past: ir.Model,
    *,
    wiring: Wiring,
    data: Iterable[Any],
    start: Sequence[int],
    end: int | None,
    max_tokens: int,
    samples: int,
) -> Recording:
    """Let the models generate from every piece, once.

    :param data: Inputs of the encoder, one row each; PROMPT in place of `start` where a piece has its own.
    :raises DataError: the data do not fit the encoder, or `start` no decoder.
    :raises ModelError: a model does not run; a cache is not one that grows; the decoder with past says something else than
        the decoder.
    """
    feeds = samples_of.materialize(data, samples=samples, inputs=samples_of.input_names(encoder))
    with ExitStack() as stack:
        models = [runnable(model)[0] for model in (encoder, decoder, with_past)]
        sessions = [stack.enter_context(runtime.session(model, spinning=False)) for model in models]
        half = any(value.dtype in _HALF for value in decoder.graph.outputs)
        way = _Way(
            encoder=models[0], sessions=tuple(sessions), wiring=wiring, start=tuple(start), end=end, max_tokens=max_tokens,
            least_db=HALF_DB if half else EQUAL_DB,
        )  # fmt: skip
        kept = Feeds(way.walk(piece, f"sample {index}") for index, piece in enumerate(feeds))
        said = tuple(tuple(int(token) for token in piece["tokens"][0, int(piece["prompt"]) :]) for piece in kept)
    runtime.release_memory()
    return Recording(wiring=wiring, kept=kept, said=said, axes=way.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How to generate from one piece."""

    encoder: ir.Model
    sessions: tuple[Any, ...]
    wiring: Wiring
    start: tuple[int, ...]
    end: int | None
    max_tokens: int
    least_db: float
    axes: dict[str, int] = field(default_factory=dict)

    def walk(self, given: Sample, where: str) -> Arrays:
        """Everything that `Recording` keeps of a piece."""
        given = twin_feeds(given)
        samples_of.check_sample(given, self.encoder, where=where)
        prompt = self._prompt(given, where)
        own = {name: given[name] for name in samples_of.input_names(self.encoder)}
        piece = {f"encoder/{name}": array for name, array in own.items()}
        answer = runtime.run_session(self.sessions[0], own, [self.wiring.hidden])[self.wiring.hidden]
        if answer.shape[0] != 1:
            msg = f"Calibration data, {where}: expected one row, got {answer.shape[0]}: rows end at different tokens. "
            raise DataError(msg + "Give each row as a sample of its own.")
        piece |= {"hidden": answer, "prompt": np.array(prompt.shape[1]), "tokens": prompt}
        first = runtime.run_session(self.sessions[1], _given(self.wiring.decoder, piece, 0, prompt.shape[1]))
        caches = {cache.past: first[cache.first] for cache in self.wiring.caches}
        token = _likeliest(first[self.wiring.decoder.logits])
        for past in range(prompt.shape[1], prompt.shape[1] + self.max_tokens):
            piece["tokens"] = np.concatenate([piece["tokens"], np.array([[token]], prompt.dtype)], axis=1)
            if token == self.end or past + 1 == prompt.shape[1] + self.max_tokens:
                break
            made = runtime.run_session(self.sessions[2], _given(self.wiring.with_past, piece, past, 1) | caches)
            unchecked = not self.axes
            caches |= self._grown(caches, made)
            if unchecked:
                self._check(piece, made)
            token = _likeliest(made[self.wiring.with_past.logits])
        return piece | {f"cache/{name}": array for name, array in caches.items()}

    def _prompt(self, given: Sample, where: str) -> np.ndarray:
        longest = self.wiring.decoder.longest
        prompt = np.asarray(given.get(PROMPT, [self.start]))
        if prompt.ndim != 2 or prompt.shape[0] != 1 or not prompt.size or longest not in (None, prompt.shape[1]):
            length = "n" if longest is None else longest
            msg = f"Calibration data, {where}: expected tokens (1, {length}) to begin with, got shape {prompt.shape!r}. "
            raise DataError(msg + f"Give `start`, or {PROMPT!r} in the sample.")
        return prompt.astype(self.wiring.decoder.token_type.numpy())

    def _grown(self, past: Arrays, made: Arrays) -> Arrays:
        """The caches that came back; each is the one that went in, and what is new."""
        grown = {}
        for cache in self.wiring.caches:
            if cache.kind == "cross":
                continue
            before, after = past[cache.past], made[cache.present]
            longer = [axis for axis, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
            kept = len(longer) == 1 and after.shape[longer[0]] == before.shape[longer[0]] + 1
            if not kept or not np.array_equal(after.take(range(before.shape[longer[0]]), axis=longer[0]), before):
                msg = f"Output {cache.present!r} of the {WITH_PAST}, {list(after.shape)}: expected what {cache.past!r} had, "
                msg += f"{list(before.shape)}, and one position more behind it: a cache of fixed length, a window or "
                raise ModelError(msg + "another's cache can't be recorded. Export a cache that grows.")
            self.axes[cache.past] = longer[0]
            grown[cache.past] = after
        return grown

    def _check(self, piece: Arrays, made: Arrays) -> None:
        """The first step says what the decoder says of all tokens at once, or the two are not wired as they should be."""
        length = piece["tokens"].shape[1]
        if self.wiring.decoder.longest is not None:
            return
        whole = runtime.run_session(self.sessions[1], _given(self.wiring.decoder, piece, 0, length))
        pairs = [(cache.first, cache.present) for cache in self.wiring.caches if cache.present]
        told = {name: _alike(whole[name], made[present]) for name, present in pairs}
        last = whole[self.wiring.decoder.logits][:, -1:]
        told[self.wiring.decoder.logits] = _alike(last, made[self.wiring.with_past.logits])
        for name, decibels in told.items():
            if decibels < self.least_db:
                msg = f"{name!r} of the {DECODER}, given {length} tokens at once, and of a step of the {WITH_PAST} behind "
                msg += f"{length - 1}: expected {self.least_db:.0f} dB or more between them, got {decibels:.1f} dB. Caches "
                msg += f"were paired {({cache.first: cache.past for cache in self.wiring.caches})!r}. "
                raise ModelError(msg + "Give both decoders of one model, exported alike.")


def _alike(expected: np.ndarray, got: np.ndarray) -> float:
    if expected.shape != got.shape:
        return float("-inf")
    found = Likeness()
    found.add(expected, got)
    return float("-inf") if found.snr_db is None else found.snr_db


def _likeliest(logits: np.ndarray) -> int:
    return int(logits[0, -1].argmax())


def _under(piece: Sample, folder: str) -> Arrays:
    return {name.removeprefix(f"{folder}/"): array for name, array in piece.items() if name.startswith(f"{folder}/")}


def _given(inputs: Inputs, piece: Sample, past: int, new: int) -> Arrays:
    """What a decoder takes for `new` tokens behind `past`, caches apart."""
    tokens = piece["tokens"][:, past : past + new]
    return inputs.feeds(tokens, past=past, answer=piece["hidden"], given=_under(piece, "encoder"))
