"""SmolLM2 with its KV cache in int8 and int4: perplexity, bytes, steps against prefill, and speed at 2,048 tokens.

    python -m benchmarks.kv_cache [--page docs/kv-cache.md] [--windows 20] [--pairs 20]

writes the tables of docs/kv-cache.md. Float is the same model, fused to GroupQueryAttention with a float cache; speed is
also held against the export as torch made it. Exits 1 where a bound is missed. Needs about 4 GB of memory and 10 minutes.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from attnquant import model as models
from attnquant.kvcache import stored_cache
from attnquant.quantization import quantize
from attnquant.rewrite import fuse
from attnquant.verification.decoding import decode
from benchmarks import kv_cache_page, perplexity, runners, texts
from benchmarks.decoding import OPERATOR, following, start
from benchmarks.export import exported, smollm2_tokenizer
from benchmarks.kv_cache_page import Row
from benchmarks.metrics import Feeds
from benchmarks.profiles import profile

CONTEXT, CHUNK, THREADS = 2048, 512, 2
PROMPTS, PROMPT, STEPS = 6, 256, 6
"""Calibration: documents, tokens of each prompt, decode steps behind each."""
CHECKED, CHECKED_STEPS = 250, 16
"""Tokens and steps of the comparison of steps with prefill; the tokens are no other size of the model."""
PROFILED = 15
"""Runs of a step that are profiled."""

MAIN = {"int8 per channel": "llm-kv8", "int4 per channel": "llm-kv4"}
OTHERS = {
    "int8 per tensor": 'extends = "llm-kv8"\n[kv_cache]\ngranularity = "tensor"',
    "int4 per tensor": 'extends = "llm-kv4"\n[kv_cache]\ngranularity = "tensor"',
    "int4 per channel, clip = mse": 'extends = "llm-kv4"\n[kv_cache]\nclip = "mse"',
    "int4 per channel, first and last layer float":
        'extends = "llm-kv4"\n[kv_cache]\nkeep_float = ["attention(_29)?/context"]',
}
MIXED = {"int4 per channel, clip = mse for K alone": "k", "int4 per channel, clip = mse for V alone": "v"}


def calibration(path: Path, encode: texts.Encode) -> Iterable[Feeds]:
    """Prompts of calibration documents, and the steps behind each of them on the float model's rolled cache, text fed on."""
    run = runners.open_onnxruntime(path, threads=THREADS)
    for ids in texts.windows("calibration", encode, PROMPT + STEPS, PROMPTS):
        feeds = start(np.array([ids[:PROMPT]]))
        yield feeds
        for token in ids[PROMPT:]:
            feeds = following(run(feeds), token)
            yield feeds


def made(folder: Path, name: str, recipe: str, fused: Path, data: list[Feeds]) -> Row:
    """A quantized model on disk."""
    result = quantize(fused, data, recipe=recipe)
    result.save(path := folder / f"{name}.onnx")
    return Row(name=name, path=path, cache=stored_cache(result.model.metadata_props))


def mixed(folder: Path, name: str, role: str, base: Row, other: Row) -> Row:
    """The base with the other's scales of K or of V. Its metadata stay the base's: for perplexity from empty caches."""
    model, source = models.load(base.path), models.load(other.path)
    taken = [key for key in model.graph.initializers if key.endswith(f"/{role}_scale")]
    for key in taken:
        model.graph.initializers[key].const_value = source.graph.initializers[key].const_value
    models.save(model, path := folder / f"{name}.onnx")
    return Row(name=name, path=path, cache=base.cache)


def scored(row: Row, windows: Iterable[np.ndarray]) -> float:
    """Perplexity, every window from an empty cache; attention reads what was stored in it."""
    run = runners.open_onnxruntime(row.path, threads=THREADS)
    found, _ = perplexity.perplexity(lambda tokens: run(row.stored(start(tokens)))[0], windows)
    return found


def filled(path: Path, ids: list[int]) -> Feeds:
    """One step behind CONTEXT of these tokens, caches in float; they begin again where they are too few."""
    text = np.resize(ids, CONTEXT + 1)
    run, feeds = runners.open_onnxruntime(path, threads=THREADS), start(text[None, :CHUNK])
    for begin in range(CHUNK, CONTEXT + 1, CHUNK):
        feeds = following(run(feeds), int(text[begin]))
        if begin < CONTEXT:
            seen = np.ones((1, begin + CHUNK), np.int64)
            feeds = {**feeds, "input_ids": text[None, begin : begin + CHUNK], "attention_mask": seen}
    return feeds


def timed(reference: Row, row: Row, feeds: Feeds, pairs: int) -> runners.Timing:
    """One step of both models by turns, caches of each bound where they lie."""
    bound = [runners.open_bound(one.path, one.stored(feeds), threads=THREADS) for one in (reference, row)]
    return runners.paired(bound[0], bound[1], {}, pairs=pairs)


def built(folder: Path) -> tuple[list[Row], list[Row]]:
    """(plain export, fused, int8, int4; the other ways to choose scales)."""
    plain = Row(name="float as exported", path=exported("smollm2-cache-opset23"))
    fused = Row(name="float", path=folder / "fused.onnx")
    fuse(models.load(plain.path), to=OPERATOR).save(fused.path)
    data = list(calibration(fused.path, texts.encoder(smollm2_tokenizer())))
    main = [made(folder, name, recipe, fused.path, data) for name, recipe in MAIN.items()]
    others = [made(folder, name, recipe, fused.path, data) for name, recipe in OTHERS.items()]
    least = next(row for row in others if row.name.endswith("mse"))
    others += [mixed(folder, name, role, main[1], least) for name, role in MIXED.items()]
    return [plain, fused, *main], others


def measure(folder: Path, asked: argparse.Namespace) -> tuple[list[Row], list[Row]]:
    """All rows with their figures."""
    rows, others = built(folder)
    _, fused, *quantized = rows
    windows = perplexity.held_out(asked.windows)
    for row in (*rows[1:], *others):
        row.perplexity = scored(row, windows)
        _say(f"{row.name}: perplexity {row.perplexity:.3f}")
    prompts = [start(window[:, :CHECKED]) for window in windows[:2]]
    for row in quantized:
        row.decoding = decode(fused.path, row.path, prompts, steps=CHECKED_STEPS)
        _say(f"{row.name}: steps against prefill {row.worst_step():.1f} dB")
    fused.decoding = quantized[0].decoding
    feeds = filled(fused.path, [int(token) for window in windows for token in window[0]])
    for row in rows[1:]:
        for reference in rows[: rows.index(row)][:2]:
            row.timings[reference.name] = timed(reference, row, feeds, asked.pairs)
            _say(f"{row.name} against {reference.name}: {row.timings[reference.name]}")
    for row in rows:
        row.profile = profile(row.path, row.stored(feeds), threads=1, runs=PROFILED)
    return rows, others


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Measure, write, and say what is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_cache", description=__doc__.partition("\n")[0])
    parser.add_argument("--page", type=Path, default=Path("docs/kv-cache.md"))
    parser.add_argument("--windows", type=int, default=perplexity.WINDOWS)
    parser.add_argument("--pairs", type=int, default=20)
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows, others = measure(Path(folder), asked)
    missed = kv_cache_page.faults(rows)
    tokens = asked.windows * (perplexity.LENGTH - 1)
    text = kv_cache_page.text(rows, others, windows=asked.windows, tokens=tokens, context=CONTEXT, threads=THREADS)
    kv_cache_page.write(asked.page, text)
    print(text)
    print("\n".join(("missed:", *missed)) if missed else "all bounds are met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
