"""Does a decoder with a cache say the same token by token as at once: prefill against decode steps, float and quantized.

Prefill of N tokens is held against prefill of N - k tokens and k steps of one token each, every step reading the cache that
the one before it returned. What differs between the two ways of one model is the cache's doing alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import data as samples_of
from attnquant import model as models
from attnquant import runtime
from attnquant.errors import DataError, ModelError
from attnquant.feeds import Sample
from attnquant.graph import tensor_name
from attnquant.kvcache import forms
from attnquant.measures import Likeness, is_float, worst_snr
from attnquant.providers import chosen, session
from attnquant.recognition import recognize
from attnquant.roles import PortRole
from attnquant.verification.outputs import compared_names

EQUAL_DB = 60.0
"""SNR from which two ways of a float model are the same but for rounding; HALF_DB in half precision."""
HALF_DB = 30.0
_SLACK_DB = 3.0
_CACHES = ((PortRole.PAST_KEY, PortRole.PRESENT_KEY), (PortRole.PAST_VALUE, PortRole.PRESENT_VALUE))
_LENGTH = -2  # axis of positions of a cache (batch, heads, positions, channels)

Arrays = Mapping[str, np.ndarray]


def decode(
    float_model: models.Source,
    quantized_model: models.Source,
    prompts: Iterable[Any],
    *,
    steps: int,
    whole: Sequence[str] | None = None,
    provider: str = "cpu",
) -> "DecodingReport":
    """Hold prefill against decode steps in both models.

    :param prompts: Samples of one prefill each: N new tokens, and caches (batch, heads, past, channels) that are empty or
        lie before the prompt. N should differ from other sizes, as an encoder's length.
    :param steps: How many of the last tokens to decode one by one: 1 to N - 1.
    :param whole: Inputs that run over past and new tokens on their last axis, as attention masks do; None for those with
        "mask" in their name. Axes of N of other inputs run over the new tokens.
    :raises ModelError: no cache goes in and comes out, or a model does not run.
    :raises DataError: a prompt is too short.
    """
    (name,) = chosen([provider])
    first, second = models.load(float_model), models.load(quantized_model)
    names = compared_names(first, second)
    feeds = samples_of.checked(samples_of.materialize(prompts, inputs=samples_of.input_names(first)), first)
    way = _Way(caches=_caches(first, samples_of.first_sample(feeds)), whole=whole, steps=steps)
    sums = [_Sums() for _ in range(steps)]
    store, _ = forms(second)
    with session(first, name) as reference, session(second, name) as quantized:
        for sample in feeds:
            ours, theirs = way.walk(reference, sample, names), way.walk(quantized, store(sample), names)
            for one, (at_once, stepped), (other, other_stepped) in zip(sums, ours, theirs, strict=True):
                one.add(at_once, stepped, other, other_stepped)
    half = any(value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) for value in first.graph.outputs)
    limit = HALF_DB if half else EQUAL_DB
    return DecodingReport(steps=tuple(one.step(index - steps) for index, one in enumerate(sums)), limit_db=limit)


def _caches(model: ir.Model, sample: Sample) -> dict[str, str]:
    """{input: output} of every cache of self-attention that goes in and comes out."""
    inputs = {tensor_name(value) for value in model.graph.inputs}
    outputs = {tensor_name(value) for value in model.graph.outputs}
    found = {}
    for site in recognize(model, feeds=sample).sites:
        for past, present in _CACHES:
            if past in site.ports and present in site.ports:
                pair = site.ports[past].tensor, site.ports[present].tensor
                if pair[0] in inputs and pair[1] in outputs:
                    found[pair[0]] = pair[1]
    if not found:
        msg = "Decoding: expected an attention whose past is a model input and whose present is an output, found none. "
        raise ModelError(msg + "Export the model with its cache.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a prompt is cut into prefill and steps."""

    caches: Mapping[str, str]
    whole: Sequence[str] | None
    steps: int

    def walk(self, made: Any, sample: Sample, names: Sequence[str]) -> Iterator[tuple[Arrays, Arrays]]:
        """(outputs of the prefill at a position, outputs of the step there) for each of the last positions."""
        at_once = runtime.run_session(made, sample)
        past, present = next(iter(self.caches.items()))
        before = sample[past].shape[_LENGTH]
        count = at_once[present].shape[_LENGTH] - before
        if count <= self.steps or self.steps < 1:
            msg = (
                f"Decoding: expected 1 step or more and prompts of more tokens, got {self.steps} steps and {count} tokens. "
            )
            raise DataError(msg + "Ask for fewer steps.")
        told = [
            name for name in names
            if name not in self.caches.values() and is_float(at_once[name]) and count in at_once[name].shape[1:]
        ]  # fmt: skip
        state = runtime.run_session(made, self._part(sample, sample, before, count, slice(0, count - self.steps)))
        for index in range(count - self.steps, count):
            held = {name: state[output] for name, output in self.caches.items()}
            state = runtime.run_session(made, self._part(sample, held, before, count, slice(index, index + 1)))
            yield (
                {name: at_once[name].take(index, axis=_axis(at_once[name], count)) for name in told},
                {name: state[name].take(-1, axis=_axis(at_once[name], count)) for name in told},
            )

    def _part(self, sample: Sample, held: Arrays, before: int, count: int, new: slice) -> dict[str, np.ndarray]:
        """Inputs for some of the new tokens, behind a cache."""
        feeds = {}
        for name, array in sample.items():
            if name in self.caches:
                feeds[name] = held[name]
                continue
            whole = "mask" in name.lower() if self.whole is None else name in self.whole
            last = array.ndim - 1
            cuts = [slice(None)] * array.ndim
            if whole and array.shape[last] == before + count:
                cuts[last] = slice(0, before + new.stop)
            for axis, size in enumerate(array.shape):
                if size == count and (axis > 0 or array.ndim == 1) and not (whole and axis == last):
                    cuts[axis] = new
                    break
            feeds[name] = np.ascontiguousarray(array[tuple(cuts)])
        return feeds


