"""GELU written as x * (0.5 * (1 + erf(x / sqrt 2))) becomes (x * (1 + erf(x / sqrt 2))) * 0.5, which the runtime fuses.

ONNX Runtime knows GELU with the half on x or on the whole product, and makes one Gelu of it, or BiasGelu with the bias in
front. torch's exporter writes the half on the sum at opsets below 20, which have no Gelu: six passes over the widest tensor
of a layer.
"""

from dataclasses import dataclass

import onnx_ir as ir

from attnquant.emission.editor import Editor
from attnquant.graph import constant, is_onnx
from attnquant.target import Target

_BOTH = ((0, 1), (1, 0))


def apply(model: ir.Model, target: Target) -> int:
    """Move the half of every such GELU, in place; returns how many.

    Requires: node names unique.
    Ensures: the same numbers, bit for bit: a half is exact. The last product keeps its name and output. A GELU stays as it
    is where something else reads the halved sum.
    """
    editor = Editor(model)
    found = [gelu for node in model.graph if (gelu := _read(node)) is not None]
    for gelu in found:
        inner, outer = gelu.inner, gelu.outer
        whole = editor.before(outer, "Mul", [gelu.x, gelu.total], f"{inner.name}/unhalved", like=outer.outputs[0])
        outer.replace_input_with(0, whole)
        outer.replace_input_with(1, gelu.half)
        editor.graph.remove(inner, safe=True)
    return len(found)


def _read(outer: ir.Node) -> "_Gelu | None":
    """The GELU whose last product is `outer`, its half on the sum; None where `outer` is something else."""
    if not is_onnx(outer, "Mul"):
        return None
    for place, other in _BOTH:
        x, halved = outer.inputs[place], outer.inputs[other]
        inner = _maker(halved)
        if x is None or halved is None or inner is None or not is_onnx(inner, "Mul") or inner.graph is not outer.graph:
            continue
        if len(halved.uses()) > 1 or halved.is_graph_output():
            continue
        for first, second in _BOTH:
            half, total = inner.inputs[first], inner.inputs[second]
            if half is not None and total is not None and _is_number(half, 0.5) and _is_sum(total, x):
                return _Gelu(outer=outer, inner=inner, x=x, half=half, total=total)
    return None


def _is_sum(value: ir.Value, x: ir.Value) -> bool:
    """Whether `value` is 1 + erf of something that is `x` times or by a number."""
    add = _maker(value)
    if add is None or not is_onnx(add, "Add"):
        return False
    for place, other in _BOTH:
        erf = _maker(add.inputs[other])
        if _is_number(add.inputs[place], 1.0) and erf is not None and is_onnx(erf, "Erf"):
            scaled = _maker(erf.inputs[0])
            return scaled is not None and is_onnx(scaled, "Div", "Mul") and any(item is x for item in scaled.inputs)
    return False


def _maker(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _is_number(value: ir.Value | None, number: float) -> bool:
    array = constant(value)
    return array is not None and array.size == 1 and array.reshape(()) == number


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gelu:
    outer: ir.Node
    inner: ir.Node
    """Of the half and the sum."""
    x: ir.Value
    half: ir.Value
    total: ir.Value
