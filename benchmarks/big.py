"""Peak memory of inspect, quantize and check on a generated model with external data.

    python -m benchmarks.big --gigabytes 3

writes a decoder of random weights (not sparse) to a temporary folder, runs the three commands, and prints for each the time,
the peak of its memory without the pages that are mapped from files (RssAnon of /proc), and the peak with them.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

WIDTH, HEADS, LENGTH = 2048, 16, 16


def generate(folder: Path, gigabytes: float) -> Path:
    """A pre-norm transformer of opset 23 whose linears fill this many GB of float32."""
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH)}
    shapes |= {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = max(1, round(gigabytes * 1e9 / 4 / sum(rows * columns for rows, columns in shapes.values())))
    rng = np.random.default_rng(0)
    constants = [numpy_helper.from_array(np.ones(WIDTH, np.float32), "gamma")]
    nodes: list[onnx.NodeProto] = []
    with (folder / "big.onnx.data").open("wb") as data:
        for layer in range(layers):
            for name, shape in shapes.items():
                constants.append(external(data, f"{name}{layer}", rng.standard_normal(shape, np.float32) / shape[0] ** 0.5))
            nodes += layer_nodes(layer)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "s", WIDTH]) for name in ("x0", f"x{layers}")]
    graph = helper.make_graph(nodes, "big", info[:1], info[1:], constants)
    path = folder / "big.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def external(data: "object", name: str, array: np.ndarray) -> onnx.TensorProto:
    """An initializer whose bytes are appended to an open file."""
    tensor = onnx.TensorProto(name=name, data_type=TensorProto.FLOAT, dims=array.shape, data_location=TensorProto.EXTERNAL)
    offset = data.tell()  # type: ignore[attr-defined]
    data.write(array.tobytes())  # type: ignore[attr-defined]
    for key, value in {"location": "big.onnx.data", "offset": offset, "length": array.nbytes}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def layer_nodes(layer: int) -> list[onnx.NodeProto]:
    """LayerNorm, attention, LayerNorm and a GELU feed-forward, each with its residual."""

    def op(kind: str, inputs: list[str], name: str, **attributes: object) -> onnx.NodeProto:
        return helper.make_node(kind, [f"{item}{layer}" if item != "gamma" else item for item in inputs],
                                [f"{name}{layer}"], name=f"{kind}_{name}{layer}", **attributes)  # fmt: skip

    nodes = [op("LayerNormalization", ["x", "gamma"], "n")]
    nodes += [op("MatMul", ["n", role], f"p{role}") for role in "qkv"]
    nodes += [
        op("Attention", ["pq", "pk", "pv"], "c", q_num_heads=HEADS, kv_num_heads=HEADS),
        op("MatMul", ["c", "o"], "po"), op("Add", ["x", "po"], "h"), op("LayerNormalization", ["h", "gamma"], "m"),
        op("MatMul", ["m", "up"], "pu"), op("Gelu", ["pu"], "g"), op("MatMul", ["g", "down"], "pd"),
        op("Add", ["h", "pd"], "y"),
    ]  # fmt: skip
    nodes[-1].output[0] = f"x{layer + 1}"
    return nodes


def watched(command: list[str]) -> tuple[int, float, float, float]:
    """(exit code, seconds, peak of anonymous memory, peak of all resident memory) of a command, in GB."""
    start, own, whole = time.perf_counter(), 0, 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            own = max(own, int(fields.get("RssAnon", "0 kB").split()[0]))
            whole = max(whole, int(fields.get("VmHWM", "0 kB").split()[0]))
            time.sleep(0.05)
    return process.returncode, time.perf_counter() - start, own * 1024 / 1e9, whole * 1024 / 1e9


def main(arguments: list[str]) -> int:
    """Print the table; 1 where a command fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.big")
    parser.add_argument("--gigabytes", type=float, default=3)
    parser.add_argument("--folder", type=Path, help="for the models; a temporary one if it is not given")
    given = parser.parse_args(arguments)
    table = Table("command", "exit code", "seconds", "peak GB", "of the model", "with mapped pages", box=box.MARKDOWN)
    failed = False
    with tempfile.TemporaryDirectory(prefix="attnquant-big-", dir=given.folder) as name:
        folder = Path(name)
        model, result, samples = generate(folder, given.gigabytes), folder / "out" / "big.int8.onnx", folder / "samples"
        size = (folder / "big.onnx.data").stat().st_size / 1e9
        for made in (samples, result.parent):
            made.mkdir()
        for index in range(2):
            rng = np.random.default_rng(index)
            np.savez(samples / f"{index}.npz", x0=rng.standard_normal((1, LENGTH, WIDTH), np.float32))
        own = [sys.executable, "-m", "attnquant"]
        for words in (
            ["inspect", str(model)], ["quantize", str(model), "--data", str(samples), "-o", str(result)],
            ["check", str(result)],
        ):  # fmt: skip
            code, seconds, peak, whole = watched([*own, *words])
            failed |= code != 0
            table.add_row(words[0], str(code), f"{seconds:.0f}", f"{peak:.2f}", f"{peak / size:.2f}x", f"{whole:.2f}")
        written = sum(file.stat().st_size for file in result.parent.iterdir()) / 1e9
        print(f"{size:.2f} GB of weights; quantized: {written:.2f} GB in {len(list(result.parent.iterdir()))} files")
    Console(width=120).print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
