"""The canonical record of one attention, whatever way it is written in the graph.

Placement, fusion, expansion, verification and reports read this record and never the raw graph form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from attnquant.roles import PortRole

Kind = Literal["self", "cross"]
Past = Literal["none", "concat", "scatter", "input", "inner"]
Packed = Literal["none", "qkv", "kv"]
Trait = Literal["cross-covariance", "talking heads", "pooled", "learned query"]

DECOMPOSED = "decomposed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One operand: input `index` of node `node` reads tensor `tensor`.

    For outputs (context, scores, probabilities, present) `index` counts the outputs of `node`.
    """

    node: str
    index: int
    tensor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSite:
    """One attention. Unknown values are None, never guessed.

    `id` is the graph path, "/", and the name of the node that makes the context. The path of the main graph is "";
    of a subgraph "/<node>/<attribute>"; of a model-local function "<domain>::<name>".
    """

    id: str
    form: str
    """"ai.onnx::Attention@23", "com.microsoft::MultiHeadAttention@1", ... or "decomposed"."""
    node: str
    """Node that makes the context: the operator, or the product with V."""
    nodes: tuple[str, ...]
    """Every node that belongs to the attention proper: the operator, or all from Q K^T to P V, products included."""
    ports: Mapping[PortRole, Port]
    branch: Mapping[PortRole, Port] = field(default_factory=dict)
    """Where to quantize a role when that is not its port: the edge in front of repeat_kv, on the attention's own branch."""
    kind: Kind | None = None
    past: Past = "none"
    q_heads: int | None = None
    kv_heads: int | None = None
    """Heads of K and V as the operator or the product sees them, after any repeat_kv."""
    kv_repeat: int | None = None
    """Factor of the repeat_kv in front of the product; None where there is none."""
    qk_head_dim: int | None = None
    v_head_dim: int | None = None
    scale: float | None = None
    """Total factor on Q K^T (T5: 1.0)."""
    causal: bool | None = None
    window: tuple[int, int] | None = None
    """(left, right) sliding window; -1 is unlimited."""
    softcap: float | None = None
    sinks: bool | None = None
    packed: Packed = "none"
    """"qkv" or "kv": V shares a port with K (and Q)."""
    cross_covariance: bool = False
    """Channels attend to channels (XCiT): the scores sum over positions; head sizes are those of the channels."""
    traits: tuple[Trait, ...] = ()
    """What sets it apart from the textbook's: `attnquant.patterns.traits`."""
    inner_rotary: bool = False
    """The operator applies RoPE itself: Q and K ports are before RoPE."""
    path: str = ""
    """Graph path; not "" means inside control flow or a model-local function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMiss:
    """Something that looks like attention and is not taken for one, with the reason."""

    nodes: tuple[str, ...]
    reason: str
    progress: int = 0
    """How many steps of the recognition held: the highest is the most telling near miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognition:
    """What `recognize` found in one model, sites in graph order."""

    sites: tuple[AttentionSite, ...]
    near_misses: tuple[NearMiss, ...]
