"""Where the data of external tensors may lie: in the model's own folder, complete, and nowhere else.

The rule of the ONNX specification (docs/ExternalData.md): a relative path without "..", below the folder of the model file.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx_ir as ir

from attnquant.errors import ModelError


def anchored(tensor: ir.TensorProtocol, place: str, folders: Sequence[Path] | None) -> ir.TensorProtocol:
    """An external tensor made independent of the working directory, after checking its file; any other tensor as it is.

    `folders` are the folders that the model file lies in: as named, and after following symbolic links (download caches keep
    links to files with other names). None for a model in memory: its tensors name their own base folder.
    The data stay on disk. Raises ModelError, naming `place`, for a file outside, missing, or too short.
    """
    if not isinstance(tensor, ir.ExternalTensor):
        return tensor
    location = os.fspath(tensor.location)
    if folders is None:
        if not tensor.base_dir and os.path.isabs(location):
            _check_size(tensor, place, location)
            return tensor
        folders = (Path(tensor.base_dir or os.curdir).absolute(),)
    path = _resolve(location, place, folders)
    _check_size(tensor, place, path)
    return ir.ExternalTensor(
        path,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def _resolve(location: str, place: str, folders: Sequence[Path]) -> str:
    pure = PurePosixPath(location)
    windows = PureWindowsPath(location)
    if (
        not location
        or "\0" in location
        or pure.is_absolute()
        or windows.drive
        or windows.root
        or ".." in (*pure.parts, *windows.parts)
    ):
        msg = (
            f"The data of {place} are said to be in {location!r}: expected a relative path inside the model's folder, "
            "without '..'. "
            "Such a model is not opened; save it again with its data next to it."
        )
        raise ModelError(msg)
    roots = [os.path.realpath(folder) for folder in folders]
    for folder in folders:
        real = os.path.realpath(folder / location)
        if not os.path.exists(real):
            continue
        if not any(os.path.commonpath([root, real]) == root for root in roots):
            msg = (
                f"The data of {place} in {location!r} are a link that leaves the model's folder, to {real!r}: expected a "
                "file inside. "
                "Such a model is not opened; copy the file into the folder if you trust it."
            )
            raise ModelError(msg)
        return real
    msg = (
        f"The data of {place} are missing: expected file {location!r} in folder {str(folders[0])!r}. Copy it there: an ONNX "
        "model "
        "with external data is more than one file."
    )
    raise ModelError(msg)


def _check_size(tensor: ir.ExternalTensor, place: str, path: str) -> None:
    offset, length = tensor.offset or 0, tensor.length
    size = _file_size(path)
    if size is None:
        msg = (
            f"The data of {place} are in {path!r}: expected a readable regular file there, got something else. Copy the "
            "file again."
        )
        raise ModelError(msg)
    if tensor.dtype == ir.DataType.STRING or (length is not None and length != tensor.nbytes):
        msg = (
            f"The data of {place}: expected {tensor.nbytes} bytes for type {tensor.dtype.name} and shape "
            f"{list(tensor.shape)!r}, got "
            f"length {length!r}. The model was written wrongly: export it again."
        )
        raise ModelError(msg)
    if offset < 0 or offset + tensor.nbytes > size:
        msg = (
            f"The data of {place} are cut off: expected {tensor.nbytes} bytes at offset {offset} of {path!r}, got a file of "
            f"{size} "
            "bytes. Copy the file again."
        )
        raise ModelError(msg)


def _file_size(path: str) -> int | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK) else None
