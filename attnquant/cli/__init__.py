"""The command line: thin. A command reads its options, calls the library and returns (account, exit code).

Results go to stdout and nothing else does; progress, notes and errors go to stderr. Exit codes: 0 ok, 1 bad usage or input,
2 nothing recognised or a recipe rule that matched nothing, 3 a check failed, 130 interrupted. NNCF and ONNX Runtime are
imported only by the commands that run them.
"""

from attnquant.cli import judging, quantizing, rewriting
from attnquant.cli.console import BAD_INPUT, FAILED, INTERRUPTED, NOTHING_FOUND, OK, app, main

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "NOTHING_FOUND", "OK", "app", "judging", "main", "quantizing", "rewriting"]

_ORDER = ("inspect", "quantize", "quantize_seq2seq", "check", "verify", "fuse", "expand", "conformance")
"""As a user meets them; --help lists them so."""

app.registered_commands.sort(key=lambda one: _ORDER.index(getattr(one.callback, "__name__", "")))
