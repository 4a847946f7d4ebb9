"""Families of timm, small and random, through attnquant.quantize: fused attention on and off, batch of any size and fixed.

    python -m benchmarks.timm_table [FAMILY ...]

needs `pip install "attnquant[cpu,torch]"`. Each family has a process of its own, two at a
time; --json FILE keeps the figures. Writes docs/timm.md.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.timm_small import Family, built, families, pictures, variation

DOCS = Path(__file__).resolve().parents[1] / "docs" / "timm.md"
CALIBRATION, HELD_OUT = 8, 12
SETTINGS = [(fused, batch) for fused in (True, False) for batch in ("any", "1")]
COLUMNS = (
    "family", "fused", "batch", "counted", "found", "forms", "placed right", "loads, runs", "SNR dB", "int8 linears",
    "float behind DQ", "varies", "noise",
)  # fmt: skip

HEADER = """# timm

Attentions in small random models of timm's families, counted by hand in timm's source
([benchmarks/timm_counts.toml](../benchmarks/timm_counts.toml)) before anything looked for them.
Each model is exported and quantized as `attnquant.quantize(module, pictures)` does.
Written by `python -m benchmarks.timm_table`; do not edit.

- *fused*: `timm.layers.set_fused_attn` on (its experimental uses too) or off; *batch*: of any size, or 1.
- *found*: sites that `recognize` finds in the exported float model; *forms* in parentheses what sets some of them apart (the
  names of `AttentionSite.traits`: cross-covariance, talking heads, pooled, learned query).
- *placed right*: attentions whose Q and K are quantized on every path (a constant query: stored as integers) and whose V and
  probabilities are not, by an audit that shares no code with attnquant (tests/placement_audit.py), and whether
  `attnquant.check` passes.
- *loads, runs*: a session of ONNX Runtime with default options, on {held} held-out pictures. *SNR*: quantized ONNX against
  float torch over them, {calibration} other pictures for calibration.
- *int8 linears*: products with a constant weight that the optimized graph runs in an int8 kernel (MatMulIntegerToFloat,
  QLinearMatMul, QGemm), of all of them; *mix heads*: products between Q K^T and P V, where scores and probabilities stay
  float. *float behind DQ*: float MatMul, Gemm, FusedMatMul or FusedGemm that read a
  DequantizeLinear.
- *varies*: how much the output depends on the picture (deviation over pictures by root mean square); random weights as
  timm draws them give almost 0, so they are drawn again (benchmarks/timm_small.py says how). Random weights say that nothing
  is broken; what a trained model loses is in [benchmarks.md](benchmarks.md).
- *noise*: SNR of the float torch model's output where its pictures get white noise at 40 dB. Where that is low, the random
  model itself enlarges every small error, and so it does those of quantization.

"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Figures of one export."""

    family: str
    fused: bool
    batch: str
    found: int = 0
    forms: dict[str, int] | None = None
    traits: dict[str, int] | None = None
    right: int = 0
    wrong: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    snr_db: float = 0.0
    int8_linears: int = 0
    linears: int = 0
    float_linears: tuple[str, ...] = ()
    behind: int = 0
    mixing: int = 0
    varies: float = 0.0
    noise_db: float = 0.0
    near_misses: tuple[str, ...] = ()
    error: str = ""


