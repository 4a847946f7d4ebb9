"""A tiny transformer block with ONNX's own Attention operator, quantized by plain `nncf.quantize`: stock, then extended.

    python -m examples.quantize_attention_operator

K and V are one tensor here, as in many cross attentions. Stock NNCF quantizes tensors, so V is quantized along with K; under
`attnquant.extended()` the K port gets its quantizer and V reads the float tensor. `attnquant.check` tells the two apart.
The model is made here: no file is needed.
"""

import nncf
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import attnquant
from attnquant.report import render

BATCH, TOKENS, WIDTH, HEADS = 1, 32, 64, 4


def block() -> onnx.ModelProto:
    """x (batch, tokens, width) -> Q and one projection for K and V -> Attention -> output projection -> y."""
    rng = np.random.default_rng(0)
    weights = {
        name: numpy_helper.from_array((rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)).astype(np.float32), name)
        for name in ("w_query", "w_key_value", "w_output")
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w_query"], ["query"], name="query"),
        helper.make_node("MatMul", ["x", "w_key_value"], ["key_value"], name="key_value"),
        helper.make_node(
            "Attention", ["query", "key_value", "key_value"], ["context"], name="attention",
            q_num_heads=HEADS, kv_num_heads=HEADS,
        ),
        helper.make_node("MatMul", ["context", "w_output"], ["y"], name="output"),
    ]  # fmt: skip
    shape = ["batch", TOKENS, WIDTH]
    graph = helper.make_graph(
        nodes,
        "block",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        list(weights.values()),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def samples(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    """Random tokens; calibration and test differ by their seed."""
    rng = np.random.default_rng(seed)
    return [{"x": rng.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32)} for _ in range(count)]


def outputs(model: onnx.ModelProto, data: list[dict[str, np.ndarray]]) -> np.ndarray:
    """The model's answers, from ONNX Runtime at default settings."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.stack([session.run(None, feeds)[0] for feeds in data])


def quantize(model: onnx.ModelProto) -> onnx.ModelProto:
    """What any user of NNCF writes."""
    data = nncf.Dataset(samples(32, seed=1))
    return nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=32)


def main() -> dict[str, attnquant.CheckReport]:
    """Print what became of the attention in both, and the accuracy of the second; returns the two reports."""
    model = block()
    stock = quantize(model)
    with attnquant.extended():
        extended = quantize(model)

    reports = {name: attnquant.check(made) for name, made in (("stock", stock), ("extended", extended))}
    for name, report in reports.items():
        print(render(report.account(f"{name} nncf.quantize")))
    expected, got = (outputs(one, samples(8, seed=2)) for one in (model, extended))
    snr = 10 * np.log10(np.sum(expected**2) / np.sum((expected - got) ** 2))
    print(f"extended against float: {snr:.1f} dB SNR")
    return reports


if __name__ == "__main__":
    main()
