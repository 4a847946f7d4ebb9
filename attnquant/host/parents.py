"""NNCF lists what makes each tensor of a model again for every Gather: while it reads one model, the list is made once."""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

_LISTS: ContextVar[dict[int, tuple[Any, Any]] | None] = ContextVar("attnquant_host_parents", default=None)
"""{identity of a model: (the model, its list)} while a graph is being built."""


def reading(original: "staticmethod[..., Any]") -> "staticmethod[..., Any]":
    """The replacement of GraphConverter.create_nncf_graph, which reads a model and changes nothing of it."""

    def replacement(onnx_model: Any) -> Any:
        token = _LISTS.set({})
        try:
            return original.__func__(onnx_model)
        finally:
            _LISTS.reset(token)

    return staticmethod(replacement)


def listed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The replacement of get_parents_node_mapping."""

    def replacement(model: Any) -> Any:
        lists = _LISTS.get()
        if lists is None:
            return original(model)
        if id(model) not in lists:
            lists[id(model)] = model, original(model)
        return lists[id(model)][1]

    return replacement
