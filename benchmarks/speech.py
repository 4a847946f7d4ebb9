"""Spoken English as Whisper takes it: recordings of a package, resampled, cut into windows, as log mel spectrograms.

Calibration and test share no recording. Spectrogram: Radford et al., "Robust Speech Recognition via Large-Scale Weak
Supervision" (2022), section 2.2: 80 mel bands (Slaney's scale), windows of 25 ms every 10 ms.
"""

import wave
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from benchmarks.assets import fetch

Array = npt.NDArray[np.float32]
Signal = npt.NDArray[np.float64]

CALIBRATION = ("endgame_nagg_nell.wav", "beckett.wav")
TEST = ("two_cities.wav",)
RATE, WINDOW, HOP, BANDS, SECONDS = 16000, 400, 160, 80, 30


@cache
def recording(name: str) -> Signal:
    """A recording in -1..1 at 16 kHz."""
    with wave.open(str(fetch("moonshine-voice") / "moonshine_voice" / "assets" / name)) as file:
        rate, samples = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    return resampled(samples, rate)


def resampled(samples: Signal, rate: int) -> Signal:
    """The same signal at 16 kHz: its spectrum cut off or padded."""
    length = round(len(samples) * RATE / rate)
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return np.fft.irfft(spectrum, length) * (length / len(samples))


def windows(names: Sequence[str], count: int, *, seconds: float = 10, step: float = 5) -> Iterator[Array]:
    """Yield at most `count` log mel spectrograms [1, 80, 3000] of pieces of `seconds`, starting every `step` seconds."""
    found = 0
    for name in names:
        samples = recording(name)
        last = max(0, len(samples) - int(seconds * RATE))
        for start in range(0, last + 1, int(step * RATE)):
            if found == count:
                return
            found += 1
            yield log_mel(samples[start : start + int(seconds * RATE)])


def at_pauses(samples: Signal, least: float, most: float) -> list[Signal]:
    """The signal in pieces of `least` to `most` seconds, the last one of what is left, cut where 0.3 s are the quietest."""
    gap, step, found = int(0.3 * RATE), int(0.1 * RATE), list[Signal]()
    while len(samples) > most * RATE:
        starts = range(int(least * RATE), int(most * RATE) - gap, step)
        cut = min(starts, key=lambda start: float(np.sum(samples[start : start + gap] ** 2))) + gap // 2
        found, samples = [*found, samples[:cut]], samples[cut:]
    return [*found, samples]


def log_mel(samples: Signal) -> Array:
    """Log mel spectrogram [1, 80, 3000] of at most 30 s, padded with silence; 8 decades below the loudest at most."""
    padded = np.zeros(SECONDS * RATE)
    padded[: len(samples)] = samples
    centred = np.pad(padded, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(centred, WINDOW)[::HOP][:-1]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW + 1)[:-1])) ** 2
    logs = np.log10(np.maximum(power @ mel_filters().T, 1e-10)).T
    scaled = (np.maximum(logs, logs.max() - 8) + 4) / 4
    return np.asarray(scaled[None], np.float32)


@cache
def mel_filters() -> Signal:
    """[80, 201] triangles of equal area on Slaney's mel scale: linear up to 1 kHz, logarithmic above."""
    top = _to_mel(np.asarray(RATE / 2))
    edges = _to_hertz(np.linspace(0, float(top), BANDS + 2))
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    rising = (bins - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - bins) / (edges[2:] - edges[1:-1])[:, None]
    area = 2 / (edges[2:] - edges[:-2])
    return np.maximum(0, np.minimum(rising, falling)) * area[:, None]


def _to_mel(hertz: Signal) -> Signal:
    return np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1000) / 1000) * 27 / np.log(6.4))


def _to_hertz(mel: Signal) -> Signal:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp(np.log(6.4) / 27 * (np.maximum(mel, 15) - 15)))
