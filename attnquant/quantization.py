"""quantize(): from a float model and calibration data to a quantized model that loads, every attention accounted for."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from attnquant import choosing, collector, deviations, exporting, runtime
from attnquant import data as calibration
from attnquant import model as models
from attnquant.border import declare
from attnquant.building import Builder
from attnquant.dtypes import HALF
from attnquant.emission import simplify
from attnquant.emission.clean import drop_dead_initializers
from attnquant.emission.computed import fold_computed
from attnquant.emission.kernels import without_kernel
from attnquant.emission.unfused import unfuse
from attnquant.emission.upsampling import as_convolutions
from attnquant.emission.widen import runnable, twin_feeds, widen
from attnquant.errors import ModelError, RecipeError, VerificationError
from attnquant.executors import Workers
from attnquant.existing import existing_points, rename_quantizers, require_float_parts
from attnquant.feeds import Feeds
from attnquant.graph import constant_values, fed, is_constant, is_onnx
from attnquant.host.memory import HostMemory
from attnquant.host.prepare import prepare, raise_opset, with_constants
from attnquant.host.run import HostArguments, ignored_by_caller
from attnquant.kvcache import quantize_caches, require_target, with_grouped
from attnquant.outliers import treat_outliers
from attnquant.pace import GateReport
from attnquant.placement import SETUP_KEY, KeptFloat, QuantizerSetup, place
from attnquant.probe import borne_out
from attnquant.recipe import KvCacheConfig, QuantizationRecipe, keep_float
from attnquant.recipe import load as load_recipe
from attnquant.recognition import recognize
from attnquant.saving import save, uses_external_data
from attnquant.settling import settled
from attnquant.site import AttentionSite, Recognition
from attnquant.target import Target, parse_target
from attnquant.tuning import gate as speed_gate
from attnquant.validity import check_outputs, require_loading, validate

ModelSource = str | PathLike[str] | onnx.ModelProto | ir.Model
Sample = Mapping[str, np.ndarray]
Progress = Callable[[str], None]
PRODUCTS = ("MatMul", "Gemm")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """A quantized model and the account of its attentions."""

    model: ir.Model
    recognition: Recognition
    setup: QuantizerSetup
    target: Target
    notes: tuple[str, ...] = field(default=())
    """What the emission could not do and why, for the report."""
    external: bool = False
    """The float model has external data: the weights are written outside the model file too."""
    gate: GateReport | None = None
    """What the speed gate measured, where it was asked for."""

    @property
    def sites(self) -> tuple[AttentionSite, ...]:
        """The attentions of the float model."""
        return self.recognition.sites

    def save(self, path: str | PathLike[str]) -> None:
        """Write the model atomically.

        :raises ModelError: the file can't be written; nothing is left behind.
        """
        save(self.model, path, external="always" if self.external else "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What quantization would do: a dry run."""

    recognition: Recognition
    setup: QuantizerSetup
    target: Target


def quantize(
    model: ModelSource | Any,
    data: Iterable[Any],
    *,
    recipe: str | PathLike[str] | QuantizationRecipe = "int8",
    target: str | Target | None = None,
    example_inputs: Any = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
    samples: int = 300,
    max_drop: str | None = None,
    gate: bool | None = None,
    workers: Workers | None = None,
    progress: Progress | None = None,
) -> QuantizationResult:
    """Quantize a model for a runtime.

    :param model: Path, ModelProto, onnx_ir.Model or torch.nn.Module in float; it is not changed. A module is exported.
    :param data: Calibration samples, {input name: array}; read once, at most `samples` of them. For a module also what it
        takes: tensors, tuples or dicts of them, batches of a data loader (what follows the inputs is left out).
    :param recipe: Name of a recipe, path of a TOML file, or a QuantizationRecipe.
    :param target: "onnxruntime-cpu[@VERSION]", "onnxruntime-cuda", "openvino"; default: onnxruntime-cpu as installed.
    :param example_inputs: For a module: one call, as a tensor, a tuple, or {parameter: tensor}; default: the first sample.
    :param dynamic_shapes: For a module: {parameter: {axis: torch.export.Dim}}; None: the first axis of every input is the
        batch, of any size; {}: every size is that of the example.
    :param samples: How many samples to calibrate with.
    :param max_drop: A bound on the accuracy in place of the recipe's, such as "snr_db>=30" (docs/accuracy.md): the fewest
        attentions and linears stay float that meet it.
    :param gate: Whether float and int8 of every group of parts are timed on this machine, and what loses stays float
        (docs/gate.md); None: as the recipe says.
    :param workers: By whom `max_drop` measures what each part costs (docs/executors.md); None: by this process.
    :param progress: Called with the name of each stage as it starts.
    :raises ModelError: the model is broken or not supported.
    :raises DataError: the data do not fit the model.
    :raises RecipeError: the recipe is wrong, or a rule of it matched nothing.
    :raises HostError: NNCF or ONNX Runtime does not fit or fails.
    :raises VerificationError: the result does not load or run, or the bound can't be met.
    """
    chosen = load_recipe(recipe)
    if max_drop is not None:
        chosen = chosen.bounded(max_drop)
    if gate is not None:
        chosen = chosen.gated(gate)
    if exporting.is_module(model):
        (progress or (lambda name: None))("exporting the module")
        data = Feeds(data, samples=samples)
        exported = exporting.from_data(model, data, example_inputs=example_inputs, dynamic_shapes=dynamic_shapes)
        model, data = exported.model, exporting.named_samples(data, exported.inputs.names)
    source = models.load(model)
    feeds = calibration.materialize(data, samples=samples, inputs=calibration.input_names(source))
    return quantize_loaded(
        source,
        feeds,
        recipe=chosen,
        target=_target(target),
        arguments=HostArguments(subset_size=samples),
        workers=workers,
        progress=progress,
    )


