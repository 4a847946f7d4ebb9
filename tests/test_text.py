import sys

import numpy as np
import pytest
from onnx import TensorProto, helper
from tinymodels import made

from attnquant import text
from attnquant.data import check_sample
from attnquant.errors import DataError
from attnquant.model import load
from attnquant.text import load_text

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[CLS]", "[SEP]", "[UNK]", *(f"w{index}" for index in range(500))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer that makes number + 3 of word w<number>, with [CLS] in front and [SEP] behind."""
    made_at = tmp_path_factory.mktemp("tokenizer")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $0 [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer.save(str(made_at / "tokenizer.json"))
    return made_at


def takes(names=("input_ids", "attention_mask"), dtype=TensorProto.INT64, shape=("batch", "length")):
    inputs = [helper.make_tensor_value_info(name, dtype, shape) for name in names]
    outputs = [helper.make_tensor_value_info("y", dtype, None)]
    return load(made(helper.make_graph([helper.make_node("Identity", [names[0]], ["y"])], "g", inputs, outputs), 17))


def written(tmp_path, numbers, separator=" "):
    path = tmp_path / "text.txt"
    path.write_text(separator.join(f"w{number}" for number in numbers), encoding="utf-8")
    return path


def test_windows_in_order_with_special_tokens(tmp_path, folder):
    model = takes()
    samples = load_text(written(tmp_path, range(25)), folder, model, length=10)
    for _ in range(2):
        read = list(samples)
        assert [sample["input_ids"].tolist() for sample in read] == [
            [[0, *range(3 + start, 11 + start), 1]] for start in (0, 8, 16)
        ]
        assert all((sample["attention_mask"] == 1).all() for sample in read)
        for sample in read:
            check_sample(sample, model)


def test_every_input_that_text_fills_in_the_type_of_the_model(tmp_path, folder):
    names = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
    model = takes(names, TensorProto.INT32, (1, 12))
    sample = next(iter(load_text(written(tmp_path, range(40)), folder, model)))
    assert list(sample) == list(names)
    assert all(array.dtype == np.int32 and array.shape == (1, 12) for array in sample.values())
    np.testing.assert_array_equal(sample["position_ids"], [range(12)])
    np.testing.assert_array_equal(sample["token_type_ids"], np.zeros((1, 12)))


def test_a_short_text_is_padded_and_masked(tmp_path, folder):
    (sample,) = load_text(written(tmp_path, [7, 8]), folder, takes())
    assert sample["input_ids"].shape == (1, 128)
    assert sample["input_ids"][0, :5].tolist() == [0, 10, 11, 1, 0]
    assert sample["attention_mask"].sum() == 4


def test_long_files_are_read_in_blocks_of_lines(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(text, "BLOCK_CHARACTERS", 100)
    numbers = list(range(100, 400))
    samples = list(load_text(written(tmp_path, numbers, "\n"), folder, takes(), length=6))
    seen = [int(token) - 3 for sample in samples for token in sample["input_ids"][0, 1:-1]]
    assert len(samples) > 50
    assert seen == sorted(set(seen))
    assert set(seen) <= set(numbers)


@pytest.mark.parametrize("names", [("ids",), ("input_ids", "past_key_values.0.key"), ("attention_mask",)])
def test_models_that_take_more_than_text(tmp_path, folder, names):
    with pytest.raises(DataError, match="input_ids"):
        load_text(written(tmp_path, range(9)), folder, takes(names))


@pytest.mark.parametrize(
    ("model", "length"),
    [
        (takes(dtype=TensorProto.FLOAT), None),
        (takes(shape=(2, 8)), None),
        (takes(shape=(8,)), None),
        (takes(shape=(1, 8)), 9),
        (takes(), 1),
    ],
)
def test_shapes_and_types_that_text_does_not_fit(tmp_path, folder, model, length):
    with pytest.raises(DataError, match=r"input_ids|window"):
        load_text(written(tmp_path, range(9)), folder, model, length=length)


def test_files_that_can_not_be_read(tmp_path, folder):
    path = written(tmp_path, range(9))
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_text(path, tmp_path, takes())
    (tmp_path / "tokenizer.json").write_text('{"version": "9"}')
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_text(path, tmp_path, takes())
    with pytest.raises(DataError, match="none of that name"):
        load_text(tmp_path / "none.txt", folder, takes())
    path.write_bytes(b"w1 \xff\xfe w2")
    with pytest.raises(DataError, match="UTF-8"):
        list(load_text(path, folder, takes()))
    path.write_bytes(b"")
    assert list(load_text(path, folder, takes())) == []


def test_without_the_package(tmp_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"attnquant\[text\]"):
        load_text(written(tmp_path, range(9)), folder, takes())
