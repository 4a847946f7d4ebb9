"""Families of transformers, small and random, through every command of attnquant: exports of torch by several ways.

    python -m benchmarks.families FOLDER [--variants sdpa24,eager20] [FAMILY ...]

needs `pip install "attnquant[cpu,torch]"`. Exports what is missing in FOLDER, measures what was not measured there (the
figures lie beside the models as .json; delete those to measure anew), and writes docs/families.md if no family is named.
Other .onnx files in FOLDER, named FAMILY-VARIANT+ANYTHING.onnx, are models that some optimizer made of an export.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families_small import SAMPLES, VARIANTS, Family, export, families
from benchmarks.timm_table import optimized_bytes, plain, truth

DOCS = Path(__file__).resolve().parents[1] / "docs" / "families.md"
OPERATORS = ("ai.onnx::Attention@23", "com.microsoft::MultiHeadAttention", "com.microsoft::GroupQueryAttention")
COLUMNS = (
    "family", "counted", "exports", "found", "roles by value", "placed right", "SNR dB", "noise", "int8 linears", "fused",
)  # fmt: skip
ALIKE, EQUAL_DB = 4e-3, 70.0

HEADER = """# transformers

Attentions in small random models of transformers' families, counted by hand from their configuration
([benchmarks/families_counts.toml](../benchmarks/families_counts.toml)) before anything looked for them;
two were wrong and corrected from the source afterwards (DiffLlama: two calls a layer; Detr: two encoder layers).
Written by `python -m benchmarks.families FOLDER`; do not edit. Figures are kept from run to run.

- *exports*: how many there are; names of exports are attention and opset (`VARIANTS` in benchmarks/families_small.py), and
  behind a + the optimizer that was run on one. *found*: attentions that `recognize` finds, with a set of inputs and without.
- *roles by value*: attentions whose Q, K and V have the values that torch's attention got (recorded while the module ran,
  compared by their distribution, so that layouts and repeat_kv do not matter); of those that were recorded.
- *placed right*: Q and K quantized, V and probabilities not, by tests/placement_audit.py; com.microsoft Attention is skipped
  with its reason.
- *SNR*: quantized against torch, worst of two samples among those it was calibrated with: that nothing is broken. *noise*:
  the same of torch with weights that are 40 dB off. *int8 linears*: as the runtime's optimized graph has them.
- *fused*: attentions that `fuse` made Attention / MultiHeadAttention / GroupQueryAttention, outputs equal on two samples;
  the others are refused with a reason.

Every model also passes `check` and `verify`, and loads in a session with default options, or is named below.

