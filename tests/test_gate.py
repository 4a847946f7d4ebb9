"""The speed gate: its rule, its small models, and that what loses stays float and nothing else does."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import attnquant
from attnquant import settling, timing
from attnquant.account import as_json
from attnquant.bounds import Bound
from attnquant.building import Builder
from attnquant.cli import main
from attnquant.errors import ModelError, RecipeError
from attnquant.model import copy
from attnquant.pace import LEAST, MARGIN, MOST, RULE, GateReport, GateRow, Pace, pace
from attnquant.report import account_of, render
from attnquant.roles import PortRole
from attnquant.runtime import run
from attnquant.tuning import gate, parts_of
from attnquant.tuning import groups as grouping
from tests import tinymodels

WIDTH = tinymodels.WIDTH
PLAIN = 'extends = "int8"\n[linears]\nsmooth_quant = false\n'


def samples(count: int = 4) -> list[dict[str, np.ndarray]]:
    return [{"x": tinymodels.weights(seed, 2, 5, WIDTH)} for seed in range(count)]


def layers() -> onnx.ModelProto:
    """Two layers of attention and a linear with a bias behind it: equal shapes twice, one shape of its own at the end."""
    nodes, tensors, value = [], [], "x"
    for layer in "ab":
        for seed, role in enumerate("qkv"):
            tensors.append(numpy_helper.from_array(tinymodels.weights(seed, WIDTH, WIDTH), f"{layer}_{role}"))
            nodes.append(helper.make_node("MatMul", [value, f"{layer}_{role}"], [f"{layer}{role}"], name=f"{layer}_{role}"))
        ports = [f"{layer}{role}" for role in "qkv"]
        heads = {"q_num_heads": 2, "kv_num_heads": 2}
        nodes.append(helper.make_node("Attention", ports, [f"{layer}c"], name=f"{layer}_attn", **heads))
        tensors.append(numpy_helper.from_array(tinymodels.weights(5, WIDTH, WIDTH), f"{layer}_w"))
        tensors.append(numpy_helper.from_array(tinymodels.weights(6, WIDTH), f"{layer}_bias"))
        nodes.append(helper.make_node("MatMul", [f"{layer}c", f"{layer}_w"], [f"{layer}m"], name=f"{layer}_out"))
        nodes.append(helper.make_node("Add", [f"{layer}m", f"{layer}_bias"], [f"{layer}y"], name=f"{layer}_add"))
        value = f"{layer}y"
    tensors.append(numpy_helper.from_array(tinymodels.weights(7, WIDTH, 8), "head"))
    nodes.append(helper.make_node("MatMul", [value, "head"], ["y"], name="head"))
    shapes = {"x": ["batch", "length", WIDTH], "y": ["batch", "length", 8]}
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    return tinymodels.made(helper.make_graph(nodes, "layers", ends[:1], ends[1:], tensors), 23)


def steady(ratio: float, pairs: int = LEAST) -> Pace:
    return pace([(1e-3, ratio * 1e-3)] * pairs)


def planted(slow: Mapping[str, float], calls: list[list[str]] | None = None) -> Callable[..., Pace]:
    """A race in which int8 takes so many times as long where a node's name starts so, else half of float's time."""

    def race(first: ir.Model, second: ir.Model, sample: object, seconds: float) -> Pace:
        names = [node.name or "" for node in first.graph]
        if calls is not None:
            calls.append(names)
        if first.graph.name != "group":  # a whole model
            return steady(0.9)
        return steady(max((ratio for name, ratio in slow.items() if any(n.startswith(name) for n in names)), default=0.5))

    return race


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *given: monkeypatch.setattr("attnquant.settling.race", planted(*given))


# ---- the rule


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.2] * LEAST, "float"),
        ([1.2] * (LEAST - 1), "open"),
        ([0.8] * LEAST, "int8"),
        ([1.0] * LEAST, "int8"),
        ([1.02] * LEAST, "int8"),
        ([MARGIN + 0.001] * LEAST, "float"),
        ([0.7, 1.6] * 40, "open"),
        ([0.5] * 6 + [1.2] * 14, "open"),
        ([0.5] * 4 + [1.2] * 16, "float"),
        ([1.5] * 4 + [0.9] * 16, "int8"),
    ],
)
def test_noise_does_not_decide(ratios: list[float], verdict: str) -> None:
    assert pace([(1.0, ratio) for ratio in ratios]).verdict == verdict


def test_the_interval_holds_the_median_99_times_in_100() -> None:
    draws = np.random.default_rng(0).lognormal(0.0, 0.3, (4000, 60))
    found = [pace([(1.0, value) for value in draw]) for draw in draws]
    inside = np.mean([item.low <= 1.0 <= item.high for item in found])
    assert 0.98 < inside < 0.998
    assert found[0].ratio == pytest.approx(np.median(draws[0]))


def raced(monkeypatch: pytest.MonkeyPatch, took: Iterator[float], seconds: float = 1e9) -> tuple[Pace, list[object]]:
    """What `timing.raced` makes of two models that take so long in turn, and the order in which they ran."""
    model = _loaded(tinymodels.linear())
    ran: list[object] = []

    def seconds_of(session: object, sample: object) -> float:
        ran.append(session)
        return next(took)

    monkeypatch.setattr(timing, "_seconds", seconds_of)
    ticks = itertools.count()
    return timing.raced(model, model, {}, seconds=seconds, clock=lambda: float(next(ticks))), ran


def _loaded(model: onnx.ModelProto) -> ir.Model:
    from attnquant.model import load

    return load(model)


def test_pairs_are_interleaved_swapped_and_run_until_they_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    # Warm-up of both twice, then float first, int8 first, ...: in every pair float takes 4 and int8 6.
    took = itertools.chain([9.0] * 4, itertools.cycle([4.0, 6.0, 6.0, 4.0]))
    found, ran = raced(monkeypatch, took)
    assert (found.float_ms, found.int8_ms, found.ratio, found.pairs) == (4000, 6000, 1.5, LEAST)
    first, second = ran[:2]
    assert ran[4:8] == [first, second, second, first]


def test_what_does_not_decide_ends_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = itertools.chain([9.0] * 4, itertools.cycle([4.0, 2.0, 8.0, 4.0]))
    assert raced(monkeypatch, noise)[0].pairs == MOST


def test_time_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = raced(monkeypatch, itertools.repeat(1.0), seconds=6)
    assert found.pairs == 5
    assert found.verdict == "open"


def test_short_models_run_several_times_in_one_observation(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ran = raced(monkeypatch, itertools.repeat(5e-4))
    assert len(ran) == 4 + 2 * 4 * LEAST


# ---- groups and their small models


def host_form(
    recipe: str = PLAIN, model: onnx.ModelProto | None = None, data: list[dict[str, np.ndarray]] | None = None
) -> tuple[ir.Model, tuple[grouping.Group, ...], list[dict[str, np.ndarray]], Builder]:
    """(the host's Q/DQ model, of `layers` by default, its groups, samples, its builder)."""
    data, found = data or samples(), {}

    def catch(builder: object, first: object, *rest: object) -> settling.Settled:
        found.update(builder=builder, first=first)
        return settling.Settled(built=first)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnquant.quantization.settled", catch)
        attnquant.quantize(model or layers(), data, recipe=recipe, gate=True)
    written = found["first"].host_model
    groups = grouping.groups_of(written, parts_of(written, found["builder"].points))
    return written, groups, data, found["builder"]


def test_parts_that_read_one_quantizer_are_a_group() -> None:
    _, groups, _, _ = host_form()
    assert [tuple(part.name for part in group.parts) for group in groups] == [
        ("/a_attn",), ("/b_attn",), ("a_q", "a_k", "a_v"), ("a_out",), ("b_q", "b_k", "b_v"), ("b_out",), ("head",),
    ]  # fmt: skip
    assert [[value.name for value in group.inputs] for group in groups[1:4]] == [["bq", "bk", "bv"], ["x"], ["ac"]]
    assert [value.name for value in groups[3].outputs] == ["ay"], "the bias belongs to it"


def test_small_models_compute_what_the_model_does() -> None:
    from attnquant import probe

    model, groups, data, builder = host_form()
    wanted = {value for group in groups for value in (*group.inputs, *group.outputs)}
    arrays = probe.arrays(model, wanted, data[0], optimize=False)
    for group in groups:
        small = grouping.small_model(model, [group])
        feeds = {value.name or "": arrays[value] for value in group.inputs}
        expected = [arrays[value] for value in group.outputs]
        got = list(run(builder.small(copy(small)), feeds).values())
        for want, have in zip(expected, got, strict=True):
            np.testing.assert_allclose(have, want, atol=0.05)
        plain = grouping.without_quantizers(small)
        assert not {node.op_type for node in plain.graph} & {"QuantizeLinear", "DequantizeLinear"}
        if group.parts[0].name == "head":
            exact = arrays[group.inputs[0]] @ tinymodels.weights(7, WIDTH, 8)
            np.testing.assert_allclose(next(iter(run(plain, feeds).values())), exact, atol=1e-5)


def test_equal_shapes_are_timed_in_one_model_with_every_weight_of_theirs() -> None:
    model, groups, data, _ = host_form()
    calls: list[list[str]] = []
    rows = gate.rows(model, parts_of(model, ()), data[0], lambda small: small, planted({}, calls))
    assert [row.parts for row in rows] == [("a_q", "a_k", "a_v", "b_q", "b_k", "b_v"), ("a_out", "b_out"), ("head",)]
    assert {"a_q/0", "b_q/1"} <= set(calls[0])
    assert {row.sizes for row in rows} == {
        "2x5x16, 16x16, 16x16, 16x16", "2x5x16, 16x16", "2x5x16, 16x8",
    }  # fmt: skip
    assert len(groups) == 7


def test_what_loses_next_to_nothing_stays_int8() -> None:
    model, _, data, _ = host_form()
    parts, race = parts_of(model, ()), planted({"a_out": 1.2})  # 0.2 ms for both of its kind
    for whole, decision in ((39.0, "float"), (41.0, "int8 (loses too little)")):
        found = {row.parts[0]: row for row in gate.rows(model, parts, data[0], lambda small: small, race, whole_ms=whole)}
        assert found["a_out"].decision == decision
        assert found["a_out"].kept_float == (decision == "float")
        assert found["head"].decision == "int8"


def embedding() -> onnx.ModelProto:
    """ids -> rows of a table -> a linear; a second table is read at constant places."""
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"], name="embed"),
        helper.make_node("Gather", ["places", "zero"], ["p"], name="position"),
        helper.make_node("Add", ["e", "p"], ["s"], name="sum"),
        helper.make_node("MatMul", ["s", "w"], ["y"], name="linear"),
    ]
    tensors = {"table": (60, WIDTH), "places": (60, WIDTH), "w": (WIDTH, WIDTH)}
    weights = [numpy_helper.from_array(tinymodels.weights(0, *shape), name) for name, shape in tensors.items()]
    weights.append(numpy_helper.from_array(np.zeros((1, 1), np.int64), "zero"))
    ids = helper.make_tensor_value_info("ids", onnx.TensorProto.INT64, ["batch", "length"])
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", "length", WIDTH])
    return tinymodels.made(helper.make_graph(nodes, "embedding", [ids], [output], weights), 17)