def _axis(array: np.ndarray, count: int) -> int:
    """The axis of positions of an output, behind the batch."""
    return array.shape.index(count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingStep:
    """One of the last positions, over all prompts; the worst output counts."""

    position: int
    """Counted from the end: -1 is the last token."""
    float_db: float | None
    """The float model's step against its prefill."""
    quantized_db: float | None
    """The quantized model's step against its own prefill."""
    error_db: float | None
    """The quantized model's step against the float model's."""
    prefill_error_db: float | None
    """The quantized model's prefill against the float model's: what quantizing costs without any cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingReport:
    """What `decode` found."""

    steps: tuple[DecodingStep, ...]
    limit_db: float
    """What the float model's steps must reach."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Steps at which a way through the cache is another model: one sentence each."""
        return tuple(sentence for step in self.steps for sentence in self._faults(step))

    @property
    def ok(self) -> bool:
        """Both models say the same step by step as at once, the quantized one as far as it is the float one's."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """JSON values: {"ok", "failures", "limit_db", "steps": [{"position", "float_db", ...}]}."""
        steps = [asdict(step) for step in self.steps]
        return {"ok": self.ok, "failures": list(self.failures), "limit_db": self.limit_db, "steps": steps}

    def _faults(self, step: DecodingStep) -> Iterator[str]:
        where = f"token {step.position}"
        if step.float_db is not None and step.float_db < self.limit_db:
            yield f"{where}: the float model's step differs from its prefill: {step.float_db:.1f} dB"
        if step.quantized_db is None or step.prefill_error_db is None:
            return
        if step.quantized_db < min(step.prefill_error_db - _SLACK_DB, self.limit_db):
            yield (
                f"{where}: the quantized model's step is at {step.quantized_db:.1f} dB against its prefill, which is at "
                f"{step.prefill_error_db:.1f} dB against the float model's"
            )


@dataclass(slots=True)
class _Sums:
    """One position; by output, for each of the four comparisons."""

    sums: tuple[dict[str, Likeness], ...] = field(default_factory=lambda: ({}, {}, {}, {}))

    def add(self, at_once: Arrays, stepped: Arrays, other: Arrays, other_stepped: Arrays) -> None:
        """Float prefill and step, quantized prefill and step."""
        pairs = ((at_once, stepped), (other, other_stepped), (stepped, other_stepped), (at_once, other))
        for found, (x, y) in zip(self.sums, pairs, strict=True):
            for name in x:
                found.setdefault(name, Likeness()).add(x[name], y[name])

    def step(self, position: int) -> DecodingStep:
        """The row of the report."""
        ours, theirs, error, prefill = (worst_snr(found.values()) for found in self.sums)
        return DecodingStep(position=position, float_db=ours, quantized_db=theirs, error_db=error, prefill_error_db=prefill)
