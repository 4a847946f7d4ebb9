"""check: every planted violation is named with its site; clean models are clean, whoever made them."""

import json
import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from attnquant.account import as_json
from attnquant.check import CheckReport, check
from attnquant.errors import AttnQuantError, ModelError, UnmatchedRuleError
from attnquant.placement import SETUP_KEY, HostPoint, KeptFloat, QuantizerSetup, place
from attnquant.recipe import load
from attnquant.recognition import recognize

WIDTH, HEADS, HEAD = 16, 2, 8
CPU = "onnxruntime-cpu@1.31.1"
OPERATOR, DECOMPOSED = "operator", "decomposed"


class Build:
    """A graph under construction: a float transformer layer whose quantizers are put in by name."""

    def __init__(self, form: str, *, opset: int, linears: bool = True, **plant: object) -> None:
        self.form, self.opset, self.linears, self.plant = form, opset, linears, plant
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "sequence"])]
        self.outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "sequence", WIDTH])]
        self.host: list[HostPoint] = []

    def const(self, name: str, array: np.ndarray) -> str:
        self.constants[name] = array
        return name

    def add(self, op_type: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=f"n_{name}", **attributes))
        return name

    def qdq(
        self, tensor: str, name: str, *, dtype: type = np.uint8, zero: int = 128, scale: float = 0.03, **back: float
    ) -> str:
        """A quantizer; `back_zero` and `back_scale` set the dequantizer apart."""
        scale_name, zero_name = self.const(f"{name}_s", np.float32(scale)), self.const(f"{name}_z", dtype(zero))
        self.add("QuantizeLinear", [tensor, scale_name, zero_name], f"{name}_q")
        if "back_zero" in back:
            zero_name = self.const(f"{name}_bz", dtype(back["back_zero"]))
        if "back_scale" in back:
            scale_name = self.const(f"{name}_bs", np.float32(back["back_scale"]))
        return self.add("DequantizeLinear", [f"{name}_q", scale_name, zero_name], f"{name}_dq")

    def maybe(self, what: str, tensor: str) -> str:
        """A planted quantizer, if this one is asked for."""
        return self.qdq(tensor, what) if self.plant.get(what) else tensor

    def linear(self, tensor: str, name: str) -> str:
        """W8A8, weights per channel."""
        weight = np.random.default_rng(len(name)).standard_normal((WIDTH, WIDTH)).astype(np.float32)
        if not self.linears:
            return self.add("MatMul", [tensor, self.const(f"w_{name}", weight)], name)
        scale = np.abs(weight).max(0) / 127
        integers = np.round(weight / scale).astype(np.int8)
        dequantized = self.add(
            "DequantizeLinear",
            [
                self.const(f"w_{name}", integers),
                self.const(f"w_{name}_s", scale.astype(np.float32)),
                self.const(f"w_{name}_z", np.zeros(WIDTH, np.int8)),
            ],
            f"w_{name}_dq",
            axis=1,
        )
        self.host += [HostPoint(node=f"n_{name}", index=0), HostPoint(node=f"n_{name}", index=1, weight=True)]
        return self.add("MatMul", [self.qdq(tensor, f"x_{name}", zero=121), dequantized], name)

    def heads(self, tensor: str, name: str) -> str:
        shape = self.const("heads_shape", np.array([0, 0, HEADS, HEAD], np.int64))
        return self.add("Transpose", [self.add("Reshape", [tensor, shape], f"{name}_r")], f"{name}_h", perm=[0, 2, 1, 3])

    def embedding(self) -> str:
        table = np.random.default_rng(5).standard_normal((32, WIDTH)).astype(np.float32)
        if self.plant.get("embedding"):
            integers = np.round(table / 0.03).clip(-128, 127).astype(np.int8)
            source = [self.const("table", integers), self.const("t_s", np.float32(0.03)), self.const("t_z", np.int8(0))]
            return self.add("Gather", [self.add("DequantizeLinear", source, "table_dq"), "ids"], "x")
        return self.add("Gather", [self.const("table", table), "ids"], "x")

    def operand(self, role: str, tensor: str) -> str:
        """The quantizer of Q or K, as attnquant emits it unless something is planted."""
        settings = self.plant.get(role, {})
        return self.qdq(tensor, role, **settings) if settings is not None else tensor  # type: ignore[arg-type]

    def past(self, role: str, new: str) -> str:
        """Concat with the cache; present is the float tensor, Q/DQ on the attention's own branch."""
        self.inputs.append(helper.make_tensor_value_info(f"past_{role}", TensorProto.FLOAT, ["batch", HEADS, "past", HEAD]))
        if self.plant.get(f"present_{role}"):
            new = self.qdq(new, f"present_{role}")
        self.add("Concat", [f"past_{role}", new], f"present_{role}", axis=2)
        shape = ["batch", HEADS, "total", HEAD]
        self.outputs.append(helper.make_tensor_value_info(f"present_{role}", TensorProto.FLOAT, shape))
        if self.plant.get(f"late_present_{role}"):
            self.add("Identity", [self.qdq(f"present_{role}", f"late_{role}")], f"late_present_{role}")
            self.outputs[-1] = helper.make_tensor_value_info(f"late_present_{role}", TensorProto.FLOAT, shape)
        return f"present_{role}"

    def attention(self) -> None:
        x = self.embedding()
        self.inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch", 1, "sequence", "total"]))
        mask = self.maybe("mask", "mask")
        if self.plant.get("derived_mask"):
            mask = self.add("Mul", [self.qdq("mask", "mask"), self.const("lowest", np.float32(-1e4))], "m_scaled")
        q, k, v = (self.heads(self.linear(x, role), role) for role in "qkv")
        k = self.key(k)
        v = self.maybe("value", self.past("value", v))
        q = self.operand("query", q)
        context = self.operator(q, k, v, mask) if self.form == OPERATOR else self.written_out(q, k, v, mask)
        merged = self.add("Transpose", [context], "merged", perm=[0, 2, 1, 3])
        flat = self.add("Reshape", [merged, self.const("flat", np.array([0, 0, WIDTH], np.int64))], "flat_c")
        self.linear(flat, "y")

    def key(self, new: str) -> str:
        if self.plant.get("key_on_one_branch"):
            cached = self.past("key", new)
            return self.add("Concat", ["past_key", self.operand("key", new)], f"{cached}_own", axis=2)
        if self.plant.get("key_on_both_branches"):
            cached = self.past("key", new)
            both = [self.qdq("past_key", "past_part"), self.operand("key", new)]
            return self.add("Concat", both, f"{cached}_own", axis=2)
        return self.operand("key", self.past("key", new))

    def operator(self, q: str, k: str, v: str, mask: str) -> str:
        return self.add("Attention", [q, k, v, mask], "context")

    def written_out(self, q: str, k: str, v: str, mask: str) -> str:
        kt = self.add("Transpose", [k], "kt", perm=[0, 1, 3, 2])
        scores = self.maybe("scores", self.add("MatMul", [q, kt], "scores"))
        scaled = self.add("Mul", [scores, self.const("scale", np.float32(HEAD**-0.5))], "scaled")
        p = self.add("Softmax", [self.add("Add", [scaled, mask], "masked")], "p", axis=-1)
        p = self.maybe("probabilities", p)
        if self.plant.get("guard") or self.plant.get("guarded_probabilities"):
            nan = self.add("IsNaN", [p], "is_nan")
            p = self.add("Where", [nan, self.const("zero", np.float32(0)), p], "guarded")
            p = self.maybe("guarded_probabilities", p)
        return self.add("MatMul", [p, v], "context")

    def model(self, *, setup: bool = False) -> onnx.ModelProto:
        self.attention()
        self.outputs = list({output.name: output for output in self.outputs}.values())
        graph = helper.make_graph(
            self.nodes, "g", self.inputs, self.outputs, [numpy_helper.from_array(a, n) for n, a in self.constants.items()]
        )
        made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        if setup:
            asked = place(recognize(made).sites, load("int8"), "onnxruntime-cpu").with_host(self.host)
            helper.set_model_props(made, {SETUP_KEY: asked.to_text()})
        return made


