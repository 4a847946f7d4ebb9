"""A ViT trained on digits: float in torch, quantized by NNCF in torch, and that as ONNX. `python -m benchmarks.bridge`."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.digits import digits, trained
from benchmarks.executed import executed
from benchmarks.metrics import Array

CALIBRATION, BATCH = 64, 250


def main() -> None:
    """Print accuracies in percent, and what ONNX Runtime makes of the linears."""
    import nncf
    import onnxruntime
    import torch

    import attnquant

    module = trained()
    (images, labels), (train, _) = digits("test"), digits("train")

    def accuracy(logits: Callable[[Array], Array]) -> float:
        hits = [logits(images[at : at + BATCH]).argmax(1) for at in range(0, len(images), BATCH)]
        return 100 * float(np.mean(np.concatenate(hits) == labels))

    with attnquant.extended(), tempfile.TemporaryDirectory() as folder:
        data = nncf.Dataset([torch.from_numpy(train[at : at + 1]) for at in range(CALIBRATION)])
        quantized = nncf.quantize(module, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION)
        path = Path(folder) / "vit.onnx"
        batch = torch.export.Dim("batch", min=1, max=4096)
        made = attnquant.export_onnx(quantized, torch.from_numpy(images[:8]), path, dynamic_shapes=({0: batch},))
        session = onnxruntime.InferenceSession(path)
        name = session.get_inputs()[0].name
        with torch.no_grad():
            print(f"float torch      {accuracy(lambda x: module(torch.from_numpy(x)).numpy()):.2f} %")
            print(f"quantized torch  {accuracy(lambda x: quantized(torch.from_numpy(x)).numpy()):.2f} %")
        share = accuracy(lambda x: session.run(None, {name: x})[0])
        print(f"quantized ONNX   {share:.2f} %  ({made.snr_db:.1f} dB from torch)")
        ran = executed(path)
    print(f"linears: {ran.int8_linears} int8, {ran.float_linears} float, {len(ran.float_behind_dequantize)} behind a DQ")


if __name__ == "__main__":
    main()
