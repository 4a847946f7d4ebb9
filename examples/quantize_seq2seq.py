"""An encoder-decoder model in int8: three files quantized together, then greedy generation, float beside int8.

    python -m examples.quantize_seq2seq encoder_model.onnx decoder_model.onnx decoder_with_past_model.onnx \\
        --data samples --out int8 --start 50257 50362 --end 50256

SAMPLES is a folder of .npz files, each with the encoder's inputs for one row. Generation knows no names: `wire` reads from
the graphs how the three files hang together.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import attnquant
from attnquant import seq2seq
from attnquant.data import load_data
from attnquant.model import load

Arrays = dict[str, np.ndarray]


class Generator:
    """Three sessions, and what each hands to the next."""

    def __init__(self, paths: Sequence[Path], wiring: seq2seq.Wiring) -> None:
        self.encoder, self.decoder, self.with_past = (
            onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in paths
        )
        self.wiring = wiring

    def tokens(self, piece: Mapping[str, np.ndarray], start: Sequence[int]) -> Iterator[int]:
        """The likeliest token behind `start`, then behind that one, and so on; without an end."""
        wiring, past, new = self.wiring, 0, np.array([start])
        answer = _run(self.encoder, piece)[wiring.hidden]
        made = _run(self.decoder, wiring.decoder.feeds(new, past=0, answer=answer, given=piece))
        caches = {cache.past: made[cache.first] for cache in wiring.caches}
        logits = made[wiring.decoder.logits]
        while True:
            past, new = past + new.shape[1], logits[:, -1:].argmax(-1)
            yield int(new[0, 0])
            given = wiring.with_past.feeds(new, past=past, answer=answer, given=piece)
            made = _run(self.with_past, given | caches)
            caches |= {cache.past: made[cache.present] for cache in wiring.caches if cache.present}
            logits = made[wiring.with_past.logits]


def _run(session: Any, feeds: Mapping[str, np.ndarray]) -> Arrays:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def main(arguments: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Quantize, write, and print what both say of the first sample; returns that."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("models", type=Path, nargs=3, metavar="MODEL", help="encoder, decoder, decoder with past")
    parser.add_argument("--data", type=Path, required=True, help="folder of .npz files: inputs of the encoder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--start", type=int, nargs="+", required=True, help="tokens that the decoder begins with")
    parser.add_argument("--end", type=int, help="the token that ends a text")
    parser.add_argument("--tokens", type=int, default=64, help="the most to generate")
    asked = parser.parse_args(arguments)
    data = load_data(asked.data)
    result = attnquant.quantize_seq2seq(*asked.models, data, start=asked.start, end=asked.end, max_tokens=asked.tokens)
    result.save(asked.out)
    wiring, said = seq2seq.wire(*map(load, asked.models)), {}
    for name, paths in {"float": asked.models, "int8": [asked.out / file for file in seq2seq.FILES.values()]}.items():
        said[name] = list[int]()
        for token in islice(Generator(paths, wiring).tokens(next(iter(data)), asked.start), asked.tokens):
            said[name].append(token)
            if token == asked.end:
                break
        print(f"{name:>5}, {sum(path.stat().st_size for path in paths):>9,} bytes:", *said[name])
    return said


if __name__ == "__main__":
    main()
