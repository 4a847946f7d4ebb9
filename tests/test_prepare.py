"""What NNCF gets: every tensor typed and ranked, constants among the initializers, an opset with per-channel Q/DQ."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from tinymodels import WIDTH, attention

import attnquant
from attnquant import runtime
from attnquant.errors import ModelError
from attnquant.host import prepare as module
from attnquant.host.prepare import prepare
from attnquant.opset import upgraded

F32, F16, I64, I32, BOOL = (getattr(TensorProto, name) for name in ("FLOAT", "FLOAT16", "INT64", "INT32", "BOOL"))
X = np.random.default_rng(3).standard_normal((2, 5, 32)).astype(np.float32)


def info(name: str, dtype: int = F32, shape: Sequence[int | str] | None = ("b", "s", 32)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def node(
    op: str, inputs: Sequence[str], outputs: Sequence[str], name: str | None = None, **attributes: object
) -> onnx.NodeProto:
    made = f"{op}_{outputs[0]}" if name is None else name
    return helper.make_node(op, list(inputs), list(outputs), name=made, **attributes)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    data = np.random.default_rng(sum(map(ord, name))).standard_normal(shape) / 6
    return numpy_helper.from_array(data.astype(np.float32), name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 21,
    inner: Sequence[onnx.ValueInfoProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
    ir_version: int = 10,
) -> ir.Model:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights), value_info=list(inner))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("local", 1)]
    proto = helper.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=ir_version)
    return ir.from_proto(proto)


def contrib(batch: int | str = "b", length: int | str = "s") -> ir.Model:
    """Two blocks of projection and com.microsoft MultiHeadAttention, which onnx can't infer anything about."""
    nodes, source = [], "x"
    for block in ("0", "1"):
        nodes += [node("MatMul", [source, f"w{role}{block}"], [f"{role}{block}"], f"{role}_proj{block}") for role in "qkv"]
        heads = [f"{role}{block}" for role in "qkv"]
        nodes.append(
            helper.make_node("MultiHeadAttention", heads, [f"a{block}"], f"mha{block}", domain="com.microsoft", num_heads=4)
        )
        nodes.append(node("Relu", [f"a{block}"], [f"h{block}"]))
        source = f"h{block}"
    nodes.append(node("Identity", [source], ["y"]))
    weights = [weight(f"w{role}{block}", 32, 32) for role in "qkv" for block in "01"]
    return model(nodes, [info("x", F32, (batch, length, 32))], [info("y", F32, None)], weights)


def described(graph: ir.Model) -> dict[str, tuple[ir.DataType | None, list[int | None] | None]]:
    """{tensor: (type, dimensions)}, dimensions that are no number as None."""
    found = {}
    for item in graph.graph:
        for value in item.outputs:
            shape = None if value.shape is None else [dim if isinstance(dim, int) else None for dim in value.shape.dims]
            found[str(value.name)] = (value.dtype, shape)
    return found


def border(graph: ir.Model) -> list[tuple[str | None, str, str]]:
    return [(value.name, str(value.type), str(value.shape)) for value in (*graph.graph.inputs, *graph.graph.outputs)]


def test_what_onnx_cannot_infer_is_measured() -> None:
    original = contrib()
    before = ir.to_proto(original).SerializeToString()
    result = prepare(original, {"x": X})
    assert ir.to_proto(original).SerializeToString() == before
    assert border(result) == border(original)
    found = described(result)
    assert found["a0"] == (ir.DataType.FLOAT, [None, None, None])
    assert found["q0"] == (ir.DataType.FLOAT, [None, None, 32])
    inner = {name: row for name, row in found.items() if name != "y"}
    assert [
        name for name, (dtype, shape) in inner.items() if dtype != ir.DataType.FLOAT or shape is None or len(shape) != 3
    ] == []


def test_fixed_inputs_give_fixed_shapes() -> None:
    found = described(prepare(contrib(2, 5), {"x": X}))
    assert {tuple(found[name][1] or ()) for name in ("q0", "a0", "h0", "q1", "a1", "h1")} == {(2, 5, 32)}


@pytest.mark.parametrize("chunk", [1, 32])
def test_measuring_runs_once_for_what_nothing_infers(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    fetch = module._fetch

    def counted(probe: ir.Model, names: Sequence[str], sample: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        asked.append(list(names))
        return fetch(probe, names, sample)

    monkeypatch.setattr(module, "_fetch", counted)
    monkeypatch.setattr(module, "_CHUNK", chunk)
    prepare(contrib(), {"x": X})
    assert asked == ([["a0", "a1"]] if chunk > 1 else [["a0"], ["a1"]])


def test_nothing_runs_where_everything_is_inferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "session", None)
    plain = model(
        [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["y"])], [info("x")], [info("y")], [weight("w", 32, 32)]
    )
    assert described(prepare(plain, {}))["h"] == (ir.DataType.FLOAT, [None, None, 32])


