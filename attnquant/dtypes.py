"""Element types of every tensor of a model, from the operators' published schemas.

Types are ONNX type strings ("tensor(float16)", "seq(tensor(float))"). Declared types are facts only where the file has to
carry them: graph inputs and initializers; everything else follows from the schemas, onnx's for its own domains and
ONNX Runtime's for the rest, through subgraphs and model-local functions. A contradiction is a result, not an exception.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from attnquant.graph import Body, operator, tensor_name
from attnquant.schemas import Formal, Signature, later_version, signature

HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
DTYPE_ATTRIBUTES = frozenset(
    {"to", "dtype", "output_dtype", "output_datatype", "softmax_precision", "stash_type", "precision"}
)
"""Integer attributes, of any operator, that hold a TensorProto data type."""

_FROM_ATTRIBUTE = ("to", "output_dtype", "dtype", "output_datatype", "stash_type")
_FLOAT_BY_DEFAULT = (
    *("RandomNormal", "RandomUniform", "HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"),
    *("LayerNormalization", "RMSNormalization", "GroupNormalization"),
)
_DEFAULTS = {**dict.fromkeys(_FLOAT_BY_DEFAULT, ir.DataType.FLOAT), "Multinomial": ir.DataType.INT32}
_VALUE_ATTRIBUTES = {
    **dict.fromkeys(("value_float", "value_floats"), ir.DataType.FLOAT),
    **dict.fromkeys(("value_int", "value_ints"), ir.DataType.INT64),
    **dict.fromkeys(("value_string", "value_strings"), ir.DataType.STRING),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeConflict:
    """One contradiction between the graph and a schema, or between a declaration and what the graph makes."""

    path: str
    node: str
    tensor: str
    reason: str
    later: int | None = None
    """First opset at which the operator takes this type, if that is what is wrong."""


@dataclass(slots=True, kw_only=True)
class TypeMap:
    """What is known about the types of a model's tensors."""

    types: dict[ir.Value, str] = field(default_factory=dict)
    conflicts: list[TypeConflict] = field(default_factory=list)
    unknown: list[tuple[str, ir.Node]] = field(default_factory=list)
    """(path, node) of operators without a schema."""

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """Element type of a tensor; None for a missing input, an unknown type, a sequence or an optional."""
        return None if value is None else dtype_of(self.types.get(value))


def type_string(dtype: ir.DataType) -> str:
    """ "tensor(float16)" and the like."""
    return f"tensor({dtype.name.lower()})"


_BY_STRING = {type_string(dtype): dtype for dtype in ir.DataType if dtype != ir.DataType.UNDEFINED}


def dtype_of(type_text: str | None) -> ir.DataType | None:
    """The element type of a tensor type string, None for anything else."""
    return _BY_STRING.get(type_text or "")


def declared_type(value: ir.Value) -> str | None:
    """Type string of what the file declares for a value, None where it declares nothing."""
    return None if value.type is None else _spell(value.type)


def _spell(declared: ir.TypeProtocol) -> str | None:
    if isinstance(declared, ir.SequenceType | ir.OptionalType):
        inner = _spell(declared.elem_type)
        word = "seq" if isinstance(declared, ir.SequenceType) else "optional"
        return None if inner is None else f"{word}({inner})"
    if declared.dtype == ir.DataType.UNDEFINED:
        return None
    text = type_string(declared.dtype)
    return f"sparse_{text}" if isinstance(declared, ir.SparseTensorType) else text


def infer_types(model: ir.Model) -> TypeMap:
    """Types of every tensor of the main graph, its subgraphs and the functions it calls. The model is not changed.

    A function called with different types keeps those of its first call.
    """
    found = TypeMap()
    _Walk(model=model, found=found).graph("", model.graph)
    return found


