"""Past and present of a cache in one buffer: the length of the past follows from the mask, not from the buffer's size.

GroupQueryAttention appends in place where a generation loop binds one preallocated buffer as past and as present.
Then axis 2 of the past is the size of the buffer, and what took it for the number of tokens would be wrong.
"""

from collections.abc import Iterator

import onnx_ir as ir

from attnquant.emission.editor import Editor, replace_reads
from attnquant.errors import ModelError
from attnquant.graph import is_onnx, operator, tensor_name
from attnquant.patterns.facts import integer

BUFFER_KEY = "attnquant.shared_cache"
"""Key in metadata_props; its value is "past and present may be one buffer"."""
GROUPED = ("com.microsoft", "GroupQueryAttention")
PAST = (3, 4)
"""Ports of past_key and past_value."""
_LENGTH = 2
_TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds")


def share_buffers(model: ir.Model) -> int:
    """Let the number of past tokens be the mask's width less the number of new tokens, in place.

    Nothing changes for calls whose mask is as wide as there are past and new tokens.

    :return: how many caches it holds for.

    :raises ModelError: there is no such cache, no such mask, or a cache is read by something else than its attention.
    """
    caches = _caches(model)
    if not caches:
        msg = "Shared buffers: expected a GroupQueryAttention whose past is an input of the model, got none. "
        raise ModelError(msg + "Fuse to com.microsoft::GroupQueryAttention, or leave the buffers apart.")
    mask, tokens = _mask(model), _tokens(model)
    _require_apart(mask, tokens)
    shapes = [node for cache in caches for node in _shapes(cache)]
    editor = Editor(model)
    made = [_width(editor, mask, "mask_width"), _width(editor, tokens, "new_tokens")]
    made.append(editor.make("Sub", [node.outputs[0] for node in made], "past_tokens"))
    past = made[-1].outputs[0]
    for node in shapes:
        made += _shape_with(editor, node, past)
    first = next(iter(model.graph))
    model.graph.insert_before(first, made)
    model.graph.sort()
    model.metadata_props[BUFFER_KEY] = "past and present may be one buffer"
    return len(caches)


def require_sharing(form: str) -> None:
    """Raises ModelError where the operator, such as "ai.onnx::Attention", has no buffers to share."""
    if form != "::".join(GROUPED):
        raise ModelError(f"Shared buffers: expected operator {'::'.join(GROUPED)}, got {form}. Leave the buffers apart.")


def _caches(model: ir.Model) -> list[ir.Value]:
    found: dict[ir.Value, None] = {}
    for node in model.graph:
        if operator(node) == GROUPED:
            past = [node.inputs[place] for place in PAST if place < len(node.inputs)]
            found |= {value: None for value in past if value is not None and value.is_graph_input()}
    return list(found)


def _mask(model: ir.Model) -> ir.Value:
    found = [value for value in model.graph.inputs if _is_mask(value)]
    if len(found) != 1:
        names = [value.name for value in found]
        msg = f"Shared buffers: expected one input (batch, past and new tokens) that is a mask, got {names!r}. "
        raise ModelError(msg + "Without it the number of past tokens is known from the cache's size alone.")
    return found[0]


def _is_mask(value: ir.Value) -> bool:
    """Whether it may be of the decoder's own tokens; the encoder's mask is of other positions."""
    name = tensor_name(value)
    return "mask" in name and "encoder" not in name and "cross" not in name and _rank(value) == 2


def _tokens(model: ir.Model) -> ir.Value:
    for name in _TOKENS:
        for value in model.graph.inputs:
            if value.name == name and (_rank(value) or 0) >= 2:
                return value
    names = [value.name for value in model.graph.inputs][:4]
    raise ModelError(f"Shared buffers: expected new tokens as an input {' or '.join(_TOKENS)}, got {names!r}.")


def _require_apart(mask: ir.Value, tokens: ir.Value) -> None:
    """Raises ModelError where the model itself says that the mask is as wide as there are new tokens."""
    assert mask.shape is not None
    assert tokens.shape is not None
    width, new = mask.shape[1], tokens.shape[1]
    if width == new and not (isinstance(width, ir.SymbolicDim) and width.value is None):
        msg = (
            f"Shared buffers: expected {mask.name!r} to be (batch, past and new tokens), got ({mask.shape[0]}, {width}), as "
            f"wide as {tokens.name!r}: past tokens are not in it. Leave the buffers apart, or rename its axis."
        )
        raise ModelError(msg)


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _shapes(cache: ir.Value) -> Iterator[ir.Node]:
    """The nodes that read the cache's length; whoever reads its content is refused."""
    if cache.is_graph_output():
        msg = f"Shared buffers: expected {cache.name!r} to be read by GroupQueryAttention alone, got an output of the model"
        raise ModelError(msg + ", which would show the unused part of a buffer. Leave the buffers apart.")
    for use in cache.uses():
        node = use.node
        if operator(node) == GROUPED and use.idx in PAST:
            continue
        if not is_onnx(node, "Shape"):
            msg = (
                f"Shared buffers: expected {cache.name!r} to be read by GroupQueryAttention alone, got node {node.name!r} "
                f"({node.op_type}), which would read the unused part of a buffer. Leave the buffers apart."
            )
            raise ModelError(msg)
        start, end = _range(node)
        if start <= _LENGTH < end:
            yield node


def _range(node: ir.Node) -> tuple[int, int]:
    """Axes that a Shape of a cache gives: first, and one behind the last."""
    start, end = integer(node, "start", 0), integer(node, "end", 4)
    return (start + 4 if start < 0 else start), min(4, end + 4 if end < 0 else end)


def _width(editor: Editor, value: ir.Value, label: str) -> ir.Node:
    return editor.make("Shape", [value], label, attributes=_bounds(1, 2))


def _bounds(start: int, end: int) -> dict[str, ir.Attr]:
    return {"start": ir.AttrInt64("start", start), "end": ir.AttrInt64("end", end)}


def _shape_with(editor: Editor, node: ir.Node, past: ir.Value) -> list[ir.Node]:
    """Nodes that give what `node` gave, with `past` for axis 2; its readers read them, and `node` goes."""
    start, end = _range(node)
    name, cache, made, parts = node.name or "shape", node.inputs[0], [], []
    for low, high in ((start, _LENGTH), (_LENGTH, _LENGTH + 1), (_LENGTH + 1, end)):
        if (low, high) == (_LENGTH, _LENGTH + 1):
            parts.append(past)
        elif low < high:
            made.append(editor.make("Shape", [cache], f"{name}/axes_{low}", attributes=_bounds(low, high)))
            parts.append(made[-1].outputs[0])
    if len(parts) > 1:
        axis = {"axis": ir.AttrInt64("axis", 0)}
        made.append(editor.make("Concat", parts, f"{name}/tokens", attributes=axis))
        parts = [made[-1].outputs[0]]
    replace_reads(node.outputs[0], parts[0])
    _take_out(editor, node, parts[0])
    return made


def _take_out(editor: Editor, node: ir.Node, value: ir.Value) -> None:
    """Remove a node that nothing reads; an output of its graph, the model's or a body's, is `value` under the same name."""
    graph, old = node.graph, node.outputs[0]
    assert graph is not None
    places = [place for place, output in enumerate(graph.outputs) if output is old]
    if places:
        same = editor.make("Identity", [value], f"{node.name}/output", like=old)
        graph.insert_before(node, same)
        for place in places:
            graph.outputs[place] = same.outputs[0]
        old.name, same.outputs[0].name = editor.free_tensor(f"{old.name}_unused"), old.name
    graph.remove(node, safe=True)
