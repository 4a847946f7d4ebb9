"""Writing files that are either complete or absent, whatever happens meanwhile: a full disk, an error, a kill."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from attnquant.errors import AttnQuantError, ModelError


def target_of(path: str | os.PathLike[str], error: type[AttnQuantError] = ModelError) -> Path:
    """The regular file that writing to `path` creates or replaces: symbolic links are followed, as by open().

    Raises `error` where the folder is missing or closed, or the target is a folder, a device, or write-protected.
    """
    given = Path(path)
    try:
        target = Path(os.path.realpath(given))
        mode = target.stat().st_mode if target.exists() else None
    except (OSError, ValueError) as problem:
        msg = f"Can't write {str(given)!r}: {_reason(problem)}. Name a file in a folder that exists."
        raise error(msg) from None
    if not target.parent.is_dir():
        msg = f"Can't write {str(given)!r}: the folder {str(target.parent)!r} does not exist. Create it first."
        raise error(msg)
    if target.is_symlink() or (mode is not None and not stat.S_ISREG(mode)):
        msg = (
            f"Can't write {str(given)!r}: expected a regular file or a new name, got a folder, a device or a link to "
            "itself. Choose another name."
        )
        raise error(msg)
    protected = target if mode is not None else target.parent
    if not os.access(protected, os.W_OK) or not os.access(target.parent, os.W_OK | os.X_OK):
        msg = (
            f"Can't write {str(given)!r}: {str(protected)!r} is write-protected. Choose another name or change its "
            "permissions."
        )
        raise error(msg)
    return target


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], error: type[AttnQuantError] = ModelError) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends without an exception, and leaves no trace otherwise.

    The bytes are on disk (fsync) before the name points to them. An existing file keeps its permissions, a new one gets
    those of the umask. On Linux the unfinished file has no name, so that not even SIGKILL leaves one behind; where the
    file system can't do that, a kill may leave `.NAME.*.tmp`. Other hard links of an existing file keep the old content.

    Raises `error` where the file can't be written (no space, no permission, not a regular file).
    """
    target = target_of(path, error)
    try:
        handle, temporary = _unfinished(target)
        try:
            with handle:
                if target.exists():
                    os.fchmod(handle.fileno(), stat.S_IMODE(target.stat().st_mode))
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
                if temporary is None:
                    temporary = _link(handle.fileno(), target)
            if temporary is not None:
                os.replace(temporary, target)
            temporary = None
            _sync_folder(target.parent)
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
    except OSError as problem:
        msg = (
            f"Can't write {str(target)!r}: {_reason(problem)}. Nothing was changed; free some space or choose another "
            "folder."
        )
        raise error(msg) from None


def write_text(path: str | os.PathLike[str], text: str, error: type[AttnQuantError] = ModelError) -> None:
    """Write `text` as UTF-8 through `atomic_write`."""
    with atomic_write(path, error) as handle:
        handle.write(text.encode("utf-8"))


def _reason(problem: Exception) -> str:
    return getattr(problem, "strerror", None) or str(problem)


def _unfinished(target: Path) -> tuple[BinaryIO, Path | None]:
    """A new file on the target's file system, without a name (None) where that is possible."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            return os.fdopen(os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b"), None
    temporary = _temporary_name(target)
    return os.fdopen(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666), "w+b"), temporary


def _temporary_name(target: Path) -> Path:
    return target.with_name(f".{target.name[:200]}.{secrets.token_hex(6)}.tmp")


def _link(descriptor: int, target: Path) -> Path | None:
    """Name a complete file: `target` itself where it is free (None), else a temporary name to be renamed."""
    source = f"/proc/self/fd/{descriptor}"
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        # A folder descriptor makes Python call linkat, which follows the link in /proc; link() would not.
        if not target.exists():
            with contextlib.suppress(FileExistsError):
                os.link(source, target.name, dst_dir_fd=folder, follow_symlinks=True)
                return None
        temporary = _temporary_name(target)
        os.link(source, temporary.name, dst_dir_fd=folder, follow_symlinks=True)
        return temporary
    finally:
        os.close(folder)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable; not every file system lets a folder be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
