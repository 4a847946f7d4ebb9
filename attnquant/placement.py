"""Where quantizers go in every attention: pure, from the sites and a recipe; see docs/placement.md for the rules.

Every (site, role) of `policy_roles` ends up exactly once: as a point or skipped with its reason. Linears and everything else
outside attention are the host's to place; what it decided is recorded in the setup's `host`.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from attnquant.errors import ModelError, PlacementError, RecipeError, UnmatchedRuleError
from attnquant.metatypes import for_form
from attnquant.recipe import QUANTIZABLE, QuantizationRecipe
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite, Port

SETUP_KEY = "attnquant.setup"
"""Key of the setup (JSON) in a quantized model's metadata_props."""

QUANTIZED_ALREADY = "quantized already"
"""Why a role that a model came with a quantizer for gets none."""

_ALWAYS = QUANTIZABLE
_WHERE_PRESENT = (
    PortRole.MASK,
    PortRole.PAST_KEY,
    PortRole.PAST_VALUE,
    PortRole.PRESENT_KEY,
    PortRole.PRESENT_VALUE,
)
_FOLDABLE = (PortRole.QUERY, PortRole.KEY)
"""Quantized as constants too: a float operand would keep the product with the other one from the integer kernel."""


class NamedTarget(Protocol):
    """What placement asks of a target."""

    @property
    def name(self) -> str:
        """The target as the user writes it, such as "onnxruntime-cpu"."""
        ...


def place(
    sites: Iterable[AttentionSite],
    recipe: QuantizationRecipe,
    target: "NamedTarget | str | None" = None,
    *,
    ignored: Collection[str] = (),
    constants: Collection[str] = (),
    rounded: Collection[tuple[str, int | None]] = (),
) -> "QuantizerSetup":
    """Decide every (site, role) of the policy.

    :param ignored: Names of nodes that the caller wants left alone: their ports get no quantizer.
    :param constants: Names of the tensors that are initializers or made by Constant nodes.
    :param rounded: Edges (node, input) behind quantizers that the model came with: they get no second one.
    :raises RecipeError: the recipe asks for what this version can't do.
    :raises UnmatchedRuleError: a rule of the recipe matches no site.
    :raises PlacementError: two sites share an edge and the recipe asks for different quantizers on it, or for one scale a
        head where the number of heads is not known.
    """
    known = tuple(sites)
    _require_supported(recipe)
    _require_matches(known, recipe)
    settled = _Known(ignored=ignored, constants=constants, rounded=rounded)
    decided = [_decide(site, role, recipe, settled) for site in known for role in policy_roles(site)]
    points = tuple(item for item in decided if isinstance(item, QuantizationPoint))
    _require_agreement(points)
    return QuantizerSetup(
        points=points,
        skipped=tuple(item for item in decided if isinstance(item, Skipped)),
        recipe=recipe.name,
        target=target if isinstance(target, str) else "" if target is None else target.name,
    )


def policy_roles(site: AttentionSite) -> tuple[PortRole, ...]:
    """Roles that a setup accounts for: the quantizable ones always, mask and caches where the site has them."""
    return _ALWAYS + tuple(role for role in _WHERE_PRESENT if role in site.ports)


def edge(site: AttentionSite, role: PortRole) -> Port | None:
    """The edge to quantize for a role: in front of repeat_kv where there is one; None where there is no such edge."""
    own = site.branch.get(role)
    others = [port for other, port in site.branch.items() if other is not role]
    if own is not None and own not in others:
        return own
    if role is not PortRole.PROBABILITIES:
        return site.ports.get(role)
    value = site.ports.get(PortRole.VALUE)
    if site.form != DECOMPOSED or value is None or value.node != site.node or value.index not in (0, 1):
        return None
    # The other operand of the product with V: behind every guard that follows the softmax.
    tensor = site.ports[role].tensor if role in site.ports else ""
    return Port(node=value.node, index=1 - value.index, tensor=tensor)


