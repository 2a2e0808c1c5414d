"""Draws random sessions: the sound at a microphone, and the desired output for each unit.

A user asks, the assistant answers, and the user may interrupt. Some sessions contain noise, or the
assistant's own voice from a loudspeaker. Every session has its own random generator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from duplane.worker.models.minicpm_o.audio.mel import FIRST_UNIT_FILL, UNIT_SAMPLES
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.answers import Spoken
from training.corpus.rooms import noise
from training.corpus.store import Corpus, Utterance
from training.vision.questions import QUESTIONS, answer_about
from training.vision.scenes import Scene
from training.vision.views import View, draw_view

LAG_S = (FIRST_UNIT_FILL - UNIT_SAMPLES) / INPUT_SAMPLE_RATE
"""Delay of the audio in seconds: the worker puts this much silence before it."""
PAUSE_S = 0.25
"""Seconds of silence after a question that the model must hear before it answers."""
NOTICED_S = 0.35
"""Seconds of an interruption that the model must hear before it stops its answer."""
POSITION_S, EMBEDDING_S = 0.02, 0.1
WORD_DELAY_S = 0.1
FORCED_UNITS = 3
"""Number of units at the start of a conversation in which the worker forces the model to listen."""
NOISE_SECONDS = 20


@dataclass(frozen=True)
class SessionRules:
    """The probabilities of events in a session, and the ranges of levels in decibels."""

    unit_count: int = 16
    noise_only: float = 0.06
    silent: float = 0.04
    interrupted: float = 0.3
    echoing: float = 0.3
    noisy: float = 0.9
    signal_to_noise: tuple[float, float] = (4.0, 45.0)
    gain: tuple[float, float] = (-24.0, 2.0)
    longest_pause_s: float = 2.5
    pictured: float = 0.0
    is_dense: bool = False
    """True if questions follow each other without answers, to train the encoder."""


@dataclass(frozen=True)
class Decision:
    """The desired output of one unit: speech, or listening if `speaks` is False."""

    speaks: bool = False
    words: tuple[str, ...] = ()
    is_start: bool = False
    ends_turn: bool = False


@dataclass
class Asked:
    """A question. Its answer begins in `first_unit`; `interrupted_unit` ends the answer early.

    Each is -1 if there is no such unit.
    """

    utterance: Utterance
    start_s: float
    end_s: float
    answer: str
    first_unit: int = -1
    interrupted_unit: int = -1


@dataclass(frozen=True)
class Session:
    """One drawn session.

    `samples` [units * 16000] is the sound. `phonemes` [units * 50] has the number of the phoneme at
    each encoder position. `words` [units * 10] has the number of the word at each LLM embedding. In
    both, 0 is silence. `view` has the pictures.
    """

    samples: FloatArray
    decisions: list[Decision]
    phonemes: NDArray[np.int64]
    words: NDArray[np.int64]
    asked: list[Asked] = field(default_factory=list[Asked])
    view: View = field(default_factory=View)


class NoiseBank:
    """Noises that are generated once. Sessions use random parts of them."""

    def __init__(self, seed: int, count: int) -> None:
        size = NOISE_SECONDS * INPUT_SAMPLE_RATE
        self._clips = [noise(size, np.random.default_rng([seed, 77, n])) for n in range(count)]

    def draw(self, count: int, chance: np.random.Generator) -> FloatArray:
        """Return `count` samples of a random noise, starting at a random position."""
        clip = self._clips[chance.integers(len(self._clips))]
        start = int(chance.integers(len(clip)))
        return np.resize(np.concatenate((clip[start:], clip[:start])), count)


class SessionBuilder:
    """Draws sessions from a corpus."""

    def __init__(
        self,
        corpus: Corpus,
        answers: Mapping[str, Spoken],
        noises: NoiseBank,
        rules: SessionRules,
        scenes: Sequence[Scene] = (),
    ) -> None:
        """`scenes` are what the pictures show, of which sessions have random ones."""
        self._corpus, self._answers, self._noises, self.rules = corpus, answers, noises, rules
        self._scenes = scenes
        self._duration_s = float(rules.unit_count)

    def draw(self, seed: Sequence[int]) -> Session:
        """Draw one session; the same seed gives the same session."""
        chance = np.random.default_rng(list(seed))
        rules = self.rules
        count = rules.unit_count * UNIT_SAMPLES
        sound = np.zeros(count, np.float32)
        decisions = [Decision()] * rules.unit_count
        asked: list[Asked] = []
        view = View()
        if self._scenes and chance.random() < rules.pictured:
            view = draw_view(chance, rules.unit_count, len(self._scenes))
        if chance.random() >= rules.noise_only:
            asked = self._converse(chance, decisions, view)
        for one in asked:
            level = 10 ** (chance.uniform(-4.0, 4.0) / 20)
            _add(sound, one.utterance.samples * np.float32(level), one.start_s)
        if asked and chance.random() < rules.echoing:
            self._add_echo(sound, asked, chance)
        if chance.random() < rules.noisy:
            ratio = chance.uniform(*rules.signal_to_noise)
            sound += self._noises.draw(count, chance) * np.float32(0.1 * 10 ** (-ratio / 20))
        sound *= np.float32(10 ** (chance.uniform(*rules.gain) / 20))
        if not asked and chance.random() < rules.silent:
            sound[:] = 0.0
        np.clip(sound, -1.0, 1.0, out=sound)
        phonemes, words = self._labels(asked)
        return Session(sound, decisions, phonemes, words, asked, view)

    def _converse(
        self, chance: np.random.Generator, decisions: list[Decision], view: View
    ) -> list[Asked]:
        """Draw questions and decide the units of their answers."""
        rules, asked = self.rules, list[Asked]()
        forced = FORCED_UNITS if chance.random() < 0.8 else 0
        start = chance.uniform(0.0, 2.0)
        while True:
            utterance = self._corpus[int(chance.integers(len(self._corpus)))]
            one = Asked(utterance, start, start + utterance.end_s, utterance.exchange.answer)
            if one.end_s > self._duration_s + LAG_S - 0.1:
                return asked
            asked.append(one)
            if rules.is_dense:
                start = one.end_s + chance.uniform(0.05, 0.5)
                continue
            free_s = self._answer(one, decisions, forced, chance, view)
            pause = chance.uniform(0.1, rules.longest_pause_s) if free_s >= one.end_s else 0.0
            start = free_s + pause

    def _answer(
        self,
        one: Asked,
        decisions: list[Decision],
        forced: int,
        chance: np.random.Generator,
        view: View,
    ) -> float:
        """Choose the units that answer a question; return when the next question may start."""
        if not one.answer:
            return one.end_s + PAUSE_S
        first = max(forced, int(np.ceil(one.end_s + PAUSE_S + LAG_S - 1.0)), 0)
        busy = max((n for n, was in enumerate(decisions) if was.speaks), default=-1)
        first = max(first, busy + 1)
        one.first_unit = first
        kind = one.utterance.exchange.kind
        if kind in QUESTIONS and (seen := view.seen(first)) >= 0:
            one.answer = answer_about(kind, self._scenes[seen])
        units = self._answers[one.answer].units
        begin_s = first + len(units) + 0.1
        stop = len(units)
        if len(units) > 1 and chance.random() < self.rules.interrupted:
            # An interruption: the next question begins before the end of the answer.
            begin_s = first + chance.uniform(0.3, len(units) - 0.2)
            noticed = int(np.ceil(begin_s + NOTICED_S + LAG_S - 1.0))
            if first < noticed < first + len(units):
                stop = noticed - first
                one.interrupted_unit = noticed
        for number, words in enumerate(units[:stop]):
            if first + number < len(decisions):
                decisions[first + number] = Decision(
                    True, words, number == 0, number == len(units) - 1
                )
        if stop < len(units) and first + stop < len(decisions):
            decisions[first + stop] = Decision(True, ends_turn=True)
        return max(begin_s, one.end_s + PAUSE_S) if stop == len(units) else begin_s

    def _add_echo(
        self, sound: FloatArray, asked: Sequence[Asked], chance: np.random.Generator
    ) -> None:
        """Add the assistant's voice, as a microphone near the loudspeaker records it."""
        level = np.float32(10 ** (chance.uniform(-30.0, -8.0) / 20))
        delay_s = chance.uniform(0.02, 0.4)
        for one in asked:
            if one.first_unit < 0:
                continue
            # Interpolate from 24 to 16 kHz: two samples for every three.
            whole = self._answers[one.answer].samples
            at = np.arange(0, len(whole) - 1, 1.5)
            spoken = np.interp(at, np.arange(len(whole)), whole).astype(np.float32)
            if one.interrupted_unit >= 0:
                heard = one.interrupted_unit - one.first_unit
                spoken = spoken[: int((heard + 0.1) * INPUT_SAMPLE_RATE)]
            _add(sound, spoken * level, one.first_unit + 1 + delay_s)

    def _labels(self, asked: Sequence[Asked]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        units = self.rules.unit_count
        phonemes = np.zeros(int(units / POSITION_S + 0.5), np.int64)
        words = np.zeros(int(units / EMBEDDING_S + 0.5), np.int64)
        centres = (np.arange(len(phonemes)) + 0.5) * POSITION_S - LAG_S
        ends = (np.arange(len(words)) + 1.0) * EMBEDDING_S - LAG_S - WORD_DELAY_S
        for one in asked:
            for table, times, marks in (
                (phonemes, centres, one.utterance.phonemes),
                (words, ends, one.utterance.words),
            ):
                inside = (times >= one.start_s) & (times < one.end_s)
                found = np.searchsorted(marks[:, 0], times[inside] - one.start_s, side="right")
                table[inside] = marks[np.maximum(found - 1, 0), 1].astype(np.int64)
        return phonemes, words


def _add(sound: FloatArray, samples: FloatArray, start_s: float) -> None:
    start = int(start_s * INPUT_SAMPLE_RATE)
    part = samples[: max(0, len(sound) - start)]
    sound[start : start + len(part)] += part
