"""Half precision variants of every model of the corpus and the cases through quantize: loads, SNR, sizes, types.

    python -m benchmarks.half [--only TEXT] [--kinds fp16 bf16] [--part K/N]

Takes the committed models, or the folders that ATTNQUANT_CORPUS and ATTNQUANT_CASES name. fp16 variants are made by
onnxconverter-common's float16 (fetched by pip into the cache, never installed) with its list of operators that stay float32;
models that are half already are taken as they are. bf16 variants are made by benchmarks/bfloat16.py. Each model runs in a
process of its own: a runtime that crashes is a row. Prints a table and what is not as wanted; exits 1 if anything is.

Wanted of fp16: the result loads at default settings, SNR >= 20 dB against the fp16 model, `check` passes. Of bf16, for
onnxruntime-cuda: the sites and roles of the float32 model, no types that contradict each other. Of both: inputs and outputs
as declared, no initializer that nothing reads, no weight in float32 that was none, and no byte more than int8 leaves beside
the vectors that quantizing adds: scales, zero points, factors of SmoothQuant, scaled biases.
"""

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import numpy as np
import onnx
import onnx_ir as ir

from attnquant import runtime
from attnquant.check import check
from attnquant.dtypes import HALF, infer_types
from attnquant.errors import AttnQuantError, VerificationError
from attnquant.graph import bodies
from attnquant.model import load
from attnquant.quantization import plan, quantize
from benchmarks.bfloat16 import as_bfloat16
from benchmarks.runtimes import runtime_folder
from tests.corpora import Entry, entries, runnable, snr

CONVERTER = ("1.16.0", "onnxconverter-common")
LIMIT_SECONDS, FLOOR = 180, 20.0
SMALL = 1024
"""Bytes up to which a float32 constant is no weight: scales, epsilons, factors."""
CUDA = "onnxruntime-cuda@1.31.1"
Figures = dict[str, Any]
Item = TypeVar("Item")


def as_float16(path: str) -> ir.Model:
    """The fp16 variant of a float32 model; a half precision model itself."""
    source = load(path)
    if any(value.dtype in HALF for value in (*source.graph.inputs, *source.graph.initializers.values())):
        return source
    from onnxconverter_common import float16

    proto = onnx.load(path)
    for node in proto.graph.node:  # the converter leaves the type that a Cast names
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.FLOAT16
    del proto.graph.value_info[:]  # the converter trusts what is declared, and declares inner tensors wrongly itself
    converted = float16.convert_float_to_float16(proto, check_fp16_ready=False)
    del converted.graph.value_info[:]
    return ir.from_proto(converted)


