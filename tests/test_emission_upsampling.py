"""Transposed convolutions written as convolutions compute what the specification says, in numpy by its own definition."""

import itertools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant.emission import executed
from attnquant.emission.upsampling import as_convolutions
from attnquant.model import load
from attnquant.runtime import run
from attnquant.target import parse_target
from tests import tinymodels

CPU = parse_target("onnxruntime-cpu")
IN, OUT = 6, 4


def scattered(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, stride: int, pads: Any, more: Any = (0, 0)) -> np.ndarray:
    """ConvTranspose by its definition: every input pixel adds its multiple of the kernel to the output."""
    batch, _, height, width = x.shape
    rows, columns = weight.shape[2:]
    sizes = ((height - 1) * stride + rows + more[0], (width - 1) * stride + columns + more[1])
    full = np.zeros((batch, weight.shape[1], *sizes))
    for i, j in itertools.product(range(height), range(width)):
        patch = np.einsum("nc,cohw->nohw", x[:, :, i, j], weight)
        full[:, :, i * stride : i * stride + rows, j * stride : j * stride + columns] += patch
    top, left, bottom, right = pads
    full = full[:, :, top : full.shape[2] - bottom, left : full.shape[3] - right]
    return full + bias[:, None, None]


def network(
    kernel: tuple[int, int], *, behind: tuple[str, ...] = (), bias: bool = True, shared: bool = False, **attributes: Any
) -> onnx.ModelProto:
    """x (batch, IN, h, w) -> ConvTranspose "up" -> the operators `behind` -> y."""
    nodes = [helper.make_node("ConvTranspose", ["x", "w", "b"] if bias else ["x", "w"], ["u"], name="up", **attributes)]
    for index, op_type in enumerate(behind):
        more = ["s", "t", "m", "v"] if op_type == "BatchNormalization" else []
        nodes.append(helper.make_node(op_type, [nodes[-1].output[0], *more], [f"t{index}"], name=f"behind_{index}"))
    outputs = ["y", "u"] if shared else ["y"]
    if shared:
        nodes.append(helper.make_node("Neg", [nodes[-1].output[0]], ["y"], name="neg"))
    else:
        nodes[-1].output[0] = "y"
    arrays = {
        "w": tinymodels.weights(0, IN, OUT, *kernel), "b": tinymodels.weights(1, OUT), "s": tinymodels.weights(2, OUT),
        "t": tinymodels.weights(3, OUT), "m": tinymodels.weights(4, OUT), "v": tinymodels.weights(5, OUT) ** 2 + 0.1,
    }
    graph = helper.make_graph(
        nodes, "upsampling", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", IN, "h", "w"])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", OUT, "H", "W"]) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    return tinymodels.made(graph, 17)


def rewritten(model: onnx.ModelProto) -> tuple[ir.Model, ir.Model]:
    before = load(model)
    return before, as_convolutions(before, CPU)


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def arrays(model: ir.Model) -> dict[str, np.ndarray]:
    constants = model.graph.initializers.items()
    return {name: value.const_value.numpy() for name, value in constants if value.const_value is not None}


FORMS = [
    ((4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 2), {"strides": [2, 2]}),
    ((6, 3), {"strides": [3, 3], "pads": [0, 1, 2, 0]}),
    ((4, 4), {"strides": [2, 2], "pads": [1, 0, 1, 1], "output_padding": [1, 0]}),
    ((4, 8), {"strides": [4, 4]}),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("kernel", "attributes"), FORMS)
def test_the_same_sums(kernel: tuple[int, int], attributes: dict[str, Any], bias: bool) -> None:
    before, after = rewritten(network(kernel, bias=bias, **attributes))
    assert kinds(after)[:2] == ["Conv", "DepthToSpace"]
    assert ("Slice" in kinds(after)) == bool(set(attributes.get("pads", ())) - {0})
    x = tinymodels.weights(9, 2, IN, 5, 3)
    own = arrays(before)
    added, pads = own["b"] if bias else np.zeros(OUT), attributes.get("pads", (0,) * 4)
    more = attributes.get("output_padding", (0, 0))
    expected = scattered(x, own["w"], added, attributes["strides"][0], pads, more)
    np.testing.assert_allclose(run(after, {"x": x})["y"], expected, atol=1e-5)
    np.testing.assert_allclose(run(before, {"x": x})["y"], expected, atol=1e-5)


