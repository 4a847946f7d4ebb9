"""Sizes that can only come out one way become constants; nothing else changes."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdqmodels import Builder, normal, optimized, plain, valid

from attnquant import runtime
from attnquant.emission import executed, folding, simplify
from attnquant.emission.widen import widen
from attnquant.errors import ModelError
from benchmarks.bfloat16 import as_bfloat16


def position_embedding(shape: list[int | str]) -> ir.Model:
    """Patches (b, 8, h, w) plus a 3 x 3 table resized to h x w, its target size computed from the patches' shape."""
    builder = Builder()
    builder.input("x", shape)
    builder.constant("table", builder.rng.standard_normal((1, 8, 3, 3)).astype(np.float32))
    builder.node("Slice", [builder.node("Shape", ["x"], "sizes"), *slices(builder)], "extent")
    builder.node("Concat", [builder.constant("lead", np.asarray([1, 8])), "extent"], "target", axis=0)
    builder.node("Resize", ["table", "", "", "target"], "resized", name="resize", mode="cubic")
    return builder.model([builder.node("Add", ["x", "resized"], "y", name="add")])


def slices(builder: Builder) -> list[str]:
    return [builder.constant(name, np.asarray([number])) for name, number in (("from", 2), ("to", 4))]


def test_a_resize_of_constants_is_folded_by_the_runtime_once_its_size_is_known() -> None:
    model = position_embedding(["b", 8, 5, 7])
    feeds = {"x": normal(2, 8, 5, 7)}
    folded = simplify(model, feeds)
    assert folded is not model
    valid(folded)
    assert [node.name for node in folded.graph] == ["resize", "add"]
    assert "Resize" in executed(model).operators
    assert "Resize" not in executed(folded).operators
    for batch in (1, 3):
        fed = {"x": normal(batch, 8, 5, 7)}
        np.testing.assert_array_equal(optimized(folded, fed)[0], plain(model, fed)[0])