"""


def measure(path: Path, family: Family) -> dict[str, Any]:
    """The figures of one file; `faults` is what should not be."""
    import onnx

    import attnquant

    row: dict[str, Any] = {"file": path.stem, "faults": []}
    samples, outputs, noisy, recorded = _beside(path)
    proto = onnx.load(path)
    samples = [{name: one[name] for name in (item.name for item in proto.graph.input)} for one in samples]
    names = [item.name for item in proto.graph.output]
    try:
        tensors(proto, names, samples[1])
    except Exception as problem:
        if "RotaryEmbedding" not in str(problem):
            return row | {"invalid": plain(str(problem))}
        samples = [{name: item[:1] for name, item in one.items()} for one in samples]  # opset 23: one sample at a time
        outputs, noisy, recorded = [[item[:1] for item in one] for one in outputs], [item[:1] for item in noisy], []
    found = attnquant.recognize(proto, feeds=samples[1]).sites
    row |= {"found": len(found), "recorded": len(recorded), "alike": _alike(proto, found, samples[1], recorded)}
    if [site.id for site in attnquant.recognize(proto).sites] != [site.id for site in found]:
        row["faults"].append("other attentions without inputs")
    if not family.attentions - family.folded <= len(found) <= family.attentions:
        row["faults"].append(f"found {len(found)} of {family.attentions}")
    try:
        row |= _quantized(proto, samples, outputs, noisy, row["faults"])
        return row | {"fused": _fused(proto, samples, names, row["faults"])}
    except attnquant.AttnQuantError as problem:
        row["faults"].append(plain(f"{type(problem).__name__}: {problem}"))
        return row


def _quantized(
    proto: Any, samples: Sequence[Any], outputs: Sequence[Any], noisy: Sequence[Any], faults: list[str]
) -> dict[str, Any]:
    import attnquant
    from attnquant import runtime
    from attnquant.roles import PortRole
    from attnquant.saving import to_proto
    from benchmarks.executed import count, optimized
    from tests.placement_audit import audit, ok_qk

    result = attnquant.quantize(proto, samples)
    made = to_proto(result.model)
    skipped = {item.site for item in result.setup.skipped if item.role in (PortRole.QUERY, PortRole.KEY)}
    sites = [site for site in result.sites if site.id not in skipped]
    rows = audit(made, {"attentions": [truth(site) for site in sites]})
    faults += [f"placed wrong: {one}" for one in rows if not ok_qk(one)]
    with runtime.session(result.model) as session:
        got = [session.run(None, samples[index])[0] for index in (3, 4)]
    ran = count(optimized_bytes(made, optimized))
    if ran.float_linears > len(result.setup.kept_float):
        faults.append(f"{ran.float_linears} float linears, {len(result.setup.kept_float)} with a reason")
    figures = [min(snr(outputs[index][0], one) for index, one in zip((3, 4), pair, strict=True)) for pair in (got, noisy)]
    if figures[0] < min(20.0, figures[1] - 14):
        faults.append(f"SNR {figures[0]:.1f} dB, weights that are 40 dB off {figures[1]:.1f}")
    faults += [f"check: {one}" for one in attnquant.check(result.model, feeds=samples[1]).violations]
    faults += [f"verify: {one}" for one in attnquant.verify(proto, result.model, samples[3:4]).failures]
    return {
        "right": sum(map(ok_qk, rows)), "skipped": len(skipped), "snr_first": figures[0], "noise": figures[1],
        "linears": f"{ran.int8_linears}/{ran.int8_linears + ran.float_linears}",
    }  # fmt: skip


def _fused(proto: Any, samples: Sequence[Any], names: list[str], faults: list[str]) -> dict[str, int]:
    """{operator: attentions}; the outputs have to be equal on samples that fuse did not see too."""
    import attnquant
    from attnquant.saving import to_proto

    counts = {}
    for operator in OPERATORS:
        result = attnquant.fuse(proto, to=operator, feeds=samples[1])
        counts[operator] = sum(row.status == "fused" for row in result.rows)
        for index in (0, 3) if counts[operator] else ():
            one, other = (tensors(item, names, samples[index]) for item in (proto, to_proto(result.model)))
            worst = min(snr(one[name], other[name]) for name in names if one[name].dtype.kind == "f")
            if worst < EQUAL_DB:
                faults.append(f"fused to {operator}: {worst:.1f} dB")
    return counts


def _alike(proto: Any, sites: Sequence[Any], feeds: Mapping[str, np.ndarray], recorded: list[tuple[np.ndarray, ...]]) -> int:
    """How many attentions have the values of a recorded one on Q, K and V, each recorded one taken once."""
    from attnquant.roles import PortRole

    roles = (PortRole.QUERY, PortRole.KEY, PortRole.VALUE)
    known = [site for site in sites if not site.path and all(role in site.ports for role in roles)]
    got = tensors(proto, [site.ports[role].tensor for site in known for role in roles], feeds) if recorded else {}
    left, count = list(recorded), 0
    for site in known if recorded else ():
        ours = [got[site.ports[role].tensor] for role in roles]
        same = [at for at, theirs in enumerate(left) if all(map(alike, ours, theirs))]
        count += bool(same)
        for at in same[:1]:
            del left[at]
    return count


def alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Same values up to order, repetition and a positive factor."""
    shapes = []
    for item in (one, other):
        flat = item.astype(np.float64).reshape(-1)
        shapes.append(np.quantile(flat / (np.sqrt(np.mean(flat**2)) or 1.0), np.linspace(0, 1, 65)))
    return bool(np.abs(shapes[0] - shapes[1]).max() < ALIKE)


