"""attnquant fuse and expand on the command line: JSON, exit codes, files that are written whole or not at all."""

import json
from pathlib import Path

import pytest
from corpora import HERE

from attnquant import cli, recognize
from attnquant.model import load

Capture = pytest.CaptureFixture[str]
DECODER = HERE / "corpus" / "llama_past_sdpa-dynamonoopt-18.onnx"
DECODER_DATA = HERE / "corpus" / "feeds" / "llama_past_sdpa.npz"
WITHOUT = HERE / "corpus" / "neg_classifier-ts-17.onnx"


def test_command_fuses_and_expands(tmp_path: Path, capsys: Capture) -> None:
    """There and back, each in JSON, each compared with the model by running both."""
    fused, plain = tmp_path / "fused.onnx", tmp_path / "plain.onnx"
    before = DECODER.read_bytes()
    arguments = [str(DECODER), "-o", str(fused), "--to", "com.microsoft::GroupQueryAttention", "--data", str(DECODER_DATA)]
    assert cli.main(["fuse", *arguments, "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == str(DECODER)
    assert [sorted(site) for site in report["sites"]] == [["id", "node", "reasons", "status", "tensors"]] * 2
    assert [site["id"] for site in report["sites"]] == [site.id for site in recognize(DECODER).sites]
    note = "several new tokens behind a cache run at batch 1 only (runtime)"
    assert {(site["status"], *site["reasons"]) for site in report["sites"]} == {("fused", note)}
    assert [site.form for site in recognize(fused).sites] == ["com.microsoft::GroupQueryAttention@1"] * 2
    assert cli.main(["expand", str(fused), "-o", str(plain), "--data", str(DECODER_DATA), "--format", "json"]) == 0
    assert {site["status"] for site in json.loads(capsys.readouterr().out)["sites"]} == {"expanded"}
    assert {node.domain for node in load(plain).graph} == {""}
    assert DECODER.read_bytes() == before


@pytest.mark.parametrize("form", ["rich", "markdown"])
def test_command_renders_refusals_and_writes_nothing_where_all_are_refused(
    form: str, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.onnx"
    assert cli.main(["expand", str(DECODER), "-o", str(out), "--format", form]) == 2
    shown = capsys.readouterr()
    assert "0 attentions" in shown.out
    assert "no attention was found" in shown.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--to", "com.microsoft::FlashAttention"], 1, "expected one of ai.onnx::Attention@23"),
        (["--to", "ai.onnx::Attention@25"], 1, "no kernel for Attention of opset 25"),
        (["--to", "Attention"], 1, "expected one of"),
        ([], 1, "--to"),
        (["--to", "ai.onnx::Attention@23", "--site", "/nobody"], 1, "'/nobody'"),
        (["--to", "ai.onnx::Attention@23", "--data", "missing.npz"], 1, "missing.npz"),
    ],
)
def test_command_says_what_is_wrong_and_writes_nothing(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: Capture
) -> None:
    out = tmp_path / "out.onnx"
    assert cli.main(["fuse", str(DECODER), "-o", str(out), *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert not out.exists()


@pytest.mark.parametrize("command", ["fuse", "expand"])
def test_command_never_writes_over_the_model(command: str, tmp_path: Path, capsys: Capture) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(DECODER.read_bytes())
    more = ["--to", "ai.onnx::Attention@23"] if command == "fuse" else []
    assert cli.main([command, str(model), "-o", str(model), *more]) == 1
    assert "never changed" in capsys.readouterr().err
    assert model.read_bytes() == DECODER.read_bytes()
    assert cli.main([command, str(model), *more]) == 1
    assert "-o FILE" in capsys.readouterr().err


def test_command_without_attention_is_2(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out.onnx"
    assert cli.main(["fuse", str(WITHOUT), "-o", str(out), "--to", "ai.onnx::Attention@23"]) == 2
    assert not out.exists()


def test_command_chooses_sites(tmp_path: Path, capsys: Capture) -> None:
    out, site = tmp_path / "out.onnx", recognize(DECODER).sites[1]
    arguments = [str(DECODER), "-o", str(out), "--to", "com.microsoft::GroupQueryAttention", "--site", site.id]
    assert cli.main(["fuse", *arguments, "--format", "json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)["sites"]] == [site.id]
    assert sorted(one.form for one in recognize(out).sites) == ["com.microsoft::GroupQueryAttention@1", "decomposed"]
