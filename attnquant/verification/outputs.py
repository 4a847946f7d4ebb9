"""Outputs of both models on every provider, sample by sample; nothing is held but sums and a few reference outputs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.errors import DataError, ModelError
from attnquant.feeds import Sample
from attnquant.kvcache import forms
from attnquant.measures import OutputSums, is_float, logits_outputs
from attnquant.providers import session

_HELD_BYTES = 2**26

Arrays = Mapping[str, np.ndarray]


@dataclass(slots=True)
class OutputRun:
    """What running the two models gave."""

    providers: dict[str, dict[str, OutputSums]]
    """By provider and output: quantized against float model on the same provider."""
    between: dict[tuple[str, str], dict[str, OutputSums]]
    """The quantized model on the second provider against the first."""
    references: dict[str, list[Arrays]] = field(default_factory=dict)
    """Outputs of the float model for the first samples, by provider."""
    samples: int = 0


def compared_names(reference: ir.Model, quantized: ir.Model) -> tuple[str, ...]:
    """Outputs of both models, in the order of the float one.

    :raises ModelError: the quantized model lacks one, or takes an input that the float model does not.
    """
    names = tuple(value.name or "" for value in reference.graph.outputs)
    other = [value.name or "" for value in quantized.graph.outputs]
    missing = [name for name in names if name not in other]
    if missing:
        msg = f"Quantized model: expected the float model's outputs {list(names)!r}, {missing!r} is not among {other!r}. "
        raise ModelError(msg + "Compare a model with its own quantized form.")
    inputs = {value.name for value in reference.graph.inputs}
    strange = [value.name for value in quantized.graph.inputs if value.name not in inputs and not value.is_initializer()]
    if strange:
        msg = f"Quantized model: expected the float model's inputs {sorted(map(str, inputs))!r}, it takes {strange!r} too. "
        raise ModelError(msg + "Compare a model with its own quantized form.")
    return names


def run_outputs(
    reference: ir.Model,
    quantized: ir.Model,
    data: Iterable[Sample],
    providers: Sequence[str],
    *,
    hold: int,
    tick: Callable[[int], None],
) -> OutputRun:
    """Run both models on every provider.

    :param hold: Keep the float outputs of so many samples (fewer where they are large).
    :param tick: Called with the number of samples done.
    :raises ModelError: a model does not load or run.
    :raises DataError: there is no sample.
    """
    names = compared_names(reference, quantized)
    pairs = [(first, second) for index, first in enumerate(providers) for second in providers[index + 1 :]]
    store, restore = forms(quantized)
    found = OutputRun(providers={name: {} for name in providers}, between={pair: {} for pair in pairs})
    with ExitStack() as stack:
        sessions = {
            name: (stack.enter_context(session(reference, name)), stack.enter_context(session(quantized, name)))
            for name in providers
        }
        for sample in data:
            results: dict[str, Arrays] = {}
            for provider, (first, second) in sessions.items():
                expected, got = runtime.run_session(first, sample), runtime.run_session(second, store(sample))
                got = restore(got)
                _add(found.providers[provider], names, expected, got)
                _hold(found.references.setdefault(provider, []), expected, names, hold, found.samples)
                results[provider] = got
            for pair in pairs:
                _add(found.between[pair], names, results[pair[0]], results[pair[1]])
            found.samples += 1
            tick(found.samples)
    if not found.samples:
        msg = "Verification data: expected at least one sample, got none. A generator that was read before is empty."
        raise DataError(msg)
    return found


def _add(sums: dict[str, OutputSums], names: Sequence[str], expected: Arrays, got: Arrays) -> None:
    arrays = {name: (expected[name], got[name]) for name in names}
    kept = {name: pair for name, pair in arrays.items() if all(isinstance(item, np.ndarray) for item in pair)}
    if not sums:
        logits = logits_outputs({name: first for name, (first, _) in kept.items()})
        sums.update((name, OutputSums(name=name, logits=name in logits)) for name in names)
    for name, (first, second) in kept.items():
        sums[name].add(first, second)


def _hold(held: list[Arrays], outputs: Arrays, names: Sequence[str], limit: int, index: int) -> None:
    kept = {name: outputs[name] for name in names if isinstance(outputs[name], np.ndarray) and is_float(outputs[name])}
    size = sum(array.nbytes for array in kept.values())
    room = not held or (len(held) + 1) * size <= _HELD_BYTES
    if len(held) == index < limit and kept and room:
        held.append(kept)
