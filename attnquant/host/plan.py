"""What attnquant asks of NNCF for one model; the seams read it and behave as stock NNCF where there is none."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from attnquant.host.memory import HostMemory
from attnquant.placement import HostPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    """A quantizer on the output of one port node (an Identity that isolates the edge)."""

    node: str
    bits: int
    symmetric: bool
    per_channel: bool


@dataclass(slots=True, kw_only=True)
class HostPlan:
    """The attention's share of a quantization; `record` is filled by the run with NNCF's own points."""

    points: tuple[PlannedPoint, ...]
    ignored: frozenset[str]
    """Nodes that NNCF must leave alone: attention nodes, port nodes, linears kept float."""
    unsmoothable: frozenset[str]
    """Linears kept float, or whose weight is shared, computed or missing: SmoothQuant would scale it twice or crash."""
    one_scale: bool = False
    """Activations have one scale each: NNCF gives the input of a depthwise convolution one per channel."""
    folder: str | None = None
    """Where the weights lie that are not in the model's message."""
    memory: HostMemory = field(default_factory=HostMemory)
    """What other quantizations of the same model have found."""
    remembers: bool = True
    """Whether tensors of one name have one value, but for SmoothQuant, throughout the run, and statistics are kept."""
    draft: bool = False
    """The model is wanted for its quantizers' places: biases stay as they are, but their statistics are asked for."""
    strengths: Mapping[str, float] = field(default_factory=dict)
    """SmoothQuant's strength by linear where it differs from the recipe's; negative: off."""
    smoothing: str = ""
    """The linear whose statistics SmoothQuant looked up last."""
    record: list[HostPoint] = field(default_factory=list)


_CURRENT: ContextVar[HostPlan | None] = ContextVar("attnquant_host_plan", default=None)


def current_plan() -> HostPlan | None:
    """The plan of the running quantization, None outside one."""
    return _CURRENT.get()


@contextmanager
def planned(plan: HostPlan) -> Iterator[HostPlan]:
    """Make `plan` the current one inside the block."""
    token = _CURRENT.set(plan)
    try:
        yield plan
    finally:
        _CURRENT.reset(token)
