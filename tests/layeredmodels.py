"""A small encoder of several layers, attention as operator or written out, in which faults are planted; and a decoder."""

from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

LAYERS, WIDTH, HEADS, HEAD, LENGTH, VOCABULARY = 6, 32, 4, 8, 12, 48
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


class _Decoder(_Builder):
    """Layers with a cache: past and new tokens are joined by Concat, or inside the operator."""

    def masks(self) -> None:
        """`seen` bool [B, 1, S, T], and `bias`, the same as float: causal, and where attention_mask is 0, hidden."""
        total = self.op("Shape", ["attention_mask"], "total", start=1, end=2)
        length = self.op("Shape", ["input_ids"], "length", start=1, end=2)
        zero, one = self.const("zero", np.array(0, np.int64)), self.const("one", np.array(1, np.int64))
        numbers = [self.op("Squeeze", [name], f"{name}.number") for name in (total, length)]
        start = self.op("Sub", numbers, "start")
        keys = self.op("Range", [zero, numbers[0], one], "keys")
        positions = self.op("Add", [self.op("Range", [zero, numbers[1], one], "steps"), start], "positions")
        column = self.op("Unsqueeze", [positions, self.const("axis1", np.array([1], np.int64))], "column")
        causal = self.op("LessOrEqual", [keys, column], "causal")
        kept = self.op("Cast", ["attention_mask"], "kept", to=TensorProto.BOOL)
        wide = self.op("Unsqueeze", [kept, self.const("axes12", np.array([1, 2], np.int64))], "wide")
        seen = self.op("And", [wide, causal], "seen")
        values = [self.const("nothing", np.array(0, np.float32)), self.const("hidden", np.array(-1e9, np.float32))]
        self.op("Where", [seen, *values], "bias")

    def cached(self, source: str, name: str, form: str, layer: int) -> str:
        q, k, v = (self.linear(source, f"{name}.{part}", WIDTH, WIDTH, gain=1.5) for part in "qkv")
        past = [f"past.{layer}.{part}" for part in ("key", "value")]
        present = [f"present.{layer}.{part}" for part in ("key", "value")]
        if form == OPERATOR:
            node = helper.make_node(
                "Attention", [q, k, v, "seen", *past], [f"{name}.context", *present], name=f"n_{name}.context",
                q_num_heads=HEADS, kv_num_heads=HEADS,
            )  # fmt: skip
            self.nodes.append(node)
            return f"{name}.context"
        query, *new = (self.heads(tensor, f"{name}.{part}.heads") for tensor, part in ((q, "q"), (k, "k"), (v, "v")))
        key, value = (self.op("Concat", [a, b], c, axis=2) for a, b, c in zip(past, new, present, strict=True))
        turned = self.op("Transpose", [key], f"{name}.k.turned", perm=[0, 1, 3, 2])
        scores = self.op("Mul", [self.op("MatMul", [query, turned], f"{name}.scores"), "root"], f"{name}.scaled")
        masked = self.op("Add", [scores, "bias"], f"{name}.masked")
        probabilities = self.op("Softmax", [masked], f"{name}.probabilities", axis=-1)
        context = self.op("MatMul", [probabilities, value], f"{name}.context")
        back = self.op("Transpose", [context], f"{name}.context.back", perm=[0, 2, 1, 3])
        return self.op("Reshape", [back, "by_width"], f"{name}.context.flat")


@cache
def decoder(form: str, *, layers: int = 2) -> onnx.ModelProto:
    """input_ids int64 [batch, new], attention_mask int64 [batch, all], past.N.key/value -> logits, present.N.key/value."""
    builder = _Decoder(3)
    builder.const("by_head", np.array([0, -1, HEADS, HEAD], np.int64))
    builder.const("by_width", np.array([0, -1, WIDTH], np.int64))
    builder.const("root", np.array(HEAD**-0.5, np.float32))
    builder.masks()
    tables = [builder.const(name, (builder.random.standard_normal((VOCABULARY, WIDTH))).astype(np.float32)) for name in "wp"]
    rows = [builder.op("Gather", [t, i], f"row.{t}") for t, i in zip(tables, ("input_ids", "positions"), strict=True)]
    state = builder.op("Add", rows, "embedded")
    for layer in range(layers):
        name = f"layer{layer}"
        context = builder.cached(builder.norm(state, f"{name}.norm1"), f"{name}.attn", form, layer)
        middle = builder.op("Add", [state, builder.linear(context, f"{name}.out", WIDTH, WIDTH)], f"{name}.middle")
        state = builder.op(
            "Add", [middle, builder.linear(builder.norm(middle, f"{name}.norm2"), f"{name}.up", WIDTH, WIDTH)], name
        )
    builder.linear(builder.norm(state, "normed"), "logits", WIDTH, VOCABULARY)
    used = {name for node in builder.nodes for name in node.input}
    ints = [("input_ids", ["batch", "new"]), ("attention_mask", ["batch", "all"])]
    caches = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]

    def info(name: str, shape: list[object], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    graph = helper.make_graph(
        [node for node in builder.nodes if node.name != "n_bias" or form == DECOMPOSED], "decoder",
        [
            *(info(name, shape, TensorProto.INT64) for name, shape in ints),
            *(info(f"past.{name}", ["batch", HEADS, "past", HEAD]) for name in caches),
        ],
        [
            info("logits", ["batch", "new", VOCABULARY]),
            *(info(f"present.{name}", ["batch", HEADS, "all", HEAD]) for name in caches),
        ],
        [item for item in builder.constants if item.name in used],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def tokens(
    count: int, *, past: int = 0, new: int = 8, batch: int = 2, layers: int = 2, seed: int = 4
) -> list[dict[str, np.ndarray]]:
    """Inputs of the decoder; the cache holds noise."""
    random, found = np.random.default_rng(seed), []
    for _ in range(count):
        sample: dict[str, np.ndarray] = {
            "input_ids": random.integers(0, VOCABULARY, (batch, new)),
            "attention_mask": np.ones((batch, past + new), np.int64),
        }
        for name in (f"past.{layer}.{part}" for layer in range(layers) for part in ("key", "value")):
            sample[name] = random.standard_normal((batch, HEADS, past, HEAD)).astype(np.float32)
        found.append(sample)
    return found


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
