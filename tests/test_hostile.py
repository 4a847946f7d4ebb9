"""Two hundred broken and hostile inputs through load, save and data; the command line: benchmarks/hostile.py."""

import logging
import os
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from hostile import Case, cases, sound
from layeredmodels import DECOMPOSED, encoder, samples
from onnx import numpy_helper
from tinymodels import WIDTH, attention

from attnquant.data import checked, load_data, materialize
from attnquant.errors import DataError, ModelError
from attnquant.model import copy, load, name_nodes, save, to_proto
from attnquant.quantization import quantize
from attnquant.validity import validate

SEED = 20
COUNT = 210


def read(case: Case, folder: Path) -> str:
    """What becomes of a case: "accepted", or the error's text."""
    try:
        model = copy(load(case.model))
        name_nodes(model)
        validate(model)
        samples = checked(materialize(load_data(case.data)), model)
        assert list(samples)
        save(model, folder / "saved.onnx")
        load(folder / "saved.onnx")
    except (ModelError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(case, what became of it, files afterwards, their bytes kept) of each."""
    folder = tmp_path_factory.mktemp("hostile")
    logging.disable(logging.WARNING)
    found = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases(SEED, COUNT, folder):
                before = _contents(case)
                outcome = read(case, case.model.parent)
                saved = case.model.parent / "saved.onnx"
                found.append((case, outcome, saved.exists(), before == _contents(case)))
                saved.unlink(missing_ok=True)
    finally:
        logging.disable(logging.NOTSET)
    return found


def _contents(case: Case) -> list[bytes | None]:
    return [path.read_bytes() if path is not None and path.is_file() else None for path in (case.model, case.data)]


def test_the_input_that_all_were_made_from_is_accepted(tmp_path):
    assert read(sound(tmp_path), tmp_path) == "accepted"


def test_every_refusal_is_ours_and_nothing_is_written(results):
    wrong = []
    for case, outcome, saved, kept in results:
        if case.blames == "recipe":
            assert outcome == "accepted"
            continue
        expected = {"model": "ModelError", "data": "DataError"}[case.blames]
        refused = outcome.startswith(expected)
        if case.outcome == "refused" and not refused:
            wrong.append((case.kind, outcome))
        if saved != (outcome == "accepted") or not kept:
            wrong.append((case.kind, "left a file" if saved else "changed its input"))
    assert not wrong


def test_messages_are_sentences(results):
    for case, outcome, _, _ in results:
        assert "Traceback" not in outcome, case.kind
        assert len(outcome) < 1200, case.kind
        # What is wrong, then what to do: two sentences at least.
        assert outcome == "accepted" or (outcome.endswith(".") and ". " in outcome), (case.kind, outcome)


def test_random_damage_is_mostly_found(results):
    damaged = [outcome for case, outcome, _, _ in results if "structure" in case.kind]
    assert len(damaged) > 4
    assert sum(outcome != "accepted" for outcome in damaged) > len(damaged) // 3


def test_the_same_seed_gives_the_same_inputs(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = (list(cases(3, 60, tmp_path / name)) for name in "ab")
    assert [_contents(case)[0] for case in first] == [_contents(case)[0] for case in second]
    assert len(os.listdir(tmp_path / "a")) >= 60


def test_weights_in_float64_are_refused_by_the_node():
    """No quantizer takes them."""
    model = onnx.ModelProto()
    model.CopyFrom(encoder(DECOMPOSED, layers=1))
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    data = [{name: array.astype(np.float64) for name, array in sample.items()} for sample in samples(1)]
    with pytest.raises(ModelError, match=r"'n_layer0.attn.q.product' \(MatMul\): expected weights in float32.*got float64"):
        quantize(model, data)


def test_constant_data_give_finite_scales_around_zero():
    """Data without one negative value: Q and K keep the symmetric range that the recipe asks for."""
    zeros = [{"x": np.zeros((1, 4, WIDTH), np.float32)}]
    model = to_proto(quantize(attention(), zeros, target="onnxruntime-cpu").model)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    (operator,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert all(np.isfinite(array).all() for array in constants.values())
    for name in operator.input[:2]:
        _, scale, zero_point = makers[name].input
        assert constants[scale] > 0
        assert constants[zero_point] == 128