def build(form: str, **plant: object) -> onnx.ModelProto:
    opset = plant.pop("opset", 23 if form == OPERATOR else 18)
    setup = bool(plant.pop("setup", False))
    return Build(form, opset=opset, **plant).model(setup=setup)  # type: ignore[arg-type]


def only_site(report: CheckReport) -> tuple[str, tuple[str, ...]]:
    (row,) = report.rows
    return row.status, row.reasons


@pytest.mark.parametrize("form", [OPERATOR, DECOMPOSED])
@pytest.mark.parametrize("setup", [False, True])
@pytest.mark.parametrize("plant", [{}, {"guard": True}, {"key_on_both_branches": True}])
def test_a_clean_model_is_clean(form: str, setup: bool, plant: dict[str, bool]) -> None:
    model = build(form, setup=setup and not plant.get("key_on_both_branches"), **plant)
    onnx.checker.check_model(model)
    report = check(model, target=CPU)
    assert report.violations == ()
    assert report.ok
    assert only_site(report)[0] == "quantized"
    assert {role.value: (q.dtype, q.symmetric, q.granularity) for role, q in report.rows[0].quantized.items()} == {
        "query": ("uint8", True, "tensor"),
        "key": ("uint8", True, "tensor"),
    }
    assert [linear.reason for linear in report.linears] == [""] * 4
    assert report.unplanned == ()
    assert report.target == CPU


