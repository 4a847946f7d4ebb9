"""Where numbers that are not finite stop the host, the node that makes them is named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto
from qdqmodels import Builder, normal

import attnquant
from attnquant import building
from attnquant.errors import HostError
from attnquant.probe import not_finite
from attnquant.recipe import load

FEEDS = {"x": normal(2, 5, 8)}


def between(fill: Callable[[Builder], str]) -> ir.Model:
    """Two linears with something between them that reads `p`; what is NaN behind the second is replaced."""
    builder = Builder()
    builder.input("x", ["b", "s", 8])
    for name in ("wa", "wb"):
        builder.constant(name, builder.rng.standard_normal((8, 8)).astype(np.float32))
    builder.node("MatMul", ["x", "wa"], "p", name="first")
    builder.node("MatMul", [fill(builder), "wb"], "y", name="second")
    builder.node("Where", [builder.node("IsNaN", ["y"], "lost"), "p", "y"], "z", name="guard")
    return builder.model(["z"])


def logarithm(builder: Builder) -> str:
    return builder.node("Log", ["p"], "l", name="of_negatives")


def overflow(builder: Builder) -> str:
    large = builder.constant("large", np.float32(1e30))
    return builder.node("Mul", [builder.node("Mul", ["p", large], "m"), large], "l", name="too_large")


def harmless(builder: Builder) -> str:
    return builder.node("Exp", ["p"], "l")


def quantize(model: ir.Model, samples: list[dict[str, np.ndarray]]) -> None:
    recipe = load("int8")
    attnquant.quantize(model, samples, recipe=replace(recipe, ranges=replace(recipe.ranges, estimator="histogram")))


def test_the_first_node_that_makes_nan_is_named() -> None:
    with pytest.raises(HostError, match=r"Node 'of_negatives' \(Log\): output 'l' holds NaN on sample 0\. Correct"):
        quantize(between(logarithm), [FEEDS])


def test_infinite_numbers_are_named_before_the_nan_that_follows_from_them() -> None:
    words = r"'too_large' .* 'l' holds infinite numbers on sample 0\. Node 'second' \(MatMul\): output 'y' holds NaN"
    with pytest.raises(HostError, match=words):
        quantize(between(overflow), [FEEDS])


def test_samples_are_searched_up_to_the_one_that_fails() -> None:
    builder = Builder()
    builder.input("x", ["b", 4])
    builder.node("Sqrt", ["x"], "root", name="root")
    model = builder.model([builder.node("Exp", ["root"], "y")])
    samples = [{"x": np.full((1, 4), number, np.float32)} for number in (1.0, 4.0, -1.0, -2.0)]
    assert not_finite(model, samples) == "Node 'root' (Sqrt): output 'root' holds NaN on sample 2."
    assert not_finite(model, samples[:2]) is None


def test_integers_are_not_asked_and_nothing_is_said_of_a_model_that_does_not_run() -> None:
    builder = Builder()
    builder.input("x", ["b", 4])
    builder.node("Cast", ["x"], "integers", to=TensorProto.INT64)
    model = builder.model([builder.node("Cast", ["integers"], "y", to=TensorProto.FLOAT)])
    assert not_finite(model, [{"x": np.ones((1, 4), np.float32)}]) is None
    assert not_finite(model, [{"x": np.ones((1, 5), np.float32)}]) is None


def test_the_model_that_is_asked_does_not_change() -> None:
    model = between(logarithm)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not_finite(model, [FEEDS])
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_other_failures_of_the_host_keep_their_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise HostError("NNCF could not quantize the model: out of luck")

    monkeypatch.setattr(building, "quantize_prepared", fails)
    with pytest.raises(HostError, match=r"out of luck$"):
        quantize(between(harmless), [FEEDS])
