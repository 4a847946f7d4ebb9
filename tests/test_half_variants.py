"""Half precision variants of models that exist: what makes them, what is measured of them, and quantize on them."""

import sys
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant.dtypes import infer_types
from attnquant.model import load
from attnquant.quantization import quantize
from benchmarks import half
from benchmarks.bfloat16 import as_bfloat16
from benchmarks.half import alone, as_float16, bf16, fp16, sizes
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


def test_the_lowest_float_of_a_mask_is_the_lowest_bfloat16_and_infinity_stays() -> None:
    """Rounded to nearest it would be -inf, and a row that is masked whole would be NaN."""
    mask = np.asarray([np.finfo(np.float32).min, np.finfo(np.float32).max, -np.inf, np.nan, 1.5], np.float32)
    border = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [5]) for name in "xy"]
    nodes = [helper.make_node("Add", ["x", "mask"], ["y"], name="add")]
    graph = helper.make_graph(nodes, "g", border[:1], border[1:], [numpy_helper.from_array(mask, "mask")])
    made = as_bfloat16(ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])))
    found = made.graph.initializers["mask"].const_value.numpy().astype(np.float32)
    largest = np.float32(2.0**127 * (2 - 2.0**-7))
    np.testing.assert_array_equal(found, np.asarray([-largest, largest, -np.inf, np.nan, 1.5], np.float32))


def test_the_converter_sees_no_inner_declarations_and_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It believes those it finds, and declares inner tensors wrongly: here, as a stand-in, an integer one as float."""
    seen = []

    def convert(proto: onnx.ModelProto, **options: object) -> onnx.ModelProto:
        seen.extend(proto.graph.value_info)
        proto.graph.value_info.append(helper.make_tensor_value_info("c", TensorProto.FLOAT16, [4]))
        return proto

    module = SimpleNamespace(float16=SimpleNamespace(convert_float_to_float16=convert))
    monkeypatch.setitem(sys.modules, "onnxconverter_common", module)
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], name="integers", to=TensorProto.INT64),
        helper.make_node("Cast", ["c"], ["y"], name="floats", to=TensorProto.FLOAT),
    ]
    border = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    inner = [helper.make_tensor_value_info("c", TensorProto.INT64, [4])]
    graph = helper.make_graph(nodes, "g", border[:1], border[1:], value_info=inner)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), tmp_path / "m.onnx")
    made = as_float16(str(tmp_path / "m.onnx"))
    assert seen == []
    assert [node.attributes.get_int("to") for node in made.graph] == [TensorProto.INT64, TensorProto.FLOAT16]
    assert made.graph.node("integers").outputs[0].type is None


def test_the_parts_of_the_table_are_the_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for variable in ("ATTNQUANT_CORPUS", "ATTNQUANT_CASES"):
        monkeypatch.delenv(variable, raising=False)
    verdicts = iter([{"problems": ["wrong"]}, *({"problems": []} for _ in range(100))])
    monkeypatch.setattr(half, "runtime_folder", lambda *names: "nowhere")
    monkeypatch.setattr(half, "alone", lambda work, entry: next(verdicts))
    monkeypatch.setattr(sys, "path", list(sys.path))
    rows, codes = [], []
    for part in (1, 2, 3):
        codes.append(half.main(["--kinds", "bf16", "--part", f"{part}/3", "--only", "torch_"]))
        lines = [line for line in capsys.readouterr().out.splitlines() if "| bf16 |" in line]
        rows += [line.split(" | ")[0].removeprefix("| ") for line in lines]
    assert codes == [1, 0, 0]
    assert sorted(rows) == sorted(name for name in ENTRIES if "torch_" in name)
    assert len(rows) > 3


def test_a_constant_node_counts_as_what_it_becomes() -> None:
    """Hosts write Constant nodes as initializers: the bytes were there before, and one that grew is seen."""
    table = np.ones((8, 64), np.float16)

    def made(node: bool, dtype: type) -> ir.Model:
        tensor = numpy_helper.from_array(table.astype(dtype), "table")
        nodes = [helper.make_node("Constant", [], ["table"], value=tensor)] if node else []
        nodes.append(helper.make_node("Add", ["x", "table"], ["y"]))
        border = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [8, 64]) for name in "xy"]
        graph = helper.make_graph(nodes, "g", border[:1], border[1:], [] if node else [tensor])
        return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))

    before = made(True, np.float16)
    assert sizes(before, made(False, np.float16), []) == {"before": 1024, "after": 1024, "problems": []}
    for node in (True, False):
        found = sizes(before, made(node, np.float32), [])
        assert found["after"] == 2048
        assert any("float32 'table'" in problem for problem in found["problems"])


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
