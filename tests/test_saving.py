import os
import random
import resource
import signal
import sys
import time

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from tinymodels import WIDTH, attention, linear, made, run, weights

from attnquant import saving
from attnquant.errors import ModelError
from attnquant.model import copy, load, save, session_source, to_proto, uses_external_data

X = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)
EXPECTED = run(linear(), {"x": X})[0]


def scaled(factor):
    """The linear model with its weight times `factor`."""
    model = linear()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weights(0, WIDTH, WIDTH) * np.float32(factor), "w"))
    return load(model)


def result(path):
    return run(str(path), {"x": X})[0]


def test_a_small_model_is_one_file_that_runs(tmp_path):
    save(load(linear()), tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == ["m.onnx"]
    np.testing.assert_array_equal(result(tmp_path / "m.onnx"), EXPECTED)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)


def test_external_data_are_one_more_file_with_small_tensors_kept_inside(tmp_path):
    model = load(linear())
    before = to_proto(model).SerializeToString()
    save(model, tmp_path / "m.onnx", external="always")
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert (tmp_path / "m.onnx.data").stat().st_size == WIDTH * WIDTH * 4
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
    assert [tensor.data_location for tensor in stored] == [onnx.TensorProto.EXTERNAL, onnx.TensorProto.DEFAULT]
    np.testing.assert_array_equal(result(tmp_path / "m.onnx"), EXPECTED)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    assert to_proto(model).SerializeToString() == before
    assert to_proto(load(tmp_path / "m.onnx")).graph.initializer[0] == linear().graph.initializer[0]


def test_every_tensor_starts_on_a_page(tmp_path):
    big = attention()
    for index, tensor in enumerate(big.graph.initializer):
        tensor.CopyFrom(numpy_helper.from_array(weights(index, WIDTH, WIDTH), tensor.name))
    save(load(big), tmp_path / "m.onnx", external="always")
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph.initializer
    entries = [{entry.key: entry.value for entry in tensor.external_data} for tensor in stored]
    assert [(entry["location"], int(entry["offset"]), int(entry["length"])) for entry in entries] == [
        ("m.onnx.data", 4096 * index, 1024) for index in range(4)
    ]
    sample = {"x": np.ones((1, 3, WIDTH), np.float32)}
    np.testing.assert_array_equal(run(str(tmp_path / "m.onnx"), sample)[0], run(big, sample)[0])


@pytest.mark.parametrize(("external", "files"), [("auto", 2), ("never", 1), ("always", 2)])
def test_what_was_external_stays_so_unless_told_otherwise(tmp_path, external, files):
    save(load(linear()), tmp_path / "in.onnx", external="always")
    (tmp_path / "out").mkdir()
    save(load(tmp_path / "in.onnx"), tmp_path / "out" / "out.onnx", external=external)
    assert len(os.listdir(tmp_path / "out")) == files
    np.testing.assert_array_equal(result(tmp_path / "out" / "out.onnx"), EXPECTED)


def test_a_model_too_large_for_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "MAX_INLINE_BYTES", 1000)
    monkeypatch.setattr(saving, "LARGE", 1000)
    model = load(linear())
    with pytest.raises(ModelError, match="at most 1,000"):
        to_proto(model)
    with pytest.raises(ModelError, match="at most 1,000"):
        save(model, tmp_path / "m.onnx", external="never")
    assert not os.listdir(tmp_path)
    save(model, tmp_path / "m.onnx")
    assert len(os.listdir(tmp_path)) == 2
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path))
    with session_source(model) as source:
        assert isinstance(source, str)
        np.testing.assert_array_equal(run(source, {"x": X})[0], EXPECTED)
    assert len(os.listdir(tmp_path)) == 2


def test_sessions_of_small_models_are_made_from_bytes(tmp_path):
    save(load(linear()), tmp_path / "m.onnx", external="always")
    with session_source(load(tmp_path / "m.onnx")) as source:
        assert isinstance(source, bytes)
        np.testing.assert_array_equal(run(source, {"x": X})[0], EXPECTED)


def test_overwriting_the_input_and_its_data(tmp_path):
    path = tmp_path / "m.onnx"
    save(load(linear()), path, external="always")
    model = load(path)
    for turn in range(3):
        save(model, path)
        assert len(os.listdir(tmp_path)) == turn + 3
        np.testing.assert_array_equal(result(path), EXPECTED)
        np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), weights(0, WIDTH, WIDTH))
    save(scaled(2), path)
    np.testing.assert_array_equal(result(path), run(to_proto(scaled(2)), {"x": X})[0])
    np.testing.assert_array_equal(to_proto(copy(model)).graph.initializer[0].raw_data, weights(0, WIDTH, WIDTH).tobytes())


def test_a_data_file_of_that_name_is_not_touched(tmp_path, caplog):
    (tmp_path / "m.onnx.data").write_bytes(b"of another model")
    save(load(linear()), tmp_path / "m.onnx", external="always")
    assert (tmp_path / "m.onnx.data").read_bytes() == b"of another model"
    assert "m.onnx.data" in caplog.text
    np.testing.assert_array_equal(result(tmp_path / "m.onnx"), EXPECTED)


