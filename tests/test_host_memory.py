"""What the trials of one quantization share: found once, and the same model comes out."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from nncf.quantization.algorithms.min_max.algorithm import MinMaxQuantization

from attnquant import building, quantization
from attnquant.host import memory, statistics
from attnquant.host.run import HostResult
from tests import tinymodels


def samples(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((2, 3 + index, 16)).astype(np.float32)} for index in range(count)]


def constants(result: HostResult) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in result.model.graph.initializers.items()}  # type: ignore[union-attr]


def test_trials_ask_once_and_come_out_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two strengths and then all samples, beside the same three without memory."""
    asked: list[str] = []
    find, run, quantize = MinMaxQuantization._get_quantizer_setup, statistics.Observation.run, building.quantize_prepared
    compared = []

    def counted(*arguments: Any) -> Any:
        asked.append("setup")
        return find(*arguments)

    def ran(self: statistics.Observation, sample: Any) -> Any:
        asked.append("run")
        return run(self, sample)

    def twice(model: Any, data: Any, points: Iterable[Any], *, memory: Any, **options: Any) -> HostResult:
        points = list(points)
        with monkeypatch.context() as patch:
            patch.setattr(MinMaxQuantization, "_get_quantizer_setup", find)
            patch.setattr(statistics.Observation, "run", run)
            expected = quantize(building.models.copy(model), data, points, **options)
        result = quantize(model, data, points, memory=memory, **options)
        compared.append((constants(expected), constants(result)))
        return result

    monkeypatch.setattr(MinMaxQuantization, "_get_quantizer_setup", counted)
    monkeypatch.setattr(statistics.Observation, "run", ran)
    monkeypatch.setattr(building, "quantize_prepared", twice)
    quantization.quantize(tinymodels.attention(), samples(10))
    assert len(compared) == 3
    for expected, got in compared:
        assert expected.keys() == got.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert asked.count("setup") == 1
    assert asked.count("run") == 10 + (6 + 6 + 10), "SmoothQuant's statistics once a sample, ranges once a trial and sample"


def test_statistics_are_told_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = memory.HostMemory()
    tensor = type("Tensor", (), {"data": np.zeros(4, np.float32)})
    one, other = ({"x": np.full(3, value, np.float32)} for value in (1, 2))
    found = {"a": [tensor]}
    assert kept.remembered(b"model", one, lambda: found) is found
    assert kept.remembered(b"model", {"x": one["x"].copy()}, dict) is found
    assert kept.remembered(b"model", other, dict) == {}
    assert kept.remembered(b"other", one, dict) == {}
    assert kept.remembered(b"model", {"x": one["x"].view(np.int32)}, dict) == {}
    monkeypatch.setattr(memory, "_MOST", 20)
    third = {"y": one["x"]}
    assert kept.remembered(b"model", third, lambda: found) is found
    assert kept.remembered(b"model", third, dict) == {}, "what does not fit is not kept"
