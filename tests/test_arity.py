"""Nodes without the operands that their operator needs are refused when the model is loaded."""

import onnx
import pytest
from onnx import TensorProto, helper

from attnquant.errors import ModelError
from attnquant.model import load


def one(
    inputs: list[str], outputs: list[str], op_type: str = "MatMul", opset: int = 17, domain: str = ""
) -> onnx.ModelProto:
    """x, w -> node -> y."""
    graph = helper.make_graph(
        [helper.make_node(op_type, inputs, outputs, name="node", domain=domain)],
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "n"]) for name in ("x", "w")],
        [helper.make_tensor_value_info("y" if "y" in outputs else "x", TensorProto.FLOAT, None)],
    )
    imports = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("inputs", "op_type"),
    [
        (["x"], "MatMul"),
        (["x", ""], "MatMul"),
        (["", "x"], "MatMul"),
        ([], "Softmax"),
        (["x"], "QuantizeLinear"),
        ([], "Concat"),
    ],
)
def test_a_missing_input_is_named(inputs: list[str], op_type: str) -> None:
    with pytest.raises(ModelError, match=rf"'node'.*{op_type} at opset 17 needs"):
        load(one(inputs, ["y"], op_type))


def test_a_missing_output_is_named() -> None:
    with pytest.raises(ModelError, match="1 outputs, got 2 of the inputs and 0 outputs"):
        load(one(["x", "w"], []))


def test_what_is_complete_optional_or_unknown_is_loaded() -> None:
    load(one(["x", "w"], ["y"]))
    load(one(["x", "", "w"], ["y"], "Clip"))
    load(one(["x"], ["y"], "Clip"))
    load(one([], ["y"], "Whatever"))
    load(one([], ["y"], "MatMul", domain="mine"))
    # At opset 9 Clip had one input, at 11 its bounds became inputs.
    load(one(["x"], ["y"], "Clip", opset=9))


def test_the_opset_of_a_function_counts_in_it() -> None:
    """Unsqueeze takes its axes as an attribute up to opset 12, and as an input from 13 on."""
    for opset, inputs, fits in ((11, ["a"], True), (17, ["a"], False)):
        body = helper.make_function(
            "mine",
            "Block",
            ["a"],
            ["b"],
            [helper.make_node("Unsqueeze", inputs, ["b"], name="inner", **({"axes": [0]} if opset < 13 else {}))],
            [helper.make_opsetid("", opset)],
        )
        model = one(["x"], ["y"], "Block", domain="mine")
        model.functions.append(body)
        if fits:
            load(model)
        else:
            with pytest.raises(ModelError, match=r"'inner' in graph 'mine::Block'.*Unsqueeze at opset 17"):
                load(model)


@pytest.mark.parametrize(
    "listed", [["", ""], ["trips", ""], ["", "goes"], ["trips", "goes"], ["trips", "", "x"], ["", "", "x"]]
)
def test_what_a_loop_may_leave_out_is_no_missing_input(listed: list[str]) -> None:
    """Trip count and condition have to be listed, both may be ""; the states are none, one or more."""
    model = one(["x", "w"], ["y"])
    states = listed[2:]
    body = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}_out"], name=name) for name in ("go", *(["h"] if states else []))],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            *(helper.make_tensor_value_info("h", TensorProto.FLOAT, None) for _ in states),
        ],
        [
            helper.make_tensor_value_info("go_out", TensorProto.BOOL, []),
            *(helper.make_tensor_value_info("h_out", TensorProto.FLOAT, None) for _ in states),
        ],
    )
    model.graph.input.append(helper.make_tensor_value_info("trips", TensorProto.INT64, []))
    model.graph.input.append(helper.make_tensor_value_info("goes", TensorProto.BOOL, []))
    model.graph.node.append(helper.make_node("Loop", listed, ["z"], name="loop", body=body))
    assert load(model).graph.node("loop").op_type == "Loop"
