"""What is known of a model's tensors for one sample: results of reductions, and what follows from finer ones."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """One node (behind Abs where `absolute`) on one tensor; equal reductions of a tensor are one node."""

    op_type: str
    axes: tuple[int, ...] | None = None
    """None: all of them."""
    keepdims: bool = True
    absolute: bool = False


Key = tuple[str, Reduction]
"""A tensor and what is computed of it."""
Found = dict[str, dict[Reduction, np.ndarray]]
"""{tensor: {what was computed of it: result}}, of one sample."""

SHAPE, WHOLE = Reduction(op_type="Shape"), Reduction(op_type="Identity")


def _squares(array: np.ndarray, *, axis: tuple[int, ...] | None, keepdims: bool) -> np.ndarray:
    return np.asarray(np.square(array).sum(axis=axis, keepdims=keepdims))


_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "ReduceMin": np.min, "ReduceMax": np.max, "ReduceMean": np.mean, "ReduceSumSquare": _squares,
}  # fmt: skip


def told(found: Found, key: Key) -> np.ndarray:
    """What was found of exactly this key, or reduced from the finer thing that says as much.

    Requires `has(found, key)` and a tensor with elements.
    """
    name, wanted = key
    of_tensor = found[name]
    if wanted in of_tensor:
        return of_tensor[wanted]
    finer = next(array for kept, array in of_tensor.items() if _is_finer(kept, wanted))
    return np.asarray(_NUMPY[wanted.op_type](finer, axis=wanted.axes, keepdims=wanted.keepdims))


def has(found: Found, key: Key) -> bool:
    """Whether `key` can be told: a tensor without elements has nothing to tell."""
    name, wanted = key
    of_tensor = found.get(name)
    if of_tensor is None:
        return False
    return wanted in of_tensor or not of_tensor[SHAPE].all() or any(_is_finer(kept, wanted) for kept in of_tensor)


def _is_finer(kept: Reduction, wanted: Reduction) -> bool:
    if kept.op_type != wanted.op_type or wanted.op_type not in ("ReduceMin", "ReduceMax") or not kept.keepdims:
        return False
    return kept.axes is not None and wanted.axes is not None and set(kept.axes) < set(wanted.axes)


def reduced(array: np.ndarray, wanted: Reduction) -> np.ndarray:
    """What the node of a reduction computes, in numpy."""
    if wanted.op_type == "Identity":
        return array
    if wanted.op_type == "Shape":
        return np.asarray(array.shape, np.int64)
    made = _NUMPY[wanted.op_type](array, axis=wanted.axes, keepdims=wanted.keepdims)
    return np.asarray(made, array.dtype)
