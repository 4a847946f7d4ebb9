"""Linears whose activations no per-tensor int8 scale fits, found on calibration samples.

Language models write values hundreds of times larger than usual for a few tokens (the first of a text, delimiters) into
some feed-forward layers. SmoothQuant moves channels, not tokens: one scale for all tokens then leaves the usual ones a few
levels. The measure is the largest token over the median one, each by its largest magnitude.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.emission.absorb import takes_factor
from attnquant.emission.editor import Editor
from attnquant.emission.pertoken import row_magnitudes, scale_tokens
from attnquant.graph import is_constant, is_onnx, tensor_name
from attnquant.model import copy, opset
from attnquant.placement import KeptFloat
from attnquant.recipe import Outliers
from attnquant.target import Target

LARGEST: Mapping[Outliers, float] = {"auto": 16.0, "per_token": 2.0, "weight_only": 8.0, "float": 8.0}
"""Largest token over the median one from which on a linear counts: 1 of the 8 bits is then lost for usual tokens, 3 where
the remedy takes much time or space, 4 where few linears are to pay for it."""

LARGEST_UNFOLDED = 4.0
"""The same for linears in front of which SmoothQuant's factor would stay as a node: a scale per token costs little more."""

_SEEN = 8
"""Samples that are looked at, at most."""
_HELD_BYTES = 2**26
"""Outputs of so many samples that are kept, at most: logits of texts are large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What becomes of the linears with outlier tokens."""

    kept_float: tuple[KeptFloat, ...] = ()
    """Those whose activations stay float."""
    weight_only: frozenset[str] = frozenset()
    per_token: frozenset[str] = frozenset()
    unsmoothable: frozenset[str] = frozenset()
    """Those of `per_token` that SmoothQuant is to leave alone: its factor would stay as a node."""
    added: frozenset[str] = frozenset()
    """Names of the nodes that scale tokens: to stay float."""
    outputs: Sequence[Mapping[str, np.ndarray]] = ()
    """What the model gave for the samples that were looked at: they need not be run again."""
    notes: tuple[str, ...] = ()


def treat_outliers(
    model: ir.Model, samples: Iterable[Mapping[str, np.ndarray]], how: Outliers, target: Target, without: Container[str]
) -> Treatment:
    """Find the linears with outlier tokens, except `without`, and ready `model`, in place, for what the recipe wants.

    "auto" on a target where no gain of a scale per token was measured is "int8".

    :raises ModelError: as `outliers`.
    """
    if how == "int8" or (how == "auto" and not target.scales_tokens):
        return Treatment()
    outputs: list[Mapping[str, np.ndarray]] = []
    found = {name: ratio for name, ratio in outliers(model, samples, outputs).items() if name not in without}
    if how == "auto":
        return replace(_where_it_pays(model, found, without), outputs=outputs)
    ratios = {name: ratio for name, ratio in found.items() if ratio >= LARGEST[how]}
    names = frozenset(ratios)
    if how == "per_token":
        return replace(_per_token(model, names, without), outputs=outputs)
    words = "float" if how == "float" else "int8 weights, float activations"
    rows = (
        KeptFloat(node=name, reason=f"{words}: its largest token is {ratio:.0f} times the median one")
        for name, ratio in ratios.items()
    )
    return Treatment(
        kept_float=tuple(rows), weight_only=names if how == "weight_only" else frozenset(), outputs=outputs
    )


def _where_it_pays(model: ir.Model, ratios: Mapping[str, float], without: Container[str]) -> Treatment:
    """Scales per token where tokens are far apart, or less far and SmoothQuant's factor would stay as a node."""
    unfolded = _rough(model, without, alone=True)
    names = frozenset(
        name for name, ratio in ratios.items() if ratio >= (LARGEST_UNFOLDED if name in unfolded else LARGEST["auto"])
    )
    added = scale_tokens(model, names)
    return Treatment(per_token=names, unsmoothable=names & unfolded, added=added, notes=_counted(names))


def _rough(model: ir.Model, without: Container[str], *, alone: bool) -> frozenset[str]:
    """Linears in front of which SmoothQuant's factor would stay as a node; with `alone` only where they alone read it."""
    editor = Editor(model)
    linears = [(node, value) for node, value in _linears(model) if (node.name or "") not in without]
    readers = {value: [node for node, own in linears if own is value] for _, value in linears}
    return frozenset(
        node.name or ""
        for node, value in linears
        if not takes_factor(value, readers[value], editor) and not (alone and len(value.uses()) > len(readers[value]))
    )


