"""The search over a whole model: one pass for facts, then every softmax of every body."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attnquant import probe
from attnquant.graph import bodies
from attnquant.patterns import sdpa
from attnquant.patterns.anchors import anchors
from attnquant.patterns.facts import Facts
from attnquant.patterns.inference import study
from attnquant.patterns.sdpa import Match
from attnquant.site import AttentionSite, NearMiss

_WHOLE = 6
"""Progress of what has both products."""


def find_decomposed(
    model: ir.Model, feeds: Mapping[str, np.ndarray] | None = None
) -> tuple[list[AttentionSite], list[NearMiss]]:
    """See `attnquant.patterns.find_decomposed`."""
    facts = study(model)
    found, misses = search(facts, model)
    sites = [sdpa.site(facts, one) for one in found]
    if feeds is None:
        return sites, misses
    wanted = [
        value
        for one, made in zip(found, sites, strict=True)
        if sdpa.is_unsettled(made)
        for value in sdpa.telling(facts, one)
    ]
    measured = probe.arrays(model, wanted, feeds)
    if measured:
        facts = study(model, measured)
        found, misses = search(facts, model)
        sites = [sdpa.site(facts, one) for one in found]
    return sites, misses


def search(facts: Facts, model: ir.Model) -> tuple[list[Match], list[NearMiss]]:
    """Matches in graph order, one for each product with V, and near misses."""
    found: dict[ir.Node, Match] = {}
    misses: list[NearMiss] = []
    for _, body in bodies(model):
        for anchor in anchors(facts, body):
            outcome = sdpa.match(facts, anchor)
            if isinstance(outcome, NearMiss):
                misses.append(outcome)
                continue
            for one in outcome:
                first = found.setdefault(one.values.product.node, one)
                if first.anchor.node is not one.anchor.node:
                    misses.append(_second(facts, first, one))
    return sorted(found.values(), key=lambda one: facts.order[one.values.product.node]), misses


def _second(facts: Facts, first: Match, other: Match) -> NearMiss:
    """A second softmax into one product with V, as in differential attention: no site can have its id twice."""
    nodes = (other.scores.product.node, other.anchor.node, other.values.product.node)
    return NearMiss(
        nodes=tuple(facts.name(node) for node in nodes),
        reason=f"its product with V is that of another softmax too, {facts.name(first.anchor.node)!r}",
        progress=_WHOLE,
    )
