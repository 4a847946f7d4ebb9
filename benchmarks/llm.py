"""SmolLM2 in int8: file, perplexity and prefill beside float, one table; quantized here from Brown text.

    python -m benchmarks.llm [--recipes int8 llm-w8a8] [--windows 20] [--pairs 10] [--page FILE.md]

Perplexity is of 512-token windows of the test documents, calibration of 256-token windows of the others. Prefill is 256
tokens with an empty cache, a step one token behind them; each model is timed by turns with float.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import attnquant
from benchmarks import decoding, kernels, perplexity, runners, texts
from benchmarks.export import exported, smollm2_tokenizer
from benchmarks.metrics import Feeds
from benchmarks.run import machine

MODEL = "smollm2-cache-opset23"
PREFILL, THREADS = 256, 2
HEADER = ("model", "file MB", "of float", "perplexity", "of float", "prefill ms", "faster than float by",
          "by processor time", "step faster by", "quantized in s")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model, measured."""

    name: str
    size: int
    """Bytes, external data included."""
    perplexity: float
    tokens: int
    prefill: runners.Timing
    step: runners.Timing
    seconds: float


def calibration(count: int) -> list[Feeds]:
    """Prompts of PREFILL tokens with an empty cache."""
    encode = texts.encoder(smollm2_tokenizer())
    return [decoding.start(np.array([ids])) for ids in texts.windows("calibration", encode, PREFILL, count)]


def size_of(path: Path) -> int:
    """Bytes of a model file and what lies beside it under its name."""
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def measured(name: str, path: Path, reference: Path, seconds: float, windows: int, pairs: int) -> Row:
    """Perplexity of a file, then its time by turns with the reference."""
    score, tokens = perplexity.of_file(path, perplexity.held_out(windows), threads=THREADS)
    plain, model = (runners.open_onnxruntime(item, threads=THREADS) for item in (reference, path))
    prompt = decoding.start(perplexity.held_out(1, PREFILL)[0])
    step = decoding.following(plain(prompt), 5)
    return Row(
        name=name, size=size_of(path), perplexity=score, tokens=tokens, seconds=seconds,
        prefill=runners.paired(plain, model, prompt, pairs=pairs, warmup=2),
        step=runners.paired(plain, model, step, pairs=2 * pairs),
    )  # fmt: skip


def table(rows: list[Row]) -> Table:
    """The first row is float's."""
    made = Table(*HEADER, box=box.MARKDOWN)
    for row in rows:
        timing, of_step = row.prefill, row.step
        cells = [
            row.name, f"{row.size / 1e6:.0f}", f"{row.size / rows[0].size:.3f}", f"{row.perplexity:.2f}",
            f"{row.perplexity / rows[0].perplexity:.3f}", f"{timing.model_ms:.0f}",
            f"{timing.speedup:.2f}x ({timing.speedup_low:.2f} to {timing.speedup_high:.2f})", f"{timing.work:.2f}x",
            f"{of_step.speedup:.2f}x", f"{row.seconds:.0f}",
        ]  # fmt: skip
        made.add_row(*cells)
    return made


def quantized(recipe: str, source: Path, folder: Path, samples: int) -> tuple[Path, float]:
    """(file, seconds that it took)."""
    start = time.perf_counter()
    result = attnquant.quantize(source, calibration(samples), recipe=recipe)
    path = folder / f"{Path(recipe).stem}.onnx"
    result.save(path)
    for note in result.notes:
        print(f"{recipe}: {note}", file=sys.stderr)
    return path, time.perf_counter() - start


def main(arguments: list[str]) -> int:
    """Print the table, and write it to a page if one is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llm")
    parser.add_argument("--recipes", nargs="+", default=["int8", "llm-w8a8"])
    parser.add_argument("--windows", type=int, default=perplexity.WINDOWS)
    parser.add_argument("--samples", type=int, default=8, help="calibration prompts")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args(arguments)
    source = exported(MODEL)
    with tempfile.TemporaryDirectory() as name:
        made = [quantized(recipe, source, Path(name), given.samples) for recipe in given.recipes]
        files = [("float", source, 0.0), *((path.stem, path, took) for path, took in made)]
        rows = [measured(*file[:2], source, file[2], given.windows, given.pairs) for file in files]
    where = machine()
    console = Console(width=200, record=True)
    console.print(table(rows))
    flags = ", ".join(where["flags"]) or "no vector flags"
    console.print(
        f"{rows[0].tokens} scored tokens, {given.samples} calibration prompts, {given.pairs} pairs, {THREADS} threads; "
        f"{where['cpu']} ({flags}); int8 products {kernels.machine_ratio():.2f}x as fast as float ones on one thread.",
        soft_wrap=True,
    )
    if given.page is not None:
        text = "\n".join(line.rstrip() for line in console.export_text().splitlines())
        given.page.write_text(f"{text.strip()}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
