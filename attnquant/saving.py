"""Writing ONNX models: to a file, to a message in memory, or to what an ONNX Runtime session is made from."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import onnx
import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.files import atomic_write, target_of
from attnquant.tensors import all_tensors, map_tensors

External = Literal["auto", "always", "never"]

MAX_INLINE_BYTES = 2**31 - 2**24
"""Weights that are still put into one protobuf message: its limit of 2 GB less 16 MB for the graph."""
LARGE = 2**25
"""Weights above which sessions and NNCF read them from a temporary file: in a message they are copied half a dozen times."""
MIN_EXTERNAL_BYTES = 1024
"""Smaller tensors stay in the model file: shapes and scales, which runtimes read while they build the graph."""
ALIGNMENT = 4096
"""Where each tensor starts in a data file, so that it can be memory-mapped (onnx, docs/ExternalData.md)."""

logger = logging.getLogger(__name__)


def uses_external_data(model: ir.Model) -> bool:
    """True where a tensor of the model lies in an external data file."""
    return any(isinstance(tensor, ir.ExternalTensor) for tensor, _ in all_tensors(model))


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all tensors of the model, wherever they lie."""
    return sum(_size(tensor) for tensor, _ in all_tensors(model))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The whole model as one message, weights included. Raises ModelError above the limit of protobuf (2 GB)."""
    total = weight_bytes(model)
    if total > MAX_INLINE_BYTES:
        msg = (
            f"The model has {total:,} bytes of weights: expected at most {MAX_INLINE_BYTES:,} in one message, the limit of "
            "protobuf. "
            "Save it to a file, with external data, instead."
        )
        raise ModelError(msg)
    return _serialized(_inlined(model))


def save(model: ir.Model, path: str | os.PathLike[str], *, external: External = "auto") -> None:
    """Write a model so that `path` holds either what it held before or the whole new model, whatever happens meanwhile.

    external: "auto" puts the weights into a data file next to the model where the model has external data already or is too
    large for one file; "always" and "never" decide it. The data file is complete and synced under its final, new name before
    the model that refers to it takes its place: `<file name>.data`, or with a number where that exists, so that no crash can
    join a model with the data of another, and the input of a model that is still being read may be overwritten. The data
    file of a replaced model is left where it is, and the log names it.

    Raises ModelError where the target can't be written, or the model is too large for "never".
    """
    target = target_of(path)
    total = weight_bytes(model)
    if external == "never" and total > MAX_INLINE_BYTES:
        msg = (
            f"The model has {total:,} bytes of weights: expected at most {MAX_INLINE_BYTES:,} without external data. Allow "
            "external data."
        )
        raise ModelError(msg)
    wanted = external == "always" or (external == "auto" and (total > MAX_INLINE_BYTES or uses_external_data(model)))
    if wanted and any(_goes_outside(tensor, place) for tensor, place in all_tensors(model)):
        if Path(os.path.abspath(path)).parent.resolve() != target.parent:
            msg = (
                f"{str(path)!r} is a link to {str(target)!r}: expected a file, because external data have to lie next to "
                "the model. "
                "Give the path that the link points to."
            )
            raise ModelError(msg)
        _save_external(model, target)
    else:
        proto = to_proto(model)
        with atomic_write(target) as handle:
            _write_proto(proto, handle)


@contextlib.contextmanager
def message(model: ir.Model) -> Iterator[tuple[onnx.ModelProto, str | None]]:
    """The model as one message for libraries that take no other, and the folder of its weights where they are large.

    Large initializers are then external data in one file of a temporary folder, which goes when the block ends. Set TMPDIR
    to choose the disk.
    """
    if weight_bytes(model) <= LARGE:
        yield to_proto(model), None
        return
    with _temporary_folder() as folder:
        with Path(folder, "weights.data").open("wb") as data:
            proto = _serialized(_outlined(_inlined(model, keep_initializers=True), data, "weights.data"))
        yield proto, folder


@contextlib.contextmanager
def session_source(model: ir.Model) -> Iterator[bytes | str]:
    """What onnxruntime.InferenceSession takes for a model of any size: bytes, or the path of a temporary file.

    The file and its data are removed when the block ends; create the session inside.
    """
    with message(model) as (proto, folder):
        if folder is None:
            yield proto.SerializeToString()
            return
        path = Path(folder, "model.onnx")
        path.write_bytes(proto.SerializeToString())
        yield str(path)


def mapped(model: ir.Model, folder: str) -> None:
    """Map, in place, the external data in `folder` into memory: they can be read after the folder is gone."""

    def settled(tensor: ir.TensorProtocol, place: str) -> ir.TensorProtocol:
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        tensor.base_dir = folder
        return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name, doc_string=tensor.doc_string)

    map_tensors(model, settled)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    try:
        folder = tempfile.TemporaryDirectory(prefix="attnquant-")
    except OSError as problem:
        msg = f"Can't make a temporary folder: {problem.strerror}. Set TMPDIR to a folder with space for the model."
        raise ModelError(msg) from None
    with folder as name:
        yield name


def _save_external(model: ir.Model, target: Path) -> None:
    data_path = _free_name(target)
    try:
        with atomic_write(target) as handle:
            with atomic_write(data_path) as data:
                proto = _serialized(_outlined(_inlined(model, keep_initializers=True), data, data_path.name))
            _write_proto(proto, handle)
    except BaseException:
        with contextlib.suppress(OSError):
            data_path.unlink()
        raise
    previous = sorted(str(other) for other in _data_names(target) if other.exists() and other != data_path)
    if previous:
        logger.warning(
            "%s now has its data in %s; if nothing else uses them, delete %s.", target, data_path.name, ", ".join(previous)
        )


def _data_names(target: Path) -> list[Path]:
    return [
        target.with_name(f"{target.name}.data"),
        *(target.with_name(f"{target.name}.{number}.data") for number in range(1, 1000)),
    ]


def _free_name(target: Path) -> Path:
    for candidate in _data_names(target):
        if not os.path.lexists(candidate):
            return candidate
    msg = (
        f"Can't write {str(target)!r}: expected a free name like '{target.name}.data', all are taken. Delete old data files."
    )
    raise ModelError(msg)


def _inlined(model: ir.Model, *, keep_initializers: bool = False) -> ir.Model:
    """A copy whose external tensors are read when it is serialized: always in attributes, where runtimes read none."""
    if not uses_external_data(model):
        return model
    duplicate = model.clone()
    map_tensors(
        duplicate, lambda tensor, place: tensor if keep_initializers and place.startswith("initializer") else _lazy(tensor)
    )
    return duplicate


def _lazy(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    return ir.LazyTensor(
        lambda: tensor, dtype=tensor.dtype, shape=tensor.shape, name=tensor.name, doc_string=tensor.doc_string
    )


def _outlined(model: ir.Model, data: BinaryIO, name: str) -> ir.Model:
    """A copy whose large initializers are written to `data` and refer to it as file `name`."""

    def moved(tensor: ir.TensorProtocol, place: str) -> ir.TensorProtocol:
        if not _goes_outside(tensor, place):
            return _lazy(tensor)
        data.seek(-(-data.tell() // ALIGNMENT) * ALIGNMENT)
        offset = data.tell()
        _write_tensor(tensor, data)
        if data.tell() - offset != tensor.nbytes:
            msg = (
                f"The data of {place} changed while they were read: expected {tensor.nbytes} bytes, got "
                f"{data.tell() - offset}. "
                "Nothing was written; load the model again."
            )
            raise ModelError(msg)
        return ir.ExternalTensor(
            name,
            offset,
            tensor.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name or "",
            doc_string=tensor.doc_string,
        )

    duplicate = model.clone()
    map_tensors(duplicate, moved)
    return duplicate


def _goes_outside(tensor: ir.TensorProtocol, place: str) -> bool:
    """Large initializers only: runtimes read no external data in attributes."""
    return place.startswith("initializer") and tensor.dtype != ir.DataType.STRING and tensor.nbytes >= MIN_EXTERNAL_BYTES


def _write_tensor(tensor: ir.TensorProtocol, data: BinaryIO) -> None:
    if isinstance(tensor, ir.ExternalTensor):
        tensor.tofile(data)  # copied in the kernel, without passing through memory
    else:
        data.write(tensor.tobytes())


def _write_proto(proto: onnx.ModelProto, handle: BinaryIO) -> None:
    try:
        handle.write(proto.SerializeToString())
    except ValueError as problem:
        msg = (
            f"The model does not fit into one protobuf message: {problem}. Expected at most 2 GB; save it with external "
            "data."
        )
        raise ModelError(msg) from None


def _serialized(model: ir.Model) -> onnx.ModelProto:
    try:
        return ir.serde.serialize_model(model)
    except Exception as problem:
        cause: BaseException = problem
        while cause.__cause__ is not None:
            cause = cause.__cause__
        msg = f"The model can't be written as ONNX: {cause!s:.300}. Expected tensors, attributes and types that ONNX has."
        raise ModelError(msg) from None


def _size(tensor: ir.TensorProtocol) -> int:
    return sum(map(len, tensor.string_data())) if isinstance(tensor, ir.StringTensor) else tensor.nbytes
