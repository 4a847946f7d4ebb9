"""Where ONNX Runtime is known to compute an attention operator other than its specification says: data, measured.

`attnquant conformance` finds them (docs/conformance.md has the table); `quantize` and `verify` warn of those that a model
uses. The edges of the versions come from runs of every release from 1.24.1 to 1.32.0.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from attnquant.dtypes import TypeMap, infer_types
from attnquant.graph import constant
from attnquant.operators import Operator
from attnquant.recognition import find_operators
from attnquant.target import Target, release

ATTENTION = ("ai.onnx", "Attention")
_FIELDS = {"attn_mask": "mask", "nonpad_kv_seqlen": "nonpad", "past_key": "past"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """One thing that some versions of the runtime do other than specified."""

    id: str
    sentence: str
    """What happens, as an end of "ONNX Runtime X: ..."."""
    operator: tuple[str, str] = ATTENTION
    needs: frozenset[str] = frozenset()
    """Features that a call must have, all of them."""
    any_of: frozenset[str] = frozenset()
    """Features of which it must have one, where there are any."""
    since: tuple[int, ...] = ()
    """First release that does it; () where it always has."""
    until: tuple[int, ...] = ()
    """First release that is right; () where none is."""
    providers: tuple[str, ...] = ("cpu",)
    """Where it was measured."""
    url: str = ""

    def concerns(self, call: "Call", version: tuple[int, ...], provider: str) -> bool:
        """Whether this call, in this release of the runtime, on this provider, is computed other than specified."""
        own = call.features
        return (
            call.operator == self.operator
            and provider in self.providers
            and self.since <= version
            and (not self.until or version < self.until)
            and self.needs <= own
            and (not self.any_of or bool(self.any_of & own))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is known about one use of an operator: of a node in a graph, or of a case of the conformance suite."""

    operator: tuple[str, str]
    attributes: Mapping[str, Any]
    inputs: frozenset[str]
    """Formal names of the inputs given."""
    outputs: frozenset[str] = frozenset()
    """Formal names of the outputs asked for."""
    boolean_mask: bool = False
    half: bool = False
    """Q is float16."""
    mask: np.ndarray | None = field(default=None, compare=False)
    """Values of the mask where they are known."""
    nonpad: np.ndarray | None = field(default=None, compare=False)
    """Values of nonpad_kv_seqlen where they are known."""

    @property
    def features(self) -> frozenset[str]:
        """mask, bool mask, nonpad, past, causal, softcap, half, shown N (the scores in mode N), hidden or lowest rows."""
        return frozenset(self._features())

    def _features(self) -> Iterator[str]:
        yield from (word for name, word in _FIELDS.items() if name in self.inputs)
        if self.attributes.get("is_causal", 0):
            yield "causal"
        if self.attributes.get("softcap", 0.0):
            yield "softcap"
        if "qk_matmul_output" in self.outputs:
            yield f"shown {self.attributes.get('qk_matmul_output_mode', 0)}"
        if self.boolean_mask:
            yield "bool mask"
        if self.half:
            yield "half"
        if self.nonpad is not None and (self.nonpad <= 0).any():
            yield "hidden rows"
        if self.mask is not None and self.mask.size and self.mask.ndim:
            yield from _rows(self.mask)


def _rows(mask: np.ndarray) -> Iterator[str]:
    """How a mask hides whole rows: with False or -inf, or with the lowest finite number."""
    if mask.dtype == np.bool_:
        if not mask.any(-1).all():
            yield "hidden rows"
        return
    highest = np.asarray(mask, np.float64).max(-1)
    if np.isneginf(highest).any():
        yield "hidden rows"
    if mask.dtype.kind == "f" and (highest == float(np.finfo(mask.dtype).min)).any():
        yield "lowest rows"


_SHADES = frozenset({"mask", "causal", "nonpad"})

