"""Rotary position embedding written out (Su et al. 2021), as com.microsoft GroupQueryAttention applies it to Q and K."""

from dataclasses import dataclass

import onnx_ir as ir

from attnquant.rewrite.draft import Draft
from attnquant.rewrite.result import Refused
from attnquant.rewrite.subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """Cosines and sines of the new tokens, (batch, 1, S, half) each."""

    cos: ir.Value
    sin: ir.Value
    half: int
    head_dim: int
    interleaved: bool


def tables(draft: Draft, subject: Subject, query: ir.Value, start: ir.Value) -> Angles:
    """Rows of the tables at the tokens' positions. Raises Refused where tables or head size are not known.

    :param start: position of each sample's first new token, int64 (batch, 1, 1, 1).
    """
    cos, sin, head_dim = subject.input("cos_cache"), subject.input("sin_cache"), subject.site.qk_head_dim
    half = None if cos is None else subject.width(cos, -1)
    if cos is None or sin is None or half is None or head_dim is None:
        raise Refused("rotary embedding inside, with tables or heads of unknown width: pass one set of inputs as feeds")
    places = subject.input("position_ids")
    if places is None:
        new = draft.count(draft.dim(query, 2, "new_tokens"), "new_token")
        places = draft.op("Add", [draft.reshape(start, [-1, 1], "start_row"), new], "token_position")
    rows = [
        draft.unsqueeze(draft.op("Gather", [table, places], f"{word}_rows", axis=0), [1], f"{word}_each")
        for table, word in ((cos, "cos"), (sin, "sin"))
    ]
    interleaved = bool(subject.operator.number("rotary_interleaved", 0))
    return Angles(cos=rows[0], sin=rows[1], half=half, head_dim=head_dim, interleaved=interleaved)


def rotated(draft: Draft, value: ir.Value, angles: Angles, word: str) -> ir.Value:
    """(batch, heads, S, head size) with its first 2 * half channels rotated."""
    width = 2 * angles.half
    moving = value if width == angles.head_dim else draft.slice(value, 0, width, 3, f"{word}_rotary")
    first, second = _halves(draft, moving, angles, word)
    turned = (_turned(draft, first, second, angles, word, "first"), _turned(draft, second, first, angles, word, "second"))
    if angles.interleaved:
        sides = zip(turned, ("even", "odd"), strict=True)
        pair = [draft.unsqueeze(item, [4], f"{word}_{side}_pair") for item, side in sides]
        joined = draft.op("Concat", pair, f"{word}_pairs", axis=4)
        result = draft.reshape(joined, [0, 0, 0, width], f"{word}_rotated")
    else:
        result = draft.op("Concat", list(turned), f"{word}_rotated", axis=3)
    if width == angles.head_dim:
        return result
    rest = draft.slice(value, width, angles.head_dim, 3, f"{word}_rest")
    return draft.op("Concat", [result, rest], f"{word}_rotated_whole", axis=3)


def _halves(draft: Draft, value: ir.Value, angles: Angles, word: str) -> tuple[ir.Value, ir.Value]:
    half = angles.half
    if not angles.interleaved:
        return draft.slice(value, 0, half, 3, f"{word}_first"), draft.slice(value, half, 2 * half, 3, f"{word}_second")
    pairs = draft.reshape(value, [0, 0, 0, half, 2], f"{word}_in_pairs")
    even, odd = (
        draft.op("Gather", [pairs, draft.integer(index, f"{side}_index")], f"{word}_{side}", axis=4)
        for index, side in enumerate(("even", "odd"))
    )
    return even, odd


def _turned(draft: Draft, own: ir.Value, other: ir.Value, angles: Angles, word: str, side: str) -> ir.Value:
    kept = draft.op("Mul", [own, angles.cos], f"{word}_{side}_cos")
    mixed = draft.op("Mul", [other, angles.sin], f"{word}_{side}_sin")
    return draft.op("Sub" if side == "first" else "Add", [kept, mixed], f"{word}_{side}_turned")
