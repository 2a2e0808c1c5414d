"""espeak-ng through its C library: speech with the times of words and phonemes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from duplane.tools.command import CommandError
from training.corpus.voices import Speaker

LIBRARY = "libespeak-ng.so.1"
_SYNCHRONOUS = 2
_PHONEME_EVENTS = 1
_UTF8 = 1
_IPA = 2
_RATE, _PITCH, _RANGE = 1, 3, 4
_WORD, _PHONEME = 1, 7


class SynthesisError(CommandError):
    """A synthesiser is missing, or cannot speak."""


@dataclass(frozen=True)
class Speech:
    """One utterance: int16 samples [n], and the starts of its words and phonemes in seconds.

    `words` has one start for each word of the text.
    """

    samples: NDArray[np.int16]
    rate: int
    words: tuple[float, ...]
    phonemes: tuple[tuple[float, str], ...]


class _Number(ctypes.Union):
    _fields_ = (
        ("number", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("string", ctypes.c_char * 8),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Number),
    )


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, POINTER(ctypes.c_short), ctypes.c_int, POINTER(_Event))


class Espeak:
    """The espeak-ng library in this process. It speaks one utterance at a time."""

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise SynthesisError(f"espeak-ng is not installed: {error}") from error
        self.rate = int(self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, _PHONEME_EVENTS))
        if self.rate <= 0:
            raise SynthesisError("espeak-ng finds no data")
        self._blocks: list[NDArray[np.int16]] = []
        self._words: list[tuple[int, float]] = []
        self._phonemes: list[tuple[float, str]] = []
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._callback = _CALLBACK(self._receive)
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        if samples and count > 0:
            self._blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        index = 0
        while events[index].type:
            event = events[index]
            if event.type == _WORD:
                self._words.append((event.text_position - 1, event.audio_position / 1000))
            elif event.type == _PHONEME:
                name = event.id.string.decode(errors="replace")
                self._phonemes.append((event.audio_position / 1000, name))
            index += 1
        return 0

    def speak(self, text: str, speaker: Speaker) -> Speech:
        """Speak one utterance. Raises SynthesisError for a voice that does not exist."""
        library = self._library
        if library.espeak_SetVoiceByName(speaker.voice.encode()):
            raise SynthesisError(f"espeak-ng has no voice {speaker.voice}")
        library.espeak_SetParameter(_RATE, speaker.rate, 0)
        library.espeak_SetParameter(_PITCH, speaker.pitch, 0)
        library.espeak_SetParameter(_RANGE, speaker.pitch_range, 0)
        self._blocks, self._words, self._phonemes = [], [], []
        line = text.encode()
        number = ctypes.c_uint()
        library.espeak_Synth(line, len(line) + 1, 0, 1, 0, _UTF8, byref(number), None)
        blocks = self._blocks or [np.zeros(1, np.int16)]
        samples = np.concatenate(blocks)
        starts = word_starts(text, self._words, len(samples) / self.rate)
        return Speech(samples, self.rate, starts, tuple(self._phonemes))

    def phonemes(self, text: str, voice: str) -> str:
        """Return the phonemes of a text in the international alphabet."""
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise SynthesisError(f"espeak-ng has no voice {voice}")
        rest = ctypes.c_char_p(text.encode())
        clauses: list[str] = []
        while rest.value is not None:  # the library moves the pointer, at last to NULL
            found = self._library.espeak_TextToPhonemes(byref(rest), _UTF8, _IPA)
            clauses.append(found.decode())
        return " ".join(clauses)


def word_starts(
    text: str, found: Sequence[tuple[int, float]], duration_s: float
) -> tuple[float, ...]:
    """Return the start of each word of `text` in seconds.

    `found` has the starts of some words, with their positions in the text: espeak joins short
    words, so some starts are missing. A missing start is interpolated between the neighbours.
    """
    starts: list[float | None] = []
    position = 0
    known = dict(found)
    for word in text.split():
        position = text.index(word, position)
        starts.append(known.get(position))
        position += len(word)
    at = [index for index, start in enumerate(starts) if start is not None]
    times = [start for start in starts if start is not None]
    at, times = [-1e-3, *at, len(starts)], [0.0, *times, duration_s]
    return tuple(np.interp(range(len(starts)), at, times).tolist())


@cache
def espeak() -> Espeak:
    """Return the espeak-ng library; it is loaded once per process."""
    return Espeak()
