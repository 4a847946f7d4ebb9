"""Running a rewritten model beside the original, and giving up the sites that change an output."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.errors import HostError, ModelError
from attnquant.rewrite.result import RewriteResult, RewriteRow

Change = tuple[ir.Model, list[RewriteRow]]
Feeds = Mapping[str, np.ndarray]

TOLERANCE = 1e-4
"""Largest difference of an output, as a part of its largest absolute value."""
HALF_TOLERANCE = 2e-3
"""The same for outputs in half precision, and for bfloat16 by its shorter mantissa eight times as much."""


def keep_equal(own: ir.Model, made: Change, again: Callable[[frozenset[str]], Change], feeds: Feeds) -> RewriteResult:
    """The rewriting with every site that keeps the outputs; the others are refused with what was measured.

    :param again: Makes the rewriting with these sites only.
    """
    changed, rows = made
    try:
        expected = runtime.run(own, feeds, threads=1)
    except ModelError as problem:
        if not any(row.status != "refused" for row in rows):
            return RewriteResult(model=changed, rows=tuple(rows))
        return _uncompared(changed, rows, problem)
    taken = [row.site for row in rows if row.status != "refused"]
    if not taken or (fault := _fault(expected, changed, feeds)) is None:
        return RewriteResult(model=changed, rows=tuple(rows))
    faults = dict(_faulty(taken, fault, frozenset(), lambda kept: _fault(expected, again(kept)[0], feeds)))
    changed, kept = again(frozenset(taken) - faults.keys())
    by_site = {row.site: row for row in kept}
    final = [by_site.get(row.site) or _refused(row, faults.get(row.site)) for row in rows]
    return RewriteResult(model=changed, rows=tuple(final))


def keep_loading(own: ir.Model, made: Change, again: Callable[[frozenset[str]], Change]) -> Change:
    """The rewriting with every site that loads, where ONNX Runtime is installed and loads the model itself."""
    changed, rows = made
    taken = [row.site for row in rows if row.status != "refused"]
    if not taken or (fault := _load_fault(changed)) is None or _load_fault(own) is not None:
        return made
    faults = dict(_faulty(taken, fault, frozenset(), lambda kept: _load_fault(again(kept)[0])))
    changed, kept = again(frozenset(taken) - faults.keys())
    by_site = {row.site: row for row in kept}
    return changed, [by_site.get(row.site) or _refused(row, faults.get(row.site)) for row in rows]


def _load_fault(model: ir.Model) -> str | None:
    try:
        with runtime.session(model, threads=1):
            return None
    except ModelError as problem:
        return str(problem)
    except HostError:
        return None


def _uncompared(changed: ir.Model, rows: list[RewriteRow], problem: ModelError) -> RewriteResult:
    note = f"not compared: the model itself does not run: {problem}"
    return RewriteResult(
        model=changed,
        rows=tuple(row if row.status == "refused" else replace(row, reasons=(*row.reasons, note)) for row in rows),
    )


def _refused(row: RewriteRow, fault: str | None) -> RewriteRow:
    return row if fault is None else replace(row, status="refused", reasons=(fault,), tensors={})


def _faulty(
    sites: list[str], fault: str, good: frozenset[str], test: Callable[[frozenset[str]], str | None]
) -> list[tuple[str, str]]:
    """Sites that fail when they are added to the good ones: halved until one is left."""
    if len(sites) == 1:
        return [(sites[0], fault)]
    faulty: list[tuple[str, str]] = []
    for half in (sites[: len(sites) // 2], sites[len(sites) // 2 :]):
        found = test(good | frozenset(half))
        bad = [] if found is None else _faulty(half, found, good, test)
        faulty += bad
        good |= frozenset(half) - {site for site, _ in bad}
    return faulty or [(sites[-1], fault)]


def _fault(expected: Feeds, changed: ir.Model, feeds: Feeds) -> str | None:
    """What is wrong with a rewritten model in one sentence, None where it equals the original."""
    try:
        got = runtime.run(changed, feeds, threads=1)
    except ModelError as problem:
        return str(problem)
    return next((fault for name in expected if (fault := difference(name, expected[name], got[name])) is not None), None)


def difference(name: str, expected: np.ndarray, got: np.ndarray) -> str | None:
    """How an output differs by more than the tolerance of its type, None where it does not. NaN equals NaN."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"output {name!r} becomes {got.dtype} {got.shape} instead of {expected.dtype} {expected.shape}"
    if expected.dtype.kind not in "fV" and str(expected.dtype) != "bfloat16":
        return None if np.array_equal(expected, got) else f"output {name!r} changes"
    x, y = expected.astype(np.float64), got.astype(np.float64)
    if not np.array_equal(np.isfinite(x), np.isfinite(y)):
        return f"output {name!r} is not finite at other places"
    finite = np.isfinite(x)
    error = float(np.abs(x[finite] - y[finite]).max(initial=0.0))
    largest = float(np.abs(x[finite]).max(initial=0.0))
    limit = tolerance(expected.dtype) * largest
    if error <= limit:
        return None
    part = tolerance(expected.dtype)
    return f"output {name!r} differs by {error:.3g}, more than {limit:.3g} ({part:g} of its largest value)"


def tolerance(dtype: np.dtype[np.generic]) -> float:
    """The tolerance for outputs of this type."""
    if str(dtype) == "bfloat16":
        return 8 * HALF_TOLERANCE
    return HALF_TOLERANCE if dtype == np.float16 else TOLERANCE