def measure(family: Family, *, fused: bool, dynamic: bool) -> Row:
    """Export, quantize and run one model."""
    import numpy as np
    import torch

    import attnquant
    from attnquant import exporting, runtime
    from attnquant.measures import Likeness
    from benchmarks.executed import count, optimized
    from tests.placement_audit import audit, ok_qk

    module = built(family, fused=fused)
    held = pictures(family, HELD_OUT, seed=1)
    shapes: dict[str, Any] | None = None if dynamic else {}
    exported = exporting.export(module, exporting.example(module, torch.from_numpy(held[:1])), dynamic_shapes=shapes)
    (name,) = exported.inputs.names
    recognition = attnquant.recognize(exported.model, feeds={name: held[:1]})
    calibration = [{name: picture[None]} for picture in pictures(family, CALIBRATION, seed=0)]
    result = attnquant.quantize(exported.model, calibration)

    step = 3 if dynamic else 1  # a size that the example did not have
    with torch.no_grad():
        expected = module(torch.from_numpy(held)).numpy()
        noise = np.random.default_rng(0).standard_normal(held.shape).astype(np.float32)
        noisy = module(torch.from_numpy(held + 0.01 * noise)).numpy()  # pictures have deviation 1
    with runtime.session(result.model) as session:
        parts = [session.run(None, {name: held[at : at + step]})[0] for at in range(0, HELD_OUT, step)]
    likeness, answer = Likeness(), Likeness()
    likeness.add(expected, np.concatenate(parts))
    answer.add(expected, noisy)

    from attnquant.saving import to_proto

    proto = to_proto(result.model)
    audited = audit(proto, {"attentions": [truth(site) for site in result.sites]})
    ran = count(optimized_bytes(proto, optimized))
    report = attnquant.check(result.model, feeds={name: held[:1]})
    return Row(
        family=family.family, fused=fused, batch="any" if dynamic else "1", found=len(recognition.sites),
        forms=dict(Counter(site.form for site in recognition.sites)),
        traits=dict(Counter(trait for site in recognition.sites for trait in site.traits)), right=sum(map(ok_qk, audited)),
        wrong=tuple(str(row) for row in audited if not ok_qk(row)), check=report.violations, snr_db=likeness.snr_db or 0.0,
        int8_linears=ran.int8_linears, linears=ran.int8_linears + ran.float_linears, behind=len(ran.float_behind_dequantize),
        float_linears=tuple(f"{row.node}: {row.reason}" for row in result.setup.kept_float), varies=variation(expected),
        mixing=mixing(proto, result.sites), noise_db=answer.snr_db or 0.0,
        near_misses=tuple(f"{miss.reason} ({', '.join(miss.nodes[:2])})" for miss in recognition.near_misses),
    )  # fmt: skip


def truth(site: Any) -> dict[str, Any]:
    """What the audit wants to know of an attention: its nodes, by which it finds Q, K and V itself."""
    from attnquant.roles import PortRole

    if site.form != "decomposed":
        return {"id": site.id, "form": site.form, "node": site.node}
    ports = site.ports
    return {
        "id": site.id, "form": "decomposed", "qk_node": ports[PortRole.QUERY].node, "pv_node": ports[PortRole.VALUE].node,
        "qk_order": ports[PortRole.QUERY].index, "pv_order": 1 - ports[PortRole.VALUE].index,
    }  # fmt: skip


def mixing(proto: Any, sites: Any) -> int:
    """Products with a weight between the two products of an attention: talking heads."""
    inside = {name for site in sites if "talking heads" in site.traits for name in site.nodes}
    constants = {item.name for item in proto.graph.initializer}
    products = [node for node in proto.graph.node if node.op_type in ("MatMul", "Gemm") and node.name in inside]
    return sum(any(name in constants for name in node.input[:2]) for node in products)


