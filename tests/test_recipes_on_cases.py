"""The cases about folding, declared presents and static caches under every recipe, not the default one only."""

from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest

from attnquant import runtime
from attnquant.check import check
from attnquant.errors import ModelError, UnmatchedRuleError
from attnquant.kvcache.storage import stored_cache
from attnquant.model import load
from attnquant.quantization import quantize
from attnquant.recipe import keep_float
from attnquant.recipe import load as load_recipe
from tests.corpora import Entry, entries, runnable, snr
from tests.test_corpus_quantization import interface, no_new_control_flow, tensors_in

CASES = [entry for entry in entries("ATTNQUANT_CASES", "cases") if entry.path.name[0] in "abc"]
FLOOR = 20.0


@pytest.mark.parametrize("recipe", ["vit", "encoder", "seq2seq", "llm-w8a8"])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_int8_recipes(entry: Entry, recipe: str) -> None:
    if entry.truth["expect"] == "error":
        with pytest.raises(ModelError) as caught:
            quantize(entry.path, entry.samples, recipe=recipe)
        assert any(f"'{name}'" in str(caught.value) for name in tensors_in(entry)), str(caught.value)
        return
    samples, expected = runnable(entry.path)
    model = quantize(entry.path, samples, recipe=recipe).model
    for sample, outputs in zip(samples, expected, strict=True):
        assert snr([outputs], [runtime.run(model, sample, threads=1)]) >= FLOOR
    report = check(model, recipe=recipe)
    assert report.ok, report.problems
    # llm-w8a8 leaves Q and K float: every attention is skipped, and says why.
    status = "skipped" if recipe == "llm-w8a8" else entry.truth["expect"]
    assert {row.status for row in report.rows} == {status}
    assert status == "quantized" or all(row.reasons for row in report.rows)
    before = load(entry.path)
    assert interface(before) == interface(model)
    no_new_control_flow(before, model)


def inner(entry: Entry) -> bool:
    """The cache goes through GroupQueryAttention and its size is declared: it can be integers."""
    return entry.path.name.startswith(("a_", "b_")) and entry.path.name != "b_gqa_present_undeclared.onnx"


@pytest.mark.parametrize(("recipe", "stored"), [("llm-kv8", ir.DataType.INT8), ("llm-kv4", ir.DataType.UINT8)])
@pytest.mark.parametrize("entry", CASES, ids=str)
def test_cache_recipes(entry: Entry, recipe: str, stored: ir.DataType) -> None:
    if entry.truth["expect"] == "error" or not inner(entry):
        with pytest.raises(ModelError) as caught:
            quantize(entry.path, entry.samples, recipe=recipe)
        # /phase_split/else_branch/attn_else is a node of an If's body, under the path of its attention.
        names = tensors_in(entry) | {node.name for node in onnx.load(entry.path).graph.node}
        assert any(name and name in str(caught.value) for name in names), str(caught.value)
        return
    samples, expected = runnable(entry.path)
    model = quantize(entry.path, samples, recipe=recipe).model
    cache = stored_cache(model.metadata_props)
    assert cache is not None
    assert [value.dtype for value in model.graph.outputs[1:]] == [stored, stored]
    outputs = [cache.restore(runtime.run(model, cache.store(sample), threads=1)) for sample in samples]
    assert snr(expected, outputs) >= (30.0 if stored == ir.DataType.INT8 else 15.0)
    before = load(entry.path)
    weights = {name: value.const_value for name, value in before.graph.initializers.items() if value.uses()}
    kept = {name: value.const_value for name, value in model.graph.initializers.items()}
    assert all(value.uses() for value in model.graph.initializers.values()), "a dead weight"
    assert all((kept[name].dtype, kept[name].tobytes()) == (data.dtype, data.tobytes()) for name, data in weights.items())


def test_every_linear_of_none_is_kept_float_but_a_name_has_to_be_there() -> None:
    recipe = load_recipe("llm-kv8")
    assert keep_float(recipe, []) == frozenset()
    named = replace(recipe, linears=replace(recipe.linears, keep_float=("fc1",)))
    with pytest.raises(UnmatchedRuleError, match="'fc1'"):
        keep_float(named, [])
