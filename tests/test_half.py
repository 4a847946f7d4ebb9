"""Half precision: the float32 twin agrees with its original, and the way back gives the original's types and bytes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant.dtypes import HALF, infer_types
from attnquant.emission.clean import drop_dead_initializers
from attnquant.emission.narrow import narrow
from attnquant.emission.widen import WidenRecord, twin_feeds, widen
from attnquant.errors import ModelError
from attnquant.graph import bodies
from attnquant.model import load, save
from attnquant.target import Target, parse_target
from attnquant.validity import validate

F16, F32, BF16, I64, BOOL = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16, TensorProto.INT64, TensorProto.BOOL
RNG = np.random.default_rng(7)
X = (RNG.standard_normal((2, 5, 64)) * 0.5).astype(np.float16)
LARGE = 1000
"""Bytes above which an initializer counts as a weight here."""


def weight(name: str, *shape: int, dtype: type = np.float16) -> onnx.TensorProto:
    data = (np.random.default_rng(len(name) + sum(map(ord, name))).standard_normal(shape) / 8).astype(np.float32)
    return numpy_helper.from_array(data.astype(dtype), name)


def info(name: str, dtype: int, shape: Sequence[int | str] | None = ("b", "s", 64)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 21,
    functions: Sequence[onnx.FunctionProto] = (),
) -> ir.Model:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=10))


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str], name: str | None = None, **attributes: object
) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=name or f"{op}_{outputs[0]}", **attributes)


def session(graph: ir.Model, optimized: str | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if optimized is not None:
        options.optimized_model_filepath = optimized
    return ort.InferenceSession(ir.to_proto(graph).SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(graph: ir.Model, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    made = session(graph)
    return dict(zip([item.name for item in made.get_outputs()], made.run(None, dict(feeds)), strict=True))


def snr(reference: np.ndarray, other: np.ndarray) -> float:
    a, b = reference.astype(np.float64), other.astype(np.float64)
    return float(10 * np.log10(np.sum(a**2) / max(np.sum((a - b) ** 2), 1e-30)))


def linears(opset: int = 21) -> ir.Model:
    """norm > fc1 > bias > gelu-like > fc2 > bias, and a residual."""
    nodes = [
        node("LayerNormalization", ["x", "g", "beta"], ["n"], stash_type=1),
        node("MatMul", ["n", "w1"], ["m1"], "fc1"),
        node("Add", ["m1", "b1"], ["a1"]),
        node("Sigmoid", ["a1"], ["s1"]),
        node("MatMul", ["s1", "w2"], ["m2"], "fc2"),
        node("Add", ["m2", "b2"], ["a2"]),
        node("Add", ["a2", "x"], ["y"]),
    ]
    weights = [
        weight("g", 64),
        weight("beta", 64),
        weight("w1", 64, 128),
        weight("b1", 128),
        weight("w2", 128, 64),
        weight("b2", 64),
    ]
    return model(nodes, [info("x", F16)], [info("y", F16)], weights, opset=opset)


def attention(dtype: int = F16, opset: int = 24) -> ir.Model:
    """q, k, v projections, ai.onnx Attention with a half softmax, output projection."""
    kind = np.float16 if dtype == F16 else ml_dtypes.bfloat16
    nodes = [node("MatMul", ["x", f"w{role}"], [role], f"proj_{role}") for role in "qkv"]
    nodes += [
        node("Attention", ["q", "k", "v"], ["a"], "attention", q_num_heads=4, kv_num_heads=4, softmax_precision=dtype),
        node("MatMul", ["a", "wo"], ["y"], "proj_o"),
    ]
    return model(
        nodes,
        [info("x", dtype)],
        [info("y", dtype)],
        [weight(f"w{role}", 64, 64, dtype=kind) for role in "qkvo"],
        opset=opset,
    )


def packed_gqa() -> ir.Model:
    """com.microsoft GroupQueryAttention on packed QKV with a cache: onnx alone can't type it."""
    nodes = [
        node("MatMul", ["x", "wqkv"], ["qkv"], "qkv_proj"),
        helper.make_node(
            "GroupQueryAttention",
            ["qkv", "", "", "past_k", "past_v", "lens", "total"],
            ["a", "present_k", "present_v"],
            name="gqa",
            domain="com.microsoft",
            num_heads=4,
            kv_num_heads=2,
        ),
        node("MatMul", ["a", "wo"], ["y"], "o_proj"),
    ]
    caches = [info(f"past_{role}", F16, ("b", 2, "past", 16)) for role in "kv"]
    presents = [info(f"present_{role}", F16, ("b", 2, "total", 16)) for role in "kv"]
    integers = [numpy_helper.from_array(np.full(2, 4, np.int32), "lens"), numpy_helper.from_array(np.int32(5), "total")]
    return model(
        nodes,
        [info("x", F16), *caches],
        [info("y", F16), *presents],
        [weight("wqkv", 64, 128), weight("wo", 64, 64), *integers],
    )


