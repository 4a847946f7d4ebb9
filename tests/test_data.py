import itertools
import os
import pickle
import sys
import zipfile

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from tinymodels import WIDTH, attention, linear, made

from attnquant import data, feeds
from attnquant.data import check_sample, checked, first_sample, input_names, load_data, materialize
from attnquant.errors import DataError
from attnquant.feeds import Feeds
from attnquant.model import load

GOOD = {"x": np.ones((2, 3, WIDTH), np.float32)}


@pytest.fixture(scope="module")
def model():
    return load(attention())


def numbered(count):
    return [{"x": np.full((1, 2, WIDTH), index, np.float32)} for index in range(count)]


def firsts(samples):
    return [int(sample["x"].flat[0]) for sample in samples]


def refused(call, *words):
    with pytest.raises(DataError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)


# What --data names


def test_one_file_is_one_sample(tmp_path):
    np.savez(tmp_path / "s.npz", x=np.arange(3), mask=np.ones((1, 2), bool))
    for _ in range(2):
        (sample,) = load_data(tmp_path / "s.npz")
        np.testing.assert_array_equal(sample["x"], np.arange(3))
        assert sample["mask"].dtype == bool


def test_a_folder_is_read_in_order_and_lazily(tmp_path):
    for index in (2, 0, 1):
        np.savez_compressed(tmp_path / f"s{index}.npz", x=np.full(3, index))
    (tmp_path / "notes.txt").write_text("not data")
    (tmp_path / "s3.npz").write_bytes(b"broken")
    samples = load_data(tmp_path)
    assert [int(sample["x"][0]) for sample in itertools.islice(samples, 3)] == [0, 1, 2]
    refused(lambda: list(samples), "s3.npz")


def test_a_function_of_a_module_in_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "my_samples.py").write_text(
        "import numpy as np\nclass Holder:\n    @staticmethod\n    def make():\n        yield from ({'x': np.full(2, n)} "
        "for n in range(10**9))\n"
    )
    (tmp_path / "pickle.py").write_text(
        "raise SystemExit('a module of the working folder took the place of an installed one')"
    )
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    samples = materialize(load_data("my_samples:Holder.make"), samples=4)
    assert [int(sample["x"][0]) for sample in samples] == [0, 1, 2, 3]
    assert [int(sample["x"][0]) for sample in samples] == [0, 1, 2, 3]
    assert sys.path == before
    del sys.modules["my_samples"]


def test_functions_that_fail(tmp_path, monkeypatch):
    (tmp_path / "bad_samples.py").write_text(
        "value = 3\n"
        "def fails(): raise RuntimeError('no disk')\n"
        "def one(): return {'x': 1}\n"
        "def nothing(): return None\n"
        "def empty(): return iter(())\n"
        "def late():\n    yield {'x': [1.0]}\n    raise OSError('gone')\n"
    )
    (tmp_path / "bad_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    for name, words in {
        "bad_samples:fails": ["RuntimeError", "no disk"],
        "bad_samples:one": ["iterable"],
        "bad_samples:nothing": ["NoneType"],
        "bad_samples:value": ["function"],
        "bad_samples:none": ["AttributeError"],
        "bad_module:f": ["ZeroDivisionError"],
        "no_such_module:f": ["no_such_module"],
        "bad_samples:": ["expected"],
        "os;system:f": ["expected"],
        "nothing.npz": ["nothing.npz", "FILE.npz"],
    }.items():
        refused(lambda name=name: load_data(name), *words)
    refused(lambda: materialize(load_data("bad_samples:empty")), "at least one sample")
    late = load_data("bad_samples:late")
    refused(lambda: list(late), "gone")
    del sys.modules["bad_samples"]


class _Evil:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_nothing_is_ever_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("object.npz", x=np.array([_Evil()], dtype=object))
    with open("pickle.npz", "wb") as handle:
        pickle.dump(_Evil(), handle)
    np.save("array.npy", np.ones(3))
    for name in ("object.npz", "pickle.npz", "array.npy"):
        refused(lambda name=name: list(load_data(name)), name)
    assert not os.path.exists("unpickled")


def test_damaged_files(tmp_path):
    np.savez(tmp_path / "whole.npz", x=np.arange(1000.0), y=np.arange(5))
    whole = (tmp_path / "whole.npz").read_bytes()
    path = tmp_path / "s.npz"
    for content in (b"", whole[:100], whole[:-30], whole[:60] + b"\xff" * 40 + whole[100:]):
        path.write_bytes(content)
        refused(lambda: list(load_data(path)), "s.npz")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    refused(lambda: list(load_data(path)), "s.npz")
    np.savez(path)
    refused(lambda: list(load_data(path)), "s.npz")
    (tmp_path / "empty").mkdir()
    refused(lambda: load_data(tmp_path / "empty"), "got none")


