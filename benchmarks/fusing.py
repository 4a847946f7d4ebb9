"""Every model of a folder fused to every operator and written out again, each compared with the original by running both.

    python -m benchmarks.fusing FOLDER [FOLDER...]

A folder holds truth.json ({file: {...}}) and feeds/NAME.npz as tests/corpus and tests/cases do. Prints how many sites of
each form each operator took, and the reasons of the others; exits 1 where a rewritten model does not load or gives something
else, or where fewer than 90 % of the sites fit at least one operator.
"""

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
from rich import box
from rich.console import Console
from rich.table import Table

from attnquant import runtime
from attnquant.errors import AttnQuantError, ModelError
from attnquant.model import load
from attnquant.recognition import recognize
from attnquant.rewrite import expand, fuse
from attnquant.site import DECOMPOSED, AttentionSite

Feeds = Mapping[str, np.ndarray]

OPERATORS = (
    "ai.onnx::Attention@23",
    "ai.onnx::Attention@24",
    "com.microsoft::MultiHeadAttention",
    "com.microsoft::GroupQueryAttention",
)
LEAST = 0.9
_DOMAINS = {"", "ai.onnx", "com.microsoft"}


@dataclass(slots=True, kw_only=True)
class Sweep:
    """What became of the sites of all files."""

    sites: Counter[str] = field(default_factory=Counter)
    fused: Counter[tuple[str, str]] = field(default_factory=Counter)
    anywhere: Counter[str] = field(default_factory=Counter)
    reasons: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    nowhere: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    unrun: list[str] = field(default_factory=list)
    """Files that the runtime itself does not run."""

    @property
    def share(self) -> float:
        """Part of the sites that at least one operator took."""
        return sum(self.anywhere.values()) / max(1, self.sites.total())


def samples(path: Path) -> list[dict[str, np.ndarray]]:
    """One set of inputs for each call of a file."""
    truth = json.loads((path.parent / "truth.json").read_text(encoding="utf-8"))[path.name]
    if "calls" in truth:
        files = [f"{path.stem}.{call}.npz" for call in truth["calls"]]
    else:
        files = [f"{truth.get('model', path.name.split('-')[0])}.npz"]
    return [dict(np.load(path.parent / "feeds" / name)) for name in files]


def sweep(paths: list[Path]) -> Sweep:
    """Fuse and write out every file."""
    found = Sweep()
    for path in paths:
        print(path.name, file=sys.stderr)
        try:
            model = load(path)
        except ModelError:
            continue  # broken on purpose
        rows, expected = original(path)
        if expected is None:
            found.unrun.append(path.name)
        _file(found, path.name, model, rows, expected)
    return found


def models(arguments: list[str]) -> list[Path]:
    """The files that folders and files name."""
    return [path for item in map(Path, arguments) for path in (sorted(item.glob("*.onnx")) if item.is_dir() else [item])]


def original(path: Path) -> tuple[list[dict[str, np.ndarray]], list[Feeds] | None]:
    """(samples, outputs): at batch 1 where the runtime takes no more; None where it never runs."""
    model, rows = load(path), samples(path)
    for tried in (rows, [{name: item[:1] for name, item in row.items()} for row in rows]):
        try:
            return tried, [runtime.run(model, row, threads=1) for row in tried]
        except ModelError:
            continue
    return rows, None


