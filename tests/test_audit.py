"""The walks under check: what is constant, what is met on the way, and where a walk ends."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant.audit.flow import GUARDS, MOVES, Flow, Level
from attnquant.audit.linears import linears
from attnquant.audit.quantizers import parameters, unsound

FLOAT = TensorProto.FLOAT


def flow_of(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], *, opset: int = 23, **inputs: int) -> Flow:
    """A graph from x (and others) to y, indexed."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in ({"x": FLOAT} | inputs).items()],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )
    return Flow(ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)))


def pair(tensor: str, name: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [tensor, "s", "z"], [f"{name}_i"], name=f"{name}_q"),
        helper.make_node("DequantizeLinear", [f"{name}_i", "s", "z"], [name], name=f"{name}_dq"),
    ]


QDQ = {"s": np.float32(0.1), "z": np.uint8(128)}


def value(flow: Flow, name: str) -> ir.Value:
    """A tensor by name."""
    found = {output.name: output for node in flow.model.graph for output in node.outputs}
    return found.get(name) or next(item for item in flow.model.graph.inputs if item.name == name)


def test_levels() -> None:
    flow = flow_of(
        [
            helper.make_node("Shape", ["x"], ["sizes"]),
            helper.make_node("Gather", ["sizes", "zero"], ["size"]),
            helper.make_node("Cast", ["size"], ["width"], to=FLOAT),
            helper.make_node("Sqrt", ["four"], ["two"]),
            helper.make_node("CastLike", ["two", "x"], ["like"]),
            helper.make_node("Mul", ["width", "two"], ["both"]),
            helper.make_node("RandomNormal", [], ["noise"], shape=[1]),
            helper.make_node("Mul", ["x", "both"], ["y"]),
        ],
        {"four": np.float32(4), "zero": np.int64(0)},
    )
    expected = {
        "sizes": Level.SHAPE,
        "size": Level.SHAPE,
        "width": Level.SHAPE,
        "two": Level.CONSTANT,
        "like": Level.CONSTANT,
        "both": Level.SHAPE,
        "noise": Level.DATA,
        "y": Level.DATA,
        "x": Level.DATA,
    }
    assert {name: flow.level(value(flow, name)) for name in expected} == expected
    assert flow.level(None) is Level.CONSTANT


@pytest.mark.parametrize("factor", ["constant", "from the shape", "data"])
def test_a_scalar_factor_is_passed_if_it_is_no_data(factor: str) -> None:
    """The factor may be either operand, and computed from sizes."""
    nodes = [*pair("x", "q"), helper.make_node("Size", ["x"], ["n"]), helper.make_node("Cast", ["n"], ["size"], to=FLOAT)]
    other = {"constant": "c", "from the shape": "size", "data": "x"}[factor]
    for operands in (["q", other], [other, "q"]):
        flow = flow_of([*nodes, helper.make_node("Mul", operands, ["y"], name="mul")], QDQ | {"c": np.float32(2)})
        trace = flow.trace(value(flow, "y"))
        assert trace.complete == (factor != "data")
        assert [hit.quantize.name for hit in trace.hits if hit.quantize] == (["q_q"] if factor != "data" else [])
        assert [leaf.name for leaf, _ in trace.leaves] == ([] if factor != "data" else ["y"])


def test_a_scatter_carries_cache_and_update_and_not_its_indices() -> None:
    for op_type, inputs in (("ScatterND", ["cache", "indices", "q"]), ("TensorScatter", ["cache", "q", "indices"])):
        nodes = [*pair("x", "q"), helper.make_node(op_type, inputs, ["y"], name="write")]
        flow = flow_of(nodes, QDQ, opset=24, cache=FLOAT, indices=TensorProto.INT64)
        trace = flow.trace(value(flow, "y"))
        assert not trace.complete
        assert [(leaf.name, reader.name if reader else None) for leaf, reader in trace.leaves] == [("cache", "write")]
        assert len(trace.hits) == 1
        assert [way[-1][0].op_type for way in flow.ahead(value(flow, "q"), MOVES)] == []
        ahead = list(flow.ahead(value(flow, "x"), MOVES))
        assert [way[-1][0].name for way in ahead] == ["q_q"]


