"""Open a model file in its runtime with a fixed number of threads and no spinning, and time two of them as a pair."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.metrics import Array, Feeds

Run = Callable[[Mapping[str, Array]], list[Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Paired times of a model and its float original: medians in ms, speed-up as median and quartiles over the pairs.

    `work` is the median ratio of the processor times of all threads: it hardly feels what else the machine does.
    """

    float_ms: float
    model_ms: float
    speedup: float
    speedup_low: float
    speedup_high: float
    work: float
    pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """One run, in seconds of wall clock and of processor time."""

    wall: float
    cpu: float


def open_onnxruntime(path: Path, *, threads: int) -> Run:
    """A session on the CPU; threads wait without spinning, or interleaved sessions would take each other's cores."""
    session = _session(path, threads)
    return lambda feeds: [np.asarray(value) for value in session.run(None, dict(feeds))]


def open_bound(path: Path, feeds: Mapping[str, Array], *, threads: int, shared: Mapping[str, str] | None = None) -> Run:
    """As `open_onnxruntime`, by IoBinding: always these feeds, outputs allocated once, the first alone returned.

    :param shared: {output: input in whose buffer it is written}.
    """
    import onnxruntime

    session = _session(path, threads)
    names = [output.name for output in session.get_outputs()]
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    inputs = {name: value(np.ascontiguousarray(array)) for name, array in feeds.items()}
    outputs = {name: value(array) for name, array in zip(names, session.run(None, dict(feeds)), strict=True)}
    binding = session.io_binding()
    for name, item in inputs.items():
        binding.bind_ortvalue_input(name, item)
    for name, item in outputs.items():
        binding.bind_ortvalue_output(name, inputs[shared[name]] if shared and name in shared else item)

    def run(_: Mapping[str, Array]) -> list[Array]:
        session.run_with_iobinding(binding)
        return [outputs[names[0]].numpy()]

    return run


def _session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def open_openvino(path: Path, *, threads: int) -> Run:
    """A compiled model on the CPU for lowest latency, outputs in the model's order."""
    import openvino

    compiled = openvino.Core().compile_model(
        path, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    )
    request = compiled.create_infer_request()

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        found = request.infer(dict(feeds))
        return [np.array(found[port]) for port in compiled.outputs]

    return run


def open_model(path: Path, *, threads: int) -> Run:
    """OpenVINO for an .xml file, ONNX Runtime for the rest."""
    return (open_openvino if path.suffix == ".xml" else open_onnxruntime)(path, threads=threads)


def load_as_a_user_would(path: Path, feeds: Mapping[str, Array]) -> None:
    """Create a session with default options and run one sample; whatever the runtime raises comes through."""
    if path.suffix == ".xml":
        open_openvino(path, threads=0)(feeds)
        return
    import onnxruntime

    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, dict(feeds))


def paired(reference: Run, model: Run, feeds: Feeds, *, pairs: int, warmup: int = 3) -> Timing:
    """Time `reference` and `model` in turn on the same feeds, the order swapped in every second pair."""
    for _ in range(warmup):
        reference(feeds)
        model(feeds)
    times: list[tuple[Took, Took]] = []
    for index in range(pairs):
        if index % 2:
            second = took(model, feeds)
            times.append((took(reference, feeds), second))
        else:
            first = took(reference, feeds)
            times.append((first, took(model, feeds)))
    return timing(times)


def timing(times: Sequence[tuple[Took, Took]]) -> Timing:
    """Medians and quartiles of pairs (float, model)."""
    low, middle, high = np.quantile([a.wall / b.wall for a, b in times], [0.25, 0.5, 0.75])
    return Timing(
        float_ms=1e3 * statistics.median(a.wall for a, _ in times),
        model_ms=1e3 * statistics.median(b.wall for _, b in times),
        speedup=float(middle), speedup_low=float(low), speedup_high=float(high),
        work=statistics.median(a.cpu / b.cpu for a, b in times), pairs=len(times),
    )


def took(run: Run, feeds: Feeds) -> Took:
    """Wall clock and processor time of one run."""
    wall, cpu = time.perf_counter(), time.process_time()
    run(feeds)
    return Took(wall=time.perf_counter() - wall, cpu=time.process_time() - cpu)