def test_a_table_is_timed_as_the_model_reads_it() -> None:
    """int8 rows are gathered and then dequantized; a whole table that is dequantized would be another model."""
    data = [{"ids": np.random.default_rng(seed).integers(0, 60, (2, 5))} for seed in range(4)]
    model, groups, _, builder = host_form(PLAIN, embedding(), data)
    [group] = [group for group in groups if group.parts[0].name == "embed"]
    small = builder.small(grouping.small_model(model, [group]))
    [gather] = [node for node in small.graph if node.name == "embed/0"]
    assert gather.inputs[0].dtype == ir.DataType.INT8
    exact = tinymodels.weights(0, 60, WIDTH)[data[0]["ids"]]
    np.testing.assert_allclose(next(iter(run(small, data[0]).values())), exact, atol=0.03)
    rows = gate.rows(model, parts_of(model, ()), data[0], lambda small: small, planted({}))
    assert {row.parts[0]: row.why for row in rows} == {"embed": "", "linear": "", "position": "its result is a constant"}


def test_groups_beyond_the_cache_are_not_all_put_in_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _, groups, _, _ = host_form()
    out = [group for group in groups if group.parts[0].name.endswith("_out")]
    size = grouping.weight_bytes(out[0])
    assert 4 * WIDTH * (WIDTH + 1) <= size < 8 * WIDTH * (WIDTH + 1)
    for most, fit in ((2 * size, 2), (2 * size - 1, 1), (1, 1)):
        monkeypatch.setattr(grouping, "MOST_BYTES", most)
        assert len(grouping.fitting(out)) == fit