Side = tuple[ir.Model, list[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]


def _float_side(entry: Entry) -> Side:
    """(fp16 model, samples for it, its outputs)."""
    half = as_float16(str(entry.path))
    wanted = {str(value.name): value.dtype for value in half.graph.inputs}
    taken = [{name: array for name, array in sample.items() if name in wanted} for sample in _samples(entry)]
    samples = [{name: _as(array, wanted[name]) for name, array in sample.items()} for sample in taken]
    return half, samples, [runtime.run(half, sample, threads=1) for sample in samples]


def float_side(entry: Entry) -> Figures:
    """{"skip": reason} where there is no fp16 model that runs; the converter raises anything."""
    try:
        _float_side(entry)
    except Exception as error:
        return {"skip": f"no fp16 model: {type(error).__name__}: {error}"}
    return {"problems": []}


def fp16(entry: Entry) -> Figures:
    """Figures of the fp16 variant; {"skip": reason} where there is none that runs, tried in a process of its own."""
    tried = alone(float_side, entry)
    if "skip" in tried or tried["problems"]:
        return {"skip": tried.get("skip") or f"the fp16 model: {tried['problems'][0]}"}
    half, samples, expected = _float_side(entry)
    result = quantize(half, samples).model
    figures = {"dB": snr(expected, [runtime.run(result, sample, threads=1) for sample in samples])}
    report = check(result)
    problems = [] if report.ok else [f"check: {report.problems[:2]}"]
    if figures["dB"] < FLOOR:
        problems.append(f"{figures['dB']:.1f} dB")
    return figures | sizes(half, result, problems)


def bf16(entry: Entry) -> Figures:
    """Figures of the bf16 variant: nothing runs but its float32 twin."""
    source, found = load(entry.path), runnable(entry.path)
    if isinstance(found, str):
        return {"skip": f"the float model: {found}"}
    samples, half = found[0], as_bfloat16(source)
    conflicts = infer_types(half).conflicts
    if conflicts:
        return {"skip": f"no bf16 model: {conflicts[0].reason}"}
    wide = [{name: _wide(array) for name, array in sample.items()} for sample in samples]
    try:
        result = quantize(half, wide, target=CUDA)
    except VerificationError as error:
        return {"problems": [str(error)]} if _loads(source, samples) else {"skip": f"nor does the original load: {error}"}
    conflicts = infer_types(result.model).conflicts
    problems = [f"types: {row.reason}" for row in conflicts[:2]]
    planned = plan(entry.path, feeds=samples[0], target=CUDA).setup.points
    placed = [sorted((point.site, point.role.value) for point in points) for points in (planned, result.setup.points)]
    if placed[0] != placed[1]:
        problems.append(f"placed {placed[1]}, float32 model {placed[0]}")
    return sizes(half, result.model, problems)


def _loads(model: ir.Model, samples: list[dict[str, np.ndarray]]) -> bool:
    """Whether the original, quantized for the same target, loads on this CPU."""
    try:
        quantize(model, samples, target=CUDA)
    except VerificationError:
        return False
    return True


def sizes(before: ir.Model, after: ir.Model, problems: list[str]) -> Figures:
    """Bytes of the constants, and what is wrong with them or with the border."""
    old, new = (_constants(model) for model in (before, after))
    names = {value.name for value in old}
    added = sum(_bytes(value) for value in new if _is_parameter(value) or (value.name not in names and _is_vector(value)))
    wide = {str(value.name) for value in old if _dtype(value) == ir.DataType.FLOAT}
    problems += [f"dead {value.name!r}" for value in new if not value.uses() and not value.is_graph_output()]
    problems += [
        f"float32 {value.name!r}" for value in new
        if _dtype(value) == ir.DataType.FLOAT and value.name not in wide
        and not _is_parameter(value) and _bytes(value) > SMALL
    ]  # fmt: skip
    integers = sum(map(_bytes, filter(_is_weight, new))) - sum(map(_bytes, filter(_is_weight, old)))
    total, allowed = sum(map(_bytes, new)), sum(map(_bytes, old)) - integers + added + SMALL
    if total > allowed:
        problems.append(f"{total:,} bytes of constants, at most {allowed:,} wanted")
    if _border(before) != _border(after):
        problems.append("inputs or outputs declared otherwise")
    return {"before": sum(map(_bytes, old)), "after": total, "problems": problems}


def _constants(model: ir.Model) -> list[ir.Value]:
    """Initializers and the tensors of Constant nodes, which the host makes initializers."""
    graphs = [body for _, body in bodies(model) if isinstance(body, ir.Graph)]
    held = [value for graph in graphs for value in graph.initializers.values()]
    nodes = [node for graph in graphs for node in graph if node.op_type == "Constant" and "value" in node.attributes]
    return held + [node.outputs[0] for node in nodes]


def _data(value: ir.Value) -> ir.TensorProtocol | None:
    node = value.producer()
    return value.const_value if node is None else node.attributes["value"].as_tensor()


def _bytes(value: ir.Value) -> int:
    data = _data(value)
    return 0 if data is None else data.nbytes


def _dtype(value: ir.Value) -> ir.DataType | None:
    data = _data(value)
    return value.dtype if data is None else data.dtype


def _is_parameter(value: ir.Value) -> bool:
    return any(node.op_type in ("QuantizeLinear", "DequantizeLinear") and port > 0 for node, port in value.uses())


def _is_vector(value: ir.Value) -> bool:
    data = _data(value)
    return data is not None and sum(size > 1 for size in data.shape.numpy()) <= 1


def _is_weight(value: ir.Value) -> bool:
    return _dtype(value) in (ir.DataType.INT8, ir.DataType.UINT8) and _bytes(value) > 1 and not _is_parameter(value)


def _border(model: ir.Model) -> list[tuple[Any, ...]]:
    return [(value.name, value.dtype, str(value.shape)) for value in (*model.graph.inputs, *model.graph.outputs)]


def _samples(entry: Entry) -> list[dict[str, np.ndarray]]:
    found = runnable(entry.path)
    if isinstance(found, str):
        raise AttnQuantError(found)
    return found[0]


def _as(array: np.ndarray, dtype: ir.DataType | None) -> np.ndarray:
    return array.astype(np.float16) if dtype == ir.DataType.FLOAT16 else array


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def alone(work: Callable[[Entry], Figures], entry: Entry) -> Figures:
    """What `work` finds, in a process of its own."""
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(work, entry, there))
    process.start()
    there.close()
    try:
        found: Figures = here.recv() if here.poll(LIMIT_SECONDS) else {"problems": [f"more than {LIMIT_SECONDS} s"]}
    except EOFError:
        process.join()
        found = {"problems": [f"the process ended with {process.exitcode}"]}
    process.kill()
    process.join()
    return found


