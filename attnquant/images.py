"""Photographs as calibration samples, for models with one image input. Needs Pillow (`pip install attnquant[images]`)."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnquant.errors import DataError
from attnquant.feeds import Feeds, Sample

Layout = Literal["NCHW", "NHWC"]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
MAX_PIXELS = 2**28
"""Pixels of one picture (268 megapixels); a file that says more is not decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """The input of a model that takes pictures."""

    name: str
    layout: Layout
    size: tuple[int, int] | None
    """(height, width) where the model fixes them."""
    batch: int
    """Pictures per sample: the model's fixed batch size, else 1."""
    dtype: str
    """numpy name: float32, float16, or uint8 for pixels as they are."""


def image_input(model: ir.Model) -> ImageInput:
    """Which input takes pictures: the only rank 4 input with 3 channels, second (NCHW) or last (NHWC).

    Raises DataError where there is none, more than one, or another input without a default value.
    """
    needed = [value for value in model.graph.inputs if not value.is_initializer()]
    found = [(value, layout) for value in needed if (layout := _layout(value)) is not None]
    if len(needed) != 1 or len(found) != 1:
        names = [value.name for value in needed]
        msg = (
            f"Pictures as data: expected a model with one input of shape [N, 3, H, W] or [N, H, W, 3], got {names!r}. Use "
            "--data instead."
        )
        raise DataError(msg)
    value, layout = found[0]
    dims = list(value.shape or ())
    height, width = (dims[2], dims[3]) if layout == "NCHW" else (dims[1], dims[2])
    dtype = "float32" if value.dtype is None else str(value.dtype.numpy())
    if dtype not in ("float32", "float16", "uint8"):
        msg = (
            f"Pictures as data: expected input {value.name!r} to be float32, float16 or uint8, got {dtype}. Use --data "
            "instead."
        )
        raise DataError(msg)
    size = (height, width) if isinstance(height, int) and isinstance(width, int) else None
    batch = dims[0] if isinstance(dims[0], int) else 1
    return ImageInput(name=value.name or "", layout=layout, size=size, batch=batch, dtype=dtype)


def load_images(
    folder: str | os.PathLike[str],
    size: int | tuple[int, int],
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    input_name: str = "input",
    layout: Layout = "NCHW",
    *,
    batch: int = 1,
    dtype: str = "float32",
) -> Feeds:
    """Samples of `batch` pictures each, from the picture files of a folder by name, read lazily.

    A picture is turned upright, made RGB, scaled (bicubic) until it covers `size` (height, width) and cropped at the centre;
    its values are (x / 255 - mean) / std per channel, or 0 to 255 for dtype uint8. Arrays: (batch, 3, H, W), for
    layout NHWC (batch, H, W, 3). Raises DataError without Pillow or pictures, and for one that is damaged.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if height < 1 or width < 1 or len(mean) != 3 or len(std) != 3 or min(std) <= 0 or batch < 1:
        msg = (
            f"Pictures as data: expected a positive size, three means and three positive deviations, got size={size!r}, "
            f"mean={mean!r}, "
            f"std={std!r}, batch={batch!r}. Correct the options."
        )
        raise DataError(msg)
    files = picture_files(Path(folder))
    if len(files) < batch:
        msg = (
            f"Picture folder {str(folder)!r}: expected at least {batch} files {'/'.join(SUFFIXES)}, got {len(files)}. Add "
            "pictures."
        )
        raise DataError(msg)
    pillow()

    def read() -> Iterator[Sample]:
        for start in range(0, len(files) - batch + 1, batch):
            pictures = [_picture(file, (height, width)) for file in files[start : start + batch]]
            pixels = np.stack(pictures)
            if dtype != "uint8":
                pixels = (pixels / 255.0 - np.asarray(mean)) / np.asarray(std)
            pixels = pixels.transpose(0, 3, 1, 2) if layout == "NCHW" else pixels
            yield {input_name: np.ascontiguousarray(pixels, dtype=dtype)}

    return Feeds.lazy(read)


def pillow() -> Any:
    """The module PIL.Image, set to refuse decompression bombs. Raises DataError where Pillow is not installed."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        msg = "Pictures as data need Pillow: run `pip install attnquant[images]`."
        raise DataError(msg) from None
    return Image, ImageOps


def picture_files(folder: Path) -> list[Path]:
    """The picture files of a folder, by name. Raises DataError where it is none."""
    if not folder.is_dir():
        msg = f"Picture folder {str(folder)!r}: expected a folder, found none of that name. Correct the path."
        raise DataError(msg)
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())


def _picture(file: Path, size: tuple[int, int]) -> np.ndarray:
    """(H, W, 3) uint8."""
    image_module, operations = pillow()
    height, width = size
    try:
        with image_module.open(file) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                msg = (
                    f"Picture {str(file)!r} has {opened.width} x {opened.height} pixels: expected at most {MAX_PIXELS:,}. "
                    "Leave it out."
                )
                raise DataError(msg)
            upright = operations.exif_transpose(opened).convert("RGB")
            fitted = operations.fit(upright, (width, height), method=image_module.Resampling.BICUBIC)
            return np.asarray(fitted, dtype=np.uint8)
    except DataError:
        raise
    except Exception as problem:
        # Pillow's decoders raise many types on damaged files: OSError, SyntaxError, struct.error, its bomb error.
        msg = (
            f"Picture {str(file)!r} can't be decoded: {type(problem).__name__}: {problem!s:.200}. Expected a whole picture; "
            "leave it out."
        )
        raise DataError(msg) from None


def _layout(value: ir.Value) -> Layout | None:
    dims = list(value.shape) if value.shape is not None else []
    if len(dims) != 4:
        return None
    if dims[1] == 3:
        return "NCHW"
    return "NHWC" if dims[3] == 3 else None
