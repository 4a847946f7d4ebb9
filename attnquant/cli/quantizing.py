"""Commands that look at a model and quantize it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnquant import terminal
from attnquant.account import Account, account_of_recognition, installed_versions
from attnquant.cli.console import FAILED, NOTHING_FOUND, OK, command
from attnquant.cli.options import (
    AnyModel,
    Data,
    Debug,
    Format,
    FormatOption,
    Images,
    ImageSize,
    Mean,
    Model,
    Output,
    RandomWeights,
    Recipe,
    Std,
    Target,
    Text,
    Tokenizer,
    Weights,
    Workers,
)
from attnquant.cli.paths import check_folder, destination
from attnquant.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnquant.exporting.named import Named


@command
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


@command
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
    written = destination(output, "quantize", model, data, text, recipe, weights, hint=" (or --dry-run)")
    _warn_of_two_runtimes()
    result = quantization.quantize(
        loaded, feeds, recipe=recipe, target=target, samples=samples, max_drop=max_drop, gate=gate,
        workers=None if executor is None else By(executor=executor, number=workers), progress=terminal.stage,
    )
    terminal.stage(f"writing {written}")
    result.save(written)
    account = account_of(result, model=str(model))
    return account, FAILED if any(row.status == "violates" for row in account.rows) else OK


@command
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
    check_folder(output, tuple(seq2seq.FILES.values()), encoder, decoder, with_past, data)
    result = seq2seq.quantize_seq2seq(
        *sources, data=feeds, start=[int(part) for part in tokens], end=end, max_tokens=max_tokens, recipe=recipe,
        target=target, samples=samples, progress=terminal.stage,
    )  # fmt: skip
    terminal.stage(f"writing {output}")
    result.save(output)
    accounts = accounts_of(result)
    return accounts, FAILED if any(row.status == "violates" for one in accounts.parts.values() for row in one.rows) else OK


@command
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


def _warn_of_two_runtimes() -> None:
    if {"onnxruntime", "onnxruntime-gpu"} <= installed_versions().keys():
        terminal.note(
            "attnquant: warning: onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            "pip uninstall both, then install one (attnquant[cpu] or attnquant[gpu])"
        )