def test_time_that_ran_out_and_groups_that_fail_leave_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, data, _ = host_form()

    def failing(*given: object) -> Pace:
        raise ModelError("no kernel")

    rows = gate.rows(model, parts_of(model, ()), data[0], lambda small: small, failing)
    assert {row.decision for row in rows} == {"int8 (not timed: no kernel)"}
    monkeypatch.setattr(gate, "SECONDS", 0.0)
    rows = gate.rows(model, parts_of(model, ()), data[0], lambda small: small, planted({"": 9.0}))
    assert {row.decision for row in rows} == {"int8 (not timed: time ran out)"}
    assert not any(row.kept_float for row in rows)


# ---- through quantize


def products(model: ir.Model) -> dict[str, bool]:
    """{name of a linear: whether its weight is float}"""
    return {
        node.name or "": node.inputs[1].dtype == ir.DataType.FLOAT and node.inputs[1].is_initializer()
        for node in model.graph if node.op_type == "MatMul"
    }  # fmt: skip


def test_a_group_declared_slower_stays_float_and_the_audit_knows(race: Callable[..., None]) -> None:
    race({"a_out": 1.2, "b_out": 1.2})
    result = attnquant.quantize(layers(), samples(), gate=True)
    slow = {"a_out", "b_out"}
    assert {name for name, plain in products(result.model).items() if plain} == slow
    assert {row.node for row in result.setup.kept_float} == slow
    assert all("float by the speed gate: int8 takes 1.20 times" in row.reason for row in result.setup.kept_float)
    report = attnquant.check(result.model)
    assert report.ok
    account = account_of(result)
    assert account.linears is not None
    assert (account.linears.int8, account.linears.total) == (7, 9)
    assert all("speed gate" in text for text in account.linears.exceptions)
    assert len(result.setup.points) == 4, "both attentions keep Q and K"
    assert any("2 of 11 parts stay float" in note for note in result.notes)


