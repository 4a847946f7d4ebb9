"""The options that commands share, as typer reads them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
