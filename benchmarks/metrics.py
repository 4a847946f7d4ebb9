"""What the answers are worth: one task metric per real model, fed one test sample at a time so that no outputs are kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feeds = dict[str, Array]


class Score(Protocol):
    """A task metric. `reference` are the float model's outputs of the same feeds, for metrics of agreement."""

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one test sample."""

    def value(self) -> float:
        """The metric over all samples so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric's name and unit as the tables write it, and how to start one."""

    name: str
    start: Callable[[], Score]
    higher_is_better: bool = True


class SignalToNoise:
    """10 log10(sum x^2 / sum (x - y)^2) in dB over all samples, of the worst float output; infinite when nothing differs."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float]] = {}

    def add(self, reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one sample's outputs of the float model and of the quantized one, in the same order."""
        for index, (expected, got) in enumerate(zip(reference, outputs, strict=True)):
            if not np.issubdtype(expected.dtype, np.floating):
                continue
            x, y = expected.astype(np.float64), got.astype(np.float64)
            signal, noise = self._sums.get(index, (0.0, 0.0))
            self._sums[index] = (signal + float(np.sum(x * x)), noise + float(np.sum((x - y) ** 2)))

    def value(self) -> float:
        """The worst output's ratio in dB; NaN when an output is not finite or there was no sample."""
        if not self._sums:
            return float("nan")
        return min(_decibel(signal, noise) for signal, noise in self._sums.values())


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return float("inf")
    return 10 * float(np.log10(signal / noise)) if signal > 0 else float("-inf")


class RegionAgreement:
    """Mean intersection over union of the salient regions (above half of the map's maximum) of float and quantized map."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one sample whose first output is a saliency map."""
        a, b = (x >= x.max() / 2 for x in (reference[0], outputs[0]))
        self._values.append(float((a & b).sum() / (a | b).sum()))

    def value(self) -> float:
        """Between 0 and 1."""
        return float(np.mean(self._values))


class HalvesRetrieval:
    """Share of documents whose second half is the nearest of all second halves to the first half (accuracy at 1).

    Samples come as first half, second half, first half, ...; the sentence vector is the mean over the attended tokens
    of the first output [1, s, d], compared by cosine.
    """

    def __init__(self) -> None:
        self._vectors: list[Array] = []

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one half document."""
        mask = feeds["attention_mask"][..., None].astype(np.float32)
        vector = (outputs[0] * mask).sum(axis=1)[0]
        self._vectors.append(vector / np.linalg.norm(vector))

    def value(self) -> float:
        """Between 0 and 1."""
        first, second = np.stack(self._vectors[0::2]), np.stack(self._vectors[1::2])
        return float(np.mean(np.argmax(first @ second.T, axis=1) == np.arange(len(first))))


class Perplexity:
    """exp of the mean negative log likelihood of the next token; the first output is logits [1, s, vocabulary]."""

    def __init__(self) -> None:
        self._loss, self._tokens = 0.0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one window of text."""
        logits = outputs[0][0, :-1].astype(np.float64)
        targets = feeds["input_ids"][0, 1:]
        top = logits.max(axis=-1)
        normalizer = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
        self._loss += float(np.sum(normalizer - logits[np.arange(len(targets)), targets]))
        self._tokens += len(targets)

    def value(self) -> float:
        """At least 1; lower is better."""
        return float(np.exp(self._loss / self._tokens))


class CharacterAccuracy:
    """1 - edit distance / length over all lines, of greedy CTC decoding of the first output [1, t, characters], blank 0."""

    def __init__(self, characters: Sequence[str], lines: Sequence[str]) -> None:
        self._characters, self._lines = characters, lines
        self._seen, self._errors, self._length = 0, 0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take the next rendered line."""
        ids = outputs[0][0].argmax(axis=-1)
        kept = [int(i) for previous, i in zip([0, *ids[:-1]], ids, strict=True) if i not in (0, previous)]
        line = self._lines[self._seen]
        self._seen += 1
        self._errors += edit_distance("".join(self._characters[i - 1] for i in kept), line)
        self._length += len(line)

    def value(self) -> float:
        """At most 1; negative when more is wrong than there is."""
        return 1 - self._errors / self._length


def edit_distance(a: Sequence[object], b: Sequence[object]) -> int:
    """Levenshtein distance: of strings in characters."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


class SameTokens:
    """Share of tokens that stay as float's when the speech decoder reads the encoder's answer: 1 - edit distance / tokens.

    `decode` turns an encoder's first output into the token ids that the (float) decoder says, one at a time, greedily.
    """

    def __init__(self, decode: Callable[[Array], Sequence[int]]) -> None:
        self._decode = decode
        self._errors, self._length = 0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one piece of speech."""
        expected, got = self._decode(reference[0]), self._decode(outputs[0])
        self._errors += edit_distance(got, expected)
        self._length += len(expected)

    def value(self) -> float:
        """At most 1."""
        return 1 - self._errors / self._length


class MeanCosine:
    """Mean cosine of the rows of the first output, tokens (1, s, d), with the float model's."""

    def __init__(self) -> None:
        self._sum, self._rows = 0.0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one sample."""
        x, y = (item.reshape(-1, item.shape[-1]).astype(np.float64) for item in (reference[0], outputs[0]))
        norms = np.linalg.norm(x, axis=-1) * np.linalg.norm(y, axis=-1)
        self._sum += float(((x * y).sum(-1) / norms).sum())
        self._rows += len(x)

    def value(self) -> float:
        """At most 1."""
        return self._sum / self._rows


class SameNext:
    """Share of steps whose likeliest next token is the float model's; the first output is logits (1, s, vocabulary)."""

    def __init__(self) -> None:
        self._same, self._steps = 0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one step."""
        self._same += int(reference[0][0, -1].argmax() == outputs[0][0, -1].argmax())
        self._steps += 1

    def value(self) -> float:
        """Between 0 and 1."""
        return self._same / self._steps


class StrongestLink:
    """Share of rows whose largest probability stays at the same column as in the float model.

    The first output is attention probabilities [1, q, k]; only rows of products count, and only columns of reactants, which
    is how the atoms of a reaction are mapped. `separator` is the token id between the two sides.
    """

    def __init__(self, separator: int) -> None:
        self._separator = separator
        self._same, self._rows = 0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take one reaction."""
        cut = int(np.flatnonzero(feeds["input_ids"][0] == self._separator)[0])
        expected, got = (x[0, cut + 1 : -1, 1:cut].argmax(axis=-1) for x in (reference[0], outputs[0]))
        self._same += int((expected == got).sum())
        self._rows += len(expected)

    def value(self) -> float:
        """Between 0 and 1."""
        return self._same / self._rows


class Accuracy:
    """Share of samples whose largest output is their label; the labels in the order of the test samples."""

    def __init__(self, labels: Array) -> None:
        self._labels, self._seen, self._hits = labels, 0, 0

    def add(self, feeds: Mapping[str, Array], reference: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Take the logits (batch, classes) of one batch."""
        found = outputs[0].argmax(-1)
        self._hits += int((found == self._labels[self._seen : self._seen + len(found)]).sum())
        self._seen += len(found)

    def value(self) -> float:
        """Correct ones among those seen."""
        return self._hits / self._seen if self._seen else float("nan")
