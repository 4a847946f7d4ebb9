"""Models that come with quantizers, of ours or of another tool: kept, completed, or refused where nothing is left to do."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tinymodels
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static

import attnquant
from attnquant.errors import ModelError
from attnquant.model import to_proto

RNG = np.random.default_rng(7)
DATA = [{"x": RNG.standard_normal((1, length, tinymodels.WIDTH)).astype(np.float32)} for length in (6, 9, 7)]
ALL_FLOAT = "".join(f'[roles.{role}]\ndtype = "none"\n' for role in ("query", "key"))


def written_out() -> onnx.ModelProto:
    """`tinymodels.attention` in MatMul and Softmax: q, k and v of one head."""
    nodes = [helper.make_node("MatMul", ["x", f"w_{role}"], [role], name=f"project_{role}") for role in "qkv"]
    nodes += [
        helper.make_node("Transpose", ["k"], ["kt"], name="turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"], name="scores"),
        helper.make_node("Softmax", ["scores"], ["p"], name="softmax", axis=-1),
        helper.make_node("MatMul", ["p", "v"], ["a"], name="attention"),
        helper.make_node("MatMul", ["a", "w_o"], ["y"], name="project_out"),
    ]
    model = tinymodels.attention(opset=18)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def ours(recipe: str) -> Callable[[Path], onnx.ModelProto]:
    return lambda folder: to_proto(attnquant.quantize(written_out(), DATA, recipe=recipe).model)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """What the runtime's own tool calibrates with."""

    def __init__(self) -> None:
        self.samples: Iterator[dict[str, np.ndarray]] = iter(DATA)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.samples, None)


def runtimes(form: QuantFormat | None, *excluded: str) -> Callable[[Path], onnx.ModelProto]:
    """Quantized by ONNX Runtime's own tool: with Q/DQ, with integer operators, or dynamically (None)."""
    return lambda folder: by_runtime(folder, form, list(excluded))


def by_runtime(folder: Path, form: QuantFormat | None, excluded: list[str]) -> onnx.ModelProto:
    source, result = folder / "float.onnx", folder / "quantized.onnx"
    onnx.save(written_out(), source)
    logging.disable(logging.WARNING)
    try:
        if form is None:
            quantize_dynamic(source, result)
        else:
            quantize_static(
                source, result, Reader(), quant_format=form, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
                nodes_to_exclude=excluded,
                extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"] if excluded else []},
            )  # fmt: skip
    finally:
        logging.disable(logging.NOTSET)
    return onnx.load(result)


PARTS: dict[str, tuple[Callable[[Path], onnx.ModelProto], dict[str, str], int]] = {
    "linears by attnquant": (ours(ALL_FLOAT), {}, 2),
    "q by attnquant": (ours('roles.key.dtype = "none"\nlinears.keep_float = ["_q"]'), {"query": "quantized already"}, 1),
    "attention by attnquant": (
        ours('linears.keep_float = ["project"]'), {"query": "quantized already", "key": "quantized already"}, 0
    ),
    "linears by the runtime": (runtimes(QuantFormat.QDQ, "scores", "softmax", "attention", "turn"), {}, 2),
    "integers by the runtime": (runtimes(None, "project_q"), {}, 2),
}  # fmt: skip
"""{kind: (the model, roles that it quantizes itself, roles that are quantized now)}."""


@pytest.mark.parametrize("kind", PARTS)
def test_what_is_quantized_stays_and_the_rest_is_quantized(kind: str, tmp_path: Path) -> None:
    make, kept, added = PARTS[kind]
    given = make(tmp_path)
    result = attnquant.quantize(given, DATA)
    assert {row.role: row.reason for row in result.setup.skipped if row.role in ("query", "key")} == kept
    assert len(result.setup.points) == added
    made = to_proto(result.model)
    report = attnquant.check(made)
    assert report.ok
    assert {linear.reason for linear in report.linears} == {""}
    expected, got = tinymodels.run(written_out(), DATA[0])[0], tinymodels.run(made, DATA[0])[0]
    assert 10 * np.log10((expected**2).sum() / ((expected - got) ** 2).sum()) > 25


@pytest.mark.parametrize(
    "make",
    [ours("int8"), runtimes(QuantFormat.QDQ), runtimes(QuantFormat.QOperator)],
    ids=["ours", "Q/DQ", "integer operators"],
)
def test_a_quantized_model_is_refused(make: Callable[[Path], onnx.ModelProto], tmp_path: Path) -> None:
    given = make(tmp_path)
    with pytest.raises(ModelError, match="quantized already: expected an attention or a linear in float"):
        attnquant.quantize(given, DATA)


def test_three_passes(tmp_path: Path) -> None:
    """Names that a pass makes are free again for the next one."""
    model = ours('linears.keep_float = ["_q", "_k"]\n' + ALL_FLOAT)(tmp_path)
    model = to_proto(attnquant.quantize(model, DATA, recipe='roles.key.dtype = "none"\nlinears.keep_float = ["_k"]').model)
    model = to_proto(attnquant.quantize(model, DATA).model)
    assert attnquant.check(model).ok
    with pytest.raises(ModelError, match="quantized already"):
        attnquant.quantize(model, DATA)
