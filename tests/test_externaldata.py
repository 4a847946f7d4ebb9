import os

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper
from onnx.external_data_helper import set_external_data
from tinymodels import WIDTH, linear, made, run, weights

from attnquant.errors import ModelError
from attnquant.model import load, to_proto, uses_external_data

X = np.random.default_rng(5).standard_normal((3, WIDTH)).astype(np.float32)


def outside(folder, location="w.bin", *, offset=None, length=None, write=True, extra=None):
    """The path of a linear model whose weight lies in `location`, written below `folder` where `write`."""
    model = linear()
    tensor = model.graph.initializer[0]
    data = tensor.raw_data
    set_external_data(tensor, location, offset=offset, length=length)
    for key, value in (extra or {}).items():
        tensor.external_data.add(key=key, value=value)
    tensor.ClearField("raw_data")
    if write:
        target = folder / location
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"\0" * (offset or 0) + data)
    path = folder / "m.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def refused(path, *words):
    with pytest.raises(ModelError) as caught:
        load(path)
    assert all(word in str(caught.value) for word in ("'w'", *words)), str(caught.value)


@pytest.mark.parametrize(("location", "offset"), [("w.bin", None), ("data/w.bin", 4096), ("./w.bin", 3)])
def test_data_stay_on_disk_until_they_are_read(tmp_path, monkeypatch, location, offset):
    path = outside(tmp_path, location, offset=offset)
    monkeypatch.chdir(tmp_path)
    model = load("m.onnx")
    assert uses_external_data(model)
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    assert tensor.raw is None
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(tensor.numpy(), weights(0, WIDTH, WIDTH))
    np.testing.assert_array_equal(run(to_proto(model), {"x": X})[0], run(linear(), {"x": X})[0])
    again = load(model)
    assert again.graph.initializers["w"].const_value.path == str(path.parent / location).replace("/./", "/")


@pytest.mark.parametrize(
    "location",
    ["/etc/hostname", "../w.bin", "data/../../w.bin", "..\\w.bin", "C:\\w.bin", "\\\\server\\w.bin", "", "a\0b", "."],
)
def test_paths_that_are_not_below_the_folder(tmp_path, location):
    refused(outside(tmp_path, location, write=False))


def test_links_that_leave_the_folder(tmp_path):
    (tmp_path / "model").mkdir()
    secret = tmp_path / "secret.bin"
    secret.write_bytes(b"\0" * 4096)
    path = outside(tmp_path / "model", write=False)
    os.symlink(secret, tmp_path / "model" / "w.bin")
    refused(path, "leaves the model's folder")
    (tmp_path / "model" / "w.bin").unlink()
    os.symlink(tmp_path, tmp_path / "model" / "up")
    refused(outside(tmp_path / "model", "up/secret.bin", write=False), "leaves the model's folder")


def test_links_within_the_folder_and_hard_links_are_fine(tmp_path):
    path = outside(tmp_path, "real.bin")
    os.link(tmp_path / "real.bin", tmp_path / "twin.bin")
    assert load(path).graph.initializers["w"].const_value.numpy().shape == (WIDTH, WIDTH)
    path = outside(tmp_path, "w.bin", write=False)
    os.symlink("real.bin", tmp_path / "w.bin")
    np.testing.assert_array_equal(load(path).graph.initializers["w"].const_value.numpy(), weights(0, WIDTH, WIDTH))


def test_a_download_cache_of_links_into_one_folder(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    path = outside(tmp_path / "blobs", "w.bin")
    path.rename(tmp_path / "blobs" / "1234")
    (tmp_path / "blobs" / "w.bin").rename(tmp_path / "blobs" / "5678")
    os.symlink("../blobs/1234", tmp_path / "snapshot" / "m.onnx")
    os.symlink("../blobs/5678", tmp_path / "snapshot" / "w.bin")
    tensor = load(tmp_path / "snapshot" / "m.onnx").graph.initializers["w"].const_value
    np.testing.assert_array_equal(tensor.numpy(), weights(0, WIDTH, WIDTH))


def test_missing_short_and_unreadable_files(tmp_path):
    refused(outside(tmp_path, write=False), "missing", "w.bin")
    (tmp_path / "w.bin").mkdir()
    refused(tmp_path / "m.onnx", "regular file")
    (tmp_path / "w.bin").rmdir()
    path = outside(tmp_path)
    (tmp_path / "w.bin").write_bytes(b"\0" * 1023)
    refused(path, "cut off", "1024", "1023")
    refused(outside(tmp_path, offset=2**40, write=False), "cut off")


@pytest.mark.parametrize(
    "extra", [{"offset": "-1"}, {"offset": "x"}, {"length": "1e3"}, {"length": "٣"}, {"length": "1023"}, {"length": "1025"}]
)
def test_offsets_and_lengths_that_make_no_sense(tmp_path, extra):
    refused(outside(tmp_path, extra=extra))


def test_a_message_in_memory_does_not_say_where_its_data_are(tmp_path, monkeypatch):
    path = outside(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"'w'.*Pass the path"):
        load(onnx.load(path, load_external_data=False))
    assert load(onnx.load(path))


def test_a_model_in_memory_keeps_its_own_folder(tmp_path):
    model = load(ir.load(outside(tmp_path)))
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), weights(0, WIDTH, WIDTH))
    leaving = ir.load(outside(tmp_path))
    leaving.graph.initializers["w"].const_value = ir.ExternalTensor(
        "../m.onnx", 0, 1024, ir.DataType.FLOAT, shape=ir.Shape([WIDTH, WIDTH]), name="w", base_dir=tmp_path / "sub"
    )
    refused(leaving, "'..'")


def test_data_of_attributes_are_found_and_checked(tmp_path):
    tensor = numpy_helper.from_array(weights(0, 3, WIDTH), "held")
    (tmp_path / "held.bin").write_bytes(tensor.raw_data)
    set_external_data(tensor, "held.bin")
    tensor.ClearField("raw_data")
    nodes = [
        helper.make_node("Constant", [], ["c"], name="holder", value=tensor),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, 1, [3, WIDTH]) for name in "xy"]
    path = tmp_path / "m.onnx"
    path.write_bytes(made(helper.make_graph(nodes, "g", ends[:1], ends[1:]), 17).SerializeToString())
    np.testing.assert_array_equal(run(to_proto(load(path)), {"x": X})[0], X + weights(0, 3, WIDTH))
    (tmp_path / "held.bin").unlink()
    with pytest.raises(ModelError, match="'holder'"):
        load(path)
