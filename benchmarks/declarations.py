"""Declarations that are missing, partial or wrong through inspect, check, quantize and fuse: a right model or an error.

    python -m benchmarks.declarations --count 1000 [--seed 8] [--only TEXT] [--part K/N] [--out FILE.md]

Every case (tests/declarations.py) runs in a process of its own: a crash of the runtime and a hang are rows too. Wanted: an
error of attnquant that names a node or tensor, and no file; or a model that loads at default settings, gives the results of
the sound model in float at 20 dB or better (fused: 40 dB), is quantized where the sound model is, passes `check`, and
declares its inputs and outputs as before (tests/declared.py). Prints a table by kind and exits 1 if anything was not so.
"""

import argparse
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from benchmarks.half import alone, share
from tests.declarations import Case, Sound, cases, sound_models
from tests.declared import Truth, Verdict, judge, truth


def main(argv: list[str] | None = None) -> int:
    """Run the cases that the options ask for; 0 if all went as wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--only", default="", help="run only the cases with this in their kinds or their model's name")
    parser.add_argument("--part", default="1/1", help="run every Nth case, from the Kth on")
    parser.add_argument("--out", type=Path, help="write the table and what was not as wanted here too")
    options = parser.parse_args(argv)
    models = sound_models()
    truths = {model.name: alone(_truth, model)["truth"] for model in models}
    verdicts = []
    for case in share(cases(options.seed, options.count, models), options.part):
        if options.only in str(case):
            verdicts.append((case, alone(_judged, (case, truths[case.sound.name]))))
            if len(verdicts) % 50 == 0:
                print(f"{len(verdicts)} cases, {len(_wrong(verdicts))} not as wanted", file=sys.stderr, flush=True)
    text = _report(options.seed, len(models), verdicts)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if _wrong(verdicts) else 0


def _truth(model: Sound) -> dict[str, Any]:
    return {"truth": truth(model)}


def _judged(work: tuple[Case, Truth]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="attnquant-declarations-") as folder:
        verdict: Verdict = judge(*work, Path(folder))
    return {"steps": verdict.steps, "problems": verdict.problems}


def _wrong(verdicts: list[tuple[Case, dict[str, Any]]]) -> list[str]:
    return [f"{case}: {problem}" for case, found in verdicts for problem in found["problems"]]


def _report(seed: int, models: int, verdicts: list[tuple[Case, dict[str, Any]]]) -> str:
    """Of every kind: cases by what quantizing gave, and what was not as wanted, whatever else was edited beside it."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for case, found in verdicts:
        quantized = next((text for step, text in found.get("steps", {}).items() if step.startswith("quantize")), "crash")
        word = quantized if quantized in ("right", "crash", "unexpected") else "refused"
        counted[case.kinds[0]].update([word, *(["not as wanted"] if found["problems"] else [])])
    lines = [f"{len(verdicts)} cases of {len(counted)} kinds on {models} models, seed {seed}", ""]
    lines += ["| kind | cases | right | refused | not as wanted |", "|---|---|---|---|---|"]
    for kind, row in counted.items():
        total = sum(count for word, count in row.items() if word != "not as wanted")
        lines.append(f"| {kind} | {total} | {row['right']} | {row['refused']} | {row['not as wanted']} |")
    wrong = _wrong(verdicts)
    return "\n".join([*lines, "", f"{len(wrong)} not as wanted", *(f"  {line}" for line in wrong)])


if __name__ == "__main__":
    sys.exit(main())
