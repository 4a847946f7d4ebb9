"""Bounds on accuracy: what they mean, what is kept float for them, and that nothing more is."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant import bounds, building, settling
from attnquant.bounds import Bound
from attnquant.errors import RecipeError, VerificationError
from attnquant.executors import Done, Workers
from attnquant.model import load
from attnquant.roles import PortRole
from attnquant.runtime import run
from attnquant.tuning import Judge, Part, parts_of, repair, spread
from attnquant.tuning.judge import next_token_loss
from attnquant.tuning.parts import switched
from attnquant.tuning.search import ranked
from tests import tinymodels

WIDTH = tinymodels.WIDTH


def samples(count: int = 12) -> list[dict[str, np.ndarray]]:
    return [{"x": tinymodels.weights(seed, 2, 5, WIDTH)} for seed in range(count)]


def bounded(text: str) -> str:
    return f'extends = "int8"\n[options]\nmax_drop = "{text}"\n'


# ---- bounds


@pytest.mark.parametrize(
    ("text", "metric", "value", "good", "bad"),
    [
        ("snr_db>=30", "snr_db", 30.0, 30.0, 29.9),
        ("snr_db = 30", "snr_db", 30.0, 31.0, -5.0),
        ("ppl<=1.02", "ppl", 1.02, 1.0, 1.03),
        ("kl=1e-3", "kl", 1e-3, 0.0, 0.002),
        ("top1>=0.99", "top1", 0.99, 0.995, 0.98),
        ("cosine>=0.5", "cosine", 0.5, 0.6, 0.4),
        ("cosine>=0.99999999", "cosine", 0.99999999, 1.0, 0.99999998),
    ],
)
def test_a_bound_knows_its_direction(text: str, metric: str, value: float, good: float, bad: float) -> None:
    bound = bounds.parse(text)
    assert (bound.metric, bound.value) == (metric, value)
    assert bound.holds(good)
    assert not bound.holds(bad)
    assert not bound.holds(float("nan"))
    assert bounds.parse(str(bound)) == bound


@pytest.mark.parametrize("text", ["", "snr_db", "speed>=2", "ppl>=1.02", "snr_db<=30", "snr_db>=thirty", "snr_db>=30 dB"])
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a bound METRIC=VALUE|the direction"):
        bounds.parse(text)


# ---- metrics, against numpy


def vocabulary() -> onnx.ModelProto:
    """input_ids (batch, positions) -> rows of a table: logits over 24 tokens."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "input_ids"], ["logits"], name="gather")],
        "vocabulary",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["b", "s"]) for name in ("input_ids", "attention_mask")],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 24])],
        [numpy_helper.from_array(np.float32(15) * tinymodels.weights(0, 24, 24), "table")],
    )
    return tinymodels.made(graph, 17)


def texts() -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(3)
    mask = np.ones((2, 7), np.int64)
    mask[1, 5:] = 0
    return [{"input_ids": draw.integers(0, 24, (2, 7)), "attention_mask": mask} for _ in range(3)]


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def expected_metrics(
    first: list[np.ndarray], second: list[np.ndarray], data: list[dict[str, np.ndarray]]
) -> dict[str, float]:
    x, y = (np.concatenate([item.reshape(-1, 24) for item in items]).astype(np.float64) for items in (first, second))
    p, q = softmax(x), softmax(y)
    losses = [0.0, 0.0]
    count = 0
    for sample, *pair in zip(data, first, second, strict=True):
        for b in range(2):
            for s in range(1, 7):
                if sample["attention_mask"][b, s]:
                    count += 1
                    for index, logits in enumerate(pair):
                        losses[index] -= np.log(softmax(logits[b, s - 1].astype(np.float64))[sample["input_ids"][b, s]])
    return {
        "snr_db": 10 * np.log10((x**2).sum() / ((x - y) ** 2).sum()),
        "cosine": (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum()),
        "top1": float((x.argmax(-1) == y.argmax(-1)).mean()),
        "kl": float((p * np.log(p / q)).sum(-1).mean()),
        "ppl": float(np.exp(losses[1] / count) / np.exp(losses[0] / count)),
    }


