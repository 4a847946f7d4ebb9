"""Accuracy of real models, float and int8, held against benchmarks/accuracy.toml: a regression suite.

    python -m benchmarks.accuracy                       # fails where a figure became worse by more than its tolerance
    python -m benchmarks.accuracy --attnquant-update    # records what it measures, and fails once
    python -m benchmarks.accuracy -k minilm

Every model is quantized by the default recipe with 64 calibration samples at most and run on its held-out data (README.md).
"""

import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import track

import attnquant
from attnquant.pytest_plugin import Recorder
from benchmarks.metrics import SignalToNoise
from benchmarks.models import MODELS
from benchmarks.runners import open_onnxruntime

SAMPLES = 64
TOLERANCES = {"dinov2": 0.01, "minilm": 0.02, "ppocr": 0.005, "rxnmapper": 0.005, "digits": 0.003}
"""By model, how much worse its task metric may become; SNR by `SNR_TOLERANCE`."""
SNR_TOLERANCE = 1.0


@pytest.mark.parametrize("name", TOLERANCES)
def test_real_model(name: str, attnquant_suite: Recorder, tmp_path: Path) -> None:
    """SNR and the task's own metric on held-out data."""
    model = MODELS[name]
    path, quantized = model.make(), tmp_path / "int8.onnx"
    attnquant.quantize(path, model.calibration(SAMPLES), samples=SAMPLES).save(quantized)
    first, second = open_onnxruntime(path, threads=2), open_onnxruntime(quantized, threads=2)
    noise, scores = SignalToNoise(), (model.metric.start(), model.metric.start())
    for feeds in track(model.test(), f"{name}, held-out data", console=Console(stderr=True), total=None):
        expected, got = first(feeds), second(feeds)
        noise.add(expected, got)
        for score, outputs in zip(scores, (expected, got), strict=True):
            score.add(feeds, expected, outputs)
    attnquant_suite.record(name, "snr_db", float_value=200.0, quantized_value=noise.value(), tolerance=SNR_TOLERANCE)
    attnquant_suite.record(
        name, model.metric.name, float_value=scores[0].value(), quantized_value=scores[1].value(),
        tolerance=TOLERANCES[name], better="higher" if model.metric.higher_is_better else "lower",
    )


if __name__ == "__main__":
    _file = Path(__file__).with_suffix(".toml")
    sys.exit(pytest.main([__file__, "-o", f"attnquant_suite_file={_file}", "-v", *sys.argv[1:]]))
