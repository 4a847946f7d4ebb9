"""Violations planted into models that onnxruntime, stock NNCF and attnquant quantized: each is named with its site."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import attnquant
from attnquant.check import CheckReport, check
from tests.test_check import CPU, DECOMPOSED, OPERATOR, _calibration, build

Edit = Callable[["Planted"], None]


class Planted:
    """A quantized model that is being damaged."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        self.core = next(node for node in self.graph.node if node.name == "n_context")

    def maker(self, tensor: str) -> onnx.NodeProto:
        return next(node for node in self.graph.node if tensor in node.output)

    def constant(self, name: str, array: np.ndarray) -> str:
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def put(self, node: onnx.NodeProto, before: onnx.NodeProto) -> onnx.NodeProto:
        self.graph.node.insert(list(self.graph.node).index(before), node)
        return next(made for made in self.graph.node if made.name == node.name)

    def pair(self, tensor: str, before: onnx.NodeProto) -> str:
        """Q/DQ behind `tensor`, in front of a node; the dequantized tensor."""
        scale, zero = self.constant("planted_s", np.float32(0.03)), self.constant("planted_z", np.uint8(128))
        self.put(helper.make_node("QuantizeLinear", [tensor, scale, zero], ["planted_q"], name="planted_q"), before)
        self.put(helper.make_node("DequantizeLinear", ["planted_q", scale, zero], ["planted"], name="planted_dq"), before)
        return "planted"

    def port(self, role: str) -> tuple[onnx.NodeProto, int]:
        """(node, index) of the edge at which a role enters."""
        if self.core.op_type == "Attention":
            return self.core, {"query": 0, "key": 1, "value": 2, "mask": 3}[role]
        if role in ("value", "probabilities"):
            return self.core, int(role == "value")
        node = next(node for node in self.graph.node if node.name == ("n_masked" if role == "mask" else "n_scores"))
        return node, {"query": 0, "key": 1, "mask": 1}[role]

    def quantize(self, node: onnx.NodeProto, index: int) -> None:
        node.input[index] = self.pair(node.input[index], node)

    def quantizer(self, role: str) -> onnx.NodeProto:
        """The QuantizeLinear of Q or K, nearest to the port."""
        node, index = self.port(role)
        maker = self.maker(node.input[index])
        while maker.op_type != "QuantizeLinear":
            maker = self.maker(maker.input[0])
        return maker


def value(planted: Planted) -> None:
    planted.quantize(*planted.port("value"))


def probabilities_behind_the_guard(planted: Planted) -> None:
    planted.quantize(*planted.port("probabilities"))


def probabilities_before_the_guard(planted: Planted) -> None:
    where = planted.maker(planted.core.input[0])
    assert where.op_type == "Where"
    planted.quantize(where, 2)


def mask(planted: Planted) -> None:
    planted.quantize(*planted.port("mask"))


def present(planted: Planted) -> None:
    concat = planted.maker("present_key")
    planted.quantize(concat, 1)


def one_branch(planted: Planted) -> None:
    """K's pair moves from behind the Concat to the new keys alone, on the attention's own branch."""
    quantize = planted.quantizer("key")
    dequantize = next(node for node in planted.graph.node if node.input[0] == quantize.output[0])
    concat = planted.maker("present_key")
    new = planted.pair(concat.input[1], quantize)
    own = helper.make_node("Concat", [concat.input[0], new], ["own_key"], name="own_key", axis=2)
    planted.put(own, quantize)
    for node in planted.graph.node:
        for index, tensor in enumerate(node.input):
            if tensor == dequantize.output[0]:
                node.input[index] = quantize.input[0] if quantize.input[0] != "present_key" else "own_key"
            elif tensor == "present_key" and node.name not in ("own_key", quantize.name):
                node.input[index] = "own_key"
    for node in (quantize, dequantize):
        planted.graph.node.remove(node)


def zero_point(planted: Planted) -> None:
    quantize = planted.quantizer("query")
    dequantize = next(node for node in planted.graph.node if node.input[0] == quantize.output[0])
    old = next(numpy_helper.to_array(item) for item in planted.graph.initializer if item.name == dequantize.input[2])
    dequantize.input[2] = planted.constant("planted_z", (old.astype(np.int32) - 16).astype(old.dtype))


