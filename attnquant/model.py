"""Reading ONNX models, and the small services that every stage needs: a copy, unique node names, the opset.

A model is read from a file, or taken from memory and never changed. Weights in external data stay on disk, memory-mapped
when they are read, and only ever come from the model's own folder. Nothing in a model file is run, and nothing is unpickled.
"""

import os
import stat
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir as ir

from attnquant import protocheck, saving, wire
from attnquant.arity import require_operands
from attnquant.errors import ModelError
from attnquant.externaldata import anchored
from attnquant.graph import bodies, tensor_name
from attnquant.tensors import map_tensors

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model

session_source = saving.session_source
to_proto = saving.to_proto
uses_external_data = saving.uses_external_data

_ONE_VERSION = frozenset({"com.microsoft", "com.microsoft.nchwc", "com.microsoft.experimental"})
"""Domains whose operators have version 1 and no other."""
_MAGIC = {
    b"PK\x03\x04": "a zip archive (a PyTorch checkpoint or an .npz)",
    b"\x80\x02": "a Python pickle",
    b"\x80\x04": "a Python pickle",
    b"\x1f\x8b": "a gzip archive",
    b"GGUF": "a GGUF file",
    b"<!DO": "a web page",
    b"<htm": "a web page",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself",
}


def load(source: Source) -> ir.Model:
    """The model behind a path, a ModelProto or an onnx_ir Model, checked and ready to be edited.

    What is in memory is not changed by later edits of the result: graphs are copied, tensors shared. Sparse tensors become
    dense, the domain "ai.onnx" is written "", and nodes are put in topological order; node names are kept (see name_nodes).

    Raises ModelError for a file that is missing, not ONNX, cut off or beyond the limits of wire.py and protocheck.py; for
    tensors whose bytes do not match; for external data that are missing, short or outside the model's folder; and for graphs
    with cycles, without nodes or outputs, or with tensors that nothing produces.
    """
    if isinstance(source, ir.Model):
        model = copy(source)
        map_tensors(model, lambda tensor, place: anchored(tensor, place, None))
    elif isinstance(source, onnx.ModelProto):
        model = _from_proto(source, "The model", shared=True)
        map_tensors(model, _unattached)
    elif isinstance(source, str | os.PathLike):
        path = Path(source)
        model = _from_proto(_parse(_read(path), f"File {str(path)!r}"), f"File {str(path)!r}", shared=False)
        folders = tuple(dict.fromkeys((Path(os.path.abspath(path)).parent, Path(os.path.realpath(path)).parent)))
        map_tensors(model, lambda tensor, place: anchored(tensor, place, folders))
    else:
        msg = f"Expected a model as a path, an onnx.ModelProto or an onnx_ir.Model, got {type(source)!r}. Pass one of "
        msg += "these; a torch.nn.Module goes to `quantize` or `plan`, with what it is called with."
        raise ModelError(msg)
    _normalize_opsets(model)
    _check_structure(model)
    _settle_declarations(model)
    return model


def copy(model: ir.Model) -> ir.Model:
    """A model of its own with the same names, sharing the tensors; needs nodes in topological order, as `load` leaves them.

    A tensor's own name is no part of the contract: renaming an initializer in the copy renames the shared tensor object too,
    and to_proto and save write the name of the value.
    """
    try:
        duplicate = model.clone()
    except RuntimeError as problem:
        msg = (
            f"The model can't be copied: {root_cause(problem)}. Expected nodes in topological order and tensors that "
            "something produces."
        )
        raise ModelError(msg) from None
    duplicate.meta.update(model.meta)
    return duplicate


def opset(model: ir.Model, domain: str = "") -> int | None:
    """The version of an operator domain that the model imports ("" and "ai.onnx" are the same), None where it does not."""
    names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    return next((model.opset_imports[name] for name in names if name in model.opset_imports), None)


def name_nodes(model: ir.Model) -> int:
    """Give every node without a name, or with one that an earlier node of its graph has, a stable name; returns how many.

    Made-up names are `<OpType>_<index>`, index counting the nodes of all graphs in order, with underscores added where
    it is taken. Every other name is kept. Subgraphs and functions are named too.
    """
    taken = {node.name for _, body in bodies(model) for node in body if node.name}
    index = renamed = 0
    for _, body in bodies(model):
        seen: set[str] = set()
        for node in body:
            if not node.name or node.name in seen:
                name = f"{node.op_type}_{index}"
                while name in taken:
                    name += "_"
                node.name = name
                taken.add(name)
                renamed += 1
            seen.add(node.name or "")
            index += 1
    return renamed


