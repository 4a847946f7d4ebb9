"""Recipes: the grammar, its precedence and its errors."""

import tomllib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant import recipe as recipes
from attnquant.errors import RecipeError, UnmatchedRuleError
from attnquant.recipe import (
    KvCacheConfig,
    LinearConfig,
    Options,
    Outliers,
    QuantizationRecipe,
    RangeConfig,
    RoleChange,
    RoleConfig,
    Rule,
    dump,
    keep_float,
    load,
)
from attnquant.roles import PortRole

QUERY, KEY, VALUE, PROBABILITIES = recipes.QUANTIZABLE

patterns = st.text(max_size=12).map(lambda text: "".join(c if c.isalnum() else "\\" + c for c in text if c > " "))
ranges = st.tuples(st.floats(-1e6, 0.0), st.floats(1e-3, 1e6))
dtypes = st.sampled_from(["none", "int8", "uint8"])
granularities = st.sampled_from(["tensor", "head"])
configs = st.builds(
    RoleConfig, dtype=dtypes, granularity=granularities, symmetric=st.booleans(), range=st.none() | ranges
)
changes = st.builds(
    RoleChange,
    dtype=st.none() | dtypes,
    granularity=st.none() | granularities,
    symmetric=st.none() | st.booleans(),
    range=st.none() | st.just("calibrated") | ranges,
).filter(lambda change: change != RoleChange())
rules = st.builds(
    Rule, site=patterns, roles=st.dictionaries(st.sampled_from(recipes.QUANTIZABLE), changes, min_size=1)
)
everything = st.builds(
    QuantizationRecipe,
    name=st.text(max_size=8),
    roles=st.fixed_dictionaries(dict.fromkeys(recipes.QUANTIZABLE, configs)),
    rules=st.lists(rules, max_size=3).map(tuple),
    linears=st.builds(
        LinearConfig,
        keep_float=st.lists(patterns, max_size=3).map(tuple),
        smooth_quant=st.booleans(),
        smooth_quant_alpha=st.none() | st.floats(0.0, 1.0),
        outliers=st.sampled_from(get_args(Outliers)),
    ),
    kv_cache=st.builds(
        KvCacheConfig, dtype=st.sampled_from(["none", "int8", "int4"]), granularity=st.sampled_from(["tensor", "channel"]),
        clip=st.sampled_from(["max", "mse"]), keep_float=st.lists(patterns, max_size=2).map(tuple),
    ),
    options=st.builds(
        Options, packed=st.sampled_from(["skip", "split"]),
        max_drop=st.none() | st.sampled_from(["ppl<=1.02", "snr_db>=30"]),
        gate=st.booleans(),
    ),
    ranges=st.builds(RangeConfig, estimator=st.sampled_from(["auto", "minmax", "mean_minmax", "histogram", "quantile"])),
)


@given(everything)
def test_load_undoes_dump(recipe: QuantizationRecipe) -> None:
    text = dump(recipe)
    tomllib.loads(text)
    assert load(text) == recipe


def test_the_default_recipe_is_what_interfaces_say() -> None:
    recipe = load("int8")
    assert recipe == QuantizationRecipe()
    assert recipe.roles == {
        QUERY: RoleConfig(dtype="int8", granularity="tensor", symmetric=True),
        KEY: RoleConfig(dtype="int8", granularity="tensor", symmetric=True),
        VALUE: RoleConfig(dtype="none"),
        PROBABILITIES: RoleConfig(dtype="none"),
    }
    assert recipe.linears == LinearConfig(keep_float=(), smooth_quant=True, smooth_quant_alpha=None)
    assert recipe.kv_cache.dtype == "none"
    assert recipe.ranges.estimator == "minmax"
    assert recipe.options == Options(packed="skip", max_drop=None, gate=False)


def test_every_built_in_recipe_loads_under_its_own_name() -> None:
    assert "int8" in recipes.names()
    for name in recipes.names():
        recipe = load(name)
        assert recipe.name == name
        assert load(dump(recipe)) == recipe


