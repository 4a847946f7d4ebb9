"""Calibration samples as values: {input name: array}, read as often as needed, with memory that stays bounded."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np

from attnquant.errors import AttnQuantError, DataError

Sample = Mapping[str, np.ndarray]
_Raw = dict[str, np.ndarray] | list[np.ndarray]

MAX_HELD_BYTES = 2**30
"""Samples of a source that can be read only once are kept in memory up to here, then in a temporary folder."""


class Feeds:
    """Samples that can be iterated any number of times, each time the same.

    A list is read in place. A lazy source of this package (`Feeds.lazy`) is opened anew each time. Anything else (a
    generator, a data loader that shuffles) is consumed once, as far as it is needed, and kept: in memory up to
    MAX_HELD_BYTES, the rest on disk while this object lives. Samples that name no inputs (one array, or a list or tuple of
    arrays) are named by `inputs`, in order.
    """

    def __init__(self, data: Iterable[Any], *, samples: int | None = None, inputs: Sequence[str] = ()) -> None:
        """`samples` is the number that is read at most. Raises DataError where `data` is no iterable of samples."""
        if isinstance(data, str | bytes | Mapping | np.ndarray) or not isinstance(data, Iterable):
            msg = (
                f"Calibration data: expected an iterable of samples {{input name: array}}, got {type(data)!r}. Put one "
                "sample in a list."
            )
            raise DataError(msg)
        if samples is not None and samples < 1:
            msg = f"Number of calibration samples: expected at least 1, got {samples!r}. Ask for more."
            raise DataError(msg)
        self._samples = samples
        self._inputs = tuple(inputs)
        if isinstance(data, Feeds):
            self._open: Callable[[], Iterable[Any]] = data._open
            self._samples = min((limit for limit in (samples, data._samples) if limit is not None), default=None)
            self._inputs = self._inputs or data._inputs
        elif isinstance(data, Sequence):
            self._open = lambda: data
        else:
            self._open = _Kept(_guarded(data)).__iter__

    @classmethod
    def lazy(cls, make: Callable[[], Iterator[Sample]]) -> "Feeds":
        """Samples that `make` reads from files, the same at every call."""
        feeds = cls(())
        feeds._open = make
        return feeds

    def map(self, change: Callable[[Sample], Sample]) -> "Feeds":
        """The same samples, each changed as it is read."""
        return Feeds.lazy(lambda: (change(sample) for sample in self))

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """Read the samples, from the start. Raises DataError for what is no sample."""
        return self._read(self._open())

    def raw(self) -> Iterator[Any]:
        """The samples as they came, before they are named and made arrays."""
        return islice(self._open(), self._samples)

    def _read(self, data: Iterable[Any]) -> Iterator[dict[str, np.ndarray]]:
        for index, raw in enumerate(islice(data, self._samples)):
            yield as_sample(raw, self._inputs, f"sample {index}")


def as_sample(raw: Any, inputs: Sequence[str] = (), where: str = "the sample") -> dict[str, np.ndarray]:
    """{input name: array} of a mapping, of one array, or of a sequence of arrays in the order of the model's inputs.

    Raises DataError for anything else, and for arrays of Python objects.
    """
    if isinstance(raw, Mapping):
        wrong = [name for name in raw if not isinstance(name, str)]
        if wrong or not raw:
            msg = (
                f"Calibration data, {where}: expected input names as keys, got "
                f"{wrong[:3] if wrong else 'an empty mapping'!r}. Name every array as the model does."
            )
            raise DataError(msg)
        return {name: as_array(value, f"{where}, input {name!r}") for name, value in raw.items()}
    arrays = list(raw) if isinstance(raw, tuple | list) else [raw]
    if isinstance(raw, str | bytes) or len(arrays) != len(inputs):
        msg = (
            f"Calibration data, {where}: expected {{input name: array}} or {len(inputs)} arrays for the inputs "
            f"{list(inputs)!r}, "
            f"got {type(raw)!r} of {len(arrays)}. Name the inputs in a dictionary."
        )
        raise DataError(msg)
    return {name: as_array(value, f"{where}, input {name!r}") for name, value in zip(inputs, arrays, strict=True)}


def as_array(value: Any, where: str) -> np.ndarray:
    """An array, from what numpy or a tensor library made. Raises DataError for ragged lists and Python objects."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        array = np.asarray(value)
    except Exception as problem:
        msg = (
            f"Calibration data, {where}: expected an array, got {type(value)!r} ({problem!s:.200}). Convert it with "
            "numpy.asarray."
        )
        raise DataError(msg) from None
    if array.dtype.kind in "OMmS" and not (array.size and all(isinstance(item, str) for item in array.flat)):
        msg = (
            f"Calibration data, {where}: expected an array of numbers, got dtype {array.dtype!s} (Python objects, bytes or "
            "times). Convert it with numpy.asarray."
        )
        raise DataError(msg)
    return array


def _guarded(data: Iterable[Any]) -> Iterator[Any]:
    """The items of foreign code, whose failure is reported as bad data, with the cause attached; our errors pass."""
    try:
        yield from data
    except (AttnQuantError, GeneratorExit):
        raise
    except Exception as problem:
        msg = (
            f"Reading the calibration data failed: {type(problem).__name__}: {problem!s:.300}. Expected an iterable of "
            "samples."
        )
        raise DataError(msg) from problem


class _Kept:
    """What was read from a source so far: the first in memory, beyond MAX_HELD_BYTES in a folder that goes with it."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._items: list[_Raw | Path] = []
        self._held = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __iter__(self) -> Iterator[Any]:
        for index in count():
            if index == len(self._items):
                try:
                    raw = next(self._source)
                except StopIteration:
                    return
                self._keep(raw, f"sample {index}")
            item = self._items[index]
            yield _restore(item) if isinstance(item, Path) else item

    def _keep(self, raw: Any, where: str) -> None:
        """Copy, because many sources fill the same buffer again for the next sample."""
        item: _Raw
        if isinstance(raw, Mapping):
            item = {name: array.copy() for name, array in as_sample(raw, where=where).items()}
        else:
            item = [as_array(part, where).copy() for part in (raw if isinstance(raw, tuple | list) else [raw])]
        arrays = list(item.values()) if isinstance(item, dict) else item
        self._held += sum(array.nbytes for array in arrays)
        if self._held <= MAX_HELD_BYTES:
            self._items.append(item)
            return
        try:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="attnquant-data-")
            path = Path(self._folder.name, f"{len(self._items)}.npz")
            # Stored by position, names apart: an input may be called "file", or have a slash.
            np.savez(path, *arrays)
            path.with_suffix(".json").write_text(
                json.dumps(list(item) if isinstance(item, dict) else None), encoding="utf-8"
            )
        except OSError as problem:
            msg = (
                f"Can't keep the calibration data on disk: {problem.strerror}. Use fewer samples, or set TMPDIR to a larger "
                "disk."
            )
            raise DataError(msg) from None
        self._items.append(path)


def _restore(path: Path) -> "_Raw":
    names = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with np.load(path, allow_pickle=False) as stored:
        arrays = [stored[f"arr_{index}"] for index in range(len(stored.files))]
    return arrays if names is None else dict(zip(names, arrays, strict=True))


@contextlib.contextmanager
def working_folder_importable() -> Iterator[None]:
    """The working folder at the end of the import path, where no module in it can take the place of an installed one."""
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