def test_outputs_that_are_known_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the folded model is held against: others than the model's keep it from being folded."""
    model, feeds = position_embedding(["b", 8, 5, 7]), {"x": normal(2, 8, 5, 7)}
    expected, runs, run = {"y": plain(model, feeds)[0]}, [], runtime.run

    def counted(model: ir.Model, sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        runs.append(model)
        return run(model, sample)

    monkeypatch.setattr(runtime, "run", counted)
    assert [node.name for node in simplify(model, feeds, expected).graph] == ["resize", "add"]
    assert len(runs) == 1
    assert simplify(model, feeds, {"y": expected["y"] + 1}) is model


def test_the_model_that_is_given_does_not_change() -> None:
    model = position_embedding(["b", 8, 5, 7])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    simplify(model, {"x": normal(2, 8, 5, 7)})
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_sizes_that_depend_on_the_input_are_left_alone() -> None:
    model = position_embedding(["b", 8, "h", "w"])
    assert simplify(model, {"x": normal(2, 8, 5, 7)}) is model


def test_declared_shapes_of_inner_tensors_are_not_believed() -> None:
    """An exporter's example may be written into them: here 5, where any length runs."""
    builder = Builder()
    builder.input("x", ["b", "s", 8])
    builder.node("Exp", ["x"], "e")
    builder.node("Gather", [builder.node("Shape", ["e"], "sizes"), builder.constant("one", np.asarray(1))], "length")
    builder.node("Cast", ["length"], "number", to=TensorProto.FLOAT)
    model = builder.model([builder.node("Mul", ["e", "number"], "y")])
    model.graph.node("n_e").outputs[0].shape = ir.Shape([2, 5, 8])
    assert simplify(model, {"x": normal(2, 5, 8)}) is model


def test_the_file_grows_by_no_more_than_it_says() -> None:
    model = position_embedding(["b", 8, 5, 7])
    folded = simplify(model, {"x": normal(2, 8, 5, 7)})
    sizes = [sum(value.const_value.nbytes for value in one.graph.initializers.values()) for one in (model, folded)]
    assert sizes[1] - sizes[0] <= folding.GROWTH


def test_outputs_that_would_change_leave_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = position_embedding(["b", 8, 5, 7])
    run = folding.runtime.run

    def disturbed(ran: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        outputs = run(ran, feeds)
        return outputs if ran is model else {name: array + 1e-3 for name, array in outputs.items()}

    monkeypatch.setattr(folding.runtime, "run", disturbed)
    assert simplify(model, {"x": normal(2, 8, 5, 7)}) is model


def in_float16(model: ir.Model) -> ir.Model:
    """The same model with every float32 tensor in fp16."""
    for value in (*model.graph.inputs, *model.graph.outputs, *(node.outputs[0] for node in model.graph)):
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    table = model.graph.initializers["table"]
    table.const_value = ir.tensor(table.const_value.numpy().astype(np.float16), name="table")
    table.type = ir.TensorType(ir.DataType.FLOAT16)
    return model


def test_sizes_of_an_fp16_model_are_compared_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the runtime for half precision may end the process: it may see such tensors at the border alone."""
    model, feeds, seen = in_float16(position_embedding(["b", 8, 5, 7])), {"x": normal(2, 8, 5, 7).astype(np.float16)}, []
    run = folding.runtime.run

    def without_half(ran: ir.Model, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append({str(ran.graph.node(name).outputs[0].dtype) for name in ("resize", "add")})
        seen.append({str(ran.graph.initializers["table"].const_value.dtype)})
        return run(ran, fed)

    monkeypatch.setattr(folding.runtime, "run", without_half)
    folded = simplify(model, feeds)
    assert seen == [{"FLOAT"}] * 4
    assert [node.name for node in folded.graph] == ["resize", "add"]
    np.testing.assert_array_equal(folded.graph.initializers["target_known"].const_value.numpy(), [1, 8, 5, 7])
    assert folded.graph.initializers["table"].const_value.dtype == ir.DataType.FLOAT16
    np.testing.assert_allclose(optimized(folded, feeds)[0], plain(model, feeds)[0], atol=2**-9)


def test_sizes_of_a_bf16_model_become_constants_without_its_kernels() -> None:
    model, feeds = as_bfloat16(position_embedding(["b", 8, 5, 7])), {"x": normal(2, 8, 5, 7)}
    with pytest.raises(ModelError, match="does not load"):
        folding.runtime.run(model, feeds)
    folded = simplify(model, feeds)
    np.testing.assert_array_equal(folded.graph.initializers["target_known"].const_value.numpy(), [1, 8, 5, 7])
    assert folded.graph.node("add").outputs[0].dtype == ir.DataType.BFLOAT16
    expected, got = (plain(widen(one)[0], feeds)[0] for one in (model, folded))
    np.testing.assert_array_equal(got, expected)


def test_operators_that_nobody_read_before_are_kept() -> None:
    builder = Builder()
    builder.input("x", ["b", 8])
    builder.node("Shape", ["x"], "idle", name="idle")
    builder.node("Gather", [builder.node("Shape", ["x"], "s"), builder.constant("one", np.asarray(1))], "width", name="pick")
    builder.node("Cast", ["width"], "number", to=TensorProto.FLOAT)
    model = builder.model([builder.node("Mul", ["x", "number"], "y")])
    folded = simplify(model, {"x": normal(2, 8)})
    assert [node.name for node in folded.graph] == ["idle", "n_number", "n_y"]


def test_sizes_inside_control_flow_stay() -> None:
    builder = Builder()
    builder.input("x", ["b", 8])
    builder.input("flag", [], TensorProto.BOOL)
    branches = {}
    for name, op_type in (("then_branch", "Shape"), ("else_branch", "Shape")):
        nodes = [helper.make_node(op_type, ["x"], [f"{name}_s"], start=1, name=f"{name}_shape")]
        branches[name] = helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_s", TensorProto.INT64, [1])],
            [numpy_helper.from_array(np.asarray([0]), f"{name}_unused")],
        )
    builder.node("If", ["flag"], "sizes", **branches)
    builder.node("Cast", ["sizes"], "numbers", to=TensorProto.FLOAT)
    model = builder.model([builder.node("Mul", ["x", "numbers"], "y")])
    assert simplify(model, {"x": normal(2, 8), "flag": np.asarray(True)}) is model
