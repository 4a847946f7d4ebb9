"""Folders of models with ground truth: the committed selection, or those that ATTNQUANT_CORPUS and ATTNQUANT_CASES name.

A folder holds truth.json, {file: {"attentions": [...], ...}}, and feeds/NAME.npz (one valid sample for each model) or
feeds/FILE.CALL.npz (one for each call).
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from attnquant import runtime
from attnquant.errors import ModelError
from attnquant.model import load

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file with its truth and one sample for each call."""

    path: Path
    truth: dict[str, Any]

    @property
    def samples(self) -> list[dict[str, np.ndarray]]:
        feeds = self.path.parent / "feeds"
        if "calls" in self.truth:
            files = [feeds / f"{self.path.stem}.{call}.npz" for call in self.truth["calls"]]
        else:
            files = [feeds / f"{self.truth.get('model', self.path.name.split('-')[0])}.npz"]
        return [dict(np.load(file)) for file in files]

    def __str__(self) -> str:
        return self.path.name


def entries(variable: str, committed: str) -> list[Entry]:
    """Entries of the folder that an environment variable names, of the committed one where it is not set."""
    folder = Path(os.environ.get(variable) or HERE / committed)
    truth = json.loads((folder / "truth.json").read_text())
    return [Entry(path=folder / name, truth=content) for name, content in sorted(truth.items())]


@cache
def runnable(entry_path: Path) -> tuple[list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]] | str:
    """(samples, float outputs) of a model, at batch 1 where the runtime takes no more; its error where it never runs."""
    truth = json.loads((entry_path.parent / "truth.json").read_text())[entry_path.name]
    samples = Entry(path=entry_path, truth=truth).samples
    model, error = load(entry_path), ""
    for rows in (samples, [{name: array[:1] for name, array in sample.items()} for sample in samples]):
        try:
            return rows, [runtime.run(model, sample, threads=1) for sample in rows]
        except ModelError as problem:
            error = str(problem)
    return error


def snr(expected: list[dict[str, np.ndarray]], got: list[dict[str, np.ndarray]]) -> float:
    """10 log10(sum x^2 / sum (x - y)^2) in dB over all samples, of the worst float output; integers must be equal."""
    worst = np.inf
    for name in expected[0]:
        if expected[0][name].dtype.kind != "f":
            assert all(np.array_equal(one[name], other[name]) for one, other in zip(expected, got, strict=True)), name
            continue
        x, y = (np.concatenate([one[name].ravel().astype(np.float64) for one in side]) for side in (expected, got))
        error = float(((x - y) ** 2).sum())
        worst = min(worst, 10 * np.log10(float((x**2).sum()) / error) if error else np.inf)
    return worst


def initializer(model: onnx.ModelProto, name: str) -> np.ndarray:
    """The data of one initializer."""
    return next(onnx.numpy_helper.to_array(item) for item in model.graph.initializer if item.name == name)
