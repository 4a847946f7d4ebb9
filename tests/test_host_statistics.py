"""Statistics reduced in the graph: the same quantizers as with NNCF's own reductions; no activation leaves the session."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from nncf.common.tensor_statistics import collectors as host
from nncf.tensor import Tensor
from onnx import TensorProto, helper, numpy_helper

from attnquant import building, quantization, runtime, saving
from attnquant import model as models
from attnquant.errors import ModelError
from attnquant.host import observation, onnx_seams, statistics
from attnquant.host.reductions import Reductions, reduction, settled
from attnquant.host.run import HostResult
from attnquant.recipe import load as load_recipe
from tests import tinymodels
from tests.corpora import entries

NAMES = (
    "bart_decoder_past_sdpa-dynamo-20.onnx",
    "bert_fp16_eager-dynamo-24.onnx",
    "gpt2_past_sdpa-dynamo-23.onnx",
    "neg_gated_pool-ts-17.onnx",
    "t5_decoder_past_sdpa-dynamostatic-18.onnx",
    "torch_sdpa_scale-ts-17.onnx",
)
ENTRIES = [entry for entry in entries("ATTNQUANT_NONE", "corpus") if entry.path.name in NAMES]
Both = Callable[..., list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]]


def constants(result: HostResult) -> dict[str, np.ndarray]:
    return {name: value.const_value.numpy() for name, value in result.model.graph.initializers.items()}  # type: ignore[union-attr]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """Quantizes; gives the constants of every model that the host made: (with NNCF's reductions, with ours)."""
    pairs: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
    ours = building.quantize_prepared
    stock = tuple(seam for seam in onnx_seams.SEAMS if seam.name != "statistics in the graph")
    assert len(stock) == len(onnx_seams.SEAMS) - 1

    def twice(model: ir.Model, data: Iterable[Any], points: Iterable[Any], **options: Any) -> HostResult:
        points = list(points)
        with monkeypatch.context() as patch:
            patch.setattr(onnx_seams, "SEAMS", stock)
            expected = ours(models.copy(model), data, points, **options)
        result = ours(model, data, points, **options)
        assert [node.name for node in result.model.graph] == [node.name for node in expected.model.graph]
        pairs.append((constants(expected), constants(result)))
        return result

    def run(*arguments: Any, **options: Any) -> list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        pairs.clear()
        quantization.quantize(*arguments, **options)
        return pairs

    monkeypatch.setattr(building, "quantize_prepared", twice)
    return run


@pytest.fixture
def plain_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions without optimizations: an activation has the same bits whoever reads it besides."""
    make = onnxruntime.InferenceSession

    def plain(source: Any, options: Any = None, **rest: Any) -> Any:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return make(source, options, **rest)

    monkeypatch.setattr(onnxruntime, "InferenceSession", plain)


def equal(pairs: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]], biases: Iterable[str] = ()) -> None:
    """Same names and bits; corrected biases, which are differences of means, to the order of their sums; and scales behind
    SmoothQuant to the last bits: its factor is taken out of one activation and put into the next one's maker."""
    assert pairs
    for expected, got in pairs:
        assert expected.keys() == got.keys()
        for name, array in expected.items():
            if name in biases:
                np.testing.assert_allclose(got[name], array, rtol=0, atol=1e-6 * max(1.0, float(np.abs(array).max())))
            elif name.startswith("scale_") and array.dtype == np.float32:
                np.testing.assert_allclose(got[name], array, rtol=2e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(got[name], array, err_msg=name)


def biases(model: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer if len(tensor.dims) == 1}


@pytest.mark.usefixtures("plain_runtime")
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_same_quantizers_as_the_host(entry: Any, both: Both) -> None:
    pairs = both(entry.path, entry.samples)
    equal(pairs, biases(onnx.load(entry.path)))
    assert any(name.startswith("scale_") for name in pairs[0][0])


@pytest.mark.parametrize("entry", ENTRIES[2:4], ids=str)
def test_optimized_sessions_differ_by_the_last_bits_of_activations(entry: Any, both: Both) -> None:
    for expected, got in both(entry.path, entry.samples):
        for name, array in expected.items():
            if array.dtype.kind == "f":
                np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_allclose(got[name].astype(int), array.astype(int), atol=1, err_msg=name)


def samples(*shapes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal(shape).astype(np.float32)} for shape in shapes]


def with_past() -> onnx.ModelProto:
    """x (1, s, 16) and past (1, p, 16), each through a linear, joined and through another."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], name="new"),
        helper.make_node("MatMul", ["past", "v"], ["pv"], name="old"),
        helper.make_node("Concat", ["pv", "xw"], ["both"], name="join", axis=1),
        helper.make_node("MatMul", ["both", "u"], ["y"], name="out"),
    ]
    sizes = {"x": "s", "past": "p"}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size, 16]) for name, size in sizes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, None, 16])
    weights = [numpy_helper.from_array(tinymodels.weights(index, 16, 16), name) for index, name in enumerate("uvw")]
    return tinymodels.made(helper.make_graph(nodes, "g", infos, [output], weights), 18)


def empty_pasts() -> list[dict[str, np.ndarray]]:
    pasts = samples((1, 3, 16), (1, 0, 16), (1, 5, 16))
    return [{**new, "past": past["x"]} for new, past in zip(samples(*[(1, 4, 16)] * 3), pasts, strict=True)]


@pytest.mark.usefixtures("plain_runtime")
def test_batches_and_lengths_differ_and_some_are_empty(both: Both) -> None:
    equal(both(tinymodels.attention(), samples((1, 5, 16), (3, 2, 16), (1, 7, 16))))


@pytest.mark.usefixtures("plain_runtime")
def test_tensors_without_elements(both: Both) -> None:
    equal(both(with_past(), empty_pasts()))


@pytest.mark.usefixtures("plain_runtime")
@pytest.mark.parametrize("estimator", ["mean_minmax", "histogram"])
def test_other_estimators(both: Both, estimator: str) -> None:
    """A histogram is no reduction: its tensors are fetched as before."""
    recipe = load_recipe("int8")
    recipe = replace(recipe, ranges=replace(recipe.ranges, estimator=estimator))
    equal(both(tinymodels.attention(), samples((2, 5, 16), (1, 4, 16)), recipe=recipe))


@pytest.mark.usefixtures("plain_runtime")
def test_weights_in_files(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "LARGE", 0)
    monkeypatch.setattr(saving, "MIN_EXTERNAL_BYTES", 64)
    equal(both(tinymodels.attention(), samples((2, 5, 16), (1, 4, 16))))


@pytest.mark.usefixtures("plain_runtime")
def test_a_runtime_that_refuses_a_reduction(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    run = statistics.Observation.run

    def picky(self: statistics.Observation, sample: Any) -> Any:
        if 0 in sample["past"].shape and not refused:
            refused.append(self)
            msg = "no minimum of nothing"
            raise ModelError(msg)
        return run(self, sample)

    monkeypatch.setattr(statistics.Observation, "run", picky)
    equal(both(with_past(), empty_pasts()))
    assert refused


def test_activations_stay_in_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    run = statistics.Observation.run
    largest = runtime.run_session

    def watched(*arguments: Any) -> dict[str, np.ndarray]:
        found = largest(*arguments)
        fetched.extend(array.size for array in found.values())
        return found

    def observed(self: statistics.Observation, sample: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(observation.runtime, "run_session", watched)
            return run(self, sample)

    monkeypatch.setattr(statistics.Observation, "run", observed)
    quantization.quantize(tinymodels.attention(), samples((4, 50, 16), (4, 50, 16)), recipe="encoder")
    assert fetched
    assert max(fetched) <= tinymodels.WIDTH


REDUCERS = [
    (kind, options)
    for kind in (host.MinReducer, host.MaxReducer, host.AbsMaxReducer, host.MeanReducer)
    for options in ({}, {"axes": (0,)}, {"axes": (-1, 0)}, {"axes": (-1,), "axes_mode": host.AxesMode.KEEP}, {"axes": ()})
] + [(host.BatchMeanReducer, {}), (host.ShapeReducer, {}), *((host.MeanPerChReducer, {"channel_axis": n}) for n in (1, -1))]


def computed(reducer: host.TensorReducerBase, array: np.ndarray, opset: int, rank: int | None) -> np.ndarray | None:
    """What the reducer's node makes of an array; None where the reducer has none."""
    node = reduction(reducer, ir.DataType.FLOAT, rank)
    if node is None:
        return None
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, None if rank is None else [None] * rank)
    copy = helper.make_node("Identity", ["x"], ["y"], name="copy")
    graph = helper.make_graph([copy], "g", [info], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    model = ir.from_proto(tinymodels.made(graph, opset))
    output = Reductions(model).of(model.graph.inputs[0], node)
    model.graph.outputs[:] = [output]
    found = runtime.run_session(runtime.session_of(model), {"x": array})
    return settled(reducer, found[output.name or ""])[0].data


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize("rank", [1, 2, 3, 4, None])
@pytest.mark.parametrize(("kind", "options"), REDUCERS, ids=str)
def test_nodes_compute_what_reducers_compute(kind: Any, options: dict[str, Any], rank: int | None, opset: int) -> None:
    reducer = kind(**options)
    array = np.random.default_rng(rank or 7).standard_normal((3, 5, 4, 2)[: rank or 3]).astype(np.float32)
    try:
        expected = reducer([Tensor(array)])[0].data
    except (ValueError, IndexError):  # no such axes in a tensor of this rank
        return
    got = computed(reducer, array, opset, rank)
    if got is None:
        assert rank is None or np.shape(expected) == array.shape or options.get("axes") == ()
        return
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    if "Mean" in kind.__name__:
        np.testing.assert_allclose(got, expected, rtol=0, atol=5e-7)
    else:
        np.testing.assert_array_equal(got, expected)


def test_other_reducers_and_types_run_outside() -> None:
    assert reduction(host.RawReducer(), ir.DataType.FLOAT, 3) is None
    assert reduction(host.QuantileReducer(axes=(0,)), ir.DataType.FLOAT, 3) is None
    assert reduction(host.MinReducer(), ir.DataType.INT64, 3) is None
    assert reduction(host.MinReducer(inplace=True), ir.DataType.FLOAT, 3) is None


def test_equal_reductions_are_one_node_under_free_names() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["ReduceMax_of_x_output"], name="ReduceMax_of_x")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "ReduceMax_of_x_output")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [numpy_helper.from_array(np.zeros(1), "reduced_axes")])
    model = ir.from_proto(tinymodels.made(graph, 18))
    made, value = Reductions(model), model.graph.inputs[0]
    kinds = (host.MaxReducer, host.MaxReducer, host.AbsMaxReducer)
    wanted = [reduction(kind(axes=(0,)), ir.DataType.FLOAT, 2) for kind in kinds]
    outputs = [made.of(value, node) for node in wanted if node is not None]
    assert outputs[0] is outputs[1]
    assert outputs[0] is not outputs[2]
    names = [node.name for node in model.graph] + [output.name for node in model.graph for output in node.outputs]
    assert len(names) == len(set(names)) == 8
