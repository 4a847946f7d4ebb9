"""Where and why NNCF is changed for torch modules and exported programs. Imported only where torch is loaded already."""

import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

from attnquant.errors import HostError
from attnquant.host import torch_programs as programs
from attnquant.host.seams import Seam
from attnquant.metatypes.torch_ops import FLEX_ATTENTION, SCALED_DOT_PRODUCT_ATTENTION, argument_ports

_MOVES = frozenset({"transpose", "permute", "reshape", "view", "expand", "contiguous", "unsqueeze", "repeat_interleave"})
_CONCATENATIONS = frozenset({"cat", "concat", "concatenate"})
_SDPA = SCALED_DOT_PRODUCT_ATTENTION.op_type
_FLEX = FLEX_ATTENTION.op_type


def _ports_by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, inference_nncf_graph: Any) -> Any:
        overrides = original(self, inference_nncf_graph)
        if self._is_fp8():
            return overrides
        for name, row in overrides["operations"].items():
            attributes = inference_nncf_graph.get_node_by_name(name).layer_attributes
            keywords = getattr(attributes, "op_kwargs", None)
            if keywords is not None:
                ports = argument_ports(SCALED_DOT_PRODUCT_ATTENTION, len(attributes.op_args), tuple(keywords))
                overrides["operations"][name] = {**row, "target_input_ports": list(ports)}
        return overrides

    return replacement


def _whole_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, nncf_graph: Any, inference_nncf_graph: Any, hw_patterns: Any, ignored_patterns: Any) -> Any:
        setup = original(self, nncf_graph, inference_nncf_graph, hw_patterns, ignored_patterns)
        alive = {node.node_name for node in inference_nncf_graph.get_all_nodes()}
        for cat, attention, port in _constant_branches(nncf_graph, alive):
            _add_point(setup, cat, attention, port)
        return setup

    return replacement


def _constant_branches(graph: Any, alive: set[str]) -> Iterator[tuple[str, str, int]]:
    """(concatenation, attention, port of the concatenation) where Q or K holds a constant beside a computed tensor."""
    for node in graph.get_all_nodes():
        if node.node_type != _SDPA or node.node_name not in alive:
            continue
        attributes = node.layer_attributes
        keywords = tuple(getattr(attributes, "op_kwargs", None) or ())
        wanted = argument_ports(SCALED_DOT_PRODUCT_ATTENTION, len(getattr(attributes, "op_args", (0, 0, 0))), keywords)
        for edge in graph.get_input_edges(node):
            source = edge.from_node
            while source.node_type in _MOVES and edge.input_port_id in wanted:
                source = graph.get_input_edges(source)[0].from_node
            if edge.input_port_id not in wanted or source.node_type not in _CONCATENATIONS:
                continue
            for branch in graph.get_input_edges(source):
                if branch.from_node.node_name not in alive:
                    yield source.node_name, node.node_name, branch.input_port_id


def _apart(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, model: Any, graph: Any, statistic_points: Any = None, dataset: Any = None) -> Any:
        if not programs.is_program(model):
            return original(self, model, graph, statistic_points, dataset)
        programs.take_apart(model)
        result = original(self, model, graph, statistic_points, dataset)
        programs.put_together(result)
        return result

    return replacement


def _add_point(setup: Any, cat: str, attention: str, port: int) -> None:
    """Give a branch the quantizer that the other branch of the same key has."""
    from nncf.common.quantization.quantizer_setup import ActivationQuantizationInsertionPoint, SingleConfigQuantizationPoint

    served = [point for point in setup.quantization_points.values() if point.is_activation_quantization_point()]
    same = [point for point in served if attention in point.directly_quantized_operator_node_names]
    place = ActivationQuantizationInsertionPoint(target_node_name=cat, input_port_id=port)
    at_the_port = any(point.insertion_point.target_node_name == attention for point in same)
    if same and not at_the_port and all(point.insertion_point != place for point in served):
        setup.add_independent_quantization_point(SingleConfigQuantizationPoint(place, same[0].qconfig, [attention]))


