"""The speed gate: float and int8 of each group of parts timed on this machine, and float kept where int8 loses."""

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import probe
from attnquant.errors import AttnQuantError, RecipeError
from attnquant.graph import constant
from attnquant.pace import SLIGHT, GateRow, Pace
from attnquant.runtime import import_runtime
from attnquant.target import Target, processor
from attnquant.tuning.groups import Arrays, Group, fitting, groups_of, signature, small_model, without_quantizers
from attnquant.tuning.parts import Part

SECONDS = 60.0
"""For timing all groups; each shape gets its share of what is left."""
WHOLE_SECONDS = 15.0
"""For timing a whole model, of which there are three pairs at most."""

Race = Callable[[ir.Model, ir.Model, Mapping[str, np.ndarray], float], Pace]
"""(float model, int8 model, sample, seconds) -> their times."""
Finish = Callable[[ir.Model], ir.Model]
"""A small Q/DQ model in the target's form."""


def require_here(target: Target) -> None:
    """The gate times what runs on this machine's CPU.

    :raises RecipeError: the target is another runtime.
    """
    if target.name != "onnxruntime-cpu":
        msg = f"gate: expected the target onnxruntime-cpu, whose runtime is timed on this machine, got {target.name!r}."
        raise RecipeError(f"{msg} Leave the gate out, or name that target.")


def rows(
    model: ir.Model, parts: Sequence[Part], sample: Mapping[str, np.ndarray], finish: Finish, race: Race,
    *, whole_ms: float = 0.0, stage: Callable[[str], None] = lambda text: None,
) -> tuple[GateRow, ...]:  # fmt: skip
    """Time every shape of group once, in at most about `SECONDS`.

    :param model: A Q/DQ model as the host writes it, weights in float; it is not changed.
    :param sample: Sizes and values of what goes into each group are those of a run on it.
    :param whole_ms: Time of the whole float model, of which a loss must be `SLIGHT` at least.
    """
    end = time.monotonic() + SECONDS
    groups = groups_of(model, parts)
    wanted = dict.fromkeys(value for group in groups for value in group.inputs)
    arrays = probe.arrays(model, wanted, sample, optimize=False)
    kinds = list(_kinds([group for group in groups if _known(group, arrays)], arrays))
    found = []
    for number, kind in enumerate(kinds):
        stage(f"timing float and int8: {number + 1} of {len(kinds)}")
        left = max(0.0, end - time.monotonic()) / (len(kinds) - number)
        row = _timed(model, kind, arrays, finish, race, left)
        found.append(replace(row, slight=_is_slight(row, kind, whole_ms)))
    unknown = [group for group in groups if not _known(group, arrays)]
    why = {True: "its inputs are not known", False: "its result is a constant"}
    return (*found, *(_row([group], {}, why=why[bool(group.outputs)]) for group in unknown))


def _is_slight(row: GateRow, kind: Sequence[Group], whole_ms: float) -> bool:
    if row.pace is None or row.pace.verdict != "float":
        return False
    return (row.pace.int8_ms - row.pace.float_ms) * len(kind) / len(fitting(kind)) < SLIGHT * whole_ms


def _known(group: Group, arrays: Arrays) -> bool:
    return bool(group.outputs) and all(value in arrays for value in group.inputs)


def _kinds(groups: Sequence[Group], arrays: Arrays) -> Iterator[list[Group]]:
    found: dict[object, list[Group]] = {}
    for group in groups:
        found.setdefault(signature(group, arrays), []).append(group)
    yield from found.values()


def _timed(
    model: ir.Model, kind: Sequence[Group], arrays: Arrays, finish: Finish, race: Race, seconds: float
) -> GateRow:
    first = kind[0]
    if seconds <= 0:
        return _row(kind, arrays, why="time ran out")
    quantized = small_model(model, fitting(kind))
    sample = {value.name or "": arrays[value] for value in first.inputs}
    try:
        plain = without_quantizers(models.copy(quantized))
        return _row(kind, arrays, pace=race(plain, finish(quantized), sample, seconds))
    except AttnQuantError as problem:  # what can't be run alone is decided by the recipe
        return _row(kind, arrays, why=str(problem)[:200])


def _row(kind: Sequence[Group], arrays: Arrays, *, pace: Pace | None = None, why: str = "") -> GateRow:
    parts = tuple(part.name for group in kind for part in group.parts)
    return GateRow(parts=parts, sizes=_sizes(kind[0], arrays), pace=pace, why=why)


def _sizes(group: Group, arrays: Arrays) -> str:
    reads = dict.fromkeys(value for node in group.nodes for value in node.inputs if value is not None)
    weights = [array.shape for value in reads if (array := constant(value)) is not None and array.ndim > 1]
    inputs = [arrays[value].shape for value in group.inputs if value in arrays]
    return ", ".join("x".join(map(str, shape)) for shape in (*inputs, *weights))


def machine() -> str:
    """The processor's name and what its int8 products are made of."""
    fields = processor()
    if not fields:
        return platform.machine()
    flags = fields.get("flags", "").split()
    kinds = [flag for flag in ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "amx_int8") if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(kinds) or platform.machine()})"


def runtime_name() -> str:
    """ONNX Runtime with its version."""
    return f"onnxruntime {import_runtime().__version__}"


def threads() -> int:
    """Cores that this process may use: ONNX Runtime's own default is one thread each."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
