"""Where rich text goes: a person's terminal with its width and colours, or a file that wants neither."""

import io
import os
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import RenderableType

_UNLIMITED = 10_000  # columns; rich needs a number


def detect(stream: TextIO) -> "Terminal":
    """The terminal behind a stream: its width if there is one, colour unless NO_COLOR is set or TERM is dumb."""
    encoding = (getattr(stream, "encoding", None) or "ascii").lower()
    unicode = encoding.startswith("utf")
    if not stream.isatty():
        columns = os.environ.get("COLUMNS", "")
        return Terminal(width=int(columns) if columns.isdecimal() and int(columns) > 0 else None, unicode=unicode)
    colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")
    return Terminal(width=max(shutil.get_terminal_size().columns, 20), colour=colour, unicode=unicode)


def write(text: str, stream: TextIO) -> None:
    """Write text to a stream of any encoding; characters that it lacks become "?"."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, errors="replace").decode(encoding))
    stream.flush()


def stage(name: str) -> None:
    """Say which stage of the work begins. A line each: NNCF draws its own progress bars on stderr in between."""
    note(f"attnquant: {name}")


def note(text: str) -> None:
    """A line for the person at the terminal, on stderr."""
    write(f"{text}\n", sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """What the place that text goes to can show. The default is a file: no colour, no line broken."""

    width: int | None = None
    """Columns; None is as wide as the text."""
    colour: bool = False
    unicode: bool = True

    def text(self, content: "RenderableType") -> str:
        """Rich content as text for this terminal; trailing blanks taken off."""
        from rich.console import Console

        buffer = io.StringIO()
        console = Console(
            file=buffer,
            width=self.width or _UNLIMITED,
            force_terminal=self.colour,
            color_system="standard" if self.colour else None,
            legacy_windows=False,
            highlight=False,
        )
        console.print(content, soft_wrap=self.width is None)
        return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines())
