"""Find every attention of an ONNX model: operators by the catalogue, decomposed forms by the patterns."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attnquant import collector, metatypes, model, probe
from attnquant.graph import bodies, operator
from attnquant.operators import Operator, site_of, unsettled
from attnquant.patterns import sdpa
from attnquant.patterns.facts import Facts
from attnquant.patterns.inference import study
from attnquant.patterns.sdpa import Match
from attnquant.patterns.search import search
from attnquant.site import AttentionSite, NearMiss, Recognition

Feeds = Mapping[str, np.ndarray]


def recognize(source: model.Source, *, feeds: Feeds | None = None) -> Recognition:
    """Find every attention of a model, in graph order, and what only looks like one.

    :param source: path of an ONNX file, onnx.ModelProto or onnx_ir.Model; it is read and never changed.
    :param feeds: one set of model inputs {name: array}. Where the graph does not state heads or head sizes, the model is run
        on it once. Without it, and where the runtime can't run the model, such values stay None.
    :raises ModelError: the model is broken.
    :raises DataError: the feeds don't fit the model.
    """
    with collector.paused():  # half a million small objects: collection would take a quarter of the time
        return _recognize(model.load(source), feeds)


def _recognize(own: ir.Model, feeds: Feeds | None) -> Recognition:
    model.name_nodes(own)
    operators, misses = find_operators(own)
    facts = study(own)
    matches, near = search(facts, own)
    if feeds is not None and (measured := run_for_sizes(own, facts, operators, matches, feeds)):
        facts = study(own, measured)
        matches, near = search(facts, own)
    sites = [*(site_of(one, facts) for one in operators), *(sdpa.site(facts, one) for one in matches)]
    return Recognition(sites=tuple(_in_graph_order(own, sites)), near_misses=(*misses, *near))


def _in_graph_order(own: ir.Model, sites: list[AttentionSite]) -> list[AttentionSite]:
    """Graph by graph, outermost first; within each by the place of the node that makes the context."""
    nodes = ((path, node.name) for path, body in bodies(own) for node in body)
    places = {place: index for index, place in enumerate(nodes)}
    return sorted(sites, key=lambda site: places.get((site.path, site.node), len(places)))


def find_operators(own: ir.Model) -> tuple[list[Operator], list[NearMiss]]:
    """Every attention operator of a named model, and what the catalogue does not take for one."""
    found: list[Operator] = []
    misses: list[NearMiss] = []
    imports = own.opset_imports
    for path, body in bodies(own):
        if isinstance(body, ir.Function):  # the bodies nested in it follow
            imports = body.opset_imports
        for node in body:
            key, sounds_so = operator(node), "attention" in node.op_type.lower()
            if not (sounds_so or key in metatypes.CATALOGUE) or node.op_identifier() in own.functions:
                continue
            version = _version(imports, node)
            row = None if version is None else metatypes.find(*key, version)
            if row is not None and version is not None and row.family == "attention":
                found.append(Operator(node=node, row=row, version=version, path=path))
            elif sounds_so:
                misses.append(NearMiss(nodes=(node.name or "",), reason=_reason(node, version), progress=1))
    return found, misses


def _version(imports: Mapping[str, int], node: ir.Node) -> int | None:
    """The opset version in force for a node; of a domain that is not imported, runtimes take their newest."""
    version = imports.get(node.domain)
    if version is None and node.domain:
        row = metatypes.CATALOGUE.get(operator(node))
        return None if row is None else row.until
    return version


def _reason(node: ir.Node, version: int | None) -> str:
    domain, op_type = key = operator(node)
    row = metatypes.CATALOGUE.get(key)
    if key in metatypes.NOT_ATTENTION:
        return f"{domain}::{op_type}: {metatypes.NOT_ATTENTION[key]}"
    if row is None:
        return f"{domain}::{op_type} is not in the catalogue of attention operators: its ports are unknown"
    if version is None:
        return f"{domain}::{op_type}: the model imports no version of domain {domain!r}"
    if version < row.since_version:
        return f"{domain}::{op_type} came with version {row.since_version}, and the model imports version {version}"
    if version > row.until:
        return f"{domain}::{op_type} at version {version}: newer than the catalogue, which knows versions up to {row.until}"
    return f"{domain}::{op_type}: {row.reason}"


def run_for_sizes(
    own: ir.Model, facts: Facts, operators: list[Operator], matches: list[Match], feeds: Feeds
) -> dict[ir.Value, np.ndarray]:
    """Run the model once for what the graph does not state; bodies and functions can't be looked into."""
    wanted = [value for one in operators if one.path == "" for value in unsettled(one, facts)]
    for match in matches:
        if sdpa.is_unsettled(sdpa.site(facts, match)):
            wanted.extend(sdpa.telling(facts, match))
    return probe.arrays(own, wanted, feeds)
