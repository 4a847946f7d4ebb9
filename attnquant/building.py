"""From a prepared float model to a quantized one in the target's form, as often as choices have to be compared."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from attnquant import model as models
from attnquant.emission import EmissionReport, emit, narrow
from attnquant.emission.compensated import Moments, round_weights
from attnquant.emission.dequantize import dequantize_weights
from attnquant.emission.pertoken import settle_tokens
from attnquant.emission.twice import drop_second_quantizers
from attnquant.emission.weightonly import quantize_weights
from attnquant.emission.weights import fold_weights
from attnquant.emission.widen import WidenRecord
from attnquant.errors import HostError
from attnquant.host.memory import HostMemory
from attnquant.host.run import HostArguments, HostResult, Sample, quantize_prepared
from attnquant.placement import HostPoint, QuantizationPoint
from attnquant.probe import not_finite
from attnquant.recipe import QuantizationRecipe
from attnquant.target import Target
from attnquant.tuning import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """One quantized model."""

    host_model: ir.Model
    """As the host wrote it, weights in float, if it was asked for; else what the emission made of it."""
    model: ir.Model
    """In the target's form, in float32 where the float model's type has no kernels here."""
    emitted: ir.Model
    """In the target's form, as it is handed over."""
    points: tuple[HostPoint, ...]
    report: EmissionReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Everything that stays the same between two builds of one model."""

    prepared: ir.Model
    record: WidenRecord
    runs_narrow: bool
    """Whether the emitted model itself runs here."""
    points: tuple[QuantizationPoint, ...]
    left_alone: frozenset[str]
    arguments: HostArguments
    target: Target
    weight_only: frozenset[str] = frozenset()
    """Linears among `left_alone` whose weights are stored as int8."""
    per_token: frozenset[str] = frozenset()
    """Linears between the division and the product of `emission.pertoken`."""
    unsmoothable: frozenset[str] = frozenset()
    """Linears that SmoothQuant leaves alone."""
    strengths: Mapping[str, float] = field(default_factory=dict)
    """SmoothQuant's by linear, where it differs from the recipe's; negative: off."""
    moments: Mapping[str, Moments] = field(default_factory=dict)
    """Of linears whose weights make up for each other's rounding; the others are rounded to the nearest."""
    memory: HostMemory = field(default_factory=HostMemory)
    outputs: Sequence[Mapping[str, np.ndarray]] = ()
    """Of the prepared model, for the first samples; as many as are known."""

    def calibrated(self, recipe: QuantizationRecipe, samples: Iterable[Sample], *, draft: bool = False) -> HostResult:
        """The host's quantized model. A draft has its biases as they are.

        :raises HostError: NNCF fails; where numbers that are not finite may be why, the node that makes them is named.
        """
        try:
            return quantize_prepared(
                models.copy(self.prepared), samples, self.points,
                ignored=self.left_alone, recipe=recipe, arguments=self.arguments, memory=self.memory,
                unsmoothable=self.unsmoothable, strengths=self.strengths, draft=draft, one_scale=self.target.one_scale,
            )  # fmt: skip
        except HostError as error:
            cause = not_finite(self.prepared, samples)
            if cause is None:
                raise
            remedy = "Correct the model or that sample, or leave the linears behind it float (`linears.keep_float`)."
            msg = f"{error}. {cause} {remedy}"
            raise HostError(msg) from error

    def drafted(self, recipe: QuantizationRecipe, samples: Iterable[Sample]) -> ir.Model:
        """A model to be judged: biases as they are, and weights the float numbers that the target's integers mean."""
        model = self.calibrated(recipe, samples, draft=True).model
        self.fold_weights(model)
        settle_tokens(model, self.per_token)
        dequantize_weights(model)
        return model

    def without(self, parts: Sequence[Part]) -> "Builder":
        """A builder that leaves these parts float."""
        names = {part.name for part in parts}
        return replace(
            self,
            points=tuple(point for point in self.points if point.site not in names),
            left_alone=self.left_alone | {part.name for part in parts if not part.is_site},
        )

    def finished(self, host: HostResult, *, keep_host: bool = False) -> Built:
        """The host's model in the target's form. `host.model` is changed."""
        host_model = models.copy(host.model) if keep_host else host.model
        report = self._in_form(host.model)
        emitted = narrow(host.model, self.record, self.target)
        runs = emitted if self.runs_narrow else host.model
        points = (*host.points, *(HostPoint(node=name, weight=True) for name in sorted(self.weight_only)))
        return Built(host_model=host_model, model=runs, emitted=emitted, points=points, report=report)

    def small(self, model: ir.Model) -> ir.Model:
        """A part of the host's model in the target's form, in float32. `model` is changed and returned."""
        self._in_form(model)
        return model

    def fold_weights(self, model: ir.Model) -> None:
        """The weights of the host's model as integers, in place, with the scales that the target takes."""
        safe = self.target.name == "onnxruntime-cpu"
        round_weights(model, self.moments, overflow_safe=safe)
        fold_weights(model, overflow_safe=safe)

    def _in_form(self, model: ir.Model) -> EmissionReport:
        quantize_weights(model, self.weight_only)
        drop_second_quantizers(model)
        self.fold_weights(model)
        settle_tokens(model, self.per_token)
        return emit(model, self.target)
