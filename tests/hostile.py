"""Broken and hostile inputs from a seed: models, external data, calibration data and recipes, each with what has to happen.

A case is written into a folder of its own. `outcome` is "refused" where the input must be refused as bad (exit code 1), or
"either" where damage at random may have left something valid.
"""

import os
import random
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tinymodels import HEADS, WIDTH, attention, made

GOOD = np.random.default_rng(1).standard_normal((2, 5, WIDTH)).astype(np.float32)

Edit = Callable[[onnx.ModelProto, random.Random], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input: `kind` says what is wrong, `blames` which part."""

    kind: str
    blames: str
    outcome: str
    model: Path
    data: Path
    recipe: Path | None = None


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """`count` cases, the kinds in turn, each below `folder`; the same for the same seed."""
    kinds = [*BYTES, *GRAPHS, *EXTERNAL, *DATA, *RECIPES]
    for index in range(count):
        chance = random.Random(f"{seed}/{index}")
        place = folder / f"{index:04}"
        place.mkdir()
        yield _written(kinds[index % len(kinds)], chance, place)


def _written(kind: str, chance: random.Random, place: Path) -> Case:
    model, data = place / "model.onnx", place / "data.npz"
    proto = attention()
    outcome, blames, recipe = "refused", "model", None
    if kind in BYTES:
        change, outcome = BYTES[kind]
        model.write_bytes(change(proto.SerializeToString(), chance))
    elif kind in GRAPHS:
        GRAPHS[kind](proto, chance)
        model.write_bytes(proto.SerializeToString().replace(b"MARK_IT", b"MARK\xff\xfe!"))
    elif kind in EXTERNAL:
        EXTERNAL[kind](proto, chance, place)
        model.write_bytes(proto.SerializeToString())
    else:
        model.write_bytes(proto.SerializeToString())
        blames = "data" if kind in DATA else "recipe"
    if kind in DATA:
        DATA[kind](data, chance)
    else:
        np.savez(data, x=GOOD)
    if kind in RECIPES:
        recipe = place / "recipe.toml"
        recipe.write_bytes(RECIPES[kind](chance))
    if kind in HARMLESS:
        outcome = "either"
    return Case(kind=kind, blames=blames, outcome=outcome, model=model, data=data, recipe=recipe)


# Bytes of the model file


def _flipped(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randint(1, 20)):
        out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    return bytes(out)


def _inserted(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + chance.randbytes(chance.randint(1, 8)) + data[at:]


def _swapped(data: bytes, chance: random.Random) -> bytes:
    first, second = sorted(chance.sample(range(len(data)), 2))
    return data[second:] + data[first:second] + data[:first]


def _structure_flipped(data: bytes, chance: random.Random) -> bytes:
    """Flips outside the weights, where they hurt."""
    out = bytearray(data)
    graph = onnx.ModelProto.FromString(data)
    spans = [(start, start + len(t.raw_data)) for t in graph.graph.initializer if (start := data.find(t.raw_data)) >= 0]
    places = [at for at in range(len(data)) if not any(low <= at < high for low, high in spans)]
    for at in chance.sample(places, chance.randint(1, 4)):
        out[at] = chance.randrange(256)
    return bytes(out)


BYTES: dict[str, tuple[Callable[[bytes, random.Random], bytes], str]] = {
    "empty file": (lambda data, chance: b"", "refused"),
    "cut off": (lambda data, chance: data[: chance.randrange(len(data))], "either"),
    "cut off at the end": (lambda data, chance: data[: -chance.randint(1, 40)], "either"),
    "noise": (lambda data, chance: chance.randbytes(chance.randint(1, 5000)), "refused"),
    "flipped bits": (_flipped, "either"),
    "flipped structure": (_structure_flipped, "either"),
    "flipped structure again": (_structure_flipped, "either"),
    "inserted bytes": (_inserted, "either"),
    "parts swapped": (_swapped, "either"),
    "a pickle": (lambda data, chance: b"\x80\x04\x95" + data, "refused"),
    "a zip archive": (lambda data, chance: b"PK\x03\x04" + data, "refused"),
    "a web page": (lambda data, chance: b"<!DOCTYPE html><html>404</html>", "refused"),
    "appended noise": (lambda data, chance: data + chance.randbytes(chance.randint(1, 100)), "either"),
    "nested 200 deep": (lambda data, chance: _nested(200), "refused"),
    "a million empty nodes": (lambda data, chance: _message(7, _message(1, b"") * 1_000_001), "refused"),
}


def _message(number: int, body: bytes) -> bytes:
    size, length = b"", len(body)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + body


def _nested(depth: int) -> bytes:
    body = b""
    for _ in range(depth):
        body = _message(1, _message(5, _message(6, body)))
    return _message(7, body)


# The graph


def _tensor(proto: onnx.ModelProto, chance: random.Random) -> onnx.TensorProto:
    return chance.choice(proto.graph.initializer)


def _cycle(proto: onnx.ModelProto, chance: random.Random) -> None:
    proto.graph.node[chance.randrange(3)].input[0] = chance.choice(["a", "y"])


def _lost_input(proto: onnx.ModelProto, chance: random.Random) -> None:
    node = chance.choice(proto.graph.node)
    node.input[chance.randrange(len(node.input))] = "nowhere"


def _wrong_shape(proto: onnx.ModelProto, chance: random.Random) -> None:
    tensor = _tensor(proto, chance)
    tensor.CopyFrom(numpy_helper.from_array(np.ones((WIDTH - chance.randint(1, 9), WIDTH), np.float32), tensor.name))


def _wrong_type(proto: onnx.ModelProto, chance: random.Random) -> None:
    tensor = _tensor(proto, chance)
    kind = chance.choice([np.float64, np.int32, np.int8, np.float16])
    tensor.CopyFrom(numpy_helper.from_array(np.ones((WIDTH, WIDTH), kind), tensor.name))


def _recursion(proto: onnx.ModelProto, chance: random.Random) -> None:
    body = [helper.make_node("F", ["a"], ["b"], domain="local")]
    proto.functions.append(helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("local", 1)]))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node[0].op_type, proto.graph.node[0].domain = "F", "local"
    del proto.graph.node[0].input[1]


def _sparse(proto: onnx.ModelProto, dims: list[int], index: int) -> None:
    sparse = onnx.SparseTensorProto(dims=dims)
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "w_q"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([index], np.int64)))
    del proto.graph.initializer[0]
    proto.graph.sparse_initializer.append(sparse)


def _edit(statement: Callable[[onnx.ModelProto], object]) -> Edit:
    return lambda proto, chance: (statement(proto), None)[1]


GRAPHS: dict[str, Edit] = {
    "cycle": _cycle,
    "an input that nothing makes": _lost_input,
    "an output that nothing makes": _edit(lambda proto: setattr(proto.graph.output[0], "name", "nowhere")),
    "no nodes": _edit(lambda proto: proto.graph.ClearField("node")),
    "no outputs": _edit(lambda proto: proto.graph.ClearField("output")),
    "no graph": _edit(lambda proto: proto.ClearField("graph")),
    "no opset": _edit(lambda proto: proto.ClearField("opset_import")),
    "opset from the future": _edit(lambda proto: setattr(proto.opset_import[0], "version", 999)),
    "opset zero": _edit(lambda proto: setattr(proto.opset_import[0], "version", 0)),
    "two opsets": _edit(lambda proto: proto.opset_import.append(helper.make_opsetid("ai.onnx", 18))),
    "IR version from the future": _edit(lambda proto: setattr(proto, "ir_version", 999)),
    "no IR version": _edit(lambda proto: proto.ClearField("ir_version")),
    "unknown operator": _edit(lambda proto: setattr(proto.graph.node[4], "op_type", "MatMulPlus")),
    "unknown domain": _edit(lambda proto: setattr(proto.graph.node[4], "domain", "com.unknown")),
    "text that is no UTF-8": lambda proto, chance: setattr(
        chance.choice(proto.graph.node), chance.choice(["name", "op_type"]), "MARK_IT"
    ),
    "no operator type": _edit(lambda proto: proto.graph.node[1].ClearField("op_type")),
    "attribute twice": _edit(lambda proto: proto.graph.node[3].attribute.append(proto.graph.node[3].attribute[0])),
    "impossible heads": _edit(lambda proto: setattr(proto.graph.node[3].attribute[1], "i", HEADS + 1)),
    "initializer twice": lambda proto, chance: proto.graph.initializer.append(_tensor(proto, chance)),
    "input twice": _edit(lambda proto: proto.graph.input.append(proto.graph.input[0])),
    "output of two nodes": _edit(lambda proto: proto.graph.node.append(proto.graph.node[0])),
    "weights too short": lambda proto, chance: setattr(
        t := _tensor(proto, chance), "raw_data", t.raw_data[: -chance.randint(1, 99)]
    ),
    "weights too long": lambda proto, chance: setattr(
        t := _tensor(proto, chance), "raw_data", t.raw_data + b"\0" * chance.randint(1, 9)
    ),
    "unknown element type": lambda proto, chance: setattr(
        _tensor(proto, chance), "data_type", chance.choice([0, 99, -1, 2**31 - 1])
    ),
    "element type of another size": lambda proto, chance: setattr(_tensor(proto, chance), "data_type", TensorProto.DOUBLE),
    "element type of another operator": _wrong_type,
    "shape of another size": _wrong_shape,
    "negative shape": lambda proto, chance: _tensor(proto, chance).dims.__setitem__(0, -chance.randint(1, 99)),
    "enormous shape": lambda proto, chance: _tensor(proto, chance).dims.__setitem__(0, 2 ** chance.randint(33, 62)),
    "data in two fields": lambda proto, chance: _tensor(proto, chance).float_data.append(1.0),
    "a function that calls itself": _recursion,
    "sparse index outside": _edit(lambda proto: _sparse(proto, [WIDTH, WIDTH], WIDTH * WIDTH)),
    "sparse bomb": _edit(lambda proto: _sparse(proto, [2**30, 2**30], 5)),
}


# Data outside the file


def _outside(proto: onnx.ModelProto, chance: random.Random, **entries: str) -> bytes:
    tensor = _tensor(proto, chance)
    data = tensor.raw_data
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return data


def _location(*choices: str) -> Callable[[onnx.ModelProto, random.Random, Path], None]:
    def write(proto: onnx.ModelProto, chance: random.Random, place: Path) -> None:
        (place.parent / "outside.bin").write_bytes(b"\0" * 4096)
        _outside(proto, chance, location=chance.choice(choices))

    return write


def _short(proto: onnx.ModelProto, chance: random.Random, place: Path) -> None:
    data = _outside(proto, chance, location="w.bin")
    (place / "w.bin").write_bytes(data[: -chance.randint(1, len(data))])


def _numbers(proto: onnx.ModelProto, chance: random.Random, place: Path) -> None:
    key = chance.choice(["offset", "length"])
    data = _outside(proto, chance, location="w.bin", **{key: chance.choice(["-1", "x", str(2**63), "1e3", "7777"])})
    (place / "w.bin").write_bytes(data)


def _link(proto: onnx.ModelProto, chance: random.Random, place: Path) -> None:
    (place.parent / "outside.bin").write_bytes(b"\0" * 4096)
    if chance.random() < 0.5:
        os.symlink(place.parent / "outside.bin", place / "w.bin")
        _outside(proto, chance, location="w.bin")
    else:
        os.symlink("..", place / "up")
        _outside(proto, chance, location="up/outside.bin")


def _pipe(proto: onnx.ModelProto, chance: random.Random, place: Path) -> None:
    _outside(proto, chance, location="w.bin")
    if chance.random() < 0.5:
        os.mkfifo(place / "w.bin")
    else:
        (place / "w.bin").mkdir()


EXTERNAL: dict[str, Callable[[onnx.ModelProto, random.Random, Path], None]] = {
    "external data missing": _location("none.bin", "none/w.bin"),
    "external data above the folder": _location("../outside.bin", "a/../../outside.bin", "..\\outside.bin", ".."),
    "external data at an absolute path": _location(
        "/etc/hostname", "/proc/self/mem", "C:\\windows\\win.ini", "\\\\host\\share"
    ),
    "external data nowhere": _location("", ".", "\0", "w\0.bin"),
    "external data cut off": _short,
    "external data at no number": _numbers,
    "external data behind a link": _link,
    "external data in a pipe or folder": _pipe,
}


# Calibration data


def _saved(make: Callable[[random.Random], dict[str, np.ndarray]]) -> Callable[[Path, random.Random], None]:
    return lambda path, chance: np.savez(path, **make(chance))


def _spoiled(value: float) -> Callable[[Path, random.Random], None]:
    def write(path: Path, chance: random.Random) -> None:
        array = GOOD.copy()
        array.reshape(-1)[chance.randrange(array.size)] = value
        np.savez(path, x=array)

    return write


def _damaged(path: Path, chance: random.Random) -> None:
    np.savez(path, x=GOOD)
    whole = path.read_bytes()
    path.write_bytes(
        chance.choice([b"", whole[: chance.randrange(len(whole))], chance.randbytes(500), whole[:40] + b"\xff" * 60])
    )


def _claims(path: Path, chance: random.Random) -> None:
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w") as handle:
        np.lib.format.write_array_header_1_0(
            handle, {"descr": "<f4", "fortran_order": False, "shape": (2 ** chance.randint(34, 60),)}
        )


DATA: dict[str, Callable[[Path, random.Random], None]] = {
    "NaN": _spoiled(np.nan),
    "infinity": _spoiled(np.inf),
    "constant": _saved(lambda chance: {"x": np.full((1, 4, WIDTH), chance.choice([0, 1, -3.5]), np.float32)}),
    "no rows": _saved(lambda chance: {"x": GOOD[:0]}),
    "no arrays": _saved(lambda chance: {}),
    "wrong input name": _saved(lambda chance: {chance.choice(["X", "input", "x.1"]): GOOD}),
    "one input too many": _saved(lambda chance: {"x": GOOD, "mask": np.ones((2, 5), bool)}),
    "wrong element type": _saved(lambda chance: {"x": GOOD.astype(chance.choice([np.float64, np.int32, np.float16, "U8"]))}),
    "wrong rank": _saved(lambda chance: {"x": chance.choice([GOOD[0], GOOD[None], np.float32(1)])}),
    "wrong size": _saved(lambda chance: {"x": GOOD[..., : chance.randint(1, WIDTH - 1)]}),
    "Python objects": _saved(lambda chance: {"x": np.array([None, {}], dtype=object)}),
    "damaged": _damaged,
    "an array that claims to be huge": _claims,
    "an empty folder": lambda path, chance: path.mkdir(),
    "no such file": lambda path, chance: None,
}


# Recipes, which only the command line reads

RECIPES: dict[str, Callable[[random.Random], bytes]] = {
    "recipe that is no TOML": lambda chance: chance.choice([b"= =", b"\xff\xfe", b"[roles", b"[[rules]]\nsite = "]),
    "recipe with an unknown role": lambda chance: b'extends = "int8"\n[roles.banana]\ndtype = "int8"\n',
    "recipe with an unknown type": lambda chance: b'extends = "int8"\n[roles.key]\ndtype = "int7"\n',
    "recipe with a broken pattern": lambda chance: b'extends = "int8"\n[[rules]]\nsite = "("\nroles.query.dtype = "none"\n',
    "recipe for an unknown node": lambda chance: (
        b'extends = "int8"\n[[rules]]\nsite = "no such site"\nroles.query.dtype = "none"\n'
    ),
    "recipe that extends nothing": lambda chance: b'extends = "int99"\n',
}

HARMLESS = {"constant", "IR version from the future", "one input too many"}
"""What may well work: constant data give finite scales, and arrays that the model does not take are left out."""


def sound(folder: Path) -> Case:
    """The input that all others were made from, which has to be accepted."""
    model, data = folder / "model.onnx", folder / "data.npz"
    model.write_bytes(attention().SerializeToString())
    np.savez(data, x=GOOD)
    return Case(kind="sound", blames="nothing", outcome="accepted", model=model, data=data)


__all__ = ["Case", "cases", "made", "sound"]
