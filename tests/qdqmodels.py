"""Tiny Q/DQ models for the tests of the emission, and runs of them with and without the runtime's optimizations.

Weights stay within 7 bits: CPUs without VNNI then compute exactly, and optimized and plain runs can be compared.
"""

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from attnquant.target import Target, parse_target

Shape = Sequence[int | str]

TARGET: Target = parse_target("onnxruntime-cpu@1.31.1")


class Builder:
    """Collects nodes and constants; every method returns the name of the tensor it makes."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.value_info: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Shape, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def node(self, op_type: str, inputs: Sequence[str], output: str, name: str | None = None, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], name=name or f"n_{output}", **attributes))
        return output

    def qdq(self, tensor: str, *, scale: float = 0.03, zero_point: int = -8, dtype: type = np.int8, name: str = "") -> str:
        """A per-tensor quantizer as NNCF writes it for an activation."""
        prefix = name or f"{tensor}_qdq"
        constants = [
            self.constant(f"{prefix}_scale", np.float32(scale)),
            self.constant(f"{prefix}_zero", dtype(zero_point)),
        ]
        self.node("QuantizeLinear", [tensor, *constants], f"{prefix}_q")
        return self.node("DequantizeLinear", [f"{prefix}_q", *constants], f"{prefix}_dq")

    def weight(self, name: str, shape: Sequence[int], *, axis: int | None) -> str:
        """An int8 weight within 7 bits and its DequantizeLinear, a scale per index of `axis` or one."""
        integers = self.rng.integers(-63, 64, shape).astype(np.int8)
        size = () if axis is None else (shape[axis],)
        self.constant(f"{name}_int8", integers)
        self.constant(f"{name}_scale", self.rng.uniform(0.001, 0.01, size).astype(np.float32))
        self.constant(f"{name}_zero", np.zeros(size, np.int8))
        attributes = {} if axis is None else {"axis": axis}
        return self.node("DequantizeLinear", [f"{name}_int8", f"{name}_scale", f"{name}_zero"], name, **attributes)

    def vector(self, name: str, size: int, *, low: float = 0.5, high: float = 2.0) -> str:
        return self.constant(name, self.rng.uniform(low, high, size).astype(np.float32))

    def model(self, outputs: Sequence[str], *, opset: int = 21, infer: bool = True) -> ir.Model:
        """The model, shapes inferred as the host hands them on."""
        declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "tiny", self.inputs, declared, self.initializers)
        domains = {node.domain for node in self.nodes} - {""}
        imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in sorted(domains))]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
        return ir.from_proto(onnx.shape_inference.infer_shapes(proto) if infer else proto)


def linear(builder: Builder, tensor: str, name: str, rows: int, columns: int, *, bias: bool = True) -> str:
    """MatMul of a quantized tensor with an int8 weight, and Add of a float bias behind it."""
    weight = builder.weight(f"{name}_w", (rows, columns), axis=1)
    product = builder.node("MatMul", [tensor, weight], f"{name}_product", name=name)
    if not bias:
        return product
    builder.constant(f"{name}_bias", builder.rng.standard_normal(columns).astype(np.float32))
    return builder.node("Add", [product, f"{name}_bias"], f"{name}_out", name=f"{name}_add")


def plain(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs of the model as it stands, no optimization: every quantizer is computed where it is."""
    return _run(model, feeds, onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)


def optimized(model: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Outputs at default settings."""
    return _run(model, feeds, onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL)


def _run(model: ir.Model, feeds: dict[str, np.ndarray], level: object) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    arrays: list[np.ndarray] = session.run(None, feeds)
    return arrays


def valid(model: ir.Model) -> None:
    """The model passes onnx's checker, types and shapes included, under the shapes that follow from its inputs alone."""
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
