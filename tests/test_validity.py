"""Models that no runtime takes, or that lie, end in a sentence with the tensor or node; odd but sound ones pass."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from attnquant import runtime
from attnquant.errors import ModelError
from attnquant.model import load
from attnquant.validity import check_outputs, validate

F16, F32, BF16, I64, I32 = (getattr(TensorProto, name) for name in ("FLOAT16", "FLOAT", "BFLOAT16", "INT64", "INT32"))


def info(name: str, dtype: int = F32, shape: Sequence[int | str] | None = ("b", "s", 16)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], name: str = "", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=name or f"{op}_{outputs[0]}", **attributes)


def weight(name: str, *shape: int, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array((np.arange(np.prod(shape)).reshape(shape) % 7 / 7).astype(dtype), name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 23,
    inner: Sequence[onnx.ValueInfoProto] = (),
) -> ir.Model:
    graph = helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(weights), value_info=list(inner))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, ir_version=10))


def gqa(past: int | str, present: Sequence[int | str] | None, *, head: int = 16) -> ir.Model:
    """com.microsoft GroupQueryAttention on packed QKV, 2 heads, with a declared or undeclared present."""
    attention = helper.make_node(
        "GroupQueryAttention",
        ["qkv", "", "", "past_k", "past_v", "lens", "total"],
        ["y", "present_k", "present_v"],
        name="gqa",
        domain="com.microsoft",
        num_heads=2,
        kv_num_heads=2,
    )
    caches = [info(f"past_{role}", F32, ("b", 2, past, head)) for role in "kv"]
    presents = [info(f"present_{role}", F32, present) for role in "kv"]
    scalars = [info("lens", I32, ("b",)), info("total", I32, ())]
    return model([attention], [info("qkv", F32, ("b", "s", 6 * head)), *caches, *scalars], [info("y", F32, None), *presents])


def quantized_weight(scale: type, opset: int) -> ir.Model:
    weights = [
        numpy_helper.from_array(np.ones((16, 16), np.int8), "wq"),
        numpy_helper.from_array(np.full(16, 0.5, scale), "ws"),
    ]
    nodes = [node("DequantizeLinear", ["wq", "ws"], ["w"], "dq", axis=1), node("MatMul", ["x", "w"], ["y"], "fc")]
    return model(nodes, [info("x", F16)], [info("y", F16)], weights, opset=opset)


def branches(dtype: int) -> ir.Model:
    then = helper.make_graph([node("MatMul", ["x", "w"], ["t"], "inner")], "then", [], [info("t", F16, None)])
    other = helper.make_graph([node("Neg", ["x"], ["e"])], "else", [], [info("e", F16, None)])
    kind = np.float16 if dtype == F16 else np.float32
    outer = node("If", ["flag"], ["y"], "if", then_branch=then, else_branch=other)
    flag = info("flag", TensorProto.BOOL, ())
    return model([outer], [info("x", F16), flag], [info("y", F16, None)], [weight("w", 16, 16, dtype=kind)])


def function(constant: type) -> ir.Model:
    body = [
        helper.make_node("Constant", [], ["k"], name="k", value=numpy_helper.from_array(np.ones(1, constant), "k")),
        helper.make_node("Mul", ["a", "k"], ["r"], name="scaled"),
    ]
    made = helper.make_function("local", "Scaled", ["a"], ["r"], body, [helper.make_opsetid("", 23)])
    call = helper.make_node("Scaled", ["x"], ["y"], name="call", domain="local")
    graph = helper.make_graph([call], "g", [info("x", F16)], [info("y", F16)])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("local", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=imports, functions=[made], ir_version=10))


def renamed(first: str, second: str) -> ir.Model:
    """Two nodes that make tensors `first` and `second`: equal names can't be written with onnx_ir's parser."""
    made = model([node("Relu", ["x"], ["a"], "one"), node("Neg", ["a"], ["b"], "two")], [info("x")], [info("b")])
    for item, name in zip(made.graph, (first, second), strict=True):
        item.outputs[0].name = name
    return made


def cycle() -> ir.Model:
    made = model([node("Add", ["x", "x"], ["a"], "one"), node("Neg", ["a"], ["b"], "two")], [info("x")], [info("b")])
    first, second = made.graph
    first.replace_input_with(1, second.outputs[0])
    return made


def mm(weights: Sequence[onnx.TensorProto], **changes: object) -> ir.Model:
    return model([node("MatMul", ["x", "w"], ["y"], "fc")], [info("x", F16)], [info("y", F16)], weights, **changes)  # type: ignore[arg-type]


WRONG: dict[str, tuple[Callable[[], ir.Model], Sequence[str]]] = {
    "float32 weight in a half MatMul": (lambda: mm([weight("w", 16, 16)]), ["'w'", "'fc'", "float16", "Convert its data"]),
    "float32 scale in a half MatMul": (lambda: quantized_weight(np.float32, 23), ["'w'", "'fc'", "'ws'", "'dq'"]),
    "half scale before opset 19": (lambda: quantized_weight(np.float16, 18), ["'ws'", "'dq'", "opset 19"]),
    "in a branch": (lambda: branches(F32), ["'w'", "'inner'", "/if/then_branch"]),
    "in a function": (lambda: function(np.float32), ["'k'", "'scaled'", "local::Scaled"]),
    "output of another type": (
        lambda: model([node("Relu", ["x"], ["y"], "act")], [info("x", F16)], [info("y", F32)]),
        ["'y'", "'act'", "tensor(float16)"],
    ),
    "inner tensor declared of another type": (
        lambda: model(
            [node("Relu", ["x"], ["h"]), node("Neg", ["h"], ["y"])], [info("x")], [info("y")], inner=[info("h", F16)]
        ),
        ["'h'", "tensor(float16)", "tensor(float)"],
    ),
    "integers in a float operator": (
        lambda: model([node("Sigmoid", ["x"], ["y"], "act")], [info("x", I64)], [info("y", I64)]),
        ["'x'", "'act'", "tensor(int64)"],
    ),
    "present of another head size": (lambda: gqa("past", ("b", 2, "total", 8)), ["'present_k'", "'gqa'", "8", "16"]),
    "present of another head count": (lambda: gqa("past", ("b", 4, "total", 16)), ["'present_k'", "'gqa'", "4"]),
    "present of another rank": (lambda: gqa("past", ("b", 2, 16)), ["'present_k'", "'gqa'"]),
    "output of another size": (
        lambda: model(
            [node("MatMul", ["x", "w"], ["y"], "fc")], [info("x")], [info("y", F32, ("b", "s", 4))], [weight("w", 16, 8)]
        ),
        ["'y'", "'fc'", "8]"],
    ),
    "unknown domain": (
        lambda: model([helper.make_node("Foo", ["x"], ["y"], name="foo", domain="acme")], [info("x")], [info("y")]),
        ["'foo'", "'Foo'", "'acme'"],
    ),
    "unknown operator": (
        lambda: model([node("Softmix", ["x"], ["y"], "foo")], [info("x")], [info("y")]),
        ["'foo'", "'Softmix'", "23"],
    ),
    "operator of a later opset": (
        lambda: model(
            [node("Attention", ["x"] * 3, ["y"], "attn", q_num_heads=2, kv_num_heads=2)], [info("x")], [info("y")], opset=22
        ),
        ["'attn'", "'Attention'", "22", "came with 23"],
    ),
    "shapes that can't be multiplied": (
        lambda: model([node("MatMul", ["x", "w"], ["y"], "fc")], [info("x")], [info("y")], [weight("w", 8, 16)]),
        ["fc"],
    ),
    "two makers of one name": (lambda: renamed("h", "h"), ["'h'"]),
    "a maker with the name of an input": (lambda: renamed("x", "b"), ["'x'"]),
}

SOUND: dict[str, Callable[[], ir.Model]] = {
    "half scale at opset 19": lambda: quantized_weight(np.float16, 19),
    "half branch": lambda: branches(F16),
    "half function": lambda: function(np.float16),
    "present declared right": lambda: gqa("past", ("b", 2, "total", 16)),
    "present undeclared": lambda: gqa("past", None),
    "present named otherwise": lambda: gqa("past", ("batch", "heads", "more", "width")),
    "present longer than a fixed past": lambda: gqa(12, ("b", 2, 16, 16)),
    "bfloat16 without a CPU kernel": lambda: model([node("Add", ["x", "x"], ["y"])], [info("x", BF16)], [info("y", BF16)]),
    "operator of the runtime in the default domain": lambda: model(
        [node("SimplifiedLayerNormalization", ["x", "g"], ["y"])], [info("x")], [info("y")], [weight("g", 16)], opset=17
    ),
    "inner shape declared wrong": lambda: model(
        [node("MatMul", ["x", "w"], ["h"]), node("Neg", ["h"], ["y"])], [info("x")], [info("y", F32, None)],
        [weight("w", 16, 8)], inner=[info("h", F32, ("b", "s", 99))],
    ),
    "dead weight": lambda: model([node("Relu", ["x"], ["y"])], [info("x")], [info("y")], [weight("w", 64, 64)]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_models_are_named(case: str) -> None:
    build, words = WRONG[case]
    with pytest.raises(ModelError) as caught:
        validate(build())
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", SOUND)
def test_sound_models_pass_unchanged(case: str) -> None:
    checked = SOUND[case]()
    before = ir.to_proto(checked).SerializeToString()
    validate(checked)
    assert ir.to_proto(checked).SerializeToString() == before


def test_bytes_of_another_type_than_declared() -> None:
    """A half weight renamed to float32 and not converted: what careless folding leaves."""
    proto = ir.to_proto(mm([weight("w", 16, 16, dtype=np.float16)]))
    proto.graph.initializer[0].data_type = F32
    with pytest.raises(ModelError, match=r"'w'.*1024.*512"):
        validate(load(proto))


def test_structure_is_checked_in_memory_too() -> None:
    empty = model([], [info("x")], [info("x")])
    with pytest.raises(ModelError, match="nodes"):
        validate(empty)
    with pytest.raises(ModelError, match=r"cycle.*'one'.*'two'|cycle.*'two'.*'one'"):
        validate(load(ir.to_proto(cycle())))
    with pytest.raises(ModelError, match="order"):
        validate(cycle())
    orphan = model([node("Add", ["x", "x"], ["y"], "sum")], [info("x")], [info("y")])
    orphan.graph[0].replace_input_with(1, ir.Value(name="nowhere"))
    with pytest.raises(ModelError, match="nowhere"):
        validate(orphan)


def test_weights_are_not_read() -> None:
    """A model of many gigabytes is validated by its types and shapes alone."""

    def unreadable() -> ir.TensorProtocol:
        raise AssertionError

    checked = mm([weight("w", 16, 16, dtype=np.float16)])
    old = checked.graph.initializers["w"]
    old.const_value = ir.LazyTensor(unreadable, dtype=ir.DataType.FLOAT16, shape=ir.Shape([16, 64 * 1024]), name="w")
    old.shape = ir.Shape([16, 64 * 1024])
    checked.graph.outputs[0].shape = None
    validate(checked)


def test_results_have_the_last_word() -> None:
    declared = gqa("past", ("b", 2, "total", 16))
    names = [str(value.name) for value in declared.graph.outputs]
    sound = [np.zeros((1, 4, 32), np.float32), *(np.zeros((1, 2, 9, 16), np.float32) for _ in "kv")]
    check_outputs(declared, dict(zip(names, sound, strict=True)))
    with pytest.raises(ModelError, match=r"'present_k'.*\[1, 2, 9, 8\]"):
        check_outputs(declared, {"present_k": np.zeros((1, 2, 9, 8), np.float32)})
    with pytest.raises(ModelError, match=r"'present_v'.*FLOAT16"):
        check_outputs(declared, {"present_v": np.zeros((1, 2, 9, 16), np.float16)})


RIGHT = {"y": (2, 4, 32), "present_k": (2, 2, 4, 16), "present_v": (2, 2, 4, 16)}
"""Shapes that `gqa` makes of 4 tokens without a past, batch 2."""


@st.composite
def declarations(draw: st.DrawFn) -> dict[str, list[int | str | None] | None]:
    """A shape for each output: right, partial, missing, or wrong in a dimension or in the rank."""
    made: dict[str, list[int | str | None] | None] = {}
    for name, right in RIGHT.items():
        dims: list[int | str | None] = [draw(st.sampled_from([size, size, "any", None, size + 3])) for size in right]
        made[name] = draw(st.sampled_from([dims, dims, dims, None, [*dims, 1]]))
    return made


def is_wrong(shape: list[int | str | None] | None, right: tuple[int, ...]) -> bool:
    if shape is None:
        return False
    wrong = [want for want, size in zip(shape, right, strict=False) if isinstance(want, int) and want != size]
    return len(shape) != len(right) or bool(wrong)


@given(declared=declarations())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_declarations_are_right_or_an_error(declared: dict[str, list[int | str | None] | None]) -> None:
    checked = gqa("past", None)
    for value in checked.graph.outputs:
        shape = declared[str(value.name)]
        value.shape = None if shape is None else ir.Shape(shape)
    feeds = {
        "qkv": np.random.default_rng(0).standard_normal((2, 4, 96)).astype(np.float32),
        **{f"past_{role}": np.zeros((2, 2, 0, 16), np.float32) for role in "kv"},
        "lens": np.full(2, 3, np.int32),
        "total": np.array(4, np.int32),
    }

    def judge() -> None:
        validate(checked)
        check_outputs(checked, runtime.run(checked, feeds))

    wrong = [name for name, shape in declared.items() if is_wrong(shape, RIGHT[name])]
    if not wrong:
        judge()
        return
    with pytest.raises(ModelError) as caught:
        judge()
    assert any(f"'{name}'" in str(caught.value) for name in wrong)
