"""Torch modules: where the quantizers are in torch and in ONNX, and that both compute the same."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnquant
import attnquant.extension
from attnquant.errors import HostError, VerificationError
from attnquant.metatypes.torch_ops import SCALED_DOT_PRODUCT_ATTENTION, argument_ports


@pytest.mark.parametrize(
    ("positional", "keywords", "expected"),
    [(3, (), (0, 1)), (0, ("value", "key", "query"), (1, 2)), (1, ("value", "key"), (0, 2)), (6, ("scale",), (0, 1))],
)
def test_ports_follow_the_names_of_arguments(positional: int, keywords: tuple[str, ...], expected: tuple[int, ...]) -> None:
    assert argument_ports(SCALED_DOT_PRODUCT_ATTENTION, positional, keywords) == expected


torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("onnxscript", reason="needs onnxscript, which torch exports with")

import nncf  # noqa: E402

from attnquant import bridge  # noqa: E402
from attnquant.emission.execution import executed  # noqa: E402
from attnquant.emission.turned import turn_weights  # noqa: E402
from attnquant.host import torch_bridge, torch_seams  # noqa: E402
from attnquant.host.seams import applied  # noqa: E402
from tests import torchcases as cases  # noqa: E402

PLACED = list(cases.PLACES)
LEAST = 90.0  # dB; 97 to 139 were seen, float rounding: integers and scales are NNCF's


def samples() -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(1, cases.TOKENS, cases.WIDTH) for _ in range(4)]


def quantized(case: type, data: list[Any], **options: Any) -> Any:
    torch.manual_seed(1)
    with attnquant.extended():
        return nncf.quantize(
            case().eval(), nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(data), **options
        )


def places(module: Any) -> set[str]:
    """Quantizers of activations but for the inputs of linears (behind SmoothQuant's mul, or on port 0)."""
    found = set()
    for name, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, torch_bridge.BaseQuantizer):
            kind, _, key = name.removeprefix("__nncf_hooks.").partition("_hooks.")
            key = key.rpartition(".")[0]
            weight = "linear/" in key and key.endswith("__1")
            if not weight and "pre_hook__" not in key:
                found.add(f"{kind} {key}")
    return found


@pytest.mark.parametrize("case", PLACED, ids=lambda case: case.__name__)
def test_query_and_key_alone_are_quantized_in_torch_and_onnx(case: type, tmp_path: Path) -> None:
    data = samples()
    module = quantized(case, data)
    assert places(module) == cases.PLACES[case]
    result = attnquant.export_onnx(module, data[0], tmp_path / "model.onnx")
    audit = attnquant.check(tmp_path / "model.onnx")
    assert [(row.status, row.reasons) for row in audit.rows] == [("quantized", ())]
    assert audit.ok, audit.violations
    assert [linear.reason for linear in audit.linears if linear.reason] == []
    eager = case in (cases.Eager, cases.MultiheadWeights)
    assert audit.rows[0].site.form == ("decomposed" if eager else "ai.onnx::Attention@23")
    assert result.snr_db >= LEAST
    ran = executed(result.model)
    assert len(ran.int8) >= len(audit.linears)
    assert not ran.float_behind_dequantize
    assert not ran.float_linears


@pytest.mark.parametrize("case", PLACED, ids=lambda case: case.__name__)
def test_the_quantizers_of_the_export_are_those_of_nncf(case: type) -> None:
    """Before scales are made safe for the CPU nothing but float rounding differs."""
    import onnxruntime

    data = samples()
    module = quantized(case, data)
    arguments = ((data[0],), {})
    proto = torch_bridge.exported(module, arguments, 23, None)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
    (found,) = session.run(None, {proto.graph.input[0].name: data[0].numpy()})
    (expected,) = torch_bridge.run(module, arguments)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("fix", "kind", "least"), [("DISABLE", "UINT8", LEAST), ("ENABLE", "INT8", 40.0)])
def test_weights_are_uint8_only_where_they_can_overflow(fix: str, kind: str, least: float, tmp_path: Path) -> None:
    """With NNCF's overflow fix a channel's largest weight is at 63.5 steps: which way that goes is float rounding."""
    data = samples()
    fixed = nncf.AdvancedQuantizationParameters(overflow_fix=getattr(nncf.OverflowFix, fix))
    module = quantized(cases.Unbind, data, advanced_parameters=fixed)
    result = attnquant.export_onnx(module, data[0], tmp_path / "model.onnx")
    weights = [value for value in result.model.graph.initializers.values() if len(value.shape or ()) == 2]
    assert {value.dtype.name for value in weights} == {kind}
    assert result.snr_db >= least


def test_stock_nncf_takes_keywords_by_position_and_leaves_the_past_float() -> None:
    """What the seams are for; once NNCF does it right they can go."""
    data = samples()
    with applied([seam for seam in torch_seams.SEAMS if "compiler" in seam.name]):
        made = {}
        for case in (cases.Keywords, cases.Past):
            torch.manual_seed(1)
            made[case] = places(
                nncf.quantize(case().eval(), nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=4)
            )
    assert "post v/linear/0__0" in made[cases.Keywords]
    assert "pre /cat/0__0" not in made[cases.Past]


def test_flex_attention_is_refused_with_the_reason() -> None:
    with pytest.raises(HostError, match="NNCF's hooks"):
        quantized(cases.Flex, samples())