PLANTED = [
    # plant, forms, role that the reason names, what it says
    ({"value": True}, (OPERATOR, DECOMPOSED), "value", "expected float"),
    ({"probabilities": True}, (DECOMPOSED,), "probabilities", "expected float"),
    ({"probabilities": True, "guard": True}, (DECOMPOSED,), "probabilities", "n_probabilities_q"),
    ({"guarded_probabilities": True}, (DECOMPOSED,), "probabilities", "n_guarded_probabilities_q"),
    ({"scores": True}, (DECOMPOSED,), "scores", "expected float"),
    ({"mask": True}, (OPERATOR, DECOMPOSED), "mask", "expected float"),
    ({"derived_mask": True}, (OPERATOR, DECOMPOSED), "mask", "n_mask_q"),
    ({"key_on_one_branch": True}, (OPERATOR, DECOMPOSED), "key", "on every path, got float at tensor 'past_key', which"),
    ({"present_key": True}, (OPERATOR, DECOMPOSED), "present_key", "expected float"),
    ({"present_value": True}, (OPERATOR, DECOMPOSED), "present_value", "expected float"),
    ({"late_present_key": True}, (OPERATOR, DECOMPOSED), "present_key", "n_late_key_q"),
    ({"key": None}, (OPERATOR, DECOMPOSED), "key", "expected a quantizer, got float at tensor"),
    ({"query": None}, (OPERATOR, DECOMPOSED), "query", "expected a quantizer, got float at tensor"),
    ({"query": {"back_zero": 112}}, (OPERATOR, DECOMPOSED), "zero point", "128 as at 'n_query_q', got 112"),
    ({"key": {"back_scale": 0.06}}, (OPERATOR, DECOMPOSED), "scale", "as at 'n_key_q'"),
    ({"key": {"scale": 0.0}}, (OPERATOR, DECOMPOSED), "scale", "a scale of zero"),
    ({"query": {"scale": np.inf}}, (OPERATOR, DECOMPOSED), "scale", "an infinite scale"),
    ({"query": {"scale": np.nan}}, (OPERATOR, DECOMPOSED), "scale", "a NaN scale"),
    ({"query": {"scale": -0.1}}, (OPERATOR, DECOMPOSED), "scale", "a negative scale"),
    ({"query": {"scale": 1e-42}}, (OPERATOR, DECOMPOSED), "scale", "a denormal scale"),
    ({"query": {"scale": 3e38}}, (OPERATOR, DECOMPOSED), "scale", "saturates"),
]


@pytest.mark.parametrize("setup", [False, True])
@pytest.mark.parametrize(
    ("form", "plant", "role", "words"),
    [(form, plant, role, words) for plant, forms, role, words in PLANTED for form in forms],
)
def test_a_planted_violation_is_named_with_its_site(
    form: str, plant: dict[str, object], role: str, words: str, setup: bool
) -> None:
    report = check(build(form, setup=setup, **plant), target=CPU)
    status, reasons = only_site(report)
    assert status == "violates"
    assert not report.ok
    assert [reason for reason in reasons if reason.startswith(role) and words in reason], reasons
    assert report.sites[0].id == "/n_context"
    # One fault, one site, and no other role accused.
    accused = {reason.split(":")[0].split(" at ")[0] for reason in reasons}
    assert accused - ({"value"} if role == "present_value" else set()) == {role}  # there V reads the cached tensor


@pytest.mark.parametrize("form", [OPERATOR, DECOMPOSED])
def test_a_shifted_zero_point_is_seen_by_the_setup_or_by_the_others(form: str) -> None:
    shifted = {"query": {"zero": 112}}
    status, reasons = only_site(check(build(form, setup=True, **shifted), target=CPU))
    assert status == "violates"
    assert "query: expected zero point 128 (uint8, symmetric), got 112" in reasons[0]
    # Without a setup: all other Q and K of the model are centered.
    signed = {"dtype": np.int8, "zero": 0}
    model = build(form, query={"dtype": np.int8, "zero": 16}, key=signed)
    status, reasons = only_site(check(model, target="openvino"))
    assert status == "violates"
    assert "zero point" in reasons[0]
    assert "16 (int8)" in reasons[0]
    # Asymmetric throughout is another tool's choice.
    model = build(form, query={"zero": 112}, key={"zero": 140})
    assert check(model, target=CPU).ok


