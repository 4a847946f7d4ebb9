"""What sets an attention apart from the textbook's, in the words of the papers that it comes from.

- "cross-covariance" (XCiT, El-Nouby et al. 2021): channels attend to channels, the product sums over positions.
- "talking heads" (Shazeer et al. 2020): scores or probabilities are mixed between heads.
- "pooled" (MViT, Fan et al. 2021; Hiera): projected queries or keys are pooled over positions in front of the product.
- "learned query": the query is the model's own (a probe, object queries), whatever the input.
"""

from collections.abc import Iterable

import onnx_ir as ir

from attnquant.graph import is_onnx
from attnquant.patterns.facts import Facts, Level, inputs_at, integer, is_projection
from attnquant.patterns.products import as_product
from attnquant.site import Trait

LIMIT = 48
"""Tensors looked at for one operand."""


def traits(
    facts: Facts, query: ir.Value | None, key: ir.Value | None, *, across: bool, between: Iterable[ir.Node] = ()
) -> tuple[Trait, ...]:
    """The traits of one attention, from the tensors at its ports and the nodes between the products.

    :param across: Whether channels attend to channels.
    :param between: Nodes from the scores to the probabilities that may mix heads; operators have none.
    """
    found: list[Trait] = []
    if across:
        found.append("cross-covariance")
    if any(is_onnx(node, "Conv") or as_product(facts, node) is not None for node in between):
        found.append("talking heads")
    if is_pooled(facts, query) or is_pooled(facts, key):
        found.append("pooled")
    if query is not None and facts.level(query) < Level.DATA and facts.level(key) > facts.level(query):
        found.append("learned query")
    return tuple(found)


def channels_attend(facts: Facts, query: ir.Value | None, key: ir.Value | None) -> bool:
    """Whether an operator's operands (batch, heads, rows, columns) have channels as rows and positions as columns."""
    for value in (query, key):
        axes = facts.axes_of(value)
        if axes is None or len(axes) != 4 or not axes[-1] or not axes[-2]:
            continue
        if all(one.origin == "token" for one in axes[-1]) and all(one.origin == "feature" for one in axes[-2]):
            return True
    return False


def is_pooled(facts: Facts, operand: ir.Value | None) -> bool:
    """Whether positions are pooled between an operand and its projection."""
    waiting, seen = [operand], {operand}
    while waiting and len(seen) <= LIMIT:
        value = waiting.pop()
        node = None if value is None else value.producer()
        if node is None or facts.level(value) < Level.LEARNED:
            continue
        facts.steps += 1
        if _pools(facts, node):
            return _is_projected(facts, inputs_at(node, 0))
        if is_projection(facts, node) or as_product(facts, node) is not None:
            continue
        fresh = [one for one in node.inputs if one is not None and one not in seen and facts.level(one) >= Level.LEARNED]
        seen.update(fresh)
        waiting.extend(fresh)
    return False


def _pools(facts: Facts, node: ir.Node) -> bool:
    """A pooling operator, or a convolution of each channel by itself over more than one position."""
    if is_onnx(node, "MaxPool", "AveragePool", "ReduceMax"):
        return True
    kernel = facts.axes_of(inputs_at(node, 1)) if is_onnx(node, "Conv") and integer(node, "group", 1) > 1 else None
    return kernel is not None and len(kernel) > 2 and not kernel[1] and any(kernel[2:])


def _is_projected(facts: Facts, value: ir.Value | None) -> bool:
    """Only layout, sums and norms lie between a tensor and a product with a weight."""
    waiting, seen = [value], {value}
    while waiting and len(seen) <= LIMIT:
        at = waiting.pop()
        node = None if at is None else at.producer()
        if node is None or facts.level(at) < Level.LEARNED or _pools(facts, node):
            continue
        if is_projection(facts, node):
            return True
        fresh = [one for one in node.inputs if one is not None and one not in seen and facts.level(one) >= Level.LEARNED]
        seen.update(fresh)
        waiting.extend(fresh)
    return False