@pytest.mark.parametrize("way", ["torch", "program", "onnx"])
def test_the_report_from_the_field(way: str, tmp_path: Path) -> None:
    """timm's Attention(1, 1), zeros for calibration, preset PERFORMANCE, CPU."""
    attention = pytest.importorskip("timm.layers.attention", reason="needs timm").Attention
    if way == "program":
        pytest.importorskip("torchao", reason="needs torchao, without which NNCF quantizes no program")
    zero, path = torch.zeros(1, 1, 1), tmp_path / "model.onnx"
    module = attention(1, 1).eval()
    data: list[Any] = [zero]
    if way == "program":
        module = torch.export.export(module, (zero,)).module()
    if way == "onnx":
        with torch.no_grad():
            module = torch.onnx.export(module, (zero,), dynamo=True, opset_version=23, verbose=False).model_proto
        data = [{module.graph.input[0].name: zero.numpy()}]
    with attnquant.extended():
        module = nncf.quantize(
            module, nncf.Dataset(data), preset=nncf.QuantizationPreset.PERFORMANCE,
            target_device=nncf.TargetDevice.CPU, model_type=nncf.ModelType.TRANSFORMER, subset_size=1,
        )  # fmt: skip
    if way == "torch":
        assert {name for name in places(module) if "attention" in name} == {
            "pre /scaled_dot_product_attention/0__0", "pre /scaled_dot_product_attention/0__1"
        }  # fmt: skip
    audit = attnquant.check(module if way == "onnx" else attnquant.export_onnx(module, zero, path).model)
    assert [(row.status, row.reasons) for row in audit.rows] == [("quantized", ())]
    assert audit.ok, audit.violations
    assert [linear.reason for linear in audit.linears] == ["", ""]


def test_no_compiler_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("compiled")

    monkeypatch.setattr("nncf.torch.quantization.extensions.QuantizedFunctionsCPULoader.load", compile_)
    monkeypatch.setattr("nncf.torch.quantization.extensions.QuantizedFunctionsCPU._loaded_namespace", None)
    module = quantized(cases.Unbind, samples())
    torch_bridge.run(module, ((samples()[0],), {}))
    assert torch_bridge.count_quantizers(module) == 6  # inputs and weights of two linears, Q, K


@pytest.mark.parametrize(("kind", "said"), [("CPU", ["not compiled"]), ("CUDA", ["compiles its extension", "too slow"])])
def test_what_is_compiled_is_said_and_a_failure_survived(kind: str, said: list[str]) -> None:
    from nncf.torch.extensions import ExtensionNamespace, ExtensionsType
    from nncf.torch.quantization.reference import ReferenceQuantizedFunctions

    class Loader:
        name = staticmethod(lambda: "quantized_functions")
        extension_type = staticmethod(lambda: getattr(ExtensionsType, kind))
        get_build_dir = staticmethod(lambda: "nowhere")

        @staticmethod
        def load() -> None:
            raise TimeoutError("too slow\nfor you")

    torch_seams._say.cache_clear()
    with attnquant.extended(), pytest.warns(UserWarning, match="quantized_functions") as caught:
        found = [ExtensionNamespace(Loader).get("Quantize_forward") for _ in range(2)][1]
    assert found == ReferenceQuantizedFunctions.Quantize_forward
    assert len(caught) == len(said)
    assert all(word in str(warning.message) for word, warning in zip(said, caught, strict=True))


@pytest.mark.parametrize("seam", torch_seams.SEAMS, ids=lambda seam: seam.name)
def test_seams_fit_say_why_and_can_be_undone(seam: Any) -> None:
    import importlib
    import inspect

    owner: Any = importlib.import_module(seam.module)
    *parents, last = seam.attribute.split(".")
    for part in parents:
        owner = getattr(owner, part)
    before = inspect.getattr_static(owner, last)
    assert len(seam.why) > 40
    with applied([seam]):
        assert inspect.getattr_static(owner, last) is not before
    assert inspect.getattr_static(owner, last) is before


def test_a_float_module_and_old_opsets_are_refused(tmp_path: Path) -> None:
    data = samples()
    with pytest.raises(HostError, match="no quantizer"):
        attnquant.export_onnx(cases.Unbind().eval(), data[0], tmp_path / "model.onnx")
    with pytest.raises(HostError, match="Opset 17"):
        attnquant.export_onnx(cases.Unbind().eval(), data[0], tmp_path / "model.onnx", opset=17)


def test_nothing_is_written_when_the_models_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = samples()
    module = quantized(cases.Unbind, data)
    monkeypatch.setattr(bridge, "LEAST_DB", 1000.0)
    path = tmp_path / "model.onnx"
    path.write_text("before")
    with pytest.raises(VerificationError, match="not written"):
        attnquant.export_onnx(module, data[0], path)
    assert path.read_text() == "before"


def test_weights_are_transposed_in_front_of_their_quantizer() -> None:
    import onnx_ir as ir

    data = samples()
    model = ir.from_proto(torch_bridge.exported(quantized(cases.Unbind, data), ((data[0],), {}), 23, None))
    assert turn_weights(model) == 2
    chains = [node for node in model.graph if node.op_type == "MatMul"]
    assert {node.inputs[1].producer().op_type for node in chains} == {"DequantizeLinear"}
    assert {node.inputs[1].producer().attributes["axis"].as_int() for node in chains} == {1}


def test_enabling_does_not_load_torch_by_itself() -> None:
    assert attnquant.extension._torch_seams() == torch_seams.SEAMS
    kept = sys.modules.pop("torch")
    try:
        assert attnquant.extension._torch_seams() == ()
    finally:
        sys.modules["torch"] = kept
