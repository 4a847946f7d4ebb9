"""The command line: thin. A command reads its options, calls the library and returns (account, exit code).

Results go to stdout and nothing else does; progress, notes and errors go to stderr. Exit codes: 0 ok, 1 bad usage or input,
2 nothing recognised or a recipe rule that matched nothing, 3 a check failed, 130 interrupted. NNCF and ONNX Runtime are
imported only by the commands that run them.
"""

import contextlib
import functools
import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnquant import __version__, terminal
from attnquant.account import Account, account_of_recognition, installed_versions
from attnquant.errors import AttnQuantError, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import onnx_ir as ir

    from attnquant.exporting.named import Named
    from attnquant.report import Report
    from attnquant.rewrite import RewriteResult

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


class Format(StrEnum):
    """How a result is written."""

    RICH = "rich"
    JSON = "json"
    MARKDOWN = "markdown"


class VerifyFormat(StrEnum):
    """How a verification is written."""

    RICH = "rich"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"


suite_app = typer.Typer(help="Figures of float and quantized models, held against what was recorded.", no_args_is_help=True)
app.add_typer(suite_app, name="suite")

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="ONNX model.", show_default=False)]
AnyModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="ONNX model, timm:NAME or hf:FOLDER (docs/torch.md).", show_default=False)
]
Weights = Annotated[Path | None, typer.Option(metavar="FILE", help="timm:, hf: weights, a .safetensors file.")]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="timm:, hf: untrained, to try things out.")]
Data = Annotated[
    str | None, typer.Option(metavar="DATA", help="FILE.npz (one sample), folder of them, or package.module:function.")
]
Images = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Pictures.")]
ImageSize = Annotated[int | None, typer.Option(min=1, help="Side of the pictures; default: the model's, else 224.")]
Mean = Annotated[str | None, typer.Option(metavar="R,G,B", help="Of values from 0 to 1; default: ImageNet's.")]
Std = Annotated[str | None, typer.Option(metavar="R,G,B", help="Of values from 0 to 1; default: ImageNet's.")]
Text = Annotated[Path | None, typer.Option(metavar="FILE", help="Text, UTF-8; needs --tokenizer.")]
Tokenizer = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder with tokenizer.json.")]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="RUNTIME[@VERSION]",
        help="onnxruntime-cpu, onnxruntime-cuda or openvino; default: onnxruntime-cpu as installed.",
    ),
]
Recipe = Annotated[str, typer.Option(help="Name of a recipe, or a TOML file.")]
FormatOption = Annotated[Format, typer.Option("--format", help="How to write the result.")]
Provider = Annotated[
    list[str] | None, typer.Option(metavar="cpu|cuda|auto", help="Where to run, repeatable; auto: what is there.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write.")]
