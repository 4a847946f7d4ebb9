"""What the trials of one quantization share: found once, and the same model comes out."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from nncf.onnx.graph.metatypes import onnx_metatypes
from nncf.onnx.graph.nncf_graph_builder import GraphConverter
from nncf.quantization.algorithms.min_max.algorithm import MinMaxQuantization
from onnx import TensorProto, helper, numpy_helper

from attnquant import building, quantization
from attnquant.host import memory, statistics
from attnquant.host.known import SHAPE, Reduction
from attnquant.host.onnx_seams import SEAMS
from attnquant.host.run import HostResult
from attnquant.host.seams import applied
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
    assert len(compared) == 4, "what is asked, two strengths, and all samples"
    for expected, got in compared:
        assert expected.keys() == got.keys()
        for name, array in expected.items():
            if array.dtype == np.float32:
                np.testing.assert_allclose(got[name], array, rtol=2e-6, atol=2e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(got[name], array, err_msg=name)
    assert asked.count("setup") <= 2
    assert asked.count("run") <= 10 + 2, "one pass over the samples, but for the one that tells what is asked"


def test_statistics_are_told_apart_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, key = memory.HostMemory(), ("a", Reduction(op_type="ReduceMax"))
    one, other = ({"x": np.full(3, value, np.float32)} for value in (1, 2))
    found = {"a": {SHAPE: np.array([3]), key[1]: np.zeros(4, np.float32)}}
    asked: list[int] = []

    def find() -> dict[str, dict[Reduction, np.ndarray]]:
        asked.append(1)
        return {name: dict(of_tensor) for name, of_tensor in found.items()}

    for sample, runs in ((one, 1), ({"x": one["x"].copy()}, 1), (other, 2), ({"x": one["x"].view(np.int32)}, 3)):
        assert kept.remembered(sample, [key], find)["a"].keys() == found["a"].keys()
        assert len(asked) == runs
    kept.remembered(one, [("b", SHAPE)], find)
    assert len(asked) == 4, "what is not known is asked"
    monkeypatch.setattr(memory, "_MOST", 20)
    third = {"y": one["x"]}
    kept.remembered(third, [key], find)
    kept.remembered(third, [key], find)
    assert len(asked) == 6, "what does not fit is not kept"


def test_makers_of_tensors_are_listed_once_while_a_graph_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [helper.make_node("Gather", [name, "ids"], [f"{name}_rows"], name=f"gather_{name}") for name in "uvw"]
    nodes += [helper.make_node("Sum", ["u_rows", "v_rows", "w_rows"], ["y"], name="sum")]
    infos = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["n"]),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 16]) for name in ("y", "u_rows", "v_rows", "w_rows")),
    ]
    tables = [numpy_helper.from_array(tinymodels.weights(index, 4, 16), name) for index, name in enumerate("uvw")]
    model = tinymodels.made(helper.make_graph(nodes, "g", infos[:1], infos[1:2], tables, value_info=infos[2:]), 18)
    expected = GraphConverter.create_nncf_graph(model)
    listed: list[Any] = []
    original = onnx_metatypes.get_parents_node_mapping

    def counted(model: Any) -> Any:
        listed.append(model)
        return original(model)

    monkeypatch.setattr(onnx_metatypes, "get_parents_node_mapping", counted)
    with applied([seam for seam in SEAMS if seam.name.startswith("makers of tensors")]):
        got = GraphConverter.create_nncf_graph(model)
        assert len(listed) == 1
        onnx_metatypes.get_parents_node_mapping(model)
        onnx_metatypes.get_parents_node_mapping(model)
        assert len(listed) == 3, "nothing is kept outside"
    assert memory._structure(got) == memory._structure(expected)


def test_one_graph_for_models_that_differ_in_weights_alone() -> None:
    """Weights are no part of a graph; whole numbers and a few numbers may be sizes, and operators are."""
    kept, built = memory.HostMemory(), []

    def graph_of(weight: float, shape: int = 16, factor: float = 1.0, op_type: str = "MatMul") -> Any:
        node = helper.make_node(op_type, ["x", "w"], ["y"], name="one")
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 16]) for name in "xy"]
        arrays = {"w": np.full((16, 16), weight, np.float32), "shape": np.array([1, shape])}
        arrays["factors"] = np.full(4, factor, np.float32)
        held = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
        model = tinymodels.made(helper.make_graph([node], "g", infos[:1], infos[1:], held), 17)
        return kept.graph(model, lambda: built.append(model) or len(built))

    assert [graph_of(1.0), graph_of(2.0)] == [1, 1]
    assert graph_of(1.0, shape=8) == 2
    assert graph_of(1.0, factor=2.0) == 3
    assert graph_of(1.0, op_type="Add") == 4
    assert graph_of(3.0) == 1
