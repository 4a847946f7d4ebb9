"""What a module takes, by input name: example inputs, and calibration data in the forms that torch users have."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from attnquant.errors import DataError
from attnquant.feeds import Feeds, as_sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The example inputs of one call, by the names of the parameters of `forward`."""

    values: Mapping[str, Any]
    """Tensors, in the order of the parameters."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names, which those of the ONNX model's inputs are too."""
        return tuple(self.values)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The same as arrays."""
        return {name: value.detach().cpu().numpy() for name, value in self.values.items()}


def example(module: Any, raw: Any) -> Inputs:
    """The inputs of one call: a tensor or a sequence for the positional parameters, a mapping for parameters by name.

    :raises DataError: not tensors, or not what `forward` takes.
    """
    parameters = _parameters(module)
    if isinstance(raw, Mapping):
        given = dict(raw)
        unknown = [name for name in given if name not in parameters] if parameters is not None else []
        if unknown or not given:
            msg = (
                f"Example inputs: expected names of parameters of {type(module).__name__}.forward, "
                f"{parameters!r}, got {unknown or given!r}. Name every tensor as forward does."
            )
            raise DataError(msg)
        ordered = {name: given[name] for name in parameters or given if name in given}
    else:
        tensors = list(raw) if isinstance(raw, tuple | list) else [raw]
        if parameters is None or not 0 < len(tensors) <= len(parameters):
            msg = (
                f"Example inputs: expected tensors for the parameters {parameters!r} of {type(module).__name__}.forward, "
                f"got {len(tensors)}. Give them by name, as example_inputs={{name: tensor}}."
            )
            raise DataError(msg)
        ordered = dict(zip(parameters, tensors, strict=False))
    return Inputs(values={name: _tensor(value, name) for name, value in ordered.items()})


def example_from(module: Any, first: Any) -> Inputs:
    """The same of the first calibration sample: what a batch has beyond the parameters without a default is no input.

    A data loader gives labels with its pictures; a module with one required parameter takes the pictures only.
    """
    if isinstance(first, tuple | list):
        needed = _required(module)
        first = first[:needed] if 0 < needed < len(first) else first
    return example(module, first)


def named_samples(data: Iterable[Any], names: tuple[str, ...]) -> Feeds:
    """Samples by input name, from tensors, tuples and dicts of them, batches of a data loader, or {input name: array}.

    Of a mapping only the inputs are kept; of a sequence the first ones, one for each input.
    """
    feeds = Feeds(data)

    def read() -> Iterator[dict[str, np.ndarray]]:
        for index, raw in enumerate(feeds.raw()):
            where = f"sample {index}"
            if isinstance(raw, Mapping):
                yield as_sample({name: value for name, value in raw.items() if name in names} or raw, names, where)
            else:
                arrays = list(raw) if isinstance(raw, tuple | list) else [raw]
                yield as_sample(list(islice(arrays, len(names))), names, where)

    return Feeds.lazy(read)


def _parameters(module: Any) -> list[str] | None:
    """Names of the parameters of forward that take one tensor each, None where only the call can tell."""
    try:
        found = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is one.VAR_KEYWORD for one in found) and len(found) == 1:
        return None
    return [one.name for one in found if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY, one.POSITIONAL_ONLY)]


def _required(module: Any) -> int:
    found = inspect.signature(module.forward).parameters.values()
    return sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in found)


def _tensor(value: Any, name: str) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    msg = f"Example inputs, {name!r}: expected a tensor or an array, got {type(value)!r}. Let forward take tensors."
    raise DataError(msg)
