"""The masks as a bias for the operators of com.microsoft, which add it to the scores as the graph did."""

import onnx_ir as ir

from attnquant.rewrite import masking
from attnquant.rewrite.reading import Reading
from attnquant.rewrite.shop import Job


def attention_bias(job: Job, reading: Reading, past: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """(attention_bias, causal). Sums and fills are those of the graph, so an empty row gives what it gave."""
    site, draft = job.masks(reading, past), job.draft
    if not reading.tail:
        return None, False
    terms = masking.terms(site)
    if terms is None:
        return masking.replayed(draft, site), False
    if not terms:
        return None, False
    if past is None and masking.is_causal(site, terms):
        return None, True
    return masking.bias_mask(draft, site, terms, lowest=False, axes=4), False


def zeroed(job: Job, made: ir.Value, bias: ir.Value | None) -> ir.Value:
    """Zeros for a row of minus infinity, where the graph gave zeros: the operator gives NaN."""
    reading, draft = job.reading, job.draft
    if bias is None or not reading.zero_rows or job.allow_dead_row_change:
        return made
    terms = masking.terms(job.masks())
    if terms is not None and masking.never_empty(job.masks(), terms):
        return made
    return draft.op("Where", [draft.op("IsNaN", [made], "empty_rows"), draft.number(0.0, "zero"), made], "output_or_zero")