def test_int8_where_the_target_needs_uint8() -> None:
    signed = {"dtype": np.int8, "zero": 0}
    # From opset 21 on a move behind the dequantizer keeps the model from loading: K^T is transposed behind it here.
    report = check(build(DECOMPOSED, opset=21, key=signed), target=CPU)
    status, reasons = only_site(report)
    assert status == "violates"
    assert "expected uint8 for onnxruntime-cpu@1.31.1, got int8: Transpose 'n_kt' behind it" in reasons[0]
    assert "at opset 21 that does not load" in reasons[0]
    # In a model of uint8 activations a signed one is out of place.
    for form in (OPERATOR, DECOMPOSED):
        for setup in (False, True):
            report = check(build(form, setup=setup, query=signed), target=CPU)
            status, reasons = only_site(report)
            assert status == "violates"
            assert "target type" in reasons[0]
            assert "the model is uint8 otherwise" in reasons[0]
    # In one that is signed throughout, below opset 21, the runtime converts a quantizer with one reader.
    report = check(build(DECOMPOSED, opset=18, query=signed, key=signed, linears=False), target=CPU)
    assert report.ok
    assert report.problems == ()
    # Releases up to 1.24 loaded it: there it is the one signed quantizer of a uint8 model.
    report = check(build(DECOMPOSED, opset=21, key=signed), target="onnxruntime-cpu@1.24.4")
    assert "uint8 otherwise" in only_site(report)[1][0]
    # Other targets take both.
    assert check(build(DECOMPOSED, opset=21, key=signed), target="openvino").problems == ()


