"""Small random models of transformers' families, as benchmarks/families_counts.toml lists them, exported in several ways.

Weights are drawn as benchmarks/timm_small.py does. Beside each model lies what its attentions got in torch: the operands of
every `scaled_dot_product_attention`, or of the products around every softmax, recorded while the module ran. Roles are
compared with those by value, whatever became of names and layouts.
"""

import math
import tomllib
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

COUNTS = Path(__file__).with_name("families_counts.toml")
SAMPLES = 5
PAST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the counts."""

    family: str
    attentions: int
    how: str
    inputs: dict[str, list[int]]
    config: dict[str, Any] = field(default_factory=dict)
    config_class: str = ""
    model_class: str = ""
    backbone: str = ""
    decoder: bool = False
    folded: int = 0
    """Attentions of constants alone, which an export of fixed size may fold away."""
    output: str = ""
    without: list[str] = field(default_factory=list)
    """Defaults that the configuration does not have."""
    defaults: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to export."""

    name: str
    attention: str
    opset: int
    torchscript: bool = False
    dynamic: bool = True
    past: bool = False


VARIANTS = {
    item.name: item
    for item in (
        Variant(name="sdpa24", attention="sdpa", opset=24),
        Variant(name="eager20", attention="eager", opset=20),
        Variant(name="ts17eager", attention="eager", opset=17, torchscript=True, dynamic=False),
        Variant(name="past23", attention="sdpa", opset=23, past=True),
        Variant(name="past18", attention="eager", opset=18, past=True),
        Variant(name="sdpa18", attention="sdpa", opset=18),
        Variant(name="eager18one", attention="eager", opset=18, dynamic=False),
        Variant(name="sdpa23one", attention="sdpa", opset=23, dynamic=False),
    )
}


def families() -> list[Family]:
    """The rows, in the order of the file."""
    content = tomllib.loads(COUNTS.read_text(encoding="utf-8"))
    rows = [{("model_class" if key == "class" else key): value for key, value in row.items()} for row in content["model"]]
    return [Family(**row, defaults=content["defaults"]) for row in rows]


def built(family: Family, attention: str) -> Any:
    """The module in eval mode. Raises ValueError where transformers has no such attention for it."""
    import torch
    import transformers

    parts = family.config.keys() & {"text_config", "vision_config"}
    defaults = {} if parts else {key: value for key, value in family.defaults.items() if key not in family.without}
    given = {**defaults, **family.config}
    if family.backbone:
        inner = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
        given |= {"backbone_config": inner, "use_timm_backbone": False, "backbone": None}
    config = getattr(transformers, family.config_class or f"{family.family}Config")(**given)
    if any(hasattr(config, f"{kind}_experts") for kind in ("num_local", "num", "n_routed")):
        config._experts_implementation = "batched_mm"  # the grouped kernel is not exported
    module = getattr(transformers, family.model_class or f"{family.family}Model")
    made = module._from_config(config, attn_implementation=attention)
    torch.manual_seed(zlib.crc32(family.family.encode()))
    with torch.no_grad():
        for name, parameter in sorted(made.named_parameters()):
            parameter.copy_(_drawn(name, parameter))
    for part in made.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    return made.eval()


def _drawn(name: str, parameter: Any) -> Any:
    import torch

    noise, last = torch.randn(parameter.shape), name.rpartition(".")[2]
    if ("embed" in name and "norm" not in name.lower()) or any(word in last for word in ("token", "table", "rel")):
        return 0.5 * noise
    if last == "sinks" or "bias" in last:
        return noise if last == "sinks" else 0.1 * noise
    if "lambda1" in last or "gamma" in last or "layer_scale" in name:
        return 0.5 + 0.5 * torch.rand(parameter.shape)
    if "expert" in name and parameter.dim() == 3:
        return noise / math.sqrt(min(parameter.shape[1:]))
    if parameter.dim() >= 2 and parameter[0].numel() > 1:
        return noise / math.sqrt(parameter[0].numel())
    return 1 + 0.1 * noise


def sample(family: Family, seed: int, batch: int | None) -> dict[str, np.ndarray]:
    """One set of inputs; every other mask hides the end of its second row."""
    rng, made = np.random.default_rng(seed), {}
    for name, sizes in family.inputs.items():
        shape = [batch or sizes[0], *sizes[1:]]
        if name.endswith("ids"):
            made[name] = rng.integers(3, 89, shape)
        elif name.endswith("mask"):
            made[name] = np.ones(shape, np.int64)
            made[name][1:2, shape[1] - 2 * (seed % 2) :] = 0
        elif name == "input_points":
            made[name] = rng.uniform(4, 60, shape).astype(np.float32)
        else:
            made[name] = rng.standard_normal(shape).astype(np.float32)
    return made


