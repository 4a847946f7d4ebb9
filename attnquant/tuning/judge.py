"""One number for a quantized model: its metric against the float model on a few samples."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from attnquant import runtime
from attnquant.bounds import Bound
from attnquant.errors import RecipeError
from attnquant.measures import OutputSums, is_float, logits_outputs

Arrays = Mapping[str, np.ndarray]
Runner = Callable[[Arrays], Arrays]

TOKENS, MASK = "input_ids", "attention_mask"
"""Inputs by which perplexity is told: token ids (batch, positions), and 1 where a position counts."""


class Judge:
    """Holds samples and the float model's outputs for them.

    :param samples: {input name: array} each; all are kept.
    :param unfused: As `runtime.session` takes it for the quantized models.
    :raises RecipeError: the metric can't be told from the model's inputs and outputs.
    :raises ModelError: the float model does not run.
    """

    def __init__(self, bound: Bound, reference: ir.Model, samples: Iterable[Arrays], *, unfused: bool = False) -> None:
        self.bound, self._unfused = bound, unfused
        self._samples = list(samples)
        with runtime.session(reference) as made:
            self._expected = [
                {name: array for name, array in runtime.run_session(made, sample).items() if is_float(array)}
                for sample in self._samples
            ]
        self._logits = logits_outputs(self._expected[0])
        self._require()

    def of_model(self, model: ir.Model) -> float:
        """The metric of a model in a session of its own."""
        with runtime.session(model, unfused=self._unfused) as made:
            return self.of(lambda sample: runtime.run_session(made, sample))

    def of(self, run: Runner) -> float:
        """The metric of what gives the quantized model's outputs for a sample."""
        names = self._logits if self.bound.metric in ("top1", "kl", "ppl") else frozenset(self._expected[0])
        if self.bound.metric == "ppl":
            return self._perplexity(run, min(names))
        sums = {name: OutputSums(name=name, logits=name in self._logits) for name in names}
        for sample, expected in zip(self._samples, self._expected, strict=True):
            got = run(sample)
            for name, one in sums.items():
                one.add(expected[name], got[name])
        values = [self._value(one) for one in sums.values()]
        return min(values, key=self.bound.score)

    def _value(self, sums: OutputSums) -> float:
        found = {
            "snr_db": sums.whole.snr_db, "cosine": sums.whole.cosine, "top1": sums.classes.top1, "kl": sums.classes.kl,
        }[self.bound.metric]  # fmt: skip
        return float("nan") if found is None or sums.fault else found

    def _perplexity(self, run: Runner, name: str) -> float:
        float_loss = other_loss = 0.0
        count = 0
        for sample, expected in zip(self._samples, self._expected, strict=True):
            first, number = next_token_loss(expected[name], sample)
            float_loss, count = float_loss + first, count + number
            other_loss += next_token_loss(run(sample)[name], sample)[0]
        return float(np.exp(np.clip((other_loss - float_loss) / max(count, 1), -700, 700)))

    def _require(self) -> None:
        metric, outputs = self.bound.metric, sorted(self._expected[0])
        if not outputs:
            raise RecipeError(f"max_drop {self.bound}: expected an output in floating point, the model has none.")
        if metric in ("top1", "kl", "ppl") and not self._logits:
            msg = f"max_drop {self.bound}: expected an output of logits, got {outputs!r}. Bound snr_db or cosine instead."
            raise RecipeError(msg)
        if metric == "ppl" and not all(_tokens_fit(sample, self._expected[0], self._logits) for sample in self._samples[:1]):
            msg = (
                f"max_drop {self.bound}: expected an input {TOKENS!r} (batch, positions) and logits (batch, positions, "
                f"vocabulary), got inputs {sorted(self._samples[0])!r} and outputs {outputs!r}. Bound kl instead."
            )
            raise RecipeError(msg)


def next_token_loss(logits: np.ndarray, sample: Arrays) -> tuple[float, int]:
    """(sum of negative log likelihoods in nats, number of tokens) of each token given those before it.

    :param logits: (batch, positions, vocabulary)
    """
    tokens = sample[TOKENS][:, 1:].astype(np.int64)
    mask = sample.get(MASK)
    counted = np.ones(tokens.shape, bool) if mask is None or mask.shape != sample[TOKENS].shape else mask[:, 1:] > 0
    rows = logits[:, :-1].astype(np.float64)
    shifted = rows - rows.max(-1, keepdims=True)
    own = np.take_along_axis(shifted, tokens[..., None], -1)[..., 0]
    losses = np.log(np.exp(shifted).sum(-1)) - own
    return float(losses[counted].sum()), int(counted.sum())


def _tokens_fit(sample: Arrays, outputs: Arrays, logits: Iterable[str]) -> bool:
    tokens = sample.get(TOKENS)
    return (
        tokens is not None
        and tokens.ndim == 2
        and tokens.shape[1] > 1
        and all(outputs[name].shape[:2] == tokens.shape for name in logits)
    )
