"""Commands that turn attention from one form into another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnquant import terminal
from attnquant.cli.console import FAILED, NOTHING_FOUND, OK, command
from attnquant.cli.options import (
    Data,
    Debug,
    Format,
    FormatOption,
    Images,
    ImageSize,
    Mean,
    Model,
    Output,
    Site,
    Std,
    Text,
    Tokenizer,
)
from attnquant.cli.paths import destination

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import onnx_ir as ir

    from attnquant.rewrite import RewriteResult


@command
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
    written, loaded = destination(output, "fuse", model, data, text), load(model)
    feeds = _first_feeds(
        loaded, data=data, images=images, size=image_size, mean=mean, std=std, text=text, tokenizer=tokenizer
    )
    result = rewritten(
        loaded, to=to, sites=site, feeds=feeds, allow_dead_row_change=allow_dead_row_change, shared_cache=shared_cache
    )
    return _rewritten(result, model, written)


@command
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

    written, loaded = destination(output, "expand", model, data, text), load(model)
    feeds = _first_feeds(
        loaded, data=data, images=images, size=image_size, mean=mean, std=std, text=text, tokenizer=tokenizer
    )
    return _rewritten(rewritten(loaded, sites=site, feeds=feeds), model, written)


def _first_feeds(model: "ir.Model", **options: Any) -> "Mapping[str, np.ndarray] | None":
    """One set of inputs out of the data that the options name, None where they name none."""
    from attnquant.data import first_sample
    from attnquant.sources import named_data

    found = named_data(model, **options)
    return None if found is None else first_sample(found)


def _rewritten(result: "RewriteResult", model: Path, written: Path) -> tuple[Any, int]:
    """Write a rewritten model and report it; where nothing was rewritten, nothing is written."""
    from attnquant.rewrite.pages import RewriteReport

    report = RewriteReport(model=str(model), rows=result.rows)
    if not report.done:
        why = "every attention was refused" if result.rows else "no attention was found"
        terminal.note(f"attnquant: nothing written: {why}")
        return report, FAILED if result.rows else NOTHING_FOUND
    result.save(written)
    return report, OK
