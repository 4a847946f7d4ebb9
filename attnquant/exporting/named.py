"""Models by name: timm:NAME and hf:FOLDER, built by timm and transformers here, with weights from safetensors only.

Nothing is downloaded, no pickle is read and no code of a model's folder is run.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.exporting.built import require_safetensors

SCHEMES = ("timm:", "hf:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The same in ONNX."""

    model: ir.Model
    mean: tuple[float, ...] | None = field(default=None)
    std: tuple[float, ...] | None = field(default=None)


def is_named(model: str | os.PathLike[str]) -> bool:
    """Whether this names a model to build rather than a file."""
    return os.fspath(model).startswith(SCHEMES)


def load_named(
    name: str, *, weights: Path | None = None, random_weights: bool = False, image_size: int | None = None
) -> Named:
    """Build and export a model.

    :param name: "timm:NAME" or "hf:FOLDER".
    :param weights: A .safetensors file; default: timm's from the local cache, those of the folder for hf.
    :param random_weights: As the library draws them, seeded; for trying things out.
    :param image_size: Side of the pictures; default: the model's.
    :raises HostError: torch, timm or transformers is missing.
    :raises ModelError: no such model, no weights, or it can't be exported.
    """
    from attnquant.exporting import hf_models, timm_models
    from attnquant.exporting.inputs import example
    from attnquant.exporting.module import export

    scheme, _, rest = name.partition(":")
    if weights is not None and random_weights:
        msg = f"{name}: expected --weights or --random-weights, got both. Leave one out."
        raise ModelError(msg)
    if weights is not None:
        require_safetensors(weights)
    build = timm_models.build if scheme == "timm" else hf_models.build
    built = build(rest, weights=weights, random_weights=random_weights, image_size=image_size)
    exported = export(built.module, example(built.module, built.example), dynamic_shapes=built.dynamic_shapes)
    return Named(model=exported.model, mean=built.mean, std=built.std)