def _child(work: Callable[[Entry], Figures], entry: Entry, end: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        end.send(work(entry))
    except AttnQuantError as error:
        end.send({"problems": [f"{type(error).__name__}: {error}"]})
    except Exception as error:
        end.send({"problems": [f"unexpected {type(error).__name__}: {error}"]})


def share(items: Iterable[Item], part: str) -> Iterator[Item]:
    """Of a part "K/N" every Nth item, from the Kth on."""
    first, step = map(int, part.split("/"))
    return islice(items, first - 1, None, step)


def main(argv: list[str] | None = None) -> int:
    """Print the table; 0 if everything is as wanted."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="run only the files whose name contains this")
    parser.add_argument("--part", default="1/1", help="run every Nth model, from the Kth on")
    parser.add_argument("--kinds", nargs="+", choices=("fp16", "bf16"), default=["fp16", "bf16"])
    options = parser.parse_args(argv)
    sys.path.append(str(runtime_folder(*CONVERTER)))
    chosen = entries("ATTNQUANT_CORPUS", "corpus") + entries("ATTNQUANT_CASES", "cases")
    chosen = [entry for entry in chosen if options.only in entry.path.name and entry.truth.get("expect") != "error"]
    counts = {kind: {"as wanted": 0, "no half model": 0, "not as wanted": 0} for kind in options.kinds}
    print("| model | kind | SNR dB | kB of constants | verdict |\n|---|---|---|---|---|")
    for entry in share(chosen, options.part):
        for kind in options.kinds:
            found = alone({"fp16": fp16, "bf16": bf16}[kind], entry)
            skip, problems = found.get("skip"), found.get("problems", [])
            counts[kind]["no half model" if skip else "not as wanted" if problems else "as wanted"] += 1
            verdict = " ".join(str(skip or "; ".join(problems) or "as wanted").split())[:240]
            level = f"{found['dB']:.1f}" if "dB" in found else "-"
            size = f"{found['before'] / 1000:.0f} > {found['after'] / 1000:.0f}" if "after" in found else "-"
            print(f"| {entry} | {kind} | {level} | {size} | {verdict} |", flush=True)
    print()
    for kind, counted in counts.items():
        print(f"{kind}: {', '.join(f'{count} {name}' for name, count in counted.items())}")
    return 1 if any(counted["not as wanted"] for counted in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
