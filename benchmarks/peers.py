"""How each peer quantizes: one function (float file, calibration samples, target file) per row of the tables.

Every peer is used as its documentation says, with its defaults; what differs from them is in the row's description.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.metrics import Feeds

Quantize = Callable[[Path, Sequence[Feeds], Path], None]
Runtime = Literal["onnxruntime", "openvino"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One row: `needs` are the modules it imports, `packages` those whose versions are recorded."""

    name: str
    what: str
    needs: tuple[str, ...]
    packages: tuple[str, ...]
    quantize: Quantize
    runtime: Runtime = "onnxruntime"

    @property
    def suffix(self) -> str:
        """The ending of the file it writes."""
        return ".onnx" if self.runtime == "onnxruntime" else ".xml"


def _attnquant(source: Path, data: Sequence[Feeds], target: Path) -> None:
    from attnquant.quantization import quantize

    quantize(source, data, samples=len(data)).save(target)


def _attnquant_gate(source: Path, data: Sequence[Feeds], target: Path) -> None:
    from attnquant.quantization import quantize

    quantize(source, data, samples=len(data), gate=True).save(target)


def _nncf(source: Path, data: Sequence[Feeds], target: Path) -> None:
    import nncf
    import onnx

    quantized = nncf.quantize(
        onnx.load(source), nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(data)
    )
    onnx.save(quantized, target)


class _Reader:
    """onnxruntime's CalibrationDataReader: hands out one sample after the other, then None."""

    def __init__(self, data: Sequence[Feeds]) -> None:
        self._iterator: Iterator[Feeds] = iter(data)

    def get_next(self) -> Feeds | None:
        return next(self._iterator, None)


def _ort_prepared(source: Path, target: Path) -> Path:
    """onnxruntime's own advice: preprocess first. Its symbolic shape inference fails on some models; then without it."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_suffix(".prepared.onnx")
    try:
        quant_pre_process(str(source), str(prepared))
    except Exception:  # whatever it raises, the next best is its documented switch
        quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    return prepared


def _ort_static(source: Path, data: Sequence[Feeds], target: Path, **options: Any) -> None:
    from onnxruntime.quantization import QuantFormat, quantize_static

    prepared = _ort_prepared(source, target)
    try:
        quantize_static(
            str(prepared), str(target), _Reader(data), quant_format=QuantFormat.QDQ, per_channel=True, **options
        )
    finally:
        prepared.unlink(missing_ok=True)


def _ort_static_default(source: Path, data: Sequence[Feeds], target: Path) -> None:
    _ort_static(source, data, target)


def _ort_static_matmul(source: Path, data: Sequence[Feeds], target: Path) -> None:
    _ort_static(
        source, data, target, op_types_to_quantize=["MatMul", "Gemm"],
        extra_options={"MatMulConstBOnly": True, "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"]},
    )


def _ort_dynamic(source: Path, data: Sequence[Feeds], target: Path, **options: Any) -> None:
    from onnxruntime.quantization import quantize_dynamic

    prepared = _ort_prepared(source, target)
    try:
        quantize_dynamic(str(prepared), str(target), **options)
    finally:
        prepared.unlink(missing_ok=True)


def _ort_dynamic_default(source: Path, data: Sequence[Feeds], target: Path) -> None:
    _ort_dynamic(source, data, target)


def _ort_dynamic_linears(source: Path, data: Sequence[Feeds], target: Path) -> None:
    _ort_dynamic(source, data, target, per_channel=True, op_types_to_quantize=["MatMul", "Gemm"])


def _simplified(source: Path) -> Any:
    import onnx
    import onnxsim

    return onnxsim.simplify(onnx.load(source))[0]


def _onnxsim(source: Path, data: Sequence[Feeds], target: Path) -> None:
    import onnx

    onnx.save(_simplified(source), target)


def _onnxsim_dynamic(source: Path, data: Sequence[Feeds], target: Path) -> None:
    import onnx
    from onnxsim import quantize_dynamic

    quantized = quantize_dynamic(_simplified(source))
    onnx.save(quantized[0] if isinstance(quantized, tuple) else quantized, target)


def _onnxsim_ort_dynamic(source: Path, data: Sequence[Feeds], target: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(_simplified(source), str(target), per_channel=True, op_types_to_quantize=["MatMul", "Gemm"])


def _openvino(source: Path, data: Sequence[Feeds], target: Path) -> None:
    import openvino

    openvino.save_model(openvino.convert_model(source), target, compress_to_fp16=False)


def _openvino_nncf(source: Path, data: Sequence[Feeds], target: Path) -> None:
    import nncf
    import openvino

    quantized = nncf.quantize(
        openvino.convert_model(source), nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(data)
    )
    openvino.save_model(quantized, target)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            name="attnquant", what="attnquant.quantize, default recipe", quantize=_attnquant,
            needs=("attnquant.quantization", "nncf"), packages=("attnquant", "nncf"),
        ),
        Peer(
            name="attnquant-gate", what="the same with --gate", quantize=_attnquant_gate,
            needs=("attnquant.quantization", "nncf"), packages=("attnquant", "nncf"),
        ),
        Peer(
            name="nncf", what="nncf.quantize, model_type=TRANSFORMER", quantize=_nncf,
            needs=("nncf",), packages=("nncf",),
        ),
        Peer(
            name="ort-static", what="quantize_static, QDQ, per channel", quantize=_ort_static_default,
            needs=("onnxruntime.quantization",), packages=("onnxruntime",),
        ),
        Peer(
            name="ort-static-linears", what="quantize_static, weights and inputs of linears only",
            quantize=_ort_static_matmul, needs=("onnxruntime.quantization",), packages=("onnxruntime",),
        ),
        Peer(
            name="ort-dynamic", what="quantize_dynamic", quantize=_ort_dynamic_default,
            needs=("onnxruntime.quantization",), packages=("onnxruntime",),
        ),
        Peer(
            name="ort-dynamic-linears", what="quantize_dynamic, linears only, per channel", quantize=_ort_dynamic_linears,
            needs=("onnxruntime.quantization",), packages=("onnxruntime",),
        ),
        Peer(
            name="onnxsim", what="onnxsim.simplify, still float", quantize=_onnxsim,
            needs=("onnxsim",), packages=("onnxsim",),
        ),
        Peer(
            name="onnxsim-dynamic", what="onnxsim.simplify, then its quantize_dynamic", quantize=_onnxsim_dynamic,
            needs=("onnxsim",), packages=("onnxsim",),
        ),
        Peer(
            name="onnxsim-ort-dynamic", what="onnxsim.simplify, then quantize_dynamic of linears, per channel",
            quantize=_onnxsim_ort_dynamic, needs=("onnxsim", "onnxruntime.quantization"),
            packages=("onnxsim", "onnxruntime"),
        ),
        Peer(
            name="openvino", what="another runtime, float", quantize=_openvino, runtime="openvino",
            needs=("openvino",), packages=("openvino",),
        ),
        Peer(
            name="openvino-nncf", what="another runtime, nncf.quantize on its model, TRANSFORMER", quantize=_openvino_nncf,
            runtime="openvino", needs=("openvino", "nncf"), packages=("openvino", "nncf"),
        ),
    )
}