def test_rules_win_over_roles_and_roles_over_extends() -> None:
    recipe = load(
        """
        extends = "int8"
        [roles.key]
        granularity = "head"
        [roles.probabilities]
        dtype = "uint8"
        symmetric = false
        range = [0, 1]
        [[rules]]
        site = "layer[12]"
        roles.query.dtype = "none"
        roles.probabilities.range = "calibrated"
        [[rules]]
        site = "layer2"
        roles.query.dtype = "uint8"
        """
    )
    # extends gives int8 and symmetric, the role's table only the granularity.
    assert recipe.resolve("/layer0/pv", KEY) == RoleConfig(dtype="int8", granularity="head", symmetric=True)
    assert recipe.resolve("/layer0/pv", QUERY).dtype == "int8"
    assert recipe.resolve("/layer1/pv", QUERY) == RoleConfig(dtype="none")
    # Of two rules the later one wins; what it does not name stays.
    assert recipe.resolve("/layer2/pv", QUERY).dtype == "uint8"
    assert recipe.resolve("/layer0/pv", PROBABILITIES).range == (0.0, 1.0)
    assert recipe.resolve("/layer2/pv", PROBABILITIES) == RoleConfig(dtype="uint8", symmetric=False, range=None)
    assert recipe.resolve("/layer0/pv", PortRole.MASK) == RoleConfig()


def test_extends_follows_files_next_to_the_file(tmp_path) -> None:
    (tmp_path / "base.toml").write_text('extends = "int8"\n[linears]\nsmooth_quant = false\nkeep_float = ["lm_head"]\n')
    (tmp_path / "sub").mkdir()
    child = tmp_path / "sub" / "child.toml"
    child.write_text('extends = "../base.toml"\n[ranges]\nestimator = "histogram"\n')
    recipe = load(child)
    assert recipe.name == "child"
    assert recipe.linears == LinearConfig(keep_float=("lm_head",), smooth_quant=False)
    assert recipe.ranges.estimator == "histogram"
    assert recipe.roles[QUERY].dtype == "int8"
    assert load(str(child)) == recipe
    # A recipe without `extends` starts from int8.
    assert load('[roles.value]\ndtype = "int8"').roles[KEY].dtype == "int8"


def test_rules_of_the_extended_recipe_come_first(tmp_path) -> None:
    base = tmp_path / "base.toml"
    base.write_text('[[rules]]\nsite = "x"\nroles.key.dtype = "none"\nroles.query.dtype = "none"\n')
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\n[[rules]]\nsite = "x"\nroles.key.dtype = "int8"\n')
    recipe = load(child)
    assert (recipe.resolve("x", KEY).dtype, recipe.resolve("x", QUERY).dtype) == ("int8", "none")


def test_extends_in_a_circle_is_an_error(tmp_path) -> None:
    (tmp_path / "a.toml").write_text('extends = "b.toml"')
    (tmp_path / "b.toml").write_text('extends = "a.toml"')
    with pytest.raises(RecipeError, match=r"circle.*a\.toml.*b\.toml.*a\.toml"):
        load(tmp_path / "a.toml")


