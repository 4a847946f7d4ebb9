"""What ONNX Runtime really executes: its optimized graph, read for int8 kernels and dequantized float linears."""

import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx

FLOAT_LINEARS = frozenset({"MatMul", "Gemm", "FusedMatMul", "FusedGemm", "FusedMatMulActivation"})
INT8_LINEARS = {
    "MatMulInteger": 1, "MatMulIntegerToFloat": 1, "DynamicQuantizeMatMul": 1, "MatMulNBits": 1,
    "QLinearMatMul": 3, "QGemm": 3,
}
"""Operator -> position of its second factor, the weight of a linear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """Counts in the optimized graph: linears with a constant weight in int8, in float, and float ones that dequantize."""

    int8_linears: int
    float_linears: int
    float_behind_dequantize: tuple[str, ...]
    operators: dict[str, int]


def executed(path: Path) -> Executed:
    """Optimize the model as a session with default options does, and count."""
    return count(optimized(path))


def optimized(path: Path) -> onnx.ModelProto:
    """The graph after ONNX Runtime's optimizations for this CPU."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath)


def count(model: onnx.ModelProto) -> Executed:
    """Read an optimized graph. A linear is a product whose second input is an initializer, dequantized or not."""
    graph = model.graph
    producer = {output: node for node in graph.node for output in node.output}
    constants = {initializer.name for initializer in graph.initializer}
    constants |= {output for node in graph.node if node.op_type == "Constant" for output in node.output}

    def is_constant(name: str) -> bool:
        node = producer.get(name)
        through = node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear", "Transpose", "Cast", "Reshape")
        return name in constants or (node is not None and through and is_constant(node.input[0]))

    behind = tuple(
        node.name
        for node in graph.node
        if node.op_type in FLOAT_LINEARS
        and any(name in producer and producer[name].op_type == "DequantizeLinear" for name in node.input)
    )
    return Executed(
        int8_linears=sum(
            node.op_type in INT8_LINEARS and is_constant(node.input[INT8_LINEARS[node.op_type]]) for node in graph.node
        ),
        float_linears=sum(node.op_type in FLOAT_LINEARS and is_constant(node.input[1]) for node in graph.node),
        float_behind_dequantize=behind,
        operators=dict(Counter(node.op_type for node in graph.node).most_common()),
    )
