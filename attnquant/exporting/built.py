"""What timm and transformers hand over, and what they have to have for it: packages, and weights that are no pickle."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnquant.errors import HostError, ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A module that a name stands for."""

    module: Any
    example: Mapping[str, Any]
    dynamic_shapes: Mapping[str, Any] | None = None
    mean: tuple[float, ...] | None = None
    """Of the pictures that the model was trained on, values from 0 to 1; None where its files do not say."""
    std: tuple[float, ...] | None = None


def require(name: str, *packages: str) -> None:
    """Raises HostError where a package is missing."""
    missing = []
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        msg = f"{name} needs {', '.join(missing)}, not installed here: run `pip install attnquant[torch]`."
        raise HostError(msg)


def require_safetensors(path: Path) -> None:
    """Raises ModelError for anything but a whole safetensors file."""
    require(str(path), "safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix != ".safetensors":
            raise ValueError("its name has another suffix")
        with safe_open(str(path), framework="numpy") as opened:
            list(opened.keys())
    except (OSError, ValueError, SafetensorError) as problem:
        msg = (
            f"Weights {str(path)!r}: expected a .safetensors file, {problem!s:.200}. Pickles are not read: convert them "
            "where you trust them."
        )
        raise ModelError(msg) from None
