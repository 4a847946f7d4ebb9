"""Quantizers of what is interleaved: in front of DepthToSpace and its crop, the same numbers, integers on the way."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, normal, optimized, plain, valid

from attnquant.emission import executed, interleaves
from attnquant.emission.pipeline import emit

FEEDS = {"x": normal(2, 4, 5, 6)}


def upsampled(
    *, dtype: type = np.uint8, shown: bool = False, moves: tuple[str, ...] = ("DepthToSpace", "Slice")
) -> ir.Model:
    """x -> int8 Conv -> Relu -> Q/DQ -> the moves -> int8 Conv -> Q/DQ -> y."""
    builder = Builder()
    builder.input("x", ["b", 4, "h", "w"])
    inputs = [builder.qdq("x", zero_point=128, dtype=np.uint8), builder.weight("k", (12, 4, 3, 3), axis=0)]
    tensor = builder.node("Relu", [builder.node("Conv", inputs, "c", name="first", pads=[1, 1, 1, 1])], "r")
    tensor = builder.qdq(tensor, scale=0.01, zero_point=0 if dtype is np.uint8 else -128, dtype=dtype)
    for name in moves:
        if name == "Slice":
            sides = {"starts": [1, 1], "ends": [-1, -1], "axes": [2, 3]}
            bounds = [builder.constant(side, np.array(value)) for side, value in sides.items()]
            tensor = builder.node("Slice", [tensor, *bounds], "cropped")
        else:
            tensor = builder.node(name, [tensor], name.lower(), **({"blocksize": 2} if name == "DepthToSpace" else {}))
    inputs = [tensor, builder.weight("l", (5, 3 if "DepthToSpace" in moves else 12, 3, 3), axis=0)]
    result = builder.node("Conv", inputs, "d", name="second")
    return builder.model([builder.qdq(result, dtype=np.uint8, zero_point=120), *([tensor] if shown else [])], opset=17)


def test_integers_are_interleaved_and_both_convolutions_stay_int8() -> None:
    model = upsampled()
    before = plain(model, FEEDS)[0]
    assert len(np.unique(before)) > 20
    assert interleaves.apply(model, TARGET) == 1
    valid(model)
    for name in ("n_depthtospace", "n_cropped"):
        assert model.graph.node(name).outputs[0].dtype == ir.DataType.UINT8
    reader = model.graph.node("second").inputs[0]
    assert reader is not None
    assert reader.name == "cropped"
    np.testing.assert_array_equal(plain(model, FEEDS)[0], before)
    report = executed(model)
    assert set(report.int8) == {"first", "second"}
    assert report.operators["QuantizeLinear"] == 1
    np.testing.assert_allclose(optimized(model, FEEDS)[0], before, atol=0.031)  # one step of the last quantizer
    assert interleaves.apply(model, TARGET) == 0


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": np.int8}, {"shown": True}, {"moves": ("Slice",)}, {"moves": ("Neg", "DepthToSpace")}],
    ids=["int8", "an output of the graph", "no DepthToSpace", "arithmetic"],
)
def test_what_stays(arguments: dict[str, object]) -> None:
    model = upsampled(**arguments)  # type: ignore[arg-type]
    before = plain(model, FEEDS)
    assert interleaves.apply(model, TARGET) == 0
    for one, other in zip(plain(model, FEEDS), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_int8_of_the_host_is_moved_once_it_is_unsigned() -> None:
    model = upsampled(dtype=np.int8)
    before = plain(model, FEEDS)[0]
    assert emit(model, TARGET).changes["interleaves"] == 1
    np.testing.assert_array_equal(plain(model, FEEDS)[0], before)
