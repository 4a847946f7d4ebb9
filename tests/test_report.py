"""Reports: what each rendering says, against text and JSON written by hand."""

import json
from dataclasses import replace

import pytest

from attnquant.account import (
    Account,
    Linears,
    Quantizer,
    SiteRow,
    account_of_recognition,
    account_of_setup,
    as_json,
    quantization_notes,
)
from attnquant.placement import QuantizationPoint, QuantizerSetup, Skipped
from attnquant.report import cell, plain, render
from attnquant.roles import PortRole
from attnquant.site import DECOMPOSED, AttentionSite, NearMiss, Port, Recognition
from attnquant.terminal import Terminal

VERSIONS = {"attnquant": "0.1.0", "nncf": "3.4.0"}
INT8 = Quantizer(dtype="int8", granularity="tensor", symmetric=True)

OPERATOR = AttentionSite(
    id="/attn",
    form="ai.onnx::Attention@23",
    node="attn",
    nodes=("attn",),
    ports={
        PortRole.QUERY: Port(node="attn", index=0, tensor="q"),
        PortRole.KEY: Port(node="attn", index=1, tensor="k"),
        PortRole.VALUE: Port(node="attn", index=2, tensor="v"),
        PortRole.CONTEXT: Port(node="attn", index=0, tensor="y"),
    },
    kind="self",
    q_heads=12,
    kv_heads=4,
    qk_head_dim=64,
    v_head_dim=32,
    scale=0.125,
    causal=True,
    window=(-1, 0),
    softcap=0.0,
    sinks=False,
)
UNKNOWN = AttentionSite(
    id="/layer/pv", form=DECOMPOSED, node="pv", nodes=("qk", "softmax", "pv"),
    traits=("talking heads",),
    ports={PortRole.QUERY: Port(node="qk", index=0, tensor="a"), PortRole.KEY: Port(node="qk", index=1, tensor="b")},
)  # fmt: skip
NEAR = NearMiss(nodes=("softmax_1", "matmul_9"), reason="the product after the softmax has a constant operand", progress=2)
FAR = NearMiss(nodes=("softmax_0",), reason="no product in front of the softmax", progress=1)


def point(site: str, role: PortRole, *, note: str = "") -> QuantizationPoint:
    return QuantizationPoint(
        site=site, role=role, node="n", index=0, tensor="t", dtype="int8", symmetric=True, granularity="tensor", note=note
    )


def account(**changes: object) -> Account:
    rows = (
        SiteRow(site=OPERATOR, status="quantized", quantized={PortRole.QUERY: INT8, PortRole.KEY: INT8}),
        SiteRow(site=UNKNOWN, status="skipped", reasons=("inside control flow",)),
    )
    base = Account(model="m.onnx", rows=rows, near_misses=(FAR, NEAR), target="onnxruntime-cpu", versions=VERSIONS)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_json_is_as_published() -> None:
    linears = Linears(int8=3, total=4, exceptions=("head: float by the recipe",))
    document = json.loads(render(account(linears=linears, unplanned=("Q/DQ on mask",)), "json"))
    assert document == {
        "model": "m.onnx",
        "versions": VERSIONS,
        "target": "onnxruntime-cpu",
        "sites": [
            {
                "id": "/attn",
                "form": "ai.onnx::Attention@23",
                "kind": "self",
                "traits": [],
                "past": "none",
                "node": "attn",
                "heads": {"q_heads": 12, "kv_heads": 4, "kv_repeat": None, "qk_head_dim": 64, "v_head_dim": 32},
                "scale": 0.125,
                "causal": True,
                "window": [-1, 0],
                "softcap": 0.0,
                "sinks": False,
                "ports": {
                    "query": {"tensor": "q", "quantized": {"dtype": "int8", "granularity": "tensor", "symmetric": True}},
                    "key": {"tensor": "k", "quantized": {"dtype": "int8", "granularity": "tensor", "symmetric": True}},
                    "value": {"tensor": "v", "quantized": None},
                    "context": {"tensor": "y", "quantized": None},
                },
                "status": "quantized",
                "reasons": [],
            },
            {
                "id": "/layer/pv",
                "form": "decomposed",
                "kind": None,
                "traits": ["talking heads"],
                "past": "none",
                "node": "pv",
                "heads": {"q_heads": None, "kv_heads": None, "kv_repeat": None, "qk_head_dim": None, "v_head_dim": None},
                "scale": None,
                "causal": None,
                "window": None,
                "softcap": None,
                "sinks": None,
                "ports": {"query": {"tensor": "a", "quantized": None}, "key": {"tensor": "b", "quantized": None}},
                "status": "skipped",
                "reasons": ["inside control flow"],
            },
        ],
        "near_misses": [
            {"nodes": ["softmax_1", "matmul_9"], "reason": "the product after the softmax has a constant operand"},
            {"nodes": ["softmax_0"], "reason": "no product in front of the softmax"},
        ],
        "linears": {"int8": 3, "total": 4, "exceptions": ["head: float by the recipe"]},
        "unplanned": ["Q/DQ on mask"],
        "notes": [],
        "gate": None,
    }