@pytest.mark.parametrize("metric", ["snr_db", "cosine", "top1", "kl", "ppl"])
def test_metrics_are_those_of_their_definition(metric: bounds.Metric) -> None:
    model, data = load(vocabulary()), texts()
    noise = [tinymodels.weights(seed, 2, 7, 24) for seed in range(3)]
    first = [run(model, sample)["logits"] for sample in data]
    second = [array + extra for array, extra in zip(first, noise, strict=True)]
    given = iter(second)
    judged = Judge(Bound(metric=metric, value=1.0), model, data).of(lambda sample: {"logits": next(given)})
    assert judged == pytest.approx(expected_metrics(first, second, data)[metric], rel=1e-5)


def test_perplexity_counts_what_the_mask_shows() -> None:
    sample = texts()[0]
    loss, count = next_token_loss(np.zeros((2, 7, 24)), sample)
    assert (count, loss) == (10, pytest.approx(10 * np.log(24)))


def test_a_metric_that_the_model_cannot_have_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"ppl<=1.02.*input_ids.*got inputs \['x'\]"):
        attnquant.quantize(tinymodels.attention(), samples(), recipe=bounded("ppl<=1.02"))


# ---- parts and switches


def host_form(data: list[dict[str, np.ndarray]]) -> tuple[ir.Model, ir.Model, tuple[Part, ...]]:
    """(float model, the host's Q/DQ model, its parts)."""
    found = {}

    def catch(builder: building.Builder, first: building.Built, *rest: object) -> settling.BoundedBuild:
        found["first"], found["points"] = first, builder.points
        return settling.BoundedBuild(built=first, sites={}, linears={}, sentence="")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnquant.settling.bounded_build", catch)
        attnquant.quantize(tinymodels.attention(), data, recipe=bounded("snr_db>=99"))
    first = found["first"]
    return load(tinymodels.attention()), first.host_model, parts_of(first.host_model, found["points"])


def test_every_part_has_a_switch_and_all_of_them_give_the_float_model() -> None:
    data = samples()
    model, quantized, parts = host_form(data)
    assert [(part.name, part.is_site) for part in parts] == [
        ("/attention", True),
        *((f"project_{role}", False) for role in ("q", "k", "v", "out")),
    ]
    assert parts[0].edges == (("attention", 0), ("attention", 1))
    names = [part.name for part in parts]
    with switched(quantized, parts) as switches:
        exact = run(model, data[0])["y"]
        plain = switches.run(data[0], [])["y"]
        # Bias correction has no bias to correct here: all parts float are the float model.
        np.testing.assert_allclose(switches.run(data[0], names)["y"], exact, atol=1e-6)
        errors = {name: np.square(switches.run(data[0], set(names) - {name})["y"] - exact).sum() for name in names}
        assert all(0 < error < np.square(plain - exact).sum() for error in errors.values())