def save(model: ir.Model, path: str | os.PathLike[str], *, external: Literal["auto", "always", "never"] = "auto") -> None:
    """Write a model so that `path` holds either what it held before or the whole new model, whatever happens meanwhile.

    See saving.save for external data and for what may be overwritten.
    """
    saving.save(model, path, external=external)


def root_cause(problem: BaseException) -> str:
    """The innermost message of a chain of exceptions, in one line of at most 300 characters."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            msg = f"Can't read {str(path)!r}: expected an ONNX file, got a folder or a device. Name the .onnx file itself."
            raise ModelError(msg)
        if status.st_size > wire.MAX_FILE_BYTES:
            msg = (
                f"File {str(path)!r} has {status.st_size:,} bytes: expected at most {wire.MAX_FILE_BYTES:,}, the limit of "
                "protobuf. "
                "Save the model with its weights in external data."
            )
            raise ModelError(msg)
        with path.open("rb") as handle:
            return handle.read(wire.MAX_FILE_BYTES)
    except (OSError, ValueError) as problem:
        msg = (
            f"Can't read {str(path)!r}: {getattr(problem, 'strerror', None) or problem}. Expected the path of an ONNX file."
        )
        raise ModelError(msg) from None


def _parse(data: bytes, where: str) -> onnx.ModelProto:
    kind = next((name for magic, name in _MAGIC.items() if data.startswith(magic)), "")
    kind = "a model in ONNX Runtime's own .ort format" if data[4:8] == b"ORTM" else kind
    if kind or not data:
        msg = (
            f"{where} is not an ONNX file: expected a protobuf message, got {kind or 'an empty file'}. Export to ONNX first."
        )
        raise ModelError(msg)
    wire.check_wire(data, where)
    try:
        proto = onnx.ModelProto()
        proto.ParseFromString(data)
        return proto
    except Exception as problem:
        # protobuf's own DecodeError; its package has no types.
        msg = (
            f"{where} is not a complete ONNX file: {root_cause(problem)}. Expected a protobuf message; export or copy it "
            "again."
        )
        raise ModelError(msg) from None


def _from_proto(proto: onnx.ModelProto, where: str, *, shared: bool) -> ir.Model:
    """The graph of a checked message; a message shared with the caller is not changed."""
    protocheck.check_limits(proto, where)
    if protocheck.has_sparse(proto):
        if shared:
            own = onnx.ModelProto()
            own.CopyFrom(proto)
            proto = own
        protocheck.make_dense(proto)
    protocheck.check_contents(proto)
    try:
        return ir.serde.deserialize_model(proto)
    except RecursionError:
        msg = f"{where} nests types or graphs too deep. Expected a model within the limits of docs/robustness.md."
        raise ModelError(msg) from None
    except Exception as problem:
        # onnx_ir raises SerdeError, ValueError, NotImplementedError and bare assertions on what it can't represent.
        msg = (
            f"{where} is not the ONNX model that was expected: {root_cause(problem)}. Check it with onnx.checker and export "
            "it again."
        )
        raise ModelError(msg) from None


def _unattached(tensor: ir.TensorProtocol, place: str) -> ir.TensorProtocol:
    """A tensor of a ModelProto in memory, with a name of its own so that renaming does not reach into the message."""
    if isinstance(tensor, ir.ExternalTensor):
        msg = (
            f"The data of {place} are in file {str(tensor.location)!r}, and a ModelProto in memory does not say in which "
            "folder. "
            "Pass the path of the model instead, or load it with its external data."
        )
        raise ModelError(msg)
    if not isinstance(tensor, ir.serde.TensorProtoTensor):
        return tensor
    return ir.LazyTensor(
        _returning(tensor),
        dtype=tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name,
        doc_string=tensor.doc_string,
    )


def _returning(tensor: ir.TensorProtocol) -> Callable[[], ir.TensorProtocol]:
    return lambda: tensor


def _normalize_opsets(model: ir.Model) -> None:
    for imports in [model.opset_imports, *(function.opset_imports for function in model.functions.values())]:
        if "ai.onnx" in imports:
            version = imports.pop("ai.onnx")
            if imports.setdefault("", version) != version:
                msg = (
                    f"The model imports two versions of the ONNX operators, {imports['']!r} and {version!r}: expected one. "
                    "Export it again."
                )
                raise ModelError(msg)


def _complete_imports(model: ir.Model) -> None:
    """Domains of one version need no import, and runtimes take models without; of the standard the version decides."""
    for _, body in bodies(model):
        imports = body.opset_imports if isinstance(body, ir.Function) else model.opset_imports
        for node in body:
            if node.op_identifier() in model.functions or node.domain in imports:
                continue
            if node.domain in _ONE_VERSION:
                imports[node.domain] = 1
            elif node.domain in ("", "ai.onnx") and "" not in imports:
                msg = f"Node {node.name!r} ({node.op_type}) is one of the ONNX operators, domain 'ai.onnx', and the model "
                msg += "does not import a version of them: expected one. Add the import, or export the model again."
                raise ModelError(msg)


def _settle_declarations(model: ir.Model) -> None:
    """What says nothing, or what runtimes don't believe, counts as not declared, in place.

    An inner tensor without an element type (runtimes refuse type 0, and need none), and shapes of initializers beside them.
    """
    for _, body in bodies(model):
        for value in body.initializers.values() if isinstance(body, ir.Graph) else ():
            if (tensor := value.const_value) is not None and not value.is_graph_input():
                value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(list(tensor.shape.numpy()))
        for node in body:
            for value in node.outputs:
                if not value.is_graph_output() and value.type is not None and value.dtype == ir.DataType.UNDEFINED:
                    value.type = None


def _check_structure(model: ir.Model) -> None:
    if not len(model.graph) or not model.graph.outputs:
        msg = (
            f"Graph {model.graph.name!r} has {len(model.graph)} nodes and {len(model.graph.outputs)} outputs: expected at "
            "least "
            "one of each. Export the model again."
        )
        raise ModelError(msg)
    for path, body in bodies(model):
        for node in body:
            for value in node.inputs:
                if value is not None:
                    _check_produced(value, f"node {node.name!r} ({node.op_type})", path)
        for value in body.outputs:
            _check_produced(value, "the graph's outputs", path)
    _check_calls(model)
    _complete_imports(model)
    require_operands(model)
    try:
        model.graph.sort()
        for function in model.functions.values():
            function.sort()
    except ValueError:
        msg = f"The graph has a cycle{_cycle(model)}: expected nodes that can be put in an order. Export the model again."
        raise ModelError(msg) from None


def _check_produced(value: ir.Value, reader: str, path: str) -> None:
    if value.producer() is None and not value.is_graph_input() and not value.is_initializer():
        msg = (
            f"Tensor {tensor_name(value)!r}, read by {reader} in graph {path!r}, is made by nothing: expected a graph "
            "input, an "
            "initializer or the output of a node. Export the model again."
        )
        raise ModelError(msg)


def _cycle(model: ir.Model) -> str:
    """ ", through nodes A, B, A" for one cycle among the nodes of one graph; "" where it runs through a subgraph."""
    for _, body in bodies(model):
        makers = {node: [value.producer() for value in node.inputs if value is not None] for node in body}
        try:
            TopologicalSorter({node: [made for made in inner if made in makers] for node, inner in makers.items()}).prepare()
        except CycleError as problem:
            return ", through nodes " + ", ".join(repr(node.name or node.op_type) for node in problem.args[1][:6])
    return ""


def _check_calls(model: ir.Model) -> None:
    """Model-local functions must not call themselves, in however many steps."""
    called = {
        key: {node.op_identifier() for node in function.all_nodes()} & model.functions.keys()
        for key, function in model.functions.items()
    }
    while leaves := [key for key, inner in called.items() if not inner & called.keys()]:
        for key in leaves:
            del called[key]
    if called:
        msg = (
            f"Functions {sorted(name for _, name, _ in called)[:3]!r} call themselves: expected functions without "
            "recursion. Export again."
        )
        raise ModelError(msg)