def test_arrays_that_claim_to_be_huge(tmp_path, monkeypatch):
    path = tmp_path / "s.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as handle:
        np.lib.format.write_array_header_1_0(handle, {"descr": "<f8", "fortran_order": False, "shape": (2**45,)})
    refused(lambda: list(load_data(path)), "s.npz")
    np.savez_compressed(path, x=np.zeros(10_000))
    monkeypatch.setattr(data, "MAX_SAMPLE_BYTES", 50_000)
    refused(lambda: list(load_data(path)), "at most 50,000")


# Samples from anywhere, read again and again


@pytest.mark.parametrize("make", [list, tuple, iter, lambda items: (item for item in items), lambda items: map(dict, items)])
def test_any_iterable_can_be_read_twice_up_to_the_limit(make):
    samples = materialize(make(numbered(6)), samples=4)
    assert firsts(samples) == firsts(samples) == [0, 1, 2, 3]
    assert firsts(materialize(samples, samples=2)) == [0, 1]
    assert firsts(materialize(samples, samples=300)) == [0, 1, 2, 3]


def test_no_more_is_read_than_needed():
    read = []

    def endless():
        for index in itertools.count():
            read.append(index)
            yield numbered(1)[0]

    samples = materialize(endless(), samples=3)
    assert read == [0]
    assert len(list(samples)) == 3
    assert read == [0, 1, 2]


def test_a_buffer_that_is_filled_again_and_a_loader_that_shuffles():
    buffer = np.zeros((1, 2, WIDTH), np.float32)

    def refilled():
        for index in range(3):
            buffer[:] = index
            yield {"x": buffer}

    samples = materialize(refilled())
    assert firsts(samples) == firsts(samples) == [0, 1, 2]

    class Shuffling:
        generator = np.random.default_rng(0)

        def __iter__(self):
            return iter([numbered(50)[index] for index in self.generator.permutation(50)])

    samples = materialize(Shuffling(), samples=10)
    assert firsts(samples) == firsts(samples)


def test_two_readers_at_once():
    samples = Feeds(iter(numbered(4)))
    assert firsts(samples) == firsts(samples) == [0, 1, 2, 3]
    first, second = iter(samples), iter(samples)
    assert [next(reader)["x"].flat[0] for reader in (first, second, second, first)] == [0, 0, 1, 1]


def test_memory_is_bounded_by_spilling_to_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(feeds, "MAX_HELD_BYTES", 1000)
    monkeypatch.setattr(feeds.tempfile, "tempdir", str(tmp_path))
    source = ({"file": np.full((1, 2, WIDTH), index, np.float32), "a/b\n": np.array([index])} for index in range(20))
    samples = materialize(source)
    for _ in range(2):
        read = list(samples)
        assert [int(sample["file"].flat[0]) for sample in read] == list(range(20))
        assert [int(sample["a/b\n"][0]) for sample in read] == list(range(20))
    (folder,) = os.listdir(tmp_path)
    assert len(os.listdir(tmp_path / folder)) > 20
    del samples
    assert os.listdir(tmp_path) == []
    positional = materialize(iter([(np.ones(300), np.zeros(300))] * 3), inputs=["a", "b"])
    assert [sorted(sample) for sample in positional] == [["a", "b"]] * 3


def test_arrays_by_position():
    names = ["x", "y"]
    for raw in ((np.ones(2), np.zeros(3)), [[1.0, 1.0], [0.0, 0.0, 0.0]]):
        (sample,) = materialize([raw], inputs=names)
        assert [(name, sample[name].shape) for name in sample] == [("x", (2,)), ("y", (3,))]
    (sample,) = materialize(iter([np.ones(4)]), inputs=["x"])
    assert sample["x"].shape == (4,)
    refused(lambda: materialize([np.ones(4)], inputs=names), "'x', 'y'")
    refused(lambda: materialize([(np.ones(4),) * 3], inputs=names), "of 3")


@pytest.mark.parametrize(
    "wrong",
    [None, 5, "text", b"bytes", {"x": np.ones(3)}, np.ones((3, 2)), [], iter(()), [None], ["text"], [{}], [{1: np.ones(2)}]],
)
def test_what_is_no_data(wrong):
    refused(lambda: list(materialize(wrong, inputs=["x"])), "alibration data")


@pytest.mark.parametrize("wrong", [object(), [1, [2, 3]], np.array([None, 1]), np.array(["2020-01-01"], "M8[D]")])
def test_what_is_no_array(wrong):
    refused(lambda: list(materialize([{"x": wrong}])), "'x'")


def test_samples_are_at_least_one():
    refused(lambda: materialize(numbered(3), samples=0), "at least 1")