Site = Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this attention, as inspect names it; repeatable.")]
ExecutorOption = Annotated[str, typer.Option("--executor", metavar="local|ray", help="Processes here, or a Ray cluster.")]
Workers = Annotated[int | None, typer.Option(min=0, help="Tasks at a time; default: one per four cores; 0: this process.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


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


def _command(function: Callable[..., tuple["Report", int]], group: typer.Typer = app) -> Callable[..., None]:
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


@_command
def inspect(
    model: AnyModel,
    data: Data = None,
    target: Target = None,
    weights: Weights = None,
    random_weights: RandomWeights = False,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Account, int]:
    """Show every attention of a model. Exits 2 if there is none.

    With --data, heads and scale that the graph does not say are taken from one run.
    """
    from attnquant.data import first_sample, load_data
    from attnquant.recognition import recognize
    from attnquant.target import parse_target

    name = parse_target(target).name if target else None
    feeds = first_sample(load_data(data)) if data else None
    recognition = recognize(_opened(model, weights, random_weights).model, feeds=feeds)
    account = account_of_recognition(recognition, model=str(model), target=name)
    return account, OK if recognition.sites else NOTHING_FOUND


@_command
def quantize(
    model: AnyModel,
    output: Output = None,
    data: Data = None,
    images: Images = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    recipe: Recipe = "int8",
    target: Target = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to calibrate with.")] = 300,
    max_drop: Annotated[
        str | None,
        typer.Option(metavar="METRIC=VALUE", help="Keep parts float until snr_db, cosine, top1, kl or ppl is as good."),
    ] = None,
    gate: Annotated[
        bool | None,
        typer.Option("--gate/--no-gate", help="Time float and int8 of each group of parts here; what loses stays float."),
    ] = None,
    executor: Annotated[
        str | None,
        typer.Option("--executor", metavar="local|ray", help="By whom --max-drop measures; default: this process."),
    ] = None,
    workers: Workers = None,
    weights: Weights = None,
    random_weights: RandomWeights = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; calibrate and write nothing.")] = False,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Account, int]:
    """Quantize Q and K of every attention and the linears to int8; V and the rest stay float."""
    from attnquant import quantization
    from attnquant.data import first_sample
    from attnquant.executors import Workers as By
    from attnquant.report import account_of
    from attnquant.sources import named_data

    opened = _opened(model, weights, random_weights, image_size)
    loaded = opened.model
    if images is not None:
        mean, std = mean or _listed(opened.mean), std or _listed(opened.std)
    feeds = named_data(
        loaded, data=data, images=images, size=image_size, mean=mean, std=std, text=text, tokenizer=tokenizer
    )
    if dry_run:
        plan = quantization.plan(
            loaded, recipe=recipe, target=target, feeds=None if feeds is None else first_sample(feeds)
        )
        return account_of(plan, model=str(model)), OK
    if feeds is None:
        raise typer.BadParameter("quantize needs calibration data: --data, --images or --text (or --dry-run)")
    destination = _destination(Path(model), output, "quantize", " (or --dry-run)")
    _warn_of_two_runtimes()
    result = quantization.quantize(
        loaded, feeds, recipe=recipe, target=target, samples=samples, max_drop=max_drop, gate=gate,
        workers=None if executor is None else By(executor=executor, number=workers), progress=terminal.stage,
    )
    terminal.stage(f"writing {destination}")
    result.save(destination)
    account = account_of(result, model=str(model))
    return account, FAILED if any(row.status == "violates" for row in account.rows) else OK


@_command
def quantize_seq2seq(
    encoder: Annotated[Path, typer.Argument(metavar="ENCODER", help="ONNX model.", show_default=False)],
    decoder: Annotated[Path, typer.Argument(metavar="DECODER", help="The one that makes the caches.", show_default=False)],
    with_past: Annotated[Path, typer.Argument(metavar="WITH_PAST", help="The one that reads them.", show_default=False)],
    start: Annotated[str, typer.Option(metavar="ID,...", help="Tokens that the decoder begins with.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write three.")] = None,
    end: Annotated[int | None, typer.Option(metavar="ID", help="The token that ends a text.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="The most to generate from each sample.")] = 128,
    data: Data = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    recipe: Recipe = "seq2seq",
    target: Target = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to calibrate each with.")] = 300,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Any, int]:
    """Quantize encoder, decoder and decoder with past, calibrated with what they get while the float models generate.

    Data are the encoder's, one row a sample.
    """
    from attnquant import seq2seq
    from attnquant.model import load
    from attnquant.report import accounts_of
    from attnquant.sources import named_data

    if output is None:
        raise typer.BadParameter("quantize-seq2seq needs a folder to write: -o FOLDER")
    tokens = [part.strip() for part in start.split(",")]
    if not all(part.isdecimal() for part in tokens):
        raise typer.BadParameter(f"--start: expected token ids like 50257,50362, got {start!r}")
    sources = load(encoder), load(decoder), load(with_past)
    feeds = named_data(sources[0], data=data, text=text, tokenizer=tokenizer)
    if feeds is None:
        raise typer.BadParameter("quantize-seq2seq needs data for the encoder: --data or --text")
    for path, name in zip((encoder, decoder, with_past), seq2seq.FILES.values(), strict=True):
        _destination(path, output / name, "quantize-seq2seq")
    result = seq2seq.quantize_seq2seq(
        *sources, data=feeds, start=[int(part) for part in tokens], end=end, max_tokens=max_tokens, recipe=recipe,
        target=target, samples=samples, progress=terminal.stage,
    )  # fmt: skip
    terminal.stage(f"writing {output}")
    result.save(output)
    accounts = accounts_of(result)
    return accounts, FAILED if any(row.status == "violates" for one in accounts.parts.values() for row in one.rows) else OK


@_command
def check(
    model: Model,
    data: Data = None,
    recipe: Recipe = "int8",
    target: Target = None,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Account, int]:
    """Audit a quantized model, whoever made it. Exits 3 if something is not as it was asked for.

    The model's own setup is checked where it carries one, else the recipe. With --data, heads that the graph does not say
    are taken from one run.
    """
    from attnquant.check import check as audit
    from attnquant.data import first_sample, load_data

    feeds = first_sample(load_data(data)) if data else None
    report = audit(model, recipe=recipe, target=target, feeds=feeds)
    return report.account(str(model)), OK if report.ok else FAILED


@_command
def verify(
    context: typer.Context,
    reference: Annotated[Path, typer.Argument(metavar="FLOAT", help="The float ONNX model.", show_default=False)],
    quantized: Annotated[Path, typer.Argument(metavar="QUANT", help="The same model, quantized.", show_default=False)],
    data: Data = None,
    images: Images = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    provider: Provider = None,
    min_snr: Annotated[float | None, typer.Option(metavar="DB", help="SNR that the worst float output must reach.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many samples to run.")] = 100,
    recipe: Recipe = "int8",
    target: Target = None,
    executor: Annotated[
        str | None,
        typer.Option("--executor", metavar="local|ray", help="By whom the cost of each attention is measured."),
    ] = None,
    workers: Workers = None,
    format: Annotated[VerifyFormat, typer.Option("--format", help="How to write the result.")] = VerifyFormat.RICH,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result there.")] = None,
    debug: Debug = False,
) -> tuple[Any, int]:
    """Run a quantized model beside its float one: outputs, and every attention. Exits 3 if one is suspect.

    Exits 3 too where the placement is not as asked for or --min-snr is missed.
    """
    from attnquant.executors import Workers as By
    from attnquant.model import load
    from attnquant.sources import named_data, sample_names
    from attnquant.verification import verify as hold

    _check_out(out)
    loaded = load(reference)
    feeds = named_data(
        loaded, data=data, images=images, size=image_size, mean=mean, std=std, text=text, tokenizer=tokenizer
    )
    if feeds is None:
        raise typer.BadParameter("verify needs data to run the models on: --data, --images or --text")
    report = hold(
        loaded, quantized, feeds, providers=provider or ["cpu"], min_snr=min_snr, samples=samples, recipe=recipe,
        target=target, names=sample_names(loaded, data=data, images=images), progress=terminal.stage,
        workers=None if executor is None else By(executor=executor, number=workers),
    )  # fmt: skip
    report = replace(report, float_model=str(reference), command=_command_line(context))
    return report, OK if report.ok else FAILED


@_command
def fuse(
    model: Model,
    to: Annotated[str, typer.Option(metavar="OPERATOR", help="Such as ai.onnx::Attention@23; all are named above.")],
    output: Output = None,
    data: Data = None,
    images: Images = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    site: Site = None,
    allow_dead_row_change: Annotated[
        bool, typer.Option("--allow-dead-row-change", help="What a query gives that sees no key may change.")
    ] = False,
    shared_cache: Annotated[
        bool, typer.Option("--shared-cache", help="GroupQueryAttention: past and present may be one preallocated buffer.")
    ] = False,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Any, int]:
    """Turn attentions, written out or of another operator, into one operator. Exits 3 if none could be.

    OPERATOR: ai.onnx::Attention@23 or @24, com.microsoft::MultiHeadAttention or GroupQueryAttention. With --data, --images
    or --text the result is compared with the model by running both, and a site that changes an output is refused.
    """
    from attnquant.model import load
    from attnquant.rewrite import fuse as rewritten
    from attnquant.rewrite.target_form import parse

    parse(to)
    destination, loaded = _destination(model, output, "fuse"), load(model)
    feeds = _first_feeds(
        loaded, data=data, images=images, size=image_size, mean=mean, std=std, text=text, tokenizer=tokenizer
    )
    result = rewritten(
        loaded, to=to, sites=site, feeds=feeds, allow_dead_row_change=allow_dead_row_change, shared_cache=shared_cache
    )
    return _rewritten(result, model, destination)


@_command
def expand(
    model: Model,
    output: Output = None,
    data: Data = None,
    images: Images = None,
    image_size: ImageSize = None,
    mean: Mean = None,
    std: Std = None,
    text: Text = None,
    tokenizer: Tokenizer = None,
    site: Site = None,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Any, int]:
    """Write attention operators out in plain operators. Exits 2 if there is none, 3 if none could be.

    With --data, --images or --text the result is compared with the model by running both, and a site that changes an output
    is refused.
    """
    from attnquant.model import load
    from attnquant.rewrite import expand as rewritten

    destination, loaded = _destination(model, output, "expand"), load(model)
    feeds = _first_feeds(
        loaded, data=data, images=images, size=image_size, mean=mean, std=std, text=text, tokenizer=tokenizer
    )
    return _rewritten(rewritten(loaded, sites=site, feeds=feeds), model, destination)


@_command
def conformance(
    provider: Provider = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Run the cases with this in their name.")] = "",
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Any, int]:
    """Hold the installed ONNX Runtime to the specification of attention. Exits 3 on a crash or an unknown deviation."""
    from attnquant.conformance import conformance as hold

    report = hold(providers=provider or ["cpu"], only=only, progress=terminal.stage)
    return report, OK if report.ok else FAILED


@functools.partial(_command, group=suite_app)
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.toml", help="The suite.", show_default=False)],
    update: Annotated[bool, typer.Option("--update", help="Record what is measured now, and exit 3 once.")] = False,
    executor: ExecutorOption = "local",
    workers: Workers = None,
    format: FormatOption = Format.RICH,
    debug: Debug = False,
) -> tuple[Any, int]:
    """Measure the pairs of models that a suite names. Exits 3 if a figure is worse than recorded.

    Models, data and functions lie beside the file, and those functions are executed.
    """
    from attnquant.suite import run_suite

    report = run_suite(file, update=update, executor=executor, workers=workers, progress=terminal.stage)
    return report, OK if report.ok else FAILED


def _opened(model: str, weights: Path | None, random_weights: bool, image_size: int | None = None) -> "Named":
    """The model that an argument names: a file, or one that timm or transformers builds."""
    from attnquant.exporting.named import Named, is_named, load_named
    from attnquant.model import load

    if is_named(model):
        terminal.stage(f"building {model}")
        return load_named(model, weights=weights, random_weights=random_weights, image_size=image_size)
    if weights is not None or random_weights:
        msg = f"--weights and --random-weights are for timm: and hf: models; {model!r} has its own. Leave them out."
        raise ModelError(msg)
    return Named(model=load(model))


def _listed(numbers: "Sequence[float] | None") -> str | None:
    """As --mean and --std take them."""
    return None if numbers is None else ",".join(map(repr, numbers))


def _first_feeds(model: "ir.Model", **options: Any) -> "Mapping[str, np.ndarray] | None":
    """One set of inputs out of the data that the options name, None where they name none."""
    from attnquant.data import first_sample
    from attnquant.sources import named_data

    found = named_data(model, **options)
    return None if found is None else first_sample(found)


def _rewritten(result: "RewriteResult", model: Path, destination: Path) -> tuple[Any, int]:
    """Write a rewritten model and report it; where nothing was rewritten, nothing is written."""
    from attnquant.rewrite.pages import RewriteReport

    report = RewriteReport(model=str(model), rows=result.rows)
    if not report.done:
        why = "every attention was refused" if result.rows else "no attention was found"
        terminal.note(f"attnquant: nothing written: {why}")
        return report, FAILED if result.rows else NOTHING_FOUND
    result.save(destination)
    return report, OK


def _destination(model: Path, output: Path | None, command: str, hint: str = "") -> Path:
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


def _command_line(context: typer.Context) -> str:
    """What was typed, as a shell takes it."""
    return shlex.join(["attnquant", *context.find_root().obj])


def _check_out(out: Path | None) -> None:
    """Refused before any time is spent."""
    if out is not None and not out.parent.is_dir():
        msg = f"output {str(out)!r}: expected an existing folder, {str(out.parent)!r} is none; create it first"
        raise ModelError(msg)


def _warn_of_two_runtimes() -> None:
    if {"onnxruntime", "onnxruntime-gpu"} <= installed_versions().keys():
        terminal.note(
            "attnquant: warning: onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "pip uninstall both, then install one (attnquant[cpu] or attnquant[gpu])"
        )