def test_other_types_than_float_are_told_apart() -> None:
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Cast", ["x"], ["half"], to=F16),
        node("Cast", ["half"], ["wide"], to=F32),
        node("Greater", ["wide", "zero"], ["mask"]),
        node("Where", ["mask", "x", "zero"], ["y"]),
        node("Identity", ["shape"], ["dims"]),
    ]
    zero = numpy_helper.from_array(np.float32(0), "zero")
    found = described(prepare(model(nodes, [info("x")], [info("y"), info("dims", I64, (3,))], [zero]), {"x": X}))
    kinds = {name: None if dtype is None else dtype.name for name, (dtype, _) in found.items()}
    assert kinds["shape"], kinds["mask"] == ("INT64", "BOOL")
    assert (kinds["half"], kinds["wide"]) == ("FLOAT16", "FLOAT")


def test_impossible_declarations_of_inner_tensors_are_replaced_and_others_kept() -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["r"]), node("Neg", ["r"], ["y"])]
    inner = [info("h", F32, ("b", "s", 99)), info("r", F32, ("batch", "length", 32))]
    result = prepare(model(nodes, [info("x")], [info("y")], [weight("w", 32, 32)], inner=inner), {"x": X})
    shapes = {str(value.name): str(value.shape) for item in result.graph for value in item.outputs}
    assert shapes["h"] == "[b,s,32]"
    assert shapes["r"] == "[batch,length,32]"


def test_node_names_are_unique_and_given_ones_kept() -> None:
    nodes = [
        node("Relu", ["x"], ["a"], ""),
        node("Neg", ["a"], ["b"], "same"),
        node("Abs", ["b"], ["c"], "same"),
        node("Neg", ["c"], ["y"], "last"),
    ]
    names = [item.name for item in prepare(model(nodes, [info("x")], [info("y")]), {"x": X}).graph]
    assert len(set(names)) == 4
    assert all(names)
    assert (names[1], names[3]) == ("same", "last")


def test_constants_are_initializers_that_are_no_inputs() -> None:
    nodes = [
        node("Constant", [], ["c"], value=weight("c_data", 32)),
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "c"], ["t"]),
        node("Mul", ["t", "gain"], ["y"]),
    ]
    inputs = [info("x"), info("w", F32, (32, 32)), info("gain", F32, (32,))]
    original = model(nodes, inputs, [info("y")], [weight("w", 32, 32), weight("gain", 32)], ir_version=3)
    result = prepare(original, {"x": X})
    assert [value.name for value in result.graph.inputs] == ["x"]
    assert set(result.graph.initializers) == {"w", "gain", "c"}
    assert result.ir_version >= 4
    assert [value.name for value in original.graph.inputs] == ["x", "w", "gain"]
    fed = prepare(original, {"x": X, "gain": np.ones(32, np.float32)})
    assert [value.name for value in fed.graph.inputs] == ["x", "gain"]
    expected = runtime.run(original, {"x": X})["y"]
    assert np.array_equal(runtime.run(result, {"x": X})["y"], expected)


def test_functions_stay_calls_and_are_typed() -> None:
    body = [helper.make_node("Relu", ["a"], ["b"], name="inner"), helper.make_node("Neg", ["b"], ["r"], name="neg")]
    made = helper.make_function("local", "Act", ["a"], ["r"], body, [helper.make_opsetid("", 21)])
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Act", ["h"], ["t"], name="call", domain="local"),
        node("Abs", ["t"], ["y"]),
    ]
    result = prepare(model(nodes, [info("x")], [info("y")], [weight("w", 32, 32)], functions=[made]), {"x": X})
    assert [item.op_type for item in result.graph] == ["MatMul", "Act", "Abs"]
    dtype, shape = described(result)["t"]
    assert dtype == ir.DataType.FLOAT
    assert shape is not None
    assert len(shape) == 3


def branch(opset: int, inner: Callable[[], onnx.NodeProto]) -> ir.Model:
    then = helper.make_graph([inner()], "then", [], [info("t", F32, None)])
    other = helper.make_graph([node("Identity", ["x"], ["e"])], "else", [], [info("e", F32, None)])
    chosen = node("If", ["flag"], ["i"], "if", then_branch=then, else_branch=other)
    nodes = [node("MatMul", ["x", "w"], ["h"]), chosen, node("Relu", ["i"], ["y"])]
    inputs = [info("x", F32, (1, 5, 32)), info("flag", BOOL, ())]
    return model(nodes, inputs, [info("y", F32, None)], [weight("w", 32, 32)], opset=opset)


