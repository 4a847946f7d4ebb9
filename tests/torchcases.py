"""Single-layer torch modules, one for each way of calling attention. Imported only where torch is installed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS = 16, 2, 5
SIZE = WIDTH // HEADS
attend = F.scaled_dot_product_attention


class Layer(nn.Module):
    """Projections; subclasses say how they are attended to."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.small_k, self.small_v = nn.Linear(WIDTH, SIZE), nn.Linear(WIDTH, SIZE)
        self.register_buffer("past", torch.randn(1, HEADS, 3, SIZE))

    def heads(self, x: Any) -> Any:
        return x.reshape(x.shape[0], x.shape[1], -1, SIZE).transpose(1, 2)

    def three(self, x: Any) -> Any:
        return self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))

    def forward(self, x: Any) -> Any:
        return self.o(self.context(x).transpose(1, 2).flatten(2))


class Unbind(Layer):
    def context(self, x: Any) -> Any:
        return attend(*self.qkv(x).reshape(x.shape[0], x.shape[1], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0))


class Chunk(Layer):
    def context(self, x: Any) -> Any:
        return attend(*map(self.heads, self.qkv(x).chunk(3, -1)))


class Split(Layer):
    def context(self, x: Any) -> Any:
        return attend(*map(self.heads, self.qkv(x).split(WIDTH, -1)))


class Same(Layer):
    def context(self, x: Any) -> Any:
        one = self.heads(self.k(x))
        return attend(one, one, one)


class SharedKeyValue(Layer):
    def context(self, x: Any) -> Any:
        one = self.heads(self.k(x))
        return attend(self.heads(self.q(x)), one, one)


class Keywords(Layer):
    def context(self, x: Any) -> Any:
        query, key, value = self.three(x)
        return attend(value=value, key=key, query=query)


class MixedKeywords(Layer):
    def context(self, x: Any) -> Any:
        query, key, value = self.three(x)
        return attend(query, value=value, key=key)


class Past(Layer):
    def context(self, x: Any) -> Any:
        query, key, value = self.three(x)
        return attend(query, torch.cat([self.past, key], 2), torch.cat([self.past, value], 2))


class Grouped(Layer):
    def context(self, x: Any) -> Any:
        return attend(self.heads(self.q(x)), self.heads(self.small_k(x)), self.heads(self.small_v(x)), enable_gqa=True)


class Eager(Layer):
    def context(self, x: Any) -> Any:
        query, key, value = self.three(x)
        return (query @ key.transpose(-2, -1) * SIZE**-0.5).softmax(-1) @ value


class Flex(Layer):
    def context(self, x: Any) -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(*self.three(x))


class Multihead(nn.Module):
    weights = False

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.a(x, x, x, need_weights=self.weights)[0]


class MultiheadWeights(Multihead):
    weights = True


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.a(x)


_SDPA = "/scaled_dot_product_attention/0__"
PLACES: dict[type[nn.Module], set[str]] = {
    Unbind: {f"pre {_SDPA}0", f"pre {_SDPA}1"},
    Chunk: {"pre /reshape/0__0", "pre /reshape/1__0"},
    Split: {"pre /reshape/0__0", "pre /reshape/1__0"},
    Same: {f"pre {_SDPA}0", f"pre {_SDPA}1"},
    SharedKeyValue: {"post q/linear/0__0", f"pre {_SDPA}1"},
    Keywords: {"post q/linear/0__0", "post k/linear/0__0"},
    MixedKeywords: {"post q/linear/0__0", "post k/linear/0__0"},
    Past: {"post q/linear/0__0", "post k/linear/0__0", "pre /cat/0__0"},
    Grouped: {"post q/linear/0__0", "post small_k/linear/0__0"},
    Eager: {"post q/linear/0__0", "post k/linear/0__0"},
    Multihead: {"pre a/__getitem__/0__0", "pre a/__getitem__/1__0"},
    MultiheadWeights: {"post a/mul/0__0", "pre a/__getitem__/1__0"},
    Encoder: {"pre a/self_attn/__getitem__/0__0", "pre a/self_attn/__getitem__/1__0"},
}
"""Where Q and K are quantized in NNCF's names, and nothing else is: those of linears' inputs and weights left out."""
