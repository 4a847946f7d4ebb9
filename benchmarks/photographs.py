"""Crops of photographs that scikit-image ships, as a vision transformer takes them; calibration and test share none."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.assets import fetch

Array = npt.NDArray[np.float32]

CALIBRATION = (
    "chelsea.png", "coffee.png", "motorcycle_left.png", "ihc.png", "coins.png", "brick.png", "page.png",
    "hubble_deep_field.jpg",
)
TEST = ("astronaut.png", "rocket.jpg", "camera.png", "retina.jpg", "horse.png", "moon.png")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def photograph(name: str) -> Path:
    """The file of one of scikit-image's photographs, for example "astronaut.png"."""
    return fetch("scikit-image") / "skimage" / "data" / name


def normalized(pixels: npt.NDArray[np.uint8]) -> Array:
    """Turn RGB pixels [H, W, 3] of 0..255 into float32 [1, 3, H, W] with ImageNet's mean and standard deviation."""
    scaled = (pixels.astype(np.float32) / 255 - np.asarray(IMAGENET_MEAN, np.float32)) / np.asarray(IMAGENET_STD, np.float32)
    return np.ascontiguousarray(scaled.transpose(2, 0, 1)[None])


def crops(names: Sequence[str], count: int, *, size: int = 224, seed: int = 0) -> Iterator[Array]:
    """Yield `count` square crops [1, 3, size, size], taking the photographs in turn; half of them are mirrored.

    A crop's side is 45 to 100 % of the photograph's shorter side, its place uniform. The same seed gives the same crops.
    """
    from PIL import Image

    rng = np.random.default_rng(seed)
    images = [Image.open(photograph(name)).convert("RGB") for name in names]
    for index in range(count):
        image = images[index % len(images)]
        side = int(min(image.size) * rng.uniform(0.45, 1.0))
        left = int(rng.integers(0, image.width - side + 1))
        top = int(rng.integers(0, image.height - side + 1))
        crop = image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        pixels = np.asarray(crop, np.uint8)
        yield normalized(pixels[:, ::-1] if rng.random() < 0.5 else pixels)