def branches() -> ir.Model:
    """An If whose branches read the input, an initializer and an inner tensor of the main graph, all half."""
    then = helper.make_graph(
        [
            node("MatMul", ["h", "w"], ["t0"]),
            node("Constant", [], ["c"], value=weight("c", 64)),
            node("Add", ["t0", "c"], ["t"]),
        ],
        "then",
        [],
        [info("t", F16)],
    )
    other = helper.make_graph([node("Add", ["x", "e0"], ["e"])], "else", [], [info("e", F16)], [weight("e0", 64)])
    nodes = [
        node("Relu", ["x"], ["h"]),
        node("If", ["flag"], ["i"], "branch", then_branch=then, else_branch=other),
        node("Add", ["i", "h"], ["y"]),
    ]
    return model(nodes, [info("x", F16), info("flag", BOOL, ())], [info("y", F16)], [weight("w", 64, 64)])


def loop() -> ir.Model:
    """A Loop with a half state."""
    body = helper.make_graph(
        [node("Identity", ["go"], ["go_on"]), node("Mul", ["state", "half"], ["next"])],
        "body",
        [info("i", I64, ()), info("go", BOOL, ()), info("state", F16, None)],
        [info("go_on", BOOL, ()), info("next", F16, None)],
        [numpy_helper.from_array(np.float16(0.5), "half")],
    )
    weights = [numpy_helper.from_array(np.int64(3), "three"), numpy_helper.from_array(np.bool_(True), "yes")]
    return model(
        [node("Loop", ["three", "yes", "x"], ["y"], "loop", body=body)], [info("x", F16)], [info("y", F16)], weights
    )


def casts() -> ir.Model:
    """Half and float side by side: f16 > f32 > f16, a float input, a float output, outputs that are read on."""
    nodes = [
        node("Cast", ["x"], ["x32"], "up", to=F32),
        node("Mul", ["x32", "x32"], ["sq"]),
        node("Cast", ["sq"], ["sq16"], "down", to=F16),
        node("Cast", ["f"], ["f16"], "f_down", to=F16),
        node("Add", ["sq16", "f16"], ["z"]),
        node("MatMul", ["z", "w"], ["y"]),
        node("Cast", ["y"], ["y32"], "out", to=F32),
        node("Neg", ["y"], ["neg"]),
        node("Identity", ["x"], ["same"]),
        node("Cast", ["y"], ["yi"], to=I64),
    ]
    outputs = [info("y", F16), info("y32", F32), info("neg", F16), info("same", F16), info("yi", I64)]
    return model(nodes, [info("x", F16), info("f", F32)], outputs, [weight("w", 64, 64)])


def makers() -> ir.Model:
    """Operators that make half tensors out of nothing or out of other types, and a sequence of half tensors."""
    half = helper.make_tensor("v", F16, [1], np.array([0.25], np.float16))
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["quarter"], value=half),
        node("Constant", [], ["two"], value=numpy_helper.from_array(np.float16(2.0), "whatever")),
        node("CastLike", ["square", "x"], ["square16"]),
        node("Add", ["square16", "square16"], ["e2"]),
        node("MatMul", ["x", "e2"], ["xe"]),
        node("SplitToSequence", ["xe", "one"], ["parts"], axis=1),
        node("ConcatFromSequence", ["parts"], ["joined"], axis=1),
        node("Mul", ["joined", "two"], ["d"]),
        node("Add", ["d", "quarter"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.int64(1), "one"), weight("square", 64, 64, dtype=np.float32)]
    return model(nodes, [info("x", F16)], [info("y", F16)], weights)


def function() -> ir.Model:
    """A model-local function with a half constant and a Cast whose type is the caller's."""
    body = [
        helper.make_node("Constant", [], ["k"], name="k", value=numpy_helper.from_array(np.float16(3.0), "k")),
        helper.make_node("Cast", ["a"], ["c"], name="c"),
        helper.make_node("Mul", ["c", "k"], ["r"], name="r"),
    ]
    body[1].attribute.append(onnx.AttributeProto(name="to", type=onnx.AttributeProto.INT, ref_attr_name="kind"))
    made = helper.make_function("local", "Triple", ["a"], ["r"], body, [helper.make_opsetid("", 21)], ["kind"])
    nodes = [
        helper.make_node("Triple", ["f"], ["t"], name="call", domain="local", kind=F16),
        node("MatMul", ["t", "w"], ["y"]),
    ]
    return model(nodes, [info("f", F32)], [info("y", F16)], [weight("w", 64, 64)], functions=[made])


def quantized_already() -> ir.Model:
    """A weight behind DequantizeLinear with a half scale."""
    integers = RNG.integers(-63, 64, (64, 64)).astype(np.int8)  # 7 bits: nothing saturates on a CPU without VNNI.
    weights = [
        numpy_helper.from_array(integers, "wq"),
        numpy_helper.from_array((RNG.random(64) / 500 + 0.001).astype(np.float16), "ws"),
    ]
    nodes = [node("DequantizeLinear", ["wq", "ws"], ["w"], "dq", axis=1), node("MatMul", ["x", "w"], ["y"], "fc")]
    return model(nodes, [info("x", F16)], [info("y", F16)], weights)


