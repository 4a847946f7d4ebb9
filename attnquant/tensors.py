"""Every tensor that a model holds: initializers of all graphs, and tensors in attributes, in functions too."""

from collections.abc import Callable, Iterator

import onnx_ir as ir

from attnquant.graph import Body, bodies

Replace = Callable[[ir.TensorProtocol, str], ir.TensorProtocol]


def all_tensors(model: ir.Model) -> Iterator[tuple[ir.TensorProtocol, str]]:
    """(tensor, place) for each, the place in words for messages: "initializer 'w'", "attribute 'value' of node 'n'"."""
    for _, body in bodies(model):
        for value in _initializers(body):
            if value.const_value is not None:
                yield value.const_value, f"initializer {value.name!r}"
        for node in body:
            for attribute in node.attributes.values():
                yield from ((tensor, f"attribute {attribute.name!r} of node {node.name!r}") for tensor in _held(attribute))


def map_tensors(model: ir.Model, replace: Replace) -> None:
    """Put `replace(tensor, place)` in the place of every tensor, editing the model."""
    for _, body in bodies(model):
        for value in _initializers(body):
            if value.const_value is not None:
                value.const_value = replace(value.const_value, f"initializer {value.name!r}")
        for node in body:
            for name, attribute in list(node.attributes.items()):
                place = f"attribute {name!r} of node {node.name!r}"
                new = [replace(tensor, place) for tensor in _held(attribute)]
                if any(one is not other for one, other in zip(new, _held(attribute), strict=True)):
                    value_ = new[0] if attribute.type == ir.AttributeType.TENSOR else new
                    node.attributes[name] = ir.Attr(name, attribute.type, value_, doc_string=attribute.doc_string)


def _initializers(body: Body) -> list[ir.Value]:
    return list(body.initializers.values()) if isinstance(body, ir.Graph) else []


def _held(attribute: ir.Attr) -> list[ir.TensorProtocol]:
    if attribute.is_ref():
        return []
    if attribute.type == ir.AttributeType.TENSOR:
        return [attribute.as_tensor()]
    return list(attribute.as_tensors()) if attribute.type == ir.AttributeType.TENSORS else []
