"""What each part costs, measured by workers: every chunk of parts is a task with the model, the samples and the metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from attnquant.executors import Workers, run_tasks
from attnquant.saving import to_proto
from attnquant.tuning.judge import Judge
from attnquant.tuning.parts import Part, switched

CHUNK = 8
"""Parts of one task: a lost worker costs the ranking of so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A task."""

    model: bytes
    """The Q/DQ model as the host writes it, a ModelProto."""
    parts: tuple[Part, ...]
    judge: Judge


def scores_of(chunk: Chunk) -> list[float]:
    """The judge's score with each part of a chunk alone float."""
    model = ir.from_proto(onnx.ModelProto.FromString(chunk.model))
    judge = chunk.judge
    with switched(model, chunk.parts) as switches:
        return [
            judge.bound.score(judge.of(lambda sample, name=part.name: switches.run(sample, [name])))  # type: ignore[misc]
            for part in chunk.parts
        ]


def spread_scores(
    model: ir.Model, parts: Sequence[Part], judge: Judge, workers: Workers, stage: Callable[[str], None]
) -> dict[str, float]:
    """{name of a part: score with it alone float}; without those whose worker was lost.

    :raises ModelError: the model does not fit into one message (2 GB).
    :raises HostError: Ray is asked for and not installed.
    """
    content = to_proto(model).SerializeToString()
    chunks = [tuple(parts[start : start + CHUNK]) for start in range(0, len(parts), CHUNK)]
    found = run_tasks(
        scores_of, [Chunk(model=content, parts=chunk, judge=judge) for chunk in chunks],
        executor=workers.executor, workers=workers.number,
        progress=lambda number: stage(f"what each part costs: {min(number * CHUNK, len(parts))} of {len(parts)}"),
    )  # fmt: skip
    for chunk, done in zip(chunks, found, strict=True):
        if done.lost:
            stage(f"what {len(chunk)} parts cost is not known, {chunk[0].name} first: {done.lost}")
    known = [(chunk, done.value) for chunk, done in zip(chunks, found, strict=True) if done.value is not None]
    return {part.name: score for chunk, scores in known for part, score in zip(chunk, scores, strict=True)}
