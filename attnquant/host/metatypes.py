"""Operator metatypes for the catalogue's attention operators: by domain and version, with the ports of their row.

NNCF 3.4 chooses a metatype by op_type alone: com.microsoft Attention (input, packed weight, bias) counts as ai.onnx
Attention (Q, K, V). Here each row of the catalogue has a metatype of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

from nncf.common.graph.operator_metatypes import UnknownMetatype
from nncf.onnx.graph.metatypes.onnx_metatypes import ONNXAttentionMetatype, ONNXOpMetatype

from attnquant.metatypes import find
from attnquant.roles import OperatorSpec

Metatype = type[ONNXOpMetatype]


@functools.cache
def metatype(row: OperatorSpec) -> Metatype:
    """The NNCF metatype of a catalogue row: quantizable ports are those of the default policy."""
    ports = [port.index for port in row.inputs if port.role in row.quantized]
    attributes: dict[str, Any] = {
        "name": f"{row.domain}::{row.op_type}",
        "op_names": [row.op_type],
        "domain": row.domain,
        "hw_config_names": list(ONNXAttentionMetatype.hw_config_names),
        "target_input_ports": ports,
        "ignored_input_ports": [port.index for port in row.inputs if port.index not in ports],
        "subtypes": [],
    }
    prefix = "ONNX" if row.domain == "ai.onnx" else "ONNXCom" if row.domain == "com.microsoft" else "ONNXOther"
    made: Metatype = type(f"{prefix}{row.op_type}Metatype", (ONNXOpMetatype,), attributes)
    return made


def by_domain(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`get_metatype` that looks at the domain before the op_type."""

    def replacement(model: Any, node: Any) -> Any:
        domain = node.domain or "ai.onnx"
        imports = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
        row = find(domain, node.op_type, imports.get(domain, 1))
        if row is not None:
            return metatype(row)
        if domain not in ("ai.onnx", "com.microsoft"):
            return UnknownMetatype  # Another domain's MatMul need not be a product.
        return original(model, node)

    return replacement