def plan(
    model: ModelSource,
    *,
    recipe: str | PathLike[str] | QuantizationRecipe = "int8",
    target: str | Target | None = None,
    feeds: Any = None,
    dynamic_shapes: Mapping[str, Any] | None = None,
) -> Plan:
    """Recognise and place without calibrating anything.

    :param model: As `quantize` takes it; a torch.nn.Module is exported.
    :param feeds: One sample. With it the model is readied as for quantizing (opset, sizes and weights folded) and the plan
        is what `quantize` does; without it the plan is that of the model as it stands. A module needs one, as it takes it.
    :param dynamic_shapes: Of a module, as `quantize` takes it.
    :raises AttnQuantError: as `quantize`.
    """
    if exporting.is_module(model):
        exported = exporting.from_data(model, Feeds([] if feeds is None else [feeds]), dynamic_shapes=dynamic_shapes)
        model, feeds = exported.model, exported.inputs.arrays
    chosen, source = _target(target), _float_model(models.load(model))
    if feeds is not None:
        source, _ = runnable(source)
        feeds = calibration.first_sample(calibration.checked(_twin_data([feeds]), source))
        source = _readied(source, feeds, chosen)
    recognition = recognize(source, feeds=feeds)
    setup = _place(source, recognition, load_recipe(recipe), chosen, ())
    return Plan(recognition=recognition, setup=setup, target=chosen)


@collector.rare()
def quantize_loaded(
    model: ir.Model,
    data: Iterable[Sample],
    *,
    recipe: QuantizationRecipe,
    target: Target,
    arguments: HostArguments,
    workers: Workers | None = None,
    progress: Progress | None = None,
    memory: HostMemory | None = None,
) -> QuantizationResult:
    """The pipeline behind `quantize` and `nncf.quantize`; `model` is not changed. Parameters and errors as `quantize`.

    :param memory: Shared by calls with the same model and arguments, whose recipes differ in ranges and SmoothQuant at most.
    """
    if recipe.kv_cache.dtype != "none":
        return _with_caches(model, data, recipe, target, arguments, progress)
    stage = progress or (lambda name: None)
    if recipe.options.gate:
        speed_gate.require_here(target)
    stage("reading the model")
    source, bfloat16 = runnable(_float_model(model))
    feeds = calibration.checked(_twin_data(data), source)
    sample = calibration.first_sample(feeds)
    stage("running the float model")
    source = _readied(source, sample, target)

    stage("recognising attention")
    recognition = recognize(source, feeds=sample)
    twin, record = widen(source)
    prepared = prepare(twin, sample)
    ignored = _ignored(prepared, arguments)
    products = {name for site in recognition.sites for name in site.nodes}
    carriers, folded = _carriers(prepared)
    kept = [row for row in (*without_kernel(prepared, target), *_of_sizes(prepared, carriers)) if row.node not in products]
    setup = require_float_parts(source, _place(source, recognition, recipe, target, ignored), carriers)

    stage("calibrating")
    weighted = [node.name or "" for node in carriers]
    by_recipe = keep_float(recipe, weighted)
    kept += [KeptFloat(node=node, reason="float by the recipe") for node in weighted if node in by_recipe]
    without = {*products, *ignored, *(row.node for row in kept)}
    apart = treat_outliers(prepared, feeds, recipe.linears.outliers, target, without)
    left_alone = frozenset(products) | {row.node for row in (*kept, *apart.kept_float)} | apart.added | folded
    by_caller = [KeptFloat(node=node, reason="ignored by the caller") for node in weighted if node in ignored]
    kept += [*apart.kept_float, *by_caller]
    builder = Builder(
        prepared=prepared, record=bfloat16 or record, runs_narrow=not bfloat16, points=setup.points, left_alone=left_alone,
        arguments=arguments, target=target, weight_only=apart.weight_only,
        per_token=apart.per_token, unsmoothable=apart.unsmoothable, memory=memory or HostMemory(), outputs=apart.outputs,
    )  # fmt: skip
    linears = [node.name or "" for node in carriers if is_onnx(node, *PRODUCTS) and node.name not in left_alone]
    choice = choosing.choose(builder, recipe, feeds, linears)
    builder = replace(builder, strengths=choice.strengths, moments=choice.moments)
    result = builder.calibrated(choice.recipe, feeds)
    runtime.release_memory()

    stage(f"emitting for {target.name}")
    chosen_parts = recipe.options.max_drop is not None or recipe.options.gate
    built = builder.finished(result, keep_host=chosen_parts)
    notes, pace = [*apart.notes, *choice.notes], None
    if chosen_parts:
        _check_loads(built.model, sample, target)
        found = settled(builder, built, choice.recipe, source, feeds, stage, workers)
        built, setup, pace = found.built, setup.without_sites(found.sites), found.pace
        kept += [KeptFloat(node=node, reason=reason) for node, reason in found.linears.items()]
        notes += found.notes
    setup = _sealed(
        built.emitted, model, setup.with_host((*existing_points(source), *built.points), (*kept, *built.report.kept_float))
    )

    stage("loading the result")
    if bfloat16:
        validate(built.emitted)
    _check_loads(built.model, sample, target)
    return QuantizationResult(
        model=built.emitted,
        recognition=recognition,
        setup=setup,
        target=target,
        notes=(*notes, *built.report.notes, *deviations.warnings(source, target), *_kernels(target, bfloat16)),
        external=uses_external_data(model),
        gate=pace,
    )


