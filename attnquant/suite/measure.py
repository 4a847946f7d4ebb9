"""A pair of models measured: built-in metrics of their outputs, and functions of the user's."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import data as samples_of
from attnquant import model as models
from attnquant import runtime
from attnquant.errors import DataError
from attnquant.feeds import Feeds, Sample
from attnquant.providers import chosen, session
from attnquant.suite.values import BUILT_IN, Figures, Metric
from attnquant.verification.outputs import compared_names, run_outputs
from attnquant.verification.results import output_row
from attnquant.verification.values import OutputRow

Arrays = Mapping[str, np.ndarray]
Run = Callable[[Sample], Arrays]


def measured(
    float_model: models.Source,
    quantized_model: models.Source,
    samples: Iterable[Any],
    metrics: Mapping[str, Metric],
    *,
    limit: int,
    provider: str,
    where: str,
) -> dict[str, Figures]:
    """The figures of both models for every metric.

    :param samples: {input: array}, and whatever else the functions look at ("label"); at most `limit` of them.
    :raises DataError: a metric can't be computed, or the data do not fit the models.
    :raises ModelError: a model does not load or run.
    :raises HostError: ONNX Runtime or the provider is missing.
    """
    [name] = chosen([provider])
    reference, quantized = models.load(float_model), models.load(quantized_model)
    compared_names(reference, quantized)
    feeds = samples_of.materialize(samples, samples=limit, inputs=samples_of.input_names(reference))
    wanted = [metric for metric in metrics if metrics[metric].function is None]
    unknown = [metric for metric in wanted if metric not in BUILT_IN]
    if unknown:
        msg = f"{where}: {unknown!r}: expected a function for a metric that is not among {list(BUILT_IN)!r}."
        raise DataError(msg)
    reversed_ = [metric for metric in wanted if metrics[metric].better != BUILT_IN[metric][0]]
    if reversed_:
        msg = f"{where}: {reversed_!r}: expected better = {BUILT_IN[reversed_[0]][0]!r}, got the opposite."
        raise DataError(msg)
    found = built_in(reference, quantized, feeds, name, wanted, where) if wanted else {}
    own = {metric: item.function for metric, item in metrics.items() if item.function is not None}
    return found | _of_functions(reference, quantized, feeds, name, own, where)


def built_in(
    reference: ir.Model, quantized: ir.Model, feeds: Feeds, provider: str, wanted: Iterable[str], where: str
) -> dict[str, Figures]:
    """Metrics of the quantized outputs against the float ones, of the worst output each."""
    sums = run_outputs(
        reference, quantized, samples_of.checked(feeds, reference), (provider,), hold=0, tick=lambda number: None
    ).providers[provider]
    rows = [output_row(one, ()) for one in sums.values()]
    return {metric: _worst(metric, rows, where) for metric in wanted}


def function_in(spec: str, folder: Path, where: str) -> Callable[..., Any]:
    """The function that "FILE.py:function" names, the file inside `folder`.

    :raises DataError: there is no such file inside the folder, or no such function in it.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not name.isidentifier() or not file.endswith(".py"):
        msg = f"{where}: expected FILE.py:function, got {spec!r}."
        raise DataError(msg)
    path = inside(file, folder, where)
    found = importlib.util.spec_from_file_location(f"attnquant_suite_{path.stem}", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
        function = getattr(module, name)
    except Exception as problem:  # the user's own code: the cause stays attached
        msg = f"{where}: {spec!r} can't be loaded: {type(problem).__name__}: {problem!s:.300}"
        raise DataError(msg) from problem
    if not callable(function):
        msg = f"{where}: {spec!r}: expected a function, got {type(function)!r}."
        raise DataError(msg)
    return function  # type: ignore[no-any-return]


def inside(name: str, folder: Path, where: str) -> Path:
    """The existing file or folder of that name below `folder`, links followed.

    :raises DataError: it is absolute, leads out of the folder, or does not exist.
    """
    path = (folder / name).resolve()
    if Path(name).is_absolute() or not path.is_relative_to(folder.resolve()) or not name:
        msg = f"{where}: expected a path inside the folder of the suite, {str(folder)!r}, got {name!r}."
        raise DataError(msg)
    if not path.exists():
        msg = f"{where}: {name!r} does not exist in {str(folder)!r}."
        raise DataError(msg)
    return path


def _worst(metric: str, rows: Iterable[OutputRow], where: str) -> Figures:
    faults = [f"output {row.name!r}: {row.fault}" for row in rows if row.fault]
    if faults:
        msg = f"{where}: the outputs can't be compared: {'; '.join(faults)}."
        raise DataError(msg)
    values = [value for row in rows if (value := getattr(row, metric)) is not None]
    if not values:
        msg = f"{where}: no output has {metric!r}: top1 and kl are for logits, equal is for integers, the others for floats."
        raise DataError(msg)
    better, perfect = BUILT_IN[metric]
    return Figures(float_value=perfect, quantized_value=float(min(values) if better == "higher" else max(values)))


def _of_functions(
    reference: ir.Model, quantized: ir.Model, feeds: Feeds, provider: str, functions: Mapping[str, Any], where: str
) -> dict[str, Figures]:
    if not functions:
        return {}
    with ExitStack() as stack:
        runs = [_runner(stack.enter_context(session(model, provider)), reference) for model in (reference, quantized)]
        return {
            name: Figures(
                float_value=_called(function, runs[0], feeds, f"{where}, {name}"),
                quantized_value=_called(function, runs[1], feeds, f"{where}, {name}"),
            )
            for name, function in functions.items()
        }


def _runner(made: Any, reference: ir.Model) -> Run:
    def run(sample: Sample) -> Arrays:
        samples_of.check_sample(sample, reference)
        return runtime.run_session(made, sample)

    return run


def _called(function: Callable[[Run, Feeds], Any], run: Run, feeds: Feeds, where: str) -> float:
    value = function(run, feeds)
    try:
        return float(value)
    except (TypeError, ValueError):
        msg = f"{where}: expected the function to return a number, got {value!r}."
        raise DataError(msg) from None
