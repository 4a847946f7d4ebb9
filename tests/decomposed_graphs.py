"""Small graphs with attention written out in every way, each with the truth written beside it, for the tests of patterns.

Sizes that recur: batch 2, 5 positions, width 32, 4 heads of 8 channels. `x` is the graph's input, float32 [B, 5, 32].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEADS, DIM, WIDTH, STEPS = 4, 8, 32, 5
RAW = ("batch", STEPS, WIDTH)


@dataclass
class Graph:
    """Nodes in order; every method that adds one returns the name of its (first) output, which is the node's name too."""

    opset: int = 18
    contrib: bool = False
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def input(self, name: str, shape: Sequence[int | str | None] = RAW, dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, name: str, dtype: int = TensorProto.FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, dtype, None))

    def const(self, value: object, dtype: type = np.float32, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def ints(self, *values: int) -> str:
        return self.const(values, np.int64)

    def weight(self, *shape: int, name: str = "") -> str:
        return self.const(self.random.standard_normal(shape) / 4, name=name)

    def op(self, kind: str, *inputs: str, name: str = "", outputs: int = 1, domain: str = "", **attributes: object) -> str:
        name = name or f"{kind}_{len(self.nodes)}"
        results = [name, *(f"{name}.{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(kind, list(inputs), results, name=name, domain=domain, **attributes))
        return name

    def linear(self, value: str, wide: int = WIDTH, narrow: int = WIDTH, name: str = "") -> str:
        """[.., narrow] -> [.., wide] with a bias."""
        return self.op("Add", self.op("MatMul", value, self.weight(narrow, wide)), self.weight(wide), name=name)

    def heads(
        self, value: str, heads: int = HEADS, order: Sequence[int] = (0, 2, 1, 3), dim: int = DIM, name: str = ""
    ) -> str:
        """[B, S, H * d] -> [B, H, S, d], or another order of (B, S, H, d)."""
        return self.op("Transpose", self.op("Reshape", value, self.ints(0, -1, heads, dim)), name=name, perm=list(order))

    def transposed(self, value: str, rank: int = 4, name: str = "") -> str:
        """The last two axes swapped."""
        return self.op("Transpose", value, name=name, perm=[*range(rank - 2), rank - 1, rank - 2])

    def merged(self, context: str) -> str:
        """[B, H, S, d] -> [B, S, H * d], projected: the graph's output y."""
        flat = self.op("Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), self.ints(0, -1, WIDTH))
        return self.linear(flat, name="y")

    def proto(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "case", self.inputs, self.outputs, self.constants)
        imports = [helper.make_opsetid("", self.opset)]
        if self.contrib:
            imports.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, opset_imports=imports, ir_version=10)


def projected(graph: Graph, source: str = "x", memory: str | None = None) -> tuple[str, str, str]:
    """q, k, v [B, H, S, d], named so; `memory` gives k and v another source."""
    other = memory or source
    return (
        graph.heads(graph.linear(source), name="q"),
        graph.heads(graph.linear(other), name="k"),
        graph.heads(graph.linear(other), name="v"),
    )


def finish(graph: Graph, scores: str, values: str = "v", probabilities: str = "") -> Graph:
    """Softmax, product with V, output projection."""
    p = probabilities or graph.op("Softmax", scores, name="p", axis=-1)
    graph.merged(graph.op("MatMul", p, values, name="context"))
    graph.output("y")
    return graph


def plain(shape: Callable[[Graph, str], str] = lambda graph, scores: scores, opset: int = 18) -> Graph:
    """The textbook form; `shape` puts something between the scaled scores and the softmax."""
    graph = Graph(opset=opset)
    graph.input("x")
    q, k, _ = projected(graph)
    scores = graph.op("MatMul", q, graph.transposed(k, name="kt"), name="scores")
    scaled = graph.op("Mul", scores, graph.const(0.25), name="scaled")
    return finish(graph, shape(graph, scaled))
