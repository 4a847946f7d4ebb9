"""check(): is a Q/DQ model, whoever made it, quantized as it was asked for, and in a way that its target can use."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant.account import UNKNOWN, Account, Linears, Quantizer, SiteRow, Status, as_json, kept
from attnquant.audit.branches import control_flow
from attnquant.audit.caches import caches
from attnquant.audit.contract import Contract, Expectations, audit_site, expectations, nodes_by_name
from attnquant.audit.flow import Flow
from attnquant.audit.linears import Linear, linears
from attnquant.audit.problem import Problem
from attnquant.audit.quantizers import unsound
from attnquant.audit.rules import positions, target_rules
from attnquant.audit.unplanned import unplanned
from attnquant.errors import AttnQuantError
from attnquant.graph import is_onnx
from attnquant.placement import QuantizerSetup, place, stored_setup
from attnquant.recipe import QuantizationRecipe
from attnquant.recipe import load as load_recipe
from attnquant.recognition import recognize
from attnquant.roles import PortRole
from attnquant.site import AttentionSite, Recognition
from attnquant.target import Target, parse_target

_QK = (PortRole.QUERY, PortRole.KEY)


def check(
    model: models.Source,
    *,
    setup: QuantizerSetup | None = None,
    recipe: str | PathLike[str] | QuantizationRecipe = "int8",
    target: str | Target | None = None,
    feeds: Mapping[str, np.ndarray] | None = None,
) -> "CheckReport":
    """Audit a model with QuantizeLinear and DequantizeLinear. The model is read, never run or changed.

    :param setup: What was asked; default: the setup that the model carries, else what `recipe` asks of its attentions.
    :param recipe: Used where there is no setup.
    :param target: As in `quantize`; default: the setup's, else onnxruntime-cpu as installed, else no target's rules.
    :param feeds: One set of inputs for recognition, where the graph does not say heads or head sizes.
    :raises ModelError: the model is broken, or its setup is not readable.
    :raises RecipeError: the recipe is wrong, or a rule of it matches no attention.
    """
    own = models.load(model)
    models.name_nodes(own)
    asked = setup or stored_setup(own.metadata_props)
    recognition = recognize(own, feeds=feeds)
    chosen = _target(target, asked)
    expected = asked or place(recognition.sites, load_recipe(recipe), constants=_constants(own))
    wanted = expectations(expected, exact=asked is not None)
    flow, names = Flow(own), nodes_by_name(own)
    contracts = [audit_site(flow, names, site, wanted) for site in recognition.sites]
    problems = [*_setup_problems(asked, recognition), *_problems(flow, asked, chosen)]
    if asked is None:
        problems += _odd_ones(contracts)
    problems = _with_sites(problems, contracts)
    serious: dict[str | None, list[str]] = {}
    for problem in problems:
        if problem.severity == "violation":
            serious.setdefault(problem.site, []).append(str(problem))
    inside = (names[site.path, name] for site in recognition.sites for name in site.nodes if (site.path, name) in names)
    kept = {row.node: row.reason for row in expected.kept_float}
    return CheckReport(
        rows=tuple(_row(contract, wanted, serious.get(contract.site.id, [])) for contract in contracts),
        recognition=recognition,
        linears=tuple(linears(flow, inside, kept)),
        unplanned=() if asked is None else tuple(unplanned(flow, asked)),
        problems=tuple(problems),
        target=None if chosen is None else str(chosen),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What `check` found."""

    rows: tuple[SiteRow, ...]
    """One for each attention, in graph order: status, reasons, and what is quantized of it."""
    recognition: Recognition
    linears: tuple[Linear, ...]
    unplanned: tuple[str, ...]
    """Quantizers that the model's setup does not name."""
    problems: tuple[Problem, ...]
    """Unsound quantizers and what the target does not take."""
    target: str | None

    @property
    def sites(self) -> tuple[AttentionSite, ...]:
        """The attentions."""
        return self.recognition.sites

    @property
    def violations(self) -> tuple[str, ...]:
        """Everything that makes the check fail, one sentence each."""
        return (
            *(f"{row.site.id}: {reason}" for row in self.rows if row.status == "violates" for reason in row.reasons),
            *(str(problem) for problem in self.problems if problem.severity == "violation" and problem.site is None),
            *(f"not asked for: {line}" for line in self.unplanned),
        )

    @property
    def ok(self) -> bool:
        """Nothing violates what was asked; warnings do not count."""
        return not self.violations

    def account(self, model: str = UNKNOWN) -> Account:
        """The report in the form that is rendered; `model` is its name there."""
        exceptions = tuple(f"{linear.node}: {linear.reason}" for linear in self.linears if linear.reason)
        notes = [f"{problem.severity}: {problem}" for problem in self.problems if problem.site is None]
        notes += [f"warning: {problem}" for problem in self.problems if problem.site and problem.severity == "warning"]
        return Account(
            model=model,
            rows=self.rows,
            near_misses=self.recognition.near_misses,
            linears=Linears(int8=len(self.linears) - len(exceptions), total=len(self.linears), exceptions=exceptions),
            unplanned=self.unplanned,
            notes=tuple(notes),
            target=self.target,
        )

    def to_json(self, model: str = UNKNOWN) -> dict[str, Any]:
        """JSON values as `attnquant check --format json` prints them (docs/json.md)."""
        return as_json(self.account(model))


