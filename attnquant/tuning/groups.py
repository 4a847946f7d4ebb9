"""Parts that share an activation's quantizer, and small models of such groups cut out of a Q/DQ model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant.emission.clean import drop_dead_initializers
from attnquant.graph import before_qdq, constant, is_constant, is_onnx, tensor_name
from attnquant.tuning.parts import MOVES, Part

_REACH = 32
"""Moves looked at in front of one edge."""
MOST_BYTES = 2**27
"""Weights of the groups that one small model holds: more than the caches of a CPU, so that they are read as in the model."""

Arrays = Mapping[ir.Value, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parts that are timed together: those whose quantizers read one tensor, and what lies between them."""

    parts: tuple[Part, ...]
    nodes: tuple[ir.Node, ...]
    """In graph order, from the quantizers of the activations to the biases."""
    inputs: tuple[ir.Value, ...]
    """What is computed outside, in the order in which the nodes read it."""
    outputs: tuple[ir.Value, ...]
    """What is read outside."""


def groups_of(model: ir.Model, parts: Sequence[Part]) -> tuple[Group, ...]:
    """The groups of a Q/DQ model as the host writes it, in the order of `parts`.

    Linears that read one quantized tensor (query, key and value; gate and up) are one group: its quantizer is paid once.
    """
    place = {node: number for number, node in enumerate(model.graph)}
    named = {node.name or "": node for node in model.graph}
    regions = [_region(part, named) for part in parts]
    owner: dict[ir.Value, int] = {}
    root = list(range(len(parts)))
    for number, region in enumerate(regions):
        for value in _quantized_activations(region):
            root[_top(root, number)] = _top(root, owner.setdefault(value, number))
    members: dict[int, list[int]] = {}
    for number in range(len(parts)):
        members.setdefault(_top(root, number), []).append(number)
    return tuple(
        _group([parts[number] for number in own], set().union(*(regions[number] for number in own)), place)
        for own in members.values()
    )


def _top(root: list[int], number: int) -> int:
    while root[number] != number:
        number = root[number]
    return number


def _quantized_activations(region: Iterable[ir.Node]) -> set[ir.Value]:
    found = {node.inputs[0] for node in region if is_onnx(node, "QuantizeLinear")}
    return {value for value in found if value is not None and not is_constant(value)}


def _region(part: Part, named: Mapping[str, ir.Node]) -> set[ir.Node]:
    """The nodes of a part, what lies between them and their quantizers, and the addition of a bias behind a linear."""
    names = dict.fromkeys([*(node for node, _ in part.edges), *([] if part.is_site else [part.name])])
    cores = [named[name] for name in names]
    found = set(cores)
    for core in cores:
        for value in core.inputs:
            found |= _behind(value)
        found |= _bias(core)
    return found


def _behind(value: ir.Value | None) -> set[ir.Node]:
    """Nodes from a quantizer, or a constant, to what reads `value`; none where neither is near."""
    path: set[ir.Node] = set()
    for _ in range(_REACH):
        node = None if value is None else value.producer()
        if value is None or node is None:
            return path if value is not None and is_constant(value) else set()
        if is_constant(value):
            return path | _constant_nodes(value)
        path.add(node)
        if is_onnx(node, "DequantizeLinear"):
            quantize = node.inputs[0].producer() if node.inputs[0] is not None else None
            return path | ({quantize} if quantize is not None and is_onnx(quantize, "QuantizeLinear") else set())
        if not is_onnx(node, *MOVES) or any(not is_constant(other) for other in node.inputs[1:]):
            return set()
        path |= {made for other in node.inputs[1:] for made in _constant_nodes(other)}
        value = node.inputs[0]
    return set()


def _constant_nodes(value: ir.Value | None) -> set[ir.Node]:
    """The nodes that compute a constant from initializers."""
    found: set[ir.Node] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        node = None if item is None else item.producer()
        if node is not None and node not in found:
            found.add(node)
            waiting += node.inputs
    return found


def _bias(node: ir.Node) -> set[ir.Node]:
    """The addition of a constant right behind a product."""
    if not is_onnx(node, "MatMul") or node.outputs[0].is_graph_output():
        return set()
    uses = tuple(node.outputs[0].uses())
    if len(uses) != 1 or not is_onnx(uses[0].node, "Add"):
        return set()
    other = uses[0].node.inputs[1 - uses[0].idx]
    return {uses[0].node, *_constant_nodes(other)} if is_constant(other) else set()


def _group(parts: Sequence[Part], region: set[ir.Node], place: Mapping[ir.Node, int]) -> Group:
    nodes = sorted(region, key=place.__getitem__)
    reads = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    inputs = [value for value in reads if value.producer() not in region and not is_constant(value)]
    results = [node for node in nodes if not is_onnx(node, "QuantizeLinear", "DequantizeLinear", *MOVES)]
    outputs = [
        value for node in results for value in node.outputs
        if value.is_graph_output() or any(use.node not in region for use in value.uses())
    ]  # fmt: skip
    kept = [value for value in outputs if not is_constant(value)]
    return Group(parts=tuple(parts), nodes=tuple(nodes), inputs=tuple(inputs), outputs=tuple(kept))