def test_an_attention_declared_slower_is_skipped(race: Callable[..., None]) -> None:
    race({"a_attn": 2.0})
    result = attnquant.quantize(layers(), samples(), gate=True)
    assert not result.setup.points, "attentions of equal shapes are decided together"
    reasons = {row.reason for row in result.setup.skipped if row.role in (PortRole.QUERY, PortRole.KEY)}
    assert reasons == {"float by the speed gate: int8 takes 2.00 times as long here"}
    assert not any(products(result.model).values())
    assert attnquant.check(result.model).ok


def test_a_gate_that_finds_no_loser_changes_nothing(race: Callable[..., None]) -> None:
    race({"a_out": 1.02})
    data = samples()
    gated, plain = (attnquant.quantize(layers(), data, gate=asked) for asked in (True, False))
    np.testing.assert_array_equal(run(gated.model, data[0])["y"], run(plain.model, data[0])["y"])
    assert gated.setup == plain.setup
    assert gated.gate is not None
    assert gated.gate.kept == 0
    assert plain.gate is None


def test_a_recipe_can_ask_for_it_and_the_caller_can_not_want_it(race: Callable[..., None]) -> None:
    race({"head": 5.0})
    recipe = 'extends = "int8"\n[options]\ngate = true\n'
    assert {row.node for row in attnquant.quantize(layers(), samples(), recipe=recipe).setup.kept_float} == {"head"}
    assert attnquant.quantize(layers(), samples(), recipe=recipe, gate=False).gate is None


def test_a_gated_model_that_is_slower_as_a_whole_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def race(first: ir.Model, second: ir.Model, sample: object, seconds: float) -> Pace:
        whole = first.graph.name != "group"
        quantized = any(node.op_type == "QuantizeLinear" for node in first.graph)
        return steady(1.1 if not whole or quantized else 0.5)

    monkeypatch.setattr("attnquant.settling.race", race)
    result = attnquant.quantize(layers(), samples(), gate=True)
    assert not any(products(result.model).values())
    assert len(result.setup.points) == 4
    assert result.gate is not None
    assert result.gate.kept == 0
    assert "Undone: as a whole it takes 1.10 times as long" in result.gate.sentence()