@dataclass(slots=True, kw_only=True)
class _Walk:
    model: ir.Model
    found: TypeMap
    calls: dict[tuple[ir.OperatorIdentifier, tuple[str | None, ...]], list[str | None]] = field(default_factory=dict)

    def graph(self, path: str, graph: ir.Graph) -> None:
        for value in (*graph.inputs, *graph.initializers.values()):
            known = declared_type(value)
            if value.const_value is not None:
                known = type_string(value.const_value.dtype)
            if known is not None:
                self.found.types.setdefault(value, known)
        self.nodes(path, graph)
        for value in graph.outputs:
            self._compare(path, value)

    def nodes(self, path: str, body: Body) -> None:
        for node in body:
            made = self._outputs(path, node, body)
            for value, known in zip(node.outputs, made, strict=False):
                text = known or declared_type(value)
                if text is not None:
                    self.found.types[value] = text
                if known is not None and not value.is_graph_output():
                    self._compare(path, value)

    def _compare(self, path: str, value: ir.Value) -> None:
        declared, made = declared_type(value), self.found.types.get(value)
        if declared is None or made is None or declared == made:
            return
        producer = value.producer()
        node = "" if producer is None else producer.name or ""
        reason = f"is declared {declared}, but {'its data are' if producer is None else 'its operator makes'} {made}"
        self.found.conflicts.append(TypeConflict(path=path, node=node, tensor=tensor_name(value), reason=reason))

    def _outputs(self, path: str, node: ir.Node, body: Body) -> list[str | None]:
        if node.op_identifier() in self.model.functions:
            return self._call(node)
        special = _SPECIAL.get(node.op_type) if operator(node)[0] == "ai.onnx" else None
        published = signature(node.domain, node.op_type, self._opset(node, body))
        if published is None:
            self.found.unknown.append((path, node))
        bound = {} if published is None else self._bind(path, node, published)
        inner = [self._subgraph(path, node, name, graph) for name, graph in subgraphs(node)]
        if special is not None:
            return special(node, self.found.types)
        if inner:
            return _control_flow(node, inner, self.found.types)
        return [] if published is None else _from_schema(node, published, bound, self.found.types)

    def _opset(self, node: ir.Node, body: Body) -> int:
        own = body.opset_imports if isinstance(body, ir.Function) else {}
        domain = "" if node.domain == "ai.onnx" else node.domain
        return own.get(domain) or self.model.opset_imports.get(domain) or 1

    def _bind(self, path: str, node: ir.Node, published: Signature) -> dict[str, str]:
        bound: dict[str, str] = {}
        first: dict[str, ir.Value] = {}
        for index, value in enumerate(node.inputs):
            formal = published.input(index)
            text = None if value is None else self.found.types.get(value)
            if formal is None or text is None or value is None:
                continue
            later = None
            reason = _refusal(node, index, text, formal, published)
            if reason is not None:
                later = later_version(node.domain, node.op_type, published.since, index, text)
            elif not formal.heterogeneous and formal.type_text in published.constraints:
                before = bound.setdefault(formal.type_text, text)
                first.setdefault(formal.type_text, value)
                if before != text:
                    other = tensor_name(first[formal.type_text])
                    reason = f"is {text} where {node.op_type} needs one type for it and {other!r}, which is {before}"
            if reason is not None:
                self.found.conflicts.append(
                    TypeConflict(path=path, node=node.name or "", tensor=tensor_name(value), reason=reason, later=later)
                )
        return bound

    def _subgraph(self, path: str, node: ir.Node, name: str, graph: ir.Graph) -> ir.Graph:
        fed = _body_inputs(node)
        for value, source in zip(graph.inputs, fed, strict=False):
            text = None if source is None else self.found.types.get(source)
            if text is not None:
                self.found.types[value] = text
        self.graph(f"{path}/{node.name}/{name}", graph)
        return graph

    def _call(self, node: ir.Node) -> list[str | None]:
        function = self.model.functions[node.op_identifier()]
        fed = [None if value is None else self.found.types.get(value) for value in node.inputs]
        key = (node.op_identifier(), tuple(fed))
        if key not in self.calls:
            self.calls[key] = []
            for value, text in zip(function.inputs, fed, strict=False):
                if text is not None:
                    self.found.types[value] = text
            self.nodes(f"{function.domain}::{function.name}", function)
            self.calls[key] = [self.found.types.get(value) for value in function.outputs]
        return list(self.calls[key])


def subgraphs(node: ir.Node) -> list[tuple[str, ir.Graph]]:
    """(attribute name, graph) of a node's bodies, list attributes as "name[position]"."""
    found: list[tuple[str, ir.Graph]] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append((attribute.name, attribute.as_graph()))
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend((f"{attribute.name}[{place}]", graph) for place, graph in enumerate(attribute.as_graphs()))
    return found