def stored_setup(metadata: Mapping[str, str]) -> "QuantizerSetup | None":
    """The setup in a model's metadata_props, None where there is none.

    :raises ModelError: the entry is not a setup.
    """
    text = metadata.get(SETUP_KEY)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"metadata_props[{SETUP_KEY!r}]: expected JSON, got {text[:80]!r} ({error}). Remove the entry."
        raise ModelError(msg) from error
    return QuantizerSetup.from_json(content)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationPoint:
    """A quantizer on one edge: input `index` of node `node`, which reads `tensor`."""

    site: str
    role: PortRole
    node: str
    index: int
    tensor: str
    dtype: str
    symmetric: bool
    granularity: str
    range: tuple[float, float] | None = None
    heads: int | None = None
    """Number of scales of the granularity "head"; None for "tensor"."""
    note: str = ""
    """What a reader of the report should know: "before RoPE", what present then holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A role of a site that gets no quantizer, and why."""

    site: str
    role: PortRole
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoint:
    """A quantizer that the host placed: on input `index` of `node`, or on the node's output where `index` is None."""

    node: str
    index: int | None = None
    weight: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFloat:
    """A linear that stays float, and why."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizerSetup:
    """Everything that was asked of one model, stored with it so that check and verify know."""

    points: tuple[QuantizationPoint, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    recipe: str = ""
    target: str = ""
    host: tuple[HostPoint, ...] | None = None
    """The host's own quantizers; None: not recorded, and then they are not checked."""
    kept_float: tuple[KeptFloat, ...] = ()

    def with_host(self, host: Iterable[HostPoint], kept_float: Iterable[KeptFloat] = ()) -> "QuantizerSetup":
        """The setup with the host's own quantizers and the linears kept float."""
        return replace(self, host=tuple(host), kept_float=tuple(kept_float))

    def without_sites(self, reasons: Mapping[str, str]) -> "QuantizerSetup":
        """The setup with every role of these sites skipped, {id: reason}."""
        taken = [point for point in self.points if point.site in reasons]
        skipped = [Skipped(site=point.site, role=point.role, reason=reasons[point.site]) for point in taken]
        points = tuple(point for point in self.points if point.site not in reasons)
        return replace(self, points=points, skipped=(*self.skipped, *skipped))

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; docs/placement.md describes it. `to_text` is what metadata_props holds."""
        return json.loads(json.dumps({"version": 1, **asdict(self)}))  # type: ignore[no-any-return]

    def to_text(self) -> str:
        """The setup as the string to store under `SETUP_KEY`."""
        return json.dumps({"version": 1, **asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(content: object) -> "QuantizerSetup":
        """The setup that `to_json` wrote.

        :raises ModelError: `content` is something else.
        """
        try:
            return _setup(content)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            msg = f"Quantizer setup: expected what attnquant writes (version 1), got {type(error).__name__}: {error}."
            raise ModelError(msg) from error


def _require_supported(recipe: QuantizationRecipe) -> None:
    """What the grammar has and nothing acts on yet is refused: a recipe must not be obeyed in part."""
    asked = (("options.packed", recipe.options.packed, "skip"),)
    for key, value, possible in asked:
        if value != possible:
            msg = f"Recipe {recipe.name!r}, key `{key}`: expected {possible!r}, all that this version can do, got {value!r}."
            raise RecipeError(msg)


def _require_matches(sites: tuple[AttentionSite, ...], recipe: QuantizationRecipe) -> None:
    for position, rule in enumerate(recipe.rules):
        if not any(rule.matches(site.id) for site in sites):
            shown = ", ".join(repr(site.id) for site in sites[:3]) or "no attention at all"
            msg = (
                f"Recipe {recipe.name!r}, rules[{position}]: expected {rule.site!r} to match a site, got none among "
                f"{len(sites)} ({shown}{', ...' if len(sites) > 3 else ''}). Correct the pattern or take the rule out."
            )
            raise UnmatchedRuleError(msg)


def _require_agreement(points: tuple[QuantizationPoint, ...]) -> None:
    """Two sites may share an edge (K behind one repeat_kv); then they share its quantizer."""
    first: dict[tuple[str, int], QuantizationPoint] = {}
    for point in points:
        other = first.setdefault((point.node, point.index), point)
        if _quantizer(other) != _quantizer(point):
            msg = (
                f"Input {point.index} of node {point.node!r}: expected one quantizer, got {_quantizer(other)!r} for site "
                f"{other.site!r}, role {other.role}, and {_quantizer(point)!r} for site {point.site!r}, role {point.role}. "
                "Let the recipe ask the same of both."
            )
            raise PlacementError(msg)


def _quantizer(point: QuantizationPoint) -> tuple[object, ...]:
    return point.dtype, point.symmetric, point.granularity, point.range


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is said of a model beside its sites, as `place` takes it."""

    ignored: Collection[str]
    constants: Collection[str]
    rounded: Collection[tuple[str, int | None]]


def _decide(
    site: AttentionSite, role: PortRole, recipe: QuantizationRecipe, known: _Known
) -> "QuantizationPoint | Skipped":
    config = recipe.resolve(site.id, role)
    port = edge(site, role)
    reason = "float by the recipe" if config.dtype == "none" else _refusal(site, role)
    if reason is None and port is not None:
        reason = _edge_reason(site, role, port, known)
    if reason is not None or port is None:
        missing = "inside the operator" if role is PortRole.PROBABILITIES else "the attention has no such input"
        return Skipped(site=site.id, role=role, reason=reason or missing)
    return QuantizationPoint(
        site=site.id,
        role=role,
        node=port.node,
        index=port.index,
        tensor=port.tensor,
        dtype=config.dtype,
        symmetric=config.symmetric,
        granularity=config.granularity,
        range=config.range,
        heads=_heads(site, role, port) if config.granularity == "head" else None,
        note=_note(site, role, constant=port.tensor in known.constants),
    )


