"""Models whose declarations are missing, partial or wrong, from a seed: what they compute stays what it was.

A case is a sound model with one to three edits of what it *says*: types and shapes of inputs, outputs and inner tensors,
names, the order of inputs and outputs, initializers listed as inputs, types and shapes of initializers, imports. Where a
model contradicts itself, refusing it is right; taking it is right only with the results of the sound model.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from layeredmodels import DECOMPOSED, OPERATOR, decoder, encoder, samples, tokens
from onnx import TensorProto, helper
from tinymodels import WIDTH, attention

from tests.corpora import entries

Arrays = dict[str, np.ndarray]
ACCEPTED, REFUSED, EITHER = "accepted", "refused", "either"
_NAMES = ("FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "INT64", "INT8", "BOOL", "STRING")
TYPES = [TensorProto.DataType.Value(name) for name in _NAMES]
SIZES = (0, 1, 2, 3, 7, 2**31)
CHOSEN = (
    "a_gqa_folded", "a_gqa_unfolded", "a_gqa_qdq_cast", "b_gqa_present_declared_ok", "b_gqa_present_undeclared",
    "c_static_causal1_nonpad", "c_static_causal0_mask_nonpad_fp16", "c_static_decomposed_causal1_nonpad", "c_static_if",
    "d_decomposed", "d_ms_attention", "d_ms_gqa", "d_ms_mha", "d_onnx23_3d_fp16", "d_onnx23_past", "d_onnx23_rope",
    "d_onnx23_sameqkv", "torch_sdpa_gqa-dynamo-23", "torch_sdpa_boolmask-dynamo-18", "torch_mha_cross-dynamo-23",
)  # fmt: skip


class DoesNotApplyError(Exception):
    """The model has nothing of what a kind changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sound:
    """A model that all is right with; `attentions` is the truth about them where a person wrote one."""

    name: str
    proto: onnx.ModelProto
    samples: list[Arrays]
    attentions: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with edited declarations; `inputs` and `outputs` are {name in the sound model: name here}."""

    number: int
    sound: Sound
    kinds: tuple[str, ...]
    wanted: str
    proto: onnx.ModelProto
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]

    @property
    def samples(self) -> list[Arrays]:
        """What the sound model takes, under the names here."""
        return [{self.inputs.get(name, name): array for name, array in one.items()} for one in self.sound.samples]

    def __str__(self) -> str:
        return f"case {self.number}, {self.sound.name}: {' + '.join(self.kinds)}"


def sound_models() -> list[Sound]:
    """Tiny models of every form with caches in every way, half precision among them."""
    x = np.random.default_rng(1).standard_normal((2, 5, WIDTH)).astype(np.float32)
    found = [
        Sound(name="operator", proto=attention(), samples=[{"x": x}]),
        Sound(name="encoder", proto=encoder(DECOMPOSED, layers=1), samples=samples(1)),
        Sound(name="decoder by operator", proto=decoder(OPERATOR, layers=1), samples=tokens(1, past=3, batch=1, layers=1)),
        Sound(name="decoder written out", proto=decoder(DECOMPOSED, layers=1), samples=tokens(1, past=3, batch=1, layers=1)),
    ]
    for entry in (*entries("ATTNQUANT_CASES", "cases"), *entries("ATTNQUANT_CORPUS", "corpus")):
        if entry.path.stem in CHOSEN:
            proto = onnx.load(entry.path)
            found.append(
                Sound(name=entry.path.stem, proto=proto, samples=entry.samples[:2], attentions=entry.truth["attentions"])
            )
    return found


def cases(seed: int, count: int, models: list[Sound] | None = None) -> Iterator[Case]:
    """`count` cases, the kinds in turn and models at random; the same for the same seed, without kinds that none has."""
    sound = models or sound_models()
    kinds = list(KINDS)
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        case = _case(number, kinds[number % len(kinds)], sound, chance)
        if case is not None:
            yield case


def _case(number: int, kind: str, sound: list[Sound], chance: random.Random) -> Case | None:
    for _ in range(100):
        model = chance.choice(sound)
        work = _Work(proto=onnx.ModelProto(), chance=chance)
        work.proto.CopyFrom(model.proto)
        done, more = [], chance.choice([0, 0, 1, 2])
        try:
            KINDS[kind].edit(work)
        except DoesNotApplyError:
            continue
        done.append(kind)
        for other in chance.sample(list(KINDS), more):
            try:
                KINDS[other].edit(work)
            except DoesNotApplyError:
                continue
            done.append(other)
        wanted = {KINDS[name].wanted for name in done}
        return Case(
            number=number, sound=model, kinds=tuple(done), proto=work.proto, inputs=work.inputs, outputs=work.outputs,
            wanted=wanted.pop() if len(wanted) == 1 else EITHER,
        )  # fmt: skip
    return None


@dataclass(slots=True, kw_only=True)
class _Work:
    proto: onnx.ModelProto
    chance: random.Random
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> onnx.GraphProto:
        return self.proto.graph

    def value(self, side: str) -> onnx.ValueInfoProto:
        """A declaration of a tensor with a type; of an inner one a true declaration is added where there is none."""
        found = [value for value in getattr(self.graph, side) if value.type.WhichOneof("value") == "tensor_type"]
        if side == "value_info" and (not found or self.chance.random() < 0.5):
            return self.inner()
        return self.one(found)

    def inner(self) -> onnx.ValueInfoProto:
        known = {value.name: value for value in _inferred(self.proto)}
        outputs = {value.name for value in self.graph.output}
        made = [name for node in self.graph.node for name in node.output if name and name not in outputs]
        name = self.one(made)
        for value in self.graph.value_info:
            if value.name == name:
                return value
        new = self.graph.value_info.add()
        new.CopyFrom(known.get(name) or helper.make_tensor_value_info(name, self._precision(), None))
        return new

    def _precision(self) -> int:
        """The type that the model computes in: what onnx can't infer is the float result of an operator of the runtime."""
        floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
        kinds = [value.type.tensor_type.elem_type for value in self.graph.input]
        kinds += [weight.data_type for weight in self.graph.initializer]
        return next((kind for kind in kinds if kind in floats), TensorProto.FLOAT)

    def one(self, found: Any) -> Any:
        """One of these."""
        if not len(found):
            raise DoesNotApplyError
        return self.chance.choice(list(found))


