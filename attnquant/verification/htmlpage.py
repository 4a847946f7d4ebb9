"""A VerificationReport as one HTML file: no script, nothing loaded from elsewhere, every name from the model escaped."""

from collections.abc import Iterable, Sequence

from attnquant.markup import plain
from attnquant.verification import charts
from attnquant.verification.charts import text
from attnquant.verification.pages import (
    LEGEND,
    SHORT,
    SITE_COLUMNS,
    Section,
    decibels,
    gain,
    of_sample,
    output_section,
    status,
)
from attnquant.verification.style import CSS
from attnquant.verification.values import OutputRow, ProviderReport, QuantizerRow, SiteVerdict, VerificationReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Should anything ever slip through, a browser neither runs nor loads it."""
_WORST = 5
_MANY = 12
"""Attentions from which the histograms of those that are not suspect are folded away."""


def page(report: VerificationReport) -> str:
    """The whole file."""
    body = [_header(report), _cards(report), _failures(report)]
    for name, one in report.providers.items():
        body += _provider(name, one)
    for (first, second), rows in report.between.items():
        title = f"Outputs of the quantized model, {second} against {first}"
        body += [f"<h2>{text(title)}</h2>", _outputs(output_section(title, rows))]
    body += [_notes(report), _footer(report)]
    return "\n".join([
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>Verification of {text(report.quantized_model)}</title>",
        f"<style>{CSS}</style>",
        "</head>",
        "<body>",
        "<main>",
        *(part for part in body if part),
        "</main>",
        "</body>",
        "</html>",
        "",
    ])  # fmt: skip


def _header(report: VerificationReport) -> str:
    word = "passed" if report.ok else "failed"
    models = f"<code>{text(report.quantized_model)}</code> against <code>{text(report.float_model)}</code>"
    return (
        f'<header><h1>Verification</h1><span class="badge {word}">{word}</span><div class="models">{models}</div></header>'
    )


def _cards(report: VerificationReport) -> str:
    sites = next(iter(report.providers.values())).sites
    cards = [(str(len(sites)), "attentions"), (str(len(report.suspects)), "suspect")]
    cards += [
        (f"{decibels(one.snr_db)} dB".replace("equal dB", "equal"), f"worst output, {name}")
        for name, one in report.providers.items()
        if one.snr_db is not None
    ]
    cards += [("as asked" if report.placement_ok else "violated", "placement"), (str(report.samples), "samples")]
    shown = "".join(f'<div class="card"><b>{text(value)}</b><span>{text(what)}</span></div>' for value, what in cards)
    return f'<div class="cards">{shown}</div>'


def _failures(report: VerificationReport) -> str:
    return f'<div class="box alarm">{_list(report.failures)}</div>' if report.failures else ""


def _provider(name: str, one: ProviderReport) -> list[str]:
    samples = "".join(_samples(row) for row in one.outputs)
    outputs = [f"<h2>Outputs on {text(name)}</h2>", _outputs(output_section("", one.outputs))]
    worst = [f"<h2>Worst samples on {text(name)}</h2>", f'<div class="grid">{samples}</div>']
    if not one.sites:
        return [*outputs, *worst]
    return [
        *outputs,
        f"<h2>Attentions on {text(name)}</h2>",
        f'<div class="box">{_attentions(one.sites)}<p class="note">{text(LEGEND)}</p></div>',
        f"<h2>Error heat map on {text(name)}</h2>",
        f'<div class="box">{charts.heat_map(one.sites)}<p class="note">Signal-to-noise ratio against the float model; own: '
        f"against a float computation from the same inputs.</p>{charts.legend()}</div>",
        f"<h2>Quantized operands on {text(name)}</h2>",
        *_histograms(one.sites),
        *worst,
    ]


def _outputs(section: Section) -> str:
    head = _cells("th", section.columns, section.text)
    rows = "".join(f"<tr>{_cells('td', row, section.text, names=(0,))}</tr>" for row in section.rows)
    return f'<div class="box"><table><tr>{head}</tr>{rows}</table>{_list(section.lines)}</div>'


def _samples(output: OutputRow) -> str:
    known = sorted((value, index) for index, value in enumerate(output.samples) if value is not None)
    if not known:
        return ""
    items = [of_sample(output, index) for _, index in known[:_WORST]]
    return f'<div class="box"><h3>{text(output.name)}</h3>{charts.strip(output)}{_list(items)}</div>'


def _attentions(sites: Sequence[SiteVerdict]) -> str:
    last = len(SITE_COLUMNS) - 1
    rows = [f"<tr>{_cells('th', SITE_COLUMNS, (0, last))}</tr>"]
    for site in sites:
        numbers = [*(site.snr_db.get(role) for role in SHORT), site.local_snr_db, site.expected_snr_db]
        cells = _cells("td", (site.id, *map(decibels, numbers), gain(site.attribution_db)), (0,), names=(0,))
        kind = status(site)
        rows.append(f'<tr>{cells}<td class="text"><span class="badge {kind.replace(" ", "-")}">{kind}</span></td></tr>')
        if site.reasons:
            rows.append(f'<tr class="why"><td colspan="{len(SITE_COLUMNS)}">{_list(site.reasons)}</td></tr>')
    return f"<table>{''.join(rows)}</table>"


def _histograms(sites: Sequence[SiteVerdict]) -> list[str]:
    """Those of suspects first; of many attentions the others are folded away."""
    note = "Counts on a logarithmic scale; shaded: the range that the integers hold. The end bars hold everything beyond."
    parts = [f'<p class="note">{note}</p>']
    suspects, others = ([site for site in sites if site.suspect is wanted] for wanted in (True, False))
    for group, folded in ((suspects, False), (others, len(sites) > _MANY)):
        boxes = "".join(_histogram(site, row) for site in group for row in site.quantizers)
        if boxes:
            grid = f'<div class="grid">{boxes}</div>'
            parts.append(f"<details><summary>{len(group)} attentions</summary>{grid}</details>" if folded else grid)
    return parts if len(parts) > 1 else ['<p class="note">No operand of an attention is quantized.</p>']


def _histogram(site: SiteVerdict, row: QuantizerRow) -> str:
    facts = [row.dtype or "integers"]
    facts += [f"{row.clipped:.2%} clipped"] if row.clipped is not None else []
    facts += [f"{row.unused:.0%} of the range unused"] if row.unused is not None else []
    facts += [f"values {row.values[0]:.3g} to {row.values[1]:.3g}"] if row.values is not None else []
    title = f"{text(site.id)} · {row.role}"
    hurt = " hurt" if site.suspect else ""
    return (
        f'<div class="box{hurt}"><h3>{title}</h3>{charts.histogram(row)}<p class="note">{text("; ".join(facts))}</p></div>'
    )


def _notes(report: VerificationReport) -> str:
    return f'<h2>Notes</h2><div class="box">{_list(report.notes)}</div>' if report.notes else ""


def _footer(report: VerificationReport) -> str:
    versions = ", ".join(f"{text(name)} {text(version)}" for name, version in report.versions.items())
    command = f"<p>Command: <code>{text(report.command)}</code></p>" if report.command else ""
    return f"<footer>{command}<p>{versions}</p></footer>"


def _cells(tag: str, cells: Iterable[str], texts: Sequence[int], names: Sequence[int] = ()) -> str:
    parts = []
    for index, cell in enumerate(cells):
        kinds = [*(["text"] if index in texts else []), *(["name"] if index in names else [])]
        attribute = f' class="{" ".join(kinds)}"' if kinds else ""
        parts.append(f"<{tag}{attribute}>{text(plain(cell))}</{tag}>")
    return "".join(parts)


def _list(items: Iterable[str]) -> str:
    shown = "".join(f"<li>{text(item)}</li>" for item in items)
    return f"<ul>{shown}</ul>" if shown else ""