def test_integers_from_outside_count_as_quantized_and_sums_of_products_do_not() -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["kept", "s", "z"], ["y"], name="dq"),
        helper.make_node("MatMulInteger", ["kept", "kept"], ["sum"]),
        helper.make_node("DequantizeLinear", ["sum", "s"], ["float_sum"], name="dq_sum"),
    ]
    flow = flow_of(nodes, QDQ, kept=TensorProto.UINT8)
    assert flow.trace(value(flow, "y")).complete
    assert flow.trace(value(flow, "y")).hits[0].quantize is None
    assert not flow.trace(value(flow, "float_sum")).complete


def test_weights_are_no_activations() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["w_i"]),
        helper.make_node("DequantizeLinear", ["w_i", "s", "z"], ["w_dq"]),
        helper.make_node("MatMul", ["x", "w_dq"], ["y"]),
    ]
    flow = flow_of(nodes, QDQ | {"w": np.ones((2, 2), np.float32)})
    assert flow.trace(value(flow, "w_dq")).constant
    assert flow.near(value(flow, "w_dq"), GUARDS) == ()


def test_near_looks_at_every_operand_within_the_operators_alone() -> None:
    nodes = [
        *pair("x", "q"),
        helper.make_node("IsNaN", ["q"], ["nan"]),
        helper.make_node("Where", ["nan", "c", "x"], ["guarded"]),
        helper.make_node("Relu", ["guarded"], ["y"]),
    ]
    flow = flow_of(nodes, QDQ | {"c": np.float32(0)})
    assert [hit.dequantize.name for hit in flow.near(value(flow, "guarded"), GUARDS)] == ["q_dq"]
    assert flow.near(value(flow, "guarded"), MOVES) == ()
    assert flow.near(value(flow, "y"), GUARDS) == ()


def test_dynamic_quantization_is_quantization() -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["i", "s1", "z1"], name="dynamic"),
        helper.make_node("DequantizeLinear", ["i", "s1", "z1"], ["y"], name="dq"),
    ]
    flow = flow_of(nodes, {})
    assert flow.trace(value(flow, "y")).complete
    assert parameters(flow.quantizes[0]).dtype == "uint8"
    assert list(unsound(flow, 23)) == []


@pytest.mark.parametrize(
    ("constants", "attributes", "words"),
    [
        ({"s": np.ones(4, np.float32), "z": np.zeros(4, np.int8)}, {"axis": 1}, None),
        ({"s": np.ones(4, np.float32), "z": np.zeros(4, np.int8)}, {"axis": -1}, None),
        ({"s": np.ones(3, np.float32), "z": np.zeros(3, np.int8)}, {"axis": 1}, "expected 4 scales"),
        ({"s": np.ones(4, np.float32), "z": np.zeros(4, np.int8)}, {"axis": 2}, "expected an axis of a tensor with 2"),
        ({"s": np.ones(4, np.float32), "z": np.zeros(1, np.int8)}, {"axis": 1}, "as many zero points as scales (4)"),
        ({"s": np.array([1, 0, 1, 0], np.float32), "z": np.zeros(4, np.int8)}, {"axis": 1}, "zero in 2 of 4 channels"),
    ],
)
def test_scales_by_channel(constants: dict[str, np.ndarray], attributes: dict[str, int], words: str | None) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["w_dq"], name="dq", **attributes),
        helper.make_node("MatMul", ["x", "w_dq"], ["y"]),
    ]
    flow = flow_of(nodes, constants | {"w": np.ones((5, 4), np.int8)})
    found = [problem.reason for problem in unsound(flow, 23)]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.parametrize(
    ("scale", "zero", "opset", "words"),
    [
        (np.float32(1), np.uint8(0), 10, None),
        (np.float32(1), np.uint8(0), 9, "opset 10 or later for QuantizeLinear"),
        (np.float16(1), np.uint8(0), 19, None),
        (np.float16(1), np.uint8(0), 18, "opset 19 or later for a float16 scale"),
        (np.float32(1), np.int16(0), 21, None),
        (np.float32(1), np.int16(0), 20, "opset 21 or later for int16"),
        (np.float16(300), np.uint8(0), 19, "a range of 76500, beyond what float16 holds"),
    ],
)
def test_what_an_opset_knows(scale: np.generic, zero: np.generic, opset: int, words: str | None) -> None:
    nodes = [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], name="q")]
    flow = flow_of(nodes, {"s": np.asarray(scale), "z": np.asarray(zero)}, opset=opset)
    found = [problem.reason for problem in unsound(flow, opset)]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_a_pair_without_zero_points_is_unsigned() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["i"], name="q"),
        helper.make_node("DequantizeLinear", ["i", "s"], ["y"], name="dq"),
    ]
    flow = flow_of(nodes, {"s": np.float32(1)})
    assert [parameters(node).dtype for node in (*flow.quantizes, *flow.dequantizes)] == ["uint8", "uint8"]
    assert parameters(flow.quantizes[0]).symmetric is False
    assert list(unsound(flow, 23)) == []
    signed = helper.make_node("QuantizeLinear", ["x", "s"], ["y"], name="q", output_dtype=TensorProto.INT8)
    flow = flow_of([signed], {"s": np.float32(1)})
    assert parameters(flow.quantizes[0]).dtype == "int8"
    assert parameters(flow.quantizes[0]).symmetric is True


