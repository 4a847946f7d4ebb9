"""Linears that ONNX Runtime's optimizer merged with a scale, a transposition or an activation, as ai.onnx operators again.

A model that was saved after the runtime's own optimization has FusedMatMul, FusedGemm and FusedConv. NNCF knows none of
them, and the runtime has no int8 kernel for them; it fuses again what stays float.
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from attnquant.emission.editor import Editor
from attnquant.graph import constant, operator

_ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "LeakyRelu")
_PLAIN = {"FusedGemm": "Gemm", "FusedConv": "Conv"}
_DOMAIN = "com.microsoft"


def unfuse(model: ir.Model) -> int:
    """Write merged linears with a constant weight out, in place; returns how many.

    Requires: node names unique. Ensures: the same function; the product keeps the node's name, the last new node its output.
    What plain operators can't say (another activation, transposed batch axes, a transposed input) stays.
    """
    editor = Editor(model)
    made = 0
    for node in list(model.graph):
        step = _STEPS.get(operator(node))
        weight = constant(node.inputs[1]) if step is not None and len(node.inputs) > 1 else None
        if step is not None and weight is not None and constant(node.inputs[0]) is None:
            chain = step(node, weight, editor)
            made += bool(chain)
            _put(node, chain, editor)
    return made


def _product(node: ir.Node, weight: np.ndarray, editor: Editor) -> list[ir.Node]:
    """FusedMatMul: alpha * x W, W transposed or not."""
    kept = any(node.attributes.get_int(name, 0) for name in ("transA", "transBatchA", "transBatchB"))
    if kept or weight.ndim < 2:
        return []
    right = node.inputs[1]
    if node.attributes.get_int("transB", 0):
        order = [*range(weight.ndim - 2), weight.ndim - 1, weight.ndim - 2]
        right = editor.before(
            node, "Transpose", [right], f"{node.name}/weight", attributes={"perm": ir.AttrInt64s("perm", order)}
        )
        right.type, right.shape = node.outputs[0].type, ir.Shape([weight.shape[axis] for axis in order])
    chain = [ir.Node("", "MatMul", [node.inputs[0], right], name=node.name)]
    alpha = node.attributes.get_float("alpha", 1.0)
    if alpha != 1.0:
        factor = editor.constant(np.asarray(alpha, weight.dtype), f"{node.name}/alpha")
        chain.append(ir.Node("", "Mul", [chain[-1].outputs[0], factor], name=f"{node.name}/scale"))
    return chain


def _activated(node: ir.Node, weight: np.ndarray, editor: Editor) -> list[ir.Node]:
    """FusedGemm and FusedConv: the product, a residual in front of the activation, the activation."""
    activation = node.attributes.get_string("activation", "")
    if activation and activation not in _ACTIVATIONS:
        return []
    own = [item for name, item in node.attributes.items() if not name.startswith("activation")]
    chain = [ir.Node("", _PLAIN[node.op_type], node.inputs[:3], own, name=node.name)]
    residual = node.inputs[3] if len(node.inputs) > 3 else None
    if residual is not None:
        chain.append(ir.Node("", "Add", [chain[-1].outputs[0], residual], name=f"{node.name}/residual"))
    if activation:
        chain.append(ir.Node("", activation, [chain[-1].outputs[0]], _slope(node), name=f"{node.name}/activation"))
    return chain


def _slope(node: ir.Node) -> list[ir.Attr]:
    if node.attributes.get_string("activation", "") != "LeakyRelu":
        return []
    listed = node.attributes.get_floats("activation_params", [])
    return [ir.AttrFloat32("alpha", listed[0] if listed else node.attributes.get_float("activation_alpha", 0.01))]


def _put(node: ir.Node, chain: Sequence[ir.Node], editor: Editor) -> None:
    """The chain in the place of a node, its last output under the old one's name."""
    if not chain:
        return
    old = node.outputs[0]
    for one in chain:
        made = one.outputs[0]
        made.name, made.type = editor.free_tensor(f"{old.name}/{one.op_type}"), old.type
        made.shape = None if old.shape is None else old.shape.copy()
    editor.graph.insert_before(node, chain)
    name, new = old.name, chain[-1].outputs[0]
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    editor.graph.remove(node, safe=True)
    new.name = name


_STEPS: dict[tuple[str, str], Callable[[ir.Node, np.ndarray, Editor], list[ir.Node]]] = {
    (_DOMAIN, "FusedMatMul"): _product,
    (_DOMAIN, "FusedGemm"): _activated,
    (_DOMAIN, "FusedConv"): _activated,
}