def _refusal(site: AttentionSite, role: PortRole) -> str | None:
    """Why the site, or the operator, gives no room for a quantizer on a role; None if it does."""
    if site.path:
        return "inside control flow" if site.path.startswith("/") else "inside a function"
    return _packed_reason(site, role) or _operator_reason(site.form)


def _edge_reason(site: AttentionSite, role: PortRole, port: Port, known: _Known) -> str | None:
    """Why this edge stays float; None if it does not."""
    at = site.ports.get(role)
    reader = at.node if at is not None and role is not PortRole.PROBABILITIES else port.node
    if port.node in known.ignored or reader in known.ignored:
        return "ignored by the caller"
    if any(item is not None and (item.node, item.index) in known.rounded for item in (port, at)):
        return QUANTIZED_ALREADY
    return "constant" if port.tensor in known.constants and role not in _FOLDABLE else None


def _packed_reason(site: AttentionSite, role: PortRole) -> str | None:
    shared = {
        "none": (),
        "kv": (PortRole.KEY, PortRole.VALUE),
        "qkv": (PortRole.QUERY, PortRole.KEY, PortRole.VALUE),
    }[site.packed]
    return "packed: V shares the port" if role in shared else None


def _operator_reason(form: str) -> str | None:
    """Why the catalogue keeps an operator's ports float; None where it does not, and for decomposed attention."""
    spec = for_form(form)
    return None if spec is None or spec.quantized else spec.reason or None


def _heads(site: AttentionSite, role: PortRole, port: Port) -> int:
    """How many heads the tensor on an edge has; in front of repeat_kv there are fewer."""
    heads = site.kv_heads if role in (PortRole.KEY, PortRole.VALUE) else site.q_heads
    repeated = site.branch.get(role) == port
    if heads is None or (repeated and not site.kv_repeat):
        msg = (
            f"Site {site.id!r}, role {role}: expected a known number of heads for the granularity \"head\", got none. "
            "Give one set of inputs as feeds, or use the granularity \"tensor\"."
        )
        raise PlacementError(msg)
    return heads // site.kv_repeat if repeated and site.kv_repeat else heads


def _note(site: AttentionSite, role: PortRole, *, constant: bool) -> str:
    notes = ["a constant: stored as integers"] if constant else []
    if site.inner_rotary and role in (PortRole.QUERY, PortRole.KEY):
        notes.append("before RoPE")
    if site.past == "inner" and role in (PortRole.KEY, PortRole.VALUE):
        notes.append(f"present holds the fake-quantized new {role}s")
    return "; ".join(notes)


def _setup(content: Any) -> QuantizerSetup:
    if content["version"] != 1:
        msg = f"version {content['version']!r}"
        raise ValueError(msg)
    host = content["host"]
    return QuantizerSetup(
        points=tuple(_point(row) for row in content["points"]),
        skipped=tuple(_skipped(row) for row in content["skipped"]),
        recipe=_str(content["recipe"]),
        target=_str(content["target"]),
        host=None if host is None else tuple(_host_point(row) for row in host),
        kept_float=tuple(KeptFloat(node=_str(row["node"]), reason=_str(row["reason"])) for row in content["kept_float"]),
    )


def _point(row: Mapping[str, Any]) -> QuantizationPoint:
    span = row["range"]
    return QuantizationPoint(
        site=_str(row["site"]),
        role=PortRole(row["role"]),
        node=_str(row["node"]),
        index=_int(row["index"]),
        tensor=_str(row["tensor"]),
        dtype=_str(row["dtype"]),
        symmetric=bool(row["symmetric"]),
        granularity=_str(row["granularity"]),
        range=None if span is None else (float(span[0]), float(span[1])),
        heads=None if row.get("heads") is None else _int(row["heads"]),
        note=_str(row.get("note", "")),
    )


def _skipped(row: Mapping[str, Any]) -> Skipped:
    return Skipped(site=_str(row["site"]), role=PortRole(row["role"]), reason=_str(row["reason"]))


def _host_point(row: Mapping[str, Any]) -> HostPoint:
    index = row["index"]
    return HostPoint(node=_str(row["node"]), index=None if index is None else _int(index), weight=bool(row["weight"]))


def _str(value: object) -> str:
    if not isinstance(value, str):
        msg = f"expected a string, got {value!r}"
        raise TypeError(msg)
    return value


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        msg = f"expected a port index, got {value!r}"
        raise TypeError(msg)
    return value