def cast_weight() -> ir.Model:
    """A weight behind DequantizeLinear with a float scale, cast to half; and a half weight computed with in float."""
    integers = numpy_helper.from_array(RNG.integers(-63, 64, (64, 64)).astype(np.int8), "wq")
    scales = numpy_helper.from_array((RNG.random(64) / 500 + 0.001).astype(np.float32), "ws")
    nodes = [
        node("DequantizeLinear", ["wq", "ws"], ["w32"], "dq", axis=1),
        node("Cast", ["w32"], ["w"], "cast_w", to=F16),
        node("MatMul", ["x", "w"], ["m"], "fc"),
        node("Cast", ["stored"], ["v"], "cast_v", to=F32),
        node("Cast", ["m"], ["m32"], "cast_m", to=F32),
        node("MatMul", ["m32", "v"], ["y"], "fc2"),
    ]
    return model(nodes, [info("x", F16)], [info("y", F32)], [integers, scales, weight("stored", 64, 64)])


FEEDS: dict[str, np.ndarray] = {
    "x": X,
    "f": X.astype(np.float32)[::-1].copy(),
    "flag": np.array(True),
    "past_k": np.zeros((2, 2, 0, 16), np.float16),
    "past_v": np.zeros((2, 2, 0, 16), np.float16),
}
ZOO: dict[str, Callable[[], ir.Model]] = {
    "linears": linears,
    "attention": attention,
    "packed_gqa": packed_gqa,
    "branches": branches,
    "loop": loop,
    "casts": casts,
    "makers": makers,
    "function": function,
    "quantized_already": quantized_already,
    "cast_weight": cast_weight,
}
CPU, CUDA = parse_target("onnxruntime-cpu@1.31.1"), parse_target("onnxruntime-cuda@1.31.1")


def feeds(graph: ir.Model) -> dict[str, np.ndarray]:
    return {str(value.name): FEEDS[str(value.name)] for value in graph.graph.inputs}


def half_tensors(graph: ir.Model) -> list[str]:
    """Every half precision tensor that inference finds anywhere."""
    types = infer_types(graph)
    return sorted({str(value.name) for value in types.types if types.dtype(value) in HALF})


def border(graph: ir.Model) -> list[tuple[str | None, str, str]]:
    return [(value.name, str(value.type), str(value.shape)) for value in (*graph.graph.inputs, *graph.graph.outputs)]


@pytest.mark.parametrize("name", ZOO)
def test_twin_agrees_on_the_same_feeds(name: str) -> None:
    original = ZOO[name]()
    before = ir.to_proto(original).SerializeToString()
    twin, record = widen(original)
    assert record
    assert ir.to_proto(original).SerializeToString() == before
    assert border(twin) == border(original)
    borders = {str(value.name) for value in (*twin.graph.inputs, *twin.graph.outputs)}
    assert set(half_tensors(twin)) <= borders
    expected, got = run(original, feeds(original)), run(twin, feeds(twin))
    for output, array in expected.items():
        assert got[output].dtype == array.dtype
        if array.dtype == np.int64:
            assert np.mean(got[output] == array) > 0.95
        else:
            assert snr(array, got[output]) > 45


@pytest.mark.parametrize("name", ZOO)
def test_twin_keeps_node_names(name: str) -> None:
    original = ZOO[name]()
    twin, record = widen(original)
    kept = {path: [item.name for item in body] for path, body in bodies(original)}
    for path, body in bodies(twin):
        names = [item.name for item in body if item.name not in record.casts]
        left_out = [name for name, _ in record.bypassed.values()]
        assert names == [item for item in kept[path] if item not in left_out]
        assert left_out == (["cast_w"] if name == "cast_weight" else [])
    assert all(made.startswith("attnquant.") for made in record.casts)


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda target: target.name)
@pytest.mark.parametrize("name", ZOO)
def test_narrow_of_an_untouched_twin_is_the_original(name: str, target: Target) -> None:
    original = ZOO[name]()
    twin, record = widen(original)
    twin = ir.from_proto(ir.to_proto(twin))  # As after a round through a host: other objects, same names.
    back = narrow(twin, record, target)
    for (path, left), (_, right) in zip(bodies(original), bodies(back), strict=True):
        assert [(item.name, item.op_type) for item in left] == [(item.name, item.op_type) for item in right], path
        for one, other in zip(left, right, strict=True):
            assert [str(v.name) for v in one.inputs if v is not None] == [str(v.name) for v in other.inputs if v is not None]
            mine = {key: value for key, value in one.attributes.items() if value.type == ir.AttributeType.INT}
            assert {key: other.attributes[key].value for key in mine} == {key: value.value for key, value in mine.items()}
    assert border(back) == border(original)
    for key, value in original.graph.initializers.items():
        found = back.graph.initializers[key].const_value
        assert found is not None
        assert value.const_value is not None
        assert (found.dtype, found.tobytes()) == (value.const_value.dtype, value.const_value.tobytes())
    expected, got = run(original, feeds(original)), run(back, feeds(back))
    assert all(np.array_equal(expected[key], got[key]) for key in expected)