def embedding(planted: Planted) -> None:
    """Whatever made the rows `x` gives way to a Gather from a table that is dequantized whole."""
    integers = np.random.default_rng(0).integers(-127, 127, (32, 16)).astype(np.int8)
    scale, zero = planted.constant("planted_s", np.float32(0.03)), planted.constant("planted_z", np.int8(0))
    source = [planted.constant("planted_table", integers), scale, zero]
    old = planted.maker("x")
    planted.put(helper.make_node("DequantizeLinear", source, ["planted_rows"], name="planted_dq"), old)
    planted.put(helper.make_node("Gather", ["planted_rows", "ids"], ["planted_x"], name="planted_gather"), old)
    old.CopyFrom(helper.make_node("Identity", ["planted_x"], ["x"], name=old.name))


KINDS: dict[str, tuple[Edit, str]] = {
    "value": (value, "value"),
    "probabilities before the guard": (probabilities_before_the_guard, "probabilities"),
    "probabilities behind the guard": (probabilities_behind_the_guard, "probabilities"),
    "mask": (mask, "mask"),
    "present": (present, "present_key"),
    "key on one branch": (one_branch, "key"),
    "zero point": (zero_point, "zero point"),
}


@cache
def float_model(form: str, tool: str) -> onnx.ModelProto:
    guard = form == DECOMPOSED and tool != "nncf"  # a guard is enough for stock NNCF to quantize V and the probabilities
    return build(form, query=None, key=None, linears=False, guard=guard)


@cache
def quantized(tool: str, form: str) -> onnx.ModelProto:
    model = float_model(form, tool)
    data = _calibration(model)
    if tool == "attnquant":
        # K is unsigned there: its pair stands together in front of the product.
        return ir.to_proto(attnquant.quantize(model, data, target="onnxruntime-cpu@1.30.0").model)
    if tool == "nncf":
        import nncf

        return nncf.quantize(model, nncf.Dataset(data), model_type=nncf.ModelType.TRANSFORMER)
    return by_onnxruntime(model, data)


def by_onnxruntime(model: onnx.ModelProto, data: list[dict[str, np.ndarray]]) -> onnx.ModelProto:
    """MatMuls by quantize_static, P V left alone; it does not know the operator."""
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter(data)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(model, source)
        quantization.quantize_static(
            str(source), str(result), Reader(), op_types_to_quantize=["MatMul"], nodes_to_exclude=["n_context"],
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"]},
        )
        return onnx.load(result)


def report_of(tool: str, form: str, edit: Edit | None = None, target: str = "") -> CheckReport:
    planted = Planted(quantized(tool, form))
    if edit is not None:
        edit(planted)
    return check(planted.model, target=target or ("openvino" if tool == "nncf" else CPU))


CLEAN = [(tool, form) for tool in ("attnquant", "nncf") for form in (OPERATOR, DECOMPOSED)] + [("onnxruntime", DECOMPOSED)]
ABSENT = {("probabilities", OPERATOR), ("guard", "nncf")}
"""(part of a kind, form or tool) without such an edge: operators have no probabilities, NNCF's model has no guard."""


@pytest.mark.parametrize(("tool", "form"), CLEAN)
def test_clean_models_are_clean(tool: str, form: str) -> None:
    report = report_of(tool, form)
    assert report.violations == ()
    assert [row.status for row in report.rows] == ["quantized"]


@pytest.mark.parametrize(
    ("tool", "form", "kind"),
    [(*base, kind) for base in CLEAN for kind in KINDS if not any(part in kind and where in base for part, where in ABSENT)],
)
def test_planted(tool: str, form: str, kind: str) -> None:
    edit, words = KINDS[kind]
    report = report_of(tool, form, edit)
    assert not report.ok
    (row,) = report.rows
    assert row.status == "violates"
    assert [reason for reason in row.reasons if words in reason.partition(",")[0]], row.reasons
    assert report.sites[0].id == "/n_context"


@pytest.mark.parametrize("tool", ["attnquant", "onnxruntime", "nncf"])
def test_a_dequantized_embedding_table_is_named(tool: str) -> None:
    report = report_of(tool, DECOMPOSED, embedding, CPU)
    assert [problem for problem in report.problems if "planted_dq" in str(problem)], report.problems
