"""GELU with its half on the sum, as torch exports it below opset 20: fused by the runtime once the half has moved."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, linear, normal, optimized, plain, valid

from attnquant.emission import executed, gelus

FEEDS = {"x": normal(2, 3, 16)}


def gelu(
    *, order: str = "sum", swapped: bool = False, by: str = "Div", half: float = 0.5, shown: bool = False,
    other: bool = False,
) -> ir.Model:  # fmt: skip
    """x -> int8 linear with bias -> GELU -> int8 linear; `order` says what the half multiplies."""
    builder = Builder()
    builder.input("x", ["b", "s", 16])
    up = linear(builder, builder.qdq("x", zero_point=128, dtype=np.uint8), "up", 16, 8)
    for name, number in (("root", np.sqrt(2) if by == "Div" else np.sqrt(0.5)), ("one", 1.0), ("half", half)):
        builder.constant(name, np.float32(number))

    def mul(first: str, second: str, output: str) -> str:
        return builder.node("Mul", [second, first] if swapped else [first, second], output, name=f"n_{output}")

    scaled = builder.node(by, [builder.node("Neg", [up], "negative") if other else up, "root"], "scaled")
    total = builder.node("Add", [builder.node("Erf", [scaled], "erf"), "one"], "total")
    if order == "sum":
        mul(up, mul("half", total, "inner"), "gelu")
    elif order == "x":
        mul(mul(up, "half", "inner"), total, "gelu")
    else:
        mul(mul(up, total, "inner"), "half", "gelu")
    down = linear(builder, builder.qdq("gelu", zero_point=128, dtype=np.uint8), "down", 8, 8)
    return builder.model([down, *(["inner"] if shown else [])], opset=18)


@pytest.mark.parametrize("by", ["Div", "Mul"])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_runtime_fuses_bias_and_gelu(by: str, *, swapped: bool) -> None:
    model = gelu(swapped=swapped, by=by)
    assert "Erf" in executed(model).operators  # the trap
    before = plain(model, FEEDS)[0]
    assert before.std() > 0.01
    assert gelus.apply(model, TARGET) == 1
    valid(model)
    assert model.graph.node("n_gelu").outputs[0].name == "gelu"
    np.testing.assert_array_equal(plain(model, FEEDS)[0], before)
    if by == "Div":
        operators = executed(model).operators
        assert operators["BiasGelu"] == 1
        assert "Erf" not in operators
        np.testing.assert_allclose(optimized(model, FEEDS)[0], before, atol=0.05)
    assert gelus.apply(model, TARGET) == 0


@pytest.mark.parametrize("order", ["x", "product"])
def test_the_runtime_fuses_the_other_forms_by_itself(order: str) -> None:
    model = gelu(order=order)
    assert "Erf" not in executed(model).operators
    assert gelus.apply(model, TARGET) == 0


@pytest.mark.parametrize("change", [{"half": 0.25}, {"shown": True}, {"other": True}])
def test_what_is_no_gelu_or_is_read_inside_stays(change: dict[str, object]) -> None:
    model = gelu(**change)  # type: ignore[arg-type]
    nodes = [node.name for node in model.graph]
    assert gelus.apply(model, TARGET) == 0
    assert [node.name for node in model.graph] == nodes
