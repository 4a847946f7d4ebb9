"""Execution providers of ONNX Runtime by the names that people use, and whether they are really there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.errors import HostError

AUTO = "auto"
_SUFFIX = "ExecutionProvider"
_AUTO = ("cpu", "cuda")
"""What `auto` looks for."""


def chosen(asked: Sequence[str]) -> tuple[str, ...]:
    """The providers to run on, by short name, each once; "auto" stands for what is there of cpu and cuda.

    :raises HostError: a provider that was asked for is not there, or does not start on this machine.
    """
    names: list[str] = []
    for name in asked:
        wanted = name.lower().removesuffix(_SUFFIX.lower())
        if wanted == AUTO:
            names += [other for other in _AUTO if problem(other) is None]
        elif (reason := problem(wanted)) is not None:
            msg = f'Provider {name!r}: {reason}. Leave it out, or use "auto" for what is there.'
            raise HostError(msg)
        else:
            names.append(wanted)
    if not names:
        msg = f'Providers: expected at least one of {known()!r} or "auto", got {list(asked)!r}.'
        raise HostError(msg)
    return tuple(dict.fromkeys(names))


def known() -> list[str]:
    """Short names of the providers that the installed runtime was built with."""
    return [name.removesuffix(_SUFFIX).lower() for name in runtime.import_runtime().get_available_providers()]


def full_name(short: str) -> str:
    """ONNX Runtime's name of a provider that is there."""
    available: list[str] = runtime.import_runtime().get_available_providers()
    return next(name for name in available if name.removesuffix(_SUFFIX).lower() == short)


def problem(short: str) -> str | None:
    """Why a provider can't be used, None where it can: ONNX Runtime itself falls back to the CPU without an error."""
    built = known()
    if short not in built:
        return f"the installed ONNX Runtime has {', '.join(map(repr, built))} only"
    if short == "cpu":
        return None
    value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1]))
    node = ir.Node("", "Identity", [value], name="identity")
    node.outputs[0].name = "y"
    node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
    graph = ir.Graph([value], node.outputs, nodes=[node], opset_imports={"": 17}, name="probe")
    try:
        with session(ir.Model(graph, ir_version=8), short) as made:
            started: str = made.get_providers()[0]
            runtime.run_session(made, {"x": np.zeros(1, np.float32)})
    except Exception as error:  # a provider may fail in any way while it looks for its device
        return f"it does not start on this machine: {runtime.summary(error)}"
    if started == full_name(short):
        return None
    return "ONNX Runtime has it and can't start it on this machine (driver, libraries?)"


@contextmanager
def session(model: ir.Model, short: str, threads: int | None = None) -> Iterator[Any]:
    """A session on one provider; what it has no kernel for runs on the CPU.

    :raises ModelError: the model does not load.
    """
    names = tuple(dict.fromkeys((full_name(short), "CPUExecutionProvider")))
    with runtime.session(model, providers=names, threads=threads) as made:
        yield made
