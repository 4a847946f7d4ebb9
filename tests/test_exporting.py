"""quantize() on torch modules: what is exported, what data fit, and that torch stays out of the ONNX path."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install attnquant[torch]")
pytest.importorskip("onnxscript", reason="torch's exporter needs onnxscript")

import attnquant  # noqa: E402
from attnquant import exporting, runtime  # noqa: E402
from attnquant.errors import DataError, ModelError  # noqa: E402

WIDTH, HEADS = 16, 2


class Attention(torch.nn.Module):
    """One attention with its projections and a dropout, which must be off in what is exported."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        def heads(part: torch.nn.Linear) -> torch.Tensor:
            return part(x).reshape(x.shape[0], x.shape[1], HEADS, WIDTH // HEADS).transpose(1, 2)

        made = torch.nn.functional.scaled_dot_product_attention(heads(self.query), heads(self.key), heads(self.value), bias)
        return self.dropout(self.out(made.transpose(1, 2).reshape(x.shape)))


class Fixed(Attention):
    """Its batch is a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.ones(2, 1, 1))


class Branching(Attention):
    """What it does depends on the values: no graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


def samples(count: int = 4, batch: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, 6, WIDTH, generator=generator) for _ in range(count)]


def by_hand(module: Attention, x: np.ndarray) -> np.ndarray:
    """The float result in numpy."""
    def linear(part: torch.nn.Linear, value: np.ndarray) -> np.ndarray:
        return value @ part.weight.detach().numpy().T + part.bias.detach().numpy()

    def heads(part: torch.nn.Linear) -> np.ndarray:
        return linear(part, x).reshape(x.shape[0], x.shape[1], HEADS, -1).transpose(0, 2, 1, 3)

    scores = heads(module.query) @ heads(module.key).transpose(0, 1, 3, 2) / np.sqrt(WIDTH // HEADS)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return linear(module.out, (weights @ heads(module.value)).transpose(0, 2, 1, 3).reshape(x.shape))


def test_a_module_becomes_a_quantized_model(capsys: pytest.CaptureFixture[str]) -> None:
    module = Attention().train()
    module.dropout.eval()
    result = attnquant.quantize(module, samples())
    out = capsys.readouterr().out
    assert "torch.onnx" not in out
    (site,) = result.sites
    assert (site.form, site.q_heads, site.scale) == ("ai.onnx::Attention@23", HEADS, pytest.approx(1 / np.sqrt(8)))
    assert attnquant.check(result.model).ok
    # as it was, part by part
    assert module.training
    assert module.out.training
    assert not module.dropout.training
    # any batch, and close to the module computed by hand
    x = samples(1, batch=5)[0].numpy()
    (got,) = runtime.run(result.model, {"x": x}).values()
    want = by_hand(module, x)
    assert 10 * np.log10(np.square(want).sum() / np.square(want - got).sum()) > 30


def test_sizes_fixed_on_request() -> None:
    exported = exporting.export(Attention(), exporting.example(Attention(), samples(1, 3)[0]), dynamic_shapes={})
    assert list(exported.model.graph.inputs[0].shape) == [3, 6, WIDTH]
    assert exported.snr_db > 100


def test_named_axes() -> None:
    length = torch.export.Dim("length", max=64)
    module = Attention()
    inputs = exporting.example(module, {"x": samples(1, 2)[0]})
    exported = exporting.export(module, inputs, dynamic_shapes={"x": {1: length}})
    batch, size, width = exported.model.graph.inputs[0].shape
    assert (batch, str(size), width) == (2, "length", WIDTH)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x,
        lambda x: (x,),
        lambda x: [x, torch.zeros(1)],
        lambda x: {"x": x, "label": torch.zeros(1)},
        lambda x: {"x": x.numpy()},
    ],
    ids=["tensor", "tuple", "batch with labels", "dict with more", "arrays"],
)
def test_forms_of_data(form) -> None:
    feeds = exporting.named_samples([form(x) for x in samples()], ("x",))
    for _ in range(2):
        got = list(feeds)
        assert [set(one) for one in got] == [{"x"}] * 4
        assert all(np.array_equal(one["x"], x.numpy()) for one, x in zip(got, samples(), strict=True))
    first = form(samples()[0])
    if not (isinstance(first, dict) and "label" in first):
        inputs = exporting.example_from(Attention(), first)
        assert inputs.names == ("x",)


def test_a_data_loader_is_read_once() -> None:
    data = torch.utils.data.TensorDataset(torch.cat(samples(6)), torch.arange(6))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    result = attnquant.quantize(Attention(), loader, samples=2)
    assert len(result.sites) == 1


def test_an_input_with_a_default_by_name() -> None:
    module, x = Attention(), samples(1)[0]
    inputs = exporting.example(module, {"bias": torch.zeros(1, 1, 6, 6), "x": x})
    assert inputs.names == ("x", "bias")
    assert exporting.export(module, inputs).snr_db > 100


def test_wrong_inputs_are_refused() -> None:
    module = Attention()
    with pytest.raises(DataError, match=r"\['y'\].*Name every tensor"):
        exporting.example(module, {"y": samples(1)[0]})
    with pytest.raises(DataError, match="got 3"):
        exporting.example(module, tuple(samples(3)))
    with pytest.raises(DataError, match="expected a tensor"):
        exporting.example(module, "text")
    with pytest.raises(DataError, match="at least one sample"):
        attnquant.quantize(module, [])
    with pytest.raises(ModelError, match=r"fails on the example inputs x \(2, 6, 3\)"):
        attnquant.quantize(module, [torch.zeros(1, 6, 3)])


def test_what_torch_cannot_export_says_so() -> None:
    with pytest.raises(ModelError, match=r"torch can't export Branching.*dynamic_shapes=\{\}"):
        attnquant.quantize(Branching(), samples())


def test_bfloat16_is_refused_with_the_remedy() -> None:
    with pytest.raises(ModelError, match=r"Attention with inputs x .*got bfloat16.*`.float\(\)`"):
        attnquant.quantize(Attention().bfloat16(), [sample.bfloat16() for sample in samples()])


def test_a_fixed_batch_needs_fixed_sizes() -> None:
    with pytest.raises(ModelError, match=r"torch can't export Fixed.*Fix all by dynamic_shapes=\{\}"):
        attnquant.quantize(Fixed(), samples(batch=2))
    assert attnquant.quantize(Fixed(), samples(batch=2), dynamic_shapes={}).sites


def test_the_flags_come_back_after_a_failure() -> None:
    module = Branching().train()
    with pytest.raises(ModelError):
        attnquant.quantize(module, samples())
    assert all(part.training for part in module.modules())


def test_a_model_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = runtime.run
    changed = lambda model, feeds, **options: {name: 1.01 * array for name, array in run(model, feeds, **options).items()}  # noqa: E731
    monkeypatch.setattr(runtime, "run", changed)
    with pytest.raises(ModelError, match=r"40\.0 dB from the module"):
        exporting.export(Attention(), exporting.example(Attention(), samples(1)[0]))


def test_onnx_models_do_not_import_torch() -> None:
    code = "import sys; from attnquant import exporting as e; assert not e.is_module(1); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
