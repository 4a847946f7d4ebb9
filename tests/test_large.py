"""Large models: their weights reach NNCF and the sessions through files, and the result is the same."""

import os

import numpy as np
import onnx_ir as ir
import pytest

from attnquant import runtime, saving
from attnquant.quantization import quantize
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
