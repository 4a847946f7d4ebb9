"""Greedy generation with a quantized KV cache: allocated as the model's metadata say, bound where it lies (IoBinding).

    python -m examples.generate_quantized_cache kv8.onnx --ids 504 3575 282 4649 314 [--tokens 64]

KV8.onnx comes from `attnquant quantize decoder.onnx -o kv8.onnx --recipe llm-kv8 ...`: its first output is logits
[batch, new, vocabulary]; it takes `input_ids` [batch, new], `attention_mask` [batch, all] and the caches. The metadata tell
all that a runtime needs to know of the caches: attnquant is not imported.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

METADATA = "attnquant.kv_cache"
SHARED = "attnquant.shared_cache"


@dataclass(frozen=True)
class Cache:
    """One cache of one attention, keys or values: names, and what to allocate."""

    past: str
    present: str
    dtype: np.dtype
    heads: int
    width: int

    def allocate(self, batch: int, positions: int) -> onnxruntime.OrtValue:
        """Room for that many positions."""
        shape = (batch, self.heads, positions, self.width)
        return onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, self.dtype.type, "cpu")


def stored_caches(session: onnxruntime.InferenceSession) -> list[Cache]:
    """What the metadata of a quantized model say; layers that were left float are among them."""
    found = session.get_modelmeta().custom_metadata_map
    if METADATA not in found:
        raise SystemExit(f"The model has no metadata {METADATA!r}: quantize it by the recipe llm-kv8 or llm-kv4 first.")
    content = json.loads(found[METADATA])
    return [
        Cache(row[f"past_{role}"], row[f"present_{role}"], np.dtype(row["dtype"]), row["shape"][1], row["shape"][3])
        for row in content["layers"]
        for role in ("key", "value")
    ]


def generate(
    session: onnxruntime.InferenceSession, caches: Sequence[Cache], prompt: np.ndarray, room: int = 0
) -> Iterator[np.ndarray]:
    """The likeliest token (batch,) behind the prompt (batch, length), then behind that one, and so on; without an end.

    A step reads one set of caches and writes another, one position longer, which the next step reads: nothing is copied
    between the runtime and numpy but logits and token ids. With `room`, for models fused by `--shared-cache`, past and
    present are one buffer of so many positions: the runtime appends in place, and the tokens end when it is full.
    """
    logits = session.get_outputs()[0].name
    new, held = np.asarray(prompt, np.int64), 0
    past = {cache.past: cache.allocate(len(new), room) for cache in caches}
    while not room or held + new.shape[1] <= room:
        total = held + new.shape[1]
        present = {cache.present: past[cache.past] if room else cache.allocate(len(new), total) for cache in caches}
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", new)
        binding.bind_cpu_input("attention_mask", np.ones((len(new), total), np.int64))
        for name, value in past.items():
            binding.bind_ortvalue_input(name, value)
        for name, value in present.items():
            binding.bind_ortvalue_output(name, value)
        binding.bind_output(logits)
        session.run_with_iobinding(binding)
        chosen = binding.get_outputs()[-1].numpy()[:, -1].argmax(axis=-1)
        yield chosen
        past = {cache.past: present[cache.present] for cache in caches}
        new, held = chosen[:, None], total


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Print the ids and the size of the cache; returns both."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ids", type=int, nargs="+", required=True, help="token ids of the prompt")
    parser.add_argument("--tokens", type=int, default=64, help="how many to generate")
    asked = parser.parse_args(arguments)
    session = onnxruntime.InferenceSession(asked.model, providers=["CPUExecutionProvider"])
    caches = stored_caches(session)
    room = len(asked.ids) + asked.tokens if SHARED in session.get_modelmeta().custom_metadata_map else 0
    tokens = generate(session, caches, np.array([asked.ids]), room)
    ids = [int(next(tokens)[0]) for _ in range(asked.tokens)]
    size = sum(cache.heads * cache.width * cache.dtype.itemsize for cache in caches)
    print(*ids)
    print(f"{size} bytes of cache a token")
    return {"ids": ids, "bytes": size}


if __name__ == "__main__":
    main()
