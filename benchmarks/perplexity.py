"""Perplexity of a language model with a cache on windows of the Brown corpus.

    python -m benchmarks.perplexity MODEL.onnx [WINDOWS]

Every window is one prefill with an empty cache; every token but a window's first is scored.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks import decoding, runners, texts
from benchmarks.export import smollm2_tokenizer

LENGTH = 512
WINDOWS = 20
"""512 tokens each: 10,220 scored tokens."""

Logits = Callable[[np.ndarray], np.ndarray]


def held_out(count: int = WINDOWS, length: int = LENGTH) -> list[np.ndarray]:
    """Windows of the test documents, int64 (1, length) each."""
    encode = texts.encoder(smollm2_tokenizer())
    return [np.array([ids]) for ids in texts.windows("test", encode, length, count)]


def negative_log_likelihood(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """-log p of tokens[1:], float64 (S - 1,), from logits (S, V) of a window of tokens (S,)."""
    rows = np.asarray(logits[:-1], np.float32)
    peak = rows.max(axis=-1)
    total = np.log(np.exp(rows - peak[:, None]).sum(axis=-1, dtype=np.float64)) + peak
    return np.asarray(total - rows[np.arange(len(rows)), tokens[1:]], np.float64)


def perplexity(logits: Logits, windows: Iterable[np.ndarray]) -> tuple[float, int]:
    """(exp of the mean negative log likelihood, scored tokens).

    :param logits: From tokens (1, S) to logits (1, S, V).
    """
    scores = [negative_log_likelihood(logits(tokens)[0], tokens[0]) for tokens in windows]
    joined = np.concatenate(scores)
    return float(np.exp(joined.mean())), joined.size


def of_file(path: Path, windows: Iterable[np.ndarray], *, threads: int = 2) -> tuple[float, int]:
    """`perplexity` of a model file with the inputs of `benchmarks.decoding.start`; its first output are the logits."""
    run = runners.open_onnxruntime(path, threads=threads)
    return perplexity(lambda tokens: run(decoding.start(tokens))[0], windows)


def main(arguments: list[str]) -> int:
    """Print the perplexity of one file."""
    if not arguments:
        print(__doc__)
        return 2
    count = int(arguments[1]) if len(arguments) > 1 else WINDOWS
    found, tokens = of_file(Path(arguments[0]), held_out(count))
    print(f"perplexity {found:.4f} over {tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
