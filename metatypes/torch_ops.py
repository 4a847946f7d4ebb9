"""Attention functions of PyTorch, one row each: what their arguments mean, in the order of the signature.

Source: torch.nn.functional and torch.nn.attention of PyTorch 2.14. Kept apart from `CATALOGUE`, whose rows are ONNX
operators. `versions` is 1 and `until` 1 throughout: PyTorch does not number its functions.
"""

from typing import Final

from attnquant.metatypes.rows import KEY, QK, QUERY, VALUE, may, need, ports
from attnquant.roles import AttributeSpec, OperatorSpec, PortRole

DOMAIN: Final = "torch"

SCALED_DOT_PRODUCT_ATTENTION = OperatorSpec(
    domain=DOMAIN,
    op_type="scaled_dot_product_attention",
    versions=(1,),
    until=1,
    family="attention",
    inputs=ports(need("query", QUERY), need("key", KEY), need("value", VALUE), may("attn_mask", PortRole.MASK)),
    outputs=ports(need("context", PortRole.CONTEXT)),
    layout="(..., heads, tokens, head size); enable_gqa lets K and V have fewer heads",
    attributes=AttributeSpec(scale="scale", causal="is_causal"),
    quantized=QK,
)

FLEX_ATTENTION = OperatorSpec(
    domain=DOMAIN,
    op_type="flex_attention",
    versions=(1,),
    until=1,
    family="attention",
    inputs=ports(need("query", QUERY), need("key", KEY), need("value", VALUE)),
    outputs=ports(need("context", PortRole.CONTEXT)),
    layout="(batch, heads, tokens, head size); score_mod is a Python function",
    attributes=AttributeSpec(scale="scale", score_modifier="score_mod"),
    reason=(
        "flex_attention is compiled by TorchDynamo, which can't trace NNCF's hooks, and its score_mod has no ONNX form; use "
        "torch.nn.functional.scaled_dot_product_attention"
    ),
)

TORCH: Final = {row.op_type: row for row in (SCALED_DOT_PRODUCT_ATTENTION, FLEX_ATTENTION)}
"""Every row by the function's name."""


def argument_ports(row: OperatorSpec, positional: int, keywords: tuple[str, ...]) -> tuple[int, ...]:
    """Ports of the quantized roles in a call, counted as NNCF counts: positional arguments, then keywords as written.

    :param positional: How many arguments the call gives by position.
    :param keywords: Names of the others, in the order of the call.
    """
    order = [port.name for port in row.inputs][:positional]
    order += [""] * (positional - len(order)) + list(keywords)
    wanted = {port.name for port in row.inputs if port.role in row.quantized}
    return tuple(index for index, name in enumerate(order) if name in wanted)
