"""Broken and hostile inputs through the command line: exit codes, messages, files left behind; then kills at work.

    python -m benchmarks.hostile --count 1000 --kills 50 [--seed 20]

Every case runs in this process through `attnquant.cli.main`. Wanted of each: no traceback and no "unexpected" error; exit
code 1 (2 for a recipe rule that matches nothing) where the input has to be refused; no file left and none changed unless
the command succeeded. The kills are SIGKILL at random moments of a child that quantizes over an existing file: what is there
afterwards must be the old file or a whole new one. Prints a table by kind and exits 1 if anything was not as wanted.
"""

import argparse
import contextlib
import io
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from hostile import BYTES, Case, cases, sound

from attnquant.cli import main as command_line
from attnquant.errors import ModelError
from attnquant.model import load

LIMIT_SECONDS = 120
"""A case that takes longer counts as a hang."""
UNWANTED = ("Traceback (most recent call last)", "This is a bug in attnquant", "unexpected ")


def main(argv: list[str] | None = None) -> int:
    """Run the cases and the kills that the options ask for; 0 if all went as wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--only", default="", help="run only the kinds that contain this")
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="attnquant-hostile-"))
    try:
        wrong = _run_cases(options.seed, options.count, options.only, folder)
        wrong += _run_kills(options.seed, options.kills, folder)
    finally:
        shutil.rmtree(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"\n{len(wrong)} not as wanted; peak memory {peak:,.0f} MB")
    for line in wrong[:50]:
        print(f"  {line}")
    return 1 if wrong else 0


def _run_cases(seed: int, count: int, only: str, folder: Path) -> list[str]:
    codes: dict[str, Counter[str]] = defaultdict(Counter)
    seconds: Counter[str] = Counter()
    wrong: list[str] = []
    done = 0
    for case in cases(seed, count, folder):
        if only in case.kind:
            done += 1
            for command in ("quantize", "inspect", "check") if case.blames == "model" else ("quantize",):
                start = time.perf_counter()
                code, problems = _run(case, command)
                seconds[case.kind] += time.perf_counter() - start
                codes[case.kind][f"{command} {code}"] += 1
                wrong += [f"{case.model.parent.name} {case.kind}, {command}: {problem}" for problem in problems]
        shutil.rmtree(case.model.parent, ignore_errors=True)
        if done and done % 50 == 0 and only in case.kind:
            print(f"{done} cases, {len(wrong)} not as wanted", file=sys.stderr)
    print(f"{done} cases of {len(codes)} kinds, seed {seed}\n\n| kind | exit codes | s |\n|---|---|---|")
    for kind, counted in codes.items():
        print(
            f"| {kind} | {', '.join(f'{name}: {times}' for name, times in sorted(counted.items()))} | {seconds[kind]:.1f} |"
        )
    return wrong


def _run(case: Case, command: str) -> tuple[int, list[str]]:
    """(exit code, what was not as wanted)."""
    output = case.model.parent / "out.onnx"
    arguments = {
        "quantize": [str(case.model), "-o", str(output), "--data", str(case.data)],
        "inspect": [str(case.model)],
        "check": [str(case.model)],
    }[command]
    if case.recipe is not None:
        arguments += ["--recipe", str(case.recipe)]
    before = _snapshot(case.model.parent)
    try:
        with _time_limit(), _captured() as text:
            code = command_line([command, *arguments])
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        return -1, [f"raised {type(problem).__name__}: {problem!s:.200}"]
    said = text.getvalue()
    after = _snapshot(case.model.parent)
    problems = [f"said {word!r}: {said[max(0, said.find(word)) :][:300]!r}" for word in UNWANTED if word in said]
    written = after.pop(output.name, None)
    if after != before:
        problems.append("changed, left or removed a file")
    # Damage can leave weights of 1e38: a valid model whose result is written and reported as failing its check.
    judged = code == 3 and case.kind in BYTES
    if (written is not None) != (command == "quantize" and (code == 0 or judged)):
        problems.append(f"exit code {code} and {'an' if written else 'no'} output file")
    if command == "quantize" and case.outcome == "refused":
        expected = 2 if case.kind == "recipe for an unknown node" else 1
        if code != expected:
            problems.append(f"exit code {code}, wanted {expected}; said {said[-200:]!r}")
    if code not in (0, 1, 2, 3):
        problems.append(f"exit code {code}")
    output.unlink(missing_ok=True)
    return code, problems


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.iterdir()}


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    """What Python code writes to stdout and stderr, without the chatter of loggers."""
    text = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            warnings.simplefilter("ignore")
            yield text
    finally:
        logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(number: int, frame: object) -> None:
        msg = f"took more than {LIMIT_SECONDS} s"
        raise TimeoutError(msg)

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _run_kills(seed: int, count: int, folder: Path) -> list[str]:
    """Quantize over an existing file in a child and kill it; half of the kills aim at the moment of writing."""
    if not count:
        return []
    place = folder / "kills"
    place.mkdir()
    case = sound(place)
    output = place / "out.onnx"
    arguments = ["quantize", str(case.model), "-o", str(output), "--data", str(case.data)]
    took = min(_child(arguments, None) for _ in range(2))
    whole = output.read_bytes()
    chance = random.Random(seed)
    wrong, states = [], Counter[str]()
    for turn in range(count):
        old = b"the old file" * 100
        output.write_bytes(old)
        before = set(os.listdir(place))
        _child(arguments, took * (chance.uniform(0, 1.1) if turn % 2 else chance.uniform(0.9, 1.1)))
        found = output.read_bytes()
        state = "old" if found == old else "new" if found == whole or _loads(output) else "broken"
        states[state] += 1
        left = set(os.listdir(place)) - before
        if state == "broken" or left:
            wrong.append(f"kill {turn}: {state}, left {sorted(left)}")
        for name in left:
            (place / name).unlink()
    print(f"\n{count} kills within {took:.1f} s: {dict(states)}")
    return wrong


def _child(arguments: list[str], killed_after: float | None) -> float:
    """Seconds that a fresh process took for a command, or until it was killed."""
    start = time.perf_counter()
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "attnquant", *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_WRONLY, 0) for descriptor in (1, 2)],
    )
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return time.perf_counter() - start


def _loads(path: Path) -> bool:
    try:
        load(path)
    except ModelError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
