import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tinymodels import attention

from attnquant import wire
from attnquant.errors import ModelError
from attnquant.model import load


def message(number, body):
    return bytes([number << 3 | 2]) + varint(len(body)) + body


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


GRAPH, NODE, INITIALIZER, ATTRIBUTE, INTS, STRINGS = 7, 1, 5, 5, 8, 9


@pytest.mark.parametrize(
    "body",
    [
        message(NODE, b"") * 1000,
        message(INITIALIZER, b"") * 1000,
        message(NODE, message(ATTRIBUTE, message(INTS, b"\1" * 1000))),
        message(NODE, message(ATTRIBUTE, message(STRINGS, b"") * 1000)),
        message(NODE, message(1, b"") * 1000),
        message(INITIALIZER, message(1, b"\1" * 1000)),
        b"\xfa\x3f\x00" * 1000,
    ],
    ids=["nodes", "initializers", "packed ints", "strings", "input names", "dims", "unknown fields"],
)
def test_a_small_file_does_not_unfold_without_limit(monkeypatch, tmp_path, body):
    monkeypatch.setattr(wire, "MAX_FIELDS", 900)
    path = tmp_path / "m.onnx"
    path.write_bytes(message(GRAPH, body))
    with pytest.raises(ModelError, match="more than 900"):
        load(path)
    monkeypatch.setattr(wire, "MAX_FIELDS", 1100)
    wire.check_wire(path.read_bytes(), "file")


def test_weights_do_not_count(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FIELDS", 300)
    tensors = [
        numpy_helper.from_array(np.zeros(5000, np.float32), "raw"),
        helper.make_tensor("typed", TensorProto.INT64, [5000], range(5000)),
    ]
    model = attention()
    model.graph.initializer.extend(tensors)
    wire.check_wire(model.SerializeToString(), "file")


def test_every_field_is_counted_once(monkeypatch):
    model = attention()

    def fields(part):
        total = 0
        for descriptor, value in part.ListFields():
            values = value if isinstance(value, list) or hasattr(value, "append") else [value]
            if descriptor.message_type is None:
                packed = descriptor.name in ("dims", "ints") and not descriptor.GetOptions().packed
                total += len(values) if packed or not descriptor.GetOptions().packed else 1
            else:
                total += sum(1 + fields(item) for item in values)
        return total

    whole = fields(model)
    data = model.SerializeToString()
    monkeypatch.setattr(wire, "MAX_FIELDS", whole)
    wire.check_wire(data, "file")
    monkeypatch.setattr(wire, "MAX_FIELDS", whole - 1)
    with pytest.raises(ModelError):
        wire.check_wire(data, "file")


@pytest.mark.parametrize(
    "data", [b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b" * 20, b"\x3a\x7f" + b"\0" * 5, b"\xff" * 12]
)
def test_what_is_no_message(monkeypatch, data):
    monkeypatch.setattr(wire, "MAX_FIELDS", 2)
    with pytest.raises(ModelError):
        wire.check_wire(data, "file")


def test_depth_is_limited(monkeypatch):
    monkeypatch.setattr(wire, "MAX_FIELDS", 1000)
    body = b""
    for _ in range(60):
        body = message(NODE, message(ATTRIBUTE, message(6, body)))
    data = message(GRAPH, body) + b"\x0a" + varint(5000) + b"x" * 5000
    with pytest.raises(ModelError, match="deep"):
        wire.check_wire(data, "file")


@pytest.mark.parametrize("field", ["op_type", "input", "name", "graph doc", "dimension", "attribute"])
def test_text_has_to_be_utf8(tmp_path, field):
    model = attention()
    node = model.graph.node[0]
    mark = "MARK_IT"
    if field == "input":
        node.input.append(mark)
    elif field == "graph doc":
        model.graph.doc_string = mark
    elif field == "dimension":
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = mark
    elif field == "attribute":
        node.attribute.append(helper.make_attribute(mark, 1))
    else:
        setattr(node, field, mark)
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString().replace(b"MARK_IT", b"MARK\xff\xfe!"))
    with pytest.raises(ModelError, match="UTF-8"):
        load(path)
    if field not in ("graph doc", "dimension"):
        with pytest.raises(ModelError, match="UTF-8"):
            load(onnx.ModelProto.FromString(path.read_bytes()))
