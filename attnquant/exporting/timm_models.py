"""timm:NAME."""

import contextlib
import io
from pathlib import Path
from typing import Any

from attnquant.errors import ModelError
from attnquant.exporting.built import Built, require, require_safetensors

_SEED = 0


def build(name: str, *, weights: Path | None, random_weights: bool, image_size: int | None) -> Built:
    """A model of timm's registry, with its own size, mean and deviation of pictures. Errors as `load_named`."""
    require(f"timm:{name}", "torch", "timm")
    import timm
    import torch

    if not timm.is_model(name):
        close = timm.list_models(f"*{name.partition('.')[0].partition('_')[0]}*")[:5]
        msg = f"timm:{name}: timm {timm.__version__} has no model of that name. Close to it: {', '.join(close) or 'none'}."
        raise ModelError(msg)
    config = timm.get_pretrained_cfg(name)
    file = weights if weights is not None or random_weights else _cached(name, config)
    torch.manual_seed(_SEED)
    options: dict[str, Any] = {} if image_size is None else {"img_size": image_size}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            module = timm.create_model(
                name, pretrained=file is not None, **options,
                **({} if file is None else {"pretrained_cfg_overlay": {"file": str(file), "custom_load": False}}),
            )  # fmt: skip
    except Exception as problem:
        msg = f"timm:{name} can't be built: {type(problem).__name__}: {' '.join(str(problem).split())[:300]} "
        remedy = "Leave --image-size out." if options else "Check that the weights are of this model."
        raise ModelError(msg + remedy) from problem
    data = timm.data.resolve_model_data_config(module)
    channels, height, width = data["input_size"]
    if image_size is not None:
        height = width = image_size
    example = {"x": torch.zeros(2, channels, height, width)}
    return Built(module=module, example=example, mean=tuple(data["mean"]), std=tuple(data["std"]))


def _cached(name: str, config: Any) -> Path:
    """The model's safetensors file in the local cache of the hub. Raises ModelError where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = None
    if config is not None and config.hf_hub_id:
        found = try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
    if not isinstance(found, str):
        msg = (
            f"timm:{name}: no weights in the local cache, and nothing is downloaded. Give --weights FILE.safetensors, or "
            "--random-weights to try without."
        )
        raise ModelError(msg)
    require_safetensors(Path(found))
    return Path(found)
