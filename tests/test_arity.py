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