def test_float_model_comes_back_itself() -> None:
    plain = model(
        [node("MatMul", ["f", "w"], ["y"])], [info("f", F32)], [info("y", F32)], [weight("w", 64, 64, dtype=np.float32)]
    )
    twin, record = widen(plain)
    assert twin is plain
    assert not record
    assert record == WidenRecord()


def test_softmax_precision_follows_and_comes_back() -> None:
    twin, record = widen(attention())
    attributes = {item.name: item.attributes for item in twin.graph}
    assert attributes["attention"]["softmax_precision"].value == F32
    back = {item.name: item for item in narrow(twin, record, CPU).graph}
    assert back["attention"].attributes["softmax_precision"].value == F16


def test_type_attributes_without_a_cpu_kernel() -> None:
    """EyeLike, RandomNormalLike and Bernoulli name their output type; only the graph can be checked."""
    nodes = [node(op, ["x"], [op], op, dtype=F16) for op in ("EyeLike", "RandomNormalLike", "Bernoulli")]
    original = model(nodes, [info("x", F16, (4, 4))], [info(op.output[0], F16, (4, 4)) for op in nodes], opset=22)
    twin, record = widen(original)
    assert {item.attributes["dtype"].value for item in twin.graph if item.op_type != "Cast"} == {F32}
    assert {item.attributes["dtype"].value for item in narrow(twin, record, CPU).graph} == {F16}


def test_renamed_tells_the_twins_tensors() -> None:
    twin, record = widen(linears())
    tensors = {str(value.name): value for item in twin.graph for value in item.outputs}
    assert set(record.renamed) == {"x", "y"}
    assert all(tensors[inner].dtype == ir.DataType.FLOAT for inner in record.renamed.values())


def test_bits_and_bordering_sequences_are_refused() -> None:
    bits = model(
        [node("BitCast", ["x"], ["y"], "bits", to=TensorProto.INT16)],
        [info("x", F16)],
        [info("y", TensorProto.INT16)],
        opset=26,
    )
    with pytest.raises(ModelError, match="'bits'"):
        widen(bits)
    sequence = helper.make_tensor_sequence_value_info("parts", F16, None)
    parts = model([node("SplitToSequence", ["x"], ["parts"], axis=1)], [info("x", F16)], [sequence])
    with pytest.raises(ModelError, match="'parts'"):
        widen(parts)


# --- quantized twins ---------------------------------------------------------------------------------------------------


def constant(graph: ir.Graph, name: str, data: np.ndarray) -> ir.Value:
    value = ir.Value(
        name=name,
        const_value=ir.tensor(data, name=name),
        type=ir.TensorType(ir.DataType.from_numpy(data.dtype)),
        shape=ir.Shape(data.shape),
    )
    graph.register_initializer(value)
    return value


def pair(graph: ir.Graph, value: ir.Value, scale: float, before: ir.Node) -> ir.Value:
    """QuantizeLinear > DequantizeLinear with a float32 scale behind a tensor, uint8 around 128."""
    ports = [
        constant(graph, f"{value.name}_scale", np.float32(scale).reshape(())),
        constant(graph, f"{value.name}_zero", np.uint8(128).reshape(())),
    ]
    quantize = ir.Node("", "QuantizeLinear", [value, *ports], name=f"q_{value.name}")
    dequantize = ir.Node("", "DequantizeLinear", [quantize.outputs[0], *ports], name=f"dq_{value.name}")
    quantize.outputs[0].name, dequantize.outputs[0].name = f"{value.name}_q", f"{value.name}_dq"
    graph.insert_before(before, [quantize, dequantize])
    return dequantize.outputs[0]


def quantize(graph: ir.Model, linear: Sequence[str], ports: Sequence[tuple[str, int]] = (), scale: float = 0.04) -> None:
    """What a host does to a float32 twin, in place: W8A8 linears and Q/DQ at ports, float32 scales."""
    nodes = {item.name: item for item in graph.graph}
    done: dict[ir.Value, ir.Value] = {}
    for name in linear:
        item = nodes[name]
        data = item.inputs[1].const_value.numpy()
        step = np.abs(data).max(0) / 63  # 7 bits: nothing saturates on a CPU without VNNI.
        weights = [
            constant(graph.graph, f"{name}_wq", np.round(data / step).astype(np.int8)),
            constant(graph.graph, f"{name}_ws", step.astype(np.float32)),
        ]
        dequantize = ir.Node("", "DequantizeLinear", weights, [ir.AttrInt64("axis", 1)], name=f"dq_w_{name}")
        dequantize.outputs[0].name = f"{name}_wdq"
        graph.graph.insert_before(item, dequantize)
        item.replace_input_with(1, dequantize.outputs[0])
        source = item.inputs[0]
        if source not in done:
            done[source] = pair(graph.graph, source, scale, item)
        item.replace_input_with(0, done[source])
    for name, index in ports:
        item = nodes[name]
        item.replace_input_with(index, pair(graph.graph, item.inputs[index], scale, item))


