"""The HTML report: valid, whole in itself, and nothing of a hostile model gets out of its quotes."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest

from attnquant.measures import CEILING
from attnquant.report import render
from attnquant.roles import PortRole
from attnquant.verification import OutputRow, VerificationReport, charts, verify
from tests.layeredmodels import DECOMPOSED, LAYERS, OPERATOR, encoder, samples
from tests.test_verification_faults import TARGET, Planted, quarter_scale

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DATA = samples(3, seed=7)
HOSTILE = "\"'><script>alert(1)</script><img src=http://x/ onerror=a()>&amp;\u202e\x00\x07"
VOID = {"meta", "link", "br", "img", "hr", "input"}
ALLOWED = {
    "html", "head", "meta", "link", "title", "style", "body", "main", "header", "h1", "h2", "h3", "span", "div", "code", "b",
    "p", "ul", "li", "table", "tr", "th", "td", "details", "summary", "footer", "svg", "rect", "text", "path", "line",
}  # fmt: skip


class Page(HTMLParser):
    """Elements and text, with every tag closed in order."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def hostile(model: onnx.ModelProto) -> onnx.ModelProto:
    """Names of an output, of the attentions and of their quantizers that want out of the page."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        if node.name.endswith(".attn.context"):
            node.name += HOSTILE.replace("\x00", "")
        node.output[:] = [HOSTILE.replace("\x00", "") if name == "logits" else name for name in node.output]
    copy.graph.output[1].name = HOSTILE.replace("\x00", "")
    return copy


@pytest.fixture(scope="module", params=["clean", "hostile"])
def report(request: pytest.FixtureRequest) -> VerificationReport:
    planted = Planted(OPERATOR, 1)
    quarter_scale(planted)
    reference, model = encoder(OPERATOR), planted.model
    if request.param == "hostile":
        reference, model = hostile(reference), hostile(model)
        del model.metadata_props[:]
    return verify(reference, model, DATA, target=TARGET, names=[HOSTILE] * 3)


def test_valid_and_whole(report: VerificationReport) -> None:
    content = render(report, "html")
    page = Page(content)
    assert content.startswith("<!DOCTYPE html>\n")
    assert set(page.tags) <= ALLOWED
    assert page.tags.count("main") == 1
    assert not [row for row in page.attributes if row[1].startswith("on") or row[1] in ("src", "srcset", "action", "style")]
    assert [value for _, name, value in page.attributes if name == "href"] == ["data:,"]
    sheet = content.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in sheet
    assert "@import" not in sheet
    assert "default-src 'none'" in content
    for picture in re.findall(r"<svg.*?</svg>", content, re.DOTALL):
        ElementTree.fromstring(picture)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the PATH")
def test_a_browser_opens_it_without_complaint(report: VerificationReport, tmp_path: Path) -> None:
    """The second page is the control: what a browser complains of is seen here."""
    pages = {"report": render(report, "html"), "control": "<script>console.error('control')</script>"}
    said = {}
    for name, content in pages.items():
        (tmp_path / f"{name}.html").write_text(content, encoding="utf-8")
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-sync", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom",
            f"file://{tmp_path / name}.html",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        said[name] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(said["control"]) == 1
    assert said["report"] == []


def test_everything_is_told(report: VerificationReport) -> None:
    page = Page(render(report, "html"))
    assert page.tags.count("svg") == 1 + 1 + 2 * LAYERS + 2  # heat map, legend, Q and K of each layer, samples of 2 outputs
    for site in report.providers["cpu"].sites:
        assert page.text.count(charts.plain(site.id)) >= 3
    (suspect,) = report.suspects
    assert "layer1" in suspect.id
    for reason in suspect.reasons:
        assert charts.plain(reason) in page.text
    for words in ("failed", "Error heat map", "Worst samples", "onnxruntime", *report.versions.values()):
        assert words in page.text


def test_names_stay_text(report: VerificationReport) -> None:
    """Of samples in any case; in the hostile model of nodes and outputs too."""
    content = render(report, "html")
    assert "<script" not in content
    assert "<img" not in content
    assert all(char.isprintable() or char == "\n" for char in content)
    for format in ("rich", "markdown"):
        text = render(report, format)
        assert all(char.isprintable() or char == "\n" for char in text)
    assert not re.search(r"(?<!\\)<script", re.sub(r"`[^`]*`", "", render(report, "markdown")))


def test_the_heat_map_holds_every_number(report: VerificationReport) -> None:
    picture = ElementTree.fromstring(charts.heat_map(report.providers["cpu"].sites))
    found = [node.text for node in picture.iter() if node.get("class") in ("dark", "light")]
    expected = [
        f"{value:.1f}"
        for site in report.providers["cpu"].sites
        for value in (*(site.snr_db[role] for role in charts.SHORT), site.local_snr_db)
    ]
    assert found == expected


def test_colours_have_legible_numbers_on_them() -> None:
    """Contrast of at least 4.5 to 1 (WCAG 2.1, 1.4.3) of the text against the cell."""

    def luminance(colour: str) -> float:
        parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))

    for value in np.linspace(-CEILING, CEILING, 801):
        fill, ink = charts.colour(float(value))
        light, dark = sorted((luminance(fill), luminance("#000000" if ink == "dark" else "#ffffff")), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (value, fill, ink)


def test_the_histogram_shades_the_range() -> None:
    planted = Planted(DECOMPOSED, 0)
    site = verify(encoder(DECOMPOSED), planted.model, DATA, target=TARGET).providers["cpu"].sites[0]
    for row in site.quantizers:
        picture = ElementTree.fromstring(charts.histogram(row))
        (band,) = (node for node in picture.iter() if node.get("class") == "range")
        assert float(band.get("width")) == pytest.approx(320 / 1.5, abs=0.1)  # the range, and a quarter of it on each side
        assert row.range is not None
        assert [node.text for node in picture.iter() if node.get("class") == "edge-label"] == [
            f"{end:.3g}" for end in row.range
        ]


def test_many_samples_fit() -> None:
    row = OutputRow(name="y", samples=tuple(float(20 + index % 7) for index in range(5000)), worst=0)
    picture = ElementTree.fromstring(charts.strip(row))
    assert len(list(picture)) <= 142


def test_roles_are_in_order() -> None:
    assert list(charts.SHORT) == [
        PortRole.QUERY, PortRole.KEY, PortRole.SCORES, PortRole.PROBABILITIES, PortRole.VALUE, PortRole.CONTEXT,
    ]  # fmt: skip
