"""An output of the model is not what a quantizer behind its Transpose makes of it."""

import numpy as np
import onnx_ir as ir
import pytest
from qdqmodels import TARGET, Builder, normal, optimized, plain, valid

from attnquant.emission import outputs

X = {"x": normal(1, 2, 8, 8)}
_SECOND = {"Reshape": ("shape", np.zeros(4, np.int64)), "Mul": ("root", np.array(0.5, np.float32))}


def cached(*moves: str) -> ir.Model:
    """present = past and new keys joined; scores = query times what is quantized behind these moves."""
    builder = Builder()
    builder.input("x", [1, 2, "new", 8])
    tensor = builder.node("Concat", ["x", "x"], "present", name="join", axis=2)
    for index, move in enumerate(moves):
        tensor = moved(builder, move, tensor, f"moved_{index}")
    key = builder.qdq(tensor, dtype=np.uint8, zero_point=128)
    query = builder.qdq("x", dtype=np.uint8, zero_point=128, name="query")
    builder.node("MatMul", [query, key], "scores", name="scores")
    return builder.model(["present", "scores"])


def moved(builder: Builder, move: str, tensor: str, output: str) -> str:
    if move == "Transpose":
        return builder.node(move, [tensor], output, perm=[0, 1, 3, 2])
    suffix, array = _SECOND[move]
    return builder.node(move, [tensor, builder.constant(f"{output}_{suffix}", array)], output)


@pytest.mark.parametrize("moves", [("Transpose",), ("Transpose", "Reshape")])
def test_a_cache_is_handed_out_as_it_was_joined(moves: tuple[str, ...]) -> None:
    reference, model = cached(*moves), cached(*moves)
    assert outputs.apply(model, TARGET) == 1
    valid(model)
    present, scores = optimized(model, X)
    np.testing.assert_array_equal(present, np.concatenate([X["x"], X["x"]], axis=2))
    np.testing.assert_allclose(scores, plain(reference, X)[1], atol=1e-5)
    assert [value.name for value in model.graph.outputs] == ["present", "scores"]
    assert outputs.apply(model, TARGET) == 0, "once is enough"


@pytest.mark.parametrize("moves", [("Transpose",), ("Transpose", "Reshape")])
def test_without_the_pass_the_runtime_hands_out_rounded_numbers(moves: tuple[str, ...]) -> None:
    """Guards the reason for the pass."""
    model = cached(*moves)
    np.testing.assert_array_equal(plain(model, X)[0], np.concatenate([X["x"], X["x"]], axis=2))
    assert 0.005 < np.abs(optimized(model, X)[0] - plain(model, X)[0]).max() <= 0.0151


@pytest.mark.parametrize("moves", [("Transpose", "Mul"), ("Reshape", "Transpose"), ("Mul", "Transpose")])
def test_what_the_runtime_leaves_alone_is_left_alone(moves: tuple[str, ...]) -> None:
    model = cached(*moves)
    assert outputs.apply(model, TARGET) == 0
    np.testing.assert_array_equal(optimized(model, X)[0], np.concatenate([X["x"], X["x"]], axis=2))
