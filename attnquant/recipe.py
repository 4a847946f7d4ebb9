"""What to quantize and how, as data (TOML); see docs/recipes.md for the grammar."""

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, get_args

from attnquant import bounds
from attnquant.errors import RecipeError, UnmatchedRuleError
from attnquant.roles import PortRole

Dtype = Literal["none", "int8", "uint8"]
Granularity = Literal["tensor", "head"]
CacheDtype = Literal["none", "int8", "int4"]
CacheGranularity = Literal["tensor", "channel"]
Clip = Literal["max", "mse"]
PackedChoice = Literal["skip", "split"]
Outliers = Literal["auto", "int8", "per_token", "weight_only", "float"]
Rounding = Literal["auto", "nearest", "compensated"]
Estimator = Literal["auto", "minmax", "mean_minmax", "histogram", "quantile"]

QUANTIZABLE = (PortRole.QUERY, PortRole.KEY, PortRole.VALUE, PortRole.PROBABILITIES)
"""Roles that a recipe may quantize; the others take only dtype "none" (caches have their own table)."""

_SUFFIX = ".toml"
_NAME = re.compile(r"[\w.-]+")


def load(source: "str | PathLike[str] | QuantizationRecipe") -> "QuantizationRecipe":
    """Read a recipe: the name of a built-in one, the path of a TOML file, or TOML text. A recipe is returned as it is.

    :raises RecipeError: unknown name, unreadable file, TOML that does not parse, unknown key, wrong type or value;
        the message names file, key, what was expected and what was got.
    """
    if isinstance(source, QuantizationRecipe):
        return source
    return _load(source if isinstance(source, str) else Path(fspath(source)), folder=Path(), chain=())


def names() -> tuple[str, ...]:
    """Names of the built-in recipes."""
    found = (entry.name for entry in resources.files("attnquant.recipes").iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in found if name.endswith(_SUFFIX)))


def dump(recipe: "QuantizationRecipe") -> str:
    """TOML text of a recipe, complete in itself: `load(dump(recipe)) == recipe`."""
    lines = [f"name = {_literal(recipe.name)}"]
    for role, config in recipe.roles.items():
        lines += ["", f"[roles.{role}]", *_pairs(config)]
    for title in ("kv_cache", "linears", "options", "ranges"):
        lines += ["", f"[{title}]", *_pairs(getattr(recipe, title))]
    for rule in recipe.rules:
        lines += ["", "[[rules]]", f"site = {_literal(rule.site)}"]
        lines += [f"roles.{role}.{pair}" for role, change in rule.roles.items() for pair in _pairs(change)]
    return "\n".join(lines) + "\n"


