"""Declarations that are missing, partial or wrong: a right model or an error that names the place.

Every fault that the fuzz (benchmarks/declarations.py) found has a test of its kind below, on models made here.
"""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from layeredmodels import DECOMPOSED, decoder, encoder, samples, tokens
from onnx import TensorProto, helper, numpy_helper
from tinymodels import WIDTH, attention, made, run, weights

from attnquant import runtime
from attnquant.errors import ModelError
from attnquant.model import load, to_proto
from attnquant.quantization import quantize
from attnquant.recognition import recognize
from attnquant.rewrite.fusion import fuse
from tests.corpora import entries, snr
from tests.declarations import ACCEPTED, KINDS, REFUSED, cases, sound_models
from tests.declared import judge, named, truth

SEED, COUNT = 3, 2 * len(KINDS)
QUICK = ("operator", "a_gqa_unfolded", "c_static_causal1_nonpad", "d_onnx23_past", "d_ms_mha")


@pytest.fixture(scope="module")
def quick():
    """The smallest sound models, with what they compute."""
    return {model.name: (model, truth(model)) for model in sound_models() if model.name in QUICK}


def test_every_case_ends_in_a_right_model_or_a_clear_error(quick, tmp_path):
    wrong, right, refused = [], 0, 0
    for case in list(cases(SEED, COUNT, [model for model, _ in quick.values()]))[::6]:
        folder = tmp_path / str(case.number)
        folder.mkdir()
        verdict = judge(case, quick[case.sound.name][1], folder)
        wrong += [f"{case}: {problem}" for problem in verdict.problems]
        quantized = next(text for step, text in verdict.steps.items() if step.startswith("quantize"))
        right, refused = right + (quantized == "right"), refused + (quantized != "right")
    assert not wrong, "\n".join(wrong)
    assert right > 3
    assert refused > 3


def test_the_judge_sees_what_is_wrong(quick, tmp_path):
    """A model with other weights, and an error that says nothing."""
    case = next(case for case in cases(SEED, 200, [quick["operator"][0]]) if case.wanted == ACCEPTED)
    tensor = case.proto.graph.initializer[0]
    tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    assert any(" dB" in problem for problem in judge(case, quick["operator"][1], tmp_path).problems)
    assert not named(case, "The model is broken somewhere.")
    assert named(case, "Node 'attention' is broken.")


def test_the_same_seed_gives_the_same_cases():
    first, second = ([case.proto.SerializeToString() for case in cases(7, 40)] for _ in range(2))
    assert first == second
    assert {kind.wanted for kind in KINDS.values()} == {ACCEPTED, REFUSED, "either"}


# What is declared of inputs and outputs


def test_an_output_without_a_type_stays_without():
    model = onnx.ModelProto()
    model.CopyFrom(encoder(DECOMPOSED, layers=1))
    model.graph.output[1].ClearField("type")
    result = to_proto(quantize(model, samples(1)).model)
    assert [value.SerializeToString() for value in result.graph.output] == [
        value.SerializeToString() for value in model.graph.output
    ]


@pytest.mark.parametrize("side", ["input", "output"])
@pytest.mark.parametrize("number", [0, 99])
def test_element_types_that_say_nothing_are_named(side, number):
    model = attention()
    value = getattr(model.graph, side)[0]
    value.type.tensor_type.elem_type = number
    for work in (lambda: quantize(model, [{"x": np.ones((1, 4, WIDTH), np.float32)}]), lambda: fuse(model, to=GROUPED)):
        with pytest.raises(ModelError, match=f"Tensor '{value.name}'.*element type"):
            work()


GROUPED = "com.microsoft::GroupQueryAttention"


def test_an_inner_tensor_without_an_element_type_is_not_declared():
    """ONNX Runtime refuses element type 0; it needs no type there."""
    model, sound = attention(), attention()
    model.graph.value_info.append(helper.make_tensor_value_info("q", 0, ["batch", 4, WIDTH]))
    sample = {"x": np.random.default_rng(0).standard_normal((1, 4, WIDTH)).astype(np.float32)}
    got = runtime.run(quantize(model, [sample]).model, sample, threads=1)
    assert snr([{"y": run(sound, sample)[0]}], [got]) > 20


def test_an_output_listed_twice_keeps_its_name_twice():
    entry = next(entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.stem == "a_gqa_unfolded")
    model = onnx.load(entry.path)
    model.graph.output.append(model.graph.output[1])
    result = to_proto(quantize(model, entry.samples).model)
    assert list(result.graph.output) == list(model.graph.output)
    twice = model.graph.output[-1].type.tensor_type.shape.dim[0]
    twice.dim_value = 3
    with pytest.raises(ModelError, match=r"'present\.0\.key'.*declared twice"):
        load(model)


