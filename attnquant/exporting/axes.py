"""Attention of any number of axes, written with four while a module is exported.

torch's exporter translates `scaled_dot_product_attention` of (batch, heads, positions, channels) alone ("only 4D query, key,
and value are supported"). Hiera has windows beside the batch, others leave out the heads. Leading axes are merged into one
and split again behind the attention: the same numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def four_axes() -> Any:
    """A context in which attentions of three, five or more axes are computed with four."""
    import torch
    from torch.overrides import TorchFunctionMode

    class FourAxes(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Callable[..., Any], types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            given = dict(kwargs or {})
            if func is torch.nn.functional.scaled_dot_product_attention:
                named = {**dict(zip(_ARGUMENTS, args, strict=False)), **given}
                if _can_be_four(named):
                    return _by_four(func, named)
            return func(*args, **given)

    return FourAxes()


def _can_be_four(named: Mapping[str, Any]) -> bool:
    """Three axes or more than four, the same leading ones in Q, K and V."""
    query, *others = (named[name] for name in ("query", "key", "value"))
    if query.dim() < 3 or query.dim() == 4:
        return False
    # Compared one by one: sizes that vary can't be hashed.
    return all(other.dim() == query.dim() and other.shape[:-3] == query.shape[:-3] for other in others)


def _by_four(attention: Callable[..., Any], named: Mapping[str, Any]) -> Any:
    """The attention over (merged, heads, positions, channels), with its own axes again."""
    query, mask = named["query"], named.get("attn_mask")
    leading = tuple(query.shape[:-3])
    changed = {name: _merged(named[name]) for name in ("query", "key", "value")}
    if mask is not None and mask.dim() > 3:
        changed["attn_mask"] = _merged(mask.expand(*leading, *mask.shape[-3:]))
    result = attention(**{**named, **changed})
    return result.reshape(*leading, *result.shape[1:]) if leading else result.squeeze(0)


def _merged(operand: Any) -> Any:
    return operand.flatten(0, -4) if operand.dim() > 4 else operand.unsqueeze(0) if operand.dim() == 3 else operand