def test_json_has_no_numbers_that_json_lacks() -> None:
    site = replace(OPERATOR, scale=float("nan"), softcap=float("inf"))
    sites = as_json(account(rows=(SiteRow(site=site, status="found"),)))["sites"]
    assert (sites[0]["scale"], sites[0]["softcap"]) == (None, None)
    render(account(rows=(SiteRow(site=site, status="found"),)), "json")


def test_table() -> None:
    lines = [" ".join(line.split()) for line in render(account(), "rich").splitlines()]
    assert lines[0] == "m.onnx: 2 attentions: 1 quantized, 1 skipped; target onnxruntime-cpu"
    assert "attention form kind heads scale Q K V status" in lines
    assert "/attn Attention@23 self 12/4 x 64/32 0.125 int8 int8 float quantized" in lines
    assert "/layer/pv decomposed ?, talking heads ? ? float float float skipped 1" in lines
    assert "1 inside control flow" in lines


def test_inspect_shows_no_columns_of_a_quantization() -> None:
    text = render(Recognition(sites=(OPERATOR,), near_misses=()), "rich")
    assert "1 attention" in text
    assert "status" not in text
    assert "float" not in text


def test_past_has_a_column_where_there_is_one() -> None:
    rows = (SiteRow(site=replace(OPERATOR, past="inner"), status="found"),)
    assert " past" in render(account(rows=rows)).splitlines()[2]
    assert " past" not in render(account()).splitlines()[2]


def test_the_best_near_miss_is_shown() -> None:
    text = render(account(rows=()), "rich")
    assert "no attention" in text
    assert "the product after the softmax has a constant operand (softmax_1, matmul_9); 1 more" in text
    assert FAR.reason not in text


def test_markdown() -> None:
    text = render(account(linears=Linears(int8=3, total=4, exceptions=("head|x: kept",))), "markdown")
    lines = text.splitlines()
    assert lines[0] == "### `m.onnx`"
    assert "| attention | form | kind | heads | scale | Q | K | V | status | why |" in lines
    assert "| `/attn` | Attention@23 | self | 12/4 x 64/32 | 0.125 | int8 | int8 | float | quantized |  |" in lines
    other = "| `/layer/pv` | decomposed | ?, talking heads | ? | ? | float | float | float | skipped | inside control flow |"
    assert other in lines
    assert "- Linears: 3 of 4 int8." in lines
    assert "- float: head\\|x: kept" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {11}


@pytest.mark.parametrize("format", ["rich", "markdown"])
def test_names_of_a_model_are_only_text(format: str) -> None:
    """Escape sequences, rich markup, table bars and line breaks in node names must not take effect."""
    evil = "a\x1b[31m\nb[bold]c[/bold]|`d`\u202e"
    site = replace(OPERATOR, id=evil)
    text = render(account(rows=(SiteRow(site=site, status="violates", reasons=(evil,)),)), format)  # type: ignore[arg-type]
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "a\\x1b[31m\\nb[bold]c[/bold]" in text.replace("\\\\", "\\").replace("\\[", "[").replace("\\]", "]")
    if format == "markdown":
        (row,) = (line for line in text.splitlines() if "violates |" in line)
        assert row.replace("\\|", "").count("|") == 11


