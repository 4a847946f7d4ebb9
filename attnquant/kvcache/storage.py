"""How a quantized cache lies in memory, and the metadata that tells a generation runtime so."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnquant.errors import ModelError

CACHE_KEY = "attnquant.kv_cache"
"""Key of the description of the caches (JSON) in a model's metadata_props."""
LAYOUT = "batch, kv_heads, positions, width"
PACKING = "two values a byte along the width, the even one in the low bits, each plus 8"

Change = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
Bits = Literal[8, 4]
ZERO = 8  # what is added to an int4 value


def limit(bits: int) -> int:
    """Largest value stored; the smallest is -limit - 1."""
    return (1 << (bits - 1)) - 1


def quantized(values: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """What the operator stores of float keys or values (batch, kv heads, positions, head size).

    :param scale: broadcastable to `values`.
    :return: int8 of the same shape, or uint8 with half the width for 4 bits.
    """
    top = limit(bits)
    whole = np.asarray(np.clip(np.rint(values / scale), -top - 1, top).astype(np.int8))
    if bits == 8:
        return whole
    raised = (whole + ZERO).astype(np.uint8)
    return np.asarray(raised[..., 0::2] | (raised[..., 1::2] << 4))


def floats(stored: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """float32 keys or values behind what is stored: the way back from `quantized`."""
    whole = stored.astype(np.float32)
    if bits == 4:
        pairs = np.stack([stored & 15, stored >> 4], axis=-1).astype(np.float32) - ZERO
        whole = pairs.reshape(*stored.shape[:-1], 2 * stored.shape[-1])
    return np.asarray(whole * scale.astype(np.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayer:
    """One attention's cache. A layer left float has bits None and no scales."""

    node: str
    past_key: str
    past_value: str
    present_key: str
    present_value: str
    bits: Bits | None
    dtype: str
    """Of the stored arrays, as numpy names it."""
    shape: tuple[str | int, ...]
    """(batch, kv heads, positions, width); names for what varies. The width is half the head size for 4 bits."""
    head_size: int
    k_scale: tuple[float, ...] = ()
    v_scale: tuple[float, ...] = ()
    """One, or kv heads * head size of them in that order."""
    reason: str = ""
    """Why the layer is float."""

    def scale(self, name: str) -> np.ndarray:
        """Scales of the cache of that name, of a shape that broadcasts to (batch, kv heads, positions, head size)."""
        flat = np.asarray(self.k_scale if name in (self.past_key, self.present_key) else self.v_scale, np.float32)
        return flat if flat.size == 1 else flat.reshape(1, -1, 1, self.head_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """All caches of a model. What the model's metadata_props holds under CACHE_KEY."""

    layers: tuple[KvLayer, ...]
    granularity: str

    def to_text(self) -> str:
        """JSON: {"version", "layout", "packing", "granularity", "layers": [...]}."""
        content = {"version": 1, "layout": LAYOUT, "packing": PACKING, **asdict(self)}
        return json.dumps(content, separators=(",", ":"))

    def store(self, sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The sample with float caches as the model takes them; integer ones are left alone."""
        return self._each(sample, lambda layer, name, array: (
            quantized(array, layer.scale(name), layer.bits) if layer.bits and array.dtype.kind == "f" else array
        ))  # fmt: skip

    def restore(self, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs with the integer caches as float32."""
        return self._each(outputs, lambda layer, name, array: (
            floats(array, layer.scale(name), layer.bits) if layer.bits and array.dtype.kind in "iu" else array
        ))  # fmt: skip

    def bytes_per_token(self) -> float:
        """Bytes that one more position takes in all layers, at batch 1."""
        return sum(2.0 * int(layer.shape[1]) * int(layer.shape[3]) * np.dtype(layer.dtype).itemsize for layer in self.layers)

    def sentence(self) -> str:
        """What became of the caches, for a report."""
        stored = [layer for layer in self.layers if layer.bits]
        kept = [f"{layer.node!r} {layer.reason}" for layer in self.layers if not layer.bits]
        kinds = " and ".join(sorted({f"int{layer.bits}" for layer in stored})) or "nothing"
        text = f"Caches of {len(stored)} of {len(self.layers)} attentions are {kinds}, one scale for each {self.granularity}"
        return f"{text}; {self.bytes_per_token():.0f} bytes a token{'; '.join(('', *kept))}."

    def _each(self, arrays: Mapping[str, np.ndarray], change: Any) -> dict[str, np.ndarray]:
        names = {
            name: layer
            for layer in self.layers
            for name in (layer.past_key, layer.past_value, layer.present_key, layer.present_value)
        }
        return {name: change(names[name], name, array) if name in names else array for name, array in arrays.items()}


def stored_cache(metadata: Mapping[str, str]) -> KvCache | None:
    """The caches that a model's metadata describe; None where it says nothing.

    :raises ModelError: the metadata are not what attnquant writes.
    """
    text = metadata.get(CACHE_KEY)
    if text is None:
        return None
    try:
        content = json.loads(text)
        if content["version"] != 1:
            raise ValueError(f"version {content['version']!r}")
        layers = [{name: _frozen(value) for name, value in row.items()} for row in content["layers"]]
        return KvCache(layers=tuple(KvLayer(**row) for row in layers), granularity=content["granularity"])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        msg = f"Metadata {CACHE_KEY!r}: expected what attnquant writes (version 1), got {type(error).__name__}: {error}. "
        raise ModelError(msg + "Quantize the float model again.") from error


def forms(model: ir.Model) -> tuple[Change, Change]:
    """(from float caches of a sample to those that the model takes, from its outputs back to float); both leave what is
    as it should be, and a model without quantized caches has nothing to change."""
    cache = stored_cache(model.metadata_props)
    return (dict, dict) if cache is None else (cache.store, cache.restore)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