def optimized(graph: ir.Model, folder: Path) -> onnx.ModelProto:
    path = f"{folder}/optimized.onnx"
    session(graph, path)
    return onnx.load(path)


def cast_pairs(graph: ir.Model) -> list[str]:
    """Casts that do nothing, or directly undo another Cast."""
    types = infer_types(graph)
    found = []
    for item in graph.graph:
        if item.op_type != "Cast":
            continue
        source = item.inputs[0]
        before = source.producer()
        undone = (
            before is not None and before.op_type == "Cast" and types.dtype(before.inputs[0]) == types.dtype(item.outputs[0])
        )
        if undone or types.dtype(source) == types.dtype(item.outputs[0]):
            found.append(item.name)
    return found


def large_floats(graph: ir.Model) -> list[str]:
    return [
        key
        for key, value in graph.graph.initializers.items()
        if value.dtype == ir.DataType.FLOAT and value.const_value.nbytes > LARGE
    ]


def size(graph: ir.Model) -> int:
    return len(ir.to_proto(graph).SerializeToString())


def check_types(graph: ir.Model) -> None:
    assert infer_types(graph).conflicts == []
    onnx.checker.check_model(ir.to_proto(graph))


def test_cpu_linears_are_float32_islands(tmp_path: Path) -> None:
    original = linears()
    twin, record = widen(original)
    quantize(twin, ["fc1", "fc2"])
    result = narrow(twin, record, CPU)
    check_types(result)
    types = infer_types(result)
    made = {item.name: item for item in result.graph}
    for name in ("fc1", "fc2"):
        assert all(types.dtype(value) == ir.DataType.FLOAT for value in (*made[name].inputs, *made[name].outputs))
    for item in result.graph:
        if item.op_type in ("LayerNormalization", "Add", "Sigmoid"):
            assert all(types.dtype(value) == ir.DataType.FLOAT16 for value in (*item.inputs, *item.outputs)), item.name
        if item.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert types.dtype(item.inputs[1]) == ir.DataType.FLOAT
    assert cast_pairs(result) == []
    assert sum(item.op_type == "Cast" for item in result.graph) == 4
    operators = [item.op_type for item in optimized(result, tmp_path).graph.node]
    assert operators.count("MatMulIntegerToFloat") == 2
    assert not {"MatMul", "Gemm", "FusedMatMul", "DequantizeLinear"} & set(operators)
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 25


def test_islands_meet_without_casts(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "w1"], ["m"], "fc1"), node("MatMul", ["m", "w2"], ["y"], "fc2")]
    original = model(nodes, [info("x", F16)], [info("y", F16)], [weight("w1", 64, 64), weight("w2", 64, 64)])
    twin, record = widen(original)
    quantize(twin, ["fc1", "fc2"])
    result = narrow(twin, record, CPU)
    check_types(result)
    assert [item.op_type for item in result.graph if item.op_type == "Cast"] == ["Cast", "Cast"]
    assert cast_pairs(result) == []
    assert border(result) == border(original)


def test_quantized_attention_ports_on_cpu() -> None:
    original = attention()
    twin, record = widen(original)
    quantize(twin, ["proj_q", "proj_k", "proj_v", "proj_o"], [("attention", 0), ("attention", 1)])
    result = narrow(twin, record, CPU)
    check_types(result)
    types = infer_types(result)
    made = {item.name: item for item in result.graph}
    assert [types.dtype(value) for value in made["attention"].inputs] == [ir.DataType.FLOAT16] * 3
    value = made["attention"].inputs[2].producer()
    assert (value.op_type, value.inputs[0].producer().name) == ("Cast", "proj_v")
    quantizer = made["q_q"]
    assert quantizer.inputs[0].producer().name == "proj_q"
    assert cast_pairs(result) == []
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 20


@pytest.mark.parametrize("name", ["linears", "attention"])
@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda target: target.name)
def test_nothing_grows_and_nothing_dead_stays(name: str, target: Target) -> None:
    original = ZOO[name]()
    twin, record = widen(original)
    quantize(twin, [str(item.name) for item in twin.graph if item.op_type == "MatMul"])
    result = narrow(twin, record, target)
    assert large_floats(result) == []
    read = {value for item in result.graph for value in item.inputs}
    assert all(value in read for value in result.graph.initializers.values())
    weights = sum(value.const_value.nbytes for item, value in original.graph.initializers.items() if item.startswith("w"))
    scales = sum(value.const_value.nbytes for item, value in result.graph.initializers.items() if item.endswith("_ws"))
    assert size(result) < size(original) - weights // 2 + scales + 4000
    for key in {"g", "beta", "b1", "b2"} & set(original.graph.initializers):
        assert result.graph.initializers[key].const_value.tobytes() == original.graph.initializers[key].const_value.tobytes()


