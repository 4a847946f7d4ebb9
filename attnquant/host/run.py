"""One call of NNCF on one prepared float32 ONNX model, with the attention's share planned by attnquant."""

import contextlib
import copy
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from attnquant.border import declare
from attnquant.errors import AttnQuantError, HostError
from attnquant.graph import constant, is_onnx
from attnquant.host.memory import HostMemory
from attnquant.host.plan import HostPlan, PlannedPoint, planned
from attnquant.host.ports import isolate_ports, join_ports, port_quantizers
from attnquant.host.seams import applied
from attnquant.placement import HostPoint, QuantizationPoint
from attnquant.recipe import QuantizationRecipe
from attnquant.saving import mapped, message

Sample = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArguments:
    """Arguments of `nncf.quantize` as its caller gave them; None leaves the recipe's choice."""

    preset: Any = None
    target_device: Any = None
    subset_size: int = 300
    fast_bias_correction: bool = True
    ignored_scope: Any = None
    advanced_parameters: Any = None
    model_type: Any = "transformer"
    """A ModelType, None as in NNCF, or the word for ModelType.TRANSFORMER."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostResult:
    """The Q/DQ model and what NNCF itself decided."""

    model: ir.Model
    points: tuple[HostPoint, ...]
    """NNCF's own quantization points."""


def quantize_prepared(
    model: ir.Model,
    data: Iterable[Sample],
    points: Iterable[QuantizationPoint],
    *,
    ignored: frozenset[str],
    recipe: QuantizationRecipe,
    arguments: HostArguments,
    memory: HostMemory | None = None,
    unsmoothable: frozenset[str] = frozenset(),
    strengths: Mapping[str, float] | None = None,
    draft: bool = False,
    one_scale: bool = False,
) -> HostResult:
    """Quantize a prepared model: float32, every tensor typed, unique node names. `model` is changed.

    :param points: Edges to quantize for attentions, all in the main graph.
    :param ignored: Nodes that NNCF must leave alone.
    :param unsmoothable: Linears that SmoothQuant must leave alone.
    :param memory: Shared by calls with the same model and arguments, whose recipes differ in estimator and strength at most.
    :param strengths: SmoothQuant's by linear, where it differs from the recipe's; negative: off.
    :param draft: Leave biases as they are; what the samples would have been asked is in `memory`.
    :param one_scale: The target takes no activation with a scale per channel.
    :raises HostError: NNCF refuses the arguments or fails.
    """
    import nncf
    from nncf.onnx.quantization.quantize_model import quantize_impl

    from attnquant.host.onnx_seams import SEAMS

    ports = isolate_ports(model, points)
    plan = HostPlan(
        points=tuple(_planned_point(name, point) for name, point in ports.items()),
        ignored=ignored | frozenset(ports),
        unsmoothable=_unsmoothable(model) | ignored | unsmoothable,
        memory=memory or HostMemory(),
        remembers=arguments.advanced_parameters is None and arguments.fast_bias_correction,
        strengths=strengths or {},
        draft=draft,
        one_scale=one_scale,
    )
    stock = getattr(quantize_impl, "__attnquant_original__", quantize_impl)
    with _host_proto(model) as (given, plan.folder), applied(SEAMS), planned(plan), _quietly(), _host_errors():
        proto: onnx.ModelProto = stock(
            model=given,
            calibration_dataset=nncf.Dataset(data),
            **_keywords(arguments, recipe, plan.folder),
        )
        quantized = ir.from_proto(proto)
        if plan.folder is not None:
            mapped(quantized, plan.folder)
    declare(quantized, model)
    _fix_ranges(quantized, ports)
    settled = tuple(_settled(quantized, plan.record))
    join_ports(quantized)
    return HostResult(model=quantized, points=settled)


def ignored_by_caller(model: ir.Model, arguments: HostArguments) -> frozenset[str]:
    """Names of the nodes in the caller's ignored scope.

    :raises HostError: the scope names what the model does not have.
    """
    if arguments.ignored_scope is None:
        return frozenset()
    from nncf.onnx.graph.nncf_graph_builder import GraphConverter
    from nncf.scopes import get_ignored_node_names_from_ignored_scope

    with _host_proto(model) as (given, _), _host_errors():
        graph = GraphConverter.create_nncf_graph(given)
        scope = arguments.ignored_scope
        return frozenset(get_ignored_node_names_from_ignored_scope(scope, graph, strict=scope.validate))


class DatasetFeeds:
    """The samples of an nncf.Dataset, as often as they are asked for."""

    def __init__(self, dataset: Any, samples: int) -> None:
        self._dataset, self._samples = dataset, samples

    def __iter__(self) -> Iterator[Sample]:
        return itertools.islice(iter(self._dataset.get_inference_data()), self._samples)


def dataset_feeds(dataset: Any, samples: int) -> DatasetFeeds:
    """Samples of an nncf.Dataset, at most `samples`."""
    return DatasetFeeds(dataset, samples)


@contextmanager
def _host_proto(model: ir.Model) -> Iterator[tuple[onnx.ModelProto, str | None]]:
    """The model as NNCF reads it, and the folder of its weights where they are large.

    NNCF takes the first opset import for the default domain's.
    """
    with message(model) as (proto, folder):
        imports = sorted(proto.opset_import, key=lambda entry: entry.domain not in ("", "ai.onnx"))
        imports = [onnx.helper.make_opsetid(entry.domain, entry.version) for entry in imports]
        del proto.opset_import[:]
        proto.opset_import.extend(imports)
        yield proto, folder