def tensors(proto: Any, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a model by ONNX Runtime without optimizations: inner ones, outputs, inputs and initializers."""
    import onnx
    import onnxruntime

    probe = onnx.ModelProto()
    probe.CopyFrom(proto)
    stored = [item for item in probe.graph.initializer if item.name in names]
    known = {item.name: onnx.numpy_helper.to_array(item) for item in stored} | dict(feeds)
    wanted = [name for name in dict.fromkeys(names) if name not in known]
    outputs = {item.name for item in probe.graph.output}
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in outputs)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return known | (dict(zip(wanted, session.run(wanted, dict(feeds)), strict=True)) if wanted else {})


def snr(reference: np.ndarray, other: np.ndarray) -> float:
    """dB."""
    from attnquant.measures import Likeness

    likeness = Likeness()
    likeness.add(reference, other)
    return float(likeness.snr_db or 0.0)


def _beside(path: Path) -> tuple[list[Any], list[Any], list[Any], list[tuple[np.ndarray, ...]]]:
    """Samples, outputs, outputs of noisy weights, recorded operands."""
    kept = np.load(path.with_name(path.stem.partition("+")[0] + ".npz"))
    samples, outputs = [], []
    for index in range(SAMPLES):
        samples.append({key.partition(":")[2]: kept[key] for key in kept.files if key.startswith(f"in{index}:")})
        outputs.append([kept[f"out{index}:{at}"] for at in range(99) if f"out{index}:{at}" in kept.files])
    recorded = [tuple(kept[f"{role}{index}"] for role in "qkv") for index in range(int(kept["recorded"]))]
    return samples, outputs, [kept["noisy3"], kept["noisy4"]], recorded


def page(folder: Path) -> str:
    """docs/families.md from the figures in a folder."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("*.json")):
        row = json.loads(file.read_text())
        rows.setdefault(row["file"].partition("-")[0], []).append(row)
    known = {family.family: family for family in families()}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [line(known[name], [row for row in rows[name] if "found" in row]) for name in known if name in rows]
    everything = [row for of_family in rows.values() for row in of_family]
    faulty = sum(bool(row["faults"]) for row in everything)
    ways = Counter(row["file"].partition("-")[2] for row in everything)
    named = ", ".join(f"{count} x {way}" for way, count in sorted(ways.items()))
    lines += ["", f"{len(everything)} models of {len(rows)} families ({named}); {faulty} with a fault.", ""]
    lines += ["## Faults, and files that ONNX Runtime does not run in float", ""]
    lines += [f"- {row['file']}: {text}" for row in everything for text in row["faults"]]
    lines += [f"- {row['file']}: `{row['invalid']}`" for row in everything if "invalid" in row]
    lines += ["", "## How they were counted", ""]
    lines += [f"- {name}: {family.attentions}. {family.how}" for name, family in known.items()]
    return HEADER + "\n".join(lines) + "\n"


def line(family: Family, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line of the table."""
    done = [row for row in rows if "snr_first" in row]
    found = ", ".join(f"{count} x {number}" for count, number in sorted(Counter(row["found"] for row in rows).items()))
    cells = [family.family, str(family.attentions), str(len(rows)), found]
    cells.append(f"{sum(row['alike'] for row in rows)} of {sum(row['recorded'] for row in rows)}")
    skipped = sum(row["skipped"] for row in done)
    placed = f"{sum(row['right'] for row in done)} of {sum(row['found'] for row in done) - skipped}"
    cells.append(placed + (f", {skipped} skipped" if skipped else ""))
    for key in ("snr_first", "noise"):
        figures = [row[key] for row in done]
        cells.append(f"{min(figures):.0f} to {max(figures):.0f}" if figures else "")
    shares = [tuple(map(int, row["linears"].split("/"))) for row in done]
    cells.append(f"{sum(share[0] for share in shares)} of {sum(share[1] for share in shares)}")
    cells.append(" / ".join(str(sum(row["fused"][operator] for row in done)) for operator in OPERATORS))
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Export and measure what is missing, write the page if that is everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", help="some only: nothing is written then")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    asked = parser.parse_intermixed_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for family in families():
        if asked.families and family.family not in asked.families:
            continue
        for variant in (VARIANTS[name] for name in asked.variants.split(",") if name):
            path = asked.folder / f"{family.family}-{variant.name}.npz"
            if path.exists() or (variant.past and not family.decoder):
                continue
            try:
                export(family, variant, asked.folder)
            except Exception as problem:  # no such attention, or the exporter's own faults
                print(f"{path.stem} is not exported: {plain(str(problem))[:160]}", file=sys.stderr, flush=True)
        for path in sorted(asked.folder.glob(f"{family.family}-*.onnx")):
            _kept(path, family)
    if not asked.families:
        DOCS.write_text(page(asked.folder), encoding="utf-8")


def _kept(path: Path, family: Family) -> None:
    file = path.with_suffix(".json")
    if file.exists() or not path.with_name(path.stem.partition("+")[0] + ".npz").exists():
        return
    try:
        row = measure(path, family)
    except Exception as problem:
        row = {"file": path.stem, "faults": [plain(f"{type(problem).__name__}: {problem}")]}
    file.write_text(json.dumps(row, default=str))
    print(f"{path.stem}: {row.get('found')} of {family.attentions}, {row['faults'] or 'right'}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
