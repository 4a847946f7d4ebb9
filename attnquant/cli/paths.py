"""Files that a command is to write: refused before any time is spent."""

from pathlib import Path

import typer

from attnquant.errors import ModelError


def destination(model: Path, output: Path | None, command: str, hint: str = "") -> Path:
    """Where to write, refused before any time is spent on calibration."""
    if output is None:
        raise typer.BadParameter(f"{command} needs a file to write: -o FILE{hint}")
    if output.exists() and model.exists() and output.samefile(model):
        msg = f"output {str(output)!r} is the model itself, which is never changed: name another file"
        raise ModelError(msg)
    if not output.parent.is_dir():
        msg = f"output {str(output)!r}: expected an existing folder, {str(output.parent)!r} is none; create it first"
        raise ModelError(msg)
    return output


def check_out(out: Path | None) -> None:
    """Refused before any time is spent."""
    if out is not None and not out.parent.is_dir():
        msg = f"output {str(out)!r}: expected an existing folder, {str(out.parent)!r} is none; create it first"
        raise ModelError(msg)
