"""The pass that fills `Facts`: every node once, subgraphs where their node stands, functions after their callers."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnquant.graph import Body, bodies, is_onnx
from attnquant.patterns import axes as axis_rules
from attnquant.patterns import elements as element_rules
from attnquant.patterns.facts import SMALL, Elements, Facts, Level, is_projection, node_names
from attnquant.patterns.sizes import Axes, Axis, Origin, axis, known, product, size_of

REFRESHED = 64
"""Nodes whose axes are inferred anew for one operand."""
INLINED = 8
"""Calls of functions are followed until this many times the model's nodes have been visited."""
NESTED = 16
"""Calls within calls that are followed."""
Calls = dict[ir.OperatorIdentifier, dict[ir.Node, None]]
_RANDOM = ("RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Bernoulli")


def study(model: ir.Model, measured: Mapping[ir.Value, np.ndarray] | None = None) -> Facts:
    """Facts about every tensor of the model, which is not changed.

    :param measured: Tensors of the main graph from a run.
    """
    listed = [list(body) for _, body in bodies(model)]
    facts = Facts(measured=dict(measured or {}), names=node_names(listed))
    calls: Calls = {}
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
    facts.opset = opset
    facts.main = model.graph
    facts.functions = model.functions
    facts.limit = INLINED * (1 + sum(map(len, listed)))
    _formals(facts, model.graph, {})
    _body(facts, model.graph, "", calls)
    waiting = dict(model.functions)
    while waiting:
        ready = [key for key in waiting if key in calls] or list(waiting)
        for key in ready:
            function = waiting.pop(key)
            _called(facts, function, list(calls.get(key, {})))
            _body(facts, function, f"{function.domain}::{function.name}", calls)
    return facts


def _body(facts: Facts, body: Body, path: str, calls: Calls) -> None:
    if isinstance(body, ir.Graph):
        for value in body.initializers.values():
            _constant(facts, value, value.const_value)
    for node in body:
        facts.steps += 1
        facts.paths[node] = path
        facts.order[node] = facts.steps
        graphs = _subgraphs(facts, node, path, calls) if node.attributes else []
        _node(facts, node, nested=bool(graphs))
        if graphs and is_onnx(node, "If"):
            _results(facts, node, [graph.outputs for graph in graphs])
        elif facts.functions and (function := facts.functions.get(node.op_identifier())) is not None:
            calls.setdefault(node.op_identifier(), {})[node] = None
            _inside(facts, node, function, calls)


def _inside(facts: Facts, node: ir.Node, function: ir.Function, calls: Calls) -> None:
    """Follow a call through its function, where that is not too much work; what it leaves there is overwritten later."""
    if facts.steps > facts.limit or facts.nesting >= NESTED:
        return
    facts.nesting += 1
    _called(facts, function, [node])
    _body(facts, function, f"{function.domain}::{function.name}", calls)
    facts.nesting -= 1
    if any(is_projection(facts, inner) for inner in function):
        facts.projecting.add(node)
    _results(facts, node, [function.outputs])


def _results(facts: Facts, node: ir.Node, sources: list[Sequence[ir.Value]]) -> None:
    """Outputs of a node that has bodies: what all bodies agree on."""
    for index, value in enumerate(node.outputs):
        given = [outputs[index] for outputs in sources if index < len(outputs)]
        if not given or len(given) != len(sources):
            continue
        known = [facts.axes_of(one) for one in given]
        if known[0] is not None and all(axes == known[0] for axes in known):
            facts.axes[value] = facts.refined(known[0], value)
        if is_onnx(node, "If"):
            continue
        facts.levels[value] = facts.level(given[0])
        if (elements := facts.elements_of(given[0])) is not None:
            facts.elements[value] = elements


