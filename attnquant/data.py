"""Calibration data: what `--data` names, and whether a sample fits a model.

One sample is {input name: array} with the batch dimension included. Files are .npz, never unpickled.
"""

import importlib
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant.errors import DataError
from attnquant.feeds import Feeds, Sample, as_sample, working_folder_importable
from attnquant.images import ImageInput, image_input, load_images
from attnquant.text import load_text

__all__ = [
    "Feeds",
    "ImageInput",
    "Sample",
    "as_sample",
    "check_sample",
    "checked",
    "first_sample",
    "image_input",
    "input_names",
    "load_data",
    "load_images",
    "load_text",
    "materialize",
]

MAX_SAMPLE_BYTES = 2**33
"""What one .npz file may unpack into (8 GB)."""


def load_data(spec: str | os.PathLike[str]) -> Feeds:
    """The samples that `FILE.npz`, `DIR` (its .npz files by name) or `package.module:function` names, read lazily.

    The function is called without arguments and returns an iterable of samples; its module may lie in the working folder.
    Nothing else is imported. Raises DataError for anything else, and while reading for a broken file.
    """
    path = Path(spec)
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            msg = f"Data folder {str(path)!r}: expected .npz files, one per sample, got none. Save samples with numpy.savez."
            raise DataError(msg)
        return Feeds.lazy(lambda: (load_npz(file) for file in files))
    if path.is_file():
        load_npz(path)
        return Feeds.lazy(lambda: iter([load_npz(path)]))
    module, colon, function = str(spec).partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        msg = (
            f"Data {str(spec)!r}: expected FILE.npz, a folder of .npz files, or package.module:function, and found none of "
            "that name. Correct the path."
        )
        raise DataError(msg)
    return _from_function(module, function)


