"""hf:FOLDER: a folder with config.json as transformers saves it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attnquant.errors import ModelError
from attnquant.exporting.built import Built, require

_SEED = 0
_LENGTH, _LARGEST = 16, 512
_TOKENS = ("input_ids", "attention_mask", "token_type_ids")


def build(folder: str, *, weights: Path | None, random_weights: bool, image_size: int | None) -> Built:
    """A model of text (batch and sequence of any size) or of pictures (any batch). Errors as `load_named`."""
    require(f"hf:{folder}", "torch", "transformers")
    import torch
    import transformers

    name, path = f"hf:{folder}", Path(folder)
    if not (path / "config.json").is_file():
        msg = f"{name}: expected a local folder with config.json, got none. Nothing is downloaded: save the model first."
        raise ModelError(msg)
    if image_size is not None:
        msg = f"{name}: --image-size is for timm models; the folder's config says the size. Leave it out."
        raise ModelError(msg)
    torch.manual_seed(_SEED)
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        inner = _module(transformers, path, config, weights, random_weights)
    except Exception as problem:
        msg = (
            f"{name} can't be built: {type(problem).__name__}: {' '.join(str(problem).split())[:300]} Expected a model that "
            "transformers knows, with model.safetensors in the folder, --weights FILE.safetensors or --random-weights."
        )
        raise ModelError(msg) from problem
    if getattr(config, "is_encoder_decoder", False):
        msg = f"{name}: an encoder with a decoder is two models. Pass the part you want to attnquant.quantize as a module."
        raise ModelError(msg)
    return _pictures(inner, path) if inner.main_input_name == "pixel_values" else _text(name, inner)


def _module(transformers: Any, path: Path, config: Any, weights: Path | None, random_weights: bool) -> Any:
    names = getattr(config, "architectures", None) or ["AutoModel"]
    kind = getattr(transformers, names[0], transformers.AutoModel)
    if random_weights:
        return kind.from_config(config) if kind is transformers.AutoModel else kind(config)
    if weights is None:
        options = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        return kind.from_pretrained(path, config=config, **options)
    from safetensors.torch import load_file

    module = kind.from_config(config) if kind is transformers.AutoModel else kind(config)
    module.load_state_dict(load_file(weights), strict=True)
    module.tie_weights()
    return module


def _text(name: str, inner: Any) -> Built:
    import inspect

    import torch

    if inner.main_input_name != "input_ids":
        msg = f"{name} takes {inner.main_input_name!r}: expected text or pictures. Pass the module to attnquant.quantize."
        raise ModelError(msg)
    taken = inspect.signature(inner.forward).parameters
    names = [key for key in _TOKENS if key in taken]
    if not getattr(inner.config, "type_vocab_size", None):
        names = [key for key in names if key != "token_type_ids"]
    ids = torch.arange(2 * _LENGTH).reshape(2, _LENGTH) % inner.config.vocab_size
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    longest = min(_LARGEST, getattr(inner.config, "max_position_embeddings", None) or _LARGEST)
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence", max=longest)}
    return Built(
        module=_first_output(inner, names), example={key: values[key] for key in names},
        dynamic_shapes=dict.fromkeys(names, axes),
    )  # fmt: skip


def _pictures(inner: Any, path: Path) -> Built:
    import torch

    size = inner.config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    file = path / "preprocessor_config.json"
    said: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    mean, std = said.get("image_mean"), said.get("image_std")
    return Built(
        module=_first_output(inner, ["pixel_values"]), example={"pixel_values": torch.zeros(2, 3, height, width)},
        mean=tuple(mean) if mean else None, std=tuple(std) if std else None,
    )  # fmt: skip


def _first_output(inner: Any, names: list[str]) -> Any:
    """A module that takes `names` and gives the logits, or else the first tensor: no caches, no tuples of states."""
    import torch

    if hasattr(inner.config, "use_cache"):
        inner.config.use_cache = False

    def answer(**inputs: Any) -> Any:
        result = inner(**inputs, return_dict=True)
        return result["logits"] if "logits" in result else result[0]

    # torch.export names the inputs by the parameters of forward.
    class Pictures(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, pixel_values: Any) -> Any:
            return answer(pixel_values=pixel_values)

    class Text(Pictures):
        def forward(self, input_ids: Any, attention_mask: Any) -> Any:  # type: ignore[override]
            return answer(input_ids=input_ids, attention_mask=attention_mask)

    class Segments(Pictures):
        def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any) -> Any:  # type: ignore[override]
            return answer(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)

    kinds = {("pixel_values",): Pictures, _TOKENS[:2]: Text, _TOKENS: Segments}
    if tuple(names) not in kinds:
        msg = f"{type(inner).__name__} takes {names}: expected tokens and a mask. Pass the module to attnquant.quantize."
        raise ModelError(msg)
    return kinds[tuple(names)]().eval()