def _inferred(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    try:
        return list(onnx.shape_inference.infer_shapes(proto).graph.value_info)
    except Exception:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One way to be wrong, and what has to become of a model that is wrong in this way alone."""

    wanted: str
    edit: Callable[[_Work], None]


# What is said of an input, an output or an inner tensor


def _dims(value: onnx.ValueInfoProto) -> Any:
    if not value.type.tensor_type.HasField("shape") or not value.type.tensor_type.shape.dim:
        raise DoesNotApplyError
    return value.type.tensor_type.shape.dim


def _no_type(work: _Work, value: onnx.ValueInfoProto) -> None:
    value.ClearField("type")


def _no_element_type(work: _Work, value: onnx.ValueInfoProto) -> None:
    value.type.tensor_type.elem_type = 0


def _no_shape(work: _Work, value: onnx.ValueInfoProto) -> None:
    _dims(value)
    value.type.tensor_type.ClearField("shape")


def _partly(work: _Work, value: onnx.ValueInfoProto) -> None:
    dims = _dims(value)
    for dim in work.chance.sample(list(dims), work.chance.randint(1, len(dims))):
        dim.Clear()


def _symbols(work: _Work, value: onnx.ValueInfoProto) -> None:
    for dim in _dims(value):
        dim.dim_param = f"{value.name}.{work.chance.randrange(100)}"


def _one_symbol(work: _Work, value: onnx.ValueInfoProto) -> None:
    for dim in _dims(value):
        dim.dim_param = "n"


def _clashing_symbol(work: _Work, value: onnx.ValueInfoProto) -> None:
    known = [
        dim.dim_param
        for other in (*work.graph.input, *work.graph.output)
        for dim in other.type.tensor_type.shape.dim
        if dim.dim_param
    ]
    work.chance.choice(list(_dims(value))).dim_param = work.one(known)


def _other_type(work: _Work, value: onnx.ValueInfoProto) -> None:
    kinds = [kind for kind in TYPES if kind != value.type.tensor_type.elem_type]
    value.type.tensor_type.elem_type = work.chance.choice(kinds)


def _unknown_type(work: _Work, value: onnx.ValueInfoProto) -> None:
    value.type.tensor_type.elem_type = work.chance.choice([99, 1000])


def _other_rank(work: _Work, value: onnx.ValueInfoProto) -> None:
    dims = _dims(value)
    if work.chance.random() < 0.5:
        dims.pop()
    else:
        dims.add().dim_param = "more"


def _other_size(work: _Work, value: onnx.ValueInfoProto) -> None:
    dim = work.chance.choice(list(_dims(value)))
    dim.dim_value = work.chance.choice([size for size in SIZES if size != dim.dim_value])


def _negative_size(work: _Work, value: onnx.ValueInfoProto) -> None:
    work.chance.choice(list(_dims(value))).dim_value = -work.chance.randint(1, 5)


def _other_structure(work: _Work, value: onnx.ValueInfoProto) -> None:
    inner = onnx.TypeProto()
    inner.CopyFrom(value.type)
    if work.chance.random() < 0.3:
        value.type.sparse_tensor_type.elem_type = inner.tensor_type.elem_type
    else:
        make = work.chance.choice([helper.make_sequence_type_proto, helper.make_optional_type_proto])
        value.type.CopyFrom(make(inner))


SIDES = {"input": "input", "output": "output", "value_info": "inner tensor"}
EDITS: dict[str, tuple[Callable[[_Work, onnx.ValueInfoProto], None], str, str, str]] = {
    # what is edited, and what is wanted of an input, an output, an inner tensor
    "without type": (_no_type, REFUSED, EITHER, ACCEPTED),
    "without element type": (_no_element_type, REFUSED, EITHER, ACCEPTED),
    "without shape": (_no_shape, ACCEPTED, ACCEPTED, ACCEPTED),
    "of a shape in part": (_partly, ACCEPTED, ACCEPTED, ACCEPTED),
    "of symbols alone": (_symbols, ACCEPTED, ACCEPTED, ACCEPTED),
    "of one symbol": (_one_symbol, EITHER, EITHER, EITHER),
    "with the symbol of another axis": (_clashing_symbol, EITHER, EITHER, EITHER),
    "of another type": (_other_type, REFUSED, REFUSED, EITHER),
    "of an unknown type": (_unknown_type, REFUSED, REFUSED, EITHER),
    "of another rank": (_other_rank, REFUSED, REFUSED, EITHER),
    "of another size": (_other_size, EITHER, EITHER, EITHER),
    "of a negative size": (_negative_size, EITHER, EITHER, EITHER),
    "of another structure": (_other_structure, REFUSED, REFUSED, EITHER),
}


def _said(edit: Callable[[_Work, onnx.ValueInfoProto], None], side: str) -> Callable[[_Work], None]:
    return lambda work: edit(work, work.value(side))


# Inputs and outputs among themselves


def _swapped(work: _Work) -> None:
    border = [*work.graph.input, *work.graph.output]
    one, other = work.chance.sample(border, 2)
    if one.type == other.type:
        raise DoesNotApplyError
    kept = onnx.TypeProto()
    kept.CopyFrom(one.type)
    one.type.CopyFrom(other.type)
    other.type.CopyFrom(kept)


def _present_like_past(work: _Work) -> None:
    """A cache that is declared as long as it comes in."""
    pairs = [
        (given, made) for given in work.graph.input for made in work.graph.output
        if len(given.type.tensor_type.shape.dim) == 4 == len(made.type.tensor_type.shape.dim)
    ]  # fmt: skip
    given, made = work.one(pairs)
    made.type.tensor_type.shape.CopyFrom(given.type.tensor_type.shape)


def _reordered(side: str) -> Callable[[_Work], None]:
    def edit(work: _Work) -> None:
        values = getattr(work.graph, side)
        if len(values) < 2:
            raise DoesNotApplyError
        order = [onnx.ValueInfoProto.FromString(value.SerializeToString()) for value in values]
        work.chance.shuffle(order)
        del values[:]
        values.extend(order)

    return edit


def _renamed(side: str) -> Callable[[_Work], None]:
    def edit(work: _Work) -> None:
        value = work.one(getattr(work.graph, side))
        taken = {name for node in work.graph.node for name in (*node.input, *node.output)}
        new = work.chance.choice(["0", "past key/0", "présent:0", "x y", "a" * 300, "'quoted'", f"{value.name}.1", "None"])
        if new in taken or any(value.name == item.name for item in work.graph.initializer) or _has_bodies(work):
            raise DoesNotApplyError
        names = work.inputs if side == "input" else work.outputs
        original = next((old for old, now in names.items() if now == value.name), value.name)
        if value.name in {item.name for item in (work.graph.output if side == "input" else work.graph.input)}:
            raise DoesNotApplyError
        _rename(work.graph, value.name, new)
        names[original] = new

    return edit


def _has_bodies(work: _Work) -> bool:
    """Whether bodies of control flow may read a tensor."""
    return any(attribute.type == onnx.AttributeProto.GRAPH for node in work.graph.node for attribute in node.attribute)


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                if name == old:
                    names[place] = new
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.name == old:
            value.name = new


def _output_twice(work: _Work) -> None:
    work.graph.output.append(work.one(work.graph.output))


# Declarations of inner tensors


def _nothing_inner(work: _Work) -> None:
    if not work.graph.value_info:
        raise DoesNotApplyError
    del work.graph.value_info[:]


def _said_twice(work: _Work) -> None:
    work.graph.value_info.append(work.inner())


def _said_otherwise(work: _Work) -> None:
    value = onnx.ValueInfoProto.FromString(work.inner().SerializeToString())
    value.type.tensor_type.elem_type = work.chance.choice(TYPES)
    work.graph.value_info.append(value)


def _of_nothing(work: _Work) -> None:
    name = work.chance.choice(["nothing", "", "y.1"])
    work.graph.value_info.append(helper.make_tensor_value_info(name, work.chance.choice(TYPES), [3, "n"]))


def _of_border(side: str) -> Callable[[_Work], None]:
    def edit(work: _Work) -> None:
        name = work.one(getattr(work.graph, side)).name
        kind = work.chance.choice(TYPES)
        work.graph.value_info.append(helper.make_tensor_value_info(name, kind, work.chance.choice([None, [3, "n"], []])))

    return edit


# Initializers


def _listed(work: _Work, kind: str) -> None:
    known = {value.name for value in work.graph.input}
    tensor = work.one([item for item in work.graph.initializer if item.name not in known])
    value = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
    if kind == "type":
        _other_type(work, value)
    elif kind == "shape":
        (_other_rank if work.chance.random() < 0.5 or not tensor.dims else _other_size)(work, value)
    elif kind == "nothing":
        value.ClearField("type")
    work.graph.input.append(value)


def _other_data_type(work: _Work) -> None:
    """A type of the same size: no count of bytes gives it away."""
    same = {
        TensorProto.FLOAT: [TensorProto.INT32, TensorProto.UINT32],
        TensorProto.FLOAT16: [TensorProto.BFLOAT16, TensorProto.INT16],
        TensorProto.INT64: [TensorProto.UINT64, TensorProto.DOUBLE],
    }
    read = {name for node in work.graph.node for name in node.input}
    found = [item for item in work.graph.initializer if item.data_type in same and item.raw_data and item.name in read]
    tensor = work.one(found)
    tensor.data_type = work.chance.choice(same[tensor.data_type])


def _turned(work: _Work) -> None:
    tensor = work.one([item for item in work.graph.initializer if len(item.dims) > 1 and len(set(item.dims)) > 1])
    dims = list(tensor.dims)
    del tensor.dims[:]
    tensor.dims.extend(reversed(dims))


def _flat(work: _Work) -> None:
    tensor = work.one([item for item in work.graph.initializer if len(item.dims) > 1])
    size = int(np.prod(tensor.dims))
    del tensor.dims[:]
    tensor.dims.extend([size])


def _without_dims(work: _Work) -> None:
    tensor = work.one([item for item in work.graph.initializer if int(np.prod(item.dims)) > 1])
    del tensor.dims[:]


# Imports


def _import(work: _Work, domain: str) -> onnx.OperatorSetIdProto:
    found: onnx.OperatorSetIdProto = work.one([item for item in work.proto.opset_import if item.domain == domain])
    return found


def _not_imported(domain: str) -> Callable[[_Work], None]:
    def edit(work: _Work) -> None:
        _import(work, domain)
        kept = [item for item in work.proto.opset_import if item.domain != domain]
        del work.proto.opset_import[:]
        work.proto.opset_import.extend(kept or [helper.make_opsetid("com.microsoft", 1)])

    return edit


def _imported_twice(work: _Work) -> None:
    work.proto.opset_import.append(work.one(work.proto.opset_import))


def _spelled(work: _Work) -> None:
    _import(work, "").domain = "ai.onnx"


def _old(work: _Work) -> None:
    """Below what the operators came with."""
    _import(work, "").version = work.chance.choice([1, 7, 12])


def _newer(work: _Work) -> None:
    _import(work, "").version += 1


def _unknown_import(work: _Work) -> None:
    work.proto.opset_import.append(helper.make_opsetid("com.unknown", 1))


KINDS: dict[str, Kind] = {
    **{
        f"{word} {name}": Kind(wanted=wanted[place], edit=_said(edit, side))
        for name, (edit, *wanted) in EDITS.items()
        for place, (side, word) in enumerate(SIDES.items())
    },
    "declarations swapped": Kind(wanted=EITHER, edit=_swapped),
    "present declared as past": Kind(wanted=EITHER, edit=_present_like_past),
    "inputs in another order": Kind(wanted=ACCEPTED, edit=_reordered("input")),
    "outputs in another order": Kind(wanted=ACCEPTED, edit=_reordered("output")),
    "input renamed": Kind(wanted=ACCEPTED, edit=_renamed("input")),
    "output renamed": Kind(wanted=ACCEPTED, edit=_renamed("output")),
    "output twice": Kind(wanted=EITHER, edit=_output_twice),
    "no inner tensor declared": Kind(wanted=ACCEPTED, edit=_nothing_inner),
    "inner tensor declared twice": Kind(wanted=EITHER, edit=_said_twice),
    "inner tensor declared in two ways": Kind(wanted=EITHER, edit=_said_otherwise),
    "declaration of nothing": Kind(wanted=EITHER, edit=_of_nothing),
    "input declared as inner tensor too": Kind(wanted=EITHER, edit=_of_border("input")),
    "output declared as inner tensor too": Kind(wanted=EITHER, edit=_of_border("output")),
    "initializer declared as inner tensor": Kind(wanted=EITHER, edit=_of_border("initializer")),
    "initializer as input": Kind(wanted=ACCEPTED, edit=lambda work: _listed(work, "same")),
    "initializer as input of another type": Kind(wanted=REFUSED, edit=lambda work: _listed(work, "type")),
    "initializer as input of another shape": Kind(wanted=EITHER, edit=lambda work: _listed(work, "shape")),
    "initializer as input without type": Kind(wanted=EITHER, edit=lambda work: _listed(work, "nothing")),
    "initializer of another type": Kind(wanted=REFUSED, edit=_other_data_type),
    "initializer turned": Kind(wanted=EITHER, edit=_turned),
    "initializer flat": Kind(wanted=EITHER, edit=_flat),
    "initializer without sizes": Kind(wanted=REFUSED, edit=_without_dims),
    "no import of the standard": Kind(wanted=EITHER, edit=_not_imported("")),
    "no import of com.microsoft": Kind(wanted=EITHER, edit=_not_imported("com.microsoft")),
    "imported twice": Kind(wanted=ACCEPTED, edit=_imported_twice),
    "standard spelled out": Kind(wanted=ACCEPTED, edit=_spelled),
    "imports too old a standard": Kind(wanted=EITHER, edit=_old),
    "imports a newer standard": Kind(wanted=EITHER, edit=_newer),
    "imports an unknown domain": Kind(wanted=EITHER, edit=_unknown_import),
}