def _settled(model: ir.Model, record: Iterable[HostPoint]) -> Iterator[HostPoint]:
    """Points as edges of the nodes that read the quantized tensor: makers may be folded away, readers keep their names."""
    from nncf.common.graph.definitions import MODEL_INPUT_OP_NAME

    makers: dict[str, Iterable[ir.Value]] = {node.name or "": node.outputs for node in model.graph}
    inputs = [value for value in model.graph.inputs if not value.is_initializer()]
    makers |= {f"{MODEL_INPUT_OP_NAME}_{place}": (value,) for place, value in enumerate(inputs)}
    for point in record:
        if point.index is not None or point.weight:
            yield point
            continue
        for quantize in _readers(makers.get(point.node, ())):
            if not is_onnx(quantize, "QuantizeLinear"):
                continue
            for dequantize in _readers(quantize.outputs):
                for reader, index in dequantize.outputs[0].uses():
                    yield HostPoint(node=reader.name or "", index=index)


def _readers(values: Iterable[ir.Value]) -> list[ir.Node]:
    return [node for value in values for node, _ in value.uses()]


def _planned_point(name: str, point: QuantizationPoint) -> PlannedPoint:
    return PlannedPoint(node=name, bits=8, symmetric=point.symmetric, per_channel=point.granularity != "tensor")


def _keywords(arguments: HostArguments, recipe: QuantizationRecipe, folder: str | None) -> dict[str, Any]:
    import nncf
    from nncf.onnx.quantization.backend_parameters import BackendParameters
    from nncf.quantization.advanced_parameters import OverflowFix

    advanced = copy.deepcopy(arguments.advanced_parameters) or default_advanced_parameters(recipe)
    # The emission folds the weights: it needs their float values to choose scales for the target.
    advanced.backend_params = {**(advanced.backend_params or {}), BackendParameters.COMPRESS_WEIGHTS: False}
    if folder is not None:
        advanced.backend_params[BackendParameters.EXTERNAL_DATA_DIR] = folder
    advanced.overflow_fix = OverflowFix.DISABLE
    return {
        "preset": arguments.preset,
        "target_device": arguments.target_device or nncf.TargetDevice.ANY,
        "subset_size": arguments.subset_size,
        "fast_bias_correction": arguments.fast_bias_correction,
        "model_type": nncf.ModelType.TRANSFORMER if arguments.model_type == "transformer" else arguments.model_type,
        "ignored_scope": arguments.ignored_scope,
        "advanced_parameters": advanced,
    }


def default_advanced_parameters(recipe: QuantizationRecipe) -> Any:
    """NNCF's advanced parameters for a recipe's ranges and linears."""
    import nncf
    from nncf.quantization.advanced_parameters import AdvancedSmoothQuantParameters

    from attnquant.host.strengths import ESTIMATORS

    alpha = recipe.linears.smooth_quant_alpha
    parameters = nncf.AdvancedQuantizationParameters(
        activations_range_estimator_params=ESTIMATORS[recipe.ranges.estimator],
    )
    if not recipe.linears.smooth_quant:
        parameters.smooth_quant_alphas = AdvancedSmoothQuantParameters(matmul=-1, convolution=-1)
    elif alpha is not None:
        parameters.smooth_quant_alphas = AdvancedSmoothQuantParameters(matmul=alpha)
    return parameters


def _unsmoothable(model: ir.Model) -> frozenset[str]:
    """Linears whose weight is not an own constant: shared with another node, computed, or behind other operators."""
    names = set()
    for node in model.graph:
        if not is_onnx(node, "MatMul", "Gemm", "Conv"):
            continue
        own = [value for value in node.inputs[:2] if constant(value) is not None and len(value.uses()) == 1]  # type: ignore[union-attr]
        if len(own) != 1:
            names.add(node.name or "")
    return frozenset(names)


def _fix_ranges(model: ir.Model, ports: Mapping[str, QuantizationPoint]) -> None:
    """Points with a fixed range (probabilities: [0, 1]) take it instead of the calibrated one, as uint8."""
    quantizers = port_quantizers(model)
    for name, point in ports.items():
        node = quantizers.get(name)
        if point.range is None or node is None:
            continue
        low, high = point.range
        scale = np.float32((high - low) / 255.0)
        zero_point = np.uint8(np.clip(round(-low / scale), 0, 255))
        for value, array in ((node.inputs[1], scale), (node.inputs[2], zero_point)):
            if value is not None:
                value.const_value = ir.tensor(np.asarray(array), name=value.name)
                value.dtype = value.const_value.dtype
        for output in node.outputs:
            output.dtype = ir.DataType.UINT8


@contextmanager
def _quietly() -> Iterator[None]:
    """NNCF's progress goes to stderr, and its log, which it writes to stdout, is kept to errors unless debugging."""
    logger = logging.getLogger("nncf")
    level = logger.level
    if level > logging.DEBUG:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _host_errors() -> Iterator[None]:
    """Whatever NNCF raises becomes a HostError with its sentence."""
    try:
        yield
    except AttnQuantError:
        raise
    except Exception as error:
        msg = f"NNCF could not quantize the model: {type(error).__name__}: {error}"
        raise HostError(msg) from error


