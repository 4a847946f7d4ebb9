"""One case of the conformance suite: an operator, its inputs and attributes; its model, and what the oracle says of it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from attnquant.conformance.contrib import multi_head_attention, packed_attention, quantized_attention, rotary_embedding
from attnquant.conformance.grouped import group_query_attention
from attnquant.conformance.oracle import Array, attention
from attnquant.conformance.readings import NEWEST, Reading

MICROSOFT = "com.microsoft"
_IR_VERSION = 10
"""What every supported runtime reads."""
_BASE_OPSET = 21
"""Of ai.onnx, in models of operators of another domain."""
_TOLERANCE = {"float64": 1e-6, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Absolute, and relative to the expected value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator as its schema publishes it, with its oracle."""

    domain: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    oracle: Callable[..., tuple[Array, ...]]
    """Takes the inputs in order and the attributes by name, returns the outputs in order."""


OPERATORS: dict[str, Operator] = {
    "Attention": Operator(
        domain="",
        op_type="Attention",
        inputs=("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"),
        outputs=("Y", "present_key", "present_value", "qk_matmul_output"),
        oracle=attention,
    ),
    "MultiHeadAttention": Operator(
        domain=MICROSOFT,
        op_type="MultiHeadAttention",
        inputs=("query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key", "past_value"),
        outputs=("output", "present_key", "present_value", "qk"),
        oracle=multi_head_attention,
    ),
    "GroupQueryAttention": Operator(
        domain=MICROSOFT,
        op_type="GroupQueryAttention",
        inputs=(
            "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache",
            "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale",
        ),
        outputs=("output", "present_key", "present_value", "output_qk"),
        oracle=group_query_attention,
    ),
    "com.microsoft::Attention": Operator(
        domain=MICROSOFT,
        op_type="Attention",
        inputs=("input", "weights", "bias", "mask_index", "past", "attention_bias"),
        outputs=("output", "present"),
        oracle=packed_attention,
    ),
    "QAttention": Operator(
        domain=MICROSOFT,
        op_type="QAttention",
        inputs=(
            "input", "weight", "bias", "input_scale", "weight_scale", "mask_index", "input_zero_point", "weight_zero_point",
            "past",
        ),
        outputs=("output", "present"),
        oracle=quantized_attention,
    ),
    "RotaryEmbedding": Operator(
        domain=MICROSOFT,
        op_type="RotaryEmbedding",
        inputs=("input", "position_ids", "cos_cache", "sin_cache"),
        outputs=("output",),
        oracle=rotary_embedding,
    ),
}
"""By the first part of a case's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named call of one operator. Names begin with a key of OPERATORS, "@" and the operator's version."""

    name: str
    inputs: Mapping[str, Array]
    """By formal name."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    """Formal names of the outputs asked for."""
    loose: float = 0.0
    """A tolerance for what computes in a lower precision on purpose; 0: that of the dtype."""

    @property
    def operator(self) -> Operator:
        """What is called."""
        return OPERATORS[self.name.partition("@")[0]]

    @property
    def version(self) -> int:
        """Opset version of the operator's domain."""
        return int(self.name.partition("@")[2].partition("/")[0])

    @property
    def tolerance(self) -> float:
        """Absolute and relative."""
        return self.loose or max(_TOLERANCE.get(array.dtype.name, 0.0) for array in self.floats)

    @property
    def floats(self) -> list[Array]:
        """The inputs that are not masks, lengths or places."""
        return [array for array in self.inputs.values() if array.dtype.kind == "f" or array.dtype.name == "bfloat16"]

    def expected(self, reading: Reading = NEWEST) -> dict[str, Array]:
        """{formal output: array} by the oracle; `reading` counts for ai.onnx Attention."""
        extra = {"reading": reading} if self.operator.oracle is attention else {}
        found = self.operator.oracle(*(self.inputs.get(name) for name in self.operator.inputs), **self.attributes, **extra)
        return {name: array for name, array in zip(self.operator.outputs, found, strict=False) if name in self.outputs}

    def model(self) -> onnx.ModelProto:
        """One node; shapes of outputs are left open."""
        one = self.operator
        given = [name if name in self.inputs else "" for name in one.inputs]
        asked = [name if name in self.outputs else "" for name in one.outputs]
        names = (_trimmed(given), _trimmed(asked))
        node = helper.make_node(one.op_type, *names, domain=one.domain, name="node", **self.attributes)
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in self.expected().items()}
        graph = helper.make_graph(
            [node],
            "conformance",
            [_input(name, self.inputs[name]) for name in one.inputs if name in self.inputs],
            [helper.make_tensor_value_info(name, kinds[name], None) for name in one.outputs if name in kinds],
        )
        own = [helper.make_opsetid(one.domain, self.version)]
        opsets = own if not one.domain else [helper.make_opsetid("", _BASE_OPSET), *own]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="attnquant")


def _input(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _trimmed(names: Iterable[str]) -> list[str]:
    """Without the empty names at the end."""
    found = list(names)
    while found and not found[-1]:
        found.pop()
    return found


def largest_difference(expected: Array, got: Array, tolerance: float) -> tuple[bool, float]:
    """(whether the arrays agree, the largest absolute difference where both are finite; inf where they differ in kind).

    Masked elements of `expected` may be anything. NaN agrees with NaN and an infinity with itself, with nothing else.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return False, float("inf")
    known = ~np.ma.getmaskarray(expected)
    want, have = (np.asarray(np.ma.getdata(item), np.float64)[known] for item in (expected, got))
    finite = np.isfinite(want) & np.isfinite(have)
    same = np.array_equal(want[~finite], have[~finite], equal_nan=True)
    off = np.abs(want[finite] - have[finite])
    within = bool((off <= tolerance * (1.0 + np.abs(want[finite]))).all())
    return same and within, float(off.max(initial=0.0)) if same else float("inf")
