"""Weights that make up for each other's rounding: closer on data alike, no pair that overflows, and only where asked for."""

from itertools import product

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant import quantization
from attnquant.emission.compensated import Moments, compensated
from attnquant.graph import constant
from attnquant.moments import moments
from attnquant.recipe import load
from tests import tinymodels


def data(inputs: int, count: int = 400, seed: int = 0) -> np.ndarray:
    """Rows whose columns go together: of as many sources, each weaker than the one before."""
    mixing = np.random.default_rng(7).standard_normal((inputs, inputs)) * (0.9 ** np.arange(inputs))[:, None]
    return (np.random.default_rng(seed).standard_normal((count, inputs)) @ mixing).astype(np.float32)


def known(x: np.ndarray, weight: np.ndarray) -> Moments:
    return Moments.of(x.T @ x / len(x), weight)


def error(x: np.ndarray, steps: np.ndarray, integers: np.ndarray) -> float:
    return float(np.square(x.astype(np.float64) @ (steps - integers)).sum())


def test_close_to_the_best_of_all_roundings() -> None:
    """Six inputs: every choice of the two neighbouring integers is tried; to the nearest is far from the best of them."""
    x = data(6)
    steps = np.random.default_rng(1).uniform(-20, 20, (6, 12)).astype(np.float32)
    moments_of_x = known(x, steps)
    found = compensated(steps, moments_of_x.root, moments_of_x.order, pairs=False)
    best = nearest = own = 0.0
    for column in range(12):
        one = steps[:, [column]]
        best += min(error(x, one, np.floor(one) + np.array(up)[:, None]) for up in product((0, 1), repeat=6))
        nearest, own = nearest + error(x, one, np.rint(one)), own + error(x, one, found[:, [column]])
    assert own < 0.7 * nearest
    assert own < 2.0 * best, "the last of six can be made up for by none: better than half is not to be had"


@pytest.mark.parametrize("inputs", [63, 64, 130])
def test_better_on_rows_that_were_not_seen(inputs: int) -> None:
    seen, others = data(inputs, 2000), data(inputs, seed=5)
    steps = np.random.default_rng(2).uniform(-40, 40, (inputs, 8)).astype(np.float32)
    moments_of_seen = known(seen, steps)
    found = compensated(steps, moments_of_seen.root, moments_of_seen.order, pairs=False)
    assert error(others, steps, found) < 0.6 * error(others, steps, np.rint(steps))


def test_no_pair_overflows_though_errors_pile_up() -> None:
    """Pairs of the largest sum that the scale allows: what earlier errors ask for may not push one over it."""
    inputs = 128
    x = data(inputs)
    steps = np.random.default_rng(3).uniform(0, 127, (inputs, 16)).astype(np.float32)
    steps[1::2] = 127 - steps[::2]
    steps *= np.random.default_rng(4).choice([-1, 1], (1, 16)).astype(np.float32)
    of_x = known(x, steps)
    for pairs in (True, False):
        sums = np.abs(compensated(steps, of_x.root, of_x.order, pairs=pairs).astype(int)).reshape(-1, 2, 16).sum(axis=1)
        assert (sums.max() <= 128) == pairs


def test_inputs_that_say_nothing() -> None:
    """Inputs that are always zero, or the same as another, are rounded to something, and the others as well as without."""
    x = data(8)
    x[:, 3], x[:, 5] = 0, x[:, 4]
    steps = np.random.default_rng(6).uniform(-9, 9, (8, 4)).astype(np.float32)
    of_x = known(x, steps)
    found = compensated(steps, of_x.root, of_x.order, pairs=True)
    assert np.abs(found - steps).max() < 3
    assert error(x, steps, found) <= error(x, steps, np.rint(steps))
    silent = known(np.zeros_like(x), steps)
    assert np.array_equal(compensated(steps, silent.root, silent.order, pairs=True), np.rint(steps))


def model(turned: bool, width: int = 48) -> ir.Model:
    """x -> LayerNormalization -> linear (MatMul, or Gemm with its weight turned) -> y."""
    weight = (np.random.default_rng(8).standard_normal((width, 24)) * 0.2).astype(np.float32)
    scale = np.exp(0.3 * np.random.default_rng(9).standard_normal(width)).astype(np.float32)
    arrays = {"w": weight.T.copy() if turned else weight, "g": scale, "z": np.zeros(24, np.float32)}
    linear = (
        helper.make_node("Gemm", ["n", "w", "z"], ["y"], name="linear", transB=1)
        if turned
        else helper.make_node("MatMul", ["n", "w"], ["y"], name="linear")
    )
    nodes = [helper.make_node("LayerNormalization", ["x", "g"], ["n"], name="norm"), linear]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", size]) for name, size in (("x", width), ("y", 24))]
    initializers = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    return ir.from_proto(tinymodels.made(helper.make_graph(nodes, "g", infos[:1], infos[1:], initializers), 17))


@pytest.mark.parametrize("turned", [False, True], ids=["MatMul", "Gemm"])
@pytest.mark.parametrize("strength", ["smooth_quant = false", "smooth_quant_alpha = 0.7"])
def test_the_recipe_asks_for_it(turned: bool, strength: str) -> None:
    """With weights and activations quantized, smoothed or not, the output comes closer; the nodes stay the same."""
    float_model, rows = model(turned), data(48, 1200)
    samples, others = [{"x": part} for part in np.split(rows, 12)], {"x": data(48, seed=11)}
    expected = tinymodels.run(ir.to_proto(float_model), others)[0]
    noise, kinds = {}, {}
    for rounding in ("nearest", "compensated"):
        recipe = load(f"[linears]\n{strength}\nrounding = '{rounding}'")
        made = quantization.quantize(float_model, samples, recipe=recipe).model
        noise[rounding] = float(np.square(tinymodels.run(ir.to_proto(made), others)[0] - expected).sum())
        kinds[rounding] = [node.op_type for node in made.graph]
    assert kinds["compensated"] == kinds["nearest"]
    assert noise["compensated"] < 0.9 * noise["nearest"], f"activations are rounded too: {noise}"


def test_moments_are_those_of_numpy() -> None:
    float_model, rows = model(turned=True), data(48, 600)
    found = moments(float_model, ["linear"], [{"x": part} for part in np.split(rows, 3)])["linear"]
    scale = constant(float_model.graph.initializers["g"])
    assert scale is not None
    centred = rows - rows.mean(axis=1, keepdims=True)
    normed = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + 1e-5) * scale
    power = (normed.T @ normed / len(normed))[np.ix_(found.order, found.order)]
    power[np.diag_indices_from(power)] *= 1.01
    np.testing.assert_allclose(found.root @ found.root.T, power, rtol=0, atol=1e-3 * power.max())
    assert np.all(np.diff(np.diag(power)) <= 0)
    assert not moments(float_model, [], [{"x": rows}])
    assert not moments(float_model, ["linear"], [{"x": np.full_like(rows, np.nan)}]), "what is not finite says nothing"
