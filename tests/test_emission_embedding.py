"""Tables stay int8 up to the rows that are read; tied tables stay one tensor."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto
from qdqmodels import TARGET, Builder, optimized, plain, valid

from attnquant.emission import clean, embedding, executed
from attnquant.graph import constant

ROWS, WIDTH = 600, 16
IDS = np.asarray([[0, 5, 599], [7, 7, 300]])


def looked_up(axis: int | None, *, gather: int = 0, output: str = "rows") -> tuple[Builder, str]:
    builder = Builder()
    builder.input("ids", ["b", "s"], TensorProto.INT64)
    table = builder.weight("table", (ROWS, WIDTH), axis=axis)
    return builder, builder.node("Gather", [table, "ids"], output, name="lookup", axis=gather)


def test_attributes_that_say_the_default_change_nothing() -> None:
    """torch's exporter writes block_size = 0."""
    builder, rows = looked_up(None)
    model = builder.model([builder.node("Relu", [rows], "y", name="relu")])
    for size, moved in ((32, 0), (0, 1)):
        for node in model.graph:
            if node.op_type == "DequantizeLinear":
                node.attributes["block_size"] = ir.AttrInt64("block_size", size)
        assert embedding.apply(model, TARGET) == moved


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("gather", [0, 1])
def test_only_the_rows_that_are_read_are_dequantized(axis: int | None, gather: int) -> None:
    builder, rows = looked_up(axis, gather=gather)
    model = builder.model([builder.node("Relu", [rows], "y", name="relu")])
    feeds = {"ids": IDS % WIDTH}
    before = plain(model, feeds)
    assert executed(model).tables != ()
    assert embedding.apply(model, TARGET) == 1
    clean.apply(model, TARGET)
    valid(model)
    np.testing.assert_array_equal(plain(model, feeds)[0], before[0])
    np.testing.assert_array_equal(optimized(model, feeds)[0], before[0])
    assert executed(model).tables == ()
    lookup = model.graph.node("lookup")
    assert constant(lookup.inputs[0]).dtype == np.int8
    assert model.graph.node("relu").inputs[0].name == "rows"  # the float tensor keeps its name
    assert [size for value in model.graph.initializers.values() if (size := value.const_value.size) >= ROWS * WIDTH] == [
        ROWS * WIDTH
    ]


@pytest.mark.parametrize("axis", [None, 0])
def test_a_tied_table_is_one_int8_tensor_for_both_uses(axis: int | None) -> None:
    builder, rows = looked_up(axis)
    builder.constant("turned", np.asarray([0]))
    builder.node("Transpose", ["table"], "head_weight", perm=[1, 0])
    hidden = builder.qdq(rows, zero_point=120, dtype=np.uint8, scale=0.01)
    model = builder.model([builder.node("MatMul", [hidden, "head_weight"], "logits", name="head")])
    before = plain(model, {"ids": IDS})
    assert embedding.apply(model, TARGET) == 1
    clean.apply(model, TARGET)
    valid(model)
    np.testing.assert_allclose(optimized(model, {"ids": IDS})[0], before[0], atol=1e-5)
    big = [value.dtype for value in model.graph.initializers.values() if value.const_value.size >= ROWS * WIDTH]
    assert big == [ir.DataType.INT8]
    report = executed(model)
    assert (report.int8, report.tables, report.float_behind_dequantize) == (("head",), (), ())


def test_two_lookups_of_one_table_share_it() -> None:
    builder, first = looked_up(0)
    second = builder.node("Gather", ["table", "ids"], "again", name="lookup_again")
    model = builder.model([builder.node("Add", [first, second], "y")])
    before = plain(model, {"ids": IDS})
    assert embedding.apply(model, TARGET) == 2
    clean.apply(model, TARGET)
    np.testing.assert_array_equal(plain(model, {"ids": IDS})[0], before[0])
    assert "n_table" not in {node.name for node in model.graph}


def test_rows_that_the_caller_gets_are_left_alone() -> None:
    builder, rows = looked_up(0)
    assert embedding.apply(builder.model([rows]), TARGET) == 0
