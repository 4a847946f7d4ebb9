"""A ViT trained on digits: float in torch, quantized by NNCF in torch, and that as ONNX.

    python -m benchmarks.bridge --out docs/torch.md

writes the table there. Training takes minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.conformance import filled
from benchmarks.digits import digits, trained
from benchmarks.executed import Executed, executed
from benchmarks.metrics import Array

CALIBRATION, BATCH = 64, 250
APART = 0.3
"""Points"""


def main(arguments: list[str]) -> int:
    """Write the table; 1 where accuracies are further apart than `APART`, or a linear is not int8."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bridge")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    shares, snr_db, ran = measured()
    text = "\n".join(["| | accuracy |", "|---|---|", *(f"| {name} | {share:.2f} % |" for name, share in shares.items())])
    text += (
        f"\n\nONNX is {snr_db:.1f} dB from quantized torch; {ran.int8_linears} linears in int8, {ran.float_linears} in "
        f"float, {len(ran.float_behind_dequantize)} float products behind a DequantizeLinear."
    )
    print(text)
    if given.out:
        given.out.write_text(filled(given.out.read_text(), {"digits": text}, "benchmarks.bridge"))
    apart = max(shares.values()) - min(shares.values())
    return int(apart > APART or bool(ran.float_linears or ran.float_behind_dequantize))


def measured() -> tuple[dict[str, float], float, Executed]:
    """({model: accuracy in percent}, SNR in dB of ONNX against torch, what ONNX Runtime executes)."""
    import nncf
    import onnxruntime
    import torch

    import attnquant

    module = trained()
    (images, labels), (train, _) = digits("test"), digits("train")

    def accuracy(logits: Callable[[Array], Array]) -> float:
        hits = [logits(images[at : at + BATCH]).argmax(1) for at in range(0, len(images), BATCH)]
        return 100 * float(np.mean(np.concatenate(hits) == labels))

    with attnquant.extended(), tempfile.TemporaryDirectory() as folder, torch.no_grad():
        data = nncf.Dataset([torch.from_numpy(train[at : at + 1]) for at in range(CALIBRATION)])
        quantized = nncf.quantize(module, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION)
        path = Path(folder) / "vit.onnx"
        batch = torch.export.Dim("batch", min=1, max=4096)
        made = attnquant.export_onnx(quantized, torch.from_numpy(images[:8]), path, dynamic_shapes=({0: batch},))
        session = onnxruntime.InferenceSession(path)
        name = session.get_inputs()[0].name
        shares = {
            "float torch": accuracy(lambda x: module(torch.from_numpy(x)).numpy()),
            "quantized torch": accuracy(lambda x: quantized(torch.from_numpy(x)).numpy()),
            "quantized ONNX": accuracy(lambda x: session.run(None, {name: x})[0]),
        }
        return shares, made.snr_db, executed(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
