"""Half precision variants of models that exist: what makes them, what is measured of them, and quantize on them."""

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant.dtypes import infer_types
from attnquant.model import load
from attnquant.quantization import quantize
from benchmarks.bfloat16 import as_bfloat16
from benchmarks.half import alone, bf16, fp16, sizes
from tests.corpora import Entry, entries, runnable

BF16 = ir.DataType.BFLOAT16
ENTRIES = {entry.path.name: entry for entry in entries("X", "corpus") + entries("X", "cases")}
BOTH = ("d_onnx23_3d_fp16.onnx", "c_static_causal1_nonpad_fp16.onnx", "a_gqa_folded_dead.onnx")
FLOATS = ("d_decomposed.onnx", "d_ms_gqa.onnx", "torch_sdpa_plain-dynamo-23.onnx", "c_static_if.onnx")


@pytest.mark.parametrize("name", BOTH)
def test_fp16_is_as_wanted(name: str) -> None:
    found = fp16(ENTRIES[name])
    assert found["problems"] == []
    assert found["dB"] >= 20.0


@pytest.mark.parametrize("name", [*BOTH, *FLOATS])
def test_bf16_is_as_wanted(name: str) -> None:
    assert bf16(ENTRIES[name])["problems"] == []


@pytest.mark.parametrize("name", FLOATS)
def test_the_bf16_variant_has_the_rounded_weights_and_no_float_left(name: str) -> None:
    source = load(ENTRIES[name].path)
    made = as_bfloat16(source)
    types = infer_types(made)
    assert types.conflicts == []
    plain = {value for node in made.graph if node.op_type == "Cast" for value in (*node.inputs, *node.outputs)}
    assert not [value.name for value in types.types if types.dtype(value) == ir.DataType.FLOAT and value not in plain]
    weights = {key: value.const_value for key, value in source.graph.initializers.items()}
    rounded = [key for key, data in weights.items() if data is not None and data.dtype == ir.DataType.FLOAT]
    for key in rounded:
        found = made.graph.initializers[key].const_value
        assert found is not None
        assert np.array_equal(found.numpy(), weights[key].numpy().astype(ml_dtypes.bfloat16))
    assert [(value.name, str(value.shape)) for value in made.graph.outputs] == [
        (value.name, str(value.shape)) for value in source.graph.outputs
    ]


def test_an_operator_without_bfloat16_works_in_float_between_casts() -> None:
    """Einsum takes no bfloat16 in any opset; a Constant of plain numbers is float32 by definition."""
    nodes = [
        helper.make_node("Constant", [], ["two"], name="two", value_float=2.0),
        helper.make_node("Einsum", ["x", "w"], ["e"], name="einsum", equation="bi,io->bo"),
        helper.make_node("Mul", ["e", "two"], ["y"], name="mul"),
    ]
    border = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", 4]) for name in "xy"]
    weight = numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "g", border[:1], border[1:], [weight])
    made = as_bfloat16(ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])))
    types = infer_types(made)
    assert types.conflicts == []
    dtypes = {node.name: [types.dtype(value) for value in (*node.inputs, *node.outputs)] for node in made.graph}
    assert dtypes["einsum"] == [ir.DataType.FLOAT] * 3
    assert dtypes["mul"] == [BF16] * 3
    assert [value.name for value in made.graph.outputs] == ["y"]


def test_sizes_see_a_dead_weight_a_grown_one_and_another_border() -> None:
    entry = ENTRIES["d_onnx23_3d_fp16.onnx"]
    before = load(entry.path)
    samples, _ = runnable(entry.path)
    result = quantize(before, samples).model
    assert sizes(before, result, [])["problems"] == []
    data = ir.Tensor(np.ones((64, 64), np.float32), name="extra")
    extra = ir.Value(name="extra", const_value=data, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([64, 64]))
    result.graph.register_initializer(extra)
    result.graph.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    found = " | ".join(sizes(before, result, [])["problems"])
    for word in ("dead 'extra'", "float32 'extra'", "bytes of constants", "declared otherwise"):
        assert word in found


def test_a_process_that_dies_is_a_row() -> None:
    def dies(entry: Entry) -> dict[str, object]:
        import os

        os._exit(3)

    assert "ended with 3" in alone(dies, ENTRIES["d_decomposed.onnx"])["problems"][0]