def product(shared: bool) -> onnx.ModelProto:
    """A product of two activations without a softmax; the host quantizes the first in front of Reshape and Transpose."""
    nodes = [
        *(helper.make_node("MatMul", ["x", f"w_{name}"], [name], name=f"project_{name}") for name in "ab"),
        helper.make_node("Reshape", ["a", "heads"], ["a4"], name="split_a"),
        helper.make_node("Transpose", ["a4"], ["at"], name="turn_a", perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["b", "heads"], ["b4"], name="split_b"),
        helper.make_node("Transpose", ["b4"], ["bt"], name="turn_b", perm=[0, 2, 3, 1]),
        helper.make_node("MatMul", ["at", "bt"], ["y"], name="product"),
        *([helper.make_node("Sigmoid", ["bt"], ["z"], name="other")] if shared else []),
    ]
    sizes = ["batch", 5, WIDTH]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("yz" if shared else "y")]
    weights = [
        numpy_helper.from_array(tinymodels.weights(seed, WIDTH, WIDTH), f"w_{name}") for seed, name in enumerate("ab")
    ]
    heads = numpy_helper.from_array(np.array([0, -1, 2, WIDTH // 2]), "heads")
    graph = helper.make_graph(
        nodes, "product", [helper.make_tensor_value_info("x", TensorProto.FLOAT, sizes)], outputs, [*weights, heads]
    )
    return tinymodels.made(graph, 17)


@pytest.mark.parametrize("shared", [False, True])
def test_a_product_that_is_quantized_in_front_of_moves_is_a_part(shared: bool) -> None:
    """All parts float are the float model, and a bound that asks for that is met."""
    data = samples(4)
    assert not attnquant.recognize(product(shared)).sites
    result = attnquant.quantize(product(shared), data, recipe=bounded("snr_db>=150"))
    assert "QuantizeLinear" not in {node.op_type for node in result.model.graph}
    assert {row.node for row in result.setup.kept_float} == {"project_a", "project_b", "product"}


# ---- the search


@dataclass(frozen=True)
class FakeModel:
    """Stands for a model in which these parts are float."""

    floating: frozenset[str]

    @property
    def host_model(self) -> "FakeModel":
        return self

    @property
    def model(self) -> "FakeModel":
        return self


class FakeJudge:
    """A metric that is the sum of what the float parts are worth, and `cost` less in the target's form."""

    def __init__(self, worth: Mapping[str, float], bound: Bound, cost: float = 0.0) -> None:
        self.worth, self.bound, self.cost = worth, bound, cost

    def of_model(self, model: FakeModel) -> float:
        return self.of(lambda _: model.floating) - self.cost

    def of(self, run: object) -> float:
        return sum(self.worth[name] for name in run({}))  # type: ignore[operator]


@contextmanager
def fake_switched(model: FakeModel, parts: Sequence[Part]) -> Iterator[object]:
    class Fake:
        def run(self, sample: object, names: Sequence[str]) -> Sequence[str]:
            return names

    yield Fake()


def searched(worth: Mapping[str, float], needed: float, *, cost: float = 0.0) -> tuple[list[str], list[int]]:
    """(names kept, how many parts were kept in each build)."""
    parts = [Part(name=name, is_site=False, edges=((name, 0),)) for name in worth]
    builds: list[int] = []

    def build(kept: Sequence[Part]) -> FakeModel:
        builds.append(len(kept))
        return FakeModel(frozenset(part.name for part in kept))

    judge = FakeJudge(worth, Bound(metric="snr_db", value=needed), cost)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnquant.tuning.search.switched", fake_switched)
        found = repair(FakeModel(frozenset()), parts, judge, build, lambda text: None)  # type: ignore[arg-type, type-var]
    return [item.part.name for item in found.kept], builds


WORTH = {"a": 1.0, "b": 5.0, "c": 0.5, "d": 3.0, "e": 2.0}


@pytest.mark.parametrize(("needed", "kept"), [(0.0, ""), (0.1, "b"), (5.0, "b"), (7.9, "bd"), (8.5, "bde"), (11.5, "bdeac")])
def test_the_fewest_of_the_ranking_are_kept(needed: float, kept: str) -> None:
    assert searched(WORTH, needed) == (list(kept), [len(kept)] if kept else [])


def test_what_the_target_costs_is_asked_for_in_addition() -> None:
    assert searched(WORTH, 4.0, cost=3.0) == (["b", "d"], [2])


def test_a_bound_that_nothing_meets_is_an_error() -> None:
    with pytest.raises(VerificationError, match=r"snr_db>=12: reached 11.5 at best, with 5 of 5"):
        searched(WORTH, 12.0)


# ---- by workers


def test_workers_rank_as_this_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "CHUNK", 2)
    data = samples()
    _, quantized, parts = host_form(data)
    judge = Judge(Bound(metric="snr_db", value=42.0), load(tinymodels.attention()), data)
    with switched(quantized, parts) as switches:
        expected = {
            part.name: judge.of(lambda sample, name=part.name: switches.run(sample, [name])) for part in parts
        }
    found = spread.spread_scores(quantized, parts, judge, Workers(number=2), lambda text: None)
    assert found == pytest.approx(expected, rel=1e-6)
    assert list(found) == [part.name for part in parts]


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_who_measures_changes_nothing(executor: str) -> None:
    if executor == "ray":
        pytest.importorskip("ray", reason="Ray is not installed (pip install attnquant[ray])")
    data = samples()
    found = [
        attnquant.quantize(tinymodels.attention(), data, max_drop="snr_db>=42", workers=workers)
        for workers in (None, Workers(executor=executor, number=2))
    ]
    assert found[0].setup.kept_float
    assert found[0].setup == found[1].setup


def test_parts_of_a_lost_worker_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    data, said = samples(4), list[str]()
    _, quantized, parts = host_form(data)
    judge = Judge(Bound(metric="snr_db", value=42.0), load(tinymodels.attention()), data)
    monkeypatch.setattr(spread, "CHUNK", 2)
    lost = [Done(value=[1.0, 9.0]), Done(lost="the worker went away"), Done(value=[3.0])]
    monkeypatch.setattr(spread, "run_tasks", lambda *given, **options: lost)
    scores = spread.spread_scores(quantized, parts, judge, Workers(), said.append)
    names = [kept.part.name for kept in ranked(parts, scores, 0.5)]
    assert names == ["project_q", "project_out", "/attention", "project_k", "project_v"]
    assert said == ["what 2 parts cost is not known, project_k first: the worker went away"]


# ---- through quantize


def test_linears_and_attentions_are_kept_float_until_the_bound_holds() -> None:
    data = samples()
    plain = attnquant.quantize(tinymodels.attention(), data)
    result = attnquant.quantize(tinymodels.attention(), data, recipe=bounded("snr_db>=42"))
    model = load(tinymodels.attention())

    def snr(quantized: ir.Model) -> float:
        pairs = [(run(model, sample)["y"], run(quantized, sample)["y"]) for sample in data[: settling.JUDGED]]
        signal, error = sum(np.square(x).sum() for x, _ in pairs), sum(np.square(x - y).sum() for x, y in pairs)
        return 10 * float(np.log10(signal / error))

    assert snr(plain.model) < 42 <= snr(result.model)
    kept = {row.node for row in result.setup.kept_float}
    assert 0 < len(kept) < 4
    quantized = {node.inputs[1].name for node in result.model.graph if node.op_type == "MatMul" and node.name in kept}
    assert quantized == {f"w_{name.removeprefix('project_')[0]}" for name in kept}, "kept linears read their own weight"
    assert attnquant.check(result.model).ok
    assert any("max_drop snr_db>=42" in note and "times as long" in note for note in result.notes)


def test_a_kept_attention_is_skipped_with_its_reason() -> None:
    result = attnquant.quantize(tinymodels.attention(), samples(), recipe=bounded("snr_db>=100"))
    assert not result.setup.points
    reasons = {row.role: row.reason for row in result.setup.skipped}
    assert reasons[PortRole.QUERY].startswith("float for max_drop snr_db>=100")
    ops = {node.op_type for node in result.model.graph}
    assert "QuantizeLinear" not in ops
    assert attnquant.check(result.model).ok


def test_a_bound_that_holds_changes_nothing() -> None:
    data = samples()
    recipes = ("int8", bounded("snr_db>=20"))
    plain, result = (attnquant.quantize(tinymodels.attention(), data, recipe=recipe) for recipe in recipes)
    assert result.setup.points == plain.setup.points
    np.testing.assert_array_equal(run(result.model, data[0])["y"], run(plain.model, data[0])["y"])
    assert any("nothing had to stay float" in note for note in result.notes)
