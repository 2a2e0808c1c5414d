"""Synthesises the assistant's answers and assigns their words to one-second units.

The talker speaks the text of one unit at a time, so a word belongs to the unit in which its sound
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from duplane.worker.models.minicpm_o.duplex.unit_state import MAX_UNIT_CHARACTERS
from duplane.worker.models.minicpm_o.tts.sampling import TOKENS_PER_UNIT
from duplane.worker.models.minicpm_o.types import OUTPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.espeak import Speech, espeak
from training.corpus.recording import resampled
from training.corpus.voices import ASSISTANT

CODE_SAMPLES = OUTPUT_SAMPLE_RATE // TOKENS_PER_UNIT
LATE_S = 0.06
"""A word that begins less than this time before the end of a unit belongs to the next unit."""
CUT_CODES = 2
"""Up to this many speech tokens after the end of the last unit are cut off. If there are more, the
answer gets one more unit."""
TAIL_S = 0.05


@dataclass(frozen=True)
class Spoken:
    """An answer: the words of each unit, and its sound at 24 kHz.

    The sound consists of whole speech tokens (codes) of 40 ms.
    """

    units: tuple[tuple[str, ...], ...]
    samples: FloatArray


def speak_answer(text: str) -> Spoken:
    """Synthesise an answer in the assistant's voice.

    Words above a unit's limit go to the next unit.
    """
    speech = espeak().speak(text, ASSISTANT)
    samples = resampled(speech, 1.0, OUTPUT_SAMPLE_RATE)
    count = -(-int((_end(speech) + TAIL_S) * OUTPUT_SAMPLE_RATE) // CODE_SAMPLES)
    units = _units(text.split(), speech.words)
    if count - TOKENS_PER_UNIT * len(units) > CUT_CODES:
        units.append([])
    count = min(count, TOKENS_PER_UNIT * len(units))
    for words, following in pairwise(units):
        while len(" ".join(words)) + 1 >= MAX_UNIT_CHARACTERS:
            following.insert(0, words.pop())
    sound = samples[: count * CODE_SAMPLES].copy()
    sound = _padded(sound, count * CODE_SAMPLES)
    return Spoken(tuple(tuple(words) for words in units), sound)


def _end(speech: Speech) -> float:
    silent = [start for start, name in speech.phonemes if name[:1] == "_"]
    spoken = [start for start, name in speech.phonemes if name[:1] != "_"]
    ends = [start for start in silent if spoken and start > spoken[-1]]
    return ends[0] if ends else len(speech.samples) / speech.rate


def _units(words: Sequence[str], starts: Sequence[float]) -> list[list[str]]:
    units: list[list[str]] = [[]]
    for word, start in zip(words, starts, strict=True):
        number = max(int(start + LATE_S), len(units) - 1)
        while len(units) <= number:
            units.append([])
        units[number].append(word)
    return units


def _padded(samples: FloatArray, count: int) -> FloatArray:
    return np.pad(samples, (0, count - len(samples))).astype(np.float32)
