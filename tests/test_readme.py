"""The README's code blocks, executed as they are written; its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tinymodels

from attnquant import recipe
from attnquant.cli import main
from attnquant.recognition import recognize

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
LINES = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("attnquant ")]
OTHERS = [line for line in LINES if not line.startswith("attnquant ")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the README calls model.onnx and samples."""
    onnx.save(tinymodels.attention(length=8), tmp_path / "model.onnx")
    (tmp_path / "samples").mkdir()
    rng = np.random.default_rng(0)
    for index in range(3):
        sample = rng.standard_normal((1, 8, tinymodels.WIDTH)).astype(np.float32)
        np.savez(tmp_path / "samples" / f"{index}.npz", x=sample)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_language_is_covered() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh", "toml"}
    assert COMMANDS
    assert TEXT.count("```") == 2 * len(BLOCKS)


@pytest.mark.parametrize("code", [block for language, block in BLOCKS if language == "python"], ids=["nncf", "python"])
def test_python(code: str, folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (site,) = recognize(folder / "model.int8.onnx").sites
    assert site.form == "ai.onnx::Attention@23"
    assert sum(node.op_type == "QuantizeLinear" for node in onnx.load(folder / "model.int8.onnx").graph.node) >= 4


def test_commands(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in COMMANDS:
        assert main(shlex.split(line)[1:]) == 0, line
        assert capsys.readouterr().out, line
    assert (folder / "model.int8.onnx").is_file()


def test_other_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in OTHERS:
        words = shlex.split(line, comments=True)
        known = words[:2] == ["pip", "install"] or (words[0] == "make" and words[1] in targets)
        assert known, line


def test_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ((_, text),) = [block for block in BLOCKS if block[0] == "toml"]
    (folder / "recipe.toml").write_text(text)
    assert recipe.load(text).linears.keep_float == ("project_out",)
    asked = ["--recipe", "recipe.toml", "--data", "samples", "-o", "q.onnx", "--format", "markdown"]
    assert main(["quantize", "model.onnx", *asked]) == 0
    out = capsys.readouterr().out
    assert "| float | uint8 | float | quantized |" in out
    assert "Linears: 3 of 4 int8" in out


def test_links_lead_somewhere() -> None:
    local = [link for link in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in link]
    assert "docs/demo.png" in local
    assert not [link for link in local if not (ROOT / link).exists()]
