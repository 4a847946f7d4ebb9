"""Weights that came as int8: what could saturate a kernel without VNNI is stored as uint8, the same numbers."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant import runtime
from attnquant.emission import emit, exact
from attnquant.emission.execution import executed
from attnquant.emission.unsigned import raised
from attnquant.quantization import quantize
from attnquant.target import has_vnni, parse_target

WITHOUT = replace(parse_target("onnxruntime-cpu"), vnni=False)
WITH = replace(parse_target("onnxruntime-cpu"), vnni=True)
UNKNOWN = replace(parse_target("onnxruntime-cpu"), vnni=None)


def product(
    integers: np.ndarray, op: str = "MatMul", *, zero_point: np.ndarray | None = None, between: str = "",
    quantized: bool = True, shared: bool = False, rank: int = 2, **attributes: int,
) -> ir.Model:  # fmt: skip
    """x -> Q/DQ (uint8, scale 1) -> op with int8 weights behind DequantizeLinear, one scale per column (Conv: one)."""
    axis = 0 if op == "Conv" else 1
    scales = np.linspace(0.5, 1.5, integers.shape[axis]).astype(np.float32)
    data = {"w": integers, "ws": scales, "xs": np.float32(1), "xz": np.uint8(0), "i": np.array([1, 0])}
    if zero_point is not None:
        data["wz"] = zero_point
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "ws", *(["wz"] if zero_point is not None else [])], ["wd"], axis=axis),
        helper.make_node(op, ["xd" if quantized else "x", "wb" if between else "wd"], ["y"], name="product", **attributes),
    ]
    if between:
        extra = {"to": TensorProto.FLOAT} if between == "Cast" else {}
        nodes.insert(3, helper.make_node(between, ["wd"], ["wb"], **extra))
    if shared:
        nodes += [helper.make_node("Gather", ["w", "i"], ["rows"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    outputs += [helper.make_tensor_value_info("rows", TensorProto.INT8, None)] if shared else []
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * rank)], outputs,
        [numpy_helper.from_array(np.asarray(array), name) for name, array in data.items() if name in used],
    )  # fmt: skip
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


def full(rows: int = 64, columns: int = 8) -> np.ndarray:
    """Integers that use all 8 bits."""
    return np.random.default_rng(0).integers(-127, 128, (rows, columns)).astype(np.int8)


def stored(model: ir.Model) -> np.ndarray:
    """The integers that the weight's DequantizeLinear reads."""
    node = next(node for node in model.graph if node.op_type == "DequantizeLinear" and node.inputs[0].is_initializer())
    return node.inputs[0].const_value.numpy()


@pytest.mark.parametrize("zero_point", [None, np.zeros(8, np.int8), np.full(8, -3, np.int8)])
def test_the_runtime_is_exact_with_weights_of_all_8_bits(zero_point: np.ndarray | None) -> None:
    x = {"x": np.random.default_rng(1).integers(128, 256, (5, 64)).astype(np.float32)}
    weight = full().astype(np.float64) - (0 if zero_point is None else zero_point)
    expected = x["x"].astype(np.float64) @ (weight * np.linspace(0.5, 1.5, 8).astype(np.float32))
    made = product(full(), zero_point=zero_point)
    assert exact.apply(made, WITHOUT) == 1
    np.testing.assert_array_equal(stored(made), raised(full()))
    assert executed(made).int8 == ("product",)
    np.testing.assert_allclose(runtime.run(made, x, threads=1)["y"], expected, rtol=1e-5)
    if has_vnni() is False:  # what it is for
        before = runtime.run(product(full(), zero_point=zero_point), x, threads=1)["y"]
        assert np.abs(before - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("between", ["Cast", "Transpose", "Identity"])
def test_products_behind_a_move_or_a_cast(between: str) -> None:
    weight = full(8, 64) if between == "Transpose" else full()
    made = product(weight, between=between)
    assert exact.apply(made, WITHOUT) == 1
    assert stored(made).dtype == np.uint8


def test_the_whole_emission_does_it_for_cpus_that_are_not_known_to_be_exact() -> None:
    kinds = {}
    for target in (WITHOUT, UNKNOWN, WITH, parse_target("onnxruntime-cuda@1.31.1"), parse_target("openvino")):
        made = product(full())
        emit(made, target)
        kinds[target.name, target.vnni] = str(stored(made).dtype)
    assert kinds == {
        ("onnxruntime-cpu", False): "uint8", ("onnxruntime-cpu", None): "uint8", ("onnxruntime-cpu", True): "int8",
        ("onnxruntime-cuda", None): "int8", ("openvino", None): "int8",
    }  # fmt: skip


@pytest.mark.parametrize(
    "made",
    [
        product(full(), quantized=False),
        product(full(), shared=True),
        product(np.tile(np.array([[127], [1]], np.int8), (32, 8))),
        product(np.full((8, 2, 3, 3), 64, np.int8), "Conv", rank=4),
    ],
    ids=["a float activation", "rows that Gather reads", "pairs of 128", "convolution of half the range"],
)
def test_what_can_not_saturate_or_would_be_stored_twice_stays(made: ir.Model) -> None:
    assert exact.apply(made, WITHOUT) == 0
    assert stored(made).dtype == np.int8


@pytest.mark.parametrize(
    "made",
    [
        product(np.tile(np.array([[127], [2]], np.int8), (32, 8))),
        product(np.tile(np.array([[-127, -2]], np.int8), (8, 32)), "Gemm", transB=1),
        product(np.full((8, 2, 3, 3), 65, np.int8), "Conv", rank=4),
    ],
    ids=["pairs of 129", "a turned Gemm", "a convolution"],
)
def test_the_first_sum_that_saturates(made: ir.Model) -> None:
    assert exact.apply(made, WITHOUT) == 1


def tied(scales: np.ndarray, *, behind: str = "") -> ir.Model:
    """ids -> rows of an int8 table -> Relu -> Q/DQ (uint8) -> product with that table; `behind`: another reader of rows."""
    data = {"w": full(50, 64), "ws": scales, "xs": np.float32(0.004), "xz": np.uint8(0)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"], name="table", axis=0),
        helper.make_node("Gather", ["wd", "ids"], ["e"], name="embed"),
        helper.make_node("Relu", ["e"], ["r"], name="relu"),
        helper.make_node("QuantizeLinear", ["r", "xs", "xz"], ["rq"], name="quantize"),
        helper.make_node("DequantizeLinear", ["rq", "xs", "xz"], ["rd"], name="dequantize"),
        helper.make_node("Transpose", ["wd"], ["wt"], name="turn", perm=[1, 0]),
        helper.make_node("MatMul", ["rd", "wt"], ["y"], name="head"),
    ]
    if behind:
        nodes += [helper.make_node("Gather", ["w", "ids"], ["rows"], name="rows")]
        nodes += [helper.make_node(behind, ["rows"], ["other"], name="other", **({"to": 7} if behind == "Cast" else {}))]
    other = TensorProto.INT64 if behind == "Cast" else TensorProto.INT8
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    outputs += [helper.make_tensor_value_info("other", other, None)] if behind else []
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"])], outputs,
        [numpy_helper.from_array(np.asarray(array), name) for name, array in data.items()],
    )  # fmt: skip
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))