# What is declared of inner tensors


@pytest.mark.parametrize("shape", [[7, "n", 32], [2**31, "n", 32]])
def test_wrong_shapes_of_inner_tensors_are_not_believed(shape):
    """Runtimes infer for themselves; NNCF reads what is declared."""
    model = onnx.ModelProto()
    model.CopyFrom(decoder(DECOMPOSED, layers=1))
    for name in ("normed", "layer0.attn.q", "layer0.attn.context.flat"):
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    data = tokens(1, past=3, batch=1, layers=1)
    expected = [runtime.run(load(decoder(DECOMPOSED, layers=1)), data[0], threads=1)]
    result = quantize(model, data)
    assert snr(expected, [runtime.run(result.model, data[0], threads=1)]) > 20
    assert len(result.setup.points) == 2
    shapes = {value.name: value.shape for node in result.model.graph for value in node.outputs}
    assert shapes["layer0.attn.q"] is None or shapes["layer0.attn.q"] != ir.Shape(shape)


def test_shapes_beside_initializers_are_those_of_their_data():
    model = attention()
    model.graph.value_info.append(helper.make_tensor_value_info("w_q", TensorProto.FLOAT, [3]))
    assert load(model).graph.initializers["w_q"].shape == ir.Shape([WIDTH, WIDTH])
    model.graph.value_info[0].type.tensor_type.elem_type = TensorProto.FLOAT16
    with pytest.raises(ModelError, match=r"Initializer 'w_q'.*FLOAT, got FLOAT16"):
        load(model)


# Initializers that are inputs too


@pytest.mark.parametrize(("kind", "shape", "got"), [("FLOAT16", [WIDTH, WIDTH], "FLOAT16"), ("FLOAT", [WIDTH, 3], "3")])
def test_an_input_is_declared_as_its_default_is(kind, shape, got):
    model = attention()
    model.graph.input.append(helper.make_tensor_value_info("w_q", TensorProto.DataType.Value(kind), shape))
    with pytest.raises(ModelError, match=f"Initializer 'w_q'.*got .*{got}"):
        recognize(model)


def packed(listed: bool) -> onnx.ModelProto:
    """x -> MatMul with two weights that a Concat packs -> y; `listed`: one of them is an input of the graph too."""
    graph = helper.make_graph(
        [
            helper.make_node("Concat", ["a", "b"], ["w"], axis=1),
            helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        ],
        "packed",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2 * WIDTH])],
        [numpy_helper.from_array(weights(seed, WIDTH, WIDTH), name) for seed, name in enumerate("ab")],
    )
    if listed:
        graph.input.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, [WIDTH, WIDTH]))
    return made(graph, 21)


def test_weights_packed_of_inputs_with_defaults_are_quantized():
    """All or nothing: a float weight beside a quantized activation is slower than no quantizer."""
    data = [{"x": np.random.default_rng(5).standard_normal((4, WIDTH)).astype(np.float32)}]
    fixed, listed = (
        [node.op_type for node in to_proto(quantize(packed(kind), data).model).graph.node] for kind in (False, True)
    )
    assert fixed.count("DequantizeLinear") == 2
    assert listed == fixed


# Imports


def test_a_contrib_domain_needs_no_import():
    entry = next(entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.stem == "d_ms_mha")
    model = onnx.load(entry.path)
    kept = [item for item in model.opset_import if item.domain != "com.microsoft"]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    whole, result = (quantize(source, entry.samples).model for source in (entry.path, model))
    expected, got = ([runtime.run(one, sample, threads=1) for sample in entry.samples] for one in (whole, result))
    assert snr(expected, got) == np.inf


def test_the_standard_needs_one():
    model = attention()
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ModelError, match=r"'project_q'.*does not import a version"):
        recognize(model)


# What the runtime says without a name


def test_the_node_that_the_runtime_refuses_is_named():
    """ONNX Runtime: Input 'weights' dimension 1 must be a multiple of 3."""
    entry = next(entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.stem == "d_ms_attention")
    model = onnx.load(entry.path)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    node.name = "the attention"
    tensor = next(item for item in model.graph.initializer if item.name == node.input[1])
    tensor.dims[0], tensor.dims[1] = tensor.dims[1], tensor.dims[0]
    for work in (lambda: quantize(model, entry.samples), lambda: fuse(model, to="ai.onnx::Attention@24")):
        with pytest.raises(ModelError, match="node 'the attention'"):
            work()
