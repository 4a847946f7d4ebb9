"""Tiny ONNX models that several tests build on, made here rather than stored."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 16
HEADS = 2


def weights(seed: int, *shape: int) -> np.ndarray:
    """Reproducible float32 weights of about unit gain."""
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


def linear(opset: int = 17, *, rows: int = WIDTH) -> onnx.ModelProto:
    """x (batch, rows) -> MatMul -> Add -> Relu -> y (batch, WIDTH)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["xw"], name="matmul"),
        helper.make_node("Add", ["xw", "b"], ["xwb"], name="add"),
        helper.make_node("Relu", ["xwb"], ["y"], name="relu"),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(weights(0, rows, WIDTH), "w"), numpy_helper.from_array(weights(1, WIDTH), "b")],
    )
    return made(graph, opset)


def attention(opset: int = 23, *, length: int | str = "sequence") -> onnx.ModelProto:
    """x (batch, length, WIDTH) -> three linears -> ai.onnx Attention with HEADS heads -> linear -> y."""
    nodes = [helper.make_node("MatMul", ["x", f"w_{role}"], [role], name=f"project_{role}") for role in "qkv"]
    nodes += [
        helper.make_node("Attention", ["q", "k", "v"], ["a"], name="attention", q_num_heads=HEADS, kv_num_heads=HEADS),
        helper.make_node("MatMul", ["a", "w_o"], ["y"], name="project_out"),
    ]
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", length, WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", length, WIDTH])],
        [numpy_helper.from_array(weights(index, WIDTH, WIDTH), f"w_{role}") for index, role in enumerate("qkvo")],
    )
    return made(graph, opset)


def made(
    graph: onnx.GraphProto, opset: int, functions: Sequence[onnx.FunctionProto] = (), **domains: int
) -> onnx.ModelProto:
    """A model of the IR version that came with `opset`."""
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, version) for name, version in domains.items())]
    return helper.make_model(
        graph, opset_imports=imports, ir_version=min(10, 7 + max(0, opset - 14) // 3), functions=functions
    )


def run(model: onnx.ModelProto | bytes | str, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """All outputs, from ONNX Runtime with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    return list(onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, feeds))