def _with_caches(
    model: ir.Model,
    data: Iterable[Sample],
    recipe: QuantizationRecipe,
    target: Target,
    arguments: HostArguments,
    progress: Progress | None,
) -> QuantizationResult:
    """The pipeline without the caches, on the model fused to the operator that has integer ones; then the caches."""
    stage = progress or (lambda name: None)
    require_target(target)
    if recipe.options.max_drop is not None:
        bound = recipe.options.max_drop
        msg = f"Recipe {recipe.name!r}: expected no `options.max_drop` beside `kv_cache.dtype`, got {bound!r}. "
        raise RecipeError(msg + "It would bound the model in front of its caches only; hold both by `attnquant verify`.")
    stage("fusing attention with its cache")
    source = _float_model(model)
    feeds = calibration.checked(_twin_data(data), source)
    sample = calibration.first_sample(feeds)  # held: the caches of `source` may become integers, which feeds are checked by
    source = with_grouped(source, sample)
    inner = replace(recipe, kv_cache=KvCacheConfig())
    made = _untouched(source, feeds, inner, target) or quantize_loaded(
        source, feeds, recipe=inner, target=target, arguments=arguments, progress=progress
    )
    stage("calibrating the caches")
    cache = quantize_caches(made.model, feeds, recipe.kv_cache, target).cache
    stage("loading the result")
    _check_loads(made.model, cache.store(sample), target)
    return replace(made, notes=(*made.notes, cache.sentence()), external=uses_external_data(model))


def _untouched(
    source: ir.Model, feeds: Feeds, recipe: QuantizationRecipe, target: Target
) -> QuantizationResult | None:
    """The model as it is, where the recipe leaves every attention and every linear float; None where it does not."""
    recognition = recognize(source, feeds=calibration.first_sample(feeds))
    setup = _place(source, recognition, recipe, target, ())
    weighted = [node.name or "" for node in _weighted(source.graph, constant_values(source.graph))]
    if setup.points or len(keep_float(recipe, weighted)) < len(weighted):
        return None
    check_outputs(source, runtime.run(source, calibration.first_sample(feeds)))
    setup = setup.with_host((), [KeptFloat(node=node, reason="float by the recipe") for node in weighted])
    drop_dead_initializers(source)
    source.metadata_props[SETUP_KEY] = setup.to_text()
    return QuantizationResult(model=source, recognition=recognition, setup=setup, target=target)


def _sealed(made: ir.Model, model: ir.Model, setup: QuantizerSetup) -> QuantizerSetup:
    """Store the setup, and declare inputs and outputs as the model does: the host needed more than some models say."""
    declare(made, model)
    made.metadata_props[SETUP_KEY] = setup.to_text()
    return setup


def _target(target: str | Target | None) -> Target:
    return target if isinstance(target, Target) else parse_target(target)


