"""How fast int8 linears could make a model: the bound that a result is measured against.

    python -m benchmarks.limit MODEL [FILE...]

takes ONNX Runtime's profile of the float model, replaces every product with a constant weight by the int8 kernel of the same
shape (its time by that of the float product, both alone and in turn), leaves everything else at its float time and counts no
QuantizeLinear at all. A FILE's distance is the limit's time by its own profiled time; float model and files are run in turn,
so that what else the machine does slows both. A kernel counts only if its answer is exact: u8 x s8 saturates on x86 without
VNNI, there the u8 x u8 kernel is the bound.
"""

import math
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.executed import FLOAT_LINEARS
from benchmarks.models import MODELS
from benchmarks.profiles import NodeTime, model_and_files, profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Float time, bound, and of the float time what the linears take; ms per run."""

    float_ms: float
    linears_ms: float
    int8_ms: float
    linears: int

    @property
    def limit_ms(self) -> float:
        """The time with exact int8 kernels and nothing added."""
        return self.float_ms - self.linears_ms + self.int8_ms

    @property
    def speedup(self) -> float:
        """The bound on the speed against float."""
        return self.float_ms / self.limit_ms


def limit(nodes: list[NodeTime], *, threads: int) -> Limit:
    """The bound of a float model, of its profile."""
    linears = [(node, shape) for node in nodes if (shape := linear_shape(node)) is not None]
    return Limit(
        float_ms=sum(node.ms for node in nodes),
        linears_ms=sum(node.ms for node, _ in linears),
        int8_ms=sum(min(int8_kernel(*shape, threads=threads), 1.0) * node.ms for node, shape in linears),
        linears=len(linears),
    )


def linear_shape(node: NodeTime) -> tuple[int, int, int] | None:
    """(m, k, n) of a product with a constant weight: that one was packed beforehand, so the profile shows one shape."""
    if node.operator not in FLOAT_LINEARS:
        return None
    wide = [shape for shape in node.inputs if len(shape) >= 2]
    if len(wide) != 1:
        return None
    return math.prod(wide[0][:-1]), wide[0][-1], node.outputs[0][-1]


@cache
def int8_kernel(m: int, k: int, n: int, *, threads: int) -> float:
    """Time of the fastest exact com.microsoft MatMulIntegerToFloat [m, k] x [k, n], by that of the float MatMul.

    With per-column scales and a bias. All are run in turn.
    """
    rng = np.random.default_rng(0)
    a, w = rng.integers(0, 256, (m, k)), rng.integers(-127, 128, (k, n))
    exact = ((a - 128) @ w).astype(np.float64)
    feeds: dict[str, Any] = {"a": a.astype(np.uint8)}
    with tempfile.TemporaryDirectory() as folder:
        models = [(Path(folder) / "float.onnx", {"a": a.astype(np.float32)})]
        onnx.save(_float_model(w), models[0][0])
        for signed in (True, False):
            path = Path(folder) / f"{signed}.onnx"
            onnx.save(_kernel_model(w, signed=signed), path)
            if np.allclose(_run(path, feeds), exact, rtol=1e-4, atol=1e-2):
                models.append((path, feeds))
        runs = profiles(models, threads=threads, runs=30)
    times = [sum(node.ms for node in nodes if node.operator in ("MatMul", "MatMulIntegerToFloat")) for nodes in runs]
    return min(times[1:]) / times[0]


def _run(path: Path, feeds: dict[str, Any]) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


def _kernel_model(w: Any, *, signed: bool) -> onnx.ModelProto:
    k, n = w.shape
    constants = {
        "w": w.astype(np.int8) if signed else (w + 128).astype(np.uint8),
        "a_scale": np.float32(1), "w_scale": np.ones(n, np.float32), "a_zero": np.uint8(128),
        "w_zero": np.zeros(n, np.int8) if signed else np.full(n, 128, np.uint8), "bias": np.zeros(n, np.float32),
    }
    names = ["a", "w", "a_scale", "w_scale", "a_zero", "w_zero", "bias"]
    graph = helper.make_graph(
        [helper.make_node("MatMulIntegerToFloat", names, ["y"], domain="com.microsoft")], "kernel",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, ["m", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _float_model(w: Any) -> onnx.ModelProto:
    k, n = w.shape
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "w"], ["y"])], "product",
        [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["m", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [numpy_helper.from_array(w.astype(np.float32), "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def distance(reference: Path, path: Path, feeds: Any, *, threads: int, runs: int = 20) -> dict[str, float]:
    """{"speedup": the bound on the speed against float, "reached": the bound's time by the profiled time of the file}."""
    first, second = profiles([(reference, feeds), (path, feeds)], threads=threads, runs=runs)
    found = limit(first, threads=threads)
    return {"speedup": found.speedup, "reached": found.limit_ms / sum(node.ms for node in second)}


def main(arguments: list[str]) -> int:
    """Print the bound of a model and the distance of each file to it."""
    given = model_and_files("benchmarks.limit", arguments)
    model = MODELS[given.model]
    feeds = model.timed()
    paths = [(path, feeds) for path in (model.make(), *given.files)]
    first, *others = profiles(paths, threads=given.threads, runs=given.runs)
    found = limit(first, threads=given.threads)
    print(
        f"{given.model}: float {found.float_ms:.1f} ms, of it {found.linears} linears {found.linears_ms:.1f} ms; "
        f"their int8 kernels {found.int8_ms:.1f} ms; limit {found.limit_ms:.1f} ms = {found.speedup:.2f} x float"
    )
    for path, nodes in zip(given.files, others, strict=True):
        ms = sum(node.ms for node in nodes)
        print(f"{path.name}: {ms:.1f} ms, {found.float_ms / ms:.2f} x float, {found.limit_ms / ms:.2f} of the limit")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