def _refusal(node: ir.Node, index: int, text: str, formal: Formal, published: Signature) -> str | None:
    allowed = published.allowed(formal)
    if text in allowed or not any(item.startswith(("tensor", "seq", "optional")) for item in allowed):
        return None
    return f"is {text} where input {index} ({formal.name}) of {node.op_type} takes {_listed(allowed)}"


def _listed(allowed: Iterable[str]) -> str:
    return " or ".join(sorted(allowed))


def _from_schema(
    node: ir.Node, published: Signature, bound: Mapping[str, str], types: Mapping[ir.Value, str]
) -> list[str | None]:
    made: list[str | None] = []
    for index in range(len(node.outputs)):
        formal = published.output(index)
        if formal is None:
            made.append(None)
            continue
        allowed = published.constraints.get(formal.type_text)
        if allowed is None:
            made.append(formal.type_text)
        elif formal.type_text in bound:
            made.append(bound[formal.type_text])
        elif len(allowed) == 1:
            made.append(next(iter(allowed)))
        else:
            made.append(_from_attribute(node) or _alike(node, allowed, types, declared_type(node.outputs[index])))
    return made


def _from_attribute(node: ir.Node) -> str | None:
    for name in _FROM_ATTRIBUTE:
        attribute = node.attributes.get(name)
        if attribute is None or attribute.is_ref() or attribute.type != ir.AttributeType.INT:
            continue
        if attribute.as_int():
            return type_string(ir.DataType(attribute.as_int()))
    default = _DEFAULTS.get(node.op_type)
    return None if default is None else type_string(default)


def _alike(node: ir.Node, allowed: frozenset[str], types: Mapping[ir.Value, str], declared: str | None) -> str | None:
    """An output type that nothing binds: as declared, else the type of the operand that such operators follow.

    QuantizeLinear without a zero point makes uint8 and DequantizeLinear follows its scale (ONNX operator texts);
    *Like operators and a first call's present cache follow the first input.
    """
    if declared is not None:
        return declared
    if node.op_type == "QuantizeLinear":
        return "tensor(uint8)"
    place = 1 if node.op_type == "DequantizeLinear" else 0
    value = node.inputs[place] if len(node.inputs) > place else None
    text = None if value is None else types.get(value)
    return text if text in allowed else None


def _constant(node: ir.Node, types: Mapping[ir.Value, str]) -> list[str | None]:
    for attribute in node.attributes.values():
        if attribute.is_ref():
            return [declared_type(node.outputs[0])]
        if attribute.type == ir.AttributeType.TENSOR:
            return [type_string(attribute.as_tensor().dtype)]
        if attribute.name in _VALUE_ATTRIBUTES:
            return [type_string(_VALUE_ATTRIBUTES[attribute.name])]
    return [declared_type(node.outputs[0])]


def _constant_of_shape(node: ir.Node, types: Mapping[ir.Value, str]) -> list[str | None]:
    return _constant(node, types) if node.attributes else ["tensor(float)"]


def _cast(node: ir.Node, types: Mapping[ir.Value, str]) -> list[str | None]:
    return [_from_attribute(node) or declared_type(node.outputs[0])]


def _cast_like(node: ir.Node, types: Mapping[ir.Value, str]) -> list[str | None]:
    like = node.inputs[1]
    return [None if like is None else types.get(like)]


def _body_inputs(node: ir.Node) -> list[ir.Value | None]:
    """What feeds a body's inputs, in their order: Loop and Scan carry state, If has none (its bodies take nothing)."""
    if node.op_type == "Loop":
        return [None, None, *node.inputs[2:]]
    if node.op_type == "Scan":
        return list(node.inputs)
    return []


def _control_flow(node: ir.Node, bodies: list[ir.Graph], types: Mapping[ir.Value, str]) -> list[str | None]:
    outputs = bodies[0].outputs[1:] if node.op_type == "Loop" else bodies[0].outputs
    made = [types.get(value) or declared_type(value) for value in outputs]
    return made if node.op_type in ("If", "Loop", "Scan") else [declared_type(value) for value in node.outputs]


_Special = Callable[[ir.Node, Mapping[ir.Value, str]], list[str | None]]
_SPECIAL: dict[str, _Special] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Cast": _cast,
    "CastLike": _cast_like,
}