@pytest.mark.parametrize(("opset", "expected"), [(21, ir.DataType.FLOAT16), (18, ir.DataType.FLOAT)])
def test_cuda_scales_are_half_where_the_opset_has_them(opset: int, expected: ir.DataType) -> None:
    original = linears(opset)
    twin, record = widen(original)
    quantize(twin, ["fc1", "fc2"])
    result = narrow(twin, record, CUDA)
    check_types(result)
    types = infer_types(result)
    scales = {types.dtype(item.inputs[1]) for item in result.graph if item.op_type in ("QuantizeLinear", "DequantizeLinear")}
    assert scales == {expected}
    made = {item.name: item for item in result.graph}
    assert types.dtype(made["fc1"].outputs[0]) == ir.DataType.FLOAT16
    assert cast_pairs(result) == []
    assert ("Cast" in [item.op_type for item in result.graph]) == (expected == ir.DataType.FLOAT)
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 25


def test_a_scale_below_half_precision_stays_float() -> None:
    """1e-7 is two of fp16's smallest steps: 19 % off; 2e-3 is exact to 2**-11."""
    original = linears()
    for scale, expected in ((1e-7, ir.DataType.FLOAT), (2e-3, ir.DataType.FLOAT16)):
        twin, record = widen(original)
        quantize(twin, ["fc1"], scale=scale)
        result = narrow(twin, record, CUDA)
        check_types(result)
        made = {item.name: item for item in result.graph}
        assert infer_types(result).dtype(made["q_n"].inputs[1]) == expected
        assert infer_types(result).dtype(made["dq_w_fc1"].inputs[1]) == ir.DataType.FLOAT16


def test_a_saved_result_has_the_same_bytes(tmp_path: Path) -> None:
    original = attention()
    twin, record = widen(original)
    quantize(twin, ["proj_q", "proj_k", "proj_v"])
    result = narrow(twin, record, CPU)
    save(result, tmp_path / "half.onnx")
    again = load(tmp_path / "half.onnx")
    expected = {key: (value.dtype, value.const_value.tobytes()) for key, value in result.graph.initializers.items()}
    assert {key: (value.dtype, value.const_value.tobytes()) for key, value in again.graph.initializers.items()} == expected
    assert expected["wo"][1] == original.graph.initializers["wo"].const_value.tobytes()
    validate(again)


def test_existing_half_scales_are_kept(tmp_path: Path) -> None:
    original = quantized_already()
    twin, record = widen(original)
    result = narrow(twin, record, CPU)
    assert result.graph.initializers["ws"].const_value.tobytes() == original.graph.initializers["ws"].const_value.tobytes()
    item = next(item for item in twin.graph if item.name == "fc")
    item.replace_input_with(0, pair(twin.graph, item.inputs[0], 0.02, item))
    result = narrow(twin, record, CPU)
    check_types(result)
    assert result.graph.initializers["wq"].const_value.tobytes() == original.graph.initializers["wq"].const_value.tobytes()
    operators = [found.op_type for found in optimized(result, tmp_path).graph.node]
    assert "MatMulIntegerToFloat" in operators
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 25


def test_changed_initializers_are_converted_and_clipped() -> None:
    original = linears()
    twin, record = widen(original)
    bias = twin.graph.initializers["b1"]
    changed = bias.const_value.numpy() + np.float32(0.5)
    changed[:2] = 1e6, -1e6
    bias.const_value = ir.tensor(changed, name="b1")
    result = narrow(twin, record, CPU).graph.initializers["b1"].const_value
    assert result.dtype == ir.DataType.FLOAT16
    assert np.array_equal(result.numpy()[:2], np.array([65504, -65504], np.float16))
    assert np.array_equal(result.numpy()[2:], changed[2:].astype(np.float16))


def test_added_float_nodes_take_the_type_that_flows_in() -> None:
    """A smoothing Mul behind the norm works in half; its constant is converted, and copied where an island reads it too."""
    original = linears()
    twin, record = widen(original)
    item = next(found for found in twin.graph if found.name == "fc1")
    factor = constant(twin.graph, "factor", np.linspace(0.5, 1.5, 64, dtype=np.float32))
    smooth = ir.Node("", "Mul", [item.inputs[0], factor], name="smooth")
    smooth.outputs[0].name = "smoothed"
    twin.graph.insert_before(item, smooth)
    item.replace_input_with(0, smooth.outputs[0])
    quantize(twin, ["fc1"])
    for target in (CPU, CUDA):
        result = narrow(twin, record, target)
        check_types(result)
        found = result.graph.initializers["factor"].const_value
        assert found.dtype == ir.DataType.FLOAT16
        assert np.array_equal(found.numpy(), np.linspace(0.5, 1.5, 64, dtype=np.float32).astype(np.float16))


