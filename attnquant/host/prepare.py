"""The model as NNCF's ONNX backend needs it: every tensor typed, constants where it looks, an opset with per-channel Q/DQ.

NNCF drops edges without value_info, takes untyped ones for integers, and looks weights up among the initializers only.
Model-local functions stay calls: attentions inside are reported and skipped, the nodes around them are quantized as usual.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

from attnquant import runtime
from attnquant.dtypes import dtype_of, infer_types
from attnquant.errors import ModelError
from attnquant.graph import is_constant, is_onnx, tensor_name
from attnquant.model import copy, name_nodes, opset
from attnquant.opset import MINIMUM, upgraded
from attnquant.schemas import signature

_CHUNK = 32
"""Extra outputs of one run: their arrays are in memory together."""


def prepare(model: ir.Model, sample: Mapping[str, np.ndarray]) -> ir.Model:
    """A copy of a float model for the host; graph inputs and outputs keep their declarations.

    - nodes have unique names, the opset is at least 13 (per-channel DequantizeLinear);
    - tensors of Constant nodes are initializers, and an initializer is no graph input: the runtime has int8 kernels for
      constant weights only, and such inputs count as constants unless the sample feeds them;
    - every tensor of the main graph has an element type and a rank: inferred, or measured in one run on `sample`
      (dimensions stay unknown then, unless every input of the model has a fixed shape).

    :param sample: One input set, {input name: array}.
    :raises ModelError: the opset can't be raised, or the model does not run on the sample.
    """
    prepared = with_constants(raise_opset(model, sample), sample)
    name_nodes(prepared)
    _settle_constants(prepared)
    _annotate(prepared, sample)
    return prepared


def raise_opset(model: ir.Model, sample: Mapping[str, np.ndarray]) -> ir.Model:
    """The model at an opset with per-channel Q/DQ, checked on a sample; itself if it has one. The argument is not changed.

    Done before recognition, so that sites name the nodes that are quantized.

    :raises ModelError: onnx can't convert the model, or the result does not load or computes something else.
    """
    if (opset(model) or MINIMUM) >= MINIMUM:
        return model
    raised = upgraded(model)
    name_nodes(raised)
    _check_same(model, raised, sample)
    return raised


def _check_same(old: ir.Model, new: ir.Model, sample: Mapping[str, np.ndarray]) -> None:
    """onnx's converter passes on operators that changed their meaning (Hardmax at 13): only a run can tell."""
    expected, got = runtime.run(old, sample), runtime.run(new, sample)
    for name, array in expected.items():
        if array.dtype.kind in "fiub" and not np.allclose(array, got[name], rtol=1e-3, atol=1e-4, equal_nan=True):
            msg = f"Graph output {name!r} changes when onnx's converter raises opset {opset(old)} to {opset(new)}."
            raise ModelError(f"{msg} Expected the same result; export the model again at opset {MINIMUM} or later.")


def with_constants(model: ir.Model, sample: Mapping[str, np.ndarray]) -> ir.Model:
    """A copy in which an initializer is no input of the graph, unless the sample feeds it.

    Done before anything is folded: what is computed of such weights (packed, transposed) is constant then.
    """
    own = copy(model)
    for place in reversed(range(len(own.graph.inputs))):
        value = own.graph.inputs[place]
        if value.is_initializer() and tensor_name(value) not in sample:
            del own.graph.inputs[place]
    own.ir_version = max(own.ir_version, 4)  # Before, every initializer had to be a graph input as well.
    return own


def _settle_constants(model: ir.Model) -> None:
    graph = model.graph
    LiftConstantsToInitializersPass(size_limit=1)(model)
    for value in graph.initializers.values():
        if value.const_value is not None:  # A stale declaration would contradict what onnx infers.
            value.shape = ir.Shape(list(value.const_value.shape.numpy()))


def _annotate(model: ir.Model, sample: Mapping[str, np.ndarray]) -> None:
    _infer(model, distrust=True)
    missing = _unannotated(model)
    # What no schema infers first: often all others follow from it.
    roots = [value for value in missing if _is_root(value, model)]
    for batch in (roots, None):
        wanted = _unannotated(model) if batch is None else batch
        if wanted:
            _measure(model, wanted, sample)
            _infer(model)


