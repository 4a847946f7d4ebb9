"""The examples run and show what they say; the demo's arithmetic and its picture without its model."""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

import attnquant
from attnquant import runtime
from attnquant.rewrite import fuse
from attnquant.roles import PortRole
from examples import generate_quantized_cache, quantize_attention_operator, quantize_seq2seq
from tests import seq2seqmodels
from tests.layeredmodels import DECOMPOSED, HEAD, HEADS, VOCABULARY, decoder, tokens
from tests.tinymodels import run

ROOT = Path(__file__).resolve().parents[1]


def test_stock_nncf_quantizes_v_and_the_extended_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    reports = quantize_attention_operator.main()
    (stock,), (extended,) = reports["stock"].rows, reports["extended"].rows
    assert (stock.status, extended.status) == ("violates", "quantized")
    assert PortRole.VALUE in stock.quantized
    assert extended.quantized.keys() == {PortRole.QUERY, PortRole.KEY}
    assert reports["extended"].ok
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("extended against float:")
    assert float(last.split()[3]) > 25


@pytest.mark.parametrize(("library", "least"), [("timm", 20), ("transformers", 20)])
def test_modules_of_a_library(library: str, least: float, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("torch", "onnxscript", library):
        pytest.importorskip(package, reason=f"the example needs {package}: pip install attnquant[torch]")
    snr = importlib.import_module(f"examples.quantize_{library}").main()
    out = capsys.readouterr().out
    assert snr > least
    assert ": 2 attentions: 2 quantized" in out
    assert out.strip().endswith(f"{snr:.1f} dB SNR")


def test_the_demo_says_how_it_is_used() -> None:
    pytest.importorskip("PIL", reason="the demo draws with Pillow")
    command = [sys.executable, "-m", "examples.dinov2_saliency", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--samples" in done.stdout


def test_the_map_of_colours_is_even_and_stays_in_its_range() -> None:
    pytest.importorskip("PIL", reason="the demo draws with Pillow")
    from examples.saliency_picture import coloured

    tile = coloured(np.array([[-1.0, 0.0, 0.5, 1.0, 2.0]], np.float32))
    assert tile.shape == (1, 5, 3)
    assert tile.dtype == np.uint8
    assert (tile[0, 0] == tile[0, 1]).all()
    assert (tile[0, 3] == tile[0, 4]).all()
    ramp = coloured(np.linspace(0, 1, 64, dtype=np.float32)[None])[0].astype(float) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(ramp) > 0).all()


def test_the_picture_has_every_tile_in_its_place(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="the demo draws with Pillow")
    from examples.saliency_picture import GAP, HEAD, MARGIN, TILE, Column, draw

    tiles = [np.full((TILE, TILE, 3), value, np.uint8) for value in (10, 60, 120, 200)]
    columns = [
        Column(title="a", detail="b", tiles=tiles[:2]),
        Column(title="c", detail="d", tiles=tiles[2:]),
    ]
    draw(columns, tmp_path / "new" / "p.png")
    with image.open(tmp_path / "new" / "p.png") as picture:
        assert picture.size == (2 * MARGIN + 2 * TILE + GAP, HEAD + 2 * TILE + GAP + 2 * MARGIN)
        for row in range(2):
            for column in range(2):
                middle = (MARGIN + column * (TILE + GAP) + TILE // 2, MARGIN + HEAD + row * (TILE + GAP) + TILE // 2)
                assert picture.convert("RGB").getpixel(middle) == (tiles[2 * column + row][0, 0, 0],) * 3


FIRST_FLOAT = 'extends = "llm-kv8"\n[kv_cache]\nkeep_float = ["layer0"]'


@pytest.mark.parametrize(
    ("recipe", "size"),
    [("llm-kv8", 4 * HEADS * HEAD), ("llm-kv4", 2 * HEADS * HEAD), (FIRST_FLOAT, 2 * HEADS * HEAD * (4 + 1))],
    ids=["int8", "int4", "first layer float"],
)
def test_generation_says_what_prefill_says(
    recipe: str, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token by token through the stored caches, against a whole prefill of the same model for every token."""
    data = [*tokens(40, past=0, new=9), *tokens(8, past=4, new=1)]
    result = attnquant.quantize(decoder(DECOMPOSED), data, recipe=recipe, target="onnxruntime-cpu@1.32.0")
    result.save(path := tmp_path / "kv.onnx")
    ids, empty = [7, 3, 30, 11], tokens(1, batch=1)[0]
    found = generate_quantized_cache.main([str(path), "--ids", *map(str, ids), "--tokens", "12"])
    cache = attnquant.kvcache.stored_cache(result.model.metadata_props)
    for token in found["ids"]:
        whole = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        logits = runtime.run(result.model, cache.store({**empty, **whole}))["logits"]
        assert logits.shape == (1, len(ids), VOCABULARY)
        assert int(logits[0, -1].argmax()) == token
        ids.append(token)
    assert len(set(found["ids"])) > 3, "a model that says one thing would be right without a cache"
    assert found["bytes"] == size
    assert capsys.readouterr().out.splitlines() == [" ".join(map(str, found["ids"])), f"{size} bytes of cache a token"]


def test_generation_in_one_buffer_says_the_same(tmp_path: Path) -> None:
    data = [*tokens(40, past=0, new=9), *tokens(8, past=4, new=1)]
    made = []
    for shared in (False, True):
        fused = fuse(decoder(DECOMPOSED), to="com.microsoft::GroupQueryAttention", shared_cache=shared).model
        path = tmp_path / f"{shared}.onnx"
        attnquant.quantize(fused, data, recipe="llm-kv8", target="onnxruntime-cpu@1.32.0").save(path)
        made.append(generate_quantized_cache.main([str(path), "--ids", "7", "3", "30", "11", "--tokens", "12"]))
        properties = {item.key for item in onnx.load(path).metadata_props}
        assert (generate_quantized_cache.SHARED in properties) == shared
    assert made[0] == made[1]


def test_generation_of_a_model_without_the_metadata_says_so(tmp_path: Path) -> None:
    path = tmp_path / "float.onnx"
    path.write_bytes(decoder(DECOMPOSED).SerializeToString())
    with pytest.raises(SystemExit, match=r"attnquant\.kv_cache.*llm-kv8"):
        generate_quantized_cache.main([str(path), "--ids", "1"])


def step_by_step(folder: Path, piece: dict[str, np.ndarray], count: int) -> list[int]:
    """Greedy generation by the names of the tiny models' tensors."""
    files = ("encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx")
    encoder, first, following = (str(folder / name) for name in files)
    mask = {"encoder_attention_mask": piece["attention_mask"]}
    (hidden,) = run(encoder, piece)
    logits, *made = run(first, {"input_ids": np.array([[1]]), "encoder_hidden_states": hidden, **mask})
    caches, tokens = dict(zip(seq2seqmodels.cache_names("past"), made, strict=True)), [1]
    while True:
        tokens.append(int(logits[0, -1].argmax()))
        if len(tokens) > count or tokens[-1] == 2:
            return tokens[1:]
        step = {"input_ids": np.array([tokens[-1:]]), "cache_position": np.array([len(tokens) - 1]), **mask}
        logits, *made = run(following, {**step, **caches})
        caches |= dict(zip(seq2seqmodels.cache_names("past", ("self",)), made, strict=True))


def test_an_encoder_decoder_model_is_quantized_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Float's tokens against the decoder given all tokens at once; int8's against a loop that knows the names."""
    paths = [tmp_path / name for name in ("e.onnx", "d.onnx", "p.onnx")]
    parts = seq2seqmodels.encoder(), seq2seqmodels.decoder(past=False), seq2seqmodels.decoder(past=True)
    for part, path in zip(parts, paths, strict=True):
        onnx.save(part, path)
    (tmp_path / "data").mkdir()
    for index, piece in enumerate(pieces := seq2seqmodels.pieces(16)):
        np.savez(tmp_path / "data" / f"{index:02}.npz", **piece)
    asked = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "int8"), "--start", "1", "--end", "2"]
    said = quantize_seq2seq.main([*map(str, paths), *asked, "--tokens", "12"])
    hidden = {"encoder_hidden_states": run(parts[0], pieces[0])[0], "encoder_attention_mask": pieces[0]["attention_mask"]}
    tokens = [1]
    while len(tokens) < 13 and tokens[-1] != 2:
        tokens.append(int(run(parts[1], {"input_ids": np.array([tokens]), **hidden})[0][0, -1].argmax()))
    assert said["float"] == tokens[1:]
    assert len(set(said["float"])) > 3
    assert said["int8"] == step_by_step(tmp_path / "int8", pieces[0], 12)
    lines = [line.partition(" bytes: ") for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [tail for _, _, tail in lines] == [" ".join(map(str, said[name])) for name in ("float", "int8")]
    sizes = [int(head.partition(",")[2].replace(",", "")) for head, _, _ in lines]
    assert sizes == [sum(path.stat().st_size for path in made) for made in (paths, (tmp_path / "int8").iterdir())]
