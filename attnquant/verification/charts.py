"""Charts of the HTML report as inline SVG: no script, no font and no picture from elsewhere. Texts are escaped here."""

import math
from collections.abc import Sequence
from html import escape

from attnquant.markup import plain
from attnquant.verification.pages import SHORT, decibels
from attnquant.verification.values import OutputRow, QuantizerRow, SiteVerdict

LOW_DB, HIGH_DB = 10.0, 50.0
"""Ends of the colours of the heat map."""
_COLOURS = ((178, 24, 43), (244, 165, 130), (247, 247, 247), (146, 197, 222), (33, 102, 172))
_CELL_WIDTH, _CELL_HEIGHT = 84, 24
_BLACK_FROM = 0.179
"""Luminance from which black stands out more than white."""
_LABEL = 420  # pixels for the names of attentions, at most
_CHARACTER = 6.7  # width of one in them
_PLOT_WIDTH, _PLOT_HEIGHT = 320, 96
_STRIP_WIDTH, _STRIP_HEIGHT = 420, 72


def text(content: str) -> str:
    """Anyone's text for HTML, inside an element or a quoted attribute."""
    return escape(plain(content), quote=True)


def colour(value: float) -> tuple[str, str]:
    """(fill, class of the text on it) of a number of decibels."""
    place = min(max((value - LOW_DB) / (HIGH_DB - LOW_DB), 0.0), 1.0) * (len(_COLOURS) - 1)
    index = min(int(place), len(_COLOURS) - 2)
    part = place - index
    mixed = [round(a + (b - a) * part) for a, b in zip(_COLOURS[index], _COLOURS[index + 1], strict=True)]
    linear = [(part / 255 + 0.055) ** 2.4 / 1.055**2.4 if part > 10 else part / 255 / 12.92 for part in mixed]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]  # WCAG 2.1, relative luminance
    return "#{:02x}{:02x}{:02x}".format(*mixed), "dark" if luminance > _BLACK_FROM else "light"


def heat_map(sites: Sequence[SiteVerdict]) -> str:
    """Attention by role, the SNR as colour and number; the last column is the attention's own error."""
    names = [*SHORT.values(), "own"]
    margin = min(_LABEL, _CHARACTER * max(len(plain(site.id)) for site in sites) + 20)
    width, height = margin + _CELL_WIDTH * len(names), _CELL_HEIGHT * (len(sites) + 1)
    parts = [
        f'<text x="{margin + _CELL_WIDTH * (index + 0.5):.0f}" y="14" text-anchor="middle">{name}</text>'
        for index, name in enumerate(names)
    ]
    for row, site in enumerate(sites, 1):
        values = [*(site.snr_db.get(role) for role in SHORT), site.local_snr_db]
        parts.append(
            f'<text class="row" x="{margin - 10:.0f}" y="{_CELL_HEIGHT * row + 16}" text-anchor="end">{_short(site.id)}'
            f"<title>{text(site.id)}</title></text>"
        )
        parts += [_cell(margin + _CELL_WIDTH * column, _CELL_HEIGHT * row, value) for column, value in enumerate(values)]
    return _svg(width, height, parts, "Error heat map: attention by role, signal-to-noise ratio in dB")


def _short(name: str) -> str:
    """The end of a name, as much as fits."""
    shown, room = plain(name), int(_LABEL / _CHARACTER) - 2
    return text(shown if len(shown) <= room else f"…{shown[-room + 1 :]}")


def _cell(x: float, y: float, value: float | None) -> str:
    box = f'x="{x + 1:.0f}" y="{y + 1:.0f}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" rx="3"'
    if value is None:
        return f'<rect class="none" {box}/>'
    fill, ink = colour(value)
    middle = x + _CELL_WIDTH / 2
    label = f'<text class="{ink}" x="{middle:.0f}" y="{y + 16:.0f}" text-anchor="middle">{decibels(value)}</text>'
    return f'<rect {box} fill="{fill}"/>{label}'


