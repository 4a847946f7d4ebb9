"""What must not change the recognised attentions, tried at random; and random graphs with softmaxes that hold none."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import onnx
import onnx_ir as ir
from decomposed_cases import CASES
from decomposed_graphs import STEPS, WIDTH, Graph
from hypothesis import given, settings
from hypothesis import strategies as st

from attnquant.patterns import find_decomposed
from attnquant.roles import PortRole
from attnquant.site import AttentionSite

FIELDS = [
    "kind",
    "past",
    "q_heads",
    "kv_heads",
    "kv_repeat",
    "qk_head_dim",
    "v_head_dim",
    "causal",
    "softcap",
    "sinks",
    "cross_covariance",
]
OPERANDS = (PortRole.QUERY, PortRole.KEY, PortRole.VALUE, PortRole.PROBABILITIES, PortRole.CONTEXT)
CACHE = (PortRole.PAST_KEY, PortRole.PAST_VALUE, PortRole.PRESENT_KEY, PortRole.PRESENT_VALUE, PortRole.MASK)
SEEDS = st.integers(0, 2**32 - 1)


def essence(site: AttentionSite, names: dict[str, str]) -> dict[str, object]:
    """What stays: facts, and the edges at the products by node and index; of caches and masks, that they are there."""
    made: dict[str, object] = {field: getattr(site, field) for field in FIELDS}
    made["scale"] = None if site.scale is None else round(site.scale, 5)
    made["edges"] = {
        role: (names.get(port.node, port.node), port.index) for role, port in site.ports.items() if role in OPERANDS
    }
    made["others"] = [role for role in CACHE if role in site.ports]
    made["branch"] = sorted(site.branch)
    return made


def found(proto: onnx.ModelProto, names: dict[str, str] | None = None) -> list[dict[str, object]]:
    return [essence(site, names or {}) for site in find_decomposed(ir.from_proto(proto))[0]]


def renamed(proto: onnx.ModelProto, random: Random) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Every tensor and node under a meaningless name; {new node name: old}."""
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = made.graph
    tensors: dict[str, str] = {"": ""}

    def new(name: str) -> str:
        return tensors.setdefault(name, f"t{random.getrandbits(40)}_{len(tensors)}")

    for value in [*graph.input, *graph.output, *graph.initializer]:
        value.name = new(value.name)
    names = {}
    for node in graph.node:
        node.input[:], node.output[:] = map(new, list(node.input)), map(new, list(node.output))
        old, node.name = node.name, f"n{random.getrandbits(40)}_{len(names)}"
        names[node.name] = old
    return made, names


def reordered(proto: onnx.ModelProto, random: Random) -> onnx.ModelProto:
    """Another topological order of the same nodes, initializers and inputs shuffled."""
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    ready = {"", *(value.name for value in [*made.graph.input, *made.graph.initializer])}
    waiting, order = list(made.graph.node), []
    while waiting:
        possible = [node for node in waiting if set(node.input) <= ready]
        node = random.choice(possible)
        waiting.remove(node)
        order.append(onnx.NodeProto.FromString(node.SerializeToString()))
        ready |= set(node.output)
    for items, shuffled in ((made.graph.node, order), (made.graph.initializer, list(made.graph.initializer))):
        copies = [type(item).FromString(item.SerializeToString()) for item in shuffled]
        if items is made.graph.initializer:
            random.shuffle(copies)
        del items[:]
        items.extend(copies)
    return made