@pytest.mark.parametrize("target", [CPU, CUDA], ids=lambda target: target.name)
def test_added_operators_that_take_no_half_get_float(target: Target) -> None:
    """DynamicQuantizeLinear is float32 only, and so is what scales its product back."""
    original = linears()
    twin, record = widen(original)
    graph = twin.graph
    item = next(found for found in graph if found.name == "fc1")
    data = item.inputs[1].const_value.numpy()
    integers = constant(graph, "fc1_wq", np.round(data * 63 / np.abs(data).max()).astype(np.int8))
    factor = constant(graph, "fc1_ws", np.float32(np.abs(data).max() / 63))
    dynamic = ir.Node("", "DynamicQuantizeLinear", [item.inputs[0]], num_outputs=3, name="dynamic")
    product = ir.Node("", "MatMulInteger", [dynamic.outputs[0], integers, dynamic.outputs[2]], name="product")
    wide = ir.Node("", "Cast", [product.outputs[0]], [ir.AttrInt64("to", F32)], name="wide")
    scales = ir.Node("", "Mul", [dynamic.outputs[1], factor], name="scales")
    scaled = ir.Node("", "Mul", [wide.outputs[0], scales.outputs[0]], name="scaled")
    for made in (dynamic, product, wide, scales, scaled):
        for index, value in enumerate(made.outputs):
            value.name = f"{made.name}_{index}"
    graph.insert_before(item, [dynamic, product, wide, scales, scaled])
    item.outputs[0].replace_all_uses_with(scaled.outputs[0])
    graph.remove(item, safe=True)
    result = narrow(twin, record, target)
    check_types(result)
    assert cast_pairs(result) == []
    assert sum(found.op_type == "Cast" for found in result.graph) == 3
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 25


def test_int32_bias_stays_in_its_island(tmp_path: Path) -> None:
    """MatMul + Add(DequantizeLinear(int32)) is one int8 Gemm for the runtime: no Cast may part them."""
    original = linears()
    twin, record = widen(original)
    quantize(twin, ["fc1"])
    add = next(found for found in twin.graph if found.name == "Add_a1")
    step = twin.graph.initializers["fc1_ws"].const_value.numpy() * np.float32(0.04)
    bias = np.round(twin.graph.initializers["b1"].const_value.numpy() / step).astype(np.int32)
    ports = [constant(twin.graph, "b1_q", bias), constant(twin.graph, "b1_s", step)]
    dequantize = ir.Node("", "DequantizeLinear", ports, [ir.AttrInt64("axis", 0)], name="dq_b1")
    dequantize.outputs[0].name = "b1_dq"
    twin.graph.insert_before(add, dequantize)
    add.replace_input_with(1, dequantize.outputs[0])
    result = narrow(twin, record, CPU)
    check_types(result)
    made = {found.name: found for found in result.graph}
    assert [value.producer().name for value in made["Add_a1"].inputs] == ["fc1", "dq_b1"]
    assert infer_types(result).dtype(made["Sigmoid_s1"].inputs[0]) == ir.DataType.FLOAT16
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 25


def test_casts_between_untyped_integers_stay() -> None:
    """Exporters leave inner tensors undeclared: two unknown types are not the same type."""
    nodes = [
        node("Greater", ["x", "zero"], ["positive"]),
        node("Cast", ["positive"], ["count"], "to_int", to=I64),
        node("Mul", ["count", "count"], ["y"]),
    ]
    zero = numpy_helper.from_array(np.float16(0), "zero")
    original = model(nodes, [info("x", F16)], [info("y", I64)], [zero])
    twin, record = widen(original)
    assert [item.op_type for item in narrow(twin, record, CPU).graph] == ["Greater", "Cast", "Mul"]


def test_subgraph_reads_an_island_through_a_cast() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "fc"),
        node(
            "If",
            ["flag"],
            ["y"],
            "branch",
            then_branch=helper.make_graph([node("Relu", ["h"], ["t"])], "then", [], [info("t", F16)]),
            else_branch=helper.make_graph([node("Neg", ["h"], ["e"])], "else", [], [info("e", F16)]),
        ),
    ]
    original = model(nodes, [info("x", F16), info("flag", BOOL, ())], [info("y", F16)], [weight("w", 64, 64)])
    twin, record = widen(original)
    quantize(twin, ["fc"])
    result = narrow(twin, record, CPU)
    check_types(result)
    assert snr(run(original, feeds(original))["y"], run(result, feeds(result))["y"]) > 25


def test_dead_initializers_are_dropped_even_from_float_models() -> None:
    plain = model([node("Relu", ["f"], ["y"])], [info("f", F32)], [info("y", F32)], [weight("w", 64, 64, dtype=np.float32)])
    assert list(narrow(plain, WidenRecord(), CPU).graph.initializers) == []
    assert list(plain.graph.initializers) == ["w"]
    assert drop_dead_initializers(plain) == 1