@contextmanager
def recording() -> Iterator[list[tuple[np.ndarray, ...]]]:
    """(Q, K, V) of every attention that runs in the block; the list is filled when the block ends."""
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    products = {torch.matmul, torch.bmm, torch.baddbmm, torch.einsum, torch.functional.einsum}
    products |= {tensor.matmul, tensor.__matmul__, tensor.bmm, tensor.baddbmm}
    events: list[tuple[Any, ...]] = []

    class Record(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            result = func(*args, **kwargs)
            flat = [item for item in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(item, tensor)]
            if func is torch.nn.functional.scaled_dot_product_attention:
                named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
                events.append(("attention", named["query"], named["key"], named["value"]))
            elif func in products:
                events.append(("product", *flat[-2:], result))
            elif func in (torch.nn.functional.softmax, torch.softmax, tensor.softmax):
                events.append(("softmax", flat[0], result))
            return result

    found: list[tuple[np.ndarray, ...]] = []
    with Record(), torch.no_grad():
        yield found
    for at, event in enumerate(events):
        operands = event[1:] if event[0] == "attention" else _around(events, at) if event[0] == "softmax" else ()
        if operands:
            found.append(tuple(item.detach().numpy() for item in operands))


def _around(events: list[tuple[Any, ...]], at: int) -> tuple[Any, ...]:
    """Q, K and V of the products in front of a softmax and behind it; () where it is no attention's."""
    scores, probabilities = events[at][1:]
    before = [one for one in events[:at] if one[0] == "product" and one[3].numel() == scores.numel()]
    after = [
        one for one in events[at + 1 :]
        if one[0] == "product" and one[1].numel() == probabilities.numel() and one[1].shape[-1:] == scores.shape[-1:]
    ]  # fmt: skip
    return (before[-1][1], before[-1][2], after[0][2]) if before and after else ()


def caller(family: Family, module: Any, layers: int) -> Any:
    """A module that takes the inputs, and flat caches of so many layers; gives the first tensor, and the present ones."""
    import torch
    from transformers.cache_utils import DynamicCache

    names = list(family.inputs)
    caches = [f"past_{kind}_{layer}" for layer in range(layers) for kind in ("key", "value")]

    class Caller(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def answer(self, given: dict[str, Any], flat: list[Any]) -> Any:
            if flat:
                cache = DynamicCache()
                for layer in range(layers):
                    cache.update(flat[2 * layer], flat[2 * layer + 1], layer)
                result = self.inner(**given, past_key_values=cache, use_cache=True, return_dict=True)
                return (result[0], *(item for layer in cache.layers for item in (layer.keys, layer.values)))
            result = self.inner(**given, return_dict=True)
            keys = (family.output, "logits", "last_hidden_state", "pred_masks", "logits_per_image")
            return next((result[key] for key in keys if key in result and result[key] is not None), result[0])

    # torch.export names the inputs by the parameters of forward.
    given = ", ".join(f"{name}={name}" for name in names)
    body = f"    return self.answer(dict({given}), [{', '.join(caches)}])"
    lines = [f"def forward(self, {', '.join(names + caches)}):", body]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    Caller.forward = space["forward"]
    return Caller().eval()


def export(family: Family, variant: Variant, folder: Path) -> None:
    """FAMILY-VARIANT.onnx; beside it, .npz: inputs, expected outputs, recorded operands, outputs with weights 40 dB off."""
    import torch

    module = built(family, variant.attention)
    samples = [sample(family, seed, None if variant.dynamic else 1) for seed in range(SAMPLES)]
    layers = _with_caches(module, samples) if variant.past else 0
    wrapped = caller(family, module, layers)
    path = folder / f"{family.family}-{variant.name}.onnx"
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _write(wrapped, {name: torch.from_numpy(value) for name, value in samples[0].items()}, variant, path)
    kept: dict[str, Any] = {}
    with recording() as found:
        _answers(wrapped, samples[1])
    kept["recorded"] = len(found)
    for index, one in enumerate(found):
        kept |= {f"{role}{index}": item for role, item in zip("qkv", one, strict=True)}
    for index, inputs in enumerate(samples):
        kept |= {f"in{index}:{name}": value for name, value in inputs.items()}
        kept |= {f"out{index}:{at}": item for at, item in enumerate(_answers(wrapped, inputs))}
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() >= 2:
                parameter.add_(0.01 * parameter.std() * torch.randn(parameter.shape))
    kept |= {f"noisy{index}": _answers(wrapped, samples[index])[0] for index in (3, 4)}
    np.savez(path.with_suffix(".npz"), **kept)


def _answers(module: Any, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    import torch

    with torch.no_grad():
        result = module(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    return [item.numpy() for item in (result if isinstance(result, tuple) else (result,))]


def _with_caches(module: Any, samples: list[dict[str, np.ndarray]]) -> int:
    """Give every sample the keys and values of PAST tokens before it; how many layers have some."""
    import torch

    layers = 0
    for seed, one in enumerate(samples):
        rows = len(one["input_ids"])
        before = torch.from_numpy(np.random.default_rng(seed + 50).integers(3, 89, (rows, PAST)))
        with torch.no_grad():
            made = module(input_ids=before, use_cache=True).past_key_values.layers
        one["attention_mask"] = np.concatenate([np.ones((rows, PAST), np.int64), one["attention_mask"]], axis=1)
        for layer, item in enumerate(made):
            one[f"past_key_{layer}"], one[f"past_value_{layer}"] = item.keys.numpy(), item.values.numpy()
        layers = len(made)
    return layers


def _write(module: Any, example: dict[str, Any], variant: Variant, path: Path) -> None:
    import torch

    names, axes = list(example), {}
    for name in names if variant.dynamic else ():
        axes[name] = {0: torch.export.Dim.DYNAMIC}
        if name.endswith(("ids", "mask")):
            axes[name][1] = torch.export.Dim.DYNAMIC
        if name.startswith("past_key_") or name.startswith("past_value_"):
            axes[name][2] = torch.export.Dim.DYNAMIC
    if variant.torchscript:
        options = {"dynamo": False, "opset_version": variant.opset, "input_names": names}
        torch.onnx.export(module, tuple(example.values()), str(path), **options)
    else:
        torch.onnx.export(
            module, (), kwargs=example, dynamo=True, opset_version=variant.opset, dynamic_shapes=axes or None,
            input_names=names, verbose=False,
        ).save(str(path))  # fmt: skip
