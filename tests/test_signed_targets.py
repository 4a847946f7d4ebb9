"""Signed activations, right for targets that take them, are run as such: at default settings they do not load on x86."""

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import Builder, normal, optimized

import attnquant
from attnquant import quantization, runtime
from attnquant.errors import ModelError, VerificationError
from attnquant.recipe import QuantizationRecipe, load
from attnquant.target import parse_target

CPU, CUDA = "onnxruntime-cpu@1.31.1", "onnxruntime-cuda@1.31.1"
FEEDS = {"x": normal(2, 5, 32)}


def branched() -> ir.Model:
    """One norm, read by a linear directly and by another through a Reshape: one quantizer in front of both."""
    builder = Builder()
    builder.input("x", ["b", "s", 32])
    builder.node("LayerNormalization", ["x", builder.vector("gamma", 32)], "n")
    builder.constant("shape", np.asarray([-1, 32]))
    builder.node("Reshape", ["n", "shape"], "rows")
    for name in ("wa", "wb"):
        builder.constant(name, builder.rng.standard_normal((32, 32)).astype(np.float32) / 6)
    builder.node("MatMul", ["rows", "wa"], "y", name="behind")
    builder.node("MatMul", ["n", "wb"], "z", name="beside")
    return builder.model(["y", "z"])


def unsmoothed() -> QuantizationRecipe:
    """SmoothQuant puts a factor of its own in front of each linear, and a quantizer behind each."""
    recipe = load("int8")
    return replace(recipe, linears=replace(recipe.linears, smooth_quant=False))


def quantizer_types(model: ir.Model) -> list[ir.DataType | None]:
    return [node.inputs[2].dtype for node in model.graph if node.op_type == "QuantizeLinear"]


def decibels(model: ir.Model, signed: ir.Model) -> float:
    """The lower SNR of both outputs."""
    outputs = runtime.run(signed, FEEDS, unfused=True)
    pairs = [(expected, expected - outputs[name]) for expected, name in zip(optimized(model, FEEDS), "yz", strict=True)]
    return min(float(10 * np.log10((signal**2).sum() / max((noise**2).sum(), 1e-30))) for signal, noise in pairs)


def worst(expected: np.ndarray, got: np.ndarray) -> float:
    return float(np.abs(expected - got).max() / np.abs(expected).max())


def test_a_result_for_cuda_keeps_signed_quantizers_and_is_run_here() -> None:
    model = branched()
    made = attnquant.quantize(model, [FEEDS], recipe=unsmoothed(), target=CUDA).model
    assert quantizer_types(made) == [ir.DataType.INT8]
    with pytest.raises(ModelError, match="does not load"):
        runtime.run(made, FEEDS)
    outputs = runtime.run(made, FEEDS, unfused=True)
    for expected, name in zip(optimized(model, FEEDS), ("y", "z"), strict=True):
        assert 0 < worst(expected, outputs[name]) < 0.03


def test_signed_quantizers_compute_what_unsigned_ones_do() -> None:
    results = [attnquant.quantize(branched(), [FEEDS], recipe=unsmoothed(), target=target).model for target in (CUDA, CPU)]
    assert [quantizer_types(made) for made in results] == [[ir.DataType.INT8], [ir.DataType.UINT8]]
    signed, unsigned = runtime.run(results[0], FEEDS, unfused=True), runtime.run(results[1], FEEDS)
    for name in ("y", "z"):
        assert worst(unsigned[name], signed[name]) < 0.02


@pytest.mark.parametrize(("above", "types", "word"), [(-2.0, [ir.DataType.INT8], "nothing had"), (1.0, [], "2 kept float")])
def test_a_bound_is_measured_on_signed_results(above: float, types: list[ir.DataType], word: str) -> None:
    """Met as it stands, or 1 dB away: each output has one linear, so that both then have to be float."""
    model, recipe = branched(), unsmoothed()
    level = decibels(model, attnquant.quantize(model, [FEEDS], recipe=recipe, target=CUDA).model)
    found = attnquant.quantize(model, [FEEDS], recipe=recipe, target=CUDA, max_drop=f"snr_db>={level + above:.3f}")
    assert f"{level:.4g} with every part quantized" in found.notes[0]
    assert word in found.notes[0]
    assert quantizer_types(found.model) == types
    assert decibels(model, found.model) >= level + above


def test_a_result_for_the_cpu_is_still_run_at_its_default_settings() -> None:
    signed = attnquant.quantize(branched(), [FEEDS], recipe=unsmoothed(), target=CUDA).model
    quantization._check_loads(signed, FEEDS, parse_target(CUDA))
    with pytest.raises(VerificationError, match="not handed over"):
        quantization._check_loads(signed, FEEDS, parse_target(CPU))
