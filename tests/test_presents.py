"""Caches of decoders: what `present` holds is what the float model would have put there, given the projection's input."""

from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attnquant import runtime
from attnquant.quantization import quantize
from attnquant.recipe import load as load_recipe
from tests.corpora import Entry, entries, runnable

DECODERS = [entry for entry in entries("ATTNQUANT_CORPUS", "corpus") if "past" in entry.path.name]
LINEARS = ("MatMul", "Gemm", "Attention")


def presents(entry: Entry) -> list[str]:
    """The outputs that hold keys and values, in the order of the layers."""
    found = [attention.get(f"{letter}_present") for attention in entry.truth["attentions"] for letter in "kv"]
    listed = [name for one in found if one for name in ([one] if isinstance(one, str) else one)]
    outputs = {value.name for value in onnx.load(entry.path, load_external_data=False).graph.output}
    return [name for name in listed if name in outputs]


def behind_projection(proto: onnx.ModelProto, name: str) -> list[str]:
    """Types of all operations between a projection and this tensor; a bias may be stored as integers."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type != "DequantizeLinear" or node.input[0] not in stored]
    producers = {output: node for node in nodes for output in node.output}
    waiting, found = [name], []
    while waiting:
        node = producers.get(waiting.pop())
        if node is not None and node.op_type not in LINEARS:
            found.append(node.op_type)
            waiting += node.input
    return found


@pytest.mark.parametrize("entry", DECODERS, ids=str)
def test_no_quantizer_between_a_projection_and_its_present(entry: Entry) -> None:
    float_run = runnable(entry.path)
    assert not isinstance(float_run, str)
    names = presents(entry)
    assert names
    result = quantize(entry.path, float_run[0])
    proto = ir.to_proto(result.model)
    before = onnx.load(entry.path)
    for name in names:
        passed = behind_projection(proto, name)
        assert not [kind for kind in passed if kind in ("QuantizeLinear", "DequantizeLinear")], (name, passed)
    for side in ("input", "output"):
        assert getattr(before.graph, side) == getattr(proto.graph, side), "names, dtypes and declared shapes"


@pytest.mark.parametrize("entry", DECODERS, ids=str)
def test_first_present_is_bit_equal_where_linears_stay_float(entry: Entry) -> None:
    """Deeper layers read what an attention with quantized Q and K gave: only the first is the same bit for bit."""
    float_run = runnable(entry.path)
    assert not isinstance(float_run, str)
    samples, expected = float_run
    recipe = load_recipe("int8")
    result = quantize(entry.path, samples, recipe=replace(recipe, linears=replace(recipe.linears, keep_float=("",))))
    got = [runtime.run(result.model, sample, threads=1) for sample in samples]
    key, value, *deeper = presents(entry)
    for one, other in zip(expected, got, strict=True):
        assert np.array_equal(one[key], other[key])
        assert np.array_equal(one[value], other[value])
    assert deeper
