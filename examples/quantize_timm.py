"""A small random vision transformer of timm, from the module to an int8 file: needs `pip install ".[cpu,torch]"`.

    python -m examples.quantize_timm

The weights are random, so that nothing has to be downloaded; with a trained model the calls are the same.
"""

import tempfile
from pathlib import Path

import numpy as np
import timm
import torch

import attnquant
from attnquant.report import account_of, render


def main() -> float:
    """Quantize, save, run in ONNX Runtime; prints the report and the SNR against torch, which it returns (dB)."""
    import onnxruntime

    torch.manual_seed(0)
    small = {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 20}
    module = timm.create_model("vit_small_patch16_224", **small).eval()
    calibration = torch.utils.data.DataLoader(torch.randn(16, 3, 64, 64), batch_size=4)

    result = attnquant.quantize(module, calibration)
    print(render(account_of(result, model="vit")))

    pictures = torch.randn(6, 3, 64, 64)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "vit.int8.onnx"
        result.save(path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {session.get_inputs()[0].name: pictures.numpy()})
        expected = module(pictures).numpy()
    snr = float(10 * np.log10(np.square(expected).sum() / np.square(expected - got).sum()))
    print(f"int8 in ONNX Runtime against float in torch: {snr:.1f} dB SNR")
    return snr


if __name__ == "__main__":
    main()