SCALES = {"one": np.float32(0.01), "rows": np.linspace(0.005, 0.01, 50).astype(np.float32)}
IDS = {"ids": np.arange(50).reshape(5, 10)}


@pytest.mark.parametrize("scales", SCALES)
def test_a_table_that_is_gathered_from_and_multiplied_stays_one_tensor_and_exact(scales: str) -> None:
    table = full(50, 64).astype(np.float64) * np.reshape(SCALES[scales], (-1, 1))
    rows = np.clip(np.rint(np.maximum(table[IDS["ids"]], 0) / 0.004), 0, 255) * 0.004
    made = tied(SCALES[scales])
    emit(made, WITHOUT)
    kinds = {value.dtype for value in made.graph.initializers.values() if value.const_value.size == 50 * 64}
    assert kinds == {ir.DataType.UINT8}
    assert sum(value.const_value.size == 50 * 64 for value in made.graph.initializers.values()) == 1
    assert executed(made).int8 == ("head",)
    assert level(rows @ table.T, runtime.run(made, IDS, threads=1)["y"]) > 60
    if has_vnni() is False:  # what it is for
        before = tied(SCALES[scales])
        emit(before, WITH)
        assert level(rows @ table.T, runtime.run(before, IDS, threads=1)["y"]) < 30


def level(expected: np.ndarray, got: np.ndarray) -> float:
    """SNR in dB."""
    return float(10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()))


@pytest.mark.parametrize("scales", SCALES)
def test_gathered_rows_are_the_same_numbers_bit_for_bit(scales: str) -> None:
    made = tied(SCALES[scales])
    emit(made, WITHOUT)
    made.graph.outputs[:] = [made.graph.node("relu").inputs[0]]
    rows = full(50, 64).astype(np.float32) * np.reshape(SCALES[scales], (-1, 1)).astype(np.float32)
    np.testing.assert_array_equal(next(iter(runtime.run(made, IDS).values())), rows[IDS["ids"]])


@pytest.mark.parametrize("behind", ["Cast", "Identity"])
def test_a_table_whose_integers_are_read_for_themselves_stays(behind: str) -> None:
    made = tied(SCALES["one"], behind=behind)
    emit(made, WITHOUT)
    assert made.graph.node("rows").inputs[0].dtype == ir.DataType.INT8
    np.testing.assert_array_equal(runtime.run(made, IDS)["other"], full(50, 64)[IDS["ids"]])


def test_a_model_that_came_quantized_keeps_its_numbers() -> None:
    """By quantize(): its own Q/DQ stay, the sum of squares of the float model is kept to rounding."""
    x = [{"x": np.random.default_rng(2).integers(0, 256, (4, 64)).astype(np.float32)}]
    given = product(full(), zero_point=np.zeros(8, np.int8))
    weight = ir.Value(name="other", const_value=ir.tensor(np.eye(8, dtype=np.float32), name="other"))
    given.graph.register_initializer(weight)
    left = ir.Node("", "MatMul", [given.graph.outputs[0], weight], name="left_to_do")
    left.outputs[0].name, left.outputs[0].type = "z", ir.TensorType(ir.DataType.FLOAT)
    given.graph.append(left)
    given.graph.outputs.append(left.outputs[0])
    result = quantize(given, x, target=WITHOUT).model
    expected = x[0]["x"].astype(np.float64) @ (full().astype(np.float64) * np.linspace(0.5, 1.5, 8).astype(np.float32))
    assert stored(result).dtype == np.uint8
    np.testing.assert_allclose(runtime.run(result, x[0], threads=1)["y"], expected, rtol=1e-5)
