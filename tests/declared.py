"""What has to become of a model whose declarations are edited: the sound model's results, or an error that says where."""

import contextlib
import io
import logging
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from attnquant import runtime
from attnquant.check import check
from attnquant.cli import main as command_line
from attnquant.errors import AttnQuantError, HostError, VerificationError
from attnquant.extension import extended
from attnquant.model import load, name_nodes
from attnquant.quantization import quantize
from attnquant.recognition import recognize
from attnquant.rewrite.fusion import fuse
from tests.corpora import snr
from tests.declarations import ACCEPTED, REFUSED, Arrays, Case, Sound
from tests.placement_audit import audit

FLOOR = 20.0
"""SNR in dB of what is quantized, against the sound float model."""
FUSED_FLOOR = 40.0
"""SNR in dB of what is fused."""
ROUTES = ("api", "command", "nncf")
OPERATORS = ("ai.onnx::Attention@24", "com.microsoft::MultiHeadAttention", "com.microsoft::GroupQueryAttention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What the sound model computes, and how it is quantized."""

    outputs: list[Arrays]
    sites: list[tuple[str, str]]
    audited: list[dict[str, Any]]


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What became of one case."""

    steps: dict[str, str] = field(default_factory=dict)
    """{step: "right" or the error}"""
    problems: list[str] = field(default_factory=list)
    """What was not as wanted."""


def truth(sound: Sound) -> Truth:
    """The sound model run, quantized and fused."""
    outputs = [runtime.run(load(sound.proto), sample, threads=1) for sample in sound.samples]
    made = quantize(sound.proto, sound.samples)
    got = [runtime.run(made.model, sample, threads=1) for sample in sound.samples]
    assert snr(outputs, got) >= FLOOR, sound.name
    return Truth(outputs=outputs, sites=_sites(made.sites), audited=_audited(sound, _proto(made.model)))


def judge(case: Case, true: Truth, folder: Path) -> Verdict:
    """Inspect, quantize, check and fuse a case whose file is written into `folder`."""
    verdict, path = Verdict(), folder / "model.onnx"
    path.write_bytes(case.proto.SerializeToString())
    chance = random.Random(str(case))
    route = chance.choice(ROUTES)
    with _quiet():
        _step(verdict, case, "inspect", lambda: _inspected(case, true, path))
        _step(verdict, case, "check", lambda: _checked(path))
        _step(verdict, case, f"quantize by {route}", lambda: _quantized(case, true, path, route))
        operator, fed = chance.choice(OPERATORS), chance.random() < 0.5
        _step(verdict, case, "fuse" if fed else "fuse unfed", lambda: _fused(case, true, path, operator, fed))
    left = sorted(set(os.listdir(folder)) - {"model.onnx", "out.onnx", "data"})
    if left or path.read_bytes() != case.proto.SerializeToString():
        verdict.problems.append(f"files left {left} or the model changed")
    return verdict


def _step(verdict: Verdict, case: Case, name: str, work: Any) -> None:
    try:
        wrong = work()
        verdict.steps[name] = "right"
        quantized = name.startswith("quantize")
        if quantized and case.wanted == REFUSED:
            wrong = [*wrong, "accepted, wanted an error"]
        verdict.problems += [f"{name}: {problem}" for problem in wrong]
    except AttnQuantError as error:
        verdict.steps[name] = f"{type(error).__name__}: {error}"
        verdict.problems += [f"{name}: {problem}: {error}" for problem in _poor(case, error, name)]
    except Exception as error:
        verdict.steps[name] = "unexpected"
        verdict.problems.append(f"{name}: unexpected {type(error).__name__}: {error}")


def _poor(case: Case, error: AttnQuantError, step: str) -> Iterator[str]:
    """What is not as wanted in an error."""
    if case.wanted == ACCEPTED:
        yield "refused, wanted a right model"
    if isinstance(error, HostError | VerificationError):
        yield f"a {type(error).__name__} for a fault of the model"
    if not named(case, str(error)):
        yield "names no node and no tensor"


def named(case: Case, message: str) -> bool:
    """Whether a message names a node or a tensor of the model, or the import where that is what was edited."""
    proto = case.proto
    if any("import" in kind or "standard" in kind for kind in case.kinds) and "opset" in message:
        return True
    names = {name for node in proto.graph.node for name in (node.name, *node.input, *node.output)} | _given_names(proto)
    names |= {value.name for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)}
    names |= {item.name for item in proto.graph.initializer} | {item.domain for item in proto.opset_import}
    quoted = (text for name in names if name for text in (repr(name), f"'{name}'", f"({name})", f"input: {name} "))
    return any(text in message for text in quoted)


def _given_names(proto: onnx.ModelProto) -> set[str]:
    """Names that nodes without one are given."""
    try:
        model = load(proto)
    except AttnQuantError:
        return set()
    name_nodes(model)
    return {node.name or "" for node in model.graph}


def _inspected(case: Case, true: Truth, path: Path) -> list[str]:
    recognition = recognize(path)
    found = _sites(recognition.sites)
    missed = {name for miss in recognition.near_misses for name in miss.nodes}
    lost = [site for site in true.sites if site not in found and site[0].rpartition("/")[2] not in missed]
    more = [site for site in found if site not in true.sites]
    return [f"finds {more} and not {lost}, as in the sound model"] if lost or more else []


def _checked(path: Path) -> list[str]:
    check(path)
    return []


def _quantized(case: Case, true: Truth, path: Path, route: str) -> list[str]:
    out = path.parent / "out.onnx"
    try:
        {"api": _by_api, "command": _by_command, "nncf": _by_nncf}[route](case, path, out)
    except AttnQuantError:
        if out.exists():
            return ["an error, and a file"]
        raise
    proto = onnx.load(out)
    wrong = _differences(case, true, proto, FLOOR)
    found = _audited(case.sound, proto)
    if found != true.audited:
        wrong.append(f"placed {found}, in the sound model {true.audited}")
    wrong += [f"check: {reason}" for reason in check(out).violations]
    return wrong


def _by_api(case: Case, path: Path, out: Path) -> None:
    quantize(path, case.samples).save(out)


def _by_nncf(case: Case, path: Path, out: Path) -> None:
    import nncf

    with extended():
        made = nncf.quantize(onnx.load(path), nncf.Dataset(case.samples), model_type=nncf.ModelType.TRANSFORMER)
    out.write_bytes(made.SerializeToString())


def _by_command(case: Case, path: Path, out: Path) -> None:
    data = path.parent / "data"
    data.mkdir(exist_ok=True)
    for number, sample in enumerate(case.samples):
        np.savez(data / f"{number}.npz", **sample)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        code = command_line(["quantize", str(path), "-o", str(out), "--data", str(data)])
    said = " ".join(text.getvalue().split())
    if "This is a bug" in said or "Traceback" in said:
        raise RuntimeError(said)
    if code in (1, 2):
        raise AttnQuantError(said)
    if code == 3:
        raise VerificationError(said)


def _fused(case: Case, true: Truth, path: Path, operator: str, fed: bool) -> list[str]:
    made = fuse(path, to=operator, feeds=case.samples[0] if fed else None)
    if not any(row.status == "fused" for row in made.rows):
        return []
    return _differences(case, true, _proto(made.model), FUSED_FLOOR)


def _differences(case: Case, true: Truth, proto: onnx.ModelProto, floor: float) -> list[str]:
    wrong, constants = [], {item.name for item in case.proto.graph.initializer}
    for side in ("input", "output"):
        # An initializer that was listed as an input is a constant of the quantized model, unless it is fed.
        before, after = (
            [value for value in getattr(model.graph, side) if value.name not in constants] for model in (case.proto, proto)
        )
        if [value.SerializeToString() for value in before] != [value.SerializeToString() for value in after]:
            names = [one.name for one, other in zip(before, after, strict=False) if one != other]
            wrong.append(f"{side}s not declared as before: {names or [value.name for value in after]}")
    level = np.inf
    for sample, expected in zip(case.samples, true.outputs, strict=True):
        got = runtime.run(load(proto), sample, threads=1)
        here = {name: got[case.outputs.get(name, name)] for name in expected}
        shapes = [name for name in expected if here[name].shape != expected[name].shape]
        wrong += [f"output {name!r} of shape {here[name].shape}, wanted {expected[name].shape}" for name in shapes]
        level = -np.inf if shapes else min(level, snr([expected], [here]))
    if level < floor:
        wrong.append(f"{level:.1f} dB")
    return wrong


def _sites(sites: Any) -> list[tuple[str, str]]:
    return [(site.id, site.form.partition("@")[0]) for site in sites]


def _audited(sound: Sound, proto: onnx.ModelProto) -> list[dict[str, Any]]:
    rows = audit(proto, {"attentions": sound.attentions})
    kinds = sorted(node.op_type for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear"))
    return [*rows, {"quantizers": len(kinds)}]


def _proto(model: Any) -> onnx.ModelProto:
    import onnx_ir as ir

    return ir.to_proto(model)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):  # progress
                yield
    finally:
        logging.disable(logging.NOTSET)


__all__ = ["OPERATORS", "ROUTES", "Truth", "Verdict", "judge", "named", "truth"]