def keep_float(recipe: "QuantizationRecipe", nodes: Iterable[str]) -> frozenset[str]:
    """Names among `nodes` (linears, convolutions, embeddings) that the recipe keeps float.

    A pattern that matches any name, such as ".*", may find none: it can't be misspelt, and "every linear" of a model without
    linears is right.

    :raises UnmatchedRuleError: another pattern of `linears.keep_float` matches none of them.
    """
    known = list(nodes)
    kept: set[str] = set()
    for pattern in recipe.linears.keep_float:
        found = [name for name in known if re.search(pattern, name)]
        if not found and not re.search(pattern, ""):
            msg = (
                f"Recipe {recipe.name!r}, linears.keep_float: expected {pattern!r} to match the name of a linear, a "
                f"convolution or an embedding, got none among {len(known)}. Correct the pattern or take it out."
            )
            raise UnmatchedRuleError(msg)
        kept.update(found)
    return frozenset(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig:
    """How one role of an attention is quantized."""

    dtype: Dtype = "none"
    granularity: Granularity = "tensor"
    symmetric: bool = True
    range: tuple[float, float] | None = None
    """Fixed (low, high) with low <= 0 <= high; None: calibrated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """What a rule changes in a role's configuration; None leaves a value as it is."""

    dtype: Dtype | None = None
    granularity: Granularity | None = None
    symmetric: bool | None = None
    range: tuple[float, float] | Literal["calibrated"] | None = None

    def applied(self, config: RoleConfig) -> RoleConfig:
        """`config` with the changes."""
        changes = {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}
        if changes.get("range") == "calibrated":
            changes["range"] = None
        return replace(config, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Changes for the sites whose id the regular expression finds (`re.search`)."""

    site: str
    roles: Mapping[PortRole, RoleChange]

    def matches(self, site: str) -> bool:
        """True if the rule applies to the site with this id."""
        return re.search(self.site, site) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfig:
    """The linears outside attention: W8A8 by NNCF but for those kept float."""

    keep_float: tuple[str, ...] = ()
    """Regular expressions on node names."""
    smooth_quant: bool = True
    smooth_quant_alpha: float | None = None
    """0 to 1; None: the host's choice."""
    outliers: Outliers = "auto"
    """Linears whose input has outlier tokens, found on the calibration data: with an activation scale for each token where
    the target gains by it; as all others; with such a scale, all; with int8 weights and float activations; or float."""
    rounding: Rounding = "auto"
    """Of weights: each to its nearest integer, or to one that makes up for the errors of others on the calibration data; or
    this one where there are many samples."""

    def keeps_float(self, node: str) -> bool:
        """True if a pattern of `keep_float` is found in the node's name."""
        return any(re.search(pattern, node) for pattern in self.keep_float)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """Storage of the KV cache, where the operator has one that can be quantized."""

    dtype: CacheDtype = "none"
    granularity: CacheGranularity = "tensor"
    clip: Clip = "max"
    """Scales that clip nothing that was seen, or those of the least mean squared error."""
    keep_float: tuple[str, ...] = ()
    """Regular expressions on names of attention nodes whose caches stay float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Choices that are no quantizer's."""

    packed: PackedChoice = "skip"
    """Packed QKV or KV ports: leave them float, or put a Split in front and quantize Q and K."""
    max_drop: str | None = None
    """Bound on a metric ("ppl<=1.02", attnquant.bounds): parts are kept float until it holds."""
    gate: bool = False
    """Time float and int8 of every group of parts on this machine, and leave float what loses."""
    search_seconds: float = 10.0
    """Time for trying ranges and strengths; 0: none, the first candidates are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeConfig:
    """How calibration turns what was observed into ranges."""

    estimator: Estimator = "minmax"
    """"auto": by measurement, with more strengths of SmoothQuant than two where that is open too."""


def _default_roles() -> dict[PortRole, RoleConfig]:
    asked = (PortRole.QUERY, PortRole.KEY)
    return {role: RoleConfig(dtype="int8" if role in asked else "none") for role in QUANTIZABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRecipe:
    """A complete recipe. The defaults are the recipe "int8"."""

    name: str = "int8"
    roles: Mapping[PortRole, RoleConfig] = field(default_factory=_default_roles)
    rules: tuple[Rule, ...] = ()
    """In order; where two match, the later one wins."""
    linears: LinearConfig = field(default_factory=LinearConfig)
    kv_cache: KvCacheConfig = field(default_factory=KvCacheConfig)
    options: Options = field(default_factory=Options)
    ranges: RangeConfig = field(default_factory=RangeConfig)

    def bounded(self, max_drop: str) -> "QuantizationRecipe":
        """This recipe with another bound on the accuracy.

        :raises RecipeError: `max_drop` is none.
        """
        try:
            bound = bounds.parse(max_drop)
        except ValueError as error:
            msg = f"max_drop: expected {error}, got {max_drop!r}."
            raise RecipeError(msg) from None
        return replace(self, options=replace(self.options, max_drop=str(bound)))

    def gated(self, gate: bool) -> "QuantizationRecipe":
        """This recipe with the speed gate, or without."""
        return replace(self, options=replace(self.options, gate=gate))

    def resolve(self, site: str, role: PortRole) -> RoleConfig:
        """Configuration of one role at the site with this id: rules over roles."""
        config = self.roles.get(role, RoleConfig())
        for rule in self.rules:
            if role in rule.roles and rule.matches(site):
                config = rule.roles[role].applied(config)
        return config


def _pairs(config: object) -> list[str]:
    """`key = value` for every field of a dataclass that is set."""
    values = ((item.name, getattr(config, item.name)) for item in fields(config))  # type: ignore[arg-type]
    return [f"{name} = {_literal(value)}" for name, value in values if value is not None]


def _literal(value: object) -> str:
    """A TOML literal. JSON strings are TOML basic strings but for DEL, which TOML wants escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(_literal(item) for item in value)}]"
    return repr(float(value))  # type: ignore[arg-type]


