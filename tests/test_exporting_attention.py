"""Attentions that torch's exporter can't write as they are: other numbers of axes, biases from a table. Dry runs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install attnquant[torch]")
pytest.importorskip("onnxscript", reason="torch's exporter needs onnxscript")

import attnquant  # noqa: E402
from attnquant import exporting, runtime  # noqa: E402
from attnquant.errors import DataError, ModelError  # noqa: E402
from attnquant.exporting.axes import four_axes  # noqa: E402
from attnquant.roles import PortRole  # noqa: E402

HEADS, DIM = 2, 8
WIDTH = HEADS * DIM
attention = torch.nn.functional.scaled_dot_product_attention


class Windows(torch.nn.Module):
    """Hiera's: windows beside the batch, five axes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).reshape(x.shape[0], 3, -1, 3, HEADS, DIM).permute(3, 0, 1, 4, 2, 5)
        query, key, value = parts.unbind(0)
        return attention(query, key, value).transpose(2, 3).reshape(x.shape)


class OneHead(torch.nn.Module):
    """(batch, positions, channels)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(*self.qkv(x).chunk(3, -1))


class Table(torch.nn.Module):
    """BEiT's: a bias gathered from a table, and the context viewed as rows right behind."""

    def __init__(self, steps: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.table = torch.nn.Parameter(torch.randn(2 * steps - 1, HEADS))
        self.steps = steps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(self.steps)[:, None] - torch.arange(self.steps)[None] + self.steps - 1
        bias = self.table[index.view(-1)].view(self.steps, self.steps, -1).permute(2, 0, 1).unsqueeze(0)
        query, key, value = self.qkv(x).reshape(x.shape[0], -1, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)
        return attention(query, key, value, attn_mask=bias).transpose(1, 2).reshape(x.shape)


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def projected(module: torch.nn.Module, x: np.ndarray) -> np.ndarray:
    return x @ module.qkv.weight.detach().numpy().T + module.qkv.bias.detach().numpy()


def in_windows(module: Windows, x: np.ndarray) -> np.ndarray:
    parts = projected(module, x).reshape(len(x), 3, -1, 3, HEADS, DIM).transpose(3, 0, 1, 4, 2, 5)
    weights = softmax(parts[0] @ parts[1].swapaxes(-1, -2) / np.sqrt(DIM))
    return (weights @ parts[2]).swapaxes(2, 3).reshape(x.shape)


def with_one_head(module: OneHead, x: np.ndarray) -> np.ndarray:
    query, key, value = np.split(projected(module, x), 3, -1)
    return softmax(query @ key.swapaxes(-1, -2) / np.sqrt(WIDTH)) @ value


def with_table(module: Table, x: np.ndarray) -> np.ndarray:
    steps = np.arange(module.steps)
    bias = module.table.detach().numpy()[steps[:, None] - steps + module.steps - 1].transpose(2, 0, 1)
    parts = projected(module, x).reshape(len(x), -1, 3, HEADS, DIM).transpose(2, 0, 3, 1, 4)
    return (softmax(parts[0] @ parts[1].swapaxes(-1, -2) / np.sqrt(DIM) + bias) @ parts[2]).swapaxes(1, 2).reshape(x.shape)


@pytest.mark.parametrize("make", [(Windows, in_windows), (OneHead, with_one_head), (Table, with_table)], ids=str)
def test_exported_as_one_operator_for_any_batch(make: tuple[type, object]) -> None:
    module, numpy_result = make[0]().eval(), make[1]
    exported = exporting.export(module, exporting.example(module, torch.randn(1, 6, WIDTH)))
    (site,) = attnquant.recognize(exported.model).sites
    assert site.form == "ai.onnx::Attention@23"
    x = np.random.default_rng(0).standard_normal((3, 6, WIDTH)).astype(np.float32)
    (got,) = runtime.run(exported.model, {"x": x}).values()
    np.testing.assert_allclose(got, numpy_result(module, x), atol=2e-5)


@pytest.mark.parametrize("mask", ["none", "of all axes", "of two axes", "of four axes", "causal"])
def test_masks_of_five_axes(mask: str) -> None:
    """The same as torch computes without merging any axis."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, HEADS, 4, DIM, generator=generator) for _ in range(3))
    shapes = {"of all axes": (1, 3, 1, 4, 4), "of two axes": (4, 4), "of four axes": (3, HEADS, 4, 4)}
    bias = torch.randn(shapes[mask], generator=generator) if mask in shapes else None
    expected = attention(query, key, value, bias, is_causal=mask == "causal")
    seen = []
    with four_axes():
        got = attention(query, key, value, bias, is_causal=mask == "causal")
        seen.append(got.shape)
    torch.testing.assert_close(got, expected)
    assert seen == [expected.shape]


def test_operands_broadcast_against_each_other_are_left_alone() -> None:
    query, key, value = torch.randn(2, 3, HEADS, 4, DIM), torch.randn(2, 1, HEADS, 5, DIM), torch.randn(2, 1, HEADS, 5, DIM)
    with four_axes():
        torch.testing.assert_close(attention(query, key, value), attention(query, key.expand(2, 3, -1, -1, -1), value))


def test_plan_of_a_module_is_that_of_quantizing_it() -> None:
    module, x = OneHead().eval(), torch.randn(2, 6, WIDTH)
    planned = attnquant.plan(module, feeds=(x,), dynamic_shapes={})
    assert [point.role for point in planned.setup.points] == [PortRole.QUERY, PortRole.KEY]
    assert planned.recognition.sites[0].q_heads == 2  # as torch's exporter wants four axes, a fixed batch becomes heads
    result = attnquant.quantize(module, [x], dynamic_shapes={})
    assert planned.setup.points == result.setup.points


def test_what_a_module_needs_is_said() -> None:
    with pytest.raises(DataError, match="expected at least one sample"):
        attnquant.plan(OneHead())
    with pytest.raises(ModelError, match="goes to `quantize` or `plan`"):
        attnquant.recognize(OneHead())
