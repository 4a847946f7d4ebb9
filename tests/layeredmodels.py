"""A small encoder of several layers, attention as operator or written out, in which faults are planted."""

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, WIDTH, HEADS, HEAD, LENGTH = 6, 32, 4, 8, 12
OPERATOR, DECOMPOSED = "operator", "decomposed"
FORMS = (OPERATOR, DECOMPOSED)


class _Builder:
    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def const(self, name: str, array: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def op(self, op_type: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"n_{name}", **attributes))
        return name

    def linear(self, source: str, name: str, rows: int, columns: int, gain: float = 1.0) -> str:
        weight = self.random.standard_normal((rows, columns)) * gain / np.sqrt(rows)
        bias = self.random.standard_normal(columns) * 0.1
        product = self.op("MatMul", [source, self.const(f"{name}.weight", weight.astype(np.float32))], f"{name}.product")
        return self.op("Add", [product, self.const(f"{name}.bias", bias.astype(np.float32))], name)

    def norm(self, source: str, name: str) -> str:
        gain = self.const(f"{name}.gain", self.random.uniform(0.7, 1.4, WIDTH).astype(np.float32))
        shift = self.const(f"{name}.shift", (0.1 * self.random.standard_normal(WIDTH)).astype(np.float32))
        return self.op("LayerNormalization", [source, gain, shift], name, axis=-1)

    def heads(self, source: str, name: str) -> str:
        split = self.op("Reshape", [source, "by_head"], f"{name}.split")
        return self.op("Transpose", [split], name, perm=[0, 2, 1, 3])

    def attention(self, source: str, name: str, form: str) -> str:
        # Scores of some spread, as trained models have them; of scores near zero no error shows.
        query, key = (self.linear(source, f"{name}.{part}", WIDTH, WIDTH, gain=1.5) for part in "qk")
        value = self.linear(source, f"{name}.v", WIDTH, WIDTH)
        if form == OPERATOR:
            return self.op("Attention", [query, key, value], f"{name}.context", q_num_heads=HEADS, kv_num_heads=HEADS)
        q, k, v = (self.heads(tensor, f"{name}.{part}.heads") for tensor, part in ((query, "q"), (key, "k"), (value, "v")))
        turned = self.op("Transpose", [k], f"{name}.k.turned", perm=[0, 1, 3, 2])
        scores = self.op("MatMul", [q, turned], f"{name}.scores")
        scaled = self.op("Mul", [scores, "root"], f"{name}.scaled")
        probabilities = self.op("Softmax", [scaled], f"{name}.probabilities", axis=-1)
        context = self.op("MatMul", [probabilities, v], f"{name}.context")
        back = self.op("Transpose", [context], f"{name}.context.back", perm=[0, 2, 1, 3])
        return self.op("Reshape", [back, "by_width"], f"{name}.context.flat")

    def layer(self, source: str, name: str, form: str) -> str:
        context = self.attention(self.norm(source, f"{name}.norm1"), f"{name}.attn", form)
        middle = self.op("Add", [source, self.linear(context, f"{name}.out", WIDTH, WIDTH)], f"{name}.middle")
        wide = self.linear(self.norm(middle, f"{name}.norm2"), f"{name}.up", WIDTH, 2 * WIDTH)
        narrow = self.linear(self.op("Relu", [wide], f"{name}.relu"), f"{name}.down", 2 * WIDTH, WIDTH)
        return self.op("Add", [middle, narrow], f"{name}.result")


@cache
def encoder(form: str, *, layers: int = LAYERS, seed: int = 0) -> onnx.ModelProto:
    """x float32 [batch, LENGTH, WIDTH] -> y of the same shape and logits [batch, LENGTH, 2 * WIDTH]; opset 23."""
    builder = _Builder(seed)
    builder.const("by_head", np.array([0, -1, HEADS, HEAD], np.int64))
    builder.const("by_width", np.array([0, -1, WIDTH], np.int64))
    builder.const("root", np.array(HEAD**-0.5, np.float32))
    state = "x"
    for index in range(layers):
        state = builder.layer(state, f"layer{index}", form)
    builder.norm(state, "y")
    builder.linear("y", "logits", WIDTH, 2 * WIDTH)
    shapes = {"x": WIDTH, "y": WIDTH, "logits": 2 * WIDTH}
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", LENGTH, w]) for name, w in shapes.items()}
    used = {name for node in builder.nodes for name in node.input}
    graph = helper.make_graph(
        builder.nodes, "encoder", [info["x"]], [info["y"], info["logits"]],
        [item for item in builder.constants if item.name in used],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def samples(count: int, *, seed: int = 1, batch: int = 2) -> list[dict[str, np.ndarray]]:
    """Inputs of the encoder."""
    random = np.random.default_rng(seed)
    return [{"x": random.standard_normal((batch, LENGTH, WIDTH)).astype(np.float32)} for _ in range(count)]
