"""Placement: every (site, role) once, on the right edge, or skipped with its reason."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import ModelError, PlacementError, RecipeError, UnmatchedRuleError
from attnquant.placement import (
    SETUP_KEY,
    HostPoint,
    KeptFloat,
    QuantizationPoint,
    QuantizerSetup,
    Skipped,
    edge,
    place,
    policy_roles,
    stored_setup,
)
from attnquant.recipe import QuantizationRecipe, load
from attnquant.roles import PortRole
from attnquant.site import AttentionSite, Port

INT8 = load("int8")
R = PortRole


def decomposed(name: str = "a", **changes) -> AttentionSite:
    """MatMul, Softmax, MatMul, with a mask."""
    return AttentionSite(
        **{
            "id": f"/{name}_pv",
            "form": "decomposed",
            "node": f"{name}_pv",
            "nodes": (f"{name}_qk", f"{name}_softmax", f"{name}_pv"),
            "ports": {
                R.QUERY: Port(node=f"{name}_qk", index=0, tensor=f"{name}_q"),
                R.KEY: Port(node=f"{name}_qk", index=1, tensor=f"{name}_kt"),
                R.VALUE: Port(node=f"{name}_pv", index=1, tensor=f"{name}_v"),
                R.SCORES: Port(node=f"{name}_qk", index=0, tensor=f"{name}_s"),
                R.PROBABILITIES: Port(node=f"{name}_softmax", index=0, tensor=f"{name}_p"),
                R.CONTEXT: Port(node=f"{name}_pv", index=0, tensor=f"{name}_c"),
                R.MASK: Port(node=f"{name}_add", index=1, tensor="mask"),
            },
            **changes,
        }
    )


def operator(form: str = "ai.onnx::Attention@23", **changes) -> AttentionSite:
    """One operator with Q, K, V on inputs 0, 1, 2."""
    roles = (R.QUERY, R.KEY, R.VALUE)
    ports = {role: Port(node="attn", index=index, tensor=f"t{index}") for index, role in enumerate(roles)}
    return AttentionSite(**{"id": "/attn", "form": form, "node": "attn", "nodes": ("attn",), "ports": ports, **changes})


def edges(setup: QuantizerSetup) -> dict[PortRole, tuple[str, int, str]]:
    return {point.role: (point.node, point.index, point.tensor) for point in setup.points}


def reasons(setup: QuantizerSetup) -> dict[PortRole, str]:
    return {row.role: row.reason for row in setup.skipped}


def test_default_recipe_quantizes_q_and_k_and_accounts_for_the_rest() -> None:
    setup = place([decomposed()], INT8)
    assert edges(setup) == {R.QUERY: ("a_qk", 0, "a_q"), R.KEY: ("a_qk", 1, "a_kt")}
    assert {(p.dtype, p.symmetric, p.granularity, p.range) for p in setup.points} == {("int8", True, "tensor", None)}
    assert reasons(setup) == dict.fromkeys((R.VALUE, R.PROBABILITIES, R.MASK), "float by the recipe")
    assert (setup.recipe, setup.target) == ("int8", "")


def test_key_goes_in_front_of_repeat_kv() -> None:
    site = decomposed(branch={R.KEY: Port(node="unsqueeze", index=0, tensor="k_branch")}, kv_repeat=3)
    assert edges(place([site], INT8))[R.KEY] == ("unsqueeze", 0, "k_branch")


def test_a_branch_shared_with_v_is_no_place_for_k() -> None:
    shared = Port(node="unsqueeze", index=0, tensor="kv")
    site = decomposed(branch={R.KEY: shared, R.VALUE: shared})
    assert edges(place([site], INT8))[R.KEY] == ("a_qk", 1, "a_kt")


def test_a_branch_shared_by_q_and_k_is_no_place_for_either() -> None:
    shared = Port(node="reshape", index=0, tensor="x")
    found = edges(place([decomposed(branch={R.QUERY: shared, R.KEY: shared})], INT8))
    assert found == {R.QUERY: ("a_qk", 0, "a_q"), R.KEY: ("a_qk", 1, "a_kt")}


def test_probabilities_go_behind_the_guards_in_front_of_the_product_with_v() -> None:
    recipe = load('[roles.probabilities]\ndtype = "uint8"\nsymmetric = false\nrange = [0, 1]\n')
    (point,) = [p for p in place([decomposed()], recipe).points if p.role is R.PROBABILITIES]
    assert (point.node, point.index, point.dtype, point.symmetric, point.range) == ("a_pv", 0, "uint8", False, (0.0, 1.0))
    assert point.tensor == "a_p"
    # V @ P^T: V is operand 0, so P is operand 1.
    site = decomposed()
    swapped = decomposed(ports={**site.ports, R.VALUE: Port(node="a_pv", index=0, tensor="v")})
    (point,) = [p for p in place([swapped], recipe).points if p.role is R.PROBABILITIES]
    assert point.index == 1
    assert reasons(place([operator()], recipe))[R.PROBABILITIES] == "inside the operator"


@pytest.mark.parametrize(
    ("node", "index", "expected"),
    [("a_pv", 1, ("a_pv", 0)), ("a_pv", 0, ("a_pv", 1)), ("a_pv", 2, None), ("z_other", 1, None), ("A_other", 0, None)],
)
def test_probabilities_are_the_other_operand_of_the_product_with_v(
    node: str, index: int, expected: tuple[str, int] | None
) -> None:
    site = decomposed()
    ports = {**site.ports, R.VALUE: Port(node=node, index=index, tensor="v")}
    found = edge(decomposed(ports=ports), R.PROBABILITIES)
    assert (None if found is None else (found.node, found.index)) == expected
    assert edge(operator(), R.PROBABILITIES) is None


@pytest.mark.parametrize(
    ("site", "q", "k"),
    [
        (operator(packed="qkv"), "packed: V shares the port", "packed: V shares the port"),
        (operator(packed="kv"), None, "packed: V shares the port"),
        (operator(path="/if/then_branch"), "inside control flow", "inside control flow"),
        (decomposed(path="local::block"), "inside a function", "inside a function"),
    ],
)
def test_skipped_with_the_reason(site: AttentionSite, q: str | None, k: str) -> None:
    found = reasons(place([site], INT8))
    assert (found.get(R.QUERY), found.get(R.KEY)) == (q, k)


def test_an_operator_that_projects_inside_is_skipped_with_the_catalogues_reason() -> None:
    site = operator("com.microsoft::Attention@1", ports={})
    found = reasons(place([site], INT8))
    assert "projects inside" in found[R.QUERY]
    assert found[R.QUERY] == found[R.KEY]
    # An unknown operator without ports is still accounted for.
    assert reasons(place([operator("other::Attention@1", ports={})], INT8))[R.KEY] == "the attention has no such input"


def test_ignored_nodes_and_constants() -> None:
    found = place([decomposed("a"), decomposed("b")], INT8, ignored={"a_qk"})
    assert [(row.site, row.role) for row in found.skipped if row.reason == "ignored by the caller"] == [
        ("/a_pv", R.QUERY),
        ("/a_pv", R.KEY),
    ]
    assert {point.site for point in found.points} == {"/b_pv"}
    # Ignoring the product leaves K float wherever its quantizer would sit.
    grouped = decomposed(branch={R.KEY: Port(node="unsqueeze", index=0, tensor="k")})
    assert reasons(place([grouped], INT8, ignored={"a_qk"}))[R.KEY] == "ignored by the caller"


def test_constants_are_quantized_as_q_and_k_alone() -> None:
    ports = decomposed().ports
    everything = {port.tensor for port in ports.values()}
    found = place([decomposed()], load('extends = "int8"\nname = "v"\n[roles.value]\ndtype = "int8"'), constants=everything)
    assert {point.role: point.note for point in found.points} == dict.fromkeys(
        (R.QUERY, R.KEY), "a constant: stored as integers"
    )
    assert reasons(found)[R.VALUE] == "constant"
    assert all(point.note == "" for point in place([decomposed()], INT8).points)


def test_an_ignored_product_leaves_the_edges_in_front_of_its_branches_alone() -> None:
    branch = {role: Port(node=f"unsqueeze_{role}", index=0, tensor=f"t_{role}") for role in (R.QUERY, R.KEY)}
    setup = place([decomposed(branch=branch)], INT8, ignored=["a_qk"])
    assert not setup.points
    assert {reasons(setup)[role] for role in branch} == {"ignored by the caller"}


def test_notes_for_inner_caches_and_rotary() -> None:
    setup = place([operator("com.microsoft::GroupQueryAttention@1", past="inner", inner_rotary=True)], INT8)
    notes = {point.role: point.note for point in setup.points}
    assert notes == {R.QUERY: "before RoPE", R.KEY: "before RoPE; present holds the fake-quantized new keys"}


def test_plain_points_carry_no_note() -> None:
    assert {point.note for point in place([operator()], INT8).points} == {""}


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("ab", "2 ('/a_pv', '/b_pv')"),
        ("abc", "3 ('/a_pv', '/b_pv', '/c_pv')"),
        ("abcd", "4 ('/a_pv', '/b_pv', '/c_pv', ...)"),
    ],
)
def test_an_unmatched_rule_shows_three_sites(names: str, shown: str) -> None:
    with pytest.raises(UnmatchedRuleError) as caught:
        place([decomposed(name) for name in names], load('[[rules]]\nsite = "z"\nroles.query.dtype = "none"\n'))
    assert f"got none among {shown}. Correct the pattern" in str(caught.value)


def test_rules_act_per_site_and_an_unmatched_one_is_an_error() -> None:
    text = '[[rules]]\nsite = "^/a_"\nroles.query.dtype = "none"\nroles.value.dtype = "uint8"\n'
    setup = place([decomposed("a"), decomposed("b")], load(text))
    assert {(p.site, p.role, p.dtype) for p in setup.points} == {
        ("/a_pv", R.KEY, "int8"),
        ("/a_pv", R.VALUE, "uint8"),
        ("/b_pv", R.QUERY, "int8"),
        ("/b_pv", R.KEY, "int8"),
    }
    with pytest.raises(UnmatchedRuleError, match=r"rules\[0\].*'\^/a_'.*'/b_pv'"):
        place([decomposed("b")], load(text))
    with pytest.raises(UnmatchedRuleError, match="no attention at all"):
        place([], load(text))


def test_two_sites_on_one_edge_share_its_quantizer_or_it_is_an_error() -> None:
    branch, heads = {R.KEY: Port(node="unsqueeze", index=0, tensor="k")}, {"kv_heads": 8, "kv_repeat": 2}
    sites = [decomposed("a", branch=branch, **heads), decomposed("b", branch=branch, **heads)]
    assert len(place(sites, INT8).points) == 4
    with pytest.raises(PlacementError, match=r"'unsqueeze'.*/a_pv.*/b_pv"):
        place(sites, load('[[rules]]\nsite = "a_pv"\nroles.key.granularity = "head"\n'))
    with pytest.raises(PlacementError, match=r"'unsqueeze'.*/a_pv.*/b_pv"):
        place(sites, load('[[rules]]\nsite = "b_pv"\nroles.key.granularity = "head"\n'))


def test_a_scale_for_each_head_needs_their_number() -> None:
    recipe = load('[roles.key]\ngranularity = "head"\n')

    def heads(**changes: object) -> dict[PortRole, int | None]:
        return {point.role: point.heads for point in place([decomposed(q_heads=8, **changes)], recipe).points}

    assert heads(kv_heads=8) == {R.QUERY: None, R.KEY: 8}
    assert heads(kv_heads=8, kv_repeat=4)[R.KEY] == 8, "the edge is behind repeat_kv"
    branch = {R.KEY: Port(node="unsqueeze", index=0, tensor="k")}
    repeated = heads(kv_heads=8, kv_repeat=4, branch=branch)[R.KEY]
    assert (repeated, type(repeated)) == (2, int)
    for unknown in ({}, {"kv_heads": 8, "branch": branch}):
        with pytest.raises(PlacementError, match=r"/a_pv.*key.*number of heads"):
            heads(**unknown)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[options]\npacked = "split"', "options.packed"),
    ],
)
def test_what_nothing_acts_on_is_refused(text: str, key: str) -> None:
    with pytest.raises(RecipeError, match=key):
        place([decomposed()], load(text))


def test_the_target_is_recorded_by_name() -> None:
    class Target:
        name = "onnxruntime-cuda"

    assert place([], INT8, Target()).target == "onnxruntime-cuda"
    assert place([], INT8, "openvino").target == "openvino"


ports = st.builds(Port, node=st.sampled_from(["n0", "n1"]), index=st.integers(0, 3), tensor=st.sampled_from(["t0", "t1"]))
sites = st.builds(
    AttentionSite,
    id=st.uuids().map(str),
    form=st.sampled_from(["decomposed", "ai.onnx::Attention@23", "com.microsoft::Attention@1", "x::Y@1"]),
    node=st.sampled_from(["n0", "n1"]),
    nodes=st.just(("n0", "n1")),
    ports=st.dictionaries(st.sampled_from(list(PortRole)), ports),
    branch=st.dictionaries(st.sampled_from([R.QUERY, R.KEY]), ports),
    packed=st.sampled_from(["none", "qkv", "kv"]),
    past=st.sampled_from(["none", "concat", "inner"]),
    path=st.sampled_from(["", "/if/then_branch", "d::f"]),
)
recipes = st.sampled_from(["none", "int8", "uint8"]).flatmap(
    lambda dtype: st.sampled_from(["query", "key", "value", "probabilities"]).map(
        lambda role: load(f'[roles.{role}]\ndtype = "{dtype}"\n')
    )
)


@given(st.lists(sites, max_size=4), recipes, st.sets(st.sampled_from(["n0"])), st.sets(st.sampled_from(["t1"])))
def test_every_site_and_role_is_placed_or_skipped_exactly_once(
    found: list[AttentionSite], recipe: QuantizationRecipe, ignored: set[str], constants: set[str]
) -> None:
    try:
        setup = place(found, recipe, ignored=ignored, constants=constants)
    except PlacementError:
        return
    placed = [(point.site, point.role) for point in setup.points]
    skipped = [(row.site, row.role) for row in setup.skipped]
    assert sorted(placed + skipped) == sorted((site.id, role) for site in found for role in policy_roles(site))
    assert all(row.reason for row in setup.skipped)
    assert all(point.node not in ignored for point in setup.points)
    assert all(point.role in (R.QUERY, R.KEY) for point in setup.points if point.tensor in constants)
    assert all(recipe.resolve(site, role).dtype != "none" for site, role in placed)
    assert QuantizerSetup.from_json(json.loads(setup.to_text())) == setup


def test_setup_survives_json_and_metadata() -> None:
    setup = place([decomposed()], load('[roles.probabilities]\ndtype = "uint8"\nrange = [0, 1]\n'), "onnxruntime-cpu@1.31.1")
    setup = setup.with_host(
        [HostPoint(node="fc", index=0), HostPoint(node="fc", index=1, weight=True), HostPoint(node="gelu")],
        [KeptFloat(node="head", reason="float by the recipe")],
    )
    assert QuantizerSetup.from_json(setup.to_json()) == setup
    assert stored_setup({SETUP_KEY: setup.to_text()}) == setup
    assert stored_setup({}) is None
    assert setup.to_json()["host"] == [
        {"node": "fc", "index": 0, "weight": False},
        {"node": "fc", "index": 1, "weight": True},
        {"node": "gelu", "index": None, "weight": False},
    ]


def test_an_empty_host_is_not_an_unrecorded_one() -> None:
    assert QuantizerSetup.from_json(QuantizerSetup(host=()).to_json()).host == ()
    assert QuantizerSetup.from_json(QuantizerSetup().to_json()).host is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "nul", '{"version": 2}', "[" * 99_999, '{"version": 1, "points": [{}]}', '{"version": 1, "points": 3}'],
)
def test_metadata_that_is_no_setup_is_a_model_error(text: str) -> None:
    with pytest.raises(ModelError, match=r"[Ss]etup"):
        stored_setup({SETUP_KEY: text})


def test_a_setup_of_a_later_version_is_a_model_error() -> None:
    text = QuantizerSetup().to_text()
    assert stored_setup({SETUP_KEY: text}) is not None
    for version in (0, 2):
        with pytest.raises(ModelError, match=f"version {version}"):
            stored_setup({SETUP_KEY: json.dumps({**json.loads(text), "version": version})})


@pytest.mark.parametrize("change", [{"index": -1}, {"index": True}, {"role": "querry"}, {"node": 3}, {"range": [0]}])
def test_a_point_with_a_wrong_value_is_a_model_error(change: dict[str, object]) -> None:
    content = place([operator()], INT8).to_json()
    content["points"][0].update(change)
    with pytest.raises(ModelError):
        QuantizerSetup.from_json(content)


def test_values_are_frozen() -> None:
    point = QuantizationPoint(
        site="s", role=R.KEY, node="n", index=0, tensor="t", dtype="int8", symmetric=True, granularity="tensor"
    )
    with pytest.raises(AttributeError):
        point.index = 1  # type: ignore[misc]
    assert Skipped(site="s", role=R.KEY, reason="r") == Skipped(site="s", role=R.KEY, reason="r")