def test_tensors_of_a_library_that_looks_like_torch():
    class Tensor:
        def detach(self):
            return self

        def cpu(self):
            return np.ones(3)

    (sample,) = materialize([{"x": Tensor()}])
    np.testing.assert_array_equal(sample["x"], np.ones(3))


# Whether a sample fits


def test_a_good_sample(model):
    check_sample(GOOD, model)
    assert input_names(model) == ["x"]
    assert first_sample([GOOD])["x"] is GOOD["x"]
    assert len(list(checked([GOOD, GOOD], model))) == 2


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({}, ["'x'", "missing"]),
        ({"X": GOOD["x"]}, ["missing ['x']", "unknown ['X']"]),
        ({"x": GOOD["x"].astype(np.float64)}, ["float32", "float64"]),
        ({"x": GOOD["x"].astype(np.int64)}, ["float32", "int64"]),
        ({"x": GOOD["x"].astype(str)}, ["float32", "<U"]),
        ({"x": GOOD["x"][0]}, ["'batch', 'sequence', 16", "[3, 16]"]),
        ({"x": GOOD["x"][..., :5]}, ["16]", "[2, 3, 5]"]),
        ({"x": GOOD["x"][:0]}, ["at least one row"]),
        ({"x": np.full((1, 1, WIDTH), np.nan, np.float32)}, ["NaN", "[0, 0, 0]"]),
        ({"x": np.full((1, 1, WIDTH), np.inf, np.float32)}, ["infinite"]),
        ({"x": np.full((1, 1, WIDTH), -np.inf, np.float32)}, ["infinite"]),
        ({"x": np.where(np.arange(WIDTH) == 3, -np.inf, 1).astype(np.float32)[None, None]}, ["infinite", "[0, 0, 3]"]),
    ],
)
def test_samples_that_do_not_fit(model, sample, words):
    refused(lambda: check_sample(sample, model), *words)
    if sample:
        refused(lambda: list(checked([GOOD, sample], model)), "sample 1", *words)


def test_arrays_the_model_does_not_take_are_left_out(model):
    assert [list(sample) for sample in checked([{**GOOD, "token_type_ids": np.ones(1)}], model)] == [["x"]]


def typed(dtype, dims=("n", 4)):
    ends = [helper.make_tensor_value_info(name, dtype, dims) for name in "xy"]
    return load(made(helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ends[:1], ends[1:]), 21))


@pytest.mark.parametrize(
    "dtype", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT8, ir.DataType.BOOL, ir.DataType.INT64]
)
def test_every_element_type(dtype):
    array = np.ones((2, 4)).astype(dtype.numpy())
    check_sample({"x": array}, typed(int(dtype)))
    refused(lambda: check_sample({"x": np.ones((2, 4), np.uint16)}, typed(int(dtype))), "uint16")
    if dtype.is_floating_point():
        array[1, 2] = np.nan
        refused(lambda: check_sample({"x": array}, typed(int(dtype))), "NaN", "[1, 2]")


def test_text_scalars_and_big_endian_arrays():
    check_sample({"x": np.array([["a"] * 4])}, typed(TensorProto.STRING))
    check_sample({"x": np.array([["a"] * 4], dtype=object)}, typed(TensorProto.STRING))
    check_sample({"x": np.float32(3)}, typed(TensorProto.FLOAT, ()))
    check_sample({"x": np.ones((1, 4), ">f4")}, typed(TensorProto.FLOAT))


def test_additive_masks_may_hold_minus_infinity_and_caches_may_be_empty():
    mask = np.where(np.tri(4, dtype=bool), 0, -np.inf).astype(np.float32)
    check_sample({"x": mask}, typed(TensorProto.FLOAT))
    check_sample({"x": np.zeros((1, 2, 0, 4), np.float32)}, typed(TensorProto.FLOAT, ("b", 2, "past", 4)))


def test_inputs_with_a_default_may_be_left_out():
    proto = linear()
    proto.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [WIDTH]))
    given = load(proto)
    assert input_names(given) == ["x"]
    x = np.ones((1, WIDTH), np.float32)
    check_sample({"x": x}, given)
    check_sample({"x": x, "b": np.zeros(WIDTH, np.float32)}, given)
    refused(lambda: check_sample({"x": x, "b": np.zeros(3, np.float32)}, given), "'b'")


def test_inputs_that_are_no_tensors():
    sequence = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, None)
    nodes = [helper.make_node("SequenceAt", ["x", "i"], ["y"])]
    index = numpy_helper.from_array(np.int64(0), "i")
    graph = helper.make_graph(nodes, "g", [sequence], [helper.make_tensor_value_info("y", 1, None)], [index])
    refused(lambda: check_sample({"x": np.ones(3)}, load(made(graph, 17))), "expected a tensor")
