"""A torch module that NNCF quantized, as an ONNX model with the very same quantizers."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from nncf.torch.quantization.layers import BaseQuantizer

from attnquant.errors import HostError
from attnquant.host import torch_programs as programs
from attnquant.host.seams import applied
from attnquant.host.torch_round_trip import OPERATOR, translations
from attnquant.host.torch_seams import PURE_TORCH

_STORAGE = "__nncf_hooks"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _RoundTrip(torch.nn.Module):  # type: ignore[misc]
    """Stands in for a quantizer of NNCF."""

    def __init__(self, quantizer: Any, name: str) -> None:
        super().__init__()
        levels = int(quantizer.level_high - quantizer.level_low + 1)
        if quantizer.num_bits != 8 or (levels not in (255, 256) and not quantizer.is_half_range):
            msg = (
                f"The quantizer {name!r} has {quantizer.num_bits} bits and {levels} levels: expected 8 bits. Quantize the "
                "module with nncf.quantize at 8 bits."
            )
            raise HostError(msg)
        with torch.no_grad():
            _, scale, zero_point, axis = quantizer._prepare_qdq_export_quantization(torch.zeros(1))
        self.register_buffer("scale", scale.detach().clone())
        self.register_buffer("zero_point", zero_point.detach().clone())
        self.axis = int(axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = OPERATOR(x, self.scale, self.zero_point, self.axis)
        return made


@contextmanager
def as_it_runs() -> Iterator[None]:
    """No gradients, and no fused encoder layer of torch: it takes the weights without asking the quantizers' hooks."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def count_quantizers(module: torch.nn.Module) -> int:
    """How many quantizers of NNCF a module, or a program of torch.export, holds."""
    if programs.is_program(module):
        return programs.count_quantizers(module)
    return sum(isinstance(part, BaseQuantizer) for part in module.modules())


def exported(module: torch.nn.Module, arguments: Arguments, opset: int, dynamic_shapes: Any) -> onnx.ModelProto:
    """The module in ONNX, QuantizeLinear and DequantizeLinear where NNCF has its quantizers. `module` is not changed.

    :raises HostError: torch can't export it; the reason is torch's.
    """
    args, kwargs = arguments
    try:
        with as_it_runs(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own, expected = _prepared(module, arguments)
            program = torch.export.export(own, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            _check_complete(program, expected)
            made = torch.onnx.export(
                program, dynamo=True, opset_version=opset, custom_translation_table=translations(opset), verbose=False
            )
    except HostError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        msg = f"torch can't export the quantized module at opset {opset}: {first[0]}"
        raise HostError(msg) from error
    if made is None:
        msg = "torch.onnx.export returned no program: expected an ONNXProgram. Use torch 2.6 or later with onnxscript."
        raise HostError(msg)
    proto: onnx.ModelProto = made.model_proto
    return proto


def _prepared(module: torch.nn.Module, arguments: Arguments) -> tuple[torch.nn.Module, int]:
    """A copy with the operator that is exported in the place of every quantizer, and how often a run uses it."""
    own = copy.deepcopy(module)
    if programs.is_program(own):
        return own, programs.replace_quantizers(own)
    own.eval()
    _unshare_hooks(own)
    _replace_quantizers(own)
    return own, _running(own, arguments)


def _replace_quantizers(module: torch.nn.Module) -> None:
    made: dict[int, _RoundTrip] = {}
    # One quantizer may hang on several ports: each place has to be replaced, by the same module.
    for name, part in list(module.named_modules(remove_duplicate=False)):
        if isinstance(part, BaseQuantizer):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, made.setdefault(id(part), _RoundTrip(part, name)))


def _unshare_hooks(module: torch.nn.Module) -> None:
    """Give every place of a hook a module of its own, in place.

    NNCF knows what runs inside a hook by the hook's identity, which torch.export does not keep of modules held in two places
    (the multiplication by which SmoothQuant serves Q, K and V): the quantizers behind it would be lost.
    """
    storage = getattr(module, _STORAGE, None)
    if storage is None:
        return
    names: dict[int, str] = {}
    slots = []
    for prefix, held in (("pre_hook", storage.pre_hooks), ("post_hook", storage.post_hooks)):
        for key, hooks in held.items():
            for number, hook in hooks.items():
                own = f"{prefix}__{key.replace('/', '-')}[{number}]"
                names[id(hook)] = own  # as NNCF does: the last place names it
                slots.append((key, hooks, number, hook, own))
    renamed = {}
    for key, hooks, number, hook, own in slots:
        if names[id(hook)] != own:
            where = key.rsplit("/", 2)[0]
            renamed[f"{where}/{names[id(hook)]}/"] = f"{where}/{own}/"
            hooks[number] = copy.deepcopy(hook)
    for held in (storage.pre_hooks, storage.post_hooks):
        for key in list(held):
            for old, new in renamed.items():
                if key.startswith(old):
                    held[new + key.removeprefix(old)] = held.pop(key)


def _running(module: torch.nn.Module, arguments: Arguments) -> int:
    """How many quantizers run, counted as often as they do.

    :raises HostError: one does not run at all.
    """
    fired: list[int] = []
    parts = [part for part in module.modules() if isinstance(part, _RoundTrip)]
    handles = [part.register_forward_hook(lambda part, *_: fired.append(id(part))) for part in parts]
    try:
        module(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    if len(set(fired)) < len(parts):
        msg = f"{len(set(fired))} quantizers run of {len(parts)} that the module has. Please report this with the module."
        raise HostError(msg)
    return len(fired)


def _check_complete(program: Any, expected: int) -> None:
    """Refuse a program that lost a quantizer on the way."""
    found = sum(node.target is OPERATOR for node in program.graph.nodes)
    if found != expected:
        msg = f"torch.export kept {found} quantizers: expected {expected}. Please report this with the module."
        raise HostError(msg)


def run(module: torch.nn.Module, arguments: Arguments) -> list[Any]:
    """Float arrays and others that the module returns, flattened, in order."""
    with as_it_runs(), applied([PURE_TORCH]):
        result = module(*arguments[0], **arguments[1])
    leaves, _ = torch.utils._pytree.tree_flatten(result)
    return [leaf.detach().numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def inputs(arguments: Arguments) -> list[Any]:
    """The arguments' tensors as arrays, in the order of the exported model's inputs."""
    leaves, _ = torch.utils._pytree.tree_flatten(arguments)
    return [leaf.detach().numpy() for leaf in leaves if isinstance(leaf, torch.Tensor)]
