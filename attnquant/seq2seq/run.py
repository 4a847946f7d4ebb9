"""quantize_seq2seq(): three models, one generation to calibrate them with."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnquant import model as models
from attnquant.errors import DataError, ModelError
from attnquant.quantization import ModelSource, Progress, QuantizationResult, quantize
from attnquant.recipe import QuantizationRecipe
from attnquant.recipe import load as load_recipe
from attnquant.seq2seq.caches import DECODER, ENCODER, WITH_PAST
from attnquant.seq2seq.generation import record
from attnquant.seq2seq.wiring import wire
from attnquant.target import Target

FILES = {ENCODER: "encoder_model.onnx", DECODER: "decoder_model.onnx", WITH_PAST: "decoder_with_past_model.onnx"}
"""Names of the files that `Seq2SeqResult.save` writes: those of optimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqResult:
    """Three quantized models and what they were calibrated with."""

    encoder: QuantizationResult
    decoder: QuantizationResult
    decoder_with_past: QuantizationResult
    said: tuple[tuple[int, ...], ...]
    """The tokens that the float models generated from each piece of data."""

    @property
    def parts(self) -> dict[str, QuantizationResult]:
        """By name: "encoder", "decoder", "decoder_with_past"."""
        return {ENCODER: self.encoder, DECODER: self.decoder, WITH_PAST: self.decoder_with_past}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the models into a folder, made where there is none; each file is written atomically.

        :raises ModelError: a file can't be written.
        """
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            msg = f"Can't make the folder {str(folder)!r}: {problem.strerror}. Name another one."
            raise ModelError(msg) from None
        for name, part in self.parts.items():
            part.save(Path(folder) / FILES[name])


def quantize_seq2seq(
    encoder: ModelSource,
    decoder: ModelSource,
    decoder_with_past: ModelSource,
    data: Iterable[Any],
    *,
    start: Sequence[int],
    end: int | None = None,
    max_tokens: int = 128,
    recipe: str | os.PathLike[str] | QuantizationRecipe = "seq2seq",
    target: str | Target | None = None,
    samples: int = 300,
    progress: Progress | None = None,
) -> Seq2SeqResult:
    """Quantize encoder, decoder and decoder with past, each calibrated with what it gets in real greedy generation.

    The float models generate from every piece of data once: the encoder runs, the decoder reads the prompt and makes the
    caches, the decoder with past goes on token by token, its self-attention caches growing, those of attention to the
    encoder as they are. What was generated is kept in memory up to 1 GB, beyond that on disk.

    :param encoder: Float models as `quantize` takes them, but no modules; none is changed.
    :param decoder: Tokens and the encoder's answer to logits (1, tokens, vocabulary) and all caches.
    :param decoder_with_past: The next token and the caches to logits and the caches that grow.
    :param data: Pieces {input of the encoder: array of one row}, at most `samples` of them; `decoder_input_ids` (1, n)
        beside them begins that piece instead of `start`.
    :param start: Tokens that the decoder begins with.
    :param end: The token that ends a text; None: every text has `max_tokens`.
    :param max_tokens: The most tokens that are generated from a piece.
    :param samples: How many samples each model is calibrated with at most; those of the decoder with past are taken evenly
        from all steps.
    :raises ModelError: a model is broken, merged or not supported; the three don't fit together: the tensor is named.
    :raises DataError: the data do not fit the encoder.
    :raises AttnQuantError: as `quantize`.
    """
    if max_tokens < 2:
        msg = f"Generation: expected max_tokens of at least 2, so that the {WITH_PAST} runs, got {max_tokens!r}. "
        raise DataError(msg + "Ask for more.")
    chosen, stage = load_recipe(recipe), progress or (lambda name: None)
    stage("reading the models")
    sources = models.load(encoder), models.load(decoder), models.load(decoder_with_past)
    wiring = wire(*sources)
    stage("generating with the float models")
    recording = record(*sources, wiring=wiring, data=data, start=start, end=end, max_tokens=max_tokens, samples=samples)
    feeds = recording.encoder(), recording.decoder(), recording.decoder_with_past(samples)
    results = [
        quantize(
            source, given, recipe=chosen, target=target, samples=samples,
            progress=lambda name, part=part: stage(f"{part}: {name}"),  # type: ignore[misc]
        )
        for part, source, given in zip((ENCODER, DECODER, WITH_PAST), sources, feeds, strict=True)
    ]  # fmt: skip
    return Seq2SeqResult(encoder=results[0], decoder=results[1], decoder_with_past=results[2], said=recording.said)