DEVIATIONS = (
    Deviation(
        id="half-scores-overflow",
        sentence="in float16, Q K^T is scaled behind the product only, so that large scores become infinite and outputs NaN",
        needs=frozenset({"half"}),
        until=(1, 25),
    ),
    Deviation(
        id="nonpad-ignored",
        sentence="nonpad_kv_seqlen is ignored, so queries see the cache behind what is filled",
        needs=frozenset({"nonpad"}),
        until=(1, 25),
    ),
    Deviation(
        id="softcap-behind-mask",
        sentence="softcap comes behind the mask, so hidden keys get a share of the attention",
        needs=frozenset({"softcap"}),
        any_of=_SHADES,
        until=(1, 27),
        url="https://github.com/microsoft/onnxruntime/pull/28379",
    ),
    Deviation(
        id="qk-mode-1-masked",
        sentence="qk_matmul_output in mode 1 holds the scores behind the mask without softcap, as before onnx 1.22",
        needs=frozenset({"shown 1"}),
        any_of=_SHADES | {"softcap"},
        until=(1, 27),
        url="https://github.com/microsoft/onnxruntime/pull/28379",
    ),
    Deviation(
        id="nonpad-causal-top-left",
        sentence="is_causal does not move with nonpad_kv_seqlen: query i sees keys 0 to i, not nonpad_kv_seqlen - S + i",
        needs=frozenset({"nonpad", "causal"}),
        until=(1, 28),
        url="https://github.com/microsoft/onnxruntime/issues/28904",
    ),
    Deviation(
        id="hidden-rows-not-zero",
        sentence="a query whose keys are all hidden gets the mean of V or NaN, not zeros",
        needs=frozenset({"hidden rows"}),
        until=(1, 28),
        url="https://github.com/microsoft/onnxruntime/issues/28904",
    ),
    Deviation(
        id="lowest-mask-causal",
        sentence="under is_causal a query whose mask is the lowest finite number everywhere also sees later keys",
        needs=frozenset({"lowest rows", "causal"}),
        until=(1, 28),
    ),
    Deviation(
        id="lowest-mask-zero-rows",
        sentence="a query whose mask is the lowest finite number everywhere gets zeros, not the mean of V",
        needs=frozenset({"lowest rows"}),
        since=(1, 28),
    ),
    Deviation(
        id="qk-mode-2-lowest",
        sentence="qk_matmul_output in mode 2 shows the lowest finite number for hidden keys, not -inf",
        needs=frozenset({"shown 2"}),
        any_of=frozenset({"bool mask", "causal", "nonpad"}),
    ),
)
"""Everything known, in the order of the versions that put it right."""


def known(call: Call, version: str, provider: str = "cpu") -> tuple[Deviation, ...]:
    """The deviations that concern a call in a release of ONNX Runtime; none where the version is not known."""
    numbers = release(version)
    return tuple(row for row in DEVIATIONS if numbers and row.concerns(call, numbers, provider))


def warnings(model: ir.Model, target: Target) -> tuple[str, ...]:
    """A sentence for each deviation of the target's runtime that attentions of a named model meet, with their ids."""
    if not target.name.startswith("onnxruntime-"):
        return ()
    found: dict[Deviation, list[str]] = {}
    operators, types = find_operators(model)[0], infer_types(model)
    for operator in operators:
        for row in known(_call(operator, types), target.version, target.name.removeprefix("onnxruntime-")):
            found.setdefault(row, []).append(f"{operator.path}/{operator.node.name}")
    return tuple(_warning(row, ids, target.version) for row, ids in found.items())


def _warning(row: Deviation, ids: list[str], version: str) -> str:
    named = ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")
    right = f" Right from {'.'.join(map(str, row.until))} on." if row.until else ""
    return f"ONNX Runtime {version} does not follow the specification at {named}: {row.sentence} ({row.id}).{right}"


def _call(operator: Operator, types: TypeMap) -> Call:
    node, row = operator.node, operator.row
    given = {port.name: value for port, value in zip(row.inputs, node.inputs, strict=False) if value is not None}
    mask = given.get("attn_mask")
    numbers = {name: operator.number(name) for name in node.attributes}
    return Call(
        operator=(row.domain, row.op_type),
        attributes={name: value for name, value in numbers.items() if value is not None},
        inputs=frozenset(given),
        outputs=frozenset(port.name for port, value in zip(row.outputs, node.outputs, strict=False) if value.name),
        boolean_mask=types.dtype(mask) == ir.DataType.BOOL,
        half=types.dtype(node.inputs[0]) == ir.DataType.FLOAT16,
        mask=constant(mask),
        nonpad=constant(given.get("nonpad_kv_seqlen")),
    )
