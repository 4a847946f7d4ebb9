"""What stands around every command: registering it, stdout for its report alone, errors as text and exit codes."""

import contextlib
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnquant import __version__, terminal
from attnquant.errors import AttnQuantError

if TYPE_CHECKING:
    from attnquant.report import Report

ISSUES = "https://github.com/attnquant/attnquant/issues"

OK, BAD_INPUT, NOTHING_FOUND, FAILED, INTERRUPTED = 0, 1, 2, 3, 130
_USAGE = 2  # typer's own exit code for bad usage

app = typer.Typer(
    name="attnquant",
    help="Attention-aware post-training quantization on NNCF, checked in ONNX Runtime.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Finished(BaseException):
    """A command is done. It carries the result past typer, which would read an exit code of 2 as its own."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(code)
        self.text, self.code = text, code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and never raises for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        app(args=arguments, prog_name="attnquant", obj=arguments)
    except _Finished as finished:
        return _deliver(finished.text, finished.code)
    except SystemExit as stop:
        return _exit_code(stop.code)
    except AttnQuantError as error:
        return _fail(str(error), error, code=error.exit_code, debug="--debug" in arguments)
    except (OSError, MemoryError) as error:
        return _fail(f"{type(error).__name__}: {error}", error, debug="--debug" in arguments)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error}\nThis is a bug in attnquant. Please report it: {ISSUES}"
        return _fail(text, error, debug="--debug" in arguments)
    return OK


def _deliver(text: str, code: int) -> int:
    try:
        terminal.write(text, sys.stdout)
    except BrokenPipeError:  # the reader has seen enough; Python would complain when it flushes at exit
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _exit_code(code: object) -> int:
    """typer's exit code as ours: its 2 is bad usage."""
    if code is None:
        return OK
    return BAD_INPUT if code == _USAGE or not isinstance(code, int) else code


def _fail(message: str, error: BaseException, *, code: int = BAD_INPUT, debug: bool) -> int:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    terminal.note(f"attnquant: error: {message}")
    return code


def command(function: Callable[..., tuple["Report", int]], group: typer.Typer = app) -> Callable[..., None]:
    """Register a command: stdout gets its report and nothing else, whatever libraries print meanwhile."""

    @functools.wraps(function)
    def run(format: Any, **options: Any) -> None:
        try:
            with contextlib.redirect_stdout(_Chatter()):
                report, code = function(format=format, **options)
        except KeyboardInterrupt:
            terminal.note("attnquant: interrupted")
            raise _Finished("", INTERRUPTED) from None
        from attnquant.files import write_text
        from attnquant.report import render

        out = options.get("out")
        text = render(report, format.value, terminal=terminal.Terminal() if out else terminal.detect(sys.stdout))
        if out is not None:
            write_text(out, text)
            terminal.note(f"attnquant: wrote {out}")
            text = ""
        raise _Finished(text, code)

    group.command()(run)
    return run


class _Chatter(io.TextIOBase):
    """Where libraries' prints go: warnings and errors to stderr, their banners and progress bars nowhere."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self._line = ""

    def writable(self) -> bool:
        """True: this is an output."""
        return True

    def write(self, text: str) -> int:
        """Take text; whole lines that begin with a log level above INFO go on."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.startswith(("WARNING", "ERROR", "CRITICAL")):
                terminal.note(line)
        return len(text)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"attnquant {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass
