import os
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from tinymodels import WIDTH, attention, linear, made, run, weights

from attnquant import protocheck
from attnquant.errors import ModelError
from attnquant.model import copy, load, name_nodes, opset, to_proto

X = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)


def value(name, *shape, dtype=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, dtype, shape)


def graph_of(nodes, *, inputs=None, outputs=None, initializers=(), **more):
    return helper.make_graph(
        nodes, "g", inputs or [value("x", 3, WIDTH)], outputs or [value("y", 3, WIDTH)], initializers, **more
    )


def same_result(model: onnx.ModelProto, feeds=None):
    """Loading and writing a model does not change what it computes."""
    feeds = {"x": X} if feeds is None else feeds
    loaded = to_proto(load(model))
    for before, after in zip(run(model, feeds), run(loaded, feeds), strict=True):
        np.testing.assert_array_equal(before, after)
    return loaded


def refused(source, *words):
    with pytest.raises(ModelError) as caught:
        load(source)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.__cause__ is None
    return str(caught.value)


# Valid and unusual


@pytest.mark.parametrize("version", range(13, 25))
def test_every_opset_loads_and_keeps_its_version(version):
    model = linear(version)
    loaded = same_result(model)
    assert [(item.domain, item.version) for item in loaded.opset_import] == [("", version)]
    assert loaded.ir_version == model.ir_version


def test_what_the_file_says_is_kept(tmp_path):
    model = linear()
    model.doc_string, model.producer_name, model.producer_version, model.domain, model.model_version = (
        "doc",
        "me",
        "1",
        "org",
        7,
    )
    model.metadata_props.add(key="author", value="someone")
    model.graph.doc_string = "graph doc"
    model.graph.value_info.append(value("xw", 3, WIDTH))
    model.graph.input[0].doc_string = "the input"
    model.graph.quantization_annotation.add(tensor_name="xw").quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="b")
    onnx.save(model, tmp_path / "m.onnx")
    kept = to_proto(load(tmp_path / "m.onnx"))
    for field in ("doc_string", "producer_name", "producer_version", "domain", "model_version", "ir_version"):
        assert getattr(kept, field) == getattr(model, field)
    assert [(item.key, item.value) for item in kept.metadata_props] == [("author", "someone")]
    assert kept.graph.input == model.graph.input
    assert kept.graph.output == model.graph.output
    assert kept.graph.node == model.graph.node
    assert kept.graph.initializer == model.graph.initializer
    assert kept.graph.doc_string == "graph doc"
    assert kept.graph.quantization_annotation == model.graph.quantization_annotation
    assert model.graph.value_info[0] in kept.graph.value_info


def test_initializers_as_graph_inputs_stay_inputs():
    model = linear()
    model.graph.input.append(value("w", WIDTH, WIDTH))
    loaded = same_result(model)
    assert [item.name for item in loaded.graph.input] == ["x", "w"]
    override = {"x": X, "w": weights(9, WIDTH, WIDTH)}
    np.testing.assert_array_equal(run(loaded, override)[0], run(model, override)[0])


def test_constant_nodes_instead_of_initializers():
    model = linear()
    constants = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in model.graph.initializer]
    nodes = [*constants, *model.graph.node]
    loaded = same_result(made(graph_of(nodes), 17))
    assert not loaded.graph.initializer


@pytest.mark.parametrize("flat", [True, False])
def test_sparse_tensors_mean_what_the_runtime_makes_of_them(flat):
    dense = np.zeros((WIDTH, WIDTH), np.float32)
    dense[3, 4], dense[0, 15], dense[15, 0] = 2, -1, 0.5
    places = np.flatnonzero(dense) if flat else np.argwhere(dense)
    sparse = onnx.SparseTensorProto(dims=dense.shape)
    sparse.values.CopyFrom(numpy_helper.from_array(dense[dense != 0], "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(places.astype(np.int64), "w_indices"))
    as_initializer = made(graph_of([helper.make_node("MatMul", ["x", "w"], ["y"])], sparse_initializer=[sparse]), 17)
    constant = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
    as_constant = made(graph_of([constant, helper.make_node("MatMul", ["x", "w"], ["y"])]), 17)
    for model in (as_initializer, as_constant):
        before = model.SerializeToString()
        loaded = to_proto(load(model))
        np.testing.assert_array_equal(run(loaded, {"x": X})[0], X @ dense)
        np.testing.assert_array_equal(run(model, {"x": X})[0], X @ dense)
        assert model.SerializeToString() == before


def test_functions_subgraphs_and_empty_optional_inputs():
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    branches = [
        helper.make_graph([helper.make_node(op, ["doubled"], [op])], op, [], [value(op, 3, WIDTH)]) for op in ("Neg", "Relu")
    ]
    nodes = [
        helper.make_node("Double", ["x"], ["doubled"], domain="local"),
        helper.make_node("If", ["flag"], ["branched"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Clip", ["branched", "", "high"], ["y"]),
    ]
    high = numpy_helper.from_array(np.float32(1.0), "high")
    inputs = [value("x", 3, WIDTH), value("flag", dtype=TensorProto.BOOL)]
    model = made(graph_of(nodes, inputs=inputs, initializers=[high]), 17, [double], local=1)
    loaded = same_result(model, {"x": X, "flag": np.array(True)})
    np.testing.assert_array_equal(run(loaded, {"x": X, "flag": np.array(False)})[0], np.minimum(np.maximum(2 * X, 0), 1))
    assert [list(node.input) for node in loaded.graph.node if node.op_type == "Clip"] == [["branched", "", "high"]]


def test_unsorted_nodes_are_put_in_order():
    model = linear()
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert [node.name for node in to_proto(load(model)).graph.node] == ["matmul", "add", "relu"]


@pytest.mark.parametrize("domains", [["ai.onnx"], ["", "ai.onnx"], [""]])
def test_both_names_of_the_default_domain_are_one(domains):
    model = linear(18)
    del model.opset_import[:]
    model.opset_import.extend(helper.make_opsetid(domain, 18) for domain in [*domains, "com.microsoft"])
    loaded = load(model)
    assert loaded.opset_imports == {"": 18, "com.microsoft": 18}
    assert (opset(loaded), opset(loaded, "ai.onnx"), opset(loaded, "com.microsoft"), opset(loaded, "other")) == (
        18,
        18,
        18,
        None,
    )


def test_two_versions_of_the_default_domain_are_refused():
    model = linear(18)
    model.opset_import.append(helper.make_opsetid("ai.onnx", 17))
    refused(model, "18", "17")


def test_zero_dimensional_and_empty_tensors():
    nodes = [
        helper.make_node("Mul", ["x", "scalar"], ["scaled"]),
        helper.make_node("Concat", ["scaled", "nothing"], ["y"], axis=0),
    ]
    constants = [
        numpy_helper.from_array(np.float32(0.5), "scalar"),
        numpy_helper.from_array(np.zeros((0, WIDTH), np.float32), "nothing"),
    ]
    same_result(made(graph_of(nodes, initializers=constants), 17))


@pytest.mark.parametrize(
    "dtype",
    ["FLOAT16", "BFLOAT16", "INT8", "UINT8", "BOOL", "INT32", "INT64", "DOUBLE", "UINT64", "INT4", "UINT4", "STRING"],
)
@pytest.mark.parametrize("raw", [True, False])
def test_tensors_of_every_type_in_both_encodings(dtype, raw):
    if dtype == "STRING" and raw:
        pytest.skip("strings have no raw form")
    number = getattr(TensorProto, dtype)
    if raw:
        plain = np.array([[1, 0, 1]]).astype(ir.DataType[dtype].numpy())
        tensor = ir.serde.serialize_tensor(ir.Tensor(plain, dtype=ir.DataType[dtype], name="t"))
    else:
        values = ["a", "b", "c"] if dtype == "STRING" else [1, 0, 1]
        tensor = helper.make_tensor("t", number, [1, 3], values)
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Identity", ["t"], ["u"])]
    outputs = [value("y", 3, WIDTH), value("u", 1, 3, dtype=number)]
    loaded = load(made(graph_of(nodes, outputs=outputs, initializers=[tensor]), 21))
    again = to_proto(loaded).graph.initializer[0]
    expected = numpy_helper.to_array(tensor)
    assert np.array_equal(numpy_helper.to_array(again), expected)


# What is in memory is not changed


def test_a_message_in_memory_is_not_changed_by_edits_of_the_model():
    proto = linear()
    before = proto.SerializeToString()
    model = load(proto)
    model.graph.initializers["w"].name = "renamed"
    model.graph.inputs[0].name = "renamed_input"
    name_nodes(model)
    changed = to_proto(model)
    assert proto.SerializeToString() == before
    assert {tensor.name for tensor in changed.graph.initializer} == {"renamed", "b"}
    np.testing.assert_array_equal(run(changed, {"renamed_input": X})[0], run(proto, {"x": X})[0])


def test_a_model_in_memory_is_copied():
    given = ir.serde.deserialize_model(attention())
    given.meta["note"] = 1
    before = to_proto(given).SerializeToString()
    model = load(given)
    model.graph.remove(model.graph[-1], safe=False)
    model.opset_imports[""] = 25
    model.metadata_props["k"] = "v"
    assert to_proto(given).SerializeToString() == before
    twin = copy(given)
    assert twin.meta["note"] == 1
    assert twin.graph.initializers["w_q"].const_value is given.graph.initializers["w_q"].const_value
    twin.graph[0].name = "other"
    assert given.graph[0].name == "project_q"


# Names of nodes


def test_only_missing_and_repeated_names_are_made_up():
    model = load(linear())
    for node, name in zip(model.graph, ["", "kept", "kept"], strict=True):
        node.name = name
    assert name_nodes(model) == 2
    assert [node.name for node in model.graph] == ["MatMul_0", "kept", "Relu_2"]
    assert name_nodes(model) == 0


def test_made_up_names_avoid_the_names_that_are_there():
    model = load(linear())
    for node, name in zip(model.graph, ["", None, "MatMul_0"], strict=True):
        node.name = name
    name_nodes(model)
    assert [node.name for node in model.graph] == ["MatMul_0_", "Add_1", "MatMul_0"]


def test_nodes_of_subgraphs_and_functions_are_named_too():
    double = helper.make_function(
        "local", "Double", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    branch = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], "t", [], [value("n", 3, WIDTH)])
    nodes = [
        helper.make_node("If", ["flag"], ["branched"], then_branch=branch, else_branch=branch),
        helper.make_node("Double", ["branched"], ["y"], domain="local"),
    ]
    inputs = [value("x", 3, WIDTH), value("flag", dtype=TensorProto.BOOL)]
    model = load(made(graph_of(nodes, inputs=inputs), 17, [double], local=1))
    assert name_nodes(model) == 5
    names = [node.name for node in model.graph.all_nodes()] + [node.name for node in next(iter(model.functions.values()))]
    assert len(set(names)) == 5
    assert all(names)


# Files that are no models


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"PK\x03\x04rest", "zip"),
        (b"\x80\x04\x95rest", "pickle"),
        (b"<!DOCTYPE html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"\x00\x00\x00\x00ORTM", ".ort"),
        (b"\x08\x07", "no graph"),
        (bytes(range(256)), "ONNX"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, word):
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    assert repr(str(path)) in refused(path, word)


def test_missing_files_folders_and_devices(tmp_path):
    refused(tmp_path / "none.onnx", "none.onnx", "No such file")
    refused(tmp_path, "folder")
    refused("/dev/zero", "device")
    refused("a\0b", "Can't read")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "device")
    for nothing in (None, 7, b"bytes", np.zeros(3)):
        refused(nothing, "path")


def test_a_file_that_is_cut_off(tmp_path):
    whole = attention().SerializeToString()
    for share in (0.1, 0.5, 0.9, 0.999):
        path = tmp_path / "m.onnx"
        path.write_bytes(whole[: int(len(whole) * share)])
        refused(path, "m.onnx")


def test_a_file_beyond_the_limit_of_protobuf_is_not_read(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as handle:
        handle.truncate(2**31)
    refused(path, "2,147,483,648", "external data")


# Graphs that are none


def edited(edit):
    model = linear()
    edit(model)
    return model


def test_graphs_without_nodes_or_outputs():
    refused(edited(lambda model: model.graph.ClearField("node")), "0 nodes")
    refused(edited(lambda model: model.graph.ClearField("output")), "0 outputs")
    refused(edited(lambda model: model.ClearField("opset_import")), "opset imports")
    refused(edited(lambda model: setattr(model.opset_import[0], "version", 0)), "[0]")
    refused(edited(lambda model: model.ClearField("ir_version")), "ir_version=0")
    refused(onnx.ModelProto(), "no graph")


def test_cycles_name_their_nodes():
    def bend(model):
        model.graph.node[0].input[0] = "y"

    message = refused(edited(bend), "cycle")
    assert all(name in message for name in ("matmul", "add", "relu"))

    def bite(model):
        model.graph.node[1].input[1] = "xwb"

    assert "'add'" in refused(edited(bite), "cycle")


def test_tensors_that_nothing_makes():
    def lose(model):
        model.graph.node[1].input[1] = "lost"

    refused(edited(lose), "'lost'", "'add'")

    def lose_output(model):
        model.graph.output[0].name = "lost"

    refused(edited(lose_output), "'lost'", "outputs")


def test_values_of_a_subgraph_do_not_leave_it():
    branch = helper.make_graph([helper.make_node("Neg", ["x"], ["inner"])], "t", [], [value("inner", 3, WIDTH)])
    nodes = [
        helper.make_node("If", ["flag"], ["branched"], then_branch=branch, else_branch=branch),
        helper.make_node("Add", ["inner", "branched"], ["y"], name="thief"),
    ]
    inputs = [value("x", 3, WIDTH), value("flag", dtype=TensorProto.BOOL)]
    refused(made(graph_of(nodes, inputs=inputs), 17), "'inner'", "'thief'")


def test_names_that_are_used_twice():
    refused(edited(lambda model: model.graph.initializer.append(model.graph.initializer[0])), "'w'", "initializer")
    refused(edited(lambda model: model.graph.input.append(model.graph.input[0])), "'x'", "input")
    refused(edited(lambda model: model.graph.node.append(model.graph.node[0])), "'xw'")

    def twice(model):
        model.graph.node[0].attribute.extend([helper.make_attribute("a", 1), helper.make_attribute("a", 2)])

    refused(edited(twice), "matmul", "'a'")


def test_functions_that_call_themselves():
    functions = [
        helper.make_function(
            "local",
            name,
            ["a"],
            ["b"],
            [helper.make_node(other, ["a"], ["b"], domain="local")],
            [helper.make_opsetid("local", 1)],
        )
        for name, other in (("Ping", "Pong"), ("Pong", "Ping"))
    ]
    model = made(graph_of([helper.make_node("Ping", ["x"], ["y"], domain="local")]), 17, functions, local=1)
    refused(model, "Ping", "Pong")


# Tensors whose bytes do not match


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensor: setattr(tensor, "raw_data", tensor.raw_data[:-1]), "got 1023"),
        (lambda tensor: setattr(tensor, "raw_data", tensor.raw_data + b"\0"), "got 1025"),
        (lambda tensor: setattr(tensor, "data_type", TensorProto.DOUBLE), "DOUBLE"),
        (lambda tensor: setattr(tensor, "data_type", 0), "data_type=0"),
        (lambda tensor: setattr(tensor, "data_type", 99), "data_type=99"),
        (lambda tensor: setattr(tensor, "data_type", TensorProto.STRING), "STRING"),
        (lambda tensor: tensor.dims.__setitem__(0, -1), "-1"),
        (lambda tensor: tensor.dims.__setitem__(0, 2**40), str(2**40)),
        (lambda tensor: tensor.float_data.append(1.0), "twice"),
        (lambda tensor: tensor.ClearField("raw_data"), "got 0"),
    ],
)
def test_bytes_that_do_not_match_are_named(change, word):
    model = linear()
    change(model.graph.initializer[0])
    refused(model, "'w'", word)
    held = made(graph_of([helper.make_node("Constant", [], ["y"], name="holder", value=model.graph.initializer[0])]), 17)
    refused(held, "'holder'", word)


def test_data_in_the_field_of_another_type():
    model = linear()
    tensor = model.graph.initializer[1]
    tensor.ClearField("raw_data")
    tensor.int64_data.extend(range(WIDTH))
    refused(model, "'b'", "int64_data")


# Limits


def nested(depth):
    """A chain of `depth` subgraphs, made in place: protobuf refuses to copy messages beyond its own limit."""
    model = made(graph_of([]), 17, d=1)
    graph = model.graph
    for level in range(depth + 1):
        graph.name = f"level{level}"
        node = graph.node.add(op_type="Once" if level < depth else "Neg", domain="d" if level < depth else "", output=["y"])
        node.input.append("x")
        if level < depth:
            inner = node.attribute.add(name="body", type=onnx.AttributeProto.GRAPH)
            inner.g.output.add().CopyFrom(value("y", 3, WIDTH))
            graph = inner.g
    return model


def test_nesting_has_a_limit(tmp_path):
    assert to_proto(load(nested(protocheck.MAX_NESTING)))
    refused(nested(protocheck.MAX_NESTING + 1), "deep")
    refused(nested(500), "deep")
    path = tmp_path / "m.onnx"
    whole = nested(30).SerializeToString()
    path.write_bytes(whole)
    refused(path, "m.onnx")


def test_the_number_of_nodes_has_a_limit(monkeypatch):
    monkeypatch.setattr(protocheck, "MAX_ITEMS", 4)
    refused(linear(), "more than 4")


def test_a_sparse_tensor_does_not_unfold_without_limit():
    sparse = onnx.SparseTensorProto(dims=[2**20, 2**20])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64)))
    model = made(graph_of([helper.make_node("MatMul", ["x", "w"], ["y"])], sparse_initializer=[sparse]), 17)
    refused(model, "'w'", "at most")


@pytest.mark.parametrize("indices", [[WIDTH * WIDTH], [-1], [0, 1], [[0, WIDTH]], [[0, 0, 0]]])
def test_sparse_indices_outside_the_shape(indices):
    sparse = onnx.SparseTensorProto(dims=[WIDTH, WIDTH])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array(indices, np.int64)))
    model = made(graph_of([helper.make_node("MatMul", ["x", "w"], ["y"])], sparse_initializer=[sparse]), 17)
    refused(model, "'w'", "indices")


def test_a_path_may_be_text_or_an_object(tmp_path, monkeypatch):
    onnx.save(linear(), tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    for path in (Path("m.onnx"), "m.onnx", tmp_path / "m.onnx"):
        assert len(load(path).graph) == 3


def test_operators_of_the_runtime_without_an_import() -> None:
    """onnxruntime.transformers.optimizer leaves the import out; ONNX Runtime loads that, onnx does not."""
    nodes = [
        helper.make_node("FastGelu", ["x"], ["g"], name="gelu", domain="com.microsoft"),
        helper.make_node("MatMul", ["g", "w"], ["y"], name="linear"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    weight = numpy_helper.from_array(np.ones((8, 4), np.float32), "w")
    proto = helper.make_model(helper.make_graph(nodes, "g", [x], [y], [weight]), opset_imports=[helper.make_opsetid("", 17)])
    assert load(proto).opset_imports == {"": 17, "com.microsoft": 1}
    assert [item.domain for item in proto.opset_import] == [""]
    del proto.graph.node[0]
    proto.graph.node[0].input[0] = "x"
    assert load(proto).opset_imports == {"": 17}
