"""nncf.quantize under enable(): presets, devices, scopes, refusals; and stock NNCF again after disable()."""

from pathlib import Path
from typing import Any

import nncf
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import attnquant
from attnquant import runtime
from attnquant.check import check
from attnquant.errors import HostError
from attnquant.placement import stored_setup
from attnquant.roles import PortRole
from tests import tinymodels

HERE = Path(__file__).parent
TRANSFORMER = nncf.ModelType.TRANSFORMER


def samples(count: int = 3) -> list[dict[str, np.ndarray]]:
    return [{"x": tinymodels.weights(seed, 2, 5, tinymodels.WIDTH)} for seed in range(count)]


def quantized(model: onnx.ModelProto, data: list[dict[str, np.ndarray]] | None = None, **arguments: Any) -> onnx.ModelProto:
    with attnquant.extended():
        return nncf.quantize(model, nncf.Dataset(data or samples()), model_type=TRANSFORMER, **arguments)


def roles(model: onnx.ModelProto) -> list[PortRole]:
    setup = stored_setup({entry.key: entry.value for entry in model.metadata_props})
    assert setup is not None
    return sorted(point.role for point in setup.points)


QK = [PortRole.KEY, PortRole.QUERY]


def test_the_fields_minimal_report() -> None:
    """timm Attention(1, 1) at opset 23, zeros as calibration data, PERFORMANCE preset: Q and K only, finite scales."""
    model = onnx.load(HERE / "models" / "timm_attention_1_1.onnx")
    zeros = [{"x": np.zeros((1, 4, 1), np.float32)}]
    made = quantized(model, zeros, preset=nncf.QuantizationPreset.PERFORMANCE)
    assert roles(made) == QK
    report = check(made)
    assert report.ok, report.problems
    assert [row.status for row in report.rows] == ["quantized"]
    scales = [numpy_helper.to_array(item) for item in made.graph.initializer if "scale" in item.name]
    assert scales
    assert all(np.isfinite(scale).all() and (scale > 0).all() for scale in scales)
    expected = runtime.run(ir.from_proto(model), zeros[0])["y"]
    np.testing.assert_allclose(runtime.run(ir.from_proto(made), zeros[0])["y"], expected, atol=1e-6)


@pytest.mark.parametrize("preset", [None, nncf.QuantizationPreset.PERFORMANCE, nncf.QuantizationPreset.MIXED])
@pytest.mark.parametrize("device", ["ANY", "CPU", "GPU", "NPU"])
def test_presets_and_devices(preset: Any, device: str) -> None:
    made = quantized(tinymodels.attention(), preset=preset, target_device=nncf.TargetDevice[device])
    assert roles(made) == QK
    assert check(made).ok


def test_a_scope_the_caller_ignores_is_left_alone() -> None:
    model = tinymodels.attention()
    attention = next(node.name for node in model.graph.node if node.op_type == "Attention")
    made = quantized(model, ignored_scope=nncf.IgnoredScope(names=[attention]))
    assert roles(made) == []
    setup = stored_setup({entry.key: entry.value for entry in made.metadata_props})
    assert setup is not None
    assert {item.reason for item in setup.skipped if item.role in QK} == {"ignored by the caller"}
    by_type = quantized(tinymodels.attention(), ignored_scope=nncf.IgnoredScope(types=["MatMul"]))
    assert roles(by_type) == QK
    assert not any("folded" in item.name for item in by_type.graph.initializer), "no linear is quantized"
    assert {linear.reason for linear in check(by_type).linears} == {"ignored by the caller"}


def test_what_the_recipe_keeps_float_says_so() -> None:
    recipe = 'extends = "int8"\n[linears]\nkeep_float = ["project_[vo]"]\n'
    report = check(attnquant.quantize(tinymodels.attention(), samples(), recipe=recipe).model)
    assert report.ok
    assert {linear.node: linear.reason for linear in report.linears} == {
        "project_q": "", "project_k": "", "project_v": "float by the recipe", "project_out": "float by the recipe",
    }


def test_an_ignored_scope_that_matches_nothing_is_refused() -> None:
    with pytest.raises(HostError, match="not_there"):
        quantized(tinymodels.attention(), ignored_scope=nncf.IgnoredScope(names=["not_there"]))


def test_what_can_not_be_done_is_refused_with_a_sentence() -> None:
    with pytest.raises(HostError, match="FP8 mode"):
        quantized(tinymodels.attention(), mode=nncf.QuantizationMode.FP8_E4M3)
    with pytest.raises(HostError, match="CPU_SPR is not supported"):
        quantized(tinymodels.attention(), target_device=nncf.TargetDevice.CPU_SPR)


def test_caller_arguments_and_model_are_not_changed() -> None:
    model, parameters = tinymodels.attention(), nncf.AdvancedQuantizationParameters()
    before = model.SerializeToString()
    quantized(model, advanced_parameters=parameters)
    assert model.SerializeToString() == before
    assert parameters == nncf.AdvancedQuantizationParameters()


def test_inputs_and_outputs_stay_as_declared() -> None:
    """Symbolic sizes of an output stay, also where shape inference knows the number: callers bind to them."""
    model = tinymodels.attention(length=5)
    declared = model.graph.output[0].type.tensor_type.shape.dim
    declared[0].dim_param, declared[1].dim_param = "hidden_dim_0", "hidden_dim_1"
    result = quantized(model)
    assert list(result.graph.input) == list(model.graph.input)
    assert list(result.graph.output) == list(model.graph.output)


def test_stock_quantization_is_the_same_before_and_after() -> None:
    def stock() -> bytes:
        rows = [{"x": sample["x"][0]} for sample in samples()]
        made = nncf.quantize(tinymodels.linear(), nncf.Dataset(rows), model_type=TRANSFORMER)
        return bytes(made.SerializeToString(deterministic=True))

    before = stock()
    quantized(tinymodels.attention())
    assert stock() == before


def test_a_seeded_fault_is_seen() -> None:
    """Without the target points seam no port is quantized: the tests above do test the seams."""
    from attnquant.host import onnx_seams

    kept = onnx_seams.SEAMS
    onnx_seams.SEAMS = tuple(seam for seam in kept if seam.name != "attention target points")
    try:
        made = quantized(tinymodels.attention())
    finally:
        onnx_seams.SEAMS = kept
    assert not check(made).ok
