"""Photographs and two saliency maps of each, side by side, as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

TILE = 224
GAP = 8
MARGIN = 16
HEAD = 56

# Dark violet to light yellow: lightness rises evenly, so that the map reads the same in grey.
_STOPS = np.array([[10, 8, 40], [90, 20, 110], [180, 50, 95], [240, 110, 40], [252, 200, 60], [252, 255, 190]], np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of tiles (H, W, 3) uint8 with a title and a line below it."""

    title: str
    detail: str
    tiles: Sequence[npt.NDArray[np.uint8]]


def coloured(saliency: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """A saliency map (H, W) of values from 0 to 1 as colours (H, W, 3)."""
    position = np.clip(saliency, 0, 1) * (len(_STOPS) - 1)
    low = np.minimum(position.astype(int), len(_STOPS) - 2)
    share = (position - low)[..., None]
    return (_STOPS[low] * (1 - share) + _STOPS[low + 1] * share).astype(np.uint8)


def draw(columns: Sequence[Column], path: Path) -> None:
    """Write the columns side by side as a PNG, its folder created."""
    rows = len(columns[0].tiles)
    width = 2 * MARGIN + len(columns) * TILE + (len(columns) - 1) * GAP
    height = HEAD + rows * TILE + (rows - 1) * GAP + 2 * MARGIN
    picture = Image.new("RGB", (width, height), "white")
    canvas = ImageDraw.Draw(picture)
    for place, column in enumerate(columns):
        left = MARGIN + place * (TILE + GAP)
        canvas.text((left, MARGIN), column.title, fill="black", font=ImageFont.load_default(size=20))
        canvas.text((left, MARGIN + 28), column.detail, fill=(90, 90, 90), font=ImageFont.load_default(size=14))
        for row, tile in enumerate(column.tiles):
            picture.paste(Image.fromarray(tile), (left, MARGIN + HEAD + row * (TILE + GAP)))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, optimize=True)
