"""The rows of benchmarks.kv_cache, the tables of docs/kv-cache.md that they make, and the bounds that they miss."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attnquant.kvcache import KvCache
from attnquant.verification.decoding import DecodingReport
from benchmarks import runners
from benchmarks.conformance import filled, table
from benchmarks.decoding import CACHES, HEADS, SIZE
from benchmarks.metrics import Feeds
from benchmarks.profiles import NodeTime, by_operator
from benchmarks.run import machine

COMMAND = "benchmarks.kv_cache"
LARGEST = (("int8 per channel", 1.005), ("int4 per channel", 1.06))
"""Perplexity against the float cache's, at most."""
LEAST_DB = 30.0
LEAST_SPEED = (("float as exported", 1.5), ("float", 1.0))
"""Tokens a second of int8 against this model's, at least."""


@dataclass(slots=True)
class Row:
    """One model's figures."""

    name: str
    path: Path
    cache: KvCache | None = None
    perplexity: float | None = None
    decoding: DecodingReport | None = None
    timings: dict[str, runners.Timing] = field(default_factory=dict)
    """By the name of the model it is held against."""
    profile: list[NodeTime] = field(default_factory=list)

    def stored(self, feeds: Feeds) -> Feeds:
        """Feeds with float caches as this model takes them."""
        return feeds if self.cache is None else self.cache.store(feeds)

    def token_bytes(self) -> float:
        """Of the cache, for one more position."""
        return 4.0 * len(CACHES) * HEADS * SIZE if self.cache is None else self.cache.bytes_per_token()

    def worst_step(self) -> float | None:
        """SNR in dB of this model's worst step against its own prefill."""
        steps = self.decoding.steps if self.decoding else ()
        ways = [step.quantized_db if self.cache else step.float_db for step in steps]
        return min((value for value in ways if value is not None), default=None)

    def worst_error(self) -> float | None:
        """SNR in dB of this model's worst step against the float model's."""
        steps = self.decoding.steps if self.decoding else ()
        return min((step.error_db for step in steps if step.error_db is not None), default=None) if self.cache else None


def faults(rows: Sequence[Row]) -> list[str]:
    """Bounds that are missed, a sentence each. Rows: export, float, int8, int4."""
    _, fused, int8, int4 = rows
    found = []
    for row, (name, largest) in zip((int8, int4), LARGEST, strict=True):
        if not (ratio := _ratio(row, fused)) <= largest:
            found.append(f"{name}: perplexity {ratio:.4f}x of float, at most {largest} is asked")
    found += [
        f"{row.name}: a step at {worst:.1f} dB against prefill, {LEAST_DB:.0f} is asked"
        for row in (fused, int8) if not (worst := row.worst_step() or 0.0) >= LEAST_DB
    ]  # fmt: skip
    if int8.token_bytes() * 4 != fused.token_bytes():
        found.append(f"int8: {int8.token_bytes():.0f} bytes a token, a quarter of {fused.token_bytes():.0f} is asked")
    for name, least in LEAST_SPEED:
        if not (got := int8.timings[name].speedup) >= least:
            found.append(f"int8: {got:.2f}x the tokens a second of {name}, {least} is asked")
    return found


def text(rows: Sequence[Row], others: Sequence[Row], *, windows: int, tokens: int, context: int, threads: int) -> str:
    """Markdown of all figures."""
    version = importlib.metadata.version("onnxruntime")
    found = [
        f"SmolLM2-135M (30 layers, 3 heads of 64 for keys and values), ONNX Runtime {version}, {machine()['cpu']}. "
        f"Perplexity of {windows} windows of Brown text, {tokens:,} tokens scored. *Steps*: SNR of the worst token decoded "
        "step by step, against prefill of the same model (200: equal), and against the float model's step.", "",
        table(*_accuracy((*rows[1:], *others), rows[1])), "",
        f"One token behind {context:,}, {threads} threads, IoBinding, paired runs by turns on a machine that other work "
        "shares: medians, in brackets quartiles; *work* is the ratio of processor time.", "",
        table(*_speed(rows)), "",
        "Where a step's time goes, ms on 1 thread (number of nodes), as the runtime's profile has it:", "",
        table(*_operators(rows)),
    ]  # fmt: skip
    return "\n".join(found)


def write(page: Path, found: str) -> None:
    """Put the tables between the page's marks."""
    page.write_text(filled(page.read_text(encoding="utf-8"), {"figures": found}, by=COMMAND), encoding="utf-8")


def _ratio(row: Row, fused: Row) -> float:
    assert row.perplexity is not None
    assert fused.perplexity is not None
    return row.perplexity / fused.perplexity


def _accuracy(rows: Iterable[Row], fused: Row) -> tuple[list[str], list[list[str]]]:
    columns = ["cache", "perplexity", "against float", "bytes a token", "steps, dB: prefill", "float"]
    return columns, [
        [
            row.name, f"{row.perplexity:.3f}", f"{_ratio(row, fused):.4f}x", f"{row.token_bytes():,.0f}",
            *("" if worst is None else f"{worst:.1f}" for worst in (row.worst_step(), row.worst_error())),
        ]
        for row in rows
    ]  # fmt: skip


def _speed(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    columns = ["cache", "against", "tokens/s of that", "tokens/s", "speed-up", "work"]
    return columns, [
        [
            row.name, name, f"{1e3 / one.float_ms:.1f}", f"{1e3 / one.model_ms:.1f}",
            f"{one.speedup:.2f}x ({one.speedup_low:.2f} to {one.speedup_high:.2f})", f"{one.work:.2f}x",
        ]
        for row in rows for name, one in row.timings.items()
    ]  # fmt: skip


def _operators(rows: Sequence[Row], shown: int = 5) -> tuple[list[str], list[list[str]]]:
    """The slowest operators of any row, then the rest."""
    found = [by_operator(row.profile) for row in rows]
    names = {name for one in found for name in one}
    slowest = sorted(names, key=lambda name: -max(one.get(name, (0.0, 0))[0] for one in found))[:shown]
    body = [[name, *(f"{one[name][0]:.1f} ({one[name][1]})" if name in one else "" for one in found)] for name in slowest]
    rest = [sum(ms for name, (ms, _) in one.items() if name not in slowest) for one in found]
    whole = [sum(ms for ms, _ in one.values()) for one in found]
    body += [["others", *(f"{ms:.1f}" for ms in rest)], ["all", *(f"{ms:.1f}" for ms in whole)]]
    return ["operator", *(row.name for row in rows)], body
