"""How much faster the int8 products of ONNX Runtime are than its float ones on this CPU: what no quantized model can pass.

    python -m benchmarks.kernels

times one product each of MiniLM's and DINOv2-S's shapes, uint8 by int8 and uint8 by uint8 against float32, interleaved, and
Q K^T of DINOv2-S and Whisper, whose operands are both computed. CPUs of one instruction set differ by a factor of two.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

SHAPES = ((128, 384, 1536), (128, 1536, 384), (257, 384, 1536), (257, 1536, 384), (257, 384, 384))
"""(rows, inner, columns)"""
SCORES = ((6, 257, 64, 257), (6, 1500, 64, 1500))
"""(heads, rows, inner, columns)"""
PAIRS = 60
_WARM = 5


def product(shape: tuple[int, ...], kind: str) -> onnx.ModelProto:
    """x (rows, inner) by a constant of type `kind`: MatMul in float32, or MatMulInteger of uint8 by int8 or uint8.

    uint8 has the zero point 128 for each column, as export_onnx writes it. With heads in front both operands are inputs, and
    the zero point is one number.
    """
    *heads, rows, inner, columns = shape
    whole = kind != "float32"
    kinds = (TensorProto.UINT8, TensorProto.INT32) if whole else (TensorProto.FLOAT, TensorProto.FLOAT)
    zero = 128 if kind == "uint8" else 0
    right = numpy_helper.from_array(operand(shape, kind), "w")
    points = [numpy_helper.from_array(np.full(() if heads else columns, zero, kind), "z")] if zero else []
    names = ["x", "w", "", "z"] if zero else ["x", "w"]
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger" if whole else "MatMul", names, ["y"])], "product",
        [helper.make_tensor_value_info("x", kinds[0], [*heads, rows, inner])]
        + [helper.make_tensor_value_info("w", right.data_type, right.dims)] * bool(heads),
        [helper.make_tensor_value_info("y", kinds[1], [*heads, rows, columns])], points if heads else [right, *points],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def operand(shape: tuple[int, ...], kind: str) -> np.ndarray:
    """What stands on the right, within 7 bits around its zero point."""
    zero = 128 if kind == "uint8" else 0
    return (np.random.default_rng(0).integers(-63, 64, (*shape[:-3], *shape[-2:])) + zero).astype(kind)


def runner(shape: tuple[int, ...], kind: str, threads: int) -> Callable[[], Any]:
    """One run in a session of so many threads without spinning."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(product(shape, kind).SerializeToString(), options)
    x = np.random.default_rng(1).integers(0, 255, shape[:-1]).astype(np.float32 if kind == "float32" else np.uint8)
    feeds = {"x": x, "w": operand(shape, kind)} if len(shape) > 3 else {"x": x}
    return lambda: session.run(None, feeds)


def seconds(run: Callable[[], Any]) -> float:
    """Wall clock of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio(shape: tuple[int, ...], threads: int, kind: str = "int8") -> tuple[float, float]:
    """(medians of float seconds, of float over the integer product) over interleaved pairs."""
    first, second = runner(shape, "float32", threads), runner(shape, kind, threads)
    times = [(seconds(first), seconds(second)) for _ in range(PAIRS + _WARM)][_WARM:]
    return statistics.median(a for a, _ in times), statistics.median(a / b for a, b in times)


@cache
def machine_ratio() -> float:
    """Float over int8 on one thread, the median of the shapes."""
    return statistics.median(ratio(shape, 1)[1] for shape in SHAPES)


if __name__ == "__main__":
    _head = ("(heads x) rows x inner x columns", "threads", "float ms", "float GMAC/s", "int8 is faster by", "uint8 by")
    _table = Table(*_head, box=box.MARKDOWN)
    for _shape in (*SHAPES, *SCORES):
        for _threads in (1, 2):
            _took, _faster = ratio(_shape, _threads)
            _unsigned = ratio(_shape, _threads, "uint8")[1]
            _speed = np.prod(_shape) / _took / 1e9
            _cells = (" x ".join(map(str, _shape)), str(_threads), f"{1e3 * _took:.2f}", f"{_speed:.0f}", f"{_faster:.2f}x")
            _cells = (*_cells, f"{_unsigned:.2f}x")
            _table.add_row(*_cells)
    Console(width=120).print(_table)
