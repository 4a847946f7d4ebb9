"""Every model of a folder fused to an operator and then quantized: placement audited, accuracy against the float original.

    python -m benchmarks.fused_int8 FILE_OR_FOLDER...

Prints one line for each model and operator; exits 1 where an attention is not fused, a port is not as the default recipe
asks for, or an output falls below 25 dB. The folder is laid out as for benchmarks.fusing; calibration and test are one
sample.
"""

import sys
from pathlib import Path

import numpy as np

from attnquant import check, quantize, runtime
from attnquant.errors import AttnQuantError
from attnquant.model import load
from attnquant.rewrite import fuse
from benchmarks.fusing import Feeds, models, original

OPERATORS = ("com.microsoft::MultiHeadAttention", "ai.onnx::Attention@23")
LEAST = 25.0  # dB


def snr(expected: list[Feeds], got: list[Feeds]) -> float:
    """10 log10(sum x^2 / sum (x - y)^2) in dB of the worst float output."""
    worst = np.inf
    for name, first in expected[0].items():
        if first.dtype.kind == "f":
            x, y = (np.concatenate([one[name].ravel().astype(np.float64) for one in side]) for side in (expected, got))
            error = float(((x - y) ** 2).sum())
            worst = min(worst, 10 * np.log10(float((x**2).sum()) / error) if error else np.inf)
    return float(worst)


def fused_int8(path: Path, operator: str) -> tuple[str, bool]:
    """(what is to be said, all is well)."""
    model = load(path)
    rows, expected = original(path)
    if expected is None:
        return "not run by the runtime", True
    fused = fuse(model, to=operator, feeds=rows[0])
    refused = [reason for row in fused.rows if row.status == "refused" for reason in row.reasons]
    if refused or not fused.rows:
        return f"not fused: {refused[0] if refused else 'no attention'}", not fused.rows
    made = quantize(fused.model, rows)
    report = check(made.model, setup=made.setup)
    quality = snr(expected, [runtime.run(made.model, row, threads=1) for row in rows])
    quantized = sum(row.status == "quantized" for row in report.rows)
    return f"{quantized} of {len(fused.rows)} quantized, {quality:.1f} dB", report.ok and quality >= LEAST


def main(arguments: list[str]) -> int:
    """Print the lines."""
    if not arguments:
        print("benchmarks.fused_int8: expected one folder or file at least", file=sys.stderr)
        return 1
    wrong = 0
    for path in models(arguments):
        for operator in OPERATORS:
            try:
                said, well = fused_int8(path, operator)
            except AttnQuantError as problem:
                said, well = f"{type(problem).__name__}: {problem}", False
            wrong += not well
            print(f"{'ok' if well else 'WRONG'} {path.name} {operator}: {said}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