def test_types_of_a_pair_must_agree() -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["i"], name="q"),
        helper.make_node("DequantizeLinear", ["i", "s", "other"], ["y"], name="dq"),
    ]
    flow = flow_of(nodes, QDQ | {"other": np.int8(0)})
    (problem,) = unsound(flow, 23)
    assert (problem.kind, problem.node) == ("type", "dq")
    assert "expected the zero point of the uint8 that 'q' makes, got int8" in problem.reason


WEIGHT = {"w": np.ones((4, 4), np.int8), "w_s": np.float32(0.1), "w_z": np.int8(0), "w_f": np.ones((4, 4), np.float32)}


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([helper.make_node("MatMul", ["x_dq", "w_dq"], ["y"], name="fc")], ""),
        ([helper.make_node("MatMul", ["w_dq", "x_dq"], ["y"], name="fc")], ""),
        ([helper.make_node("Gemm", ["x_dq", "w_dq"], ["y"], name="fc", transB=1)], ""),
        (
            [helper.make_node("Transpose", ["w_dq"], ["wt"]), helper.make_node("MatMul", ["x_dq", "wt"], ["y"], name="fc")],
            "",
        ),
        (
            [
                helper.make_node("QuantizeLinear", ["w_f", "w_s", "w_z"], ["w_i"]),
                helper.make_node("DequantizeLinear", ["w_i", "w_s", "w_z"], ["w_back"]),
                helper.make_node("MatMul", ["x_dq", "w_back"], ["y"], name="fc"),
            ],
            "",
        ),
        ([helper.make_node("MatMul", ["x_dq", "w_f"], ["y"], name="fc")], "the activation alone is quantized (uint8)"),
        ([helper.make_node("MatMul", ["x", "w_dq"], ["y"], name="fc")], "the weight alone is quantized (int8)"),
        ([helper.make_node("MatMul", ["x", "w_f"], ["y"], name="fc")], "weight and activation are float"),
        ([helper.make_node("MatMul", ["wide_dq", "w_dq"], ["y"], name="fc")], "weight int8, activation int16"),
        (
            [
                helper.make_node("Concat", ["x_dq", "wide_dq"], ["mixed"], axis=0),
                helper.make_node("MatMul", ["mixed", "w_dq"], ["y"], name="fc"),
            ],
            "weight int8, activation int16",
        ),
        ([helper.make_node("MatMul", ["x_dq", "x_dq"], ["y"], name="product")], None),
        ([helper.make_node("MatMul", ["w_f", "w_dq"], ["y"], name="constant")], None),
        ([helper.make_node("MatMulInteger", ["x_dq_i", "w"], ["y"], name="fc")], ""),
    ],
)
def test_linears(nodes: list[onnx.NodeProto], reason: str | None) -> None:
    before = [
        *pair("x", "x_dq"),
        helper.make_node("QuantizeLinear", ["x", "s", "wide_z"], ["wide_i"]),
        helper.make_node("DequantizeLinear", ["wide_i", "s", "wide_z"], ["wide_dq"]),
        helper.make_node("DequantizeLinear", ["w", "w_s", "w_z"], ["w_dq"]),
    ]
    flow = flow_of([*before, *nodes], QDQ | WEIGHT | {"wide_z": np.int16(0)})
    found = {linear.node: linear.reason for linear in linears(flow, [], {})}
    assert found == ({} if reason is None else {"fc": reason})
    # A reason that is known beats what the graph shows; nodes of attentions are no linears.
    if reason:
        assert [linear.reason for linear in linears(flow, [], {"fc": "kept"})] == ["kept"]
    assert not list(linears(flow, flow.model.graph, {}))
