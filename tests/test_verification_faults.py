"""Faults planted into quantized models: the attention that has one is named, and no other.

Two ways: with the setup that the model carries, and with the graph and the numbers alone, as in a model of another tool.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

import attnquant
from attnquant.verification import VerificationReport, verify
from tests.layeredmodels import DECOMPOSED, FORMS, LAYERS, OPERATOR, encoder, samples
from tests.tinymodels import run

TARGET = "onnxruntime-cpu@1.30.0"  # K is unsigned: its pair stands together in front of the product
FIRST, LAST = 0, LAYERS - 1
DATA = samples(4, seed=5)


class Planted:
    """A quantized encoder of which one layer is being damaged."""

    def __init__(self, form: str, layer: int) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(quantized(form))
        self.graph, self.layer = self.model.graph, f"layer{layer}.attn"
        self.form = form

    def node(self, name: str) -> onnx.NodeProto:
        return next(node for node in self.graph.node if node.name == name)

    def maker(self, tensor: str) -> onnx.NodeProto:
        return next(node for node in self.graph.node if tensor in node.output)

    def port(self, role: str) -> tuple[onnx.NodeProto, int]:
        """(node, index) of the edge at which a role enters."""
        index = {"query": 0, "key": 1, "value": 1 if self.form == DECOMPOSED else 2}[role]
        scores = self.form == DECOMPOSED and role != "value"
        return self.node(f"n_{self.layer}.{'scores' if scores else 'context'}"), index

    def pair(self, role: str) -> tuple[onnx.NodeProto, onnx.NodeProto]:
        """QuantizeLinear and DequantizeLinear at a port."""
        node, index = self.port(role)
        dequantize = self.maker(node.input[index])
        quantize = self.maker(dequantize.input[0])
        assert (quantize.op_type, dequantize.op_type) == ("QuantizeLinear", "DequantizeLinear")
        return quantize, dequantize

    def constant(self, name: str, array: np.ndarray) -> str:
        self.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def array(self, name: str) -> np.ndarray:
        return next(numpy_helper.to_array(item) for item in self.graph.initializer if item.name == name)

    def wrap(self, role: str, scale: np.ndarray, zero: np.ndarray, type_: int | None = None) -> None:
        """Q/DQ in front of a port."""
        node, index = self.port(role)
        names = [self.constant("planted_s", scale)]
        if type_ is None:
            names.append(self.constant("planted_z", zero))
        else:
            self.graph.initializer.append(helper.make_tensor("planted_z", type_, [], [int(zero)]))
            names.append("planted_z")
        place = list(self.graph.node).index(node)
        steps = (("QuantizeLinear", node.input[index], "planted_q"), ("DequantizeLinear", "planted_q", "planted"))
        for offset, (op_type, source, result) in enumerate(steps):
            self.graph.node.insert(place + offset, helper.make_node(op_type, [source, *names], [result], name=f"n_{result}"))
        self.port(role)[0].input[index] = "planted"

    def drop(self, role: str) -> tuple[np.ndarray, np.ndarray]:
        """Take a port's quantizer out; its scale and zero point."""
        quantize, dequantize = self.pair(role)
        node, index = self.port(role)
        node.input[index] = quantize.input[0]
        found = self.array(quantize.input[1]), self.array(quantize.input[2])
        for gone in (quantize, dequantize):
            self.graph.node.remove(gone)
        return found


def quarter_scale(planted: Planted) -> None:
    """Three quarters of the range are gone."""
    pair = planted.pair("query")
    name = planted.constant("planted_s", (planted.array(pair[0].input[1]) / 4).astype(np.float32))
    for node in pair:
        node.input[1] = name


def zero_point(planted: Planted) -> None:
    """Both halves of the pair: the range is shifted by 16 steps."""
    pair = planted.pair("key")
    old = planted.array(pair[0].input[2])
    name = planted.constant("planted_z", (old.astype(np.int32) + 16).astype(old.dtype))
    for node in pair:
        node.input[2] = name


def exchanged(planted: Planted) -> None:
    """What the projections of Q and K give, exchanged in front of everything."""
    first, second = f"{planted.layer}.q", f"{planted.layer}.k"
    for node in list(planted.graph.node):
        for index, tensor in enumerate(node.input):
            if tensor in (first, second):
                node.input[index] = second if tensor == first else first


def four_bit_value(planted: Planted) -> None:
    """With the range that fits."""
    planted.wrap("value", np.float32(largest(planted) / 7), np.array(0), onnx.TensorProto.INT4)


def wrong_port(planted: Planted) -> None:
    """K's quantizer, as it is, stands at V."""
    scale, zero = planted.drop("key")
    planted.wrap("value", scale, zero)


