"""timm:NAME and hf:FOLDER on the command line: weights, preprocessing, and what is refused."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from attnquant import cli
from attnquant.cli import main
from attnquant.exporting import named

torch = pytest.importorskip("torch", reason="named models need torch: pip install attnquant[torch]")
timm = pytest.importorskip("timm", reason="timm: needs timm")
transformers = pytest.importorskip("transformers", reason="hf: needs transformers")

NAME = "test_vit"  # the smallest of timm's models, 160 pixels


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the model's six blocks: exporting all of them takes most of the time."""
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=2))


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *arguments: None)


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (40, 40, 3)).astype(np.uint8)
        image.fromarray(pixels).resize((180, 180)).save(folder / f"{index}.png")
    return folder


@pytest.mark.usefixtures("shallow")
def test_a_timm_model_with_weights_from_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(7)
    module = timm.create_model(NAME, pretrained=False).eval()
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    got = named.load_named(f"timm:{NAME}", weights=tmp_path / "w.safetensors")
    x = np.random.default_rng(0).standard_normal((3, 3, 160, 160)).astype(np.float32)
    from attnquant import runtime

    (ours,) = runtime.run(got.model, {"x": x}).values()
    with torch.no_grad():
        np.testing.assert_allclose(ours, module(torch.from_numpy(x)).numpy(), atol=1e-4)
    assert (got.mean, got.std) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.mark.usefixtures("shallow")
def test_quantizing_by_name(tmp_path: Path, pictures: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    seen = {}
    from attnquant import sources

    kept = sources.named_data
    monkeypatch.setattr(sources, "named_data", lambda *a, **options: seen.update(options) or kept(*a, **options))
    out = tmp_path / "q.onnx"
    asked = ["quantize", f"timm:{NAME}", "--random-weights", "--images", str(pictures), "-o", str(out), "--format", "json"]
    assert main(asked) == cli.OK
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == f"timm:{NAME}"
    assert len(report["sites"]) == 2
    assert {site["status"] for site in report["sites"]} == {"quantized"}
    (shape,) = [value.type.tensor_type.shape for value in onnx.load(out).graph.input]
    assert [dim.dim_value for dim in shape.dim][1:] == [3, 160, 160]
    assert (seen["mean"], seen["std"]) == ("0.5,0.5,0.5", "0.5,0.5,0.5")  # timm's, not ImageNet's


@pytest.mark.usefixtures("shallow")
def test_inspecting_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"timm:{NAME}", "--random-weights", "--format", "json"]) == cli.OK
    sites = json.loads(capsys.readouterr().out)["sites"]
    assert [site["form"] for site in sites] == ["ai.onnx::Attention@23"] * 2


@pytest.mark.usefixtures("no_cache")
def test_no_weights_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", f"timm:{NAME}"]) == cli.BAD_INPUT
    assert "nothing is downloaded. Give --weights FILE.safetensors, or --random-weights" in capsys.readouterr().err


def test_pickles_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("w.bin", "w.safetensors"):
        torch.save({"a": torch.zeros(1)}, tmp_path / name)
        assert main(["inspect", f"timm:{NAME}", "--weights", str(tmp_path / name)]) == cli.BAD_INPUT
        assert "expected a .safetensors file" in capsys.readouterr().err


def test_other_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*arguments: str) -> str:
        assert main(["inspect", *arguments]) == cli.BAD_INPUT
        return capsys.readouterr().err

    assert "has no model of that name. Close to it: " in said("timm:vit_gigantic_patch1", "--random-weights")
    assert "expected --weights or --random-weights, got both" in said(
        f"timm:{NAME}", "--random-weights", "--weights", str(tmp_path / "w.safetensors")
    )
    assert "are for timm: and hf: models" in said("model.onnx", "--random-weights")
    assert "expected a local folder with config.json" in said(f"hf:{tmp_path}")
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "needs timm, not installed here: run `pip install attnquant[torch]`" in said(f"timm:{NAME}", "--random-weights")


def bert(folder: Path) -> Path:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    from attnquant import recognize, runtime

    model = named.load_named(f"hf:{bert(tmp_path)}").model
    assert [site.form for site in recognize(model).sites] == ["ai.onnx::Attention@23"] * 2
    ids = np.random.default_rng(0).integers(0, 50, (3, 11))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    (ours,) = runtime.run(model, feeds).values()
    inner = transformers.BertModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()
    with torch.no_grad():
        theirs = inner(**{name: torch.from_numpy(array) for name, array in feeds.items()}).last_hidden_state.numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_code_in_a_folder_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    assert main(["inspect", f"hf:{tmp_path}", "--random-weights"]) == cli.BAD_INPUT
    assert "can't be built" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_weights_of_a_folder_are_safetensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert main(["inspect", f"hf:{tmp_path}"]) == cli.BAD_INPUT
    assert "--weights FILE.safetensors or --random-weights" in capsys.readouterr().err
