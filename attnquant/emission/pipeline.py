"""From a Q/DQ model as NNCF writes it to the same function in the form that a target loads and fuses."""

from collections.abc import Callable
from dataclasses import dataclass, field

import onnx_ir as ir

from attnquant.emission import (
    biases,
    clean,
    clips,
    embedding,
    exact,
    forks,
    gelus,
    idle,
    interleaves,
    keys,
    lefts,
    opsets,
    outputs,
    residuals,
    sharing,
    smooth,
    stacks,
    unsigned,
)
from attnquant.placement import KeptFloat
from attnquant.target import Target

Pass = Callable[[ir.Model, Target], int]

PASSES: dict[str, Pass] = {
    "opsets": opsets.apply,
    "unsigned": unsigned.apply,
    "smooth": smooth.apply,
    "sharing": sharing.apply,
    "embedding": embedding.apply,
    "exact": exact.apply,
    "lefts": lefts.apply,
    "stacks": stacks.apply,
    "forks": forks.apply,
    "outputs": outputs.apply,
    "keys": keys.apply,
    "biases": biases.apply,
    "clips": clips.apply,
    "gelus": gelus.apply,
    "interleaves": interleaves.apply,
    "residuals": residuals.apply,
    "clean": clean.apply,
}
"""Every pass by the name that `Target.passes` uses."""


def emit(model: ir.Model, target: Target) -> "EmissionReport":
    """Run the passes that the target asks for, in its order, on `model` itself.

    Requires: a float32 Q/DQ model of ai.onnx QuantizeLinear and DequantizeLinear, node names unique, weights folded to
    integers.
    Ensures: the same function with the same quantizers of activations; names of nodes that are kept are kept.

    :raises ModelError: the target can't take the model's opset.
    """
    kept = stacks.kept_float(model) if "stacks" in target.passes else ()
    changes = {name: PASSES[name](model, target) for name in target.passes}
    notes = smooth.remaining(model) if "smooth" in target.passes else ()
    return EmissionReport(
        changes=changes, notes=(*notes, *idle.remaining(model, target), *opsets.notes(model, target)), kept_float=kept
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmissionReport:
    """What the emission did and what it could not do."""

    changes: dict[str, int]
    """Number of changes by pass."""
    notes: tuple[str, ...] = field(default=())
    """What stays as it was although the target would like it otherwise, and why: sentences for the report."""
    kept_float: tuple[KeptFloat, ...] = field(default=())
    """Linears with a constant weight that the target computes in float, and why."""
