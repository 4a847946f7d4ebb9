import os
import sys

import numpy as np
import pytest
from onnx import TensorProto, helper
from tinymodels import made

from attnquant.errors import DataError
from attnquant.images import IMAGENET_MEAN, IMAGENET_STD, image_input, load_images
from attnquant.model import load

Image = pytest.importorskip("PIL.Image")


def takes(*shapes, dtype=TensorProto.FLOAT):
    inputs = [helper.make_tensor_value_info(f"in{index}", dtype, shape) for index, shape in enumerate(shapes)]
    outputs = [helper.make_tensor_value_info("y", dtype, None)]
    return load(made(helper.make_graph([helper.make_node("Identity", ["in0"], ["y"])], "g", inputs, outputs), 17))


def stripes(folder, name, width, height):
    """A picture whose red grows to the right and whose green is its number of letters."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None]
    pixels[..., 1] = 10 * len(name)
    Image.fromarray(pixels).save(folder / name)
    return pixels


@pytest.mark.parametrize(
    ("shape", "layout", "size", "batch"),
    [
        ((1, 3, 8, 6), "NCHW", (8, 6), 1),
        (("n", 3, "h", "w"), "NCHW", None, 1),
        ((4, 8, 6, 3), "NHWC", (8, 6), 4),
        (("n", "h", "w", 3), "NHWC", None, 1),
    ],
)
def test_which_input_takes_pictures(shape, layout, size, batch):
    found = image_input(takes(shape))
    assert (found.name, found.layout, found.size, found.batch, found.dtype) == ("in0", layout, size, batch, "float32")


@pytest.mark.parametrize(
    "shapes", [[(1, 3, 8)], [(1, 4, 8, 8)], [("n", "c", "h", "w")], [(1, 3, 8, 8), (1, 5)], [(1, 3, 8, 8)] * 2]
)
def test_models_that_take_no_pictures(shapes):
    with pytest.raises(DataError, match="in0"):
        image_input(takes(*shapes))
    with pytest.raises(DataError, match="int64"):
        image_input(takes((1, 3, 8, 8), dtype=TensorProto.INT64))


def test_pixels_against_numpy(tmp_path):
    """A picture that already has the size is not resampled: what is left is arithmetic."""
    pixels = stripes(tmp_path, "aa.png", 12, 8)
    (sample,) = load_images(tmp_path, (8, 12), input_name="x")
    expected = (pixels / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    assert sample["x"].dtype == np.float32
    np.testing.assert_allclose(sample["x"], expected.transpose(2, 0, 1)[None], atol=1e-6)
    (sample,) = load_images(tmp_path, (8, 12), (0, 0, 0), (1, 1, 1), "x", "NHWC", dtype="float16")
    np.testing.assert_allclose(sample["x"], (pixels / 255)[None], atol=1e-3)
    (sample,) = load_images(tmp_path, (8, 12), layout="NHWC", dtype="uint8")
    np.testing.assert_array_equal(sample["input"], pixels[None])


def test_scaled_to_cover_and_cropped_at_the_centre(tmp_path):
    stripes(tmp_path, "a.png", 300, 100)
    (sample,) = load_images(tmp_path, 50, dtype="uint8")
    red = sample["input"][0, 0].astype(float)
    assert red.shape == (50, 50)
    np.testing.assert_allclose(red.mean(), 127.5, atol=1)
    np.testing.assert_allclose([red[:, 0].mean(), red[:, -1].mean()], [85, 170], atol=3)


def test_order_batches_and_other_files(tmp_path):
    for name in ("ccc.png", "a.jpg", "bb.PNG"):
        stripes(tmp_path, name, 8, 8)
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / "folder.png").mkdir()
    samples = load_images(tmp_path, 8, dtype="uint8")
    greens = [int(sample["input"][0, 1].mean().round()) for sample in samples]
    np.testing.assert_allclose(greens, [50, 60, 70], atol=2)
    assert len(list(samples)) == 3
    assert [sample["input"].shape for sample in load_images(tmp_path, 8, batch=2)] == [(2, 3, 8, 8)]


def test_pictures_are_turned_upright_and_made_rgb(tmp_path):
    pixels = np.zeros((4, 8), np.uint8)
    pixels[:, :4] = 255
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    image.save(tmp_path / "a.png", exif=exif)
    (sample,) = load_images(tmp_path, (8, 4), dtype="uint8")
    assert sample["input"][0, :, :4].min() == 255
    assert sample["input"][0, :, 4:].max() == 0


def test_damaged_pictures_are_named(tmp_path, monkeypatch):
    stripes(tmp_path, "a.png", 64, 64)
    whole = (tmp_path / "a.png").read_bytes()
    for content in (
        b"",
        b"no picture",
        whole[:50],
        whole[: len(whole) // 2],
        whole[:20] + b"\xff\xff\xff\xff" * 2 + whole[28:],
    ):
        (tmp_path / "a.png").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.png"):
            list(load_images(tmp_path, 8))
    (tmp_path / "a.png").write_bytes(whole)
    monkeypatch.setattr("attnquant.images.MAX_PIXELS", 64 * 64 - 1)
    with pytest.raises(DataError, match="64 x 64"):
        list(load_images(tmp_path, 8))


def test_folders_and_options_that_make_no_sense(tmp_path):
    with pytest.raises(DataError, match="none of that name"):
        load_images(tmp_path / "none", 8)
    with pytest.raises(DataError, match="got 0"):
        load_images(tmp_path, 8)
    stripes(tmp_path, "a.png", 8, 8)
    with pytest.raises(DataError, match="at least 2"):
        load_images(tmp_path, 8, batch=2)
    for options in ({"size": 0}, {"size": 8, "std": (1, 0, 1)}, {"size": 8, "mean": (1,)}, {"size": 8, "batch": 0}):
        with pytest.raises(DataError, match="positive"):
            load_images(tmp_path, **options)


def test_without_pillow(tmp_path, monkeypatch):
    stripes(tmp_path, "a.png", 8, 8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"attnquant\[images\]"):
        load_images(os.fspath(tmp_path), 8)