def exchanged_weights(planted: Planted) -> None:
    """The projections' weights and biases: every name is where it was."""
    weights = [planted.maker(planted.node(f"n_{planted.layer}.{part}.product").input[1]) for part in "qk"]
    biases = [planted.node(f"n_{planted.layer}.{part}") for part in "qk"]
    for (first, second), inputs in ((weights, (0, 1, 2)), (biases, (1,))):
        for index in inputs:
            first.input[index], second.input[index] = second.input[index], first.input[index]


def quarter_scale_of_one_half(planted: Planted) -> None:
    """Of the dequantizer alone: K becomes four times smaller."""
    _, dequantize = planted.pair("key")
    dequantize.input[1] = planted.constant("planted_s", (planted.array(dequantize.input[1]) / 4).astype(np.float32))


def zero_point_of_one_half(planted: Planted) -> None:
    """Of the dequantizer alone: K is shifted."""
    _, dequantize = planted.pair("key")
    old = planted.array(dequantize.input[2])
    dequantize.input[2] = planted.constant("planted_z", (old.astype(np.int32) - 16).astype(old.dtype))


def wide_scale(planted: Planted) -> None:
    """A range 32 times too wide: 3 bits are left."""
    pair = planted.pair("query")
    name = planted.constant("planted_s", (planted.array(pair[0].input[1]) * 32).astype(np.float32))
    for node in pair:
        node.input[1] = name


FAULTS: dict[str, tuple[Callable[[Planted], None], str]] = {
    "scale / 4": (quarter_scale, "query: "),
    "zero point off by 16": (zero_point, "zero point"),
    "Q and K swapped": (exchanged, "query and key are exchanged"),
    "V at 4 bits": (four_bit_value, "value: quantized (int4)"),
    "quantizer at the wrong port": (wrong_port, "placement: value: expected float"),
}
MORE = {
    "weights of Q and K swapped": (exchanged_weights, "query and key are exchanged"),
    "scale / 4 of one half": (quarter_scale_of_one_half, "scale"),
    "zero point of one half": (zero_point_of_one_half, "zero point"),
    "scale * 32": (wide_scale, "query: 97% of the range is not used"),
}


def largest(planted: Planted) -> float:
    """Largest absolute value at V, from a run."""
    node, index = planted.port("value")
    name = node.input[index]
    watched = onnx.ModelProto()
    watched.CopyFrom(planted.model)
    watched.graph.output.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return max(float(np.abs(run(watched, sample)[-1]).max()) for sample in DATA)


@cache
def quantized(form: str) -> onnx.ModelProto:
    return ir.to_proto(attnquant.quantize(encoder(form), samples(8), target=TARGET).model)


def report_of(form: str, layer: int = 0, fault: str = "", *, setup: bool = True) -> VerificationReport:
    planted = Planted(form, layer)
    if fault:
        (FAULTS | MORE)[fault][0](planted)
    if not setup:
        del planted.model.metadata_props[:]
    onnx.checker.check_model(planted.model)
    return verify(encoder(form), planted.model, DATA, target=TARGET)


@pytest.mark.parametrize("form", FORMS)
def test_an_untouched_model_reports_none(form: str) -> None:
    report = report_of(form)
    assert (report.ok, report.failures, report.suspects) == (True, (), ())
    assert [site.id for site in report.providers["cpu"].sites] == [f"/n_layer{n}.attn.context" for n in range(LAYERS)]


def assert_named(report: VerificationReport, layer: int, fault: str) -> None:
    words = (FAULTS | MORE)[fault][1]
    (site,) = report.suspects
    assert site.id == f"/n_layer{layer}.attn.context"
    assert [reason for reason in site.reasons if words in reason], site.reasons
    assert not report.ok


@pytest.mark.parametrize("layer", [FIRST, LAST])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_attributed_to_its_attention(fault: str, form: str, layer: int) -> None:
    assert_named(report_of(form, layer, fault), layer, fault)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_attributed_in_a_model_without_setup(fault: str) -> None:
    assert_named(report_of(DECOMPOSED, FIRST, fault, setup=False), FIRST, fault)


@pytest.mark.parametrize("fault", MORE)
def test_relatives_of_the_faults_are_attributed(fault: str) -> None:
    assert_named(report_of(OPERATOR, 2, fault), 2, fault)


def test_what_a_fault_costs_is_shown() -> None:
    """The clipped query's own error is near what float removes from the outputs; the layers behind it have none."""
    report = report_of(DECOMPOSED, FIRST, "scale / 4").providers["cpu"]
    first, *rest = report.sites
    assert first.attribution_db > 10
    assert all(abs(site.attribution_db) < 1 for site in rest)
    assert first.local_snr_db < first.expected_snr_db - 20
    assert all(abs(site.local_snr_db - site.expected_snr_db) < 5 for site in rest)
    assert rest[-1].snr_db[attnquant.PortRole.CONTEXT] < 15  # inherited, and accused of nothing
