"""Large models: their weights reach NNCF and the sessions through files, and the result is the same."""

import os
import threading
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnquant import runtime, saving
from attnquant.quantization import quantize
from attnquant.runtime import release_memory
from benchmarks import big
from tests import tinymodels


def weights_of(model: ir.Model) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}


@pytest.mark.parametrize("samples", [2, 9])
def test_weights_in_files_give_the_same_model(samples: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = [{"x": tinymodels.weights(seed, 2, 5, tinymodels.WIDTH)} for seed in range(samples)]
    expected = quantize(tinymodels.attention(), data)
    monkeypatch.setattr(saving, "LARGE", 0)
    monkeypatch.setattr(saving, "MIN_EXTERNAL_BYTES", 64)
    monkeypatch.setattr("attnquant.host.onnx_seams.MIN_EXTERNAL_BYTES", 64)
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path))
    written: list[str] = []
    mapped = saving.mapped

    def noted(model: ir.Model, folder: str) -> None:
        written.extend(os.listdir(folder))
        mapped(model, folder)

    monkeypatch.setattr("attnquant.host.run.mapped", noted)
    result = quantize(tinymodels.attention(), data)
    assert "weights.data" in written
    assert [name for name in written if name != "weights.data"], "smoothed weights are in files too"
    assert not os.listdir(tmp_path), "nothing is left behind"
    first, second = weights_of(expected.model), weights_of(result.model)
    assert list(first) == list(second)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])
    assert not saving.uses_external_data(result.model)
    outputs = [runtime.run(model, data[0], threads=1) for model in (expected.model, result.model)]
    np.testing.assert_array_equal(*[next(iter(one.values())) for one in outputs])


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="resident memory is read from /proc")
def test_memory_stays_below_the_size_of_the_model(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of files are not counted: the system takes them back when it needs them."""
    monkeypatch.setattr(big, "WIDTH", 512)
    monkeypatch.setattr(runtime, "SPARED", 0)  # 80 MB stand for a large model
    model = big.generate(tmp_path, 0.08)
    size = (tmp_path / "big.onnx.data").stat().st_size
    data = [{"x0": tinymodels.weights(seed, 1, 8, 512)} for seed in range(2)]
    quantize(tinymodels.attention(), [{"x": tinymodels.weights(0, 2, 5, tinymodels.WIDTH)}])  # what is imported is there
    release_memory()
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        quantize(model, data)
    finally:
        done.set()
        watcher.join()
    assert peak - before < 1.6 * size


def anonymous() -> int:
    """Resident bytes of this process that are not pages of files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


@pytest.mark.parametrize(("limit", "spared"), [(0, True), (2**27, False)])
def test_only_large_models_do_without_packed_weights(limit: int, spared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(runtime, "SPARED", limit)
    monkeypatch.setattr(runtime, "_spare", asked.append)
    with runtime.session(ir.from_proto(tinymodels.linear()), spare=True):
        assert bool(asked) == spared
