"""Joins questions from words of different takes and voices.

Recordings of people have only digits and a few other words: the other words of a question come from
synthesised voices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray
from training.corpus.changing import Changes, VoiceChange, draw_length, draw_voice_change
from training.corpus.store import Corpus, Recorded
from training.domain import DIGITS, STOPS, TRAINED_WORDS, UNKNOWN, Exchange, draw_exchange

PERSON = "person:"
"""Prefix of the names of speakers whose words are recordings."""
CROWD = PERSON
"""The name of many speakers together, of whom each says only a few words."""
_PERSON_SHARE, _CROWD_SHARE = 0.75, 0.6
"""Share of questions with recorded words, and of these with words of many speakers."""
_LONE_SHARE, _STOP_SHARE = 0.05, 0.6
"""Share of questions that are one recorded word, and of these that are "stop"; all others are
refused."""
_SHUFFLED_SHARE, _OTHER_SHARE = 0.08, 0.16
_BARE_SHARE = 0.2
"""Share of the digits to repeat that come without a verb: the model refuses them."""
_UNCLEAR_SHARE = 0.1
"""Share of questions with a digit that is mixed with another one: the model should refuse what may
be either."""
UNCLEAR = "?"
_OTHER_WORDS = (4, 10)
_GAP_S = (0.0, 0.25)
_MARGIN_S = 0.02
_EDGE_S = 0.004
_SPOKEN = ("repeat", "add", "count")


@dataclass(frozen=True)
class Piece:
    """One word of a clip."""

    clip: int
    word: int


class WordBank:
    """The words of aligned clips: of synthesised voices together, and of each person."""

    def __init__(self, clips: Corpus) -> None:
        self._clips = clips
        self.synthesised: dict[str, list[Piece]] = {}
        self.people: dict[str, dict[str, list[Piece]]] = {}
        for number, speaker in enumerate(clips.speakers):
            bank = self.synthesised
            if speaker.startswith(PERSON):
                bank = self.people.setdefault(speaker, {})
            for index, word in enumerate(clips.exchange(number).question.split()):
                bank.setdefault(word, []).append(Piece(number, index))

    def cut(self, piece: Piece) -> tuple[FloatArray, list[tuple[float, str]]]:
        """Return the sound of a word, and its phonemes."""
        clip = self._clips[piece.clip]
        starts = [float(start) for start, _ in clip.words]
        is_last = piece.word + 1 == len(starts)
        begin = max(0.0, starts[piece.word] - (0.0 if piece.word else _MARGIN_S))
        end = clip.end_s + _MARGIN_S if is_last else starts[piece.word + 1]
        names = self._clips.phoneme_names
        marks = [(float(start), names[int(number)]) for start, number in clip.phonemes]
        inside = [(max(0.0, start - begin), name) for start, name in marks if begin <= start < end]
        first, last = (int(second * INPUT_SAMPLE_RATE) for second in (begin, end))
        return _faded(clip.samples[first:last]), inside


def _faded(samples: FloatArray) -> FloatArray:
    """Fade the cut edges of a word in and out."""
    count = min(int(_EDGE_S * INPUT_SAMPLE_RATE), len(samples) // 2)
    made = samples.copy()
    if count:
        ramp = np.linspace(0.0, 1.0, count, dtype=np.float32)
        made[:count] *= ramp
        made[-count:] *= ramp[::-1]
    return made


def draw_splice(bank: WordBank, chance: Random, changes: Changes) -> Recorded:
    """Draw a question and join its words. The digits are those of one person, if there is one."""
    numbers = np.random.default_rng(chance.getrandbits(60))
    person: dict[str, list[Piece]] = {}
    if bank.people and chance.random() < _PERSON_SHARE:
        person = _draw_person(bank, chance)
    exchange = _draw_question(bank, person, chance)
    words = exchange.question.split()
    if exchange.answer != UNKNOWN and (others := _no_question(exchange.kind, words, chance)):
        words, exchange = others, Exchange("unknown", " ".join(others), UNKNOWN)
    own, other = draw_voice_change(changes, numbers), draw_voice_change(changes, numbers)
    parts: list[tuple[FloatArray, list[tuple[float, str]]]] = []
    for word in words:
        takes = person.get(word) or bank.synthesised[word]
        samples, marks = bank.cut(chance.choice(takes))
        # People speak digits alone, so their recordings are long already.
        voice, power = (own, 0.5) if word in person else (other, 1.0)
        change = replace(voice, length=draw_length(changes, numbers) ** power)
        parts.append(_changed(samples, marks, change))
    digits = [place for place, word in enumerate(words) if word in person and word in DIGITS]
    if exchange.answer != UNKNOWN and digits and chance.random() < _UNCLEAR_SHARE:
        place = chance.choice(digits)
        names = sorted({*person} & {*DIGITS} - {words[place]})
        if names:
            samples, _ = bank.cut(chance.choice(person[chance.choice(names)]))
            first, marks = parts[place]
            parts[place] = _mixed(first, own.apply(samples)), marks
            words = [*words[:place], UNCLEAR, *words[place + 1 :]]
            exchange = Exchange("unknown", " ".join(words), UNKNOWN)
    gaps = [chance.uniform(*_GAP_S) for _ in parts]
    return _joined(exchange, words, parts, gaps)


def _draw_person(bank: WordBank, chance: Random) -> dict[str, list[Piece]]:
    """Draw whose recorded words a question has."""
    if CROWD in bank.people and chance.random() < _CROWD_SHARE:
        return bank.people[CROWD]
    return bank.people[chance.choice(sorted({*bank.people} - {CROWD}) or [CROWD])]


def _draw_question(bank: WordBank, person: Mapping[str, object], chance: Random) -> Exchange:
    """Draw a question whose words are those of a person, or synthesised."""
    if person and chance.random() < _LONE_SHARE:
        return _lone_word(chance, person)
    while True:
        if chance.random() < _OTHER_SHARE:
            words = _other_words(chance, [*person, *bank.synthesised])
            return Exchange("unknown", " ".join(words), UNKNOWN)
        exchange = draw_exchange(chance, TRAINED_WORDS)
        if person and exchange.kind not in _SPOKEN:
            continue
        if all(word in person or word in bank.synthesised for word in exchange.question.split()):
            return exchange


def _lone_word(chance: Random, person: Collection[str]) -> Exchange:
    """Draw a question of one word: a request to stop, or what the model refuses."""
    stops = [word for word in STOPS if word in person]
    if stops and chance.random() < _STOP_SHARE:
        return Exchange("stop", chance.choice(stops), "")
    return Exchange("unknown", chance.choice(sorted({*person} - {*STOPS})), UNKNOWN)


def _mixed(first: FloatArray, second: FloatArray) -> FloatArray:
    """Mix two words of the same loudness, each with its middle in the middle of the longer one."""
    made = np.zeros(max(len(first), len(second)), np.float32)
    for samples in (first, second):
        start = (len(made) - len(samples)) // 2
        loudness = np.sqrt(np.square(samples).mean()) if len(samples) else 1.0
        made[start : start + len(samples)] += samples / np.float32(max(loudness, 1e-4))
    return made


def _no_question(kind: str, words: Sequence[str], chance: Random) -> list[str]:
    """Change the words of some questions, so that they ask nothing; no words for all others."""
    if len(words) > 2 and chance.random() < _SHUFFLED_SHARE:
        return _shuffled(words, chance)
    return [*words[1:]] if kind == "repeat" and chance.random() < _BARE_SHARE else []


def _other_words(chance: Random, known: Sequence[str]) -> list[str]:
    """Draw words in any order, digits of a person among them: nothing that the model answers."""
    others = [word for word in known if word in TRAINED_WORDS] or [*known]
    count = chance.randint(*_OTHER_WORDS)
    words = [chance.choice(known if chance.random() < 0.4 else others) for _ in range(count)]
    return [chance.choice(others), *words[1:]]


def _shuffled(words: Sequence[str], chance: Random) -> list[str]:
    """Return the words in an order in which they are no question of the domain."""
    verbs = {"say", "repeat", "plus", "count"}
    ends = [word for word in words if word in verbs] or [words[0]]
    others = [word for word in words if word not in ends]
    chance.shuffle(others)
    return [*others, *ends]


def _changed(
    samples: FloatArray, marks: list[tuple[float, str]], change: VoiceChange
) -> tuple[FloatArray, list[tuple[float, str]]]:
    return change.apply(samples), [(change.moved(start), name) for start, name in marks]


def _joined(
    exchange: Exchange,
    words: Sequence[str],
    parts: Sequence[tuple[FloatArray, list[tuple[float, str]]]],
    gaps_s: Sequence[float],
) -> Recorded:
    """Join words at one level, with a gap after each of them but the last."""
    sounds: list[FloatArray] = [np.zeros(int(0.03 * INPUT_SAMPLE_RATE), np.float32)]
    starts: list[tuple[float, str]] = []
    phonemes: list[tuple[float, str]] = [(0.0, "")]
    at = end = len(sounds[0]) / INPUT_SAMPLE_RATE
    for word, (samples, marks), gap_s in zip(words, parts, gaps_s, strict=True):
        level = float(np.sqrt(np.square(samples).mean())) if len(samples) else 1.0
        sounds.append(samples * np.float32(0.1 / max(level, 1e-4)))
        starts.append((at, word))
        phonemes += [(at + start, name) for start, name in marks]
        end = at + len(samples) / INPUT_SAMPLE_RATE
        phonemes.append((end, ""))
        gap = np.zeros(int(gap_s * INPUT_SAMPLE_RATE), np.float32)
        sounds.append(gap)
        at = end + len(gap) / INPUT_SAMPLE_RATE
    return Recorded(
        exchange, "spliced", np.concatenate(sounds), end, tuple(starts), tuple(phonemes)
    )
