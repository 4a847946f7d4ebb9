"""Time of `recognize` on decoders of up to 50,000 nodes, written out as exporters write them.

    python -m benchmarks.scaling [NODES...]

Every layer has computed shapes, rotary embedding, repeat_kv, an added mask and a gated feed-forward; it must be found as one
attention. Times are of this process's processor time, best of three.
"""

import sys
import time

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from rich import box
from rich.console import Console
from rich.table import Table

from attnquant import recognize

WIDTH, HEADS, GROUPS, SIZE = 32, 4, 2, 8


class _Decoder:
    """A graph that grows by layers; methods that add nodes return the name of what they computed."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"n{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def constant(self, value: object, dtype: type = np.float32) -> str:
        """An initializer, one for each value."""
        array = np.array(value, dtype)
        name = f"c_{array.dtype}_{'x'.join(map(str, array.shape))}_{hash(array.tobytes()):x}"
        self.constants.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def ints(self, *values: int) -> str:
        return self.constant(values, np.int64)

    def linear(self, value: str, wide: int = WIDTH, narrow: int = WIDTH) -> str:
        return self.op("MatMul", value, self.constant(np.full((narrow, wide), 0.1)))

    def norm(self, value: str) -> str:
        mean = self.op("ReduceMean", self.op("Pow", value, self.constant(2.0)), self.ints(-1))
        root = self.op("Sqrt", self.op("Add", mean, self.constant(1e-6)))
        return self.op("Mul", self.op("Div", value, root), self.constant(np.ones(WIDTH)))

    def heads(self, value: str, heads: int) -> str:
        """[B, S, heads * d] -> [B, heads, S, d], its sizes computed at run time."""
        sizes = [self.op("Gather", self.op("Shape", value), self.ints(axis), axis=0) for axis in (0, 1)]
        shape = self.op("Concat", *sizes, self.ints(heads, SIZE), axis=0)
        return self.op("Transpose", self.op("Reshape", value, shape), perm=[0, 2, 1, 3])

    def rotary(self, value: str) -> str:
        half = SIZE // 2
        first = self.op("Slice", value, self.ints(0), self.ints(half), self.ints(-1))
        second = self.op("Slice", value, self.ints(half), self.ints(SIZE), self.ints(-1))
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        return self.op("Add", self.op("Mul", value, "cos"), self.op("Mul", turned, "sin"))

    def repeated(self, value: str) -> str:
        """[B, groups, S, d] -> [B, heads, S, d]."""
        wide = self.op("Unsqueeze", value, self.ints(2))
        copies = self.op("Expand", wide, self.ints(1, 1, HEADS // GROUPS, 1, 1))
        return self.op("Reshape", copies, self.ints(0, HEADS, -1, SIZE))

    def layer(self, value: str) -> str:
        normed = self.norm(value)
        query = self.rotary(self.heads(self.linear(normed), HEADS))
        key = self.repeated(self.rotary(self.heads(self.linear(normed, GROUPS * SIZE), GROUPS)))
        values = self.repeated(self.heads(self.linear(normed, GROUPS * SIZE), GROUPS))
        product = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Add", self.op("Mul", product, self.constant(SIZE**-0.5)), "mask")
        context = self.op("MatMul", self.op("Softmax", scores, axis=-1), values)
        joined = self.op("Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), self.ints(0, 0, WIDTH))
        value = self.op("Add", value, self.linear(joined))
        normed = self.norm(value)
        gate = self.linear(normed, 64)
        gated = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), self.linear(normed, 64))
        return self.op("Add", value, self.linear(gated, WIDTH, 64))


def decoder(nodes: int) -> tuple[ir.Model, int]:
    """A decoder of about `nodes` nodes, and its number of layers."""
    built, value, layers = _Decoder(), "x", 0
    while len(built.nodes) < nodes:
        value, layers = built.layer(value), layers + 1
    shapes = {"x": ["b", "s", WIDTH], "mask": ["b", 1, "s", "s"], "cos": ["s", SIZE], "sin": ["s", SIZE]}
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    output = helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, ["b", "s", WIDTH])
    graph = helper.make_graph(built.nodes, "decoder", inputs, [output], list(built.constants.values()))
    return ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)), layers


def main(arguments: list[str]) -> int:
    """Print the table; 1 where an attention is missing."""
    table = Table("nodes", "attentions", "found", "seconds", "microseconds a node", box=box.MARKDOWN)
    missing = False
    for nodes in map(int, arguments or ("5000", "50000")):
        model, layers = decoder(nodes)
        times, found = [], 0
        for _ in range(3):
            start = time.process_time()
            found = len(recognize(model).sites)
            times.append(time.process_time() - start)
        missing |= found != layers
        best, count = min(times), len(model.graph)
        table.add_row(f"{count:,}", f"{layers:,}", f"{found:,}", f"{best:.2f}", f"{1e6 * best / count:.0f}")
    Console(width=120).print(table)
    return int(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