@pytest.mark.parametrize("opset", [20, 21])
def test_moves_behind_int8_that_do_not_load_are_those_of_the_installed_runtime(opset: int) -> None:
    """The runtime itself is the oracle."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    moves: dict[str, tuple[list[str], dict[str, object]]] = {
        "Reshape": (["dq", "shape"], {}),
        "Transpose": (["dq"], {"perm": [1, 0]}),
        "Squeeze": (["dq", "zero"], {}),
        "Unsqueeze": (["dq", "zero"], {}),
        "Flatten": (["dq"], {}),
        "Slice": (["dq", "zero", "one"], {}),
        "Split": (["dq"], {"num_outputs": 1}),
        "Gather": (["dq", "zero"], {}),
        "Expand": (["dq", "shape"], {}),
        "Identity": (["dq"], {}),
        "Concat": (["dq", "dq"], {"axis": 0}),
        "Tile": (["dq", "twice"], {}),
    }
    constants = {
        "s": np.float32(0.1),
        "z": np.int8(0),
        "shape": np.array([1, 8]),
        "zero": np.array([0]),
        "one": np.array([1]),
        "twice": np.array([2, 2]),
    }
    for op_type, (inputs, attributes) in moves.items():
        nodes = [
            helper.make_node("Relu", ["x"], ["r"]),
            helper.make_node("QuantizeLinear", ["r", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["dq"]),
            helper.make_node(op_type, inputs, ["m"], **attributes),
            helper.make_node("Neg", ["m"], ["y"]),
        ]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
        try:
            runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            loads = True
        except Exception:
            loads = False
        report = check(model, target=f"onnxruntime-cpu@{runtime.__version__}")
        assert loads == (not any("does not load" in problem.reason for problem in report.problems)), op_type


def test_int8_that_several_products_read_runs_in_float() -> None:
    model = build(DECOMPOSED)
    # One signed quantizer for q, k and v, as after a norm.
    graph = model.graph
    for node in graph.node:
        if node.op_type == "MatMul" and node.name in ("n_q", "n_k", "n_v"):
            node.input[0] = "x_q_dq"
    for constant in graph.initializer:
        if constant.name == "x_q_z":
            constant.CopyFrom(numpy_helper.from_array(np.int8(-7), "x_q_z"))
    report = check(model, target=CPU)
    (problem,) = [p for p in report.problems if p.severity == "violation"]
    assert (problem.kind, problem.node, problem.site) == ("target type", "n_x_q_q", None)
    assert "3 products read it ('n_k', 'n_q', 'n_v')" in problem.reason
    assert not report.ok
    assert only_site(report)[0] == "quantized"
    # A model that is signed throughout is as its tool makes them: slow, and no violation.
    for constant in graph.initializer:
        if constant.name.endswith("_z") and constant.data_type == TensorProto.UINT8:
            constant.CopyFrom(numpy_helper.from_array(np.int8(0), constant.name))
    report = check(model, target=CPU)
    assert report.ok
    assert [(p.kind, p.node, p.severity) for p in report.problems] == [("target type", "n_x_q_q", "warning")]


def test_a_dequantized_embedding_table() -> None:
    for form in (OPERATOR, DECOMPOSED):
        report = check(build(form, embedding=True), target=CPU)
        assert not report.ok
        (problem,) = report.problems
        assert (problem.kind, problem.node, problem.tensor) == ("embedding", "n_table_dq", "table")
        assert "Gather 'n_x'" in problem.reason
        assert only_site(report)[0] == "quantized"
        # With a setup it is a quantizer that nobody asked for, too.
        report = check(build(form, embedding=True, setup=True), target=CPU)
        assert report.unplanned == ("node 'n_table_dq' (tensor 'table'), read by input 0 of Gather 'n_x'",)


def test_unplanned_quantizers_need_a_setup_with_a_host_section() -> None:
    builder = Build(DECOMPOSED, opset=18)
    model = builder.model(setup=True)
    # A quantizer on the residual side: between context and the last reshape.
    graph = model.graph
    merged = next(node for node in graph.node if node.name == "n_merged")
    index = list(graph.node).index(merged)
    for constant in (numpy_helper.from_array(np.float32(0.1), "e_s"), numpy_helper.from_array(np.uint8(128), "e_z")):
        graph.initializer.append(constant)
    pair = [
        helper.make_node("QuantizeLinear", ["context", "e_s", "e_z"], ["e_q"], name="extra_q"),
        helper.make_node("DequantizeLinear", ["e_q", "e_s", "e_z"], ["e_dq"], name="extra_dq"),
    ]
    elu = helper.make_node("Elu", ["e_dq"], ["elu"], name="elu")
    merged.input[0] = "elu"
    for offset, node in enumerate([*pair, elu]):
        graph.node.insert(index + offset, node)
    report = check(model, target=CPU)
    assert report.unplanned == ("node 'extra_dq' (tensor 'context'), read by input 0 of Elu 'elu'",)
    assert not report.ok
    assert [(p.kind, p.node, p.severity) for p in report.problems] == [("not fused", "extra_dq", "warning")]
    assert "fuses it with none of its readers (Elu)" in report.problems[0].reason
    # The same pair, planned at the output of the node that makes its tensor.
    planned = place(report.sites, load("int8")).with_host([*builder.host, HostPoint(node="n_context")])
    assert check(model, setup=planned, target=CPU).unplanned == ()
    # Without a host section nothing is known about it.
    assert check(model, setup=place(report.sites, load("int8")), target=CPU).unplanned == ()


def test_setup_and_graph_disagree() -> None:
    model = build(DECOMPOSED, setup=True)
    content = json.loads(model.metadata_props[0].value)
    for point in content["points"]:
        point["site"] = "/gone"
    for row in content["skipped"]:
        row["site"] = "/gone"
    report = check(model, setup=QuantizerSetup.from_json(content), target=CPU)
    assert [problem.node for problem in report.problems] == ["gone", "n_context"]
    assert not report.ok
    helper.set_model_props(model, {SETUP_KEY: "no JSON"})
    with pytest.raises(ModelError, match=r"attnquant\.setup"):
        check(model, target=CPU)


def test_linears_with_their_reasons() -> None:
    report = check(build(DECOMPOSED, linears=False), target=CPU)
    assert {linear.reason for linear in report.linears} == {"weight and activation are float"}
    assert report.ok
    model = build(DECOMPOSED)
    graph = model.graph
    for node in graph.node:
        if node.name == "n_q":
            node.input[0] = "x"
    del graph.node[[node.name for node in graph.node].index("n_x_q_dq")]
    del graph.node[[node.name for node in graph.node].index("n_x_q_q")]
    report = check(model, target=CPU)
    assert {linear.node: linear.reason for linear in report.linears} == {
        "n_q": "the weight alone is quantized (int8)",
        "n_k": "",
        "n_v": "",
        "n_y": "",
    }
    setup = place(report.sites, load("int8"))
    kept = setup.with_host([], [KeptFloat(node="n_q", reason="kept float by the recipe")])
    assert check(model, setup=kept, target=CPU).linears[0].reason == "kept float by the recipe"
    account = as_json(report.account("m.onnx"))
    assert account["linears"] == {"int8": 3, "total": 4, "exceptions": ["n_q: the weight alone is quantized (int8)"]}


@pytest.mark.parametrize(
    ("size", "scale", "bias", "words"),
    [
        ("batch", np.float32(0.1), True, None),
        (2, np.float32(0.1), True, "static shapes and the float bias of 'add'"),
        (2, np.float32(0.1), False, None),
        ("batch", np.float16(0.1), False, "half precision scales"),
    ],
)
def test_linears_that_look_int8_and_are_not_fused(
    size: int | str, scale: np.floating, bias: bool, words: str | None
) -> None:
    element = TensorProto.FLOAT if scale.dtype == np.float32 else TensorProto.FLOAT16
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["x_q"], name="q"),
        helper.make_node("DequantizeLinear", ["x_q", "s", "z"], ["x_dq"], name="dq"),
        helper.make_node("DequantizeLinear", ["w", "s", "w_z"], ["w_dq"], name="w_dq"),
        helper.make_node("MatMul", ["x_dq", "w_dq"], ["xw"], name="matmul"),
        helper.make_node("Add", ["xw", "b"], ["y"], name="add") if bias else helper.make_node("Neg", ["xw"], ["y"]),
    ]
    weight, addend = np.ones((4, 4), np.int8), np.ones(4, scale.dtype)
    constants = {"s": scale, "z": np.uint8(128), "w": weight, "w_z": np.int8(0), "b": addend}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", element, [size, 4])],
        [helper.make_tensor_value_info("y", element, [size, 4])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
        value_info=[helper.make_tensor_value_info("x_dq", element, [size, 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    found = [problem.reason for problem in check(model, target=CPU).problems]
    assert len(found) == (words is not None), found
    assert words is None or words in found[0]
    assert check(model, target="openvino").problems == ()


def test_quantized_position_ids() -> None:
    """Rotary angles: positions times frequencies, then Cos."""
    for planted in (False, True):
        builder = Build(DECOMPOSED, opset=18)
        positions = builder.add("Cast", ["position_ids"], "float_positions", to=TensorProto.FLOAT)
        builder.inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch", 1, "sequence"]))
        if planted:
            positions = builder.qdq(positions, "positions")
        frequencies = builder.const("frequencies", np.ones((1, HEAD // 2, 1), np.float32))
        builder.add("Cos", [builder.add("MatMul", [frequencies, positions], "angles")], "cosines")
        builder.outputs.append(helper.make_tensor_value_info("cosines", TensorProto.FLOAT, None))
        found = [problem for problem in check(builder.model(), target=CPU).problems if problem.kind == "positions"]
        assert [problem.node for problem in found] == (["n_positions_q"] if planted else [])


def test_sines_of_a_linear_are_no_positions() -> None:
    builder = Build(DECOMPOSED, opset=18)
    model = builder.model()
    model.graph.node.append(helper.make_node("Sin", ["q"], ["wave"], name="wave"))
    model.graph.output.append(helper.make_tensor_value_info("wave", TensorProto.FLOAT, None))
    assert not [problem for problem in check(model, target=CPU).problems if problem.kind == "positions"]


def test_what_the_opset_does_not_know() -> None:
    report = check(build(DECOMPOSED, opset=18, query={"dtype": np.int16, "zero": 0}), target="openvino")
    status, reasons = only_site(report)
    assert status == "violates"
    assert "expected opset 21 or later for int16, got 18" in reasons[0]
    report = check(build(OPERATOR, opset=26), target="onnxruntime-cpu@1.24.4")
    assert "expected opset 25 or earlier" in report.violations[0]


def test_a_recipe_that_asks_for_more() -> None:
    model = build(DECOMPOSED, value=True, guarded_probabilities=True)
    recipe = load('[roles.value]\ndtype = "int8"\n[roles.probabilities]\ndtype = "uint8"\n')
    assert check(model, recipe=recipe, target=CPU).ok
    status, reasons = only_site(check(build(DECOMPOSED), recipe=recipe, target=CPU))
    assert status == "violates"
    assert {reason.split(":")[0] for reason in reasons} == {"value", "probabilities"}
    with pytest.raises(UnmatchedRuleError):
        check(model, recipe='[[rules]]\nsite = "nothing"\nroles.key.dtype = "none"\n')


def test_the_range_of_probabilities_is_checked_against_the_setup() -> None:
    recipe = load('[roles.probabilities]\ndtype = "uint8"\nsymmetric = false\nrange = [0, 1]\n')

    def reasons(scale: float, zero: int) -> tuple[str, ...]:
        builder = Build(DECOMPOSED, opset=18)
        builder.maybe = lambda what, tensor: (  # type: ignore[method-assign]
            builder.qdq(tensor, what, scale=scale, zero=zero) if what == "probabilities" else tensor
        )
        model = builder.model()
        return only_site(check(model, setup=place(recognize(model).sites, recipe), target=CPU))[1]

    assert not [reason for reason in reasons(1 / 255, 0) if "range" in reason]
    assert "expected the range [0, 1], got [0, 2]" in reasons(2 / 255, 0)[0]
    assert "expected the range [0, 1], got [-0.501961, 0.498039]" in reasons(1 / 255, 128)[0]
    assert "expected the range [0, 1], got [0, 0.95]" in reasons(0.95 / 255, 0)[0]


def fused(op_type: str, operands: dict[int, str], pair: str, **attributes: object) -> onnx.ModelProto:
    """One com.microsoft operator whose inputs (index: name) are graph inputs, one of them behind Q/DQ."""
    builder = Build(OPERATOR, opset=20)
    del builder.inputs[:], builder.outputs[:]
    names = [operands.get(index, "") for index in range(max(operands) + 1)]
    names = [builder.qdq(name, name) if name in pair.split() else name for name in names]
    outputs = ["y", "present_key", "present_value"][: 3 if "past_key" in operands.values() else 1]
    node = helper.make_node(op_type, names, outputs, name="attention", domain="com.microsoft", **attributes)
    integers = ("seqlens_k", "total")
    graph = helper.make_graph(
        [*builder.nodes, node],
        "g",
        [
            helper.make_tensor_value_info(name, TensorProto.INT32 if name in integers else TensorProto.FLOAT, None)
            for name in operands.values()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in builder.constants.items()],
    )
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


MULTI_HEAD = {0: "q", 1: "k", 2: "v", 4: "padding", 5: "bias"}
GROUPED = {0: "q", 1: "k", 2: "v", 3: "past_key", 4: "past_value", 5: "seqlens_k", 6: "total"}
PACKED = {0: "q", 3: "past_key", 4: "past_value", 5: "seqlens_k", 6: "total"}


@pytest.mark.parametrize(
    ("op_type", "operands", "pair", "status", "words"),
    [
        ("MultiHeadAttention", MULTI_HEAD, "q k", "quantized", None),
        ("MultiHeadAttention", MULTI_HEAD, "q k v", "violates", "value: expected float"),
        ("MultiHeadAttention", MULTI_HEAD, "q k bias", "violates", "mask: expected float"),
        ("MultiHeadAttention", MULTI_HEAD, "q k padding", "violates", "mask: expected float"),
        ("GroupQueryAttention", GROUPED, "q k", "quantized", "present holds the fake-quantized new keys"),
        ("GroupQueryAttention", GROUPED, "q k past_key", "violates", "past_key: expected float"),
        ("GroupQueryAttention", GROUPED, "q k past_value", "violates", "past_value: expected float"),
        ("GroupQueryAttention", PACKED, "", "skipped", "packed: V shares the port"),
        ("GroupQueryAttention", PACKED, "q", "violates", "packed: V shares the port"),
    ],
)
def test_operators_of_onnxruntime(
    op_type: str, operands: dict[int, str], pair: str, status: str, words: str | None
) -> None:
    attributes = {"num_heads": 2} | ({"kv_num_heads": 2} if op_type == "GroupQueryAttention" else {})
    report = check(fused(op_type, operands, pair, **attributes), target=CPU)
    found, reasons = only_site(report)
    assert found == status, reasons
    assert report.ok == (status != "violates")
    assert [reason for reason in reasons if words in reason] if words else not reasons, reasons


def test_present_of_an_operator_quantized_on_its_way_out() -> None:
    model = fused("GroupQueryAttention", GROUPED, "q k", num_heads=2, kv_num_heads=2)
    graph = model.graph
    graph.node.append(helper.make_node("QuantizeLinear", ["present_key", "q_s", "q_z"], ["out_q"], name="out_q"))
    graph.node.append(helper.make_node("DequantizeLinear", ["out_q", "q_s", "q_z"], ["out"], name="out_dq"))
    graph.output[1].name = "out"
    status, reasons = only_site(check(model, target=CPU))
    assert status == "violates"
    assert "present_key: expected float" in reasons[0]
    assert "out_q" in reasons[0]


def test_a_float_model_violates_the_default_recipe_and_needs_no_target() -> None:
    report = check(build(OPERATOR, query=None, key=None, linears=False), target=CPU)
    assert only_site(report)[0] == "violates"
    assert len(report.rows[0].reasons) == 2


def test_reading_is_linear_in_nodes() -> None:
    """Nodes looked at per layer do not grow with the number of layers."""
    import time

    def seconds(layers: int) -> float:
        builder = Build(DECOMPOSED, opset=18)
        x = builder.embedding()
        for layer in range(layers):
            weight = builder.const(f"w{layer}", np.eye(WIDTH, dtype=np.float32))
            product = builder.add("MatMul", [x, weight], f"q{layer}")
            x = builder.add("Add", [builder.qdq(product, f"a{layer}"), x], f"x{layer}")
        builder.add("Identity", [x], "y")
        constants = [numpy_helper.from_array(array, name) for name, array in builder.constants.items()]
        graph = helper.make_graph(builder.nodes, "g", builder.inputs, builder.outputs, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        start = time.process_time()
        check(model, target=CPU)
        return time.process_time() - start

    seconds(10)
    small, large = seconds(50), seconds(400)
    assert large < 24 * small


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::numpy.exceptions.ComplexWarning")
def test_damaged_graphs_end_in_a_report_or_in_an_error_of_ours() -> None:
    """Operands lost, emptied or swapped, operators renamed, attributes and constants of the wrong kind."""
    rng = random.Random(11)
    operators = ("QuantizeLinear", "DequantizeLinear", "Gather", "MatMul", "Concat", "Softmax", "Split", "Cos", "Reshape")
    arrays = [np.zeros(0, np.float32), np.zeros((0, 3), np.int8), np.float32(np.nan), np.ones(5), np.array([1 + 2j])]
    originals = [build(form, guard=True, embedding=True, setup=True) for form in (OPERATOR, DECOMPOSED)]
    reports = 0
    for step in range(80):
        model = onnx.ModelProto()
        model.CopyFrom(originals[step % 2])
        graph = model.graph
        tensors = [name for node in graph.node for name in node.output] + [item.name for item in graph.initializer]
        for _ in range(rng.randint(1, 3)):
            node, constant = rng.choice(graph.node), rng.choice(graph.initializer)
            kind = rng.randint(0, 5)
            if kind == 0 and node.input:
                del node.input[rng.randrange(len(node.input))]
            elif kind == 1 and node.input:
                node.input[rng.randrange(len(node.input))] = ""
            elif kind == 2 and node.input:
                node.input[rng.randrange(len(node.input))] = rng.choice(tensors)
            elif kind == 3:
                node.op_type = rng.choice(operators)
            elif kind == 4:
                constant.CopyFrom(numpy_helper.from_array(np.asarray(rng.choice(arrays)), constant.name))
            elif node.attribute:
                value = rng.choice(["x", 1.5, [1, 2], -7, 2**40])
                node.attribute[0].CopyFrom(helper.make_attribute(node.attribute[0].name, value))
        try:
            check(model, target=CPU)
            reports += 1
        except AttnQuantError:
            pass
    assert 10 < reports < 70


def _calibration(model: onnx.ModelProto, count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    feeds = []
    for _ in range(count):
        feed: dict[str, np.ndarray] = {"ids": rng.integers(0, 32, (2, 4)), "mask": np.zeros((2, 1, 4, 7), np.float32)}
        feed |= {f"past_{role}": rng.standard_normal((2, HEADS, 3, HEAD)).astype(np.float32) for role in ("key", "value")}
        feeds.append(feed)
    return feeds


@pytest.mark.parametrize("form", [OPERATOR, DECOMPOSED])
def test_models_of_onnxruntime_quantize_static(form: str, tmp_path) -> None:
    """Its QDQ mode quantizes every MatMul operand: clean where told to leave P V alone, named where not."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    model = build(form, query=None, key=None, linears=False)
    onnx.save(model, tmp_path / "float.onnx")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter(_calibration(model))

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    def quantized(**options: object) -> onnx.ModelProto:
        quantization.quantize_static(
            str(tmp_path / "float.onnx"),
            str(tmp_path / "int8.onnx"),
            Reader(),
            op_types_to_quantize=["MatMul"],
            extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"]},
            **options,
        )
        return onnx.load(tmp_path / "int8.onnx")

    everything = check(quantized(), target=CPU)
    status, reasons = only_site(everything)
    assert status == "violates"
    if form == OPERATOR:
        assert {reason.split(":")[0] for reason in reasons} == {"query", "key"}  # it does not know Attention
    else:
        # It puts V's pair in front of the graph output, so that present_value is quantized as well.
        assert {reason.split(":")[0] for reason in reasons} == {"value", "probabilities", "present_value"}
        clean = check(quantized(nodes_to_exclude=["n_context"]), target=CPU)
        assert clean.violations == ()
        assert only_site(clean)[0] == "quantized"
    assert [linear.reason for linear in everything.linears] == [""] * 4


def _edited(model: onnx.ModelProto, edit: Callable[[onnx.GraphProto], None]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    edit(copy.graph)
    return copy


def test_moves_between_quantizer_and_dequantizer_are_passed() -> None:
    """Integers that are transposed before they are dequantized."""
    model = build(DECOMPOSED)

    def swap(graph: onnx.GraphProto) -> None:
        quantize = next(node for node in graph.node if node.name == "n_key_q")
        dequantize = next(node for node in graph.node if node.name == "n_key_dq")
        transpose = next(node for node in graph.node if node.name == "n_kt")
        transpose.input[0], transpose.output[0] = quantize.output[0], "kt_q"
        dequantize.input[0], dequantize.output[0] = "kt_q", "kt"
        order = [node for node in graph.node if node is not transpose]
        order.insert(order.index(dequantize), transpose)
        kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in order]
        del graph.node[:]
        graph.node.extend(kept)

    report = check(_edited(model, swap), target=CPU)
    assert report.violations == ()
    assert only_site(report)[0] == "quantized"