def legend() -> str:
    """The colours of the heat map."""
    steps = [LOW_DB + step * (HIGH_DB - LOW_DB) / 8 for step in range(9)]
    parts = [f'<rect x="{40 * index}" y="0" width="40" height="10" fill="{colour(v)[0]}"/>' for index, v in enumerate(steps)]
    parts += [f'<text x="{40 * index + 20}" y="24" text-anchor="middle">{v:.0f}</text>' for index, v in enumerate(steps)]
    return _svg(40 * len(steps) + 30, 28, [*parts, f'<text x="{40 * len(steps) + 6}" y="24">dB</text>'], "Colours by dB")


def histogram(row: QuantizerRow) -> str:
    """Values in front of a quantizer, counts on a logarithmic scale, and its range shaded."""
    if row.range is None or row.edges is None or not any(row.histogram):
        return '<p class="note">The range is not constant: nothing to draw.</p>'
    start, end = row.edges
    top = math.log1p(max(row.histogram))
    step, floor = _PLOT_WIDTH / len(row.histogram), _PLOT_HEIGHT + 4
    heights = [_PLOT_HEIGHT * math.log1p(count) / top for count in row.histogram]
    bars = "".join(
        f"M{step * index:.1f} {floor}v{-height:.1f}h{step - 0.8:.1f}v{height:.1f}z"
        for index, height in enumerate(heights)
        if height
    )
    low, high = ((value - start) / (end - start) * _PLOT_WIDTH for value in row.range)
    parts = [
        f'<rect class="range" x="{low:.1f}" y="4" width="{high - low:.1f}" height="{_PLOT_HEIGHT}"/>',
        f'<path class="bars" d="{bars}"/>',
        f'<line class="axis" x1="0" x2="{_PLOT_WIDTH}" y1="{floor}" y2="{floor}"/>',
        *(f'<line class="edge" x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{floor}"/>' for x in (low, high)),
        *(
            f'<text class="edge-label" x="{x:.1f}" y="{floor + 14}" text-anchor="middle">{value:.3g}</text>'
            for x, value in zip((low, high), row.range, strict=True)
        ),
    ]
    return _svg(_PLOT_WIDTH, _PLOT_HEIGHT + 22, parts, f"Histogram of {row.role} with the quantizer's range")


def strip(output: OutputRow) -> str:
    """A bar for each sample, the worst one marked; at most as many as there is room for, in groups by their worst."""
    values = [value for value in output.samples if value is not None]
    if len(values) < 2:
        return ""
    size = math.ceil(len(values) / (_STRIP_WIDTH // 3))
    groups = [min(values[start : start + size]) for start in range(0, len(values), size)]
    top, worst = max(*groups, 1e-9), min(groups)
    step = min(_STRIP_WIDTH / len(groups), 26)
    parts = [f'<line class="axis" x1="0" x2="{step * len(groups):.1f}" y1="{_STRIP_HEIGHT}" y2="{_STRIP_HEIGHT}"/>']
    for index, value in enumerate(groups):
        height = max(_STRIP_HEIGHT * max(value, 0.0) / top, 1.0)
        kind = "worst" if value == worst else "bars"
        box = f'x="{step * index:.1f}" y="{_STRIP_HEIGHT - height:.1f}" width="{step - 1:.1f}" height="{height:.1f}"'
        parts.append(f'<rect class="{kind}" {box}><title>{_value(output, value)}</title></rect>')
    return _svg(_STRIP_WIDTH, _STRIP_HEIGHT + 2, parts, "Samples in order, the worst marked")


def _value(output: OutputRow, value: float) -> str:
    return f"{value:.2%} equal" if output.equal is not None else f"{decibels(value)} dB"


def _svg(width: float, height: float, parts: Sequence[str], label: str) -> str:
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{text(label)}">{"".join(parts)}</svg>'
