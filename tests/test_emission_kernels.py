"""Linears without an int8 kernel are named with their reason, and the runtime bears each reason out."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from qdqmodels import TARGET, Builder, normal, optimized

from attnquant.emission import executed
from attnquant.emission.kernels import CONVOLUTION, LEFT, STACKED, TRANSPOSED_CONVOLUTION, without_kernel
from attnquant.target import parse_target


def float_weight(builder: Builder, name: str, *shape: int) -> str:
    return builder.constant(name, builder.rng.standard_normal(shape).astype(np.float32))


def products() -> ir.Model:
    builder = Builder()
    builder.input("x", [2, 8, 8])
    builder.input("image", [1, 4, 6, 6])
    builder.node("MatMul", ["x", float_weight(builder, "w", 8, 8)], "a", name="right")
    builder.node("MatMul", [float_weight(builder, "v", 8, 8), "x"], "b", name="left")
    builder.node("MatMul", ["x", float_weight(builder, "s", 2, 8, 8)], "c", name="stack")
    builder.node("MatMul", ["x", float_weight(builder, "o", 1, 8, 8)], "d", name="stack_of_one")
    builder.node("Transpose", [float_weight(builder, "t", 8, 8)], "turned", perm=[1, 0])
    builder.node("MatMul", ["turned", "x"], "e", name="left_turned")
    builder.node("MatMul", ["x", "x"], "f", name="scores")
    builder.node("ConvTranspose", ["image", float_weight(builder, "k", 4, 2, 3, 3)], "g", name="up")
    return builder.model(["a", "b", "c", "d", "e", "f", "g"])


def test_reasons_by_node() -> None:
    rows = {row.node: row.reason for row in without_kernel(products(), TARGET)}
    assert rows == {"left": LEFT, "left_turned": LEFT, "stack": STACKED, "up": TRANSPOSED_CONVOLUTION}


def chain(*steps: str) -> ir.Model:
    """Operators one behind the other on an image, named by place; "Conv" is 3 x 3."""
    builder = Builder()
    tensor = builder.input("image", [1, 4, 8, 8])
    for place, op_type in enumerate(steps):
        channels = 1 if steps[place - 1] == "DepthToSpace" else 4
        inputs = [tensor, float_weight(builder, f"w{place}", 4, channels, 3, 3)] if op_type == "Conv" else [tensor]
        attributes: dict[str, object] = {"pads": [1, 1, 1, 1]} if op_type == "Conv" else {}
        if op_type in ("DepthToSpace", "SpaceToDepth"):
            attributes["blocksize"] = 2
        tensor = builder.node(op_type, inputs, f"t{place}", name=f"{op_type}{place}", **attributes)
    return builder.model([tensor])


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        (("Conv", "Relu", "Conv", "Flatten"), {"Conv2", "Conv0"}),  # the second has no kernel, so the first has none either
        (("Conv", "HardSwish", "Conv", "Relu", "GlobalAveragePool"), {"Conv0"}),
        (("Conv", "Conv", "GlobalAveragePool"), set()),
        (("Conv",), {"Conv0"}),
        (("Conv", "Relu", "DepthToSpace", "SpaceToDepth", "Conv", "GlobalAveragePool"), {"Conv0"}),
        (("Conv", "Relu", "DepthToSpace", "Conv", "GlobalAveragePool"), set()),
        (("Conv", "Shape"), {"Conv0"}),
    ],
)
def test_convolutions_need_a_quantized_result(steps: tuple[str, ...], kept: set[str]) -> None:
    rows = without_kernel(chain(*steps), TARGET)
    assert {row.node for row in rows} == kept
    assert {row.reason for row in rows} <= {CONVOLUTION}


@pytest.mark.parametrize("quantized", [True, False])
def test_the_runtime_has_an_int8_convolution_between_quantizers_only(quantized: bool) -> None:
    builder = Builder()
    builder.input("x", [1, 4, 6, 6])
    inputs = [builder.qdq("x", dtype=np.uint8, zero_point=128), builder.weight("k", (4, 4, 3, 3), axis=0)]
    builder.node("Relu", [builder.node("Conv", inputs, "c", name="conv")], "r")
    tail = builder.qdq("r", dtype=np.uint8, zero_point=0) if quantized else "r"
    model = builder.model([builder.node("Exp", [tail], "y")])
    assert executed(model).int8 == (("conv",) if quantized else ())


def test_no_other_target_is_known_to_lack_any() -> None:
    assert without_kernel(products(), parse_target("openvino@2026.0")) == ()
    assert without_kernel(products(), parse_target("onnxruntime-cuda@1.31.1")) == ()


def test_a_weight_on_the_left_stays_float_in_the_runtime() -> None:
    builder = Builder()
    builder.input("x", [2, 8, 8])
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=128)
    model = builder.model([builder.node("MatMul", [builder.weight("w", (8, 8), axis=0), quantized], "y", name="left")])
    assert executed(model).float_behind_dequantize == ("left",)


def test_a_stack_with_a_scale_per_channel_fails_in_the_runtime() -> None:
    builder = Builder()
    builder.input("x", [2, 5, 8])
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=128)
    model = builder.model([builder.node("MatMul", [quantized, builder.weight("w", (2, 8, 8), axis=2)], "y")])
    with pytest.raises(Exception, match="b zero point is not valid"):
        optimized(model, {"x": normal(2, 5, 8)})


def test_a_transposed_convolution_stays_float_in_the_runtime() -> None:
    builder = Builder()
    builder.input("x", [1, 4, 6, 6])
    weight = numpy_helper.to_array(numpy_helper.from_array(np.ones((4, 2, 3, 3), np.int8)))
    builder.constant("w", weight)
    builder.node("DequantizeLinear", ["w", builder.constant("s", np.float32(0.01))], "kernel")
    quantized = builder.qdq("x", dtype=np.uint8, zero_point=128)
    up = builder.node("ConvTranspose", [quantized, "kernel"], "up")
    model = builder.model([builder.qdq(up, dtype=np.uint8, zero_point=128)])
    assert "ConvTranspose" in executed(model).operators
    assert executed(model).int8 == ()
