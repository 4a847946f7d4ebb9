"""A look at the wire format of a model file before it is parsed: no small file unfolds into all memory, all text is text.

Protobuf turns a message of 2 bytes into an object of 80 to 170 bytes (measured, upb), and onnx_ir makes a node of one
into some kilobytes more. The walk below counts what would be built without building it; weights are skipped in one step.
It takes about 20 microseconds a node. Text that is not UTF-8 would come out of protobuf as bytes, and fail far from here.
Encoding: https://protobuf.dev/programming-guides/encoding/
"""

import functools

import onnx

from attnquant.errors import ModelError

MAX_FILE_BYTES = 2**31 - 1
"""The largest message that protobuf can hold; larger models keep their weights in external data."""
MAX_FIELDS = 5_000_000
"""Fields, and numbers in lists, of one model file outside its weights; 1,000 nodes have about 20,000."""
MAX_DEPTH = 100
"""Messages inside each other, protobuf's own limit."""

_WEIGHTS = frozenset({"raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"})
_FIXED = {1: 8, 5: 4}
_SKIP, _TEXT, _NUMBERS = "", "text", "numbers"

Table = dict[int, str]


def check_wire(data: bytes, where: str) -> None:
    """Raise ModelError where `data` is no protobuf message, or would unfold into more than the limits above.

    `where` names the file in messages. Text, names above all, has to be UTF-8.
    """
    try:
        _walk(memoryview(data), where)
    except UnicodeDecodeError as problem:
        msg = (
            f"{where} holds a name or text that is not UTF-8: expected text, got {bytes(problem.object)[:40]!r}. Export it "
            "again."
        )
        raise ModelError(msg) from None
    except IndexError:
        msg = (
            f"{where} is not a complete ONNX file: expected a protobuf message, got one that is cut off. Export or copy it "
            "again."
        )
        raise ModelError(msg) from None


def _walk(data: memoryview, where: str) -> None:
    fields = 0
    position = 0
    ends = [len(data)]
    tables = [_table(onnx.ModelProto.DESCRIPTOR.full_name)]
    while ends:
        if position >= ends[-1]:
            ends.pop()
            tables.pop()
            continue
        tag, position = _varint(data, position)
        fields += 1
        wire_type = tag & 7
        if wire_type == 2:
            length, position = _varint(data, position)
            kind = tables[-1].get(tag >> 3, _SKIP)
            if position + length > ends[-1]:
                raise IndexError
            if kind == _TEXT:
                str(data[position : position + length], "utf-8")
            elif kind == _NUMBERS:
                fields += length
            elif kind and length:
                ends.append(position + length)
                tables.append(_table(kind))
                length = 0
            position += length
        elif wire_type == 0:
            _, position = _varint(data, position)
        elif wire_type in _FIXED:
            position += _FIXED[wire_type]
        else:
            msg = (
                f"{where} is not an ONNX file: expected a protobuf message, got wire type {wire_type} at byte {position}. "
                "Export it again."
            )
            raise ModelError(msg)
        if fields > MAX_FIELDS or len(ends) > MAX_DEPTH:
            raise ModelError(_too_much(where, deep=len(ends) > MAX_DEPTH))
    if position > len(data):
        raise IndexError


def _too_much(where: str, *, deep: bool) -> str:
    if deep:
        return (
            f"{where} nests messages more than {MAX_DEPTH} deep: expected fewer, as protobuf does. Flatten its control flow."
        )
    return (
        f"{where} holds more than {MAX_FIELDS:,} fields outside its weights, which would unfold into gigabytes of memory: "
        "expected a model of at most this size. Keep large constants as tensors with raw_data."
    )


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    result = data[position]
    if result < 128:
        return result, position + 1
    result &= 127
    for shift in range(7, 70, 7):
        position += 1
        byte = data[position]
        result |= (byte & 127) << shift
        if byte < 128:
            return result, position + 1
    raise IndexError


@functools.cache
def _table(message: str) -> Table:
    """Field number -> what a length-delimited value of it is: the name of a message type, _TEXT, _NUMBERS or _SKIP."""
    pool = onnx.ModelProto.DESCRIPTOR.file.pool
    table: Table = {}
    for field in pool.FindMessageTypeByName(message).fields:
        if field.message_type is not None:
            table[field.number] = field.message_type.full_name
        elif field.type == field.TYPE_STRING:
            table[field.number] = _TEXT
        elif field.type != field.TYPE_BYTES and field.name not in _WEIGHTS:
            table[field.number] = _NUMBERS
    return table
