"""Cases of ai.onnx Attention 23 and 24 (and windows of 25): generated, named, each seeded by its own name."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnquant.conformance.case import Case
from attnquant.conformance.oracle import Array

VERSIONS = (23, 24)
Sizes = Mapping[str, int]

PLAIN = {"B": 2, "H": 3, "N": 3, "S": 4, "T": 6, "P": 0, "D": 8, "W": 8}
"""Batch, query heads, heads of K and V, queries, new keys, cached keys, head size of Q and K, head size of V."""
SHAPES: dict[str, dict[str, int]] = {
    "mha": {},
    "square": {"S": 6},
    "gqa": {"H": 6},
    "mqa": {"H": 4, "N": 1},
    "wide-v": {"W": 10},
    "past": {"P": 5},
    "past-gqa-wide-v": {"H": 6, "P": 5, "W": 10},
    "decode": {"S": 1, "T": 1, "P": 7},
}
LOW = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A case before its arrays are drawn."""

    name: str
    sizes: Sizes = field(default_factory=dict)
    flat: bool = False
    mask: str = ""
    """Kind, then its shape in letters and numbers: "bool B1ST", "float ST", "float B1S7"."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shown: bool = False
    """Ask for qk_matmul_output."""
    dtype: str = "float32"
    nonpad: tuple[int, ...] = ()
    dead: str = ""
    """How rows 0 (and all of the last head or sample that the mask tells apart) are hidden: "bool", "inf" or "lowest"."""
    loose: float = 0.0
    magnitude: float = 1.0
    """Factor on Q and K."""


def standard_cases() -> Iterator[Case]:
    """Every case, for each version that has what it needs."""
    for version in VERSIONS:
        for plan in plans(version):
            yield drawn(plan, version)
        yield from reported(version)
    for plan in _windows():
        yield drawn(plan, 25)


def plans(version: int) -> Iterator[Plan]:
    """Cases of one version."""
    yield from _shapes()
    yield from _masks()
    yield from _softcaps()
    yield from _modes()
    yield from _precisions()
    yield from _dead_rows()
    if version >= 24:
        yield from _lengths()


def _shapes() -> Iterator[Plan]:
    for flat in (False, True):
        layout = "3d" if flat else "4d"
        for name, sizes in SHAPES.items():
            yield Plan(name=f"{layout}/{name}", sizes=sizes, flat=flat)
            yield Plan(name=f"{layout}/{name}/causal", sizes=sizes, flat=flat, attributes={"is_causal": 1})
        yield Plan(name=f"{layout}/scale", flat=flat, attributes={"scale": 0.25})
        yield Plan(name=f"{layout}/gqa/scale", sizes=SHAPES["gqa"], flat=flat, attributes={"scale": 2.0})
    yield Plan(name="4d/more-queries-than-keys/causal", sizes={"S": 8, "T": 5}, attributes={"is_causal": 1})
    yield Plan(name="4d/batch-1", sizes={"B": 1})
    yield Plan(name="4d/one-head", sizes={"H": 1, "N": 1})


_MASKS = ("T", "1T", "ST", "1ST", "HST", "B1ST", "BHST", "11ST", "B11T", "1HST")


def _masks() -> Iterator[Plan]:
    for kind in ("bool", "float"):
        for shape in _MASKS:
            for where in ("mha", "past", "gqa"):
                for causal in (False, True):
                    if where == "gqa" and (causal or shape not in ("HST", "B1ST", "BHST")):
                        continue
                    name = f"4d/{where}/mask-{kind}-{shape}{'/causal' if causal else ''}"
                    attributes = {"is_causal": 1} if causal else {}
                    yield Plan(name=name, sizes=SHAPES[where], mask=f"{kind} {shape}", attributes=attributes)
        for shape in ("ST", "HST", "B1ST"):
            yield Plan(name=f"3d/past/mask-{kind}-{shape}", sizes=SHAPES["past"], flat=True, mask=f"{kind} {shape}")


def _softcaps() -> Iterator[Plan]:
    cap = {"softcap": 0.5}
    for flat in (False, True):
        layout = "3d" if flat else "4d"
        yield Plan(name=f"{layout}/softcap", attributes=cap, flat=flat)
        yield Plan(name=f"{layout}/softcap/causal", attributes={**cap, "is_causal": 1}, flat=flat)
        for kind in ("bool", "float"):
            yield Plan(name=f"{layout}/softcap/mask-{kind}", attributes=cap, mask=f"{kind} B1ST", flat=flat)
    yield Plan(name="4d/past-gqa-wide-v/softcap", attributes=cap, sizes=SHAPES["past-gqa-wide-v"])


def _modes() -> Iterator[Plan]:
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "mask-float": {"mask": "float B1ST"},
        "mask-bool": {"mask": "bool B1ST"},
        "causal": {"attributes": {"is_causal": 1}},
        "softcap": {"attributes": {"softcap": 0.5}},
        "softcap-mask-float": {"attributes": {"softcap": 0.5}, "mask": "float B1ST"},
        "past-mask-float": {"sizes": SHAPES["past"], "mask": "float B1ST"},
        "past-gqa-softcap-causal": {"sizes": SHAPES["past-gqa-wide-v"], "attributes": {"softcap": 0.5, "is_causal": 1}},
        "3d-past": {"sizes": SHAPES["past"], "flat": True},
        "fp16": {"dtype": "float16", "mask": "float ST"},
    }
    for name, variant in variants.items():
        for mode in range(4):
            options = {**variant, "attributes": {**variant.get("attributes", {}), "qk_matmul_output_mode": mode}}
            yield Plan(name=f"qk/{name}/mode-{mode}", shown=True, **options)


def _precisions() -> Iterator[Plan]:
    for precision, word in ((1, "float"), (10, "float16"), (11, "double")):
        for dtype in ("float32", "float16"):
            yield Plan(
                name=f"softmax-precision/{dtype}-in-{word}", dtype=dtype, attributes={"softmax_precision": precision},
                loose=4e-3 if precision == 10 or dtype == "float16" else 0.0,
            )
    yield Plan(name="softmax-precision/float16-in-float/mode-3", dtype="float16", shown=True, loose=4e-3,
               attributes={"softmax_precision": 1, "qk_matmul_output_mode": 3})
    half: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"attributes": {"is_causal": 1}},
        "past": {"sizes": SHAPES["past"]},
        "gqa": {"sizes": SHAPES["gqa"]},
        "mask-float": {"mask": "float B1ST"},
        "mask-bool": {"mask": "bool B1ST"},
        "softcap": {"attributes": {"softcap": 0.5}},
        "large-scores": {"magnitude": 100.0},
    }
    for name, variant in half.items():
        yield Plan(name=f"fp16/{name}", dtype="float16", **variant)
    yield Plan(name="fp16/3d-past", dtype="float16", flat=True, sizes=SHAPES["past"])
    yield Plan(name="double/plain", dtype="float64")
    yield Plan(name="4d/large-scores", attributes={"scale": 400.0})


def _dead_rows() -> Iterator[Plan]:
    for dead in ("bool", "inf", "lowest"):
        kind = "bool" if dead == "bool" else "float"
        yield Plan(name=f"dead-rows/{dead}", mask=f"{kind} B1ST", dead=dead)
        yield Plan(name=f"dead-rows/{dead}/past", mask=f"{kind} ST", sizes=SHAPES["past"], dead=dead)
        yield Plan(name=f"dead-rows/{dead}/causal", mask=f"{kind} ST", dead=dead, attributes={"is_causal": 1})
        for mode in (0, 2, 3):
            name, attributes = f"dead-rows/{dead}/mode-{mode}", {"qk_matmul_output_mode": mode}
            yield Plan(name=name, mask=f"{kind} B1ST", dead=dead, attributes=attributes, shown=True)
    yield Plan(name="dead-rows/bool/fp16", mask="bool B1ST", dead="bool", dtype="float16")


def _lengths() -> Iterator[Plan]:
    """Caches outside the operator: K and V are whole caches of T places, nonpad_kv_seqlen of them in use."""
    cache = {"T": 9}
    filled: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
        "prefill": ({**cache, "S": 4}, (4, 4)),
        "ragged-prefill": ({**cache, "S": 4}, (4, 3)),
        "chunk": ({**cache, "S": 3}, (5, 8)),
        "decode": ({**cache, "S": 1}, (3, 9)),
        "full": ({**cache, "S": 4}, (9, 9)),
        "decode-gqa": ({**cache, "S": 1, "H": 6}, (3, 9)),
        "empty": ({**cache, "S": 2}, (0, 4)),
    }
    for name, (sizes, lengths) in filled.items():
        for causal in (False, True):
            attributes = {"is_causal": 1} if causal else {}
            end = "/causal" if causal else ""
            yield Plan(name=f"nonpad/{name}{end}", sizes=sizes, nonpad=lengths, attributes=attributes)
            if name in ("chunk", "decode"):
                for mask in ("bool B1ST", "float ST", "float HST"):
                    full = f"nonpad/{name}/mask-{mask.replace(' ', '-')}{end}"
                    yield Plan(name=full, sizes=sizes, nonpad=lengths, mask=mask, attributes=attributes)
    chunk, lengths = filled["chunk"]
    for kind in ("bool", "float"):
        yield Plan(name=f"nonpad/chunk/short-mask-{kind}", sizes=chunk, nonpad=lengths, mask=f"{kind} B1S8")
        yield Plan(name=f"4d/short-mask-{kind}", mask=f"{kind} S5")
    yield Plan(name="nonpad/chunk/3d/causal", sizes=chunk, nonpad=lengths, flat=True, attributes={"is_causal": 1})
    yield Plan(name="nonpad/chunk/softcap/causal", sizes=chunk, nonpad=lengths, attributes={"is_causal": 1, "softcap": 0.5})
    yield Plan(name="nonpad/chunk/fp16/causal", sizes=chunk, nonpad=lengths, dtype="float16", attributes={"is_causal": 1})
    for mode in range(4):
        attributes = {"is_causal": 1, "qk_matmul_output_mode": mode}
        yield Plan(name=f"nonpad/chunk/mode-{mode}/causal", sizes=chunk, nonpad=lengths, attributes=attributes, shown=True)


def _windows() -> Iterator[Plan]:
    for left, right in ((2, 0), (2, 1), (-1, 1), (0, -1)):
        attributes = {"left_window_size": left, "right_window_size": right}
        yield Plan(name=f"window/{left},{right}", attributes=attributes)
    attributes = {"left_window_size": 2, "is_causal": 1}
    yield Plan(name="window/2/past/causal", sizes=SHAPES["past"], attributes=attributes)
    yield Plan(name="window/2/nonpad/causal", sizes={"T": 9, "S": 3}, nonpad=(5, 8), attributes=attributes)
    yield Plan(name="4d/causal", attributes={"is_causal": 1})


def reported(version: int) -> Iterator[Case]:
    """The case of https://github.com/microsoft/onnxruntime/issues/26813: a "3D" mask (2, 1, 4, 13) with past, every mode.

    Q, K, V and past are ramps from -5/11 in steps of 1/size, as in the report.
    """
    shapes = {"Q": (2, 3, 4, 4), "K": (2, 3, 6, 4), "V": (2, 3, 6, 4), "attn_mask": (2, 1, 4, 13),
              "past_key": (2, 3, 7, 4), "past_value": (2, 3, 7, 4)}
    inputs = {name: _ramp(shape) for name, shape in shapes.items()}
    for mode in range(4):
        yield Case(
            name=f"Attention@{version}/reported/mask-2-1-4-13-past/mode-{mode}",
            inputs=inputs,
            attributes={"qk_matmul_output_mode": mode},
            outputs=("Y", "present_key", "present_value", "qk_matmul_output"),
        )


def _ramp(shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    return (np.arange(count) / count - 5 / 11).reshape(shape).astype(np.float32)


def drawn(plan: Plan, version: int) -> Case:
    """The case of a plan: its arrays come from a generator seeded by its name."""
    name = f"Attention@{version}/{plan.name}"
    rng, sizes = np.random.default_rng(zlib.crc32(plan.name.encode())), {**PLAIN, **plan.sizes}
    letters = {"Q": "HSD", "K": "NTD", "V": "NTW"}
    inputs = {formal: _heads(rng, sizes, own, plan) for formal, own in letters.items()}
    total = sizes["T"] + sizes["P"]
    if plan.mask:
        inputs["attn_mask"] = _mask(rng, {**sizes, "T": total}, plan)
    if sizes["P"]:
        for formal, own in (("past_key", "BNPD"), ("past_value", "BNPW")):
            inputs[formal] = rng.normal(size=[sizes[letter] for letter in own]).astype(plan.dtype)
    if plan.nonpad:
        inputs["nonpad_kv_seqlen"] = np.array(plan.nonpad, np.int64)
    heads = {"q_num_heads": sizes["H"], "kv_num_heads": sizes["N"]} if plan.flat else {}
    outputs = ("Y", "present_key", "present_value") if sizes["P"] else ("Y",)
    shown = ("qk_matmul_output",) if plan.shown else ()
    return Case(name=name, inputs=inputs, attributes={**plan.attributes, **heads}, outputs=outputs + shown, loose=plan.loose)


def _heads(rng: np.random.Generator, sizes: Sizes, letters: str, plan: Plan) -> Array:
    heads, length, width = (sizes[letter] for letter in letters)
    factor = plan.magnitude if letters[-1] == "D" else 1.0
    array = (factor * rng.normal(size=(sizes["B"], heads, length, width))).astype(plan.dtype)
    return array.swapaxes(1, 2).reshape(sizes["B"], length, heads * width) if plan.flat else array


def _mask(rng: np.random.Generator, sizes: Sizes, plan: Plan) -> Array:
    kind, _, letters = plan.mask.partition(" ")
    shape = [int(letter) if letter.isdigit() else sizes[letter] for letter in letters]
    if kind == "bool":
        mask: Array = rng.random(shape) < 0.6
        mask[..., 0] = True  # no row is hidden by chance, and none by is_causal on top
    else:
        mask = (2 * rng.normal(size=shape)).astype(plan.dtype)
    if plan.dead:
        mask[..., 0, :] = {"bool": False, "inf": -np.inf, "lowest": LOW}[plan.dead]
        if mask.ndim == 4:
            mask[-1, ..., 2, :] = mask[0, ..., 0, :]
    return mask
