"""What NNCF's collectors want to know, asked of tensors that smoothing and isolated ports leave as they are.

SmoothQuant multiplies an activation by one positive factor a channel, and a port is an Identity. Minima, maxima and means of
what stands behind them follow from those of the tensor in front, channel by channel; so one pass over the samples answers
what NNCF asks of the float model and of the smoothed one, whatever the strength.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from nncf.common.tensor_statistics import collectors as host
from nncf.tensor import Tensor

from attnquant.graph import constant, is_onnx, tensor_name
from attnquant.host.known import SHAPE, WHOLE, Found, Key, Reduction, told
from attnquant.host.ports import PREFIX
from attnquant.host.reductions import reduction, settled

SMOOTHING = "/nncf_smooth_quant"
"""How the names of SmoothQuant's nodes end."""

Kind = tuple[ir.DataType | None, int | None]
"""Element type and rank, where known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The tensor behind an edge, up to one factor a channel."""

    tensor: str
    kind: Kind
    factor: np.ndarray | None = None
    """Broadcast over the tensor; None: the edge is the tensor."""

    @property
    def channel(self) -> int | None:
        """The axis of the factor in a tensor of known rank; None where there is no single one."""
        rank, factor = self.kind[1], self.factor
        if factor is None or rank is None or factor.ndim > rank or not np.all(factor > 0):
            return None
        wide = [axis + rank - factor.ndim for axis, size in enumerate(factor.shape) if size > 1]
        return wide[0] if len(wide) == 1 else rank - 1 if not wide else None


def source(value: ir.Value) -> Source:
    """Follow an edge to the tensor in front of ports and of SmoothQuant's factor."""
    node, factor = value.producer(), None
    while node is not None:
        if is_onnx(node, "Identity") and (node.name or "").startswith(PREFIX) and not _is_initializer(node.inputs[0]):
            value = node.inputs[0]  # type: ignore[assignment]
        elif is_onnx(node, "Mul") and (node.name or "").endswith(SMOOTHING) and factor is None:
            value, other = node.inputs  # type: ignore[assignment]
            factor = constant(other)
        else:
            break
        node = value.producer()
    rank = None if value.shape is None else value.shape.rank()
    return Source(tensor=tensor_name(value), kind=(value.dtype, rank), factor=factor)


def _is_initializer(value: ir.Value | None) -> bool:
    """No tensor of a run: the port in front of it is observed instead."""
    return value is not None and value.is_initializer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One reducer at one edge: what it needs of the source, and what it makes of that."""

    reducer: host.TensorReducerBase
    source: Source
    needs: tuple[Key, ...]

    def answer(self, found: Found) -> list[Tensor] | None:
        """What the reducer gives; `found` has every need, or something finer."""
        return self.made_of([told(found, key) for key in self.needs])

    @property
    def is_monotone(self) -> bool:
        """Whether the answer to extremes of several samples is the extreme of their answers: factors are positive."""
        return all(wanted.op_type in ("ReduceMin", "ReduceMax") for _, wanted in self.needs)

    def made_of(self, arrays: list[np.ndarray]) -> list[Tensor] | None:
        """What the reducer gives where each need is as said."""
        wanted, factor = self.needs[0][1], self.source.factor
        if wanted == WHOLE:
            given = self.reducer([Tensor(arrays[0])])
            return None if given is None else list(given)
        if isinstance(self.reducer, host.ShapeReducer):
            return settled(self.reducer, arrays[0])
        if wanted.op_type == "ReduceMean":
            return settled(self.reducer, arrays[0] if factor is None else arrays[0] * factor.reshape(-1))
        if factor is not None:
            arrays = [array * factor for array in arrays]
        extreme = arrays[0] if len(arrays) == 1 else np.maximum(-arrays[0], arrays[1])
        return list(self.reducer([Tensor(extreme)]) or ())


def request(reducer: host.TensorReducerBase, edge: ir.Value, *, inside: bool = True) -> Request:
    """What to ask so that `reducer` at `edge` can be answered; the whole tensor at the edge where nothing less will do.

    :param inside: False asks for whole tensors only.
    """
    origin = source(edge)
    if isinstance(reducer, host.ShapeReducer):
        return Request(reducer=reducer, source=origin, needs=((origin.tensor, SHAPE),))
    plain = reduction(reducer, *origin.kind) if inside else None
    channel = origin.channel
    if plain is not None and (origin.factor is None or channel is not None):
        needs = _needs(plain, origin.kind[1], channel)
        if needs is not None:
            return Request(reducer=reducer, source=origin, needs=tuple((origin.tensor, need) for need in needs))
    own = Source(tensor=tensor_name(edge), kind=origin.kind)
    return Request(reducer=reducer, source=own, needs=((own.tensor, WHOLE),))


def _needs(plain: Reduction, rank: int | None, channel: int | None) -> tuple[Reduction, ...] | None:
    if plain.op_type == "ReduceMean":
        if channel is None:
            return (plain,)
        per_channel = rank is not None and not plain.keepdims and plain.axes == tuple(x for x in range(rank) if x != channel)
        return (plain,) if per_channel else None
    axes = tuple(range(rank)) if plain.axes is None and rank is not None else plain.axes
    if channel is not None:
        axes = tuple(axis for axis in axes or () if axis != channel)
    names = ("ReduceMin", "ReduceMax") if plain.absolute else (plain.op_type,)
    return tuple(Reduction(op_type=name, axes=axes) for name in names)


def keys(requests: Iterable[Request]) -> Iterator[Key]:
    """Every need, and the shape of every tensor."""
    for one in requests:
        yield from one.needs
        yield one.needs[0][0], SHAPE
