"""transformers' attention interface, sdpa and eager, as a module and as a program of torch.export."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import attnquant

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("onnxscript", reason="needs onnxscript, which torch exports with")
transformers = pytest.importorskip("transformers", reason="needs transformers")

import nncf  # noqa: E402

from attnquant.emission.execution import executed  # noqa: E402

LEAST = 60.0  # dB: 139 and more where nothing but float rounding differs; one value on a step's edge makes it 71


class Body(torch.nn.Module):
    """One layer of BERT, or of Llama with half as many heads of K and V, from token ids to the last hidden state."""

    def __init__(self, kind: str, attention: str) -> None:
        super().__init__()
        small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
        torch.manual_seed(0)
        if kind == "bert":
            config = transformers.BertConfig(**small, num_attention_heads=2, attn_implementation=attention)
            self.inner = transformers.BertModel(config, add_pooling_layer=False)
        else:
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
            self.inner = transformers.LlamaModel(transformers.LlamaConfig(**small, **heads, attn_implementation=attention))

    def forward(self, ids: Any) -> Any:
        return self.inner(input_ids=ids).last_hidden_state


@pytest.mark.parametrize("way", ["module", "program"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_query_and_key_alone_are_quantized(kind: str, attention: str, way: str, tmp_path: Path) -> None:
    if way == "program" and importlib.util.find_spec("torchao") is None:
        pytest.skip("needs torchao, without which NNCF quantizes no program")
    torch.manual_seed(0)
    data = [torch.randint(0, 50, (1, 6)) for _ in range(3)]
    module: Any = Body(kind, attention).eval()
    with attnquant.extended(), torch.no_grad():
        if way == "program":
            module = torch.export.export(module, (data[0],)).module()
        module = nncf.quantize(
            module, nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(data)
        )
    result = attnquant.export_onnx(module, data[0], tmp_path / "model.onnx")
    audit = attnquant.check(tmp_path / "model.onnx")
    assert [(row.status, row.reasons) for row in audit.rows] == [("quantized", ())]
    assert audit.ok, audit.violations
    assert audit.rows[0].site.form == ("ai.onnx::Attention@23" if attention == "sdpa" else "decomposed")
    assert [linear.reason for linear in audit.linears] == [""] * (6 if kind == "bert" else 7)
    ran = executed(result.model)
    assert not ran.float_behind_dequantize
    assert not ran.float_linears
    assert not ran.tables
    assert result.snr_db >= LEAST
