"""The speed gate on real models: which groups of parts win in int8 on this machine, and which stay float.

    python -m benchmarks.gated [--models minilm-static dinov2-b1] [--samples 32] [--out docs]

writes OUT/gate.md and OUT/gate.json; rows of models that are not asked for are kept.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from attnquant.markup import escaped, row
from attnquant.pace import COLUMNS, LEAST, MARGIN, RULE
from attnquant.quantization import quantize
from attnquant.tuning.gate import SECONDS, WHOLE_SECONDS
from benchmarks.metrics import SignalToNoise
from benchmarks.models import MODELS, RealModel, samples
from benchmarks.runners import open_model

HEAD = f"""# The speed gate

`attnquant quantize ... --gate`, `attnquant.quantize(..., gate=True)`, or in a recipe

    [options]
    gate = true

times float and int8 of the model's parts on this machine, in ONNX Runtime, and leaves float what int8 makes slower.

- **Groups.** Linears, convolutions and embeddings whose quantizers read one tensor (query, key and value; gate and
  up) are one group, the quantizers of an attention another. A group is cut out of the quantized model, from its
  quantizers to its biases, into a small model with the sizes and values that the first calibration sample gives it,
  brought into the target's form as the whole model is, and timed against the same model without quantizers. Groups of
  equal operators and sizes are timed once, all their weights together in one model (up to 128 MB), so that weights
  come out of memory as they do in the whole model.
- **Timing.** Interleaved pairs of float and int8, the order swapped in every second pair, each observation at least 2
  ms, threads of the runtime's default number that do not spin.
- **The rule.** {RULE[:1].upper()}{RULE[1:]}. At least {LEAST} pairs. So what is within {MARGIN - 1:.0%} of float
  stays int8, which is a quarter of the size, and noise seldom decides (the interval is looked at after every five
  pairs).
- **Bounded**: about {SECONDS:g} s for all groups, {WHOLE_SECONDS:g} s for each of at most three races of whole
  models, and one calibration where something stays float. What time does not reach stays int8 and says so.
- **As a whole.** A gated model that is slower than the one with every part in int8, by the same rule, or that misses
  the bound of `max_drop`, is not handed over: the report says "undone". `max_drop` comes first: what it keeps float
  the gate does not see.
- What stays float is in the report, with its reason in the model's setup, and `attnquant check` takes it as asked
  for. The choice is this machine's: run the gate where the model will run. `--no-gate` overrides a recipe. Other
  targets than onnxruntime-cpu, whose runtime may not be here, are refused. Models in half precision are timed in
  float32.

The report's table for real models follows; *int8 / float* is time over time, below 1 int8 is faster. Written by
`python -m benchmarks.gated`; do not edit.
"""


def measured(model: RealModel, count: int) -> dict[str, Any]:
    """The gate's report on one model, and what gating it changes in accuracy (SNR in dB over the held-out samples)."""
    data = samples(model, count)
    result = quantize(model.make(), data, samples=count, gate=True, progress=lambda text: print(text, file=sys.stderr))
    assert result.gate is not None
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"attnquant-gated-{os.getpid()}.onnx"
    try:
        result.save(path)
        reference, quantized = open_model(model.make(), threads=2), open_model(path, threads=2)
        noise = SignalToNoise()
        for feeds in model.test():
            noise.add(reference(feeds), quantized(feeds))
        size = path.stat().st_size / 2**20
    finally:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
    return {
        "samples": count, "shape": model.shape, "cells": result.gate.cells(), "sentence": result.gate.sentence(),
        "gate": result.gate.as_json(), "snr_db": round(noise.value(), 1), "mb": round(size, 1), "load": os.getloadavg()[0],
    }


def page(found: dict[str, Any]) -> str:
    """The markdown of all models."""
    lines = [HEAD]
    for name, one in found.items():
        lines += [f"## {name}", "", f"{one['shape']}, {one['samples']} calibration samples. {one['sentence']}", ""]
        lines += [row(list(COLUMNS)), row(["---"] * len(COLUMNS))]
        lines += [row([escaped(item) for item in cells]) for cells in one["cells"]]
        took, seconds = f"{one['snr_db']} dB on held-out data, {one['mb']} MB", one["gate"]["seconds"]
        lines += ["", f"{took}; the gate took {seconds:.0f} s in all (load average {one['load']:.1f}).", ""]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure the models that are asked for and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gated")
    parser.add_argument("--models", nargs="*", default=["minilm-static", "dinov2-b1"], choices=sorted(MODELS))
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args(arguments)
    file = options.out / "gate.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    for name in options.models:
        found[name] = measured(MODELS[name], options.samples)
        file.write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "gate.md").write_text(page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
