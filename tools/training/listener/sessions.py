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
from training.corpus.store import Corpus, Utterance
from training.domain import UNKNOWN
from training.listener.noises import NoiseBank
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
HEARD_S = 0.1
"""Seconds of a second question from which the model hears that the user goes on."""
LONG_WORDS = 7
"""Answers with at least this many words are long; `long_answers` draws their questions."""
_REST_DB = (-60.0, -20.0)
"""Decibels of a noise before it begins and after it ends, relative to the noise."""
EARLY_S = (0.8, 1.7)
"""Seconds after the start of an answer in which half of all interruptions begin, if some ask for
silence."""


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
    rested: float = 0.0
    """Share of answers after which there is no question for `rest_s` seconds. If another question
    always follows soon, the model takes the noise that it hears instead for one."""
    rest_s: tuple[float, float] = (2.0, 10.0)
    pictured: float = 0.0
    breath: float = 0.0
    """Share of questions that another question follows after `breath_s` seconds."""
    breath_s: tuple[float, float] = (0.06, 0.6)
    told_to_stop: float = 0.0
    """Share of interruptions that ask for silence; all others are drawn from all questions. If it
    is not 0, half of all interruptions begin within `EARLY_S`."""
    long_answers: float = 0.0
    """Share of questions that are drawn from those with long answers."""
    about_pictures: float = 0.0
    """Share of questions that are drawn from those about a picture."""
    muted: float = 0.0
    """Share of sessions without questions in which the microphone is muted for a part."""
    broken: float = 0.0
    """Share of sessions with questions in which the noise begins late or ends early."""
    lone_noise: tuple[float, float] = (4.0, 45.0)
    """Decibels by which noise is below speech, in sessions without questions."""
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
    both, 0 is silence. `begins` [units * 10] is 1 where a word begins. `view` has the pictures.
    """

    samples: FloatArray
    decisions: list[Decision]
    phonemes: NDArray[np.int64]
    words: NDArray[np.int64]
    begins: NDArray[np.int64]
    asked: list[Asked] = field(default_factory=list[Asked])
    view: View = field(default_factory=View)


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
        numbers = range(len(corpus))
        self._stops = [n for n in numbers if not corpus.exchange(n).answer]
        self._long = [n for n in numbers if _is_long(corpus.exchange(n).answer)]
        self._seen = [n for n in numbers if corpus.exchange(n).kind in QUESTIONS]

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
            ratio = chance.uniform(*(rules.signal_to_noise if asked else rules.lone_noise))
            noise = self._noises.draw(count, chance, is_alone=not asked)
            if asked and _happens(rules.broken, chance):
                _break(noise, chance)
            sound += noise * np.float32(0.1 * 10 ** (-ratio / 20))
        sound *= np.float32(10 ** (chance.uniform(*rules.gain) / 20))
        if not asked and chance.random() < rules.silent:
            sound[:] = 0.0
        if not asked and _happens(rules.muted, chance):
            first, last = sorted(chance.integers(count, size=2))
            sound[first if chance.random() < 0.5 else 0 : last] = 0.0
        np.clip(sound, -1.0, 1.0, out=sound)
        phonemes, words, begins = self._labels(asked)
        return Session(sound, decisions, phonemes, words, begins, asked, view)

    def _converse(
        self, chance: np.random.Generator, decisions: list[Decision], view: View
    ) -> list[Asked]:
        """Draw questions and decide the units of their answers."""
        rules, asked = self.rules, list[Asked]()
        forced = FORCED_UNITS if chance.random() < 0.8 else 0
        start = chance.uniform(0.0, 2.0)
        is_interruption = False
        while True:
            is_stop = is_interruption and _happens(rules.told_to_stop, chance)
            one = self._ask(start, chance, is_stop=is_stop)
            if one.end_s > self._latest_s:
                # An interruption that is heard only in part ends the answer before it, too.
                return [*asked, one] if is_interruption else asked
            asked.append(one)
            if rules.is_dense:
                start = one.end_s + chance.uniform(0.05, 0.5)
                continue
            if one.answer and _happens(rules.breath, chance):
                second = self._ask(one.end_s + chance.uniform(*rules.breath_s), chance)
                if second.end_s <= self._latest_s:
                    asked.append(second)
                    self._answer_first(one, second, decisions, forced, view)
                    one = second
            free_s = self._answer(one, decisions, forced, chance, view)
            is_interruption = one.interrupted_unit >= 0
            start = free_s
            if not is_interruption:
                is_rest = _happens(rules.rested, chance)
                pause_s = rules.rest_s if is_rest else (0.1, rules.longest_pause_s)
                start += chance.uniform(*pause_s)

    @property
    def _latest_s(self) -> float:
        """The time at which the last question must end."""
        return self._duration_s + LAG_S - 0.1

    def _ask(self, start_s: float, chance: np.random.Generator, *, is_stop: bool = False) -> Asked:
        """Draw a question that starts at a time."""
        if is_stop and self._stops:
            number = self._stops[int(chance.integers(len(self._stops)))]
        elif self._long and _happens(self.rules.long_answers, chance):
            number = self._long[int(chance.integers(len(self._long)))]
        elif self._seen and _happens(self.rules.about_pictures, chance):
            number = self._seen[int(chance.integers(len(self._seen)))]
        else:
            number = int(chance.integers(len(self._corpus)))
        utterance = self._corpus[number]
        return Asked(utterance, start_s, start_s + utterance.end_s, utterance.exchange.answer)

    def _answer_first(
        self, one: Asked, second: Asked, decisions: list[Decision], forced: int, view: View
    ) -> None:
        """Answer the first of two questions in one breath.

        If the model hears the second question before it would answer, it answers both after it, or
        none if the second one asks for silence. Else the second question interrupts the answer.
        """
        first = _first_unit(one.end_s, decisions, forced)
        is_before = first + 1 - LAG_S <= second.start_s + HEARD_S
        if not is_before:
            if not second.answer:
                one.answer = ""
                return
            first = _first_unit(second.end_s, decisions, forced)
        one.answer = self._seen_answer(one, first, view)
        self._write(one, decisions, first, second.start_s if is_before else None)

    def _seen_answer(self, one: Asked, first: int, view: View) -> str:
        """Return the answer to a question; some answers depend on the picture in unit `first`."""
        kind = one.utterance.exchange.kind
        if kind in QUESTIONS and (seen := view.seen(first)) >= 0:
            return answer_about(kind, self._scenes[seen])
        return one.answer

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
        first = _first_unit(one.end_s, decisions, forced)
        one.answer = self._seen_answer(one, first, view)
        count = len(self._answers[one.answer].units)
        if count > 1 and chance.random() < self.rules.interrupted:
            # An interruption: the next question begins before the end of the answer.
            begin_s = first + chance.uniform(0.3, count - 0.2)
            if self.rules.told_to_stop and chance.random() < 0.5:
                begin_s = first + chance.uniform(*EARLY_S)
            # One that begins earlier is a second question in the same breath.
            begin_s = max(begin_s, one.end_s + PAUSE_S)
            self._write(one, decisions, first, begin_s)
            if one.interrupted_unit >= 0:
                return begin_s
        self._write(one, decisions, first, None)
        return max(first + count + 0.1, one.end_s + PAUSE_S)

    def _write(
        self, one: Asked, decisions: list[Decision], first: int, interrupted_s: float | None
    ) -> None:
        """Write the answer from unit `first`, up to an interruption that ends it early."""
        if not one.answer:
            return
        units = self._answers[one.answer].units
        one.first_unit = first
        stop = len(units)
        if interrupted_s is not None:
            noticed = int(np.ceil(interrupted_s + NOTICED_S + LAG_S - 1.0))
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

    def _labels(
        self, asked: Sequence[Asked]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        units = self.rules.unit_count
        phonemes = np.zeros(int(units / POSITION_S + 0.5), np.int64)
        words = np.zeros(int(units / EMBEDDING_S + 0.5), np.int64)
        begins = np.zeros_like(words)
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
            starts = one.start_s + one.utterance.words[:, 0]
            first = np.searchsorted(ends, starts)
            begins[first[first < len(begins)]] = 1
        return phonemes, words, begins


def _add(sound: FloatArray, samples: FloatArray, start_s: float) -> None:
    start = int(start_s * INPUT_SAMPLE_RATE)
    part = samples[: max(0, len(sound) - start)]
    sound[start : start + len(part)] += part


def _break(noise: FloatArray, chance: np.random.Generator) -> None:
    """Leave a part of a noise, and little of the rest: its end is not the end of a question."""
    first, last = sorted(chance.integers(len(noise), size=2))
    is_whole = chance.random(2) < 0.3
    rest = np.float32(10 ** (chance.uniform(*_REST_DB) / 20))
    noise[: 0 if is_whole[0] else first] *= rest
    noise[len(noise) if is_whole[1] else last :] *= rest


def _first_unit(end_s: float, decisions: Sequence[Decision], forced: int) -> int:
    """Return the unit in which the answer to a question that ends at `end_s` begins."""
    busy = max((n for n, was in enumerate(decisions) if was.speaks), default=-1)
    return max(forced, int(np.ceil(end_s + PAUSE_S + LAG_S - 1.0)), busy + 1, 0)


def _happens(share: float, chance: np.random.Generator) -> bool:
    """Draw an event. A share of 0 draws nothing, so a rule that is off changes no session."""
    return share > 0.0 and chance.random() < share


def _is_long(answer: str) -> bool:
    return len(answer.split()) >= LONG_WORDS and answer != UNKNOWN
