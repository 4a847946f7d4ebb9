"""Constant queries end to end: K quantized at run time, the query stored as integers, V float, and an integer product."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import attnquant
from attnquant import runtime
from attnquant.emission import executed
from attnquant.graph import constant
from attnquant.recipe import load
from attnquant.roles import PortRole
from tests.corpora import Entry, entries
from tests.decomposed_cases import CASES
from tests.placement_audit import audit, ok_qk

FOLDED = [entry for entry in entries("", "corpus") if entry.path.name.startswith("torch_object_queries")]


def quantized(name: str) -> tuple[attnquant.QuantizationResult, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A decomposed case, quantized; one sample and what the float model makes of it."""
    graph, _ = CASES[name]()
    proto = graph.proto()
    random = np.random.default_rng(1)
    shapes = {value.name: [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim] for value in proto.graph.input}
    samples = [
        {tensor: random.standard_normal(shape).astype(np.float32) for tensor, shape in shapes.items()} for _ in range(4)
    ]
    expected = runtime.run(ir.from_proto(proto), samples[0], threads=1)
    return attnquant.quantize(proto, samples), samples[0], expected


def operand(model: ir.Model, result: attnquant.QuantizationResult, role: PortRole) -> ir.Node | None:
    """What makes an operand of the only attention."""
    port = result.sites[0].ports[role]
    node = next(node for node in model.graph if node.name == port.node)
    value = node.inputs[port.index]
    return None if value is None else value.producer()


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("constant_") and name != "constant_prefix"])
def test_placed_right_in_every_form(name: str) -> None:
    result, sample, expected = quantized(name)
    got = runtime.run(result.model, sample, threads=1)
    noise = expected["y"] - got["y"]
    assert 10 * np.log10((expected["y"] ** 2).sum() / (noise**2).sum()) > 25
    query, key, value = (operand(result.model, result, role) for role in (PortRole.QUERY, PortRole.KEY, PortRole.VALUE))
    assert query is not None
    assert query.op_type == "DequantizeLinear"
    integers = constant(query.inputs[0])
    assert (integers is None) == (name == "constant_query_expanded")
    assert key is not None
    assert key.op_type == "DequantizeLinear"
    assert value is None or value.op_type != "DequantizeLinear"
    report = attnquant.check(result.model)
    assert report.ok, report.problems
    assert not report.unplanned
    assert [row.status for row in report.rows] == ["quantized"]


@pytest.mark.parametrize("name", ["constant_query", "constant_object_queries", "constant_query_on_the_right"])
def test_the_product_runs_in_integers(name: str) -> None:
    """On the left the constant is uint8: the runtime has no kernel with int8 there, and would compute in float."""
    result, _, _ = quantized(name)
    ran = executed(result.model)
    assert result.sites[0].ports[PortRole.QUERY].node in ran.int8
    assert not ran.attention_behind_dequantize


def test_integers_are_those_of_a_symmetric_quantizer() -> None:
    result, _, _ = quantized("constant_query")
    node = operand(result.model, result, PortRole.QUERY)
    assert node is not None
    integers, scale, zero = (constant(value) for value in node.inputs)
    graph, _ = CASES["constant_query"]()
    query = next(onnx.numpy_helper.to_array(item) for item in graph.constants if item.name == "q")
    assert (integers.dtype, int(zero)) == (np.uint8, 128)
    np.testing.assert_allclose((integers.astype(np.float32) - 128) * scale, query, atol=float(scale) / 2 * 1.001)
    assert float(scale) == pytest.approx(np.abs(query).max() / 127, rel=0.01)


@pytest.mark.parametrize("entry", FOLDED, ids=str)
def test_a_float_constant_is_no_quantized_query(entry: Entry, tmp_path: Path) -> None:
    """Both audits see a query that was asked for and is float."""
    result = attnquant.quantize(entry.path, entry.samples)
    assert ok_qk(audit(ir.to_proto(result.model), entry.truth)[0])
    port = result.sites[0].ports[PortRole.QUERY]
    node = next(node for node in result.model.graph if node.name == port.node)
    dequantize = node.inputs[port.index].producer()
    integers, scale, zero = (constant(value).astype(np.float32) for value in dequantize.inputs)
    float_query = ir.Value(name="float_query", const_value=ir.tensor((integers - zero) * scale, name="float_query"))
    float_query.dtype = ir.DataType.FLOAT
    result.model.graph.register_initializer(float_query)
    node.replace_input_with(port.index, float_query)
    assert not ok_qk(audit(ir.to_proto(result.model), entry.truth)[0])
    report = attnquant.check(result.model)
    assert any("query: expected the constant as integers" in reason for reason in report.rows[0].reasons)
    assert not report.ok


def test_float_by_the_recipe() -> None:
    graph, _ = CASES["constant_query"]()
    x = {"x": np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)}
    recipe = load('extends = "int8"\nname = "no query"\n[roles.query]\ndtype = "none"')
    result = attnquant.quantize(graph.proto(), [x], recipe=recipe)
    assert operand(result.model, result, PortRole.QUERY) is None
    assert attnquant.check(result.model).ok


