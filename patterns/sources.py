"""Self or cross attention: whether query and key come from the same tensor, looked for behind their projections."""

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns import moves
from attnquant.patterns.facts import Facts, Level, inputs_at, is_projection
from attnquant.site import Kind

LIMIT = 160
"""Nodes looked at for one operand."""
PROJECTIONS = 2
"""Linear layers that one operand may have on its way: MLA and spatial reduction have two."""

_LIGHT = (
    "LayerNormalization RMSNormalization BatchNormalization InstanceNormalization GroupNormalization LpNormalization Relu Gelu Sigmoid "
    "Tanh Erf Softplus HardSwish Sqrt Pow Reciprocal ReduceMean ReduceSum ReduceL2 ReduceSumSquare Max Min Clip MaxPool AveragePool "
    "GlobalAveragePool Abs Exp SkipLayerNormalization SimplifiedLayerNormalization SkipSimplifiedLayerNormalization RotaryEmbedding"
).split()


def kind(facts: Facts, query: ir.Value, key: ir.Value) -> Kind | None:
    """ "self" where the two share a tensor behind at most two projections and no residual, "cross" where they share none."""
    first, second = _roots(facts, query), _roots(facts, key)
    if not first or not second:
        return None
    return "self" if first & second else "cross"


def _roots(facts: Facts, value: ir.Value) -> set[ir.Value]:
    """Tensors behind the projection of an operand; without a projection, the inputs of the graph that it comes from."""
    roots: set[ir.Value] = set()
    ends: set[ir.Value] = set()
    waiting: list[tuple[ir.Value, int, bool]] = [(value, 0, False)]
    seen: set[ir.Value] = set()
    visits = 0
    while waiting and visits < LIMIT:
        one, projections, stop = waiting.pop(0)
        if one in seen or facts.level(one) < Level.LEARNED:
            continue
        seen.add(one)
        visits += 1
        facts.steps += 1
        if projections:
            roots.add(one)
        node = one.producer()
        if node is None:
            ends.add(one)
            continue
        if not stop:
            waiting.extend(_behind(facts, node, projections))
    return roots | ends if not roots or ends - roots else roots


def _behind(facts: Facts, node: ir.Node, projections: int) -> list[tuple[ir.Value, int, bool]]:
    inputs = [one for one in node.inputs if one is not None and facts.level(one) >= Level.LEARNED]
    if is_projection(facts, node):
        return [(one, projections + 1, False) for one in inputs] if projections < PROJECTIONS else []
    if moves.is_transparent(node) or node.op_type in _LIGHT:
        first = inputs_at(node, 0)
        update = [one for one in inputs if one is not first] if is_onnx(node, "ScatterND", "ScatterElements", "TensorScatter") else []
        return [(one, projections, False) for one in ([first] if first in inputs else []) + update if one is not None]
    if is_onnx(node, "Add", "Sub", "Mul", "Div", "Concat", "Where", "Sum"):
        residual = bool(projections) and len(inputs) > 1 and not is_onnx(node, "Concat")
        return [(one, projections, residual) for one in inputs]
    return []
