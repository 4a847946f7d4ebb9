"""Where onnx disagrees with itself on ai.onnx Attention, by release: data.

onnx says what the operator does in its text and three more times: by the function body, by `onnx.reference`, and by the
cases of `onnx.backend.test.case.node`. `python -m benchmarks.specification` holds each to the oracle, in every release; what
differs and is not listed here fails there and, for the installed release, in the tests. docs/conformance.md has the table.
"""

import re
from dataclasses import dataclass
from typing import Literal

Source = Literal["function body", "reference", "test cases"]

_OUTPUT_SHAPE = "Y: 4D tensor with shape (batch_size, q_num_heads, q_sequence_length, v_head_size) or 3D tensor ..."
_MASK_SHAPE = "attn_mask: Shape must be broadcastable to (batch_size, q_num_heads, q_sequence_length, total_sequence_length)"
_MASK_KINDS = "A boolean mask where a value of True indicates that the element should take part in attention ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One source of some releases against the clause that decides."""

    id: str
    source: Source
    since: tuple[int, int]
    """First onnx release."""
    until: tuple[int, int] | None
    """First release that agrees again; None where none does so far."""
    cases: str
    """A regular expression on names of cases, without operator and version."""
    sentence: str
    """What the source does."""
    clause: str
    """Quoted from the specification."""

    def active(self, release: tuple[int, int]) -> bool:
        """Whether the source does it in a release."""
        return self.since <= release and (self.until is None or release < self.until)

    def concerns(self, release: tuple[int, int], source: str, case: str) -> bool:
        """Whether this explains that a source of a release differs in a case ("Attention@24/4d/mha" or onnx's name)."""
        name = case.partition("/")[2] or case
        return self.active(release) and source == self.source and re.search(self.cases, name) is not None


DISAGREEMENTS = (
    Disagreement(
        id="body-squeezes-output",
        source="function body", since=(1, 18), until=(1, 19), cases="decode|batch-1|one-head",
        sentence="Y passes a Squeeze without axes, so every axis of length 1 is lost",
        clause=_OUTPUT_SHAPE,
    ),
    Disagreement(
        id="body-causal-diagonal",
        source="function body", since=(1, 18), until=(1, 19), cases="causal",
        sentence="Trilu gets its diagonal as a tensor of one axis, which onnx.reference refuses (ONNX Runtime takes it)",
        clause="Trilu, k: A 0-D tensor containing a single value corresponding to the number diagonals ...",
    ),
    Disagreement(
        id="body-half-mask",
        source="function body", since=(1, 18), until=(1, 19), cases="fp16",
        sentence="a float16 mask is added to float32 zeros, which no Add takes",
        clause="attn_mask: ... a float mask of the same type as query, key, value that is added to the attention score.",
    ),
    Disagreement(
        id="body-mode-3-precision",
        source="function body", since=(1, 18), until=(1, 23), cases="softmax-precision.*mode-3",
        sentence="qk_matmul_output in mode 3 has the type of softmax_precision",
        clause="Errata: the mode-3 qk_matmul_output is also now emitted at the operator's output precision (T1)",
    ),
    Disagreement(
        id="reference-mask-one-row",
        source="reference", since=(1, 19), until=None, cases="mask-(bool|float)-(T|1T|B11T)/causal",
        sentence="is_causal with a mask of one row for all queries shows them all the later keys; a mask of one axis raises",
        clause=_MASK_SHAPE,
    ),
    Disagreement(
        id="reference-mode-0-softcap",
        source="reference", since=(1, 22), until=None, cases="softcap.*mode-0",
        sentence="qk_matmul_output in mode 0 is overwritten by softcap",
        clause="qk_matmul_output_mode: If set to 0, qk_matmul_output is the output of qk matmul.",
    ),
    Disagreement(
        id="reference-boolean-causal",
        source="reference", since=(1, 19), until=(1, 23), cases="(mask|rows)[-/]bool.*causal",
        sentence="is_causal with a boolean mask multiplies 0 by -inf: NaN wherever the mask is True",
        clause=_MASK_KINDS,
    ),
    Disagreement(
        id="reference-in-place",
        source="reference", since=(1, 18), until=(1, 23), cases="nonpad/|mask|fp16|rows/",
        sentence="masks are added in place, so a mask or nonpad_kv_seqlen with more samples or heads than the bias raises",
        clause=_MASK_SHAPE,
    ),
)
"""Everything found, onnx 1.18.0 to 1.23.2; the test cases never differ from the text in force."""
