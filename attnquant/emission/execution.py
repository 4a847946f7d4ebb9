"""What ONNX Runtime really executes: the graph that a session with default options makes of a model, and its linears."""

import re
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from attnquant.errors import ModelError
from attnquant.runtime import import_runtime, summary
from attnquant.saving import session_source

INT8_KERNELS = (
    "MatMulIntegerToFloat",
    "QLinearMatMul",
    "QGemm",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "MatMulNBits",
    "QLinearConv",
    "ConvInteger",
)
FLOAT_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "FusedMatMulActivation", "GemmFloat8")

_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity", "Cast")
_TABLE = 4096
"""Elements from which on a dequantized constant counts as a table."""
_SUFFIX = "/MatMulAddFusion"


def executed(model: ir.Model | onnx.ModelProto | bytes | str | PathLike[str]) -> "ExecutionReport":
    """What a session with default options, on the CPU provider, executes of a model.

    :raises ModelError: the model does not load; the message is the runtime's.
    :raises HostError: ONNX Runtime is not installed.
    """
    return read_optimized(optimized(model))


def optimized(model: ir.Model | onnx.ModelProto | bytes | str | PathLike[str]) -> onnx.ModelProto:
    """The graph after the runtime's optimizations for this CPU, without the data of larger initializers.

    :raises ModelError: the model does not load.
    """
    if isinstance(model, ir.Model):
        with session_source(model) as source:
            return _optimized(source)
    if isinstance(model, onnx.ModelProto):
        return _optimized(model.SerializeToString())
    return _optimized(model if isinstance(model, bytes) else fspath(model))


def _optimized(source: bytes | str) -> onnx.ModelProto:
    runtime: Any = import_runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(path)
        # The graph is all that is read; in one file it could not be larger than 2 GB.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        try:
            runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            msg = f"ONNX Runtime {runtime.__version__} does not load the model at default settings: {summary(error)}"
            raise ModelError(msg) from error
        return onnx.load(path, load_external_data=False)


def read_optimized(model: onnx.ModelProto) -> "ExecutionReport":
    """Sort the products of an optimized graph, subgraphs included, by how they are computed."""
    int8: list[str] = []
    behind: list[str] = []
    attention: list[str] = []
    plain: list[str] = []
    tables: list[str] = []
    operators: Counter[str] = Counter()
    for graph in _graphs(model.graph):
        reading = _Reading(graph)
        operators.update(node.op_type for node in graph.node)
        for node in graph.node:
            if node.op_type in INT8_KERNELS:
                int8.append(_original(node))
            elif node.op_type in FLOAT_PRODUCTS:
                weighted = any(reading.is_constant(name) for name in node.input[:2])
                dequantized = any(reading.is_dequantized(name) for name in node.input[:2])
                where = (behind if dequantized else plain) if weighted else attention
                if weighted or dequantized:
                    where.append(_original(node))
            elif node.op_type == "DequantizeLinear" and reading.is_table(node):
                tables.append(node.name)
    return ExecutionReport(
        int8=tuple(int8),
        float_behind_dequantize=tuple(behind),
        attention_behind_dequantize=tuple(attention),
        float_linears=tuple(plain),
        tables=tuple(tables),
        operators=dict(operators),
    )


def _graphs(graph: Any) -> Iterable[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attribute.g)


def _original(node: Any) -> str:
    """The model's own name of a node that the runtime renamed when it fused a bias or changed the layout."""
    name: str = node.name.removesuffix("/").removesuffix(_SUFFIX)
    return re.sub(r"_token_\d+$", "", name) if node.op_type == "QLinearConv" else name


class _Reading:
    """Where the tensors of one optimized graph come from."""

    def __init__(self, graph: Any) -> None:
        self._makers = {output: node for node in graph.node for output in node.output}
        self._readers: dict[str, list[Any]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._sizes = {item.name: _size(item.dims) for item in graph.initializer}

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is an initializer, dequantized or moved or not."""
        node = self._makers.get(name)
        through = node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear", *_MOVES)
        return name in self._sizes or (node is not None and through and self.is_constant(node.input[0]))

    def is_dequantized(self, name: str) -> bool:
        """Whether a DequantizeLinear makes the tensor, moves in between."""
        node = self._makers.get(name)
        if node is None:
            return False
        return node.op_type == "DequantizeLinear" or (node.op_type in _MOVES and self.is_dequantized(node.input[0]))

    def is_table(self, node: Any) -> bool:
        """Whether a large constant is dequantized at every run for something other than a product."""
        if self._sizes.get(node.input[0], 0) < _TABLE:
            return False
        products = (*FLOAT_PRODUCTS, "Conv", "FusedConv", "ConvTranspose", *_MOVES)
        return any(reader.op_type not in products for reader in self._readers.get(node.output[0], []))


def _size(dims: Iterable[int]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """The products of an optimized graph by how they are computed: names of nodes, as in the model where they were kept."""

    int8: tuple[str, ...]
    """Linears and products with an int8 kernel."""
    float_behind_dequantize: tuple[str, ...]
    """Float linears with a constant weight that read a DequantizeLinear: slower than the float model."""
    attention_behind_dequantize: tuple[str, ...]
    """Float products of two computed tensors that read a DequantizeLinear: QK^T with rounded operands."""
    float_linears: tuple[str, ...]
    """Float linears with a constant weight and nothing quantized."""
    tables: tuple[str, ...]
    """DequantizeLinear of a whole table at every run."""
    operators: dict[str, int]
    """Number of nodes by operator type."""

    @property
    def clean(self) -> bool:
        """No linear and no table is dequantized at run time."""
        return not self.float_behind_dequantize and not self.tables