def test_plain_keeps_printable_text() -> None:
    assert plain("/blöcke.0/attn MatMul") == "/blöcke.0/attn MatMul"
    assert plain("a\tb\x00") == "a\\tb\\x00"


def test_no_line_is_broken_in_a_file_and_none_is_too_long_in_a_narrow_terminal() -> None:
    site = replace(OPERATOR, id="/encoder" * 30)
    rows = (SiteRow(site=site, status="quantized"),)
    assert "/encoder" * 30 in render(account(rows=rows))
    for width in (30, 60, 100):
        text = render(account(rows=rows), terminal=Terminal(width=width))
        assert max(map(len, text.splitlines())) <= width
        assert "Attention@23" in text


def test_a_narrow_terminal_gets_paragraphs() -> None:
    text = render(account(), terminal=Terminal(width=60))
    assert "/attn\n  form Attention@23, kind self, heads 12/4 x 64/32, scale" in text
    assert "1 inside control flow" in text


def test_colour_and_unicode_only_where_wanted() -> None:
    assert "\x1b[" in render(account(), terminal=Terminal(width=120, colour=True))
    assert "\x1b" not in render(account(), terminal=Terminal(width=120))
    assert render(account(), terminal=Terminal(unicode=False)).isascii()


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'xml'"):
        render(account(), "xml")  # type: ignore[arg-type]


def test_account_of_a_setup() -> None:
    setup = QuantizerSetup(
        points=(point("/attn", PortRole.QUERY, note="before RoPE"),),
        skipped=(
            Skipped(site="/attn", role=PortRole.KEY, reason="constant"),
            Skipped(site="/attn", role=PortRole.VALUE, reason="float by the recipe"),
            Skipped(site="/layer/pv", role=PortRole.QUERY, reason="inside control flow"),
            Skipped(site="/layer/pv", role=PortRole.KEY, reason="inside control flow"),
        ),
        target="openvino",
    )
    made = account_of_setup(Recognition(sites=(OPERATOR, UNKNOWN), near_misses=(NEAR,)), setup, model="m.onnx")
    first, second = made.rows
    assert (first.status, first.reasons) == ("quantized", ("key float: constant", "query: before RoPE"))
    assert first.quantized == {PortRole.QUERY: INT8}
    assert (second.status, second.reasons, second.quantized) == ("skipped", ("inside control flow",), {})
    assert (made.target, made.near_misses, made.notes) == ("openvino", (NEAR,), ())


def test_account_of_a_recognition() -> None:
    made = account_of_recognition(Recognition(sites=(OPERATOR,), near_misses=(NEAR,)), model="m.onnx")
    assert [row.status for row in made.rows] == ["found"]
    assert made.linears is None
    assert made.versions["attnquant"]


def test_the_target_is_told_what_it_executes() -> None:
    both = " ".join(quantization_notes("onnxruntime-cpu@1.31.1", [OPERATOR, UNKNOWN]))
    assert "float kernels" in both
    assert "int8 MatMul" in both
    assert "int8 MatMul" not in " ".join(quantization_notes("onnxruntime-cpu", [OPERATOR]))
    assert "float kernels" not in " ".join(quantization_notes("onnxruntime-cpu", [UNKNOWN]))
    assert quantization_notes("openvino", [OPERATOR]) == ()
    assert "No attention" in quantization_notes("openvino", [])[0]


def test_heads_are_never_guessed() -> None:
    row = SiteRow(site=replace(UNKNOWN, q_heads=8), status="found")
    assert cell(row, "heads") == "8/? x ?"
    row = SiteRow(site=replace(OPERATOR, kv_heads=12, kv_repeat=3, v_head_dim=64), status="found")
    assert cell(row, "heads") == "12 x 64 (KV repeated 3x)"
