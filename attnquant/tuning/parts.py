"""The parts of a quantized model that can be float one by one, and a model with a switch for each of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import runtime
from attnquant.emission.editor import Editor
from attnquant.graph import before_qdq, is_onnx, tensor_name
from attnquant.placement import QuantizationPoint

LINEARS = ("MatMul", "Gemm", "Conv", "ConvTranspose", "Gather")
MOVES = ("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Expand", "Concat")
"""Operators in front of which the host puts the quantizer of a reader."""
_REACH = 32
"""Moves looked at behind one node."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An attention's quantizers, or those of a linear, a convolution, an embedding or another product."""

    name: str
    """Id of the site, or name of the node."""
    is_site: bool
    edges: tuple[tuple[str, int], ...]
    """(node, index) of the quantized inputs, also in front of moves that nothing else reads."""


def parts_of(model: ir.Model, points: Iterable[QuantizationPoint]) -> tuple[Part, ...]:
    """The parts of a Q/DQ model as the host writes it (weights still float in front of their quantizers), in graph order."""
    by_site: dict[str, list[tuple[str, int]]] = {}
    for point in points:
        by_site.setdefault(point.site, []).append((point.node, point.index))
    sites = [Part(name=site, is_site=True, edges=tuple(edges)) for site, edges in by_site.items()]
    own = {edge for part in sites for edge in part.edges}
    linears = []
    for node in model.graph:
        if not is_onnx(node, *LINEARS):
            continue
        found = {edge: alone for edge, alone in _quantized(node) if edge not in own}
        if found:
            edges = tuple(edge for edge, alone in found.items() if alone)
            linears.append(Part(name=node.name or "", is_site=False, edges=edges))
    return (*sites, *linears)


def _quantized(node: ir.Node) -> Iterator[tuple[tuple[str, int], bool]]:
    """((node, index) of a quantized edge, whether only `node` reads what is behind it), through moves."""
    waiting = [(node, index, True) for index in range(len(node.inputs))]
    for _ in range(_REACH):
        if not waiting:
            return
        reader, index, alone = waiting.pop(0)
        value = reader.inputs[index]
        if value is None:
            continue
        if before_qdq(value) is not value:
            yield (reader.name or "", index), alone
            continue
        move = value.producer()
        if move is not None and is_onnx(move, *MOVES):
            places = range(len(move.inputs)) if is_onnx(move, "Concat") else (0,)
            uses = sum(len(output.uses()) + output.is_graph_output() for output in move.outputs)
            waiting += [(move, place, alone and uses == 1) for place in places]


@contextmanager
def switched(model: ir.Model, parts: Sequence[Part]) -> Iterator["Switches"]:
    """A session in which any set of parts is float.

    :param model: As for `parts_of`; it is not changed.
    :raises ModelError: it does not load.
    """
    copy = models.copy(model)
    editor = Editor(copy)
    nodes = {node.name or "": node for node in copy.graph}
    names = {}
    for number, part in enumerate(parts):
        switch = editor.switch(f"attnquant_switch_{number}")
        names[part.name] = tensor_name(switch)
        for name, index in part.edges:
            node = nodes[name]
            value = node.inputs[index]
            made = editor.before(node, "Where", [switch, before_qdq(value), value], f"{name}/switch_{index}", like=value)
            node.replace_input_with(index, made)
    with runtime.session(copy, optimize=False) as session:
        yield Switches(session, names)


class Switches:
    """The outputs of a model with some parts float."""

    def __init__(self, session: object, names: Mapping[str, str]) -> None:
        self._session, self._names = session, names

    def run(self, sample: Arrays, floating: Iterable[str]) -> dict[str, np.ndarray]:
        """One sample with the parts of these names float."""
        chosen = set(floating)
        states = {switch: np.array(name in chosen) for name, switch in self._names.items()}
        return runtime.run_session(self._session, {**sample, **states})