def _target(target: str | Target | None, setup: QuantizerSetup | None) -> Target | None:
    """The target asked for; without one the setup's or the installed runtime's, or none where neither is known."""
    if isinstance(target, Target):
        return target
    if target is not None:
        return parse_target(target)
    try:
        return parse_target(setup.target or None if setup is not None else None)
    except AttnQuantError:
        return None


def _problems(flow: Flow, asked: QuantizerSetup | None, target: Target | None) -> Iterable[Problem]:
    """What is wrong with quantizers wherever they are."""
    opset = models.opset(flow.model)
    yield from unsound(flow, opset)
    yield from positions(flow)
    yield from caches(flow.model)
    yield from control_flow(flow.model)
    if target is not None:
        yield from target_rules(flow, target, opset, emitted=asked is not None and asked.target == target.name)


def _constants(model: ir.Model) -> frozenset[str]:
    made = {node.outputs[0].name or "" for node in model.graph if is_onnx(node, "Constant")}
    return frozenset(made | {value.name or "" for value in model.graph.initializers.values()})


def _setup_problems(setup: QuantizerSetup | None, recognition: Recognition) -> Iterable[Problem]:
    """Attentions that the setup names and the graph has no more, and the other way round."""
    if setup is None:
        return
    known = {point.site for point in setup.points} | {row.site for row in setup.skipped}
    found = {site.id: site for site in recognition.sites}
    for name in sorted(known - found.keys()):
        reason = f"the setup names the attention {name!r}, and the graph has none of that name."
        yield Problem(kind="setup", node=name.rpartition("/")[2], tensor="", reason=reason)
    for name in sorted(found.keys() - known):
        reason = "the setup does not know this attention."
        yield Problem(kind="setup", node=found[name].node, tensor="", reason=reason, site=name)


def _odd_ones(contracts: Sequence[Contract]) -> Iterable[Problem]:
    """Q or K off center where the model's others are not: without a setup the only sign of a wrong zero point."""
    found = [
        (contract.site.id, role, quantizer, contract.found[role].hits[0])
        for contract in contracts
        for role in _QK
        if (quantizer := contract.quantizer(role)) is not None
    ]
    signs = Counter((quantizer.dtype, quantizer.symmetric) for _, _, quantizer, _ in found)
    for site, role, quantizer, hit in found:
        centered, shifted = signs[quantizer.dtype, True], signs[quantizer.dtype, False]
        # An unsigned zero point may be in the middle by chance.
        enough = centered >= shifted if quantizer.dtype == "int8" else centered >= 3 * max(shifted, 1)
        if quantizer.symmetric is False and quantizer.zero_point is not None and enough:
            node = hit.quantize or hit.dequantize
            reason = f"{role}: expected a zero point in the middle, as at {centered} other Q and K, got "
            reason += f"{int(quantizer.zero_point.ravel()[0])} ({quantizer.dtype})."
            yield Problem(kind="zero point", node=node.name or "", tensor="", reason=reason, site=site)


def _with_sites(problems: Iterable[Problem], contracts: Sequence[Contract]) -> list[Problem]:
    """Every problem with the attention whose operand it is on."""
    sites = {node.name: contract.site.id for contract in contracts for node in contract.nodes}
    return [replace(problem, site=problem.site or sites.get(problem.node)) for problem in problems]


def _row(contract: Contract, asked: Expectations, problems: Iterable[str]) -> SiteRow:
    site = contract.site
    reasons = [*contract.reasons, *problems]
    quantized = {role: found for role in PortRole if (found := contract.quantizer(role)) is not None}
    status: Status = "violates" if reasons else "quantized" if quantized else "skipped"
    if not reasons:
        skips = {role: asked.skipped[site.id, role].reason for role in _QK if (site.id, role) in asked.skipped}
        reasons = [kept(role, reason) for role, reason in skips.items()] if quantized else [*skips.values()]
        points = [asked.points[site.id, role] for role in PortRole if (site.id, role) in asked.points]
        reasons += [f"{point.role}: {point.note}" for point in points if point.note]
    return SiteRow(
        site=site,
        status=status,
        reasons=tuple(dict.fromkeys(reasons)),
        quantized={
            role: Quantizer(dtype=found.dtype, granularity=found.granularity, symmetric=bool(found.symmetric))
            for role, found in quantized.items()
        },
    )
