"""ONNX Runtime at arm's length: sessions for models of any size, and its errors as ours.

onnxruntime is an extra (`cpu` or `gpu`) and imported only when a session is made.
"""

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant.errors import AttnQuantError, HostError, ModelError
from attnquant.saving import session_source, weight_bytes

Feeds = Mapping[str, np.ndarray]

SPARED = 2**27
"""Bytes of weights up to which a session keeps its packed copy of them whatever it is asked: without it runs slower."""


def import_runtime() -> Any:
    """The onnxruntime module.

    :raises HostError: neither onnxruntime nor onnxruntime-gpu is installed.
    """
    try:
        import onnxruntime
    except ImportError as error:
        msg = "ONNX Runtime is not installed: run `pip install attnquant[cpu]`, or `attnquant[gpu]` for CUDA."
        raise HostError(msg) from error
    return onnxruntime


def operator_schemas() -> list[Any]:
    """Schemas of every operator that the installed runtime knows, onnx's own included.

    :raises HostError: ONNX Runtime is not installed.
    """
    import_runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return list(state.get_all_operator_schema())


def summary(error: Exception) -> str:
    """The telling part of an ONNX Runtime message, on one line."""
    text = " ".join(str(error).split())
    text = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"Load model from \S+ failed:\s*", "", text)
    return text if len(text) <= 600 else f"{text[:600]} ..."


@contextmanager
def session(
    model: ir.Model,
    *,
    threads: int | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    optimize: bool = True,
    spinning: bool = True,
    spare: bool = False,
    unfused: bool = False,
) -> Iterator[Any]:
    """An inference session with otherwise default options.

    :param threads: Threads of the session; None leaves the runtime's default.
    :param optimize: False switches graph optimization off: enough to read types and shapes.
    :param spinning: False lets threads without work sleep: for sessions that run in turn.
    :param spare: A large model takes less memory and a little more time.
    :param unfused: Quantizers are executed as they stand, in float, and none goes into an int8 kernel: for what was made for
        other processors, whose kernels take more (int8 activations, a scale per channel) than the CPU's.
    :raises ModelError: the model does not load; the message is the runtime's.
    """
    spare = spare and _is_large(model)
    with session_source(model) as source:
        yield _made(
            source, threads=threads, providers=providers, optimize=optimize, spinning=spinning, spare=spare, unfused=unfused,
        )  # fmt: skip


def session_of(model: ir.Model, folder: str | None = None, *, threads: int | None = None) -> Any:
    """An inference session on the CPU; one of a large model spares memory.

    :param model: Small enough for one message without its external data.
    :param folder: Where its external data lie; None where it has none.
    :raises ModelError: the model does not load; the message is the runtime's.
    """
    source = ir.to_proto(model).SerializeToString()
    return _made(source, threads=threads, folder=folder, spare=folder is not None and _is_large(model))


def _is_large(model: ir.Model) -> bool:
    return weight_bytes(model) > SPARED


def _made(
    source: bytes | str,
    *,
    threads: int | None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
    optimize: bool = True,
    spinning: bool = True,
    folder: str | None = None,
    spare: bool = False,
    unfused: bool = False,
) -> Any:
    runtime = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    if threads is not None:
        options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not spinning:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if spare:
        _spare(options)
    if unfused:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    try:
        return runtime.InferenceSession(source, options, providers=list(providers))
    except Exception as error:
        msg = f"ONNX Runtime {runtime.__version__} does not load the model at default settings: {summary(error)}"
        raise ModelError(msg) from error


def _spare(options: Any) -> None:
    """Have a session keep no second copy of its weights, and give back what a run no longer needs."""
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False


def release_memory() -> None:
    """Give memory that closed sessions freed back to the system: glibc keeps what lies below the highest block in use."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def run(
    model: ir.Model, feeds: Feeds, *, threads: int | None = None, unfused: bool = False
) -> dict[str, np.ndarray]:
    """Run one sample; returns {graph output: array}. `threads` and `unfused` as in `session`.

    :raises ModelError: the model does not load or does not run.
    """
    with session(model, threads=threads, unfused=unfused) as made:
        return run_session(made, feeds)


def run_session(made: Any, feeds: Feeds, outputs: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """Run one sample in an existing session, feeding what the model takes.

    :param outputs: Names of the outputs to fetch; None for all.
    :raises ModelError: the run fails.
    """
    names = {item.name for item in made.get_inputs()}
    wanted = [item.name for item in made.get_outputs()] if outputs is None else list(outputs)
    try:
        arrays = made.run(wanted, {name: array for name, array in feeds.items() if name in names})
    except AttnQuantError:
        raise
    except Exception as error:
        msg = f"ONNX Runtime loads the model and fails to run it: {summary(error)}"
        raise ModelError(msg) from error
    return dict(zip(wanted, arrays, strict=True))