def optimized_bytes(proto: Any, optimized: Any) -> Any:
    """The runtime's graph of a model in memory."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(proto.SerializeToString())
        return optimized(path)


def line(family: Family, row: Row) -> str:
    """One line of the table."""
    cells = [family.family, "on" if row.fused else "off", row.batch, str(family.attentions)]
    if row.error:
        return "| " + " | ".join([*cells, "failed", *[""] * (len(COLUMNS) - 5)]) + " |"
    forms = ", ".join(f"{count} {form}" for form, count in (row.forms or {}).items())
    named = ", ".join(f"{count} {trait}" for trait, count in (row.traits or {}).items())
    forms += f" ({named})" if named else ""
    right = f"{row.right} of {row.found}, check {'passes' if not row.check else 'fails'}"
    cells += [str(row.found), forms or "none", right, "yes", f"{row.snr_db:.1f}"]
    mixed = f" ({row.mixing} mix heads)" if row.mixing else ""
    cells += [f"{row.int8_linears} of {row.linears}{mixed}", str(row.behind), f"{row.varies:.2f}", f"{row.noise_db:.1f}"]
    return "| " + " | ".join(cells) + " |"


def page(rows: Iterable[Row]) -> str:
    """docs/timm.md."""
    rows, known = list(rows), {family.family: family for family in families()}
    head = HEADER.format(held=HELD_OUT, calibration=CALIBRATION)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [line(known[row.family], row) for row in rows]
    done = [row for row in rows if not row.error]
    equal = sum(row.found == known[row.family].attentions for row in done)
    lines += ["", f"{len(rows)} exports, {len(rows) - len(done)} failed; found as many as counted in {equal}.", ""]
    lines += ["## What is no attention, or not found", ""]
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in done:
        for reason, count in Counter(miss.rpartition(" (")[0] for miss in row.near_misses).items():
            reasons.setdefault((row.family, f"{count} x {reason}"), []).append(_setting(row))
    lines += [f"- {name}, {_settings(where)}: {reason}" for (name, reason), where in reasons.items()]
    lines += ["", "## Failed, wrong or float", ""]
    lines += [f"- {row.family}, {_setting(row)}: `{row.error}`" for row in rows if row.error]
    lines += [f"- {row.family}, {_setting(row)}: {text}" for row in done for text in (*row.wrong, *row.check)]
    kept: dict[tuple[str, str], list[str]] = {}
    for row in done:
        for reason, count in Counter(text.partition(": ")[2] for text in row.float_linears).items():
            kept.setdefault((row.family, f"{count} with weights kept float: {reason}"), []).append(_setting(row))
    lines += [f"- {name}, {_settings(where)}: {reason}" for (name, reason), where in kept.items()]
    return head + "\n".join([*lines, "", "## How they were counted", "", *_counts(), "", versions()]) + "\n"


def _setting(row: Row) -> str:
    return f"fused {'on' if row.fused else 'off'}, batch {row.batch}"


def _settings(where: list[str]) -> str:
    return "all four" if len(where) == 4 else "; ".join(where)


def _counts() -> list[str]:
    return [f"- {family.family} (`{family.name}`, made small): {family.attentions}. {family.how}" for family in families()]


def versions() -> str:
    """One line."""
    from importlib.metadata import version

    names = ("timm", "torch", "onnxscript", "onnx", "onnxruntime", "nncf")
    return ", ".join(f"{name} {version(name)}" for name in names) + "."


def in_process(family: Family) -> list[Row]:
    """The four rows of a family, from a process of its own; what fails is a row too."""
    command = [sys.executable, "-m", __spec__.name, "--one", family.family]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    rows = [Row(**json.loads(text[4:])) for text in done.stdout.splitlines() if text.startswith("ROW ")]
    if len(rows) < len(SETTINGS):
        error = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        missing = SETTINGS[len(rows) :]
        rows += [Row(family=family.family, fused=fused, batch=batch, error=plain(error)) for fused, batch in missing]
    for row in rows:
        print(f"{row.family}: {row.error}" if row.error else line(family, row), file=sys.stderr, flush=True)
    return rows


def one(family: Family) -> None:
    """Print the rows of a family as they are made."""
    for fused, batch in SETTINGS:
        try:
            row = measure(family, fused=fused, dynamic=batch == "any")
        except Exception as problem:
            row = Row(family=family.family, fused=fused, batch=batch, error=plain(f"{type(problem).__name__}: {problem}"))
        print("ROW " + json.dumps(asdict(row)), flush=True)


def plain(text: str) -> str:
    """On one line of a table."""
    return " ".join(text.split())[:400].replace("|", "/").replace("`", "'")


def main() -> None:
    """Measure what is asked, write the page if that is everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="some only: nothing is written then")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="also keep the figures there")
    asked = parser.parse_args()
    known = {family.family: family for family in families()}
    if asked.one:
        return one(known[asked.one])
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(in_process, [known[name] for name in asked.families or known])
        rows = [row for of_family in made for row in of_family]
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if not asked.families:
        DOCS.write_text(page(rows), encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
