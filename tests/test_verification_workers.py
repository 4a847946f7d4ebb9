"""What each attention costs, measured by workers: as by one process, and a lost worker costs its attentions alone."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnquant import executors
from attnquant.cli import main
from attnquant.executors import Done, Workers
from attnquant.verification import VerificationReport, attribution, verify
from tests import executortasks
from tests.layeredmodels import LAYERS, OPERATOR, encoder, samples
from tests.test_verification_faults import TARGET, quantized

DATA = samples(3, seed=7)


def report(workers: Workers | None = None) -> VerificationReport:
    return verify(encoder(OPERATOR), quantized(OPERATOR), DATA, target=TARGET, workers=workers)


def gains(found: VerificationReport) -> dict[str, float | None]:
    return {site.id: site.attribution_db for site in found.providers["cpu"].sites}


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_who_measures_changes_nothing(executor: str) -> None:
    if executor == "ray":
        pytest.importorskip("ray", reason="Ray is not installed (pip install attnquant[ray])")
    alone, spread = report(), report(Workers(executor=executor, number=2))
    assert len(gains(alone)) == LAYERS
    assert any(gains(alone).values())
    assert spread == alone


def test_every_attention_is_in_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def here(function: Any, tasks: Any, **options: Any) -> Any:
        listed = list(tasks)
        asked.extend(chunk.sites for chunk in listed)
        assert (options["executor"], options["workers"]) == ("local", 3)
        return [Done(value=function(chunk)) for chunk in listed]

    monkeypatch.setattr(attribution, "run_tasks", here)
    found = gains(report(Workers(number=3)))
    assert [site for sites in asked for site in sites] == list(found)
    assert max(map(len, asked)) == attribution.CHUNK < LAYERS


def test_a_lost_worker_costs_its_attentions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "CHUNK", 1)

    def fragile(function: Any, tasks: Any, **options: Any) -> Any:
        return executors.run_tasks(executortasks.measured_but_one, tasks, **options)

    expected = gains(report())
    monkeypatch.setattr(attribution, "run_tasks", fragile)
    found = report(Workers(number=2))
    (lost,) = [site for site in expected if "layer2" in site]
    assert gains(found) == {**expected, lost: None}
    (note,) = [note for note in found.notes if "is not known" in note]
    assert note.startswith(f"cpu: what {lost!r} cost is not known: ")
    assert "worker" in note


def test_the_command_line_names_who_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, model in (("float", encoder(OPERATOR)), ("int8", quantized(OPERATOR))):
        onnx.save(model, tmp_path / f"{name}.onnx")
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "0.npz", **DATA[0])
    words = ["verify", *(str(tmp_path / f"{name}.onnx") for name in ("float", "int8")), "--data", str(tmp_path / "data")]
    assert main([*words, "--format", "json", "--target", TARGET, "--executor", "local", "--workers", "0"]) == 0
    assert main([*words, "--executor", "slurm"]) == 1
    assert "expected one of local, ray, got 'slurm'" in capsys.readouterr().err