def signature(group: Group, arrays: Arrays) -> Any:
    """Equal for groups that do the same work: operators, attributes, wiring, types and sizes; weights may differ."""
    numbers: dict[ir.Value, Any] = {
        value: ("in", place, arrays[value].shape, arrays[value].dtype.str) for place, value in enumerate(group.inputs)
    }
    rows = []
    for number, node in enumerate(group.nodes):
        attributes = tuple(sorted((name, repr(item.value)) for name, item in node.attributes.items()))
        reads = tuple(numbers.get(value) or _constant_key(value) for value in node.inputs if value is not None)
        rows.append((node.domain, node.op_type, attributes, reads))
        numbers |= {value: ("node", number, index) for index, value in enumerate(node.outputs)}
    return (*rows, tuple(numbers[value] for value in group.outputs))


def _constant_key(value: ir.Value) -> Any:
    """Type and sizes of a constant; of whole numbers the values too, which may be sizes."""
    array = constant(value)
    if array is None:
        return None
    return array.dtype.str, array.shape, array.tobytes() if array.dtype == np.int64 and array.size <= 16 else None


def weight_bytes(group: Group) -> int:
    """Bytes of the constants that a group reads."""
    values = dict.fromkeys(value for node in group.nodes for value in node.inputs if value is not None)
    return sum(array.nbytes for value in values if (array := constant(value)) is not None)


def fitting(groups: Sequence[Group]) -> Sequence[Group]:
    """The first of groups of one signature, as many as fit into one small model; one at least."""
    return groups[: max(1, MOST_BYTES // max(1, weight_bytes(groups[0])))]


def small_model(model: ir.Model, groups: Sequence[Group]) -> ir.Model:
    """A model of groups of one signature, each with its own weights, which all read the inputs of the first."""
    inputs = [_same_kind(value, tensor_name(value)) for value in groups[0].inputs]
    graph = ir.Graph(inputs, [], nodes=[], opset_imports=dict(model.opset_imports), name="group")
    for number, group in enumerate(groups):
        known: dict[ir.Value, ir.Value] = dict(zip(group.inputs, inputs, strict=True))
        for node in group.nodes:
            graph.append(_cloned(node, known, graph, number))
        graph.outputs.extend(_result(known[value], graph) for value in group.outputs)
    return ir.Model(graph, ir_version=model.ir_version)


def _result(value: ir.Value, graph: ir.Graph) -> ir.Value:
    """What becomes an output; rows of a table behind an Identity: the emission leaves a Gather alone that is an output."""
    if not is_onnx(value.producer(), "Gather"):
        return value
    node = ir.Node("", "Identity", [value], name=f"{tensor_name(value)}/result")
    node.outputs[0].name, node.outputs[0].type = node.name, value.type
    graph.append(node)
    return node.outputs[0]


def _cloned(node: ir.Node, known: dict[ir.Value, ir.Value], graph: ir.Graph, number: int) -> ir.Node:
    reads = [
        None if value is None else known.get(value) or _initializer(value, known, graph, number) for value in node.inputs
    ]
    made = ir.Node(
        node.domain, node.op_type, reads, list(node.attributes.values()),
        name=f"{node.name}/{number}", num_outputs=len(node.outputs),
    )  # fmt: skip
    for old, new in zip(node.outputs, made.outputs, strict=True):
        new.name, new.type = f"{tensor_name(old)}/{number}", old.type
        new.shape = None if old.shape is None else old.shape.copy()
        known[old] = new
    return made


def _initializer(value: ir.Value, known: dict[ir.Value, ir.Value], graph: ir.Graph, number: int) -> ir.Value:
    tensor = value.const_value
    assert tensor is not None, value
    made = _same_kind(value, f"{tensor_name(value)}/{number}")
    made.const_value = tensor
    graph.register_initializer(made)
    known[value] = made
    return made


def _same_kind(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, type=value.type, shape=None if value.shape is None else value.shape.copy())


def without_quantizers(model: ir.Model) -> ir.Model:
    """The small model in float: every Q/DQ pair taken out of `model` itself."""
    for node in reversed(list(model.graph)):
        if is_onnx(node, "DequantizeLinear") and (source := before_qdq(node.outputs[0])) is not node.outputs[0]:
            assert source is not None
            node.outputs[0].replace_all_uses_with(source, replace_graph_outputs=True)
    for node in reversed(list(model.graph)):
        if is_onnx(node, "DequantizeLinear", "QuantizeLinear") and not any(value.uses() for value in node.outputs):
            model.graph.remove(node, safe=True)
    drop_dead_initializers(model)
    return model
