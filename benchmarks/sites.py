"""Attentions found in the real models, against what their configurations say.

    python -m benchmarks.sites [MODEL...]

recognises each model without data, compares number, kind, heads, head size and scale with the table below, and ends with
exit code 1 where one differs. The exports are made once (benchmarks/README.md).
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from rich import box
from rich.console import Console
from rich.table import Table

from attnquant import recognize
from attnquant.site import AttentionSite
from benchmarks.export import exported
from benchmarks.models import MODELS


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the model's own configuration says of its attentions; `size` is the channels of one head.

    An ALBERT counts one for every use of its shared layer; the file that answers with the probabilities of the 11th ends
    there, so that 10 are whole.
    """

    make: Callable[[], Path]
    own: int
    cross: int = 0
    heads: int
    size: int
    scale: float


def _benchmark(name: str, own: int, heads: int, size: int) -> Known:
    return Known(make=MODELS[name].make, own=own, heads=heads, size=size, scale=size**-0.5)


KNOWN: dict[str, Known] = {
    "dinov2": _benchmark("dinov2", 12, 6, 64),
    "dinov2-b1": _benchmark("dinov2-b1", 12, 6, 64),
    "minilm": _benchmark("minilm", 6, 12, 32),
    "minilm-static": _benchmark("minilm-static", 6, 12, 32),
    "minilm-opset18": _benchmark("minilm-opset18", 6, 12, 32),
    "smollm2": _benchmark("smollm2", 30, 9, 64),
    "smollm2-opset23": _benchmark("smollm2-opset23", 30, 9, 64),
    "ppocr": _benchmark("ppocr", 2, 8, 15),
    "rxnmapper": _benchmark("rxnmapper", 10, 8, 32),
    "rxnmapper-whole": Known(
        make=lambda: exported("rxnmapper-whole-opset18-dynamic"), own=12, heads=8, size=32, scale=32**-0.5
    ),
    "whisper": _benchmark("whisper", 4, 6, 64),
    "whisper-decoder": Known(
        make=lambda: exported("whisper-decoder-opset18"), own=4, cross=4, heads=6, size=64, scale=0.125
    ),
}


def differences(sites: tuple[AttentionSite, ...], known: Known) -> list[str]:
    """What differs, in words; empty where all agrees. Scale within 1e-4."""
    kinds = Counter(site.kind for site in sites)
    found = [
        f"{kinds[kind]} {kind}, expected {expected}"
        for kind, expected in (("self", known.own), ("cross", known.cross))
        if kinds[kind] != expected
    ]
    for site in sites:
        got = (site.q_heads, site.qk_head_dim, site.v_head_dim)
        if got != (known.heads, known.size, known.size):
            found.append(f"{site.id}: heads and head sizes {got}, expected {known.heads} of {known.size}")
        if site.scale is None or abs(site.scale - known.scale) > 1e-4:
            found.append(f"{site.id}: scale {site.scale}, expected {known.scale}")
    return found


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a model differs from it."""
    unknown = [name for name in arguments if name not in KNOWN]
    if unknown:
        print(f"benchmarks.sites: no model {unknown[0]!r}; known: {', '.join(KNOWN)}", file=sys.stderr)
        return 1
    table = Table("model", "nodes", "attentions", "form", "heads", "seconds", "differs", box=box.MARKDOWN)
    wrong = 0
    for name in arguments or KNOWN:
        known = KNOWN[name]
        model = ir.load(known.make())
        start = time.perf_counter()
        sites = recognize(model).sites
        seconds = time.perf_counter() - start
        problems = differences(sites, known)
        wrong += bool(problems)
        kinds = Counter(site.kind or "?" for site in sites)
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        forms = ", ".join(sorted({site.form for site in sites}))
        row = (name, f"{len(model.graph)}", shown, forms, f"{known.heads} x {known.size}", f"{seconds:.2f}")
        table.add_row(*row, "; ".join(problems) or "no")
    Console(width=200).print(table)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
