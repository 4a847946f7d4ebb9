"""SmolLM2 with a cache, as torch exports it at opset 23, against the same fused to GroupQueryAttention.

    python -m benchmarks.decoding [OPERATOR]

compares a prompt and 32 greedy steps behind it, then times one step at 1,024 tokens of context by IoBinding, both models
by turns: with caches of their own, and, for GroupQueryAttention, with past and present in one buffer
(`fuse(shared_cache=True)`).
Exits 1 where an output differs by more than 1e-3 of its largest value.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from attnquant.model import load
from attnquant.rewrite import fuse
from benchmarks import runners
from benchmarks.export import SMOLLM2_LAYERS, exported
from benchmarks.metrics import Feeds

OPERATOR = "com.microsoft::GroupQueryAttention"
HEADS, SIZE = 3, 64
PROMPT, STEPS, CONTEXT = 64, 32, 1024
THREADS, PAIRS = 2, 40
LARGEST = 1e-3  # of an output's largest value

CACHES = [f"{role}_{layer}" for layer in range(SMOLLM2_LAYERS) for role in ("key", "value")]


def start(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs for a prompt: tokens (1, S) and an empty cache."""
    empty = np.zeros((1, HEADS, 0, SIZE), np.float32)
    return {"input_ids": tokens, "attention_mask": np.ones_like(tokens), **{f"past_{name}": empty for name in CACHES}}


def following(outputs: list[np.ndarray], token: int) -> dict[str, np.ndarray]:
    """Inputs for the step behind these outputs."""
    _, *present = outputs
    width = present[0].shape[2] + 1
    caches = {f"past_{name}": item for name, item in zip(CACHES, present, strict=True)}
    return {"input_ids": np.array([[token]]), "attention_mask": np.ones((1, width), np.int64), **caches}


def difference(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    """Largest difference of an output as a part of its largest value."""
    return max(float(np.abs(x - y).max() / np.abs(x).max()) for x, y in zip(expected, got, strict=True))


def greedy(plain: runners.Run, fused: runners.Run, prompt: np.ndarray, steps: int) -> tuple[float, float, int]:
    """(difference at the prompt, largest difference of the steps, steps with the same token); each on its own cache."""
    expected, got = plain(start(prompt)), fused(start(prompt))
    first, worst, same = difference(expected, got), 0.0, 0
    for _ in range(steps):
        token = int(expected[0][0, -1].argmax())
        same += token == int(got[0][0, -1].argmax())
        expected, got = plain(following(expected, token)), fused(following(got, token))
        worst = max(worst, difference(expected, got))
    return first, worst, same


def at_context(plain: runners.Run, prompt: np.ndarray) -> Feeds:
    """Inputs of one step behind CONTEXT tokens."""
    return following(plain(start(np.resize(prompt, (1, CONTEXT)))), 5)


def main(arguments: list[str]) -> int:
    """Print what is equal and how fast each is."""
    operator = arguments[0] if arguments else OPERATOR
    path = exported("smollm2-cache-opset23")
    with tempfile.TemporaryDirectory() as folder:
        saved = _fused(path, operator, Path(folder) / "fused.onnx")
        plain, fused = (runners.open_onnxruntime(one, threads=THREADS) for one in (path, saved))
        prompt = np.random.default_rng(3).integers(1000, 30000, (1, PROMPT))
        first, worst, same = greedy(plain, fused, prompt, STEPS)
        print(f"prompt of {PROMPT}: differs by {first:.2g}; {STEPS} steps: by {worst:.2g} at most, {same} tokens the same")
        feeds = at_context(plain, prompt)
        del plain, fused
        apart = [report("apart", path, saved, feeds, feeds, {})]
        if operator == OPERATOR:
            saved = _fused(path, operator, Path(folder) / "shared.onnx", shared_cache=True)
            names = {f"present_{name}": f"past_{name}" for name in CACHES}
            apart.append(report("in one buffer", path, saved, feeds, roomy(feeds), names))
    return 0 if max(first, worst, *apart) <= LARGEST else 1


def _fused(path: Path, operator: str, destination: Path, *, shared_cache: bool = False) -> Path:
    made = fuse(load(path), to=operator, shared_cache=shared_cache)
    kind = operator.rpartition(":")[2].partition("@")[0]
    count = sum(node.op_type == kind for node in made.model.graph)
    print(f"{dict(Counter(row.status for row in made.rows))} to {operator}")
    print(f"{count} nodes {kind} of {len(made.model.graph)}, {len(load(path).graph)} as exported")
    made.save(destination)
    return destination


def roomy(feeds: Feeds) -> dict[str, np.ndarray]:
    """The same with room for one more token in every cache."""
    more = ((0, 0), (0, 0), (0, 1), (0, 0))
    return {name: np.pad(array, more) if name.startswith("past_") else array for name, array in feeds.items()}


def report(word: str, path: Path, saved: Path, feeds: Feeds, own: Feeds, shared: dict[str, str]) -> float:
    """Time and print one step of the model as exported and of the fused one; how far their logits are apart."""
    plain = runners.open_bound(path, feeds, threads=THREADS)
    fused = runners.open_bound(saved, own, threads=THREADS, shared=shared)
    apart = difference(plain({}), fused({}))
    timing = runners.paired(plain, fused, {}, pairs=PAIRS)
    print(
        f"caches {word}, one step at {CONTEXT} tokens, {THREADS} threads, {timing.pairs} pairs: {timing.float_ms:.1f} ms as "
        f"exported, {timing.model_ms:.1f} ms fused: {timing.speedup:.2f}x ({timing.speedup_low:.2f} to "
        f"{timing.speedup_high:.2f}), processor time {timing.work:.2f}x; logits differ by {apart:.2g}"
    )
    return apart


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
