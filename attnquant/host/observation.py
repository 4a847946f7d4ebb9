"""A model with reductions at its end: samples go in, scalars and vectors come out."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant import runtime
from attnquant.graph import tensor_name
from attnquant.host.known import SHAPE, WHOLE, Found, Key, reduced
from attnquant.host.reductions import Reductions

Arrays = Mapping[str, np.ndarray]


def tensors(model: ir.Model) -> dict[str, ir.Value]:
    """{name: tensor} of the main graph's inputs and of what its nodes make."""
    return {tensor_name(value): value for value in (*model.graph.inputs, *_made(model.graph))}


class Observation:
    """A session of the observed part of a model.

    :param model: It is not changed.
    :param wanted: What to compute of which of its tensors; the shape of each is found besides.
    :param folder: Where the external data of `model` lie.
    :param inside: False fetches every tensor and reduces it here.
    :raises ModelError: the runtime does not load the model.
    """

    def __init__(self, model: ir.Model, wanted: Iterable[Key], folder: str | None, *, inside: bool = True) -> None:
        source = models.copy(model)
        values, reductions = tensors(source), Reductions(source)
        self._keys = list(dict.fromkeys([*wanted, *((name, SHAPE) for name, _ in wanted)]))
        self._computed: dict[Key, str] = {}
        """Each key with the output that holds it, or that holds its tensor."""
        outputs = {}
        for key in self._keys:
            value = values[key[0]]
            output = reductions.of(value, key[1]) if inside and key[1] != WHOLE else value
            self._computed[key] = tensor_name(output)
            outputs[tensor_name(output)] = output
        self._fed = {tensor_name(value) for value in source.graph.inputs} & outputs.keys()
        self._wanted = [name for name in outputs if name not in self._fed]
        source.graph.outputs[:] = [outputs[name] for name in self._wanted]
        _prune(source.graph)
        self._session = runtime.session_of(source, folder) if self._wanted else None

    def run(self, sample: Arrays) -> Found:
        """What was asked of one sample; of a tensor without elements its shape alone.

        :raises ModelError: the runtime can't run it.
        """
        fetched = {} if self._session is None else runtime.run_session(self._session, sample, self._wanted)
        fetched |= {name: np.array(sample[name]) for name in self._fed}
        found: Found = {name: {SHAPE: self._of((name, SHAPE), fetched)} for name, _ in self._keys}
        for name, wanted in self._keys:
            if found[name][SHAPE].all():
                found[name][wanted] = self._of((name, wanted), fetched)
        return found

    def _of(self, key: Key, fetched: Arrays) -> np.ndarray:
        array = fetched[self._computed[key]]
        return reduced(array, key[1]) if self._computed[key] == key[0] else array


def _prune(graph: ir.Graph) -> None:
    """Drop nodes behind what is observed. Those before it keep all their outputs: kernels expect some of them together."""
    for node in reversed(graph):
        if not any(value.is_graph_output() or value.uses() for value in node.outputs):
            graph.remove(node, safe=True)


def _made(graph: ir.Graph) -> Iterator[ir.Value]:
    return (value for node in graph for value in node.outputs)
