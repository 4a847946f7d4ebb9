"""Programs of torch.export that NNCF quantized: its quantizers and compressed weights as the operator that is exported.

NNCF keeps a quantizer as two operators of `quantized_decomposed`, and a weight as an int8 constant, times its scale, minus
its zero point. Exported as they are, the latter become Cast, Mul and Sub in front of a float product.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from attnquant.errors import HostError
from attnquant.host.torch_round_trip import OPERATOR

_DEQUANTIZE = "quantized_decomposed.dequantize_per_"
_PREFIX = "attnquant_"
_ATTENTION = "aten.scaled_dot_product_attention"
_CONCATENATION = "aten.cat."


def is_program(module: torch.nn.Module) -> bool:
    """Whether a module is a program of torch.export, quantized or not."""
    return isinstance(module, GraphModule)


def count_quantizers(program: Any) -> int:
    """Quantizers and compressed weights of a program."""
    return sum(_is_dequantize(node) or _compressed(node, program) is not None for node in program.graph.nodes)


def replace_quantizers(program: Any) -> int:
    """Put the exportable operator in the place of every quantizer, in place; returns how many there are.

    :raises HostError: a quantizer is not of 8 bits, or a weight has a zero point.
    """
    for node in list(program.graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            program.graph.erase_node(node)  # sizes: the exporter has guards of its own
        elif _is_dequantize(node):
            _replace(program, node, node.args[0].args[0], *_parameters(node, program))
        elif (weight := _compressed(node, program)) is not None:
            values = _constant(program, node, "weight", weight.values)
            _replace(program, node, values, weight.scale, weight.zero_point, weight.axis)
    program.graph.eliminate_dead_code()
    program.recompile()
    return sum(node.target is OPERATOR for node in program.graph.nodes)


def take_apart(program: Any) -> None:
    """Give every port of an attention, and every constant in a concatenation, a node of its own, in place."""
    for node in list(program.graph.nodes):
        if str(node.target).startswith(_ATTENTION):
            for place, source in enumerate(node.args):
                if source in node.args[:place] and isinstance(source, Node):
                    with program.graph.inserting_before(node):
                        alias = program.graph.call_function(torch.ops.aten.alias.default, (source,))
                    alias.meta.update(source.meta, **{_PREFIX: True})
                    node.update_arg(place, alias)
        elif node.op == "get_attr":
            for user in [user for user in node.users if str(user.target).startswith(_CONCATENATION)][len(node.users) == 1 :]:
                with program.graph.inserting_before(user):
                    user.replace_input_with(node, program.graph.node_copy(node))
    program.recompile()


def put_together(program: Any) -> None:
    """Undo what `take_apart` did to ports, in place."""
    for node in list(program.graph.nodes):
        if node.meta.get(_PREFIX):
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.recompile()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    values: torch.Tensor
    """float32: integers times scale."""
    scale: torch.Tensor
    zero_point: torch.Tensor
    axis: int


def _is_dequantize(node: Node) -> bool:
    return node.op == "call_function" and str(node.target).startswith(_DEQUANTIZE)


def _parameters(node: Node, program: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(scale, zero point, axis) of a dequantize operator."""
    per_channel = "per_channel" in str(node.target)
    _, scale, zero_point, *axis, low, high, dtype = node.args
    if dtype not in (torch.int8, torch.uint8) or high - low not in (254, 255):
        msg = (
            f"The quantizer {node.name!r} has {high - low + 1} levels of {dtype}: expected 8 bits. Quantize the program "
            "with nncf.quantize at 8 bits."
        )
        raise HostError(msg)
    found = [torch.as_tensor(_value(part, program)) for part in (scale, zero_point)]
    return found[0].to(torch.float32), found[1].to(dtype), axis[0] if per_channel else 0


def _compressed(node: Node, program: Any) -> _Weight | None:
    """The weight at Sub(Mul(int8 constant, scale), zero point); None where a node is something else."""
    if node.target is not torch.ops.aten.sub.Tensor or not isinstance(product := node.args[0], Node):
        return None
    if product.target is not torch.ops.aten.mul.Tensor:
        return None
    integers, scale, zero_point = (_value(part, program) for part in (*product.args, node.args[1]))
    if not isinstance(integers, torch.Tensor) or integers.dtype is not torch.int8 or scale is None or zero_point is None:
        return None
    scale, zero_point = (torch.as_tensor(part, dtype=torch.float32) for part in (scale, zero_point))
    if zero_point.any():
        msg = f"The weight {product.args[0]} has a zero point: expected symmetric weights, NNCF's default."
        raise HostError(msg)
    axis = next((axis for axis, size in enumerate(scale.shape) if size > 1), 0)
    flat = scale.reshape(-1) if scale.numel() > 1 else scale.reshape(())
    return _Weight(values=integers * scale, scale=flat, zero_point=torch.zeros_like(flat, dtype=torch.int8), axis=axis)


def _value(part: Any, program: Any) -> Any:
    """A number, or the tensor behind a get_attr node; None for what is computed."""
    if not isinstance(part, Node):
        return part
    if part.op != "get_attr":
        return None
    owner, _, last = str(part.target).rpartition(".")
    return getattr(program.get_submodule(owner), last).detach()


def _replace(program: Any, node: Node, x: Node, scale: torch.Tensor, zero_point: torch.Tensor, axis: int) -> None:
    arguments = [_constant(program, node, "scale", scale), _constant(program, node, "zero_point", zero_point)]
    with program.graph.inserting_before(node):
        made = program.graph.call_function(OPERATOR, (x, *arguments, axis))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)


def _constant(program: Any, node: Node, kind: str, value: torch.Tensor) -> Node:
    name = f"{_PREFIX}{node.name}_{kind}"
    program.register_buffer(name, value.clone())
    with program.graph.inserting_before(node):
        made: Node = program.graph.get_attr(name)
    return made
