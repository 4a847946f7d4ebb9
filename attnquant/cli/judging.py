"""Commands that hold models, figures and the runtime to what they should be."""

import functools
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from attnquant import terminal
from attnquant.cli.console import FAILED, OK, app, command
from attnquant.cli.options import (
    Data,
    Debug,
    ExecutorOption,
    Format,
    FormatOption,
    Images,
    ImageSize,
    Mean,
    Provider,
    Recipe,
    Std,
    Target,
    Text,
    Tokenizer,
    VerifyFormat,
    Workers,
)
from attnquant.cli.paths import check_out

suite_app = typer.Typer(help="Figures of float and quantized models, held against what was recorded.", no_args_is_help=True)
app.add_typer(suite_app, name="suite")


@command
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

    check_out(out, reference, quantized, data, text, recipe)
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


@command
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


@functools.partial(command, group=suite_app)
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


def _command_line(context: typer.Context) -> str:
    """What was typed, as a shell takes it."""
    return shlex.join(["attnquant", *context.find_root().obj])