@pytest.mark.parametrize("name", ["quantized_already", "cast_weight"])
def test_the_host_keeps_quantized_weights(name: str, tmp_path: Path) -> None:
    """Through the whole pipeline: the integers stay, the activation gets a quantizer, nothing is quantized twice."""
    original = ZOO[name]()
    result = attnquant.quantize(original, [feeds(original)], target="onnxruntime-cpu@1.31.1").model
    check_types(result)
    for key in ("wq", "ws"):
        assert result.graph.initializers[key].const_value.tobytes() == original.graph.initializers[key].const_value.tobytes()
    quantizers = [item for item in result.graph if item.op_type == "QuantizeLinear"]
    assert quantizers
    assert [item.name for item in quantizers if behind(item.inputs[0]) == "DequantizeLinear"] == []
    operators = [found.op_type for found in optimized(result, tmp_path).graph.node]
    products = [found for found in operators if found in ("MatMulIntegerToFloat", "QLinearMatMul")]
    assert len(products) == (1 if name == "quantized_already" else 2)
    assert not {"MatMul", "Gemm", "DequantizeLinear"} & set(operators)


def test_computed_weights_leave_nothing_behind() -> None:
    """A weight that the exporter transposes in the graph: its integers take the place of it, and of the Transpose."""
    nodes = [node("Transpose", ["w"], ["wt"], "turn", perm=[1, 0]), node("MatMul", ["x", "wt"], ["y"], "fc")]
    original = model(nodes, [info("x", F16)], [info("y", F16)], [weight("w", 64, 64)])
    result = attnquant.quantize(original, [feeds(original)], target="onnxruntime-cpu@1.31.1").model
    assert [item.name for item in result.graph if item.op_type == "Transpose"] == []
    assert {value.dtype for value in result.graph.initializers.values() if value.const_value.nbytes > LARGE} == {
        ir.DataType.INT8
    }


def behind(value: ir.Value) -> str:
    """Operator that makes a tensor, Casts skipped."""
    producer = value.producer()
    while producer is not None and producer.op_type in ("Cast", "Identity"):
        producer = producer.inputs[0].producer()
    return "" if producer is None else producer.op_type


# --- bfloat16: ONNX Runtime's CPU has few kernels, so types are checked on the graph -------------------------------------


@pytest.mark.parametrize(("target", "scale"), [(CPU, ir.DataType.FLOAT), (CUDA, ir.DataType.BFLOAT16)])
def test_bfloat16_types(target: Target, scale: ir.DataType) -> None:
    original = attention(BF16, opset=24)
    twin, record = widen(original)
    assert record.dtypes == {ir.DataType.BFLOAT16}
    quantize(twin, ["proj_q", "proj_k", "proj_v", "proj_o"], [("attention", 0), ("attention", 1)])
    result = narrow(twin, record, target)
    check_types(result)
    types = infer_types(result)
    assert {types.dtype(item.inputs[1]) for item in result.graph if item.op_type == "DequantizeLinear"} == {scale}
    made = {item.name: item for item in result.graph}
    assert [types.dtype(value) for value in made["attention"].inputs] == [ir.DataType.BFLOAT16] * 3
    assert made["attention"].attributes["softmax_precision"].value == BF16
    assert cast_pairs(result) == []
    assert border(result) == border(original)
    assert large_floats(result) == []


def test_bfloat16_twin_computes_with_the_original_weights() -> None:
    weights = [weight("w", 64, 64, dtype=ml_dtypes.bfloat16)]
    nodes = [
        node("Cast", ["f"], ["fb"], "down", to=BF16),
        node("MatMul", ["fb", "w"], ["m"], "fc"),
        node("Cast", ["m"], ["y"], "up", to=F32),
    ]
    original = model(nodes, [info("f", F32)], [info("y", F32)], weights)
    twin, record = widen(original)
    expected = FEEDS["f"] @ original.graph.initializers["w"].const_value.numpy().astype(np.float32)
    assert np.allclose(run(twin, feeds(twin))["y"], expected, atol=1e-5)
    back = narrow(twin, record, CPU)
    assert back.graph.initializers["w"].const_value.tobytes() == original.graph.initializers["w"].const_value.tobytes()
    assert [item.op_type for item in back.graph] == ["Cast", "MatMul", "Cast"]


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("target", ["onnxruntime-cpu@1.31.1", "onnxruntime-cuda@1.31.1"])
def test_bfloat16_models_are_quantized_without_kernels(target: str, kind: type) -> None:
    """Nothing here can run them: calibration, and the check of the result, work on float32 twins."""
    original = attention(BF16)
    sample = {"x": X.astype(np.float32).astype(ml_dtypes.bfloat16).astype(kind)}
    result = attnquant.quantize(original, [sample], target=target)
    check_types(result.model)
    assert any("lacks kernels" in note for note in result.notes) is target.startswith("onnxruntime-cpu")
    assert border(result.model) == border(original)
    assert cast_pairs(result.model) == []
    made = {item.name: item for item in result.model.graph}
    behind_ports = [behind(value) for value in made["attention"].inputs]
    assert behind_ports == ["DequantizeLinear", "DequantizeLinear", "MatMul"]
    assert [behind(made[f"proj_{role}"].inputs[1]) for role in "qkvo"] == ["DequantizeLinear"] * 4
    expected = run(widen(original)[0], twin_feeds(sample))["y"]
    assert snr(expected, run(widen(result.model)[0], twin_feeds(sample))["y"]) > 20
