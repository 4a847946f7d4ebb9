"""What nothing reads is dropped; nodes of the float model stay."""

import numpy as np
from qdqmodels import TARGET, Builder, valid

from attnquant.emission import clean


def test_unread_constants_and_quantizers_go_and_the_rest_stays() -> None:
    builder = Builder()
    builder.input("x", ["b", 16])
    builder.weight("dead", (16, 8), axis=1)
    builder.constant("unread", np.zeros(3, np.float32))
    builder.qdq("x")
    builder.node("Exp", ["x"], "idle", name="idle")
    builder.node("Relu", ["x"], "y", name="relu")
    model = builder.model(["y"])
    assert clean.apply(model, TARGET) == 9
    assert [node.name for node in model.graph] == ["idle", "relu"]
    assert list(model.graph.initializers) == []
    valid(model)
    assert clean.apply(model, TARGET) == 0


def test_outputs_of_the_graph_stay() -> None:
    builder = Builder()
    builder.input("x", ["b", 16])
    assert clean.apply(builder.model([builder.qdq("x")]), TARGET) == 0
