"""A constant times an activation with a bias (Mamba, 1x1 convolutions as products) quantizes like any other model."""

from typing import Any

import nncf
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import tinymodels
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant.host import bias as corrections

WIDTH = tinymodels.WIDTH


def turned(bias: tuple[int, ...]) -> onnx.ModelProto:
    """x (batch, WIDTH, 6) -> W x + b -> Relu -> transposed -> MatMul and Add, weight on the right -> y."""
    nodes = [
        helper.make_node("MatMul", ["w", "x"], ["wx"], name="left"),
        helper.make_node("Add", ["wx", "b"], ["wxb"], name="add"),
        helper.make_node("Relu", ["wxb"], ["r"], name="relu"),
        helper.make_node("Transpose", ["r"], ["t"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["t", "v"], ["tw"], name="right"),
        helper.make_node("Add", ["tw", "c"], ["y"], name="add_right"),
    ]
    weights = {"w": (WIDTH, WIDTH), "b": bias, "v": (WIDTH, WIDTH), "c": (WIDTH,)}
    graph = helper.make_graph(
        nodes,
        "turned",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 6, WIDTH])],
        [
            numpy_helper.from_array(tinymodels.weights(seed, *shape), name)
            for seed, (name, shape) in enumerate(weights.items())
        ],
    )
    return tinymodels.made(graph, 17)


@pytest.mark.parametrize("bias", [(WIDTH, 1), (1, WIDTH, 1), (6,), (1,)], ids=str)
def test_a_bias_behind_a_weight_on_the_left(bias: tuple[int, ...]) -> None:
    model = turned(bias)
    data = [{"x": tinymodels.weights(seed, 2, WIDTH, 6) * 2} for seed in range(8)]
    result = attnquant.quantize(model, data)
    quantized = ir.to_proto(result.model)
    (expected,), (got,) = tinymodels.run(model, data[0]), tinymodels.run(quantized, data[0])
    assert 10 * np.log10(np.square(expected).sum() / np.square(expected - got).sum()) > 25
    report = attnquant.check(result.model)
    assert report.ok
    assert "right" not in {linear.node for linear in report.linears if linear.reason}


def linears() -> onnx.ModelProto:
    """x (batch, 6, WIDTH) -> three times MatMul, Add, Elu."""
    nodes, stored, flow = [], [], "x"
    for place in range(3):
        stored.append(numpy_helper.from_array(tinymodels.weights(place, WIDTH, WIDTH), f"w{place}"))
        stored.append(numpy_helper.from_array(tinymodels.weights(10 + place, WIDTH), f"b{place}"))
        nodes.append(helper.make_node("MatMul", [flow, f"w{place}"], [f"p{place}"], name=f"linear{place}"))
        nodes.append(helper.make_node("Add", [f"p{place}", f"b{place}"], [f"s{place}"], name=f"add{place}"))
        nodes.append(helper.make_node("Elu", [f"s{place}"], [f"r{place}"], name=f"elu{place}"))
        flow = f"r{place}"
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 6, WIDTH]) for name in ("x", flow)]
    return tinymodels.made(helper.make_graph(nodes, "linears", [sides[0]], [sides[1]], stored), 17)


def test_biases_are_corrected_as_by_the_host_with_a_session_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [{"x": tinymodels.weights(seed, 2, 6, WIDTH) * 2 + 0.5} for seed in range(8)]
    computed, product = [], corrections._product

    def counted(*given: Any) -> np.ndarray | None:
        computed.append(product(*given))
        return computed[-1]

    monkeypatch.setattr(corrections, "_product", counted)
    ours = nncf_biases(linears(), data)
    assert len(computed) == 3
    assert all(found is not None for found in computed)
    monkeypatch.setattr(corrections, "_product", lambda *given: None)
    theirs = nncf_biases(linears(), data)
    assert ours.keys() == theirs.keys() == {"b0", "b1", "b2"}
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-5, atol=1e-5)
        assert not np.array_equal(array, tinymodels.weights(10 + int(name[1]), WIDTH))


def nncf_biases(model: onnx.ModelProto, data: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """{name of a bias: its values} in the host's own form."""
    found = {}
    with attnquant.extended():
        made = nncf.quantize(model, nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, fast_bias_correction=True)
    for node in made.graph.node:
        if node.op_type == "Add" and node.name.startswith("add"):
            for tensor in made.graph.initializer:
                if tensor.name in node.input:
                    found[f"b{node.name[-1]}"] = numpy_helper.to_array(tensor)
    return found