def load_npz(path: Path) -> dict[str, np.ndarray]:
    """One sample of a .npz file, never unpickled. Raises DataError for anything else than named arrays of numbers."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_SAMPLE_BYTES:
            msg = (
                f"Data file {str(path)!r} unpacks into {size:,} bytes: expected at most {MAX_SAMPLE_BYTES:,} for one "
                "sample. Store one sample per file."
            )
            raise DataError(msg)
        with np.load(path, allow_pickle=False) as arrays:
            return as_sample(dict(arrays), where=f"file {str(path)!r}")
    except (
        OSError,
        ValueError,
        EOFError,
        KeyError,
        MemoryError,
        SyntaxError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as problem:
        # numpy and zipfile raise all of these on damaged files; ValueError is also what arrays of objects give.
        msg = (
            f"Data file {str(path)!r}: expected a .npz file with one array per input and no Python objects, got "
            f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}. Save it with numpy.savez."
        )
        raise DataError(msg) from None


def materialize(data: Iterable[Any], *, samples: int = 300, inputs: Iterable[str] = ()) -> Feeds:
    """Samples that can be read again and again, at most `samples` of them; see Feeds for what is kept where.

    `inputs` are the names for samples that are arrays or tuples of arrays, in order. Raises DataError where there are none.
    """
    feeds = Feeds(data, samples=samples, inputs=tuple(inputs))
    first_sample(feeds)
    return feeds


def first_sample(feeds: Iterable[Sample]) -> dict[str, np.ndarray]:
    """The first sample. Raises DataError where there is none."""
    for sample in feeds:
        return dict(sample)
    msg = (
        "Calibration data: expected at least one sample, got none. A generator that was read before is empty: make a new "
        "one."
    )
    raise DataError(msg)


def input_names(model: ir.Model) -> list[str]:
    """The inputs that a caller has to feed, in order: not those that an initializer gives a default."""
    return [value.name or "" for value in model.graph.inputs if not value.is_initializer()]


def checked(feeds: Iterable[Sample], model: ir.Model) -> Feeds:
    """The same samples, each checked against the model as it is read; DataError names the sample.

    Arrays that the model does not take are left out: exporters drop inputs that a tokenizer or its user still provides.
    """
    base = feeds if isinstance(feeds, Feeds) else Feeds(feeds)
    known = {value.name for value in model.graph.inputs}

    def read() -> Iterator[Sample]:
        for index, sample in enumerate(base):
            check_sample(sample, model, where=f"sample {index}")
            yield {name: array for name, array in sample.items() if name in known}

    return Feeds.lazy(read)


def check_sample(sample: Sample, model: ir.Model, *, where: str = "the sample") -> None:
    """Raise DataError where a sample does not fit the model's inputs, naming the input, what was expected and what was got.

    Checked: names, element types, ranks, static dimensions, NaN and infinities, empty batches. Inputs with a default (an
    initializer of the same name) may be left out, and arrays that the model does not take are ignored. Minus infinity is let
    through in additive masks: values <= 0 or -inf.
    """
    expected = {value.name or "": value for value in model.graph.inputs}
    missing = [name for name in input_names(model) if name not in sample]
    if missing:
        extra = [name for name in sample if name not in expected]
        msg = (
            f"Calibration data, {where}: expected the inputs {input_names(model)!r}; missing {missing!r}, unknown "
            f"{extra!r}. Name the arrays as the model does."
        )
        raise DataError(msg)
    for name, array in ((name, sample[name]) for name in expected if name in sample):
        _check_array(array, expected[name], f"{where}, input {name!r}")


def _check_array(array: np.ndarray, value: ir.Value, where: str) -> None:
    if value.type is not None and not isinstance(value.type, ir.TensorType):
        msg = (
            f"Calibration data, {where}: the model takes {value.type!r}, expected a tensor. Such inputs can't be calibrated."
        )
        raise DataError(msg)
    if value.dtype is not None and not _fits(array.dtype, value.dtype):
        wanted = "str" if value.dtype == ir.DataType.STRING else value.dtype.numpy()
        msg = (
            f"Calibration data, {where}: expected element type {wanted!s}, got {array.dtype!s}. Convert it with "
            "array.astype."
        )
        raise DataError(msg)
    if value.shape is not None:
        dims = list(value.shape)
        same = len(dims) == array.ndim and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(dims, array.shape, strict=True)
        )
        if not same:
            shown = [dim if isinstance(dim, int) else str(dim.value or "?") for dim in dims]
            msg = (
                f"Calibration data, {where}: expected shape {shown!r}, got {list(array.shape)!r}. The batch dimension is "
                "part of it."
            )
            raise DataError(msg)
    if array.ndim and array.shape[0] == 0:
        msg = f"Calibration data, {where}: expected at least one row, got shape {list(array.shape)!r}. Leave the sample out."
        raise DataError(msg)
    _check_finite(array, where)


def _fits(dtype: np.dtype, wanted: ir.DataType) -> bool:
    if wanted == ir.DataType.STRING:
        return dtype.kind in "UO"
    return dtype.kind not in "UO" and dtype.newbyteorder("=") == wanted.numpy()


def _check_finite(array: np.ndarray, where: str) -> None:
    if array.dtype.kind not in "fc" and array.dtype != ir.DataType.BFLOAT16.numpy():
        return
    values = array if array.dtype.kind in "fc" else array.astype(np.float32)
    finite = np.isfinite(values)
    if finite.all():
        return
    if values.dtype.kind == "f" and (values <= 0).all() and finite.any():
        return
    kind = "NaN" if np.isnan(values).any() else "infinite"
    position = [int(index) for index in np.argwhere(~finite)[0]]
    msg = (
        f"Calibration data, {where}: expected finite numbers, got a {kind} value at {position!r}: ranges would be "
        "meaningless. Leave the sample out."
    )
    raise DataError(msg)


def _from_function(module: str, function: str) -> Feeds:
    spec = f"{module}:{function}"
    with working_folder_importable():
        try:
            target: Any = importlib.import_module(module)
            for part in function.split("."):
                target = getattr(target, part)
        except Exception as problem:
            # The module is the user's own code: the cause stays attached, so that Python callers see where it failed.
            msg = (
                f"Data {spec!r} can't be imported: {type(problem).__name__}: {problem!s:.300}. Expected "
                "package.module:function."
            )
            raise DataError(msg) from problem
        if not callable(target):
            msg = (
                f"Data {spec!r}: expected a function that returns an iterable of samples, got {type(target)!r}. Name the "
                "function after the colon."
            )
            raise DataError(msg)
        return _called(target, spec)


def _called(target: Callable[[], Any], spec: str) -> Feeds:
    try:
        made = target()
    except Exception as problem:
        msg = (
            f"Data {spec!r} failed: {type(problem).__name__}: {problem!s:.300}. Expected an iterable of samples "
            f"{{input name: array}}."
        )
        raise DataError(msg) from problem
    if isinstance(made, Mapping) or not isinstance(made, Iterable):
        msg = (
            f"Data {spec!r} returned {type(made)!r}: expected an iterable of samples {{input name: array}}. Return a list "
            "or a generator."
        )
        raise DataError(msg)
    return Feeds(made)
