"""Sizes that the graph computes at run time and that can only come out one way become constants.

Exporters write Shape > Gather > Concat > Resize where every size is known but the batch. Once the sizes are constants the
runtime folds what hangs on them (a position embedding resized at every run), and takes shapes for static that are.
"""

import logging
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.dtypes import infer_types
from attnquant.emission.editor import Editor, replace_reads
from attnquant.emission.widen import widen
from attnquant.errors import ModelError
from attnquant.graph import is_onnx
from attnquant.model import copy
from attnquant.patterns.facts import Elements, Level
from attnquant.patterns.inference import study

TOLERANCE = 1e-5
"""Largest difference between outputs of the folded and the original model, relative to the largest value of the output."""
GROWTH = 64 * 8
"""Most bytes that one folded tensor adds: sizes are followed up to 64 elements."""

_LOG = logging.getLogger("attnquant")
_ARITHMETIC = (
    *("Shape", "Size", "Gather", "Slice", "Concat", "Unsqueeze", "Squeeze", "Cast", "Reshape", "Identity"),
    *("Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Floor", "Ceil", "Equal", "Where", "Not", "ConstantOfShape"),
    "Constant",
)
"""Operators of size arithmetic: what is left of it without a reader is dropped."""


def simplify(
    model: ir.Model, sample: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray] | None = None
) -> ir.Model:
    """A copy with constant sizes; the model itself where nothing folds, or where the outputs on the sample would change.

    Names of the nodes that are left are kept. The file grows by at most `GROWTH` bytes for each tensor that is folded.

    :param sample: One input set, {input name: array}.
    :param outputs: What the model gives for it, where that is known.
    :raises ModelError: the model does not run on the sample.
    """
    folded = copy(model)
    if not _fold(folded):
        return model
    twin, _ = widen(model)
    # In half precision the two are compared in float32.
    expected = outputs if outputs is not None and twin is model else runtime.run(twin, sample)
    try:
        difference = _difference(expected, runtime.run(widen(folded)[0], sample))
    except ModelError as error:
        _LOG.warning("Constant sizes are left as they are: the simplified model does not run (%s)", error)
        return model
    if difference is not None:
        _LOG.warning("Constant sizes are left as they are: they would change the outputs. %s", difference)
        return model
    return folded


def _fold(model: ir.Model) -> int:
    """Replace integer tensors of the main graph whose elements are all known, in place; returns how many."""
    idle = {node for node in model.graph if _is_idle(node)}
    unread = {name for name, value in model.graph.initializers.items() if not value.uses()}
    types = infer_types(model)
    editor = Editor(model)
    constants = [
        (node, editor.constant(array, f"{node.outputs[0].name}_known"))
        for node, elements in _known_sizes(model)
        if (array := _array(elements, types.dtype(node.outputs[0]))) is not None
    ]
    for node, value in constants:
        replace_reads(node.outputs[0], value)
    for node in reversed(list(model.graph)):
        if is_onnx(node, *_ARITHMETIC) and node not in idle and _is_idle(node):
            model.graph.remove(node, safe=True)
    for name, value in list(model.graph.initializers.items()):
        if name not in unread and not value.uses() and not value.is_graph_input() and not value.is_graph_output():
            del model.graph.initializers[name]
    return len(constants)


def _known_sizes(model: ir.Model) -> Iterator[tuple[ir.Node, Elements]]:
    """Nodes of the main graph with one output, of rank 0 or 1, that depends on nothing but known sizes, and its elements.

    Declared shapes of inner tensors are not believed: they may be of the export's example. Those of inputs are enforced.
    """
    twin = copy(model)
    for node in twin.graph:
        for value in node.outputs:
            value.shape = None
    facts = study(twin)
    for node, image in zip(list(model.graph), twin.graph, strict=True):
        output = image.outputs[0] if len(image.outputs) == 1 else None
        elements = facts.elements_of(output)
        if elements is None or is_onnx(node, "Constant") or node.outputs[0].is_graph_output():
            continue
        if facts.level(output) <= Level.SHAPE and facts.rank(output) == (0 if elements.scalar else 1):
            yield node, elements


def _array(elements: Elements, dtype: ir.DataType | None) -> np.ndarray | None:
    """The elements as a tensor; None unless all are known integers of a type that sizes have."""
    if dtype not in (ir.DataType.INT64, ir.DataType.INT32):
        return None
    numbers = [item for item in elements.items if isinstance(item, int) and not isinstance(item, bool)]
    if len(numbers) != len(elements.items):
        return None
    return np.asarray(numbers, dtype.numpy()).reshape(() if elements.scalar else (len(numbers),))


def _is_idle(node: ir.Node) -> bool:
    return not any(value.uses() or value.is_graph_output() for value in node.outputs)


def _difference(expected: Mapping[str, np.ndarray], got: Mapping[str, np.ndarray]) -> str | None:
    """A sentence on the first output that differs by more than `TOLERANCE`."""
    for name, before in expected.items():
        after = got[name]
        if before.shape != after.shape or before.dtype != after.dtype:
            return f"{name!r} was {before.dtype}{list(before.shape)} and became {after.dtype}{list(after.shape)}."
        if before.dtype.kind not in "fiu" or not before.size:
            continue
        wide, other = before.astype(np.float64), after.astype(np.float64)
        largest = np.abs(wide[np.isfinite(wide)]).max(initial=0)
        same = np.isclose(wide, other, rtol=0, atol=TOLERANCE * largest, equal_nan=True)
        if not same.all():
            return f"{name!r} differs by up to {np.abs(wide - other)[~same].max():.3g}."
    return None