def _file(
    found: Sweep, name: str, model: ir.Model, rows: list[dict[str, np.ndarray]], expected: list[Feeds] | None
) -> None:
    sites = recognize(model, feeds=rows[0]).sites
    found.sites.update(map(form, sites))
    taken: set[str] = set()
    refusals: dict[str, list[str]] = defaultdict(list)
    for operator in OPERATORS:
        try:
            made = fuse(model, to=operator, feeds=rows[0])
            back = expand(made.model)
        except AttnQuantError as problem:
            if expected is not None:
                found.faults.append(f"{name}: to {operator}: {type(problem).__name__}: {problem}")
            continue
        by_id = {row.site: row for row in made.rows}
        for site in sites:
            row = by_id[site.id]
            if row.status == "fused":
                taken.add(site.id)
                found.fused[form(site), operator] += 1
            else:
                refusals[site.id].append(f"{operator}: {row.reasons[0]}")
                found.reasons[operator][_plain(row.reasons[0])] += 1
        if expected is not None and any(row.status == "fused" for row in made.rows):
            for what, changed in (("fused", made.model), ("fused and written out", back.model)):
                found.faults += [f"{name}: {what} to {operator}: {fault}" for fault in faults(changed, rows, expected)]
    if expected is not None and any(site.form != DECOMPOSED for site in sites):
        again = fuse(expand(model).model, to=OPERATORS[0]).model
        found.faults += [f"{name}: written out and fused: {fault}" for fault in faults(again, rows, expected)]
    for site in sites:
        if site.id in taken:
            found.anywhere[form(site)] += 1
        else:
            found.nowhere += [f"{name} {site.id}: {reason}" for reason in refusals[site.id]]


def form(site: AttentionSite) -> str:
    """The row of the table that a site counts in."""
    if site.form != DECOMPOSED:
        return site.form
    kept = f", past {site.past}" if site.past != "none" else ""
    return f"written out, {site.kind or 'unknown'}{kept}{', repeat_kv' if (site.kv_repeat or 1) > 1 else ''}"


def faults(changed: ir.Model, rows: list[dict[str, np.ndarray]], expected: list[Feeds]) -> Iterator[str]:
    """What is wrong with a rewritten model: foreign operators, or other outputs than the original's."""
    foreign = {(node.domain, node.op_type) for node in changed.graph if node.domain not in _DOMAINS}
    if foreign:
        yield f"operators {sorted(foreign)}"
    for row, outputs in zip(rows, expected, strict=True):
        try:
            got = runtime.run(changed, row, threads=1)
        except ModelError as problem:
            yield str(problem)
            continue
        for name, item in outputs.items():
            if got[name].shape != item.shape:
                yield f"output {name!r} becomes {got[name].shape} instead of {item.shape}"
                continue
            x, y = item.astype(np.float64), got[name].astype(np.float64)
            limit = (2e-3 if item.dtype == np.float16 else 1e-4) * float(np.abs(x).max(initial=0.0))
            error = float(np.abs(x - y).max(initial=0.0))
            if not error <= limit:
                yield f"output {name!r} differs by {error:.3g}, more than {limit:.3g}"


def _plain(reason: str) -> str:
    """A reason without the names of one graph."""
    return re.sub(r"'[^']*'", "...", reason)


def table(found: Sweep) -> Table:
    """Sites by form and operator."""
    made = Table("form", "sites", *(name.partition("::")[2] for name in OPERATORS), "any", box=box.MARKDOWN)
    for name in sorted(found.sites):
        counts = [str(found.fused[name, operator]) for operator in OPERATORS]
        made.add_row(name, str(found.sites[name]), *counts, str(found.anywhere[name]))
    totals = [str(sum(count for (_, one), count in found.fused.items() if one == operator)) for operator in OPERATORS]
    made.add_row("all", str(found.sites.total()), *totals, str(found.anywhere.total()))
    return made


def main(arguments: list[str]) -> int:
    """Print the table, the reasons and the faults."""
    if not arguments:
        print("benchmarks.fusing: expected one folder or file at least", file=sys.stderr)
        return 1
    paths = models(arguments)
    found = sweep(paths)
    console = Console(width=200)
    console.print(table(found))
    for operator in OPERATORS:
        console.print(f"\nnot to {operator}:")
        for reason, count in found.reasons[operator].most_common():
            console.print(f"  {count:4}  {reason}", soft_wrap=True, markup=False)
    lists = {"to no operator": found.nowhere, "not run by the runtime": found.unrun, "faults": found.faults}
    for title, lines in lists.items():
        console.print(f"\n{title}: {len(lines)}")
        for line in lines:
            console.print(f"  {line}", soft_wrap=True, markup=False)
    console.print(f"\n{len(paths)} files, {found.share:.1%} of the sites fused to at least one operator")
    return 0 if not found.faults and found.share >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