def _float_model(model: ir.Model) -> ir.Model:
    """A validated copy with unique node names."""
    source = models.copy(model)
    models.name_nodes(source)
    validate(source)
    rename_quantizers(source)
    return source


def _kernels(target: Target, bfloat16: object) -> list[str]:
    if not bfloat16 or target.name != "onnxruntime-cpu":
        return []
    return ["The model has bfloat16, for which ONNX Runtime's CPU lacks kernels: float or quantized, it may not load there."]


def _twin_data(data: Iterable[Sample]) -> Feeds:
    """The samples with bfloat16 arrays in float32."""
    base = data if isinstance(data, Feeds) else Feeds(data)
    return Feeds.lazy(lambda: (twin_feeds(sample) for sample in base))


def _readied(model: ir.Model, sample: Sample, target: Target) -> ir.Model:
    """The float model in the form that is quantized; it runs and its outputs are as declared."""
    model = with_constants(model, sample)
    try:
        model, outputs = borne_out(model, sample)
    except ModelError:
        require_loading(model)
        raise
    check_outputs(model, outputs)
    unfuse(model)
    return as_convolutions(fold_computed(simplify(raise_opset(model, sample), sample, outputs)), target)


def _place(
    model: ir.Model, recognition: Recognition, recipe: QuantizationRecipe, target: Target, ignored: Collection[str]
) -> QuantizerSetup:
    constants = {value.name or "" for value in model.graph.initializers.values()}
    constants |= {node.outputs[0].name or "" for node in model.graph if is_onnx(node, "Constant")}
    rounded = {(point.node, point.index) for point in existing_points(model)}
    return place(recognition.sites, recipe, target, ignored=ignored, constants=constants, rounded=rounded)


def _ignored(model: ir.Model, arguments: HostArguments) -> Collection[str]:
    """The nodes that the caller leaves out. Raises ModelError where another one has weights in float64."""
    ignored = ignored_by_caller(model, arguments)
    for node in model.graph:
        if not is_onnx(node, *PRODUCTS, "Conv", "ConvTranspose") or node.name in ignored:
            continue
        wide = [value for value in node.inputs[:2] if value is not None and value.dtype == ir.DataType.DOUBLE]
        if any(map(is_constant, wide)):
            msg = (
                f"Node {node.name!r} ({node.op_type}): expected weights in float32, float16 or bfloat16, got float64, which "
                "QuantizeLinear does not take. Convert the model to float32 (a torch module and its data by `.float()`)."
            )
            raise ModelError(msg)
    return ignored


def _weighted(graph: ir.Graph, constants: Collection[ir.Value]) -> list[ir.Node]:
    """What has a float constant to quantize: linears, convolutions, embeddings."""
    sides = {"Gather": 1, **dict.fromkeys((*PRODUCTS, "Conv", "ConvTranspose"), 2)}
    operands = {node: node.inputs[: sides[node.op_type]] for node in graph if is_onnx(node, *sides)}
    return [node for node, read in operands.items() if any(_is_matrix(value) and value in constants for value in read)]


def _carriers(model: ir.Model) -> tuple[list[ir.Node], set[str]]:
    """What has a weight to quantize and is computed at run time, and the names of linears of constants.

    Those, as of a table of relative positions, the runtime folds, but not behind quantizers.
    """
    constants = constant_values(model.graph)
    linears = [node for node in model.graph if is_onnx(node, *PRODUCTS, "Conv", "ConvTranspose")]
    folded = {node.name or "" for node in linears if all(value is None or value in constants for value in node.inputs[:2])}
    return [node for node in _weighted(model.graph, constants) if node.name not in folded], folded


def _of_sizes(model: ir.Model, carriers: Iterable[ir.Node]) -> list[KeptFloat]:
    """Linears whose input is the same for all data, as object queries repeated for a batch: NNCF quantizes nothing there."""
    known = fed(model)
    reason = "its input depends on sizes alone: NNCF takes it for a constant"
    return [
        KeptFloat(node=node.name or "", reason=reason)
        for node in carriers
        if not is_onnx(node, "Gather") and not known.intersection(node.inputs[:2])
    ]


def _is_matrix(value: ir.Value | None) -> bool:
    if value is None or value.shape is None:
        return False
    return value.dtype in {ir.DataType.FLOAT, *HALF} and len(value.shape) > 1


def _check_loads(model: ir.Model, sample: Sample, target: Target) -> None:
    """Run the result here: at default settings what is made for the CPU, unfused what is made for other processors."""
    try:
        runtime.run(model, sample, unfused=target.elsewhere)
    except ModelError as error:
        msg = f"The quantized model was not handed over: {error} Please report this with the model's structure."
        raise VerificationError(msg) from error
