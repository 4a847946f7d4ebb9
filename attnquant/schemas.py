"""Published operator schemas in one form: onnx's own for its domains, the installed ONNX Runtime's for the others."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import onnx

from attnquant.errors import HostError
from attnquant.runtime import operator_schemas


@dataclass(frozen=True, slots=True, kw_only=True)
class Formal:
    """One formal input or output."""

    name: str
    type_text: str
    """A type string or the name of a constrained type variable."""
    variadic: bool
    heterogeneous: bool
    """Each of a variadic's operands has its own type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Inputs, outputs and type constraints of one operator version."""

    since: int
    inputs: tuple[Formal, ...]
    outputs: tuple[Formal, ...]
    constraints: dict[str, frozenset[str]]
    min_inputs: int
    max_inputs: int

    def input(self, index: int) -> Formal | None:
        """Formal of input `index`, the last one for a variadic's tail, None past the end."""
        return _at(self.inputs, index)

    def allowed(self, formal: Formal) -> frozenset[str]:
        """Types that a formal takes."""
        return self.constraints.get(formal.type_text, frozenset({formal.type_text}))

    def output(self, index: int) -> Formal | None:
        """Formal of output `index`, as `input`."""
        return _at(self.outputs, index)


def signature(domain: str, op_type: str, version: int) -> Signature | None:
    """The signature of an operator at an opset version, None where nobody installed publishes one."""
    rows = [row for row in history("" if domain == "ai.onnx" else domain, op_type) if row.since <= version]
    return rows[-1] if rows else None


def known_domain(domain: str) -> bool:
    """True if onnx or the installed ONNX Runtime publishes any operator of this domain."""
    return any(key[0] == domain for key in _schemas())


def later_version(domain: str, op_type: str, since: int, index: int, type_text: str) -> int | None:
    """First opset version after `since` whose input `index` takes `type_text`, None if there is none."""
    for row in history("" if domain == "ai.onnx" else domain, op_type):
        formal = row.input(index)
        if row.since > since and formal is not None and type_text in row.allowed(formal):
            return row.since
    return None


@cache
def history(domain: str, op_type: str) -> tuple[Signature, ...]:
    """Every published version of an operator, oldest first, deprecations left out."""
    rows = [_signature(schema) for schema in _schemas().get((domain, op_type), ())]
    return tuple(sorted(rows, key=lambda row: row.since))


@cache
def _schemas() -> dict[tuple[str, str], tuple[Any, ...]]:
    found: dict[tuple[str, str], list[Any]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        if not schema.deprecated:
            found.setdefault((schema.domain, schema.name), []).append(schema)
    own = frozenset(found)
    for schema in _runtime_schemas():
        # ONNX Runtime also has operators of its own in the default domain (SimplifiedLayerNormalization).
        if (schema.domain, schema.name) not in own:
            found.setdefault((schema.domain, schema.name), []).append(schema)
    return {key: tuple(rows) for key, rows in found.items()}


def _runtime_schemas() -> list[Any]:
    """ONNX Runtime's schemas; none where it is not installed, so that operators of its domains stay untyped."""
    try:
        return operator_schemas()
    except HostError:
        return []


def _signature(schema: Any) -> Signature:
    return Signature(
        since=schema.since_version,
        inputs=tuple(_formal(item) for item in schema.inputs),
        outputs=tuple(_formal(item) for item in schema.outputs),
        constraints={row.type_param_str: frozenset(row.allowed_type_strs) for row in schema.type_constraints},
        min_inputs=schema.min_input,
        max_inputs=schema.max_input,
    )


def _formal(item: Any) -> Formal:
    # onnx and onnxruntime bind the same C++ class under different Python names.
    text = item.type_str if hasattr(item, "type_str") else item.typeStr
    homogeneous = item.is_homogeneous if hasattr(item, "is_homogeneous") else item.isHomogeneous
    variadic = "Variadic" in str(item.option)
    return Formal(name=item.name, type_text=text, variadic=variadic, heterogeneous=variadic and not homogeneous)


def _at(formals: tuple[Formal, ...], index: int) -> Formal | None:
    if index < len(formals):
        return formals[index]
    return formals[-1] if formals and formals[-1].variadic else None
