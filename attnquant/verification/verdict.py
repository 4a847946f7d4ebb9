"""Which attentions are suspect, and why. Rules and limits are described in docs/verification.md."""

from collections.abc import Iterator
from dataclasses import dataclass

from attnquant.measures import Likeness
from attnquant.roles import PortRole
from attnquant.verification.stats import GaugeSums, SiteSums

MARGIN_DB = 10.0
"""How far the own error of an attention may be above that of 8-bit Q and K with the ranges of the very data."""
CLEAR_DB = 60.0
"""An own error this far below the context is no damage, whatever 8 bits could reach."""
_CLIPPED = 0.01
_UNUSED = 0.75
_OFF_CENTER = 8
"""Steps by which a range may be shifted against its data before the zero point is named."""
_SWAPPED = 0.7
"""Least cosine of query with the float model's key, and of key with its query, by which they are taken for exchanged."""
_LEAD = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What is known of one attention besides its sums."""

    placement: tuple[str, ...] = ()
    """Violations of the setup."""
    differences: tuple[str, ...] = ()
    exchanged: bool = False
    """Query and key read each other's tensors."""


def accusations(sums: SiteSums | None, findings: Findings) -> Iterator[str]:
    """Everything that makes an attention suspect, one sentence each; none where it is not.

    Errors that come in from earlier layers accuse nobody: the own error is that of the context against a float computation
    from the same inputs, and it is held against what 8 bits cost there.
    """
    yield from (f"placement: {reason}" for reason in findings.placement)
    yield from findings.differences
    if findings.exchanged or (sums is not None and _swapped(sums)):
        yield "query and key are exchanged"
    if sums is None:
        return
    if sums.rows["float"] == sums.rows["quantized"] and sums.dead["quantized"] > sums.dead["float"]:
        yield f"{sums.dead['quantized']} queries see no key, {sums.dead['float']} in the float model"
    own, least = sums.own.snr_db, sums.least.snr_db
    if own is not None and least is not None and own < least - MARGIN_DB and own < CLEAR_DB:
        yield (
            f"own error: context at {own:.1f} dB against a float computation from the same inputs; 8-bit Q and K with the "
            f"ranges of these data give {least:.1f} dB"
        )
        yield from remarks(sums)


def remarks(sums: SiteSums) -> Iterator[str]:
    """What is wrong with the quantizers of an attention that does damage."""
    for gauge in sums.gauges:
        role, clipped, unused = gauge.gauge.role, gauge.clipped_share, gauge.unused_share
        if clipped is not None and clipped > _CLIPPED:
            yield (
                f"{role}: {clipped:.1%} of the values are clipped: the range is [{gauge.low:.4g}, {gauge.high:.4g}], "
                f"they reach [{gauge.minimum:.4g}, {gauge.maximum:.4g}]"
            )
        if unused is not None and unused > _UNUSED:
            yield f"{role}: {unused:.0%} of the range is not used"
        shift = off_center(gauge)
        if abs(shift) > _OFF_CENTER:
            yield f"{role}: the range is shifted against the values by about {shift:+.0f} steps: look at the zero point"
        if role is PortRole.VALUE:
            yield f"value: quantized ({gauge.gauge.parameters.dtype or 'integers'}) at node {gauge.gauge.node!r}"


def off_center(gauge: GaugeSums) -> float:
    """Steps by which moving the range would take in values clipped on one side in exchange for unused room on the other."""
    if not gauge.count or gauge.step <= 0:
        return 0.0
    above, below = (gauge.maximum - gauge.high) / gauge.step, (gauge.low - gauge.minimum) / gauge.step
    if above > 0 > below:
        return -min(above, -below)
    return min(below, -above) if below > 0 > above else 0.0


def _swapped(sums: SiteSums) -> bool:
    """By their values: the cosine stays near one through the errors of quantization, and is small for others' values."""
    for role in (PortRole.QUERY, PortRole.KEY):
        crossed = max((_cosine(sums.crossed.get((role, turned))) for turned in (False, True)), default=0.0)
        if crossed < _SWAPPED or crossed < _cosine(sums.roles.get(role)) + _LEAD:
            return False
    return True


def _cosine(likeness: Likeness | None) -> float:
    return 0.0 if likeness is None or likeness.cosine is None else likeness.cosine
