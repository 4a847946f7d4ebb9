"""Plain text as calibration samples, for models that take token ids. Needs `tokenizers` (`pip install attnquant[text]`)."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant.errors import DataError
from attnquant.feeds import Feeds, Sample

BLOCK_CHARACTERS = 2**16
"""Text is read and tokenized in blocks of whole lines of about this size, so that a file of any length can be used."""

_FILLED = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


def load_text(
    file: str | os.PathLike[str], tokenizer: str | os.PathLike[str], model: ir.Model, *, length: int | None = None
) -> Feeds:
    """Samples of one window of `length` tokens each (default: the model's fixed length, else 128), in the order of the text.

    Each is (1, length) in the integer type that the model declares, with the tokenizer's special tokens around every window;
    of the inputs input_ids, attention_mask (ones), token_type_ids and position_ids (0, 1, ...) those that the model has.
    A text shorter than one window is padded, masked, where there is no other window. `tokenizer` is a folder with
    tokenizer.json. Raises DataError for a model with other inputs, an unreadable file, and without the package.
    """
    wanted = _wanted(model)
    width = _length(wanted["input_ids"], length)
    encoder = _tokenizer(Path(tokenizer))
    encoder.enable_truncation(max_length=width)
    encoder.no_padding()
    path = Path(file)
    if not path.is_file():
        msg = f"Text file {str(path)!r}: expected a UTF-8 text file, found none of that name. Correct the path."
        raise DataError(msg)

    def read() -> Iterator[Sample]:
        short: Any = None
        complete = False
        for block in _blocks(path):
            first = _encoded(encoder, block, path)
            for window in (first, *first.overflowing):
                if len(window.ids) == width:
                    complete = True
                    yield _sample(window, wanted, width)
                elif short is None and window.ids:
                    short = window
        if not complete and short is not None:
            yield _sample(short, wanted, width)

    return Feeds.lazy(read)


def _wanted(model: ir.Model) -> dict[str, ir.Value]:
    needed = {value.name or "": value for value in model.graph.inputs if not value.is_initializer()}
    other = [name for name in needed if name not in _FILLED]
    wrong = [name for name, value in needed.items() if value.dtype not in (ir.DataType.INT64, ir.DataType.INT32)]
    if "input_ids" not in needed or other or wrong:
        msg = (
            f"Text as data: expected a model that takes input_ids and at most {list(_FILLED[1:])!r} as integers, got the "
            "inputs "
            f"{list(needed)!r}. Make the samples yourself and pass --data package.module:function."
        )
        raise DataError(msg)
    return needed


def _length(value: ir.Value, asked: int | None) -> int:
    dims = list(value.shape) if value.shape is not None else [None, None]
    if len(dims) != 2 or (isinstance(dims[0], int) and dims[0] != 1):
        msg = (
            f"Text as data: expected input {value.name!r} of shape [1, length], got {[str(dim) for dim in dims]!r}. Use "
            "--data instead."
        )
        raise DataError(msg)
    fixed = dims[1] if isinstance(dims[1], int) else None
    length = asked or fixed or 128
    if length < 3 or (fixed is not None and length != fixed):
        msg = f"Text as data: expected a window of {fixed or 'at least 3'} tokens, got {length!r}. Leave the length out."
        raise DataError(msg)
    return length


def _tokenizer(folder: Path) -> Any:
    file = folder / "tokenizer.json"
    if not file.is_file():
        msg = (
            f"Tokenizer folder {str(folder)!r}: expected a file tokenizer.json in it. Save it with the tokenizer's "
            "save_pretrained."
        )
        raise DataError(msg)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        msg = "Text as data needs the package tokenizers: run `pip install attnquant[text]`."
        raise DataError(msg) from None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as problem:
        # tokenizers raises bare Exception on files that it can't read.
        msg = f"Tokenizer {str(file)!r} can't be read: {problem!s:.200}. Expected the file that save_pretrained writes."
        raise DataError(msg) from None


def _blocks(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as handle:
            while block := handle.read(BLOCK_CHARACTERS):
                yield block + handle.readline(BLOCK_CHARACTERS)
    except (OSError, UnicodeDecodeError) as problem:
        msg = f"Text file {str(path)!r} can't be read: {problem!s:.200}. Expected UTF-8 text."
        raise DataError(msg) from None


def _encoded(encoder: Any, block: str, path: Path) -> Any:
    try:
        return encoder.encode(block)
    except Exception as problem:
        msg = (
            f"Text file {str(path)!r} can't be tokenized: {problem!s:.200}. Expected plain text and a tokenizer that fits "
            "it."
        )
        raise DataError(msg) from None


def _sample(window: Any, wanted: dict[str, ir.Value], width: int) -> dict[str, np.ndarray]:
    used = len(window.ids)
    full = {
        "input_ids": [*window.ids, *[0] * (width - used)],
        "attention_mask": [1] * used + [0] * (width - used),
        "token_type_ids": [*window.type_ids, *[0] * (width - used)],
        "position_ids": list(range(width)),
    }
    types = {name: np.int32 if value.dtype == ir.DataType.INT32 else np.int64 for name, value in wanted.items()}
    return {name: np.array([full[name]], dtype=types[name]) for name in wanted}