def test_normalization_goes_into_the_weights_and_the_activation_behind_the_convolution() -> None:
    form = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    before, after = rewritten(network((4, 4), behind=("BatchNormalization", "Relu"), **form))
    assert kinds(after) == ["Conv", "Relu", "DepthToSpace", "Slice"]
    assert [node.name for node in after.graph][:2] == ["up", "behind_1"]
    assert set(after.graph.initializers) == {"w_phases", "up_bias_phases", "crop_starts", "crop_ends", "crop_axes"}
    x, own = tinymodels.weights(9, 2, IN, 5, 3), arrays(before)
    plain = scattered(x, own["w"], own["b"], 2, (1, 1, 1, 1))
    shape = (OUT, 1, 1)
    normal = (plain - own["m"].reshape(shape)) / np.sqrt(own["v"] + 1e-5).reshape(shape)
    expected = np.maximum(normal * own["s"].reshape(shape) + own["t"].reshape(shape), 0)
    np.testing.assert_allclose(run(after, {"x": x})["y"], expected, atol=1e-5)


def test_a_result_that_others_read_keeps_its_name() -> None:
    before, after = rewritten(network((4, 4), shared=True, strides=[2, 2]))
    assert [value.name for value in after.graph.outputs] == ["y", "u"]
    x = tinymodels.weights(9, 1, IN, 3, 3)
    for name, expected in run(before, {"x": x}).items():
        np.testing.assert_allclose(run(after, {"x": x})[name], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "attributes"),
    [
        ((3, 3), {"strides": [2, 2]}),
        ((4, 4), {"strides": [1, 1]}),
        ((4, 4), {"strides": [2, 4]}),
        ((4, 4), {"strides": [2, 2], "dilations": [2, 2]}),
        ((4, 4), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((4, 4), {"strides": [2, 2], "output_padding": [1, 1]}),
    ],
)
def test_others_are_left_alone(kernel: tuple[int, int], attributes: dict[str, Any]) -> None:
    before, after = rewritten(network(kernel, **attributes))
    assert after is before


def test_other_targets_keep_the_operator() -> None:
    model = load(network((4, 4), strides=[2, 2]))
    assert as_convolutions(model, parse_target("openvino")) is model


def test_quantizing_writes_them_out() -> None:
    model = network((4, 4), behind=("Relu",), strides=[2, 2], pads=[1, 1, 1, 1])
    x = tinymodels.weights(9, 1, IN, 4, 4)
    result = attnquant.quantize(model, [{"x": x}], target="onnxruntime-cpu")
    assert "ConvTranspose" not in kinds(result.model)
    np.testing.assert_allclose(run(result.model, {"x": x})["y"], run(load(model), {"x": x})["y"], atol=1e-5)


def decoder() -> onnx.ModelProto:
    """x -> two ConvTranspose with Relu -> Conv -> Resize to twice its size, as a decoder of saliency or depth has them."""
    wide, narrow = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8, 6, 6]), ["batch", 3, "H", "W"]
    turned = {"strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("ConvTranspose", ["x", "w0", "b0"], ["u0"], name="up0", **turned),
        helper.make_node("Relu", ["u0"], ["r0"], name="relu0"),
        helper.make_node("ConvTranspose", ["r0", "w1", "b1"], ["u1"], name="up1", **turned),
        helper.make_node("Relu", ["u1"], ["r1"], name="relu1"),
        helper.make_node("Conv", ["r1", "w2", "b2"], ["c"], name="last"),
        helper.make_node("Shape", ["c"], ["size"], name="size"),
        helper.make_node("Mul", ["size", "twice"], ["sizes"], name="sizes"),
        helper.make_node("Resize", ["c", "", "", "sizes"], ["y"], name="resize", mode="linear"),
    ]
    arrays = {
        "w0": tinymodels.weights(0, 8, 6, 4, 4), "b0": tinymodels.weights(1, 6), "w1": tinymodels.weights(2, 6, 4, 4, 4),
        "b1": tinymodels.weights(3, 4), "w2": tinymodels.weights(4, 3, 4, 1, 1), "b2": tinymodels.weights(5, 3),
        "twice": np.array([1, 1, 2, 2]),
    }  # fmt: skip
    graph = helper.make_graph(
        nodes, "decoder", [wide], [helper.make_tensor_value_info("y", TensorProto.FLOAT, narrow)],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    return tinymodels.made(graph, 17)


def test_a_decoder_runs_in_int8() -> None:
    model = decoder()
    data = [{"x": tinymodels.weights(seed, 1, 8, 6, 6)} for seed in range(20, 24)]
    result = attnquant.quantize(model, data, target="onnxruntime-cpu")
    assert attnquant.check(result.model).ok
    report = executed(result.model)
    assert len(report.int8) == 3
    assert "Conv" not in report.operators
    assert report.operators["QuantizeLinear"] == 1  # of the input; every other tensor comes out of a kernel in integers
    expected, got = run(load(model), data[0])["y"], run(result.model, data[0])["y"]
    assert 10 * np.log10(np.square(expected).sum() / np.square(expected - got).sum()) > 30
