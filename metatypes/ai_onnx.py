"""Operators of the ONNX standard (domains ai.onnx and ai.onnx.preview), one row each.

Source: https://onnx.ai/onnx/operators, read from the schemas of onnx 1.23 (opset 28).
"""

from typing import Final

from attnquant.metatypes.rows import KEY, QK, QUERY, VALUE, may, need, ports
from attnquant.roles import AttributeSpec, OperatorSpec, PortRole

DOMAIN: Final = "ai.onnx"
OPSET: Final = 28
"""Newest opset the rows were compared with."""

ATTENTION = OperatorSpec(
    domain=DOMAIN,
    op_type="Attention",
    versions=(23, 24, 25),
    until=OPSET,
    family="attention",
    inputs=ports(
        need("Q", QUERY),
        need("K", KEY),
        need("V", VALUE),
        may("attn_mask", PortRole.MASK),
        may("past_key", PortRole.PAST_KEY),
        may("past_value", PortRole.PAST_VALUE),
        may("nonpad_kv_seqlen", since=24),
    ),
    outputs=ports(
        need("Y", PortRole.CONTEXT),
        may("present_key", PortRole.PRESENT_KEY),
        may("present_value", PortRole.PRESENT_VALUE),
        may("qk_matmul_output", PortRole.SCORES),
    ),
    layout="4D BHSD, or 3D BS(HD) with head attributes; cache BHSD",
    attributes=AttributeSpec(
        q_heads="q_num_heads",
        kv_heads="kv_num_heads",
        scale="scale",
        causal="is_causal",
        softcap="softcap",
        window=("left_window_size", "right_window_size"),
        scores_mode="qk_matmul_output_mode",
    ),
    quantized=QK,
    score_roles=((0, PortRole.SCORES), (3, PortRole.PROBABILITIES)),
)

FLEX_ATTENTION = OperatorSpec(
    domain="ai.onnx.preview",
    op_type="FlexAttention",
    versions=(1,),
    until=1,
    family="attention",
    inputs=ports(need("Q", QUERY), need("K", KEY), need("V", VALUE)),
    outputs=ports(need("Y", PortRole.CONTEXT)),
    layout="4D BHSD; score_mod and prob_mod subgraphs",
    attributes=AttributeSpec(scale="scale", score_modifier="score_mod"),
    reason="preview operator: no runtime loads it, so a quantized form can't be checked",
)

LINEAR_ATTENTION = OperatorSpec(
    domain=DOMAIN,
    op_type="LinearAttention",
    versions=(27,),
    until=OPSET,
    family="linear_attention",
    inputs=ports(
        need("query"), need("key"), need("value"), may("past_state"), may("decay"), may("beta")
    ),
    outputs=ports(need("output"), need("present_state")),
    layout="3D BT(HD)",
    attributes=AttributeSpec(q_heads="q_num_heads", kv_heads="kv_num_heads", scale="scale"),
    reason="linear attention: a recurrent state, no product Q K^T under a softmax",
)

ROTARY_EMBEDDING = OperatorSpec(
    domain=DOMAIN,
    op_type="RotaryEmbedding",
    versions=(23,),
    until=OPSET,
    family="rotary",
    inputs=ports(need("X"), need("cos_cache"), need("sin_cache"), may("position_ids")),
    outputs=ports(need("Y")),
    layout="3D BS(HD) or 4D BHSD",
    attributes=AttributeSpec(q_heads="num_heads"),
)

TENSOR_SCATTER = OperatorSpec(
    domain=DOMAIN,
    op_type="TensorScatter",
    versions=(24,),
    until=OPSET,
    family="cache",
    inputs=ports(need("past_cache"), need("update"), may("write_indices")),
    outputs=ports(need("present_cache")),
    layout="any rank, written along `axis` (-2)",
)

CAUSAL_CONV_WITH_STATE = OperatorSpec(
    domain=DOMAIN,
    op_type="CausalConvWithState",
    versions=(27,),
    until=OPSET,
    family="state",
    inputs=ports(need("input"), need("weight"), may("bias"), may("past_state")),
    outputs=ports(need("output"), need("present_state")),
    layout="BCT",
)

ROWS: tuple[OperatorSpec, ...] = (
    ATTENTION,
    FLEX_ATTENTION,
    LINEAR_ATTENTION,
    ROTARY_EMBEDDING,
    TENSOR_SCATTER,
    CAUSAL_CONV_WITH_STATE,
)
