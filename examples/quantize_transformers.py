"""A small random BERT of transformers, from the module to an int8 file: needs `pip install ".[cpu,torch]"`.

    python -m examples.quantize_transformers

Batch and length stay of any size. The weights are random, so that nothing has to be downloaded; with a trained model the
calls are the same.
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

import attnquant
from attnquant.report import account_of, render

WORDS, LONGEST = 100, 64


class Encoder(torch.nn.Module):
    """Tokens and their mask in, one tensor out."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(
            vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
            max_position_embeddings=LONGEST,
        )  # fmt: skip
        self.bert = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """(batch, length, hidden)."""
        return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Random words; the second half of the first text is padding."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(WORDS, (batch, length)), "attention_mask": mask}


def main() -> float:
    """Quantize, save, run in ONNX Runtime; prints the report and the SNR against torch, which it returns (dB)."""
    import onnxruntime

    torch.manual_seed(0)
    module = Encoder().eval()
    calibration = [tokens(2, length) for length in (8, 16, 24, 32)]
    axes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=LONGEST)}

    result = attnquant.quantize(module, calibration, dynamic_shapes={"input_ids": axes, "attention_mask": axes})
    print(render(account_of(result, model="bert")))

    texts = tokens(3, 20)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "bert.int8.onnx"
        result.save(path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (got,) = session.run(None, {name: value.numpy() for name, value in texts.items()})
        expected = module(**texts).numpy()
    snr = float(10 * np.log10(np.square(expected).sum() / np.square(expected - got).sum()))
    print(f"int8 in ONNX Runtime against float in torch: {snr:.1f} dB SNR")
    return snr


if __name__ == "__main__":
    main()
