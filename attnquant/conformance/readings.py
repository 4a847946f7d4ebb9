"""What the specification of ai.onnx Attention said, by onnx release: its meaning changed at the same opset.

Compared text by text (`onnx.defs.get_schema("Attention", 23 | 24).doc`) and, where the text is silent, by the function body,
for onnx 1.18.0, 1.19.1, 1.20.1, 1.21.0, 1.22.0, 1.23.0 and 1.23.2; `python -m benchmarks.specification` holds each release
to its row. docs/conformance.md quotes the clauses.
"""

from dataclasses import dataclass
from typing import Literal

Shown = Literal["scores", "capped", "masked", "probabilities"]


def reading(release: str) -> "Reading":
    """The reading in force at an onnx release ("1.22", "1.23.2").

    :raises ValueError: the release is older than Attention itself (1.18), or no version.
    """
    parts = release.split(".")[:2]
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    found = [row for row in READINGS if row.since <= numbers]
    if len(numbers) != 2 or not found:
        msg = f"onnx release: expected 1.18 or later, got {release!r}"
        raise ValueError(msg)
    return found[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The meaning of Attention 23 and 24 from one onnx release until the next row."""

    since: tuple[int, int]
    """First onnx release."""
    flat: Literal["reshaped", "transposed"]
    """(B, S, H * D) as (B, H, S, D): cut as it lies in memory, which mixes tokens, or each token cut into its heads."""
    copies: Literal["tiled", "repeated"]
    """K and V of grouped queries: 0 1 0 1 or 0 0 1 1."""
    mask_and_causal: Literal["one of them", "both"]
    """Whether is_causal may come with a mask."""
    causal_past: Literal["top-left", "offset"]
    """Whether cached keys in front of the new ones move the diagonal of is_causal."""
    causal_nonpad: Literal["top-left", "offset"]
    """Whether nonpad_kv_seqlen moves it: offset = nonpad_kv_seqlen - S, for each sample."""
    softcap: Literal["behind the mask", "in front of the mask"]
    modes: tuple[Shown, Shown, Shown, Shown]
    """What qk_matmul_output holds in modes 0 to 3."""
    dead_rows: Literal["nan", "zero"]
    """A row that sees no key."""

    @property
    def name(self) -> str:
        """"onnx 1.22"."""
        return f"onnx {self.since[0]}.{self.since[1]}"


_OLD_MODES: tuple[Shown, Shown, Shown, Shown] = ("scores", "masked", "capped", "probabilities")
_NEW_MODES: tuple[Shown, Shown, Shown, Shown] = ("scores", "capped", "masked", "probabilities")

READINGS = (
    Reading(
        since=(1, 18), flat="reshaped", copies="tiled", mask_and_causal="one of them",
        causal_past="top-left", causal_nonpad="top-left", softcap="behind the mask", modes=_OLD_MODES, dead_rows="nan",
    ),
    Reading(
        since=(1, 19), flat="transposed", copies="repeated", mask_and_causal="both",
        causal_past="offset", causal_nonpad="top-left", softcap="behind the mask", modes=_OLD_MODES, dead_rows="nan",
    ),
    Reading(
        since=(1, 22), flat="transposed", copies="repeated", mask_and_causal="both",
        causal_past="offset", causal_nonpad="top-left", softcap="in front of the mask", modes=_NEW_MODES, dead_rows="nan",
    ),
    Reading(
        since=(1, 23), flat="transposed", copies="repeated", mask_and_causal="both",
        causal_past="offset", causal_nonpad="offset", softcap="in front of the mask", modes=_NEW_MODES, dead_rows="zero",
    ),
)
"""Oldest first. The last one is what runtimes are held to."""

NEWEST = READINGS[-1]