def _infer(model: ir.Model, *, distrust: bool = False) -> None:
    """Fill in types and shapes of inner tensors; with `distrust`, replace declared shapes that can't be right."""
    types = infer_types(model)
    shapes = _inferred_shapes(model, declared=True)
    alone = _inferred_shapes(model, declared=False) if distrust else {}
    for node in model.graph:
        for value in node.outputs:
            dtype = dtype_of(types.types.get(value))
            if (value.type is None or value.dtype == ir.DataType.UNDEFINED) and dtype is not None:
                value.type = ir.TensorType(dtype)
            if value.is_graph_output():
                continue
            name = tensor_name(value)
            if value.shape is None:
                value.shape = shapes.get(name)
            elif name in alone and _contradicts(value.shape, alone[name]):
                value.shape = alone[name]


def _inferred_shapes(model: ir.Model, *, declared: bool) -> dict[str, ir.Shape]:
    """{inner tensor: shape} as onnx infers them, from the declared shapes of inner tensors or from the inputs alone."""
    twin = copy(model)
    for node in twin.graph if not declared else ():
        for value in node.outputs:
            value.shape = None
    with _silent_passes():
        ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(twin)
    values = [value for node in twin.graph for value in node.outputs]
    return {tensor_name(value): value.shape.copy() for value in values if value.shape is not None}


def _contradicts(declared: ir.Shape, inferred: ir.Shape) -> bool:
    if len(declared) != len(inferred):
        return True
    pairs = zip(declared.dims, inferred.dims, strict=True)
    return any(isinstance(want, int) and isinstance(got, int) and want != got for want, got in pairs)


@contextmanager
def _silent_passes() -> Iterator[None]:
    """onnx_ir logs a traceback where inference fails; failing is expected here and measured around."""
    logger = logging.getLogger("onnx_ir")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _unannotated(model: ir.Model) -> list[ir.Value]:
    """Tensors of the main graph whose type or rank is not known; sequences and unread outputs left out."""
    return [
        value
        for node in model.graph
        for value in node.outputs
        if tensor_name(value)
        and value.uses()
        and not isinstance(value.type, ir.SequenceType | ir.OptionalType)
        and (value.type is None or (value.shape is None and not value.is_graph_output()))
    ]


def _is_root(value: ir.Value, model: ir.Model) -> bool:
    node = value.producer()
    if node is None:
        return False
    fed = [item for item in node.inputs if item is not None]
    published = node.domain in ("", "ai.onnx") and signature("", node.op_type, model.opset_imports.get("", 1)) is not None
    known = all(item.type is not None and item.shape is not None for item in fed)
    return known or not published or is_onnx(node, "If", "Loop", "Scan")


def _measure(model: ir.Model, values: Sequence[ir.Value], sample: Mapping[str, np.ndarray]) -> None:
    fixed = all(value.shape is not None and value.shape.is_static() for value in model.graph.inputs)
    for start in range(0, len(values), _CHUNK):
        batch = {tensor_name(value): value for value in values[start : start + _CHUNK]}
        for name, array in _fetch(model, list(batch), sample).items():
            value = batch.get(name)
            if value is None:
                continue
            if value.type is None:
                value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            if value.shape is None and not value.is_graph_output():
                value.shape = ir.Shape(array.shape) if fixed else _any_size(value, array.ndim)


def _any_size(value: ir.Value, rank: int) -> ir.Shape:
    """The shape of a tensor of a rank whatever is fed: of a linear the size of its last axis, which its weight gives.

    Without it onnx's inference takes an Attention behind the linears of Q, K and V for one of width 0 (1.23.2).
    """
    sizes: list[int | ir.SymbolicDim | None] = [None] * rank
    node = value.producer()
    weight = node.inputs[1] if node is not None and is_onnx(node, "MatMul") else None
    if sizes and weight is not None and is_constant(weight) and weight.shape is not None and len(weight.shape) == 2:
        sizes[-1] = weight.shape[-1]
    return ir.Shape(sizes)


def _fetch(model: ir.Model, names: Sequence[str], sample: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of inner tensors from one run of a copy that has them as outputs, and no others."""
    probe = copy(model)
    types = infer_types(probe)
    values = {tensor_name(value): value for node in probe.graph for value in node.outputs}
    probe.graph.outputs.clear()
    for name in names:
        value = values[name]
        dtype = types.dtype(value)
        if value.type is None and dtype is not None:
            value.type = ir.TensorType(dtype)
        probe.graph.outputs.append(value)
    return runtime.run(probe, sample)
