"""Files that a command is to write: refused before any time is spent."""

from pathlib import Path

import typer

from attnquant.errors import ModelError
from attnquant.files import target_of


def destination(output: Path | None, command: str, *inputs: Path | str | None, hint: str = "") -> Path:
    """Where to write; raises what `check_out` does, and typer's error where nothing was named."""
    if output is None:
        raise typer.BadParameter(f"{command} needs a file to write: -o FILE{hint}")
    check_out(output, *inputs)
    return output


def check_out(out: Path | None, *inputs: Path | str | None) -> None:
    """Raise ModelError where `out` can't be written, or would take the place of what the command reads.

    :param inputs: What the command reads: first its model, then options as they were typed, paths or not.
    """
    if out is None:
        return
    given = [Path(path) for path in inputs if path is not None]
    if given and _same(out, given[0]):
        msg = f"output {str(out)!r} is the model itself, which is never changed: name another file"
        raise ModelError(msg)
    if any(_same(out, path) or _is_sample(out, path) for path in given):
        msg = f"output {str(out)!r} is read by this command and never changed: name another file"
        raise ModelError(msg)
    if not out.parent.is_dir():
        msg = f"output {str(out)!r}: expected an existing folder, {str(out.parent)!r} is none; create it first"
        raise ModelError(msg)
    target_of(out)


def check_folder(folder: Path, names: tuple[str, ...], *inputs: Path | str | None) -> None:
    """`check_out` for files in a folder, which need not exist as long as its parent does."""
    if not folder.exists():
        check_out(folder)
        return
    if not folder.is_dir():
        msg = f"output {str(folder)!r}: expected a folder or a new name, got a file; name another one"
        raise ModelError(msg)
    for name in names:
        for path in inputs:
            check_out(folder / name, path, *inputs)


def _same(out: Path, path: Path) -> bool:
    return out.exists() and path.exists() and out.samefile(path)


def _is_sample(out: Path, folder: Path) -> bool:
    return out.suffix == ".npz" and folder.is_dir() and out.exists() and out.parent.samefile(folder)