def _subgraphs(facts: Facts, node: ir.Node, path: str, calls: Calls) -> list[ir.Graph]:
    """Visit the graphs in a node's attributes and return them."""
    graphs: list[tuple[str, ir.Graph]] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append((attribute.name, attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend((f"{attribute.name}[{index}]", graph) for index, graph in enumerate(attribute.as_graphs()))
    for name, graph in graphs:
        actual: dict[int, ir.Value | None] = {}
        if is_onnx(node, "Scan"):
            states = len(node.inputs) - int(node.attributes["num_scan_inputs"].value)
            actual = {index: node.inputs[index] for index in range(states, len(node.inputs))}
        _formals(facts, graph, actual)
        _body(facts, graph, f"{path}/{facts.name(node)}/{name}", calls)
    return [graph for _, graph in graphs]


def _formals(facts: Facts, graph: ir.Graph, actual: Mapping[int, ir.Value | None]) -> None:
    """Inputs of a graph; `actual` tells what a scanned input slices, the others are data."""
    for index, value in enumerate(graph.inputs):
        source = actual.get(index)
        facts.levels[value] = Level.DATA if source is None else facts.level(source)
        facts.depths[value] = 0
        facts.axes[value] = _declared_input(facts, value)


def _declared_input(facts: Facts, value: ir.Value) -> Axes | None:
    """Axes of an input: of at most three, the last is taken for channels; of four or more, the graph does not say."""
    declared = facts.declared(value)
    if declared is None or len(declared) > 3:
        return declared
    last: Origin = "feature" if value.dtype is None or value.dtype.is_floating_point() else "token"
    return tuple(_told(one, last if index == len(declared) - 1 else "token") for index, one in enumerate(declared))


def _told(one: Axis, origin: Origin) -> Axis:
    return tuple(factor._replace(origin=origin) for factor in one)


def _called(facts: Facts, function: ir.Function, calls: list[ir.Node]) -> None:
    """Inputs of a function: what all of its calls agree on."""
    for index, value in enumerate(function.inputs):
        given = [call.inputs[index] if index < len(call.inputs) else None for call in calls]
        facts.levels[value] = max((facts.level(one) for one in given), default=Level.DATA)
        facts.depths[value] = 0
        known = [facts.axes_of(one) for one in given]
        same = known and all(axes == known[0] for axes in known)
        facts.axes[value] = known[0] if same else facts.declared(value)
        small = [facts.elements.get(one) if one is not None else None for one in given]
        if small and small[0] is not None and all(one == small[0] for one in small):
            facts.elements[value] = small[0]


def _constant(facts: Facts, value: ir.Value, tensor: ir.TensorProtocol | None) -> None:
    facts.levels[value] = Level.CONSTANT
    facts.depths[value] = 0
    # Exporters declare wrong shapes for the outputs of Constant nodes; an initializer's is its tensor's.
    shape = value.shape if tensor is None or (value.is_initializer() and value.shape is not None) else tensor.shape
    if shape is None:
        return
    axes = tuple(axis(dim if isinstance(dim, int) else facts.fresh(), "unknown") for dim in shape)
    facts.axes[value] = axes
    size = known(product(size_of(one) for one in axes))
    if tensor is not None and size is not None and size <= SMALL:
        elements = element_rules.of_constant(tensor)
        if elements is not None:
            facts.elements[value] = elements


def _node(facts: Facts, node: ir.Node, nested: bool) -> None:
    operator = node.op_type if node.domain in ("", "ai.onnx") else ""
    if operator == "Constant":
        _constant(facts, node.outputs[0], element_rules.tensor_of(node))
        return
    level = Level.DATA if nested or operator in _RANDOM else _level(facts, node, operator)
    depth = 1 + max([facts.depths.get(value, 0) for value in node.inputs if value is not None], default=0)
    for value in node.outputs:
        facts.levels[value] = level
        facts.depths[value] = depth
    if nested or not node.outputs:
        _unknown(facts, node)
        return
    if operator == "Split":
        for value, axes in zip(node.outputs, axis_rules.split_outputs(facts, node), strict=True):
            facts.axes[value] = facts.refined(axes, value)
        return
    first = node.outputs[0]
    facts.axes[first] = facts.refined(axis_rules.infer(facts, node), first)
    for value in node.outputs[1:]:
        facts.axes[value] = facts.declared(value)
    elements = element_rules.infer(facts, node)
    if facts.measured and (elements is None or None in elements.items):
        elements = _measured(facts, first) or elements
    if elements is not None:
        facts.elements[first] = elements


def refresh(facts: Facts, value: ir.Value) -> None:
    """Infer axes anew between a tensor and the projections behind it, with what was learned about symbols since."""
    waiting, nodes = [value], dict[ir.Node, None]()
    while waiting and len(nodes) < REFRESHED:
        node = waiting.pop().producer()
        if node is None or node in nodes or is_projection(facts, node) or is_onnx(node, "Split"):
            continue
        nodes[node] = None
        waiting.extend(one for one in node.inputs if one is not None and facts.level(one) >= Level.LEARNED)
    for node in sorted(nodes, key=lambda one: facts.order[one]):
        facts.steps += 1
        first = node.outputs[0]
        axes = axis_rules.infer(facts, node)
        if axes is not None:
            facts.axes[first] = facts.refined(axes, first)


def _measured(facts: Facts, value: ir.Value) -> Elements | None:
    array = facts.measured.get(value)
    if array is None or facts.levels[value] > Level.SHAPE:
        return None
    return element_rules.of_constant(ir.Tensor(array))


def _unknown(facts: Facts, node: ir.Node) -> None:
    for value in node.outputs:
        facts.axes[value] = facts.declared(value)


def _level(facts: Facts, node: ir.Node, operator: str) -> Level:
    inputs = node.inputs[:1] if operator in ("CastLike", "EyeLike") else node.inputs
    level = max([facts.level(value) for value in inputs], default=Level.CONSTANT)
    if operator in ("Shape", "Size"):
        return min(level, Level.SHAPE)
    if level == Level.SHAPE and is_projection(facts, node):
        return Level.LEARNED
    return level