def padded(proto: onnx.ModelProto, random: Random, share: float = 0.3) -> onnx.ModelProto:
    """Identity, Cast to the same type or two Transposes that undo each other in front of some float inputs."""
    typed = onnx.shape_inference.infer_shapes(proto)
    kinds = {
        value.name: value.type.tensor_type for value in [*typed.graph.value_info, *typed.graph.input, *typed.graph.output]
    }
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    del made.graph.node[:]
    for node in proto.graph.node:
        copy = onnx.NodeProto.FromString(node.SerializeToString())
        for index, name in enumerate(copy.input):
            kind = kinds.get(name)
            if kind is None or kind.elem_type != onnx.TensorProto.FLOAT or random.random() > share:
                continue
            own = f"{node.name}/{index}"
            rank = len(kind.shape.dim) if kind.HasField("shape") else 0
            what = random.choice(["Identity", "Cast", "Transpose"] if rank > 1 else ["Identity", "Cast"])
            if what == "Transpose":
                order = random.sample(range(rank), rank)
                back = [order.index(axis) for axis in range(rank)]
                made.graph.node.append(onnx.helper.make_node("Transpose", [name], [f"{own}/a"], name=f"{own}/A", perm=order))
                made.graph.node.append(
                    onnx.helper.make_node("Transpose", [f"{own}/a"], [f"{own}/b"], name=f"{own}/B", perm=back)
                )
            else:
                extra = {"to": onnx.TensorProto.FLOAT} if what == "Cast" else {}
                made.graph.node.append(onnx.helper.make_node(what, [name], [f"{own}/b"], name=f"{own}/B", **extra))
            copy.input[index] = f"{own}/b"
        made.graph.node.append(copy)
    return made


def commuted(proto: onnx.ModelProto, random: Random) -> onnx.ModelProto:
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    for node in made.graph.node:
        if node.op_type in ("Mul", "Add") and random.random() < 0.5:
            node.input[:] = reversed(list(node.input))
    return made


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), SEEDS)
def test_renaming_changes_nothing(name: str, seed: int) -> None:
    proto = CASES[name]()[0].proto()
    changed, names = renamed(proto, Random(seed))
    assert found(changed, names) == found(proto)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), SEEDS)
def test_reordering_changes_nothing(name: str, seed: int) -> None:
    proto = CASES[name]()[0].proto()
    assert found(reordered(proto, Random(seed))) == found(proto)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), SEEDS)
def test_inserting_what_does_nothing_changes_nothing(name: str, seed: int) -> None:
    proto = CASES[name]()[0].proto()
    assert found(padded(proto, Random(seed))) == found(proto)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), SEEDS)
def test_commuting_operands_changes_nothing(name: str, seed: int) -> None:
    proto = CASES[name]()[0].proto()
    assert found(commuted(proto, Random(seed))) == found(proto)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(CASES)), SEEDS)
def test_all_of_it_at_once_changes_nothing(name: str, seed: int) -> None:
    random = Random(seed)
    proto = CASES[name]()[0].proto()
    changed, names = renamed(reordered(commuted(padded(proto, random), random), random), random)
    assert found(changed, names) == found(proto)


# --- random graphs without attention ---


@dataclass(frozen=True)
class Tensor:
    """A tensor [batch, 5, 32] or, where `pairs`, [batch, 5, 5]; `scores` where a product of activations is behind it and
    `probabilities` where a softmax over such scores is."""

    name: str
    pairs: bool = False
    scores: bool = False
    probabilities: bool = False


def no_attention(seed: int) -> onnx.ModelProto:
    """Linear layers, norms, gates, pools, products and softmaxes at random. A product never takes a tensor with
    probabilities behind it, other than times a constant: what makes an attention of scores is left out, no more."""
    random = Random(seed)
    graph = Graph()
    graph.input("x")
    made = [Tensor("x"), Tensor(graph.linear("x"))]
    for _ in range(random.randint(6, 24)):
        one = random.choice(made)
        other = random.choice([tensor for tensor in made if tensor.pairs == one.pairs])
        made.append(_step(graph, random, one, other))
    if not any("Softmax" in tensor.name for tensor in made):
        made.append(Tensor(graph.op("Softmax", made[-1].name, axis=-1)))
    graph.op("Identity", made[-1].name, name="y")
    for tensor in random.sample(made[1:], min(3, len(made) - 1)):
        graph.output(tensor.name)
    graph.output("y")
    return graph.proto()


