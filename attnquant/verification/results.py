"""From sums to the rows of the report."""

from collections.abc import Sequence

from attnquant.measures import OutputSums
from attnquant.roles import PortRole
from attnquant.verification.pairing import SitePair
from attnquant.verification.stats import GaugeSums, SiteSums
from attnquant.verification.values import OutputRow, QuantizerRow, SiteVerdict
from attnquant.verification.verdict import Findings, accusations
from attnquant.verification.watching import ROLES


def output_row(sums: OutputSums, names: Sequence[str]) -> OutputRow:
    """The row of one output; `names` are those of the samples, as far as they have any."""
    known = [(value, index) for index, value in enumerate(sums.samples) if value is not None]
    worst = min(known)[1] if known else None
    likeness, measured = sums.whole, not sums.exact and not sums.fault
    return OutputRow(
        name=sums.name,
        snr_db=likeness.snr_db if measured else None,
        cosine=likeness.cosine if measured else None,
        max_abs=likeness.max_abs if measured and likeness.count else None,
        top1=sums.classes.top1 if sums.logits else None,
        kl=sums.classes.kl if sums.logits else None,
        equal=sums.equal / sums.elements if sums.exact and sums.elements else None,
        logits=sums.logits,
        samples=tuple(sums.samples),
        worst=worst,
        names=tuple(names[: len(sums.samples)]),
        fault=sums.fault,
    )


def site_verdict(
    pair: SitePair, sums: SiteSums | None, findings: Findings, gain: float | None, remarks: Sequence[str]
) -> SiteVerdict:
    """The row of one attention; `remarks` are reasons that accuse nobody."""
    reasons = tuple(dict.fromkeys(accusations(sums, findings)))
    known = sums or SiteSums()
    snr = {role: known.snr_db(role) for role in ROLES}
    return SiteVerdict(
        id=pair.id,
        node=pair.quantized.node,
        form=pair.quantized.form,
        snr_db=snr,
        smoothed=tuple(role for role in ROLES if known.smoothed(role)),
        local_snr_db=known.own.snr_db,
        expected_snr_db=known.least.snr_db,
        attribution_db=gain,
        dead_rows={
            model: known.dead[model] / known.rows[model] if known.rows[model] else None for model in ("float", "quantized")
        },
        quantizers=tuple(_quantizer(gauge) for gauge in known.gauges),
        suspect=bool(reasons),
        reasons=(*reasons, *remarks),
    )


def _quantizer(sums: GaugeSums) -> QuantizerRow:
    known = sums.high > sums.low
    return QuantizerRow(
        role=PortRole(sums.gauge.role),
        node=sums.gauge.node,
        tensor=sums.gauge.tensor,
        dtype=sums.gauge.parameters.dtype,
        range=(sums.low, sums.high) if known else None,
        values=(sums.minimum, sums.maximum) if sums.count else None,
        clipped=sums.clipped_share,
        unused=sums.unused_share,
        histogram=tuple(int(number) for number in sums.bins) if known else (),
        edges=sums.edges if known else None,
    )