def _load(source: str | Path, *, folder: Path, chain: tuple[str, ...]) -> QuantizationRecipe:
    text, where, stem, parent = _text(source, folder, chain)
    if where in chain:
        msg = f"Recipe {where}: `extends` runs in a circle: {' -> '.join((*chain, where))}. Take one of them out."
        raise RecipeError(msg)
    try:
        items = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        msg = f"Recipe {where}: expected TOML, got an error: {error}."
        raise RecipeError(msg) from error
    top = _Table(where=where, path="", items=items)
    top.expect("name", "extends", "roles", "rules", "linears", "kv_cache", "options", "ranges")
    base = QuantizationRecipe()
    if "extends" in items:
        extended = top.text("extends", "")
        if not _is_reference(extended):
            raise top.error("extends", f"the name of a recipe ({', '.join(names())}) or the path of a TOML file", extended)
        base = _load(extended, folder=parent, chain=(*chain, where))
    return _recipe(top, base, stem)


def _is_reference(source: str) -> bool:
    return _NAME.fullmatch(source) is not None or source.endswith(_SUFFIX)


def _text(source: str | Path, folder: Path, chain: tuple[str, ...]) -> tuple[str, str, str, Path]:
    """(TOML text, what to call it in messages, default name, folder of its own references)."""
    if isinstance(source, str):
        if source in names():
            text = resources.files("attnquant.recipes").joinpath(source + _SUFFIX).read_text(encoding="utf-8")
            return text, repr(source), source, folder
        if not _is_reference(source) and ("=" in source or "\n" in source):
            return source, "<text>", "custom", folder
    path = folder / source
    try:
        return path.read_text(encoding="utf-8"), str(path), path.stem, path.parent
    except (OSError, ValueError) as error:
        close = difflib.get_close_matches(str(source), names(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        named = f", which {chain[-1]} extends" if chain else ""
        msg = (
            f"Recipe {str(source)!r}{named}: expected a built-in name ({', '.join(names())}), the path of a TOML file or "
            f"TOML text; reading it as a file failed: {error}.{hint}"
        )
        raise RecipeError(msg) from error


def _recipe(top: "_Table", base: QuantizationRecipe, stem: str) -> QuantizationRecipe:
    roles = dict(base.roles)
    for role, change in _changes(top.table("roles")).items():
        roles[role] = change.applied(roles.get(role, RoleConfig()))
    linears, cache, options, ranges = (top.table(key) for key in ("linears", "kv_cache", "options", "ranges"))
    linears.expect("keep_float", "smooth_quant", "smooth_quant_alpha", "outliers", "rounding")
    cache.expect("dtype", "granularity", "clip", "keep_float")
    options.expect("packed", "max_drop", "gate", "search_seconds")
    ranges.expect("estimator")
    return QuantizationRecipe(
        name=top.text("name", stem),
        roles=roles,
        rules=(*base.rules, *(_rule(table) for table in top.tables("rules"))),
        linears=LinearConfig(
            keep_float=linears.patterns("keep_float", base.linears.keep_float),
            smooth_quant=linears.boolean("smooth_quant", base.linears.smooth_quant),
            smooth_quant_alpha=linears.alpha("smooth_quant_alpha", base.linears.smooth_quant_alpha),
            outliers=linears.choice("outliers", get_args(Outliers), base.linears.outliers),
            rounding=linears.choice("rounding", get_args(Rounding), base.linears.rounding),
        ),
        kv_cache=KvCacheConfig(
            dtype=cache.choice("dtype", get_args(CacheDtype), base.kv_cache.dtype),
            granularity=cache.choice("granularity", get_args(CacheGranularity), base.kv_cache.granularity),
            clip=cache.choice("clip", get_args(Clip), base.kv_cache.clip),
            keep_float=cache.patterns("keep_float", base.kv_cache.keep_float),
        ),
        options=Options(
            packed=options.choice("packed", get_args(PackedChoice), base.options.packed),
            max_drop=options.bound("max_drop", base.options.max_drop),
            gate=options.boolean("gate", base.options.gate),
            search_seconds=options.seconds("search_seconds", base.options.search_seconds),
        ),
        ranges=RangeConfig(estimator=ranges.choice("estimator", get_args(Estimator), base.ranges.estimator)),
    )


def _rule(table: "_Table") -> Rule:
    table.expect("site", "roles")
    if "site" not in table.items:
        raise table.error("site", "a regular expression on site ids", None)
    changes = _changes(table.table("roles"))
    if not changes:
        raise table.error("roles", f"at least one of {', '.join(f'roles.{role}' for role in QUANTIZABLE)}", None)
    return Rule(site=table.pattern("site", table.items["site"]), roles=changes)


def _changes(table: "_Table") -> dict[PortRole, RoleChange]:
    table.expect(*PortRole)
    return {PortRole(name): _change(table.table(name), PortRole(name)) for name in table.items}


def _change(table: "_Table", role: PortRole) -> RoleChange:
    table.expect("dtype", "granularity", "symmetric", "range")
    change = RoleChange(
        dtype=table.choice("dtype", get_args(Dtype), None),
        granularity=table.choice("granularity", get_args(Granularity), None),
        symmetric=table.boolean("symmetric", None),
        range=table.range("range"),
    )
    if change == RoleChange():
        raise table.error("", "at least one of dtype, granularity, symmetric, range", {})
    if role not in QUANTIZABLE and change.dtype not in (None, "none"):
        expected = f'"none": of an attention only {", ".join(QUANTIZABLE)} can be quantized (caches: table [kv_cache])'
        raise table.error("dtype", expected, change.dtype)
    return change


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A TOML table that knows where it stands, for messages."""

    where: str
    path: str
    items: Mapping[str, Any]

    def error(self, key: str, expected: str, got: object) -> RecipeError:
        name = ".".join(part for part in (self.path, key) if part)
        return RecipeError(f"Recipe {self.where}, key `{name}`: expected {expected}, got {got!r}.")

    def expect(self, *known: str) -> None:
        for key in self.items:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f" (did you mean `{close[0]}`?)" if close else ""
                raise self.error("", f"one of the keys {', '.join(known)}{hint}", key)

    def table(self, key: str) -> "_Table":
        items = self.items.get(key, {})
        if not isinstance(items, dict):
            raise self.error(key, "a table", items)
        return _Table(where=self.where, path=f"{self.path}.{key}" if self.path else key, items=items)

    def tables(self, key: str) -> "Sequence[_Table]":
        rows = self.items.get(key, [])
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise self.error(key, "an array of tables ([[rules]])", rows)
        return [_Table(where=self.where, path=f"{key}[{position}]", items=row) for position, row in enumerate(rows)]

    def choice(self, key: str, options: tuple[str, ...], default: Any) -> Any:
        if key not in self.items:
            return default
        value = self.items[key]
        if not isinstance(value, str) or value not in options:
            raise self.error(key, f"one of {', '.join(map(repr, options))}", value)
        return value

    def boolean(self, key: str, default: Any) -> Any:
        value = self.items.get(key, default)
        if key in self.items and not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def text(self, key: str, default: str) -> str:
        value = self.items.get(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def pattern(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise self.error(key, "a regular expression (a string)", value)
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise self.error(key, f"a regular expression (it does not compile: {error})", value) from error
        return value

    def patterns(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        values = self.items.get(key, list(default))
        if not isinstance(values, list):
            raise self.error(key, "an array of regular expressions", values)
        return tuple(self.pattern(key, value) for value in values)

    def alpha(self, key: str, default: float | None) -> float | None:
        value = self.items.get(key, default)
        if value is None or value == "auto":
            return None
        if not _is_number(value) or not 0 <= value <= 1:
            raise self.error(key, 'a number from 0 to 1, or "auto"', value)
        return float(value)

    def seconds(self, key: str, default: float) -> float:
        value = self.items.get(key, default)
        if not _is_number(value) or value < 0:
            raise self.error(key, "a number of seconds, 0 or more", value)
        return float(value)

    def bound(self, key: str, default: str | None) -> str | None:
        value = self.items.get(key, default)
        if value is None:
            return None
        try:
            return str(bounds.parse(value if isinstance(value, str) else ""))
        except ValueError as error:
            raise self.error(key, str(error), value) from None

    def range(self, key: str) -> tuple[float, float] | Literal["calibrated"] | None:
        value = self.items.get(key)
        if value is None or value == "calibrated":
            return value
        if isinstance(value, list) and len(value) == 2 and all(map(_is_number, value)):
            low, high = map(float, value)
            if low <= 0 <= high and low < high:
                return low, high
        raise self.error(key, '[low, high] with low <= 0 <= high and low < high, or "calibrated"', value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
