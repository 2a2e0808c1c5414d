"""Draws the tries of the rows: one session for each try, with its right answer.

Speech begins after two to three seconds, over faint noise of the microphone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

import numpy as np

from duplane.worker.models.minicpm_o.audio.mel import UNIT_SAMPLES
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.clips import joined, narrowed, telephoned
from training.domain import (
    DIGITS,
    FIXED,
    HELD_OUT_WORDS,
    NUMBERS,
    STOPS,
    UNKNOWN,
    Exchange,
    draw_exchange,
    draw_near,
)
from training.evaluation.inputs import ChatInput, SessionInput
from training.evaluation.material import (
    Engine,
    Material,
    Voice,
    answer_units,
)
from training.listener.sessions import FORCED_UNITS, LAG_S, NOTICED_S, PAUSE_S
from training.sources.room_files import HELD_OUT_ROOMS, ROOMS

Judged = Literal["answers", "quiet", "interruptions"]

MICROPHONE_NOISE = 1e-3
SPEECH_RMS = (0.03, 0.12)
ROOM_DB = 10.0
ROOM_UNITS, SILENT_UNITS = 13, 300
REST_UNITS = 2
_WORD_GAP_S = (0.02, 0.08)
_BREATH_S = (0.08, 0.25)
_ANSWERS = {question: answer for texts, answer in FIXED.values() for question in texts}
_BEGUN_S = (1.1, 1.55)
"""Seconds after the decision to reply at which somebody interrupts: the reply has been heard for a
tenth to half of a second."""


@dataclass(frozen=True)
class Try:
    """One session, and what should happen in it.

    `wanted` has the right answers; the first begins in `first_unit`. `label` names a part of the
    row. A try of an interruption has the same session without it (`alone`). A try of a typed chat
    has `chat`, and no session.
    """

    label: str
    given: SessionInput
    wanted: tuple[str, ...] = ()
    first_unit: int = 0
    alone: SessionInput | None = None
    noticed_unit: int = 0
    chat: ChatInput | None = None


@dataclass(frozen=True)
class Row:
    """A row of the table: `draw` draws one try from its number and its random generator."""

    name: str
    judged: Judged
    draw: Callable[[Material, int, Random], Try]
    count: int | None = None
    """The number of tries, if it is not that of the other rows."""


def draw_tries(row: Row, material: Material, count: int, seed: int) -> list[Try]:
    """Draw the tries of a row; all sessions have the same length. Raises MissingError."""
    drawn = [
        row.draw(material, number, Random(f"{seed} {row.name} {number}"))
        for number in range(row.count or count)
    ]
    longest = max(len(one.given.samples) for one in drawn)
    return [_lengthened(one, longest, seed + number) for number, one in enumerate(drawn)]


def _lengthened(one: Try, count: int, seed: int) -> Try:
    def filled(given: SessionInput) -> SessionInput:
        rest = _noise(count - len(given.samples), seed)
        if not given.samples.any():
            rest[:] = 0.0
        return replace(given, samples=np.concatenate((given.samples, rest)), seed=seed)

    alone = None if one.alone is None else filled(one.alone)
    return replace(one, given=filled(one.given), alone=alone)


def _noise(count: int, seed: int) -> FloatArray:
    drawn = np.random.default_rng([seed, 5]).standard_normal(count)
    return (drawn * MICROPHONE_NOISE).astype(np.float32)


def _sound(parts: Sequence[tuple[float, FloatArray]], unit_count: int, seed: int) -> FloatArray:
    """Mix sounds, each with its start in seconds, with the noise of a microphone."""
    sound = _noise(unit_count * UNIT_SAMPLES, seed)
    for start_s, samples in parts:
        start = int(start_s * INPUT_SAMPLE_RATE)
        part = samples[: len(sound) - start]
        sound[start : start + len(part)] += part
    return np.clip(sound, -1.0, 1.0)


def _level(samples: FloatArray, rms: float) -> FloatArray:
    return joined([samples], [], rms)


def _first_unit(end_s: float) -> int:
    """Return the unit in which an answer begins if its question ends at this time."""
    return max(FORCED_UNITS, math.ceil(end_s + PAUSE_S + LAG_S - 1.0))


def asked(
    label: str,
    speech: FloatArray,
    wanted: tuple[str, ...],
    chance: Random,
    room: FloatArray | None = None,
) -> Try:
    """Make a session of one question, or of two in one breath; `room` is its background."""
    start_s, rms = chance.uniform(2.0, 3.0), chance.uniform(*SPEECH_RMS)
    first = _first_unit(start_s + len(speech) / INPUT_SAMPLE_RATE)
    unit_count = first + sum(answer_units(answer) for answer in wanted) + REST_UNITS
    parts = [(start_s, _level(speech, rms))]
    if room is not None:
        gain = np.float32(rms / 0.1 * 10 ** (-ROOM_DB / 20))
        parts.append((0.0, _cut(room, unit_count, chance) * gain))
    seed = chance.randrange(1 << 30)
    return Try(label, SessionInput(_sound(parts, unit_count, seed), seed), wanted, first)


def _cut(room: FloatArray, unit_count: int, chance: Random) -> FloatArray:
    """Cut a random part from the recording of a room, which repeats if it is too short."""
    count = unit_count * UNIT_SAMPLES
    start = chance.randrange(len(room))
    return np.resize(np.concatenate((room[start:], room[:start])), count)


def _question(chance: Random) -> Exchange:
    """Draw a question that has an answer. Its sums and digits are never in training."""
    while True:
        exchange = draw_exchange(chance, HELD_OUT_WORDS, held_out=True)
        if exchange.answer:
            return exchange


def _engines(
    *engines: Engine, change: Callable[[FloatArray], FloatArray] = lambda samples: samples
) -> Callable[[Material, int, Random], Try]:
    """Ask questions with voices of these synthesisers in turn."""

    def draw(material: Material, number: int, chance: Random) -> Try:
        voice = material.voice(engines[number % len(engines)], chance)
        exchange = _question(chance)
        speech = change(voice(exchange.question))
        return asked(exchange.kind, speech, (exchange.answer,), chance)

    return draw


def _near(material: Material, number: int, chance: Random) -> Try:
    voice = material.voice(("espeak", "flite", "kokoro")[number % 3], chance)
    exchange = draw_near(chance, held_out=True)
    return asked(exchange.question.split()[0], voice(exchange.question), (UNKNOWN,), chance)


def _joined_words(material: Material, number: int, chance: Random) -> Try:
    voice = material.voice(("espeak", "flite")[number % 2], chance)
    exchange = _question(chance)
    words = exchange.question.split()
    speech = narrowed(_splice([voice(word) for word in words], chance))
    return asked(exchange.kind, speech, (exchange.answer,), chance)


def _splice(clips: Sequence[FloatArray], chance: Random) -> FloatArray:
    return joined(clips, [chance.uniform(*_WORD_GAP_S) for _ in clips[1:]])


def _exchange(chance: Random, kind: str) -> Exchange:
    """Draw a question of one kind."""
    while True:
        exchange = _question(chance)
        if exchange.kind == kind:
            return exchange


def _people_repeat(material: Material, number: int, chance: Random) -> Try:
    return _repeated(material, _takes(material, number, chance), chance)


def _many_people_repeat(material: Material, number: int, chance: Random) -> Try:
    """Each digit is that of another speaker."""
    del number
    return _repeated(material, _many_takes(material, chance), chance)


def _repeated(material: Material, takes: Voice, chance: Random) -> Try:
    exchange = _exchange(chance, "repeat")
    clips = [material.say(), *(takes(word) for word in exchange.answer.split())]
    return asked("repeat", _splice(clips, chance), (exchange.answer,), chance)


def _many_takes(material: Material, chance: Random) -> Voice:
    words = material.words()
    return lambda word: material.take(chance.choice(words[word]))


def _people_sum(material: Material, number: int, chance: Random) -> Try:
    return _summed(material, _takes(material, number, chance), chance)


def _many_people_sum(material: Material, number: int, chance: Random) -> Try:
    del number
    return _summed(material, _many_takes(material, chance), chance)


def _summed(material: Material, takes: Voice, chance: Random) -> Try:
    exchange = _exchange(chance, "add")
    first, _, second, *_ = exchange.answer.split()
    clips = [takes(first), material.woman("letters/plus"), takes(second)]
    return asked("add", _splice(clips, chance), (exchange.answer,), chance)


def _takes(material: Material, number: int, chance: Random) -> Voice:
    """Return what speaks digits: takes of one speaker. The speakers take turns."""
    people = material.digits()
    person = people[sorted(people)[number % len(people)]]
    return lambda word: material.take(chance.choice(person[word]))


def _woman_sum(material: Material, number: int, chance: Random) -> Try:
    del number
    exchange = _exchange(chance, "add")
    first, _, second, *_ = exchange.answer.split()
    names = (f"digits/{DIGITS.index(first)}", "letters/plus", f"digits/{DIGITS.index(second)}")
    speech = _splice([material.woman(name) for name in names], chance)
    return asked("add", speech, (exchange.answer,), chance)


def _people_phrase(material: Material, number: int, chance: Random) -> Try:
    phrases = material.phrases()
    text, speech = phrases[number % len(phrases)]
    return asked(text, speech, (_ANSWERS[text],), chance)


def _people_other(material: Material, number: int, chance: Random) -> Try:
    sentences = material.other_sentences()
    return asked("unknown", sentences[number % len(sentences)], (UNKNOWN,), chance)


def _room_alone(material: Material, number: int, chance: Random) -> Try:
    name = ROOMS[number % len(ROOMS)]
    gain = np.float32(10 ** (chance.uniform(-12.0, 6.0) / 20))
    room = _cut(material.room(name), ROOM_UNITS, chance) * gain
    seed = chance.randrange(1 << 30)
    return Try(name, SessionInput(_sound([(0.0, room)], ROOM_UNITS, seed), seed))


def _in_a_room(material: Material, number: int, chance: Random) -> Try:
    name = HELD_OUT_ROOMS[number % len(HELD_OUT_ROOMS)]
    voice = material.voice(("espeak", "flite")[number // 2 % 2], chance)
    exchange = _question(chance)
    speech, room = voice(exchange.question), material.room(name)
    return asked(name, speech, (exchange.answer,), chance, room)


def _breath(material: Material, number: int, chance: Random) -> Try:
    voice = material.voice(("espeak", "flite")[number % 2], chance)
    both = [_question(chance), _question(chance)]
    while UNKNOWN in {both[0].answer, both[1].answer} or both[0].answer == both[1].answer:
        both = [_question(chance), _question(chance)]
    clips = [voice(one.question) for one in both]
    speech = joined(clips, [chance.uniform(*_BREATH_S)])
    return asked("two", speech, tuple(one.answer for one in both), chance)


def _interruptions(
    *, is_stop: bool, are_people: bool = False
) -> Callable[[Material, int, Random], Try]:
    """Interrupt the longest counts, which last three units. If `are_people`, people say "stop"."""

    def draw(material: Material, number: int, chance: Random) -> Try:
        del number
        voice = material.voice("espeak", chance)
        takes = _many_takes(material, chance) if are_people else None
        last = chance.choice((9, 10))
        answer = " ".join(NUMBERS[1 : last + 1])
        alone = asked("count", voice(f"count to {NUMBERS[last]}"), (answer,), chance)
        begin_s = alone.first_unit + chance.uniform(*_BEGUN_S)
        text = chance.choice(STOPS) if is_stop else _question(chance).question
        speech = _level(voice(text) if takes is None else takes(STOPS[0]), 0.1)
        noticed = math.ceil(begin_s + NOTICED_S + LAG_S - 1.0)
        sound = alone.given.samples.copy()
        start = int(begin_s * INPUT_SAMPLE_RATE)
        part = speech[: len(sound) - start]
        sound[start : start + len(part)] += part
        given = replace(alone.given, samples=np.clip(sound, -1.0, 1.0))
        return replace(
            alone,
            label="stop" if is_stop else "question",
            given=given,
            alone=alone.given,
            noticed_unit=noticed,
        )

    return draw


def _silence(material: Material, number: int, chance: Random) -> Try:
    """Make five minutes without a sound, or with the noise of a microphone."""
    del material
    seed = chance.randrange(1 << 30)
    sound = np.zeros(SILENT_UNITS * UNIT_SAMPLES, np.float32)
    label = "zeros"
    if number % 2:
        sound, label = _noise(len(sound), seed), "noise"
    return Try(label, SessionInput(sound, seed))


def rows() -> Iterator[Row]:
    """Yield the rows; the longest sessions first, because all sessions run side by side."""
    yield Row("five minutes of silence", "quiet", _silence, count=6)
    yield Row("espeak, unheard voices and accents", "answers", _engines("espeak"))
    yield Row("flite, an unheard voice", "answers", _engines("flite"))
    yield Row("festival, HTS and diphone voices", "answers", _engines("festival"))
    yield Row("Kokoro, neural voices", "answers", _engines("kokoro"))
    yield Row("people: digits repeated", "answers", _people_repeat)
    yield Row("people: sums", "answers", _people_sum)
    yield Row("many people: digits repeated", "answers", _many_people_repeat)
    yield Row("many people: sums", "answers", _many_people_sum)
    yield Row("one woman: sums", "answers", _woman_sum)
    yield Row("people: phrases of the domain", "answers", _people_phrase)
    yield Row("people: sentences to refuse", "answers", _people_other)
    yield Row("questions like those of the domain, to refuse", "answers", _near)
    yield Row("joined words at 8 kHz", "answers", _joined_words)
    yield Row("telephone", "answers", _engines("espeak", "flite", change=telephoned))
    yield Row("questions in a room at 10 dB", "answers", _in_a_room)
    yield Row("two questions in one breath", "answers", _breath)
    yield Row("told to stop", "interruptions", _interruptions(is_stop=True))
    yield Row(
        "told to stop by people", "interruptions", _interruptions(is_stop=True, are_people=True)
    )
    yield Row("interrupted by a question", "interruptions", _interruptions(is_stop=False))
    yield Row("rooms alone", "quiet", _room_alone)