def _step(graph: Graph, random: Random, one: Tensor, other: Tensor) -> Tensor:
    kind = random.choice(
        ["linear", "softmax", "softmax", "softmax", "binary", "unary", "norm", "product", "pool", "select", "back"]
    )
    name, size = one.name, STEPS if one.pairs else WIDTH
    if kind == "linear":
        wide = random.choice([STEPS, WIDTH])
        return replace(one, name=graph.linear(name, wide, size), pairs=wide == STEPS)
    if kind == "softmax":
        probabilities = one.scores or one.probabilities
        return replace(one, name=graph.op("Softmax", name, axis=random.choice([-1, -1, 1, 2])), probabilities=probabilities)
    if kind == "binary":
        both = replace(one, scores=one.scores or other.scores, probabilities=one.probabilities or other.probabilities)
        return replace(both, name=graph.op(random.choice(["Add", "Mul", "Sub", "Max"]), name, other.name))
    if kind == "unary":
        return replace(one, name=graph.op(random.choice(["Relu", "Sigmoid", "Tanh", "Exp", "Neg", "Identity"]), name))
    if kind == "norm":
        return replace(
            one, name=graph.op("LayerNormalization", name, graph.const(np.ones(size)), graph.const(np.zeros(size)))
        )
    if kind == "pool":
        axis = graph.ints(random.choice([1, 2]))
        return replace(one, name=graph.op("Mul", name, graph.op(random.choice(["ReduceSum", "ReduceMax"]), name, axis)))
    if kind == "select":
        keep = graph.op("Greater", name, graph.const(0.0))
        return replace(one, name=graph.op("Where", keep, name, graph.const(random.choice([0.0, -1e9]))))
    if kind == "back" and one.pairs:
        return replace(one, name=graph.op("MatMul", name, graph.weight(STEPS, WIDTH)), pairs=False)
    if one.pairs or one.probabilities or other.probabilities:
        return replace(one, name=graph.op("Identity", name))
    turned = graph.op("Transpose", other.name, perm=[0, 2, 1])
    return Tensor(graph.op("MatMul", name, turned), pairs=True, scores=True)


def test_random_graphs_without_attention() -> None:
    """500 graphs, every one with a softmax, many with products of activations in front of it: no site in any."""
    softmaxes = behind = 0
    for seed in range(500):
        proto = no_attention(seed)
        sites, misses = find_decomposed(ir.from_proto(proto))
        assert sites == [], seed
        softmaxes += sum(node.op_type == "Softmax" for node in proto.graph.node)
        behind += sum(miss.progress >= 3 for miss in misses)
    assert softmaxes >= 1000
    assert behind >= 50


def test_random_graphs_are_valid() -> None:
    for seed in range(0, 500, 25):
        onnx.shape_inference.infer_shapes(no_attention(seed), check_type=True, strict_mode=True)


# --- damaged graphs ---


def damaged(proto: onnx.ModelProto, random: Random) -> onnx.ModelProto:
    """Inputs left out, dropped, added and crossed, attributes dropped and absurd, operators exchanged, sizes changed."""
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    kinds = sorted(
        {node.op_type for node in made.graph.node} | {"Softmax", "Concat", "Split", "Einsum", "Conv", "Where", "Loop"}
    )
    tensors = [name for node in made.graph.node for name in node.output]
    for _ in range(random.randint(1, 5)):
        node = random.choice(made.graph.node)
        what = random.randrange(7)
        if what == 0:
            node.op_type = random.choice(kinds)
        elif what == 1 and node.input:
            node.input[random.randrange(len(node.input))] = random.choice(["", *tensors])
        elif what == 2 and node.input:
            del node.input[random.randrange(len(node.input))]
        elif what == 3:
            node.input.append(random.choice(tensors))
        elif what == 4 and node.attribute:
            del node.attribute[random.randrange(len(node.attribute))]
        elif what == 5 and node.attribute:
            attribute = random.choice(node.attribute)
            attribute.i = random.choice([-100, 0, 7, 2**62])
            attribute.ints[:] = [random.choice([-9, 0, 5, 2**40]) for _ in attribute.ints]
        elif made.graph.initializer:
            tensor = random.choice(made.graph.initializer)
            array = onnx.numpy_helper.to_array(tensor).copy()
            if array.dtype == np.int64 and array.size:
                array.reshape(-1)[random.randrange(array.size)] = random.choice([0, -1, -2, 99, 2**62])
                tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    return made


def test_damaged_graphs_raise_nothing() -> None:
    """What makes no sense is not recognised, or recognised in part; it is never an error of its own."""
    names = sorted(CASES)
    count = 0
    for seed in range(400):
        random = Random(seed)
        proto = damaged(CASES[random.choice(names)]()[0].proto(), random)
        try:
            model = ir.from_proto(proto)
        except (ValueError, KeyError, TypeError, RuntimeError):
            continue
        find_decomposed(model)
        count += 1
    assert count >= 300
