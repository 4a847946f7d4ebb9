"""Programs of torch.export: where NNCF's quantizers are in the program and in ONNX, and that both compute the same."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest

import attnquant
from attnquant.errors import HostError

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("onnxscript", reason="needs onnxscript, which torch exports with")
pytest.importorskip("torchao", reason="needs torchao, without which NNCF quantizes no program")

import nncf  # noqa: E402

from attnquant.emission.execution import executed  # noqa: E402
from attnquant.host import torch_bridge, torch_programs, torch_seams  # noqa: E402
from attnquant.host.seams import applied  # noqa: E402
from tests import torchcases as cases  # noqa: E402

LEAST = 90.0  # dB: float rounding
_MOVES = ("reshape", "transpose", "view", "unsqueeze", "expand", "select", "squeeze", "contiguous", "cat", "repeat", "slice")


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torch and NNCF warn of the program being experimental, once for each case
    yield
    logging.disable(before)


def samples() -> list[Any]:
    torch.manual_seed(0)
    return [torch.randn(1, cases.TOKENS, cases.WIDTH) for _ in range(4)]


def program(case: type, data: list[Any]) -> Any:
    torch.manual_seed(1)
    with torch_bridge.as_it_runs():
        return torch.export.export(case().eval(), (data[0],)).module()


def quantize(module: Any, data: list[Any], **options: Any) -> Any:
    return nncf.quantize(module, nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(data), **options)


def quantized(case: type, data: list[Any]) -> Any:
    with attnquant.extended():
        return quantize(program(case, data), data)


def ports(module: Any) -> list[tuple[str, ...]]:
    """For each attention of a program what its Q, K and V come from: "quantizer", or "float"."""
    return [
        tuple(_source(argument, module) for argument in node.args[:3])
        for node in module.graph.nodes
        if str(node.target).startswith("aten.scaled_dot_product_attention")
    ]


def _source(node: Any, module: Any) -> str:
    name = str(node.target)
    if "dequantize" in name or torch_programs._compressed(node, module) is not None:
        return "quantizer"
    if node.op == "call_function" and name.removeprefix("aten.").startswith(_MOVES):
        sources = node.args[0] if isinstance(node.args[0], list) else [node.args[0]]
        found = {_source(source, module) for source in sources}
        return found.pop() if len(found) == 1 else "both"
    return "float"


@pytest.mark.parametrize("case", list(cases.PLACES), ids=lambda case: case.__name__)
def test_query_and_key_alone_are_quantized_in_the_program_and_onnx(case: type, tmp_path: Path) -> None:
    data = samples()
    module = quantized(case, data)
    eager = case in (cases.Eager, cases.MultiheadWeights)
    assert ports(module) == ([] if eager else [("quantizer", "quantizer", "float")])
    before = copy.deepcopy(module.state_dict())
    result = attnquant.export_onnx(module, data[0], tmp_path / "model.onnx")
    audit = attnquant.check(tmp_path / "model.onnx")
    assert [(row.status, row.reasons) for row in audit.rows] == [("quantized", ())]
    assert audit.ok, audit.violations
    assert audit.rows[0].site.form == ("decomposed" if eager else "ai.onnx::Attention@23")
    assert [linear.reason for linear in audit.linears if linear.reason] == []
    ran = executed(result.model)
    assert len(ran.int8) >= len(audit.linears) > 0
    assert not ran.float_behind_dequantize
    assert not ran.float_linears
    assert result.snr_db >= LEAST
    assert before.keys() == module.state_dict().keys()


def test_the_program_computes_what_the_module_does() -> None:
    """Also with a past that K and V share: integers in its place would leave 0 dB."""
    data = samples()
    for case in (cases.Past, cases.Same, cases.SharedKeyValue):
        module = quantized(case, data)
        torch.manual_seed(1)
        with torch.no_grad():
            expected, found = case().eval()(data[0]), module(data[0])
        assert 10 * torch.log10(expected.square().sum() / (expected - found).square().sum()) > 25


def test_stock_nncf_quantizes_values_that_are_keys_too() -> None:
    """What the seam is for; once NNCF does it right it can go."""
    data = samples()
    with applied([seam for seam in torch_seams.SEAMS if "ports" not in seam.name]):
        for case in (cases.Same, cases.SharedKeyValue):
            assert ports(quantize(program(case, data), data)) == [("quantizer", "quantizer", "quantizer")]


def test_batches_of_any_size(tmp_path: Path) -> None:
    import onnxruntime

    data = samples()
    batch = torch.export.Dim("batch", min=1, max=64)
    torch.manual_seed(1)
    module = torch.export.export(cases.Unbind().eval(), (torch.cat(data),), dynamic_shapes=({0: batch},)).module()
    with attnquant.extended():
        module = quantize(module, data)
    attnquant.export_onnx(module, torch.cat(data), tmp_path / "model.onnx", dynamic_shapes=({0: batch},))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for size in (1, 3):
        x = torch.cat(data[:size])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(x), atol=1e-4, rtol=1e-4)


def test_float_programs_and_weights_with_a_zero_point_are_refused(tmp_path: Path) -> None:
    data = samples()
    with pytest.raises(HostError, match="no quantizer"):
        attnquant.export_onnx(program(cases.Unbind, data), data[0], tmp_path / "model.onnx")
    module = quantized(cases.Unbind, data)
    name = next(name for name in module.state_dict() if name.startswith("zero_point"))
    module.state_dict()[name].fill_(1)
    with pytest.raises(HostError, match="zero point"):
        attnquant.export_onnx(module, data[0], tmp_path / "model.onnx")


def test_flex_attention_is_refused_with_the_reason() -> None:
    with torch.no_grad():
        program = torch.export.export(cases.Flex().eval(), (samples()[0],)).module()
    with pytest.raises(HostError, match="scaled_dot_product_attention"), attnquant.extended():
        nncf.quantize(program, nncf.Dataset(samples()), model_type=nncf.ModelType.TRANSFORMER, subset_size=1)