def test_results_of_control_flow_are_ranked() -> None:
    original = branch(21, lambda: node("Relu", ["x"], ["t"]))
    result = prepare(original, {"x": X[:1], "flag": np.array(True)})
    dtype, shape = described(result)["i"]
    assert dtype == ir.DataType.FLOAT
    assert shape is not None
    assert len(shape) == 3


def test_old_opsets_are_raised_and_compute_the_same() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "fc"),
        node("Unsqueeze", ["h"], ["u"], "grow", axes=[0]),
        node("Squeeze", ["u"], ["s"], "shrink", axes=[0]),
        node("Softmax", ["s"], ["y"], "softmax", axis=1),  # Before opset 13: over the last two axes together.
    ]
    original = model(nodes, [info("x")], [info("y")], [weight("w", 32, 32)], opset=11, ir_version=6)
    result = prepare(original, {"x": X})
    assert result.opset_imports[""] == 13
    assert {"fc", "grow", "shrink", "softmax"} <= {str(item.name) for item in result.graph}
    expected, got = runtime.run(original, {"x": X})["y"], runtime.run(result, {"x": X})["y"]
    assert np.allclose(expected, got, atol=1e-6)
    assert np.allclose(expected.sum((1, 2)), 1, atol=1e-5)
    assert all(
        dtype is not None and (shape is not None or name == "y") for name, (dtype, shape) in described(result).items()
    )


def test_opsets_that_cannot_be_raised_are_refused() -> None:
    """Scan 8 with sequence lengths has no later form; onnx's converter says so by an assertion."""
    body = helper.make_graph([node("Identity", ["i"], ["o"])], "body", [info("i", F32, None)], [info("o", F32, None)])
    scan = node("Scan", ["lens", "x"], ["y"], "scan", body=body, num_scan_inputs=1)
    original = model([scan], [info("lens", I64, ("b",)), info("x")], [info("y")], opset=8, ir_version=4)
    with pytest.raises(ModelError, match="opset 13 or later, got 8"):
        upgraded(original)
    plain = contrib()
    assert upgraded(plain) is plain


def test_a_conversion_that_does_not_load_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Converters before onnx 1.20 leave the bodies of control flow as they are."""

    def careless(proto: onnx.ModelProto, version: int) -> onnx.ModelProto:
        proto.opset_import[0].version = version
        return proto

    monkeypatch.setattr(onnx.version_converter, "convert_version", careless)
    original = branch(11, lambda: node("Squeeze", ["x"], ["t"], "in_branch", axes=[0]))
    with pytest.raises(ModelError, match=r"in_branch.*opset 13 or later, got 11"):
        upgraded(original)


def test_a_conversion_that_changes_results_is_refused() -> None:
    """Hardmax meant all axes from `axis` on before opset 13; onnx 1.23 converts it as if nothing had changed."""
    original = model([node("Hardmax", ["x"], ["y"], axis=1)], [info("x")], [info("y")], opset=11, ir_version=6)
    with pytest.raises(ModelError, match="'y' changes"):
        prepare(original, {"x": X})


def test_a_sample_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ModelError, match="fails to run"):
        prepare(contrib(), {"x": X[..., :7]})


def test_nncf_sees_every_edge_as_float() -> None:
    """Against NNCF itself: as many edges as the graph has, all of them floating point."""
    from nncf.common.graph.layer_attributes import Dtype
    from nncf.onnx.graph.nncf_graph_builder import GraphConverter

    result = prepare(contrib(), {"x": X})
    edges = GraphConverter.create_nncf_graph(ir.to_proto(result)).get_all_edges()
    expected = sum(value is not None and not value.is_initializer() for item in result.graph for value in item.inputs)
    found = list(edges)
    assert len(found) == expected + len(result.graph.outputs)
    assert {edge.dtype for edge in found} == {Dtype.FLOAT}


def test_an_attention_on_projections_of_unknown_rank_quantizes(tmp_path: Path) -> None:
    """onnx's inference takes a query of a rank and no last size for one of width 0, and the runtime refuses the graph."""
    proto = attention()
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    x = np.random.default_rng(4).standard_normal((2, 5, WIDTH)).astype(np.float32)
    result = attnquant.quantize(path, [{"x": x}])
    result.save(tmp_path / "quantized.onnx")
    wanted, got = (runtime.run(ir.load(file), {"x": x})["y"] for file in (path, tmp_path / "quantized.onnx"))
    assert 10 * np.log10((wanted**2).sum() / ((wanted - got) ** 2).sum()) > 30
    shapes = described(prepare(ir.load(path), {"x": x}))
    assert shapes["q"] == shapes["v"] == (ir.DataType.FLOAT, [None, None, WIDTH])
