"""The steps of docs/torch.md, executed as they are written, one after the other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

for name, reason in (("torch", "torch"), ("onnxscript", "torch's exporter"), ("timm", "the example's model")):
    pytest.importorskip(name, reason=f"needs {reason}: pip install attnquant[torch] timm")

from attnquant.recognition import recognize  # noqa: E402

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "torch.md").read_text(encoding="utf-8")
STEPS = TEXT.partition("step by step\n")[2].partition("\n## ")[0]
CODE = re.findall(r"^```python\n(.*?)^```$", STEPS, re.MULTILINE | re.DOTALL)


def test_steps(tmp_path: Path) -> None:
    assert len(CODE) == 3
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(CODE)], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("ai.onnx::Attention@23 3 ()" in line for line in lines) == 2
    assert "9 of 9 linears in int8" in lines
    assert float(lines[-1].rpartition(" ")[2]) > 20
    assert len(recognize(tmp_path / "vit.int8.onnx").sites) == 2
