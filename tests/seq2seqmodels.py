"""A tiny encoder, decoder and decoder with past of one model, as optimum splits them: equal weights under equal names."""

from functools import cache
from zlib import crc32

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.layeredmodels import HEAD, HEADS, VOCABULARY, WIDTH, _Builder

LAYERS, LENGTH, START, END = 2, 10, (1,), 2
_KEPT = "attention_mask"


class _Parts(_Builder):
    """Weights are made from their names, so that the decoder and its sibling have the same ones."""

    def __init__(self) -> None:
        super().__init__(0)
        self.const("by_head", np.array([0, -1, HEADS, HEAD], np.int64))
        self.const("by_width", np.array([0, -1, WIDTH], np.int64))
        self.const("root", np.array(HEAD**-0.5, np.float32))
        self.const("nothing", np.array(0, np.float32))
        self.const("hidden_score", np.array(-1e9, np.float32))
        self.const("axes12", np.array([1, 2], np.int64))

    def linear(self, source: str, name: str, rows: int, columns: int, gain: float = 1.0) -> str:
        self.random = np.random.default_rng(crc32(name.encode()))
        return super().linear(source, name, rows, columns, gain)

    def norm(self, source: str, name: str) -> str:
        self.random = np.random.default_rng(crc32(name.encode()))
        return super().norm(source, name)

    def table(self, indices: str, name: str) -> str:
        rows = np.random.default_rng(crc32(name.encode())).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
        return self.op("Gather", [self.const(name, rows), indices], f"{name}.rows")

    def padding(self, mask: str) -> str:
        """float [1, 1, 1, S]: what the mask hides is far below."""
        kept = self.op("Cast", [mask], "padding.kept", to=TensorProto.BOOL)
        wide = self.op("Unsqueeze", [kept, "axes12"], "padding.wide")
        return self.op("Where", [wide, "nothing", "hidden_score"], "padding")

    def projected(self, source: str, name: str, gain: float = 1.0) -> str:
        return self.heads(self.linear(source, name, WIDTH, WIDTH, gain), f"{name}.heads")

    def attended(self, name: str, query: str, key: str, value: str, bias: str) -> str:
        turned = self.op("Transpose", [key], f"{name}.turned", perm=[0, 1, 3, 2])
        scores = self.op("Mul", [self.op("MatMul", [query, turned], f"{name}.scores"), "root"], f"{name}.scaled")
        masked = self.op("Add", [scores, bias], f"{name}.masked") if bias else scores
        probabilities = self.op("Softmax", [masked], f"{name}.probabilities", axis=-1)
        context = self.op("MatMul", [probabilities, value], f"{name}.context")
        back = self.op("Transpose", [context], f"{name}.back", perm=[0, 2, 1, 3])
        return self.linear(self.op("Reshape", [back, "by_width"], f"{name}.flat"), f"{name}.out", WIDTH, WIDTH)

    def added(self, state: str, change: str, name: str) -> str:
        return self.op("Add", [state, change], name)

    def forward(self, state: str, name: str) -> str:
        wide = self.op("Relu", [self.linear(self.norm(state, f"{name}.norm3"), f"{name}.up", WIDTH, 64)], f"{name}.relu")
        return self.added(state, self.linear(wide, f"{name}.down", 64, WIDTH), f"{name}.result")

    def model(self, name: str, inputs: list[onnx.ValueInfoProto], outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
        used = {tensor for node in self.nodes for tensor in node.input}
        constants = [item for item in self.constants if item.name in used]
        graph = helper.make_graph(self.nodes, name, inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def info(name: str, shape: list[object], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A declared input or output."""
    return helper.make_tensor_value_info(name, kind, shape)


def cache_names(side: str, kinds: tuple[str, ...] = ("self", "cross")) -> list[str]:
    """`past.0.self.key`, ...: in the order of the graph."""
    return [f"{side}.{layer}.{kind}.{part}" for layer in range(LAYERS) for kind in kinds for part in ("key", "value")]


@cache
def encoder() -> onnx.ModelProto:
    """input_ids, attention_mask int64 [1, S] -> last_hidden_state [1, S, WIDTH]."""
    made = _Parts()
    bias, state = made.padding(_KEPT), made.table("input_ids", "words")
    for layer in range(LAYERS):
        name = f"encoder{layer}"
        source = made.norm(state, f"{name}.norm1")
        q, k, v = (made.projected(source, f"{name}.{part}", gain) for part, gain in (("q", 1.5), ("k", 1.5), ("v", 1.0)))
        state = made.forward(made.added(state, made.attended(name, q, k, v, bias), f"{name}.middle"), name)
    made.norm(state, "last_hidden_state")
    inputs = [info(name, [1, "source"], TensorProto.INT64) for name in ("input_ids", _KEPT)]
    return made.model("encoder", inputs, [info("last_hidden_state", [1, "source", WIDTH])])


@cache
def decoder(*, past: bool, passed_on: bool = False) -> onnx.ModelProto:
    """input_ids, encoder_attention_mask, the encoder's answer or `past.*` and cache_position -> logits, `present.*`.

    `passed_on`: with past, the caches of attention to the encoder are outputs too, as they came in.
    """
    made = _Parts()
    hidden, bias = made.padding("encoder_attention_mask"), "" if past else _causal(made)
    positions = "cache_position" if past else "places"
    state = made.added(made.table("input_ids", "tokens"), made.table(positions, "places.table"), "embedded")
    for layer in range(LAYERS):
        name = f"decoder{layer}"
        source = made.norm(state, f"{name}.norm1")
        query = made.projected(source, f"{name}.q", 1.5)
        own = []
        for part, gain in (("key", 1.5), ("value", 1.0)):
            new, present = made.projected(source, f"{name}.{part}", gain), f"present.{layer}.self.{part}"
            joined = [f"past.{layer}.self.{part}", new]
            own.append(made.op("Concat", joined, present, axis=2) if past else made.op("Identity", [new], present))
        middle = made.added(state, made.attended(f"{name}.self", query, *own, bias), f"{name}.middle")
        cross = [f"past.{layer}.cross.{part}" for part in ("key", "value")]
        if not past:
            cross = [
                made.op("Identity", [made.projected("encoder_hidden_states", f"{name}.cross.{part}", 1.5)],
                        f"present.{layer}.cross.{part}") for part in ("key", "value")
            ]  # fmt: skip
        elif passed_on:
            for tensor in cross:
                made.op("Identity", [tensor], tensor.replace("past", "present"))
        query = made.projected(made.norm(middle, f"{name}.norm2"), f"{name}.cross.q", 1.5)
        seen = made.added(middle, made.attended(f"{name}.cross", query, *cross, hidden), f"{name}.seen")
        state = made.forward(seen, name)
    made.linear(made.norm(state, "normed"), "logits", WIDTH, VOCABULARY, 2.0)
    return made.model("decoder_with_past" if past else "decoder", _inputs(past), _outputs(past, passed_on))


def _causal(made: _Parts) -> str:
    """float [S, S]; and `places`, the positions."""
    length = made.op("Squeeze", [made.op("Shape", ["input_ids"], "length", start=1, end=2)], "length.number")
    zero, one = made.const("zero", np.array(0, np.int64)), made.const("one", np.array(1, np.int64))
    places = made.op("Range", [zero, length, one], "places")
    column = made.op("Unsqueeze", [places, made.const("axis1", np.array([1], np.int64))], "column")
    return made.op("Where", [made.op("LessOrEqual", [places, column], "seen"), "nothing", "hidden_score"], "causal")


def _inputs(past: bool) -> list[onnx.ValueInfoProto]:
    inputs = [info("input_ids", [1, 1 if past else "new"], TensorProto.INT64)]
    inputs.append(info("encoder_attention_mask", [1, "source"], TensorProto.INT64))
    if not past:
        return [*inputs, info("encoder_hidden_states", [1, "source", WIDTH])]
    lengths = {name: "source" if "cross" in name else "past" for name in cache_names("past")}
    caches = [info(name, [1, HEADS, length, HEAD]) for name, length in lengths.items()]
    return [*inputs, info("cache_position", [1], TensorProto.INT64), *caches]


def _outputs(past: bool, passed_on: bool) -> list[onnx.ValueInfoProto]:
    names = cache_names("present", ("self",) if past and not passed_on else ("self", "cross"))
    return [info("logits", [1, "new", VOCABULARY]), *(info(name, [1, HEADS, None, HEAD]) for name in names)]


def pieces(count: int, *, seed: int = 3) -> list[dict[str, np.ndarray]]:
    """Inputs of the encoder, some padded."""
    random, found = np.random.default_rng(seed), []
    for index in range(count):
        mask = np.ones((1, LENGTH), np.int64)
        mask[0, LENGTH - index % 3 :] = 0
        found.append({"input_ids": random.integers(3, VOCABULARY, (1, LENGTH)), "attention_mask": mask})
    return found
