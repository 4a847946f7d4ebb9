"""Small random models of timm's families, as benchmarks/timm_counts.toml lists them, with weights that do something.

timm's own initialization gives a network whose output hardly depends on its input (weights of 0.02, LayerScale of 1e-5,
heads of zeros). Here every parameter is drawn again, seeded by the family: matrices and kernels normal with variance
1 / fan-in (queries and keys are then of size one, so that the softmax is neither flat nor one-hot), LayerScale uniform in
0.5 to 1, other scales 1 + 0.1 normal, biases 0.1 normal, tables of positions and tokens 0.3 normal. The statistics of
BatchNorm are those of one batch. `variation` says what came of it.
"""

import importlib
import math
import tomllib
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = Path(__file__).with_name("timm_counts.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the counts."""

    family: str
    name: str
    arguments: dict[str, Any]
    attentions: int
    how: str
    config: dict[str, Any] | None = None
    image: int | None = None
    cross_covariance: int = 0
    pooling: int = 0
    linear: int = 0

    @property
    def size(self) -> int:
        """Side of the pictures in pixels."""
        return self.image or self.arguments["img_size"]


def families() -> list[Family]:
    """The rows, in the order of the file."""
    return [Family(**row) for row in tomllib.loads(COUNTS.read_text(encoding="utf-8"))["model"]]


def built(family: Family, *, fused: bool) -> Any:
    """The module in eval mode, with fused attention wherever timm has it, or nowhere."""
    import timm
    import torch

    timm.layers.set_fused_attn(fused, experimental=fused)
    try:
        if family.config is None:
            module = timm.create_model(family.name, pretrained=False, num_classes=20, **family.arguments)
        else:  # timm takes such configurations by name only
            home = importlib.import_module(timm.create_model(family.name, num_classes=0).__class__.__module__)
            config = replace(home.model_cfgs[family.name], **_tuples(family.config))
            module = home.MultiScaleVit(cfg=config, num_classes=20, **family.arguments)
    finally:
        timm.layers.set_fused_attn(True)
    torch.manual_seed(zlib.crc32(family.family.encode()))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_drawn(name, parameter))
        _batch_statistics(module, torch.from_numpy(pictures(family, 16, seed=2)))
    return module.eval()


def pictures(family: Family, count: int, *, seed: int) -> np.ndarray:
    """(count, 3, size, size) float32: smooth random pictures, mean 0 and deviation 1 each."""
    rng = np.random.default_rng(seed)
    size, coarse = family.size, 7
    grid = rng.standard_normal((count, 3, coarse, coarse))
    # bilinear enlargement as two products
    places = np.linspace(0, coarse - 1, size)
    weights = np.maximum(0, 1 - np.abs(places[:, None] - np.arange(coarse)[None]))
    made = weights @ grid @ weights.T + 0.2 * rng.standard_normal((count, 3, size, size))
    made -= made.mean(axis=(1, 2, 3), keepdims=True)
    return (made / made.std(axis=(1, 2, 3), keepdims=True)).astype(np.float32)


def variation(outputs: np.ndarray) -> float:
    """How much the outputs (samples, ...) depend on the sample: deviation over samples by root mean square."""
    return float(outputs.std(axis=0).mean() / np.sqrt(np.square(outputs).mean()))


def _drawn(name: str, parameter: Any) -> Any:
    import torch

    noise = torch.randn(parameter.shape)
    last = name.rpartition(".")[2]
    if "position" in name or "pos_embed" in name or "token" in last or "table" in last or last in ("latent", "rel_pos_h"):
        return 0.3 * noise
    if last in ("rel_pos_w", "attention_biases", "reg_token"):
        return 0.3 * noise
    if "gamma" in last:
        return 0.5 + 0.5 * torch.rand(parameter.shape)
    if parameter.dim() >= 2 and parameter.shape[0] > 1 and last not in {"logit_scale", "temperature"}:
        return noise / math.sqrt(parameter[0].numel())
    return 0.1 * noise if "bias" in last else 1 + 0.1 * noise


def _batch_statistics(module: Any, batch: Any) -> None:
    import torch

    norms = [part for part in module.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    for part in norms:
        part.momentum = 1.0
    module.eval()
    for part in norms:
        part.train()
    if norms:
        module(batch)
    module.eval()


def _tuples(value: Any) -> Any:
    """TOML's lists as the tuples that timm's configurations hold."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
