"""Noises behind and between questions: synthetic, of recorded rooms, and of many voices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.clips import resample
from training.corpus.rooms import colour, noise, reverberate
from training.corpus.store import Corpus

NOISE_SECONDS = 20
RECORDED_SHARE, RECORDED_SHARE_ALONE = 0.75, 0.9
"""Share of noises that are rooms or voices, with questions and without."""
_TALKERS = (4, 21)
_TALKER_LEVELS = (-9.0, 0.0)
"""Decibels of the talkers: no one of them is so much louder that the model could take him for the
user."""
_TALKER_SPEEDS = (0.75, 1.4)
_BACKWARD_SHARE, _NEAR_SHARE = 0.4, 0.3
"""Share of talkers whose sound runs backward, since a crowd says more than the words of the corpus,
and of crowds that are near, so that their voices are louder than their echo."""
_PERSON_SHARE = 0.6
"""Share of talkers who say recorded sentences."""
_SWELL_S = (0.3, 3.0)
"""Seconds in which a talker becomes louder or quieter."""
_SIZE = NOISE_SECONDS * INPUT_SAMPLE_RATE


class NoiseBank:
    """Noises that are generated once. Sessions use random parts of them.

    `recorded` has more of them: the sound of rooms, and of many voices at once.
    """

    def __init__(self, seed: int, count: int, recorded: Sequence[FloatArray] = ()) -> None:
        self._clips = [noise(_SIZE, np.random.default_rng([seed, 77, n])) for n in range(count)]
        self._recorded = recorded

    def draw(
        self, count: int, chance: np.random.Generator, *, is_alone: bool = False
    ) -> FloatArray:
        """Return `count` samples of a random noise, starting at a random position."""
        clips: Sequence[FloatArray] = self._clips
        share = RECORDED_SHARE_ALONE if is_alone else RECORDED_SHARE
        if len(self._recorded) and chance.random() < share:
            clips = self._recorded
        clip = np.asarray(clips[int(chance.integers(len(clips)))], np.float32)
        start = int(chance.integers(len(clip)))
        return np.resize(np.concatenate((clip[start:], clip[:start])), count)


def record_noises(
    rooms: Sequence[FloatArray],
    corpus: Corpus,
    seed: int,
    count: int,
    sentences: Sequence[FloatArray] = (),
) -> list[FloatArray]:
    """Make `count` noises from recordings of rooms, and as many of crowds.

    The talkers of a crowd say utterances of the corpus, and `sentences`.
    """
    made: list[FloatArray] = []
    for number in range(count):
        chance = np.random.default_rng([seed, 78, number])
        if rooms:
            room = rooms[number % len(rooms)]
            start = int(chance.integers(len(room)))
            part = np.resize(np.concatenate((room[start:], room[:start])), _SIZE)
            made.append(_levelled(colour(part, chance)))
        made.append(_babble(corpus, sentences, chance))
    return made


def _babble(
    corpus: Corpus, sentences: Sequence[FloatArray], chance: np.random.Generator
) -> FloatArray:
    """Mix talkers of different loudness, who speak without a pause in a room."""
    mixed = np.zeros(_SIZE, np.float32)
    is_distant = chance.random() >= _NEAR_SHARE
    for _ in range(int(chance.integers(*_TALKERS))):
        parts: list[FloatArray] = []
        is_person = bool(sentences) and chance.random() < _PERSON_SHARE
        speed = chance.uniform(*_TALKER_SPEEDS) * INPUT_SAMPLE_RATE
        while sum(map(len, parts)) < _SIZE:
            if is_person:
                clip = sentences[int(chance.integers(len(sentences)))]
            else:
                clip = corpus[int(chance.integers(len(corpus)))].samples
            parts.append(resample(clip, speed, INPUT_SAMPLE_RATE))
            parts.append(np.zeros(int(chance.uniform(0.0, 0.6) * INPUT_SAMPLE_RATE), np.float32))
        voice = np.roll(np.concatenate(parts)[:_SIZE], int(chance.integers(_SIZE)))
        voice *= _swell(chance)
        if chance.random() < _BACKWARD_SHARE:
            voice = voice[::-1]
        level = np.float32(10 ** (chance.uniform(*_TALKER_LEVELS) / 20))
        mixed += reverberate(voice, chance, is_distant=is_distant) * level
    return _levelled(colour(mixed, chance, 0.6))


def _swell(chance: np.random.Generator) -> FloatArray:
    """Draw the loudness of a talker over the time of a noise, by up to 12 dB."""
    count = int(NOISE_SECONDS / chance.uniform(*_SWELL_S)) + 2
    levels = 10 ** (chance.uniform(-9.0, 3.0, count) / 20)
    return np.interp(np.linspace(0, count - 1, _SIZE), np.arange(count), levels).astype(np.float32)


def _levelled(samples: FloatArray) -> FloatArray:
    """Scale a noise to an RMS of 1."""
    return (samples / (np.sqrt(np.square(samples).mean()) + 1e-9)).astype(np.float32)
