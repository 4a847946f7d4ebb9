"""Calibration data as the command line names it: files, a function, pictures or text, for one model."""

from pathlib import Path

import onnx_ir as ir

from attnquant.data import Feeds, image_input, load_data, load_images, load_text
from attnquant.errors import DataError
from attnquant.images import IMAGENET_MEAN, IMAGENET_STD, picture_files

_DEFAULT_SIZE = 224  # pixels, for models that take any size


def named_data(
    model: ir.Model,
    *,
    data: str | None = None,
    images: Path | None = None,
    size: int | None = None,
    mean: str | None = None,
    std: str | None = None,
    text: Path | None = None,
    tokenizer: Path | None = None,
) -> Feeds | None:
    """The samples that the options name, None where none is given.

    :param size: Side of the pictures in pixels; default: what the model fixes, else 224.
    :param mean: "0.485,0.456,0.406" or one number for all channels, of values from 0 to 1; `std` likewise.
    :raises DataError: two sources at once, an option without its source, or data that do not fit the model.
    """
    given = [name for name, value in (("--data", data), ("--images", images), ("--text", text)) if value is not None]
    if len(given) > 1:
        msg = f"expected one source of calibration data, got {' and '.join(given)}"
        raise DataError(msg)
    _require(images is not None, "--images", {"--image-size": size, "--mean": mean, "--std": std})
    _require(text is not None, "--text", {"--tokenizer": tokenizer})
    if images is not None:
        return _pictures(model, images, size, mean, std)
    if text is not None:
        if tokenizer is None:
            msg = f"--text {str(text)!r} needs --tokenizer: the folder with the model's tokenizer.json"
            raise DataError(msg)
        return load_text(text, tokenizer, model)
    return None if data is None else load_data(data)


def sample_names(model: ir.Model, *, data: str | None = None, images: Path | None = None) -> tuple[str, ...]:
    """Names of the samples, in order: their files, as far as each sample is one file; else nothing."""
    if images is not None:
        return tuple(file.name for file in picture_files(images)) if image_input(model).batch == 1 else ()
    path = None if data is None else Path(data)
    if path is not None and path.is_dir():
        return tuple(file.name for file in sorted(path.glob("*.npz")))
    return (path.name,) if path is not None and path.is_file() else ()


def _require(present: bool, source: str, options: dict[str, object]) -> None:
    for name, value in options.items():
        if value is not None and not present:
            msg = f"{name} is for {source}, which is not given"
            raise DataError(msg)


def _pictures(model: ir.Model, folder: Path, size: int | None, mean: str | None, std: str | None) -> Feeds:
    taken = image_input(model)
    if size is not None and taken.size is not None and taken.size != (size, size):
        msg = f"--image-size {size}: input {taken.name!r} of the model takes {taken.size[0]} x {taken.size[1]} pixels"
        raise DataError(msg)
    side = size or _DEFAULT_SIZE
    return load_images(
        folder,
        taken.size or (side, side),
        mean=_channels("--mean", mean, IMAGENET_MEAN),
        std=_channels("--std", std, IMAGENET_STD),
        input_name=taken.name,
        layout=taken.layout,
        batch=taken.batch,
        dtype=taken.dtype,
    )


def _channels(option: str, text: str | None, default: tuple[float, float, float]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 3):
        msg = f"{option}: expected one number or three like 0.485,0.456,0.406, got {text!r}"
        raise DataError(msg)
    return numbers if len(numbers) == 3 else numbers * 3
