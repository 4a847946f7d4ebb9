"""How encoder, decoder and decoder with past hang together: which output of one is which input of another.

By declared types, by the attentions that are found, by the names that exporters give. What none of this explains is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnquant.data import input_names
from attnquant.errors import ModelError
from attnquant.graph import is_onnx, tensor_name
from attnquant.seq2seq.caches import DECODER, WITH_PAST, Cache, paired, read

_TOKENS = ("decoder_input_ids", "input_ids")
_HIDDEN = ("encoder_hidden_states", "encoder_outputs")
_POSITIONS = ("cache_position", "position_ids", "decoder_position_ids")
_MASKS = ("decoder_attention_mask", "attention_mask")
_FROM_ENCODER = "encoder_"
_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a decoder takes beside caches, and where its logits are."""

    tokens: str
    token_type: ir.DataType
    hidden: str
    """Input for the encoder's answer; "" where there is none."""
    shared: Mapping[str, str]
    """{input: input of the encoder that it repeats}, as a mask of padding."""
    masks: tuple[str, ...]
    """Integers (1, past + new): ones."""
    positions: tuple[str, ...]
    """Positions of the new tokens, (1, new) or (new,)."""
    flat: frozenset[str]
    """Those positions that have one axis."""
    types: Mapping[str, ir.DataType]
    """Of masks and positions."""
    longest: int | None
    """Tokens that it takes at a time where that is fixed."""
    logits: str

    def feeds(
        self, tokens: np.ndarray, *, past: int, answer: np.ndarray, given: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """All that the decoder takes but caches.

        :param tokens: New ones, integers (1, new).
        :param past: How many went before.
        :param answer: The encoder's.
        :param given: The encoder's inputs.
        """
        new = tokens.shape[1]
        feeds = {self.tokens: tokens.astype(self.token_type.numpy())}
        if self.hidden:
            feeds[self.hidden] = answer
        feeds |= {name: given[source] for name, source in self.shared.items()}
        feeds |= {name: np.ones((1, past + new), self.types[name].numpy()) for name in self.masks}
        for name in self.positions:
            places = np.arange(past, past + new, dtype=self.types[name].numpy())
            feeds[name] = places if name in self.flat else places[None]
        return feeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Names of tensors of one encoder, decoder and decoder with past."""

    hidden: str
    """Output of the encoder."""
    decoder: Inputs
    with_past: Inputs
    caches: tuple[Cache, ...]
    """In the order of the graph."""


def wire(encoder: ir.Model, decoder: ir.Model, with_past: ir.Model) -> Wiring:
    """Find the names.

    :raises ModelError: a merged decoder; an input that nothing explains; caches that don't pair up, or whose names, types or
        fixed sizes contradict.
    """
    for name, model in ((DECODER, decoder), (WITH_PAST, with_past)):
        _refuse_merged(name, model)
    given = list(read(with_past))
    pasts = [past for _, _, past, _ in given]
    inputs = _inputs(DECODER, decoder, encoder, ()), _inputs(WITH_PAST, with_past, encoder, pasts)
    if not inputs[0].hidden:
        msg = f"The {DECODER}: expected a float input of three axes for the encoder's answer, as {_HIDDEN[0]!r}, got the "
        raise ModelError(msg + f"inputs {input_names(decoder)!r}. Export the decoder apart from the encoder.")
    caches = paired(decoder, inputs[0].tokens, given)
    wiring = Wiring(
        hidden=_answer(encoder, decoder, inputs[0].hidden), decoder=inputs[0], with_past=inputs[1], caches=caches
    )
    for cache in caches:
        _same_type(f"output {cache.first!r} of the {DECODER}", _output(decoder, cache.first), with_past, cache.past)
    for name, model, taken in ((DECODER, decoder, inputs[0]), (WITH_PAST, with_past, inputs[1])):
        if taken.hidden:
            made = _output(encoder, wiring.hidden)
            _same_type(f"output {wiring.hidden!r} of the encoder", made, model, taken.hidden, name)
    return wiring


def _refuse_merged(name: str, model: ir.Model) -> None:
    merged = [tensor_name(value) for value in model.graph.inputs if value.dtype == ir.DataType.BOOL]
    merged += [tensor_name(value) for value in model.graph.outputs if is_onnx(value.producer(), "If")]
    if merged:
        msg = f"The {name}: {merged[0]!r} belongs to a merged decoder, with and without past in one graph behind an If: "
        msg += "expected both as files of their own, as what lies inside an If is not quantized. Export decoder_model.onnx "
        raise ModelError(msg + "and decoder_with_past_model.onnx (optimum-cli: --no-post-process).")


def _inputs(name: str, model: ir.Model, encoder: ir.Model, caches: Sequence[str]) -> Inputs:
    """Sort a decoder's inputs."""
    values = {value.name or "": value for value in model.graph.inputs if not value.is_initializer()}
    left = {key: value for key, value in values.items() if key not in caches}
    encoders = set(input_names(encoder))
    hidden = _one_of(left, _HIDDEN, lambda value: value.dtype in _FLOATS and _rank(value) == 3)
    left.pop(hidden, None)
    shared = {
        key: key.removeprefix(_FROM_ENCODER) for key in left
        if key.startswith(_FROM_ENCODER) and key.removeprefix(_FROM_ENCODER) in encoders
    }  # fmt: skip
    positions, masks = ([key for key in left if key in known] for known in (_POSITIONS, _MASKS))
    for key in (*shared, *positions, *masks):
        left.pop(key)
    tokens = _one_of(left, _TOKENS, lambda value: value.dtype in _INTEGERS and _rank(value) in (2, None))
    token = left.pop(tokens, None)
    if token is None or token.dtype not in _INTEGERS or left:
        wrong = next(iter(left or values))
        msg = f"Input {wrong!r} of the {name}, {_declared(values[wrong])}: expected integer tokens (as {_TOKENS[1]!r}), the "
        msg += f"encoder's answer (as {_HIDDEN[0]!r}), {_FROM_ENCODER}NAME for an input of the encoder, a mask {_MASKS!r}, "
        msg += f"positions {_POSITIONS!r}, or the cache of an attention that is found; got none of them. "
        raise ModelError(msg + "Export the model without it, or rename it.")
    return Inputs(
        tokens=tokens, token_type=token.dtype or ir.DataType.INT64, hidden=hidden, shared=shared, masks=tuple(masks),
        positions=tuple(positions), flat=frozenset(key for key in positions if _rank(values[key]) == 1),
        types={key: values[key].dtype or ir.DataType.INT64 for key in (*positions, *masks)},
        longest=_size(token, 1), logits=_logits(name, model),
    )  # fmt: skip


def _one_of(values: Mapping[str, ir.Value], names: Sequence[str], fits: Callable[[ir.Value], bool]) -> str:
    """The first of these names that is there, else the only value that fits, else ""."""
    named = [name for name in names if name in values]
    fitting = [name for name, value in values.items() if fits(value)]
    return named[0] if named else fitting[0] if len(fitting) == 1 else ""


def _logits(name: str, model: ir.Model) -> str:
    values = {tensor_name(value): value for value in model.graph.outputs}
    found = "logits" if "logits" in values else next(iter(values))
    if values[found].dtype not in _FLOATS or _rank(values[found]) not in (3, None):
        msg = f"Output {found!r} of the {name}, {_declared(values[found])}: expected logits (1, tokens, vocabulary), by the "
        raise ModelError(msg + "name 'logits' or as the first output. Export the model with its language modelling head.")
    return found


def _answer(encoder: ir.Model, decoder: ir.Model, taken: str) -> str:
    """The output of the encoder that the decoder takes."""
    values = {tensor_name(value): value for value in encoder.graph.outputs}
    found = _one_of(values, (taken, "last_hidden_state"), lambda value: value.dtype in _FLOATS and _rank(value) == 3)
    if not found:
        msg = f"The encoder: expected one output for input {taken!r} of the {DECODER}, of that name, 'last_hidden_state' or "
        msg += f"the only one of three axes, got {list(values)!r}. "
        raise ModelError(msg + "Export the encoder with that output alone.")
    return found


def _same_type(where: str, made: ir.Value, model: ir.Model, name: str, of: str = WITH_PAST) -> None:
    """Raise ModelError where an output can't be the input `name` of a model by what both declare."""
    taken = next(value for value in model.graph.inputs if value.name == name)
    sizes = [[dim if isinstance(dim, int) else None for dim in value.shape or ()] for value in (made, taken)]
    known = made.shape is not None and taken.shape is not None
    apart = known and (
        len(sizes[0]) != len(sizes[1])
        or any(a is not None and b is not None and a != b for a, b in zip(*sizes, strict=True))
    )
    if made.dtype != taken.dtype or apart:
        msg = f"Input {name!r} of the {of} is {_declared(taken)}: expected what {where} is, {_declared(made)}. "
        raise ModelError(msg + "Export all three models again, of one model and in one precision.")


def _output(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.outputs if value.name == name)


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _size(value: ir.Value, axis: int) -> int | None:
    dim = None if value.shape is None or len(value.shape) <= axis else value.shape[axis]
    return dim if isinstance(dim, int) else None


def _declared(value: ir.Value) -> str:
    dtype = "of no declared type" if value.dtype is None else value.dtype.name
    return f"{dtype} {'of any shape' if value.shape is None else [str(dim) for dim in value.shape]}"
