"""Finds the words and phonemes of a recording whose text is known.

espeak speaks the same text, with times of words and phonemes. Dynamic time warping of cepstra maps
these times to the recording.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.clips import narrowed
from training.corpus.recording import record
from training.corpus.store import Recorded
from training.corpus.voices import Speaker
from training.domain import Exchange

DIAGONAL = 0.5
"""Additional cost of a step in both recordings at once, as a share of the frames' distance."""
_HOP, _FRAME, _SIZE = 160, 400, 512
_BANDS, _CEPSTRA = 26, 13
_LOWEST_HZ, _HIGHEST_HZ = 100.0, 3800.0
_REFERENCES = (
    Speaker("espeak", "en-us", rate=165, pitch=35),
    Speaker("espeak", "en-us+f2", rate=165, pitch=60),
)
Array = NDArray[np.float64]


def align(samples: FloatArray, exchange: Exchange, speaker: str) -> Recorded:
    """Return a trimmed recording with the times of its words and phonemes."""
    given = cepstra(samples)
    best: tuple[float, Recorded, NDArray[np.int64]] | None = None
    for voice in _REFERENCES:
        model = _model(exchange, voice)
        cost, mapped = warp(cepstra(model.samples), given)
        if best is None or cost < best[0]:
            best = cost, model, mapped
    if best is None:
        raise RuntimeError("no voice to compare with")
    _, model, mapped = best

    def moved(start_s: float) -> float:
        frame = min(int(start_s * INPUT_SAMPLE_RATE / _HOP + 0.5), len(mapped) - 1)
        return float(mapped[frame]) * _HOP / INPUT_SAMPLE_RATE

    return Recorded(
        exchange=exchange,
        speaker=speaker,
        samples=samples,
        end_s=moved(model.end_s),
        words=tuple((moved(start), name) for start, name in model.words),
        phonemes=tuple((moved(start), name) for start, name in model.phonemes),
    )


@cache
def _model(exchange: Exchange, speaker: Speaker) -> Recorded:
    return record(exchange, speaker)


def cepstra(samples: FloatArray) -> Array:
    """Return cepstra of 10 ms frames with their slopes; mean 0, spread 1. They stop at 3.8 kHz."""
    sound = np.pad(narrowed(samples), (_FRAME // 2, _FRAME))
    starts = np.arange(0, len(samples), _HOP)
    frames = sound[starts[:, None] + np.arange(_FRAME)] * np.hanning(_FRAME)
    power = np.square(np.abs(np.fft.rfft(frames, _SIZE, axis=1)))
    mel = np.log(power @ _bank().T + 1e-6 * power.sum(1).max())
    numbers = np.arange(_CEPSTRA)[:, None] * (np.arange(_BANDS) + 0.5)[None] * np.pi / _BANDS
    found = mel @ np.cos(numbers).T
    slopes = np.gradient(found, axis=0) * 2.0
    both = np.concatenate((found, slopes), 1)
    return (both - both.mean(0)) / (both.std(0) + 1e-6)


@cache
def _bank() -> Array:
    lowest, highest, *at = (
        2595.0 * math.log10(1.0 + hertz / 700.0)
        for hertz in (
            *(_LOWEST_HZ, _HIGHEST_HZ),
            *(number * INPUT_SAMPLE_RATE / _SIZE for number in range(_SIZE // 2 + 1)),
        )
    )
    width = (highest - lowest) / (_BANDS + 1)
    centres = lowest + width * (np.arange(_BANDS) + 1.0)
    return np.clip(1.0 - np.abs(np.array(at)[None] - centres[:, None]) / width, 0.0, None)


def warp(model: Array, given: Array) -> tuple[float, NDArray[np.int64]]:
    """Return the mean cost of the best path, and for each frame of `model` the frame of `given`."""
    squares = np.square(model).sum(1)[:, None] + np.square(given).sum(1)[None]
    distance = np.sqrt(np.maximum(squares - 2.0 * model @ given.T, 0.0))
    rows, columns = distance.shape
    total = np.full((rows + 1, columns + 1), np.inf)
    total[0, 0] = 0.0
    # Cells of one diagonal do not depend on each other.
    numbers = np.arange(rows, dtype=np.int64)
    for diagonal in range(rows + columns - 1):
        down = numbers[max(0, diagonal - columns + 1) : diagonal + 1]
        across = diagonal - down
        cost = distance[down, across]
        before = np.minimum(
            total[down, across] + DIAGONAL * cost,
            np.minimum(total[down, across + 1], total[down + 1, across]),
        )
        total[down + 1, across + 1] = cost + before
    mapped = np.zeros(rows, np.int64)
    row, column = rows - 1, columns - 1
    while True:
        mapped[row] = column
        if not row and not column:
            break
        both = total[row, column] + DIAGONAL * distance[row, column]
        steps = (both, total[row, column + 1], total[row + 1, column])
        chosen = int(np.argmin(steps))
        row = max(row - int(chosen < 2), 0)
        column = max(column - int(chosen != 1), 0)
    return float(total[rows, columns] / (rows + columns)), mapped
