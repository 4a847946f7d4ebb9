"""Opsets: too new for the runtime, too old for the quantizers."""

import numpy as np
import pytest
from qdqmodels import Builder

from attnquant.emission import emit
from attnquant.errors import ModelError
from attnquant.target import parse_target


def tiny(opset: int, *, scale: type = np.float32, channels: int = 0) -> object:
    builder = Builder()
    size = (channels,) if channels else ()
    builder.constant("w", np.zeros((4, 4), np.int8))
    builder.constant("s", np.ones(size, scale))
    builder.input("x", [4])
    builder.node("DequantizeLinear", ["w", "s"], "d", name="weights", **({"axis": 1} if channels else {}))
    builder.node("Cast", ["d"], "c", to=1)
    return builder.model([builder.node("Add", ["x", "c"], "y")], opset=opset, infer=False)


@pytest.mark.parametrize(("version", "limit"), [("1.24.4", 25), ("1.31.1", 26), ("1.32.0", 28)])
def test_an_opset_that_the_runtime_does_not_load_is_refused(version: str, limit: int) -> None:
    target = parse_target(f"onnxruntime-cpu@{version}")
    emit(tiny(limit), target)
    with pytest.raises(ModelError, match=rf"uses opset {limit + 1}; onnxruntime-cpu@{version} loads opset {limit} at most"):
        emit(tiny(limit + 1), target)


@pytest.mark.parametrize(("opset", "arguments"), [(12, {"channels": 4}), (18, {"scale": np.float16})])
def test_quantizers_that_the_opset_does_not_know_name_their_node(opset: int, arguments: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=rf"'weights' .* needs opset {opset + 1}; the model uses opset {opset}"):
        emit(tiny(opset, **arguments), parse_target("onnxruntime-cpu@1.31.1"))
    emit(tiny(opset + 1, **arguments), parse_target("onnxruntime-cpu@1.31.1"))


@pytest.mark.parametrize(("version", "opset", "noted"), [("1.32.0", 25, True), ("1.32.0", 24, False), ("1.31.1", 25, False)])
def test_attention_without_a_kernel_is_noted(version: str, opset: int, noted: bool) -> None:
    builder = Builder()
    builder.input("x", [1, 2, 3, 4])
    model = builder.model([builder.node("Attention", ["x", "x", "x"], "y")], opset=opset, infer=False)
    notes = emit(model, parse_target(f"onnxruntime-cpu@{version}")).notes
    assert any("inlines all 1 of them" in note for note in notes) == noted