def _pure_torch(original: Callable[..., Any]) -> Callable[..., Any]:
    def replacement(self: Any, fn_name: str) -> Any:
        from nncf.torch.extensions import ExtensionsType
        from nncf.torch.quantization.reference import ReferenceQuantizedFunctions

        name = self._loader.name()
        if self._loaded_namespace is not None or not hasattr(ReferenceQuantizedFunctions, fn_name):
            return original(self, fn_name)
        if self._loader.extension_type() == ExtensionsType.CPU:
            # Nothing is kept: after disable() NNCF compiles as it would have.
            _say(f"NNCF's C++ extension {name} is not compiled: its torch operators are used.")
            return getattr(ReferenceQuantizedFunctions, fn_name)
        _say(f"NNCF compiles its extension {name} now, once. This can take minutes (NNCF_EXTENSION_LOAD_TIMEOUT: seconds).")
        try:
            return original(self, fn_name)
        except Exception as error:
            first = str(error).strip().partition("\n")[0] or type(error).__name__
            _say(f"NNCF's extension {name} was not compiled ({first}): its torch operators are used.")
            return getattr(ReferenceQuantizedFunctions, fn_name)

    return replacement


@cache
def _say(message: str) -> None:
    """A warning, once: NNCF runs a quantizer thousands of times, and Python forgets what it showed."""
    warnings.warn(message, UserWarning, stacklevel=3)


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def quantize_impl(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(model, *args, **kwargs)
        except Exception as error:
            if not _is_flex(model) and _FLEX not in str(error).lower().replace("flexattention", _FLEX):
                raise
            msg = f"The module can't be quantized: {FLEX_ATTENTION.reason}."
            raise HostError(msg) from error

    quantize_impl.__attnquant_original__ = original  # type: ignore[attr-defined]
    return quantize_impl


def _is_flex(model: Any) -> bool:
    graph = getattr(model, "graph", None)
    return any(str(node.target) == _FLEX for node in getattr(graph, "nodes", ()))


_ENTRY = (
    "model", "calibration_dataset", "mode", "preset", "target_device", "subset_size", "fast_bias_correction", "model_type",
    "ignored_scope", "advanced_parameters",
)  # fmt: skip
_MIN_MAX = "nncf.quantization.algorithms.min_max.algorithm"

PURE_TORCH = Seam(
    name="torch quantizers without a compiler",
    why="The first quantizer that runs compiles C++ for up to a minute and then fails; torch operators do the same.",
    module="nncf.torch.extensions",
    attribute="ExtensionNamespace.get",
    parameters=("self", "fn_name"),
    replace=_pure_torch,
)
"""Also applied where a quantized module is run for comparison."""

_PROGRAM_ENTRY = (
    Seam(
        name="torch program entry",
        why="An attention with a graph inside ends in an AttributeError of NNCF's: it is refused with the reason.",
        module="nncf.experimental.torch.fx.quantization.quantize_model",
        attribute="quantize_impl",
        parameters=_ENTRY,
        replace=_refusing,
    ),
) if find_spec("torchao") is not None else ()  # without torchao NNCF itself refuses programs

SEAMS: tuple[Seam, ...] = (
    Seam(
        name="torch attention arguments",
        why="NNCF takes the first two arguments of a call for Q and K; with keywords in another order they are not.",
        module=_MIN_MAX,
        attribute="MinMaxQuantization._get_scope_overrides",
        parameters=("self", "inference_nncf_graph"),
        replace=_ports_by_name,
    ),
    Seam(
        name="torch concatenated keys",
        why="NNCF drops constants from the graph that it places in, so a constant past stays float beside a quantized key.",
        module=_MIN_MAX,
        attribute="MinMaxQuantization._get_quantizer_setup",
        parameters=("self", "nncf_graph", "inference_nncf_graph", "hw_patterns", "ignored_patterns"),
        replace=_whole_keys,
    ),
    Seam(
        name="torch program ports",
        why="NNCF replaces a tensor or constant for all its readers: for V too where it is K's tensor, or its past is K's.",
        module=_MIN_MAX,
        attribute="MinMaxQuantization.apply",
        parameters=("self", "model", "graph", "statistic_points", "dataset"),
        replace=_apart,
    ),
    PURE_TORCH,
    Seam(
        name="torch entry",
        why="What TorchDynamo refuses in the middle of NNCF's trace is said with the reason and the way out.",
        module="nncf.torch.function_hook.quantization.quantize_model",
        attribute="quantize_impl",
        parameters=_ENTRY,
        replace=_refusing,
    ),
    *_PROGRAM_ENTRY,
)
"""The changes for torch modules and, but for the last two, exported programs."""