def test_the_bound_comes_first(race: Callable[..., None]) -> None:
    race({"": 5.0})
    result = attnquant.quantize(layers(), samples(8), max_drop="snr_db>=40", gate=True)
    reasons = [row.reason for row in result.setup.kept_float]
    by_bound = [reason for reason in reasons if "max_drop" in reason]
    by_gate = [reason for reason in reasons if "speed gate" in reason]
    assert by_bound
    assert by_gate
    assert len(reasons) == len(by_bound) + len(by_gate) == 9
    assert result.gate is not None
    assert sum(len(row.parts) for row in result.gate.rows) == 11 - len(by_bound), "the gate does not see what the bound kept"
    assert attnquant.check(result.model).ok


def test_a_gated_model_that_misses_the_bound_is_not_handed_over() -> None:
    class Judge:
        bound = Bound(metric="snr_db", value=30.0)

        def of_model(self, model: object) -> float:
            return 29.0 if model == "worse" else 31.0

    def undone(model: str) -> str:
        built = settling.Built(host_model=model, model=model, emitted=model, points=(), report=None)  # type: ignore[arg-type]
        return settling._undone(steady(0.9), built, Judge())  # type: ignore[arg-type]

    assert undone("worse") == "Undone: it gives 29, which misses snr_db>=30."
    assert undone("better") == ""


def test_another_target_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"gate: expected the target onnxruntime-cpu.*got 'openvino'"):
        attnquant.quantize(layers(), samples(), gate=True, target="openvino")


def test_really_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing planted; whoever wins, the account adds up."""
    monkeypatch.setattr(gate, "SECONDS", 2.0)
    monkeypatch.setattr(gate, "WHOLE_SECONDS", 0.5)
    onnx.save(layers(), tmp_path / "m.onnx")
    for number, sample in enumerate(samples()):
        np.savez(tmp_path / f"{number}.npz", **sample)
    command = ["quantize", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "q.onnx"), "--data", str(tmp_path)]
    assert main([*command, "--gate", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    groups = document["gate"]["groups"]
    assert sum(len(group["parts"]) for group in groups) == 11
    assert all(group["pairs"] > 0 and group["float_ms"] > 0 for group in groups)
    assert set(document["gate"]["whole"]) >= {"all int8"}
    assert document["gate"]["rule"] == RULE
    assert main(["check", str(tmp_path / "q.onnx")]) == 0


# ---- the report


def report() -> GateReport:
    rows = (
        GateRow(parts=("fc_in", "fc_in_2"), sizes="1x8x16, 16x64", pace=steady(1.25)),
        GateRow(parts=("/attn",), sizes="1x8x16", why="no kernel | here"),
    )
    return GateReport(
        rows=rows, runtime="onnxruntime 9", cpu="a CPU", threads=2, seconds=1.5, whole={"all int8": steady(0.75)}
    )


def test_the_table_is_in_every_format(race: Callable[..., None]) -> None:
    from dataclasses import replace

    race({})
    account = replace(account_of(attnquant.quantize(layers(), samples())), gate=report())
    document = as_json(account)["gate"]
    assert document["groups"][0] == {
        "parts": ["fc_in", "fc_in_2"], "sizes": "1x8x16, 16x64", "decision": "float",
        "float_ms": 1.0, "int8_ms": 1.25, "ratio": 1.25, "low": 1.25, "high": 1.25, "pairs": LEAST,
    }  # fmt: skip
    assert document["groups"][1]["ratio"] is None
    assert (document["kept_float"], document["threads"], document["undone"]) == (2, 2, None)
    json.loads(render(account, "json"))
    page = render(account, "markdown")
    assert "| fc\\_in and 1 more | 1x8x16, 16x64 | 1 | 1.25 | 1.25 | 1.25-1.25 | 20 | float |" in page
    assert "int8 (not timed: no kernel \\| here) |" in page
    assert "| whole model | all int8 | 1 | 0.75 | 0.75 |" in page
    text = " ".join(render(account, "rich").split())
    assert "fc_in and 1 more 1x8x16, 16x64 1 1.25 1.25 1.25-1.25 20 float" in text
    assert "stays int8." in text