BROKEN = [
    ("a = ", "TOML"),
    ("role = 1", r"`roles`.*got 'role'"),
    ("roles = 3", r"key `roles`: expected a table, got 3"),
    ('[roles.valu]\ndtype = "int8"', r"`value`.*got 'valu'"),
    ("[roles.value]", r"key `roles.value`: expected at least one of dtype"),
    ("[roles.value]\ndtype = 8", r"key `roles.value.dtype`: expected one of 'none', 'int8', 'uint8', got 8"),
    ('[roles.value]\ndtype = "fp8"', r"got 'fp8'"),
    ('[roles.value]\nsymmetric = "yes"', r"key `roles.value.symmetric`: expected true or false, got 'yes'"),
    ("[roles.probabilities]\nrange = [1, 0]", r"`roles.probabilities.range`.*low <= 0 <= high"),
    ("[roles.probabilities]\nrange = [0, 0]", r"low < high"),
    ("[roles.probabilities]\nrange = [0.5, 1]", r"low <= 0"),
    ("[roles.probabilities]\nrange = [-inf, inf]", r"low <= 0"),
    ("[roles.probabilities]\nrange = [0, 1, 2]", r"\[low, high\]"),
    ("[roles.probabilities]\nrange = [false, true]", r"\[low, high\]"),
    ('[roles.mask]\ndtype = "int8"', r"`roles.mask.dtype`: expected \"none\""),
    ('[roles.past_key]\ndtype = "int8"', r"kv_cache"),
    ('[kv_cache]\ndtype = "int16"', r"`kv_cache.dtype`.*'int4', got 'int16'"),
    ('kv_cache = "int8"', r"key `kv_cache`: expected a table, got 'int8'"),
    ("[linears]\nkeep_float = 'x'", r"`linears.keep_float`: expected an array"),
    ("[linears]\nkeep_float = ['(']", r"`linears.keep_float`.*does not compile.*got '\('"),
    ("[linears]\nsmooth_quant_alpha = 1.5", r"`linears.smooth_quant_alpha`: expected a number from 0 to 1.*got 1.5"),
    ("[linears]\nsmooth_quant_alpha = true", r"got True"),
    ("[linears]\nsmoothquant = true", r"did you mean `smooth_quant`"),
    ('[options]\npacked = "cut"', r"`options.packed`.*'split', got 'cut'"),
    ("[options]\nmax_drop = 1.02", r"`options.max_drop`.*ppl<=1.02.*got 1.02"),
    ('[options]\ngate = "yes"', r"`options.gate`: expected true or false, got 'yes'"),
    ('[options]\nmax_drop = "little"', r"got 'little'"),
    ('[ranges]\nestimator = "best"', r"`ranges.estimator`.*'histogram', 'quantile', got 'best'"),
    ('[rules]\nsite = "x"', r"key `rules`: expected an array of tables"),
    ('[[rules]]\nroles.query.dtype = "none"', r"key `rules\[0\].site`: expected a regular expression"),
    ('[[rules]]\nsite = "["\nroles.query.dtype = "none"', r"`rules\[0\].site`.*does not compile"),
    ("[[rules]]\nsite = 1\nroles.query.dtype = 'none'", r"`rules\[0\].site`.*got 1"),
    ('[[rules]]\nsite = "x"', r"key `rules\[0\].roles`: expected at least one"),
    ('[[rules]]\nsite = "x"\nroles.query.dtyp = "none"', r"did you mean `dtype`"),
    ("name = 3", r"key `name`: expected a string, got 3"),
    ('extends = "int9"', r"expected a built-in name.*Did you mean 'int8'"),
    ("extends = '[roles.value]'", r"key `extends`"),
    ("extends = ['int8']", r"key `extends`: expected a string"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_broken_text_is_an_error_with_key_expected_and_got(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load(text + "\n")


def test_errors_name_the_file(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[roles.value]\ndtype = 8\n")
    with pytest.raises(RecipeError, match=r"mine\.toml, key `roles\.value\.dtype`"):
        load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match=r"mine\.toml"):
        load(path)
    for missing in (tmp_path / "none.toml", tmp_path, "no-such-recipe", "", "\0"):
        with pytest.raises(RecipeError, match="expected a built-in name"):
            load(missing)


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(RecipeError):
        load("a = " + "[" * 100_000)


def test_a_recipe_is_returned_as_it_is() -> None:
    recipe = QuantizationRecipe(name="own")
    assert load(recipe) is recipe


def test_keep_float_matches_names_and_refuses_patterns_without_a_match() -> None:
    recipe = QuantizationRecipe(linears=LinearConfig(keep_float=(r"down_proj$", "lm_head")))
    nodes = ["l0/down_proj", "l0/down_proj_2", "lm_head/MatMul", "l0/up"]
    assert keep_float(recipe, nodes) == {"l0/down_proj", "lm_head/MatMul"}
    assert [recipe.linears.keeps_float(name) for name in nodes] == [True, False, True, False]
    with pytest.raises(UnmatchedRuleError, match="lm_head"):
        keep_float(recipe, nodes[:2])