def _counted(names: frozenset[str]) -> tuple[str, ...]:
    if not names:
        return ()
    words = "1 linear with outlier tokens has" if len(names) == 1 else f"{len(names)} linears with outlier tokens have"
    return (f"{words} an activation scale for each token.",)


def _per_token(model: ir.Model, names: frozenset[str], without: Container[str]) -> Treatment:
    """Scales per token for these linears, and for those in front of which SmoothQuant's factor would stay as a node."""
    rough = _rough(model, without, alone=False)
    added = scale_tokens(model, names | rough)
    notes = list(_counted(names))
    if rough - names:
        notes.append(f"{len(rough - names)} more have one because their input takes no factor of SmoothQuant.")
    return Treatment(per_token=names | rough, unsmoothable=rough, added=added, notes=tuple(notes))


def outliers(
    model: ir.Model, samples: Iterable[Mapping[str, np.ndarray]], outputs: list[Mapping[str, np.ndarray]] | None = None
) -> dict[str, float]:
    """{name of a linear: largest token over the median token of its input}.

    :param model: Prepared: float32, names unique. Linears are MatMul and Gemm with a constant matrix on the
        right, in the form that `emission.pertoken` and `emission.weightonly` take.
    :param outputs: Takes what the model gives for each sample, up to a size.
    :raises ModelError: the model does not run on a sample.
    """
    return {name: _ratio(tokens) for name, tokens in _tokens(model, samples, outputs).items()}


def _ratio(tokens: np.ndarray) -> float:
    """Largest over median; 1 where nothing but zeros was seen."""
    usual = float(np.median(tokens))
    return float(tokens.max()) / usual if usual > 0 else 1.0


def _tokens(
    model: ir.Model, samples: Iterable[Mapping[str, np.ndarray]], outputs: list[Mapping[str, np.ndarray]] | None
) -> dict[str, np.ndarray]:
    """{name of a linear: largest magnitude of each of its input's rows, of all samples}."""
    probe = copy(model)
    linears = {node.name or "": value for node, value in _linears(probe)}
    editor = Editor(probe)
    named = {value: _largest(value, editor, opset(probe) or 0) for value in dict.fromkeys(linears.values())}
    own = [] if outputs is None else list(probe.graph.outputs)
    if len(set(own)) < len(own) or any(value.producer() is None for value in own):
        own = []  # one that the runtime would not give twice, or not compute
    kept = {tensor_name(value) for value in own}
    probe.graph.outputs[:] = [*own, *named.values()]
    seen: dict[str, list[np.ndarray]] = {tensor_name(value): [] for value in named.values()}
    if not seen:
        return {}
    with runtime.session(probe, spare=True) as made:
        for sample in islice(samples, _SEEN):
            found = runtime.run_session(made, sample)
            for name, arrays in seen.items():
                arrays.append(found[name].reshape(-1))
            if outputs is not None and kept and _SEEN * sum(found[name].nbytes for name in kept) <= _HELD_BYTES:
                outputs.append({name: found[name] for name in kept})
    rows = {name: np.concatenate(arrays) for name, arrays in seen.items()}
    return {name: rows[tensor_name(named[value])] for name, value in linears.items() if rows[tensor_name(named[value])].size}


def _linears(model: ir.Model) -> Iterator[tuple[ir.Node, ir.Value]]:
    for node in model.graph:
        if is_onnx(node, "MatMul", "Gemm"):
            activation, weight = node.inputs[:2]
            if activation is None or weight is None or is_constant(activation) or not is_constant(weight):
                continue
            if weight.shape is None or len(weight.shape) != 2:
                continue
            if not node.attributes.get_int("transA", 0) and node.attributes.get_float("beta", 1.0) == 1:
                yield node, activation


def _largest(value: ir.Value, editor: Editor, version: int) -> ir.Value:
    """An output of the graph: the largest magnitude along the last axis of `value`."""
    magnitude, most = row_magnitudes(value, editor, version, f"{value.name}/magnitude", f"{value.name}/largest")
    most.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    editor.graph.extend([magnitude, most])
    return most.outputs[0]