def test_links_to_models(tmp_path):
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real" / "m.onnx", tmp_path / "link.onnx")
    save(load(linear()), tmp_path / "link.onnx")
    assert (tmp_path / "link.onnx").is_symlink()
    np.testing.assert_array_equal(result(tmp_path / "real" / "m.onnx"), EXPECTED)
    with pytest.raises(ModelError, match="next to the model"):
        save(load(linear()), tmp_path / "link.onnx", external="always")
    os.symlink(tmp_path / "real", tmp_path / "folder")
    save(load(linear()), tmp_path / "folder" / "n.onnx", external="always")
    np.testing.assert_array_equal(result(tmp_path / "folder" / "n.onnx"), EXPECTED)


def test_attributes_are_never_external_in_what_is_written(tmp_path):
    held = numpy_helper.from_array(weights(0, 100, WIDTH), "held")
    nodes = [helper.make_node("Constant", [], ["c"], value=held), helper.make_node("MatMul", ["x", "c"], ["y"])]
    ends = [helper.make_tensor_value_info("x", 1, [3, 100]), helper.make_tensor_value_info("y", 1, [3, WIDTH])]
    model = load(made(helper.make_graph(nodes, "g", ends[:1], ends[1:]), 17))
    save(model, tmp_path / "m.onnx", external="always")
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert run(str(tmp_path / "m.onnx"), {"x": np.ones((3, 100), np.float32)})[0].shape == (3, WIDTH)


def test_a_renamed_initializer_is_written_under_its_new_name(tmp_path):
    save(load(linear()), tmp_path / "m.onnx", external="always")
    model = load(tmp_path / "m.onnx")
    model.graph.initializers["w"].name = "new"
    save(model, tmp_path / "n.onnx")
    assert {tensor.name for tensor in onnx.load(tmp_path / "n.onnx").graph.initializer} == {"new", "b"}
    np.testing.assert_array_equal(result(tmp_path / "n.onnx"), EXPECTED)


def test_a_model_that_onnx_can_not_hold(tmp_path):
    model = load(linear())
    model.graph[0].attributes["odd"] = ir.Attr("odd", ir.AttributeType.SPARSE_TENSOR, object())
    with pytest.raises(ModelError, match="can't be written"):
        save(model, tmp_path / "m.onnx")
    assert not os.listdir(tmp_path)


def test_data_that_shrink_while_they_are_read(tmp_path):
    save(load(linear()), tmp_path / "m.onnx", external="always")
    model = load(tmp_path / "m.onnx")
    os.truncate(tmp_path / "m.onnx.data", 100)
    for external in ("auto", "never"):
        with pytest.raises(ModelError):
            save(model, tmp_path / "n.onnx", external=external)
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]


@pytest.mark.parametrize(
    ("external", "room", "doc"), [("never", 100, ""), ("always", 100, ""), ("always", 1024, "d" * 2000)]
)
def test_a_full_disk_leaves_the_original_untouched(tmp_path, external, room, doc):
    """Full while the model is written, while its data are, and between the two."""
    path = tmp_path / "m.onnx"
    path.write_bytes(b"the original")
    model = load(linear())
    model.doc_string = doc
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(ModelError, match="Nothing was changed"):
            save(model, path, external=external)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b"the original"
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork and SIGKILL")
@pytest.mark.parametrize("external", ["never", "always"])
def test_a_kill_during_save_leaves_a_whole_model(tmp_path, external):
    path = tmp_path / "m.onnx"
    models = [scaled(factor) for factor in (1, 2, 3)]
    known = {to_proto(model).graph.initializer[0].raw_data for model in models}
    save(models[0], path, external=external)
    pause = random.Random(11)
    for _ in range(25):
        child = os.fork()
        if not child:
            for turn in range(1_000_000):
                save(models[turn % 3], path, external=external)
                for name in os.listdir(tmp_path):
                    # Old data files would fill the folder; each still belongs to a whole model when it is removed.
                    if name.endswith(".data") and turn % 4 == 0 and name not in path.read_bytes().decode("latin-1"):
                        os.unlink(tmp_path / name)
            os._exit(0)
        time.sleep(pause.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert to_proto(load(path)).graph.initializer[0].raw_data in known
        for name in os.listdir(tmp_path):
            if name.endswith(".data"):
                assert (tmp_path / name).stat().st_size == WIDTH * WIDTH * 4
            elif name != "m.onnx":
                assert uses_external_data(ir.load(tmp_path / name)) == (external == "always")


def test_a_model_without_large_weights_gets_no_data(tmp_path):
    save(load(linear(rows=2)), tmp_path / "m.onnx", external="always")
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_a_message_for_libraries_that_take_no_file(tmp_path, monkeypatch):
    model = load(linear())
    with saving.message(model) as (proto, folder):
        assert folder is None
        np.testing.assert_array_equal(run(proto, {"x": X})[0], EXPECTED)
    monkeypatch.setattr(saving, "MAX_INLINE_BYTES", 1000)
    monkeypatch.setattr(saving, "LARGE", 1000)
    monkeypatch.setattr(saving.tempfile, "tempdir", str(tmp_path))
    with saving.message(model) as (proto, folder):
        assert not proto.graph.initializer[0].HasField("raw_data")
        onnx.load_external_data_for_model(proto, folder)
        np.testing.assert_array_equal(run(proto, {"x": X})[0], EXPECTED)
    assert not os.listdir(tmp_path)
