"""A VerificationReport as tables and lines, for a terminal and as markdown; only `markdown` escapes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attnquant.markup import code, escaped, plain, row
from attnquant.measures import CEILING
from attnquant.roles import PortRole
from attnquant.verification.values import OutputRow, ProviderReport, SiteVerdict, VerificationReport

SHORT = {
    PortRole.QUERY: "Q", PortRole.KEY: "K", PortRole.SCORES: "scores", PortRole.PROBABILITIES: "P", PortRole.VALUE: "V",
    PortRole.CONTEXT: "context",
}  # fmt: skip
SITE_COLUMNS = ("attention", *SHORT.values(), "own", "8 bit", "effect", "status")
LEGEND = (
    "All in dB. Q to context: against the float model, errors of earlier layers included, factors of smoothing left out. "
    "own: the context against a float computation from the same inputs; 8 bit: the same for Q and K rounded to 8 bits with "
    "the ranges of these data. effect: what the worst output gains when this attention alone is float."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, a table and lines below it."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    named: tuple[int, ...] = (0,)
    """Columns with names from the model."""
    text: tuple[int, ...] = (0,)
    """Columns that are no numbers."""
    lines: tuple[str, ...] = ()


def decibels(value: float | None) -> str:
    """ "34.5", "equal" at the ceiling, "not finite" at its negative, "" where nothing was measured."""
    if value is None:
        return ""
    if value >= CEILING:
        return "equal"
    return "not finite" if value <= -CEILING else f"{value:.1f}"


def gain(value: float | None) -> str:
    """Decibels with their sign; "0.0" has none."""
    if value is None:
        return ""
    return "0.0" if abs(value) < 0.05 else f"{value:+.1f}"


def headline(report: VerificationReport) -> str:
    """One line: passed or not, how many attentions are suspect, the SNR."""
    count = len(next(iter(report.providers.values())).sites)
    found = "no attention" if not count else f"{count} attention{'s' if count > 1 else ''}"
    suspects = len(report.suspects)
    verdict = f", {suspects or 'none'} suspect" if count else ""
    worst = [f"{decibels(one.snr_db)} dB on {name}" for name, one in report.providers.items() if one.snr_db is not None]
    snr = f"; worst output {', '.join(worst)}" if worst else ""
    placement = "placement as asked" if report.placement_ok else "placement violated"
    return f"{'passed' if report.ok else 'FAILED'}: {found}{verdict}; {placement}{snr}; {report.samples} samples"


def sections(report: VerificationReport) -> tuple[Section, ...]:
    """Everything the report says, in order."""
    parts = [Section(title=headline(report), lines=report.failures)]
    for name, one in report.providers.items():
        parts.append(output_section(f"Outputs on {name}, quantized against float", one.outputs))
        if one.sites:
            parts.append(_attentions(name, one))
    parts += [
        output_section(f"Outputs of the quantized model, {b} against {a}", rows) for (a, b), rows in report.between.items()
    ]
    if report.notes:
        parts.append(Section(title="Notes", lines=report.notes))
    return tuple(parts)


def reasons(one: ProviderReport) -> dict[str, int]:
    """Each reason once, numbered in order of appearance."""
    found = dict.fromkeys(reason for site in one.sites for reason in site.reasons)
    return {reason: number for number, reason in enumerate(found, 1)}


def status(site: SiteVerdict) -> str:
    """One word."""
    if site.suspect:
        return "suspect"
    return "ok" if site.local_snr_db is not None else "not observed"


def markdown(report: VerificationReport) -> str:
    """For pull requests."""
    first, *rest = sections(report)
    names = f"{code(report.quantized_model)} against {code(report.float_model)}"
    lines = [f"### Verification of {names}", "", f"{escaped(plain(first.title))}.", *_bullets(first.lines)]
    for section in rest:
        lines += ["", f"**{escaped(plain(section.title))}**"]
        if section.rows:
            lines += ["", row(list(section.columns)), row(["---"] * len(section.columns))]
            lines += [row(_cells(section, cells)) for cells in section.rows]
        lines += _bullets(section.lines)
    lines += ["", f"<sub>{', '.join(f'{name} {version}' for name, version in report.versions.items())}</sub>"]
    return "\n".join(lines) + "\n"


def _bullets(lines: Sequence[str]) -> list[str]:
    return ["", *(f"- {escaped(plain(line))}" for line in lines)] if lines else []


def _cells(section: Section, cells: Sequence[str]) -> list[str]:
    return [code(cell) if index in section.named else escaped(plain(cell)) for index, cell in enumerate(cells)]


OUTPUT_CELLS: dict[str, Callable[[OutputRow], str]] = {
    "SNR (dB)": lambda row: decibels(row.snr_db),
    "cosine": lambda row: "" if row.cosine is None else f"{row.cosine:.6f}",
    "max abs": lambda row: "" if row.max_abs is None else f"{row.max_abs:.3g}",
    "top-1": lambda row: "" if row.top1 is None else f"{row.top1:.2%}",
    "KL (nats)": lambda row: "" if row.kl is None else f"{row.kl:.2g}",
    "equal": lambda row: "" if row.equal is None else f"{row.equal:.2%}",
}
"""Columns of the table of outputs; those that are empty throughout are left out."""


def of_sample(output: OutputRow, index: int) -> str:
    """Name of a sample and what was measured on it."""
    value = output.samples[index]
    shown = "" if value is None else f"{value:.2%} equal" if output.equal is not None else f"{decibels(value)} dB"
    return f"{output.sample_name(index)}: {shown}".replace("equal dB", "equal")


def output_section(title: str, rows: Sequence[OutputRow]) -> Section:
    """The table of outputs."""
    kept = {name: cell for name, cell in OUTPUT_CELLS.items() if any(cell(output) for output in rows)}
    return Section(
        title=title,
        columns=("output", *kept, "worst sample"),
        text=(0, len(kept) + 1),
        rows=tuple(
            (
                output.name,
                *(cell(output) for cell in kept.values()),
                "" if output.worst is None else of_sample(output, output.worst),
            )
            for output in rows
        ),
        lines=tuple(f"{output.name}: {output.fault}" for output in rows if output.fault),
    )


def _attentions(provider: str, one: ProviderReport) -> Section:
    numbers = reasons(one)
    return Section(
        title=f"Attentions on {provider}",
        columns=SITE_COLUMNS,
        text=(0, len(SITE_COLUMNS) - 1),
        rows=tuple(_site(site, numbers) for site in one.sites),
        lines=(*(f"{number} {reason}" for reason, number in numbers.items()), LEGEND),
    )


def _site(site: SiteVerdict, numbers: dict[str, int]) -> tuple[str, ...]:
    marks = " ".join(str(numbers[reason]) for reason in site.reasons)
    return (
        site.id,
        *(decibels(site.snr_db.get(role)) for role in SHORT),
        decibels(site.local_snr_db),
        decibels(site.expected_snr_db),
        gain(site.attribution_db),
        f"{status(site)} {marks}".strip(),
    )
