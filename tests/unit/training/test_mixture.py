"""The corpus of training: alignment, changed voices, joined words, and what must not be in it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import orjson
import pytest
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.tools.command import UsageError
from duplane.worker.models.types import FloatArray
from training.corpus import alignment, mixture
from training.corpus.changing import (
    Changes,
    VoiceChange,
    draw_voice_change,
    send,
    with_length,
    with_tract,
)
from training.corpus.mixture import MixturePlan, draw_utterance, record_clips
from training.corpus.phrases import LIST
from training.corpus.rooms import reverberate
from training.corpus.splicing import CROWD, PERSON, UNCLEAR, WordBank, draw_splice
from training.corpus.store import Corpus, Recorded
from training.corpus.voices import Speaker
from training.domain import DIGITS, TRAINED_WORDS, UNKNOWN, Exchange, draw_near, is_held_out
from training.listener.noises import NOISE_SECONDS, record_noises
from training.sources.recordings import recordings_of
from training.sources.room_files import HELD_OUT_ROOMS, ROOMS, TRAINED_ROOMS

RATE = 16_000
WORD_S = 0.3
SPEAKERS = ("ann", "bob", "cleo", "dan")
CROWD_WORDS = ("cat", *DIGITS, "stop")
"""What speaker 1b says. Speaker 0a judges only."""
QUESTIONS = ("what is two plus three", "say ten", "repeat one", "count to ten", "stop")
Parts = list[tuple[float, float]]


def tones(parts: Parts) -> FloatArray:
    """Return tones of (frequency, seconds), one after the other."""
    sounds = [
        0.2 * np.sin(2 * np.pi * hertz * np.arange(int(length_s * RATE)) / RATE)
        for hertz, length_s in parts
    ]
    return np.concatenate(sounds).astype(np.float32)


def modelled(exchange: Exchange, speaker: Speaker) -> Recorded:
    """Act as espeak: each word is a tone of its own."""
    words = exchange.question.split()
    times = [WORD_S * number for number in range(len(words))]
    sound = tones([(300.0 + 97.0 * (sum(map(ord, word)) % 31), WORD_S) for word in words])
    marks = tuple(zip(times, words, strict=True))
    return Recorded(exchange, speaker.voice, sound, WORD_S * len(words), marks, marks)


@pytest.fixture(autouse=True)
def espeak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "record", modelled)
    alignment._model.cache_clear()  # pyright: ignore[reportPrivateUsage]  it keeps real speech


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return phrases of the stage "speak", and recordings of four people."""
    phrases, people = tmp_path / "phrases", tmp_path / "people"
    phrases.mkdir()
    people.mkdir()
    entries: list[dict[str, object]] = []
    for number, question in enumerate(QUESTIONS):
        exchange = {"kind": "kind", "question": question, "answer": "answer"}
        sound = modelled(Exchange(**exchange), Speaker("espeak", "x")).samples
        name = f"{number:05d}.wav"
        soundfile.write(phrases / name, sound, RATE)
        entries.append({"file": name, "engine": "kokoro", "voice": "v", "exchange": exchange})
    (phrases / LIST).write_bytes(orjson.dumps(entries))
    for speaker in SPEAKERS:
        for digit in range(10):
            name = f"{digit}_{speaker}_0.wav"
            soundfile.write(people / name, tones([(200.0 + 40 * digit, 0.25)]), RATE)
    for word in CROWD_WORDS:
        (people / word).mkdir()
        for speaker in ("0a", "1b"):
            path = people / word / f"{speaker}_nohash_0.wav"
            soundfile.write(path, tones([(300.0, 0.25)]), RATE)
    # Loud noise around the word: no clip of training.
    soundfile.write(people / "stop" / "1b_nohash_1.wav", tones([(300.0, 1.0)]), RATE)
    return phrases, people


@pytest.fixture
def clips(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    record_clips(tmp_path / "clips", *folders)
    return tmp_path / "clips"


def test_words_are_found_where_they_are_spoken() -> None:
    exchange = Exchange("repeat", "say two", "two")
    whole = modelled(exchange, Speaker("espeak", "x")).samples
    first, second = np.split(whole, [int(WORD_S * RATE)])
    slow = np.concatenate((first, first[: RATE // 5], second))
    found = alignment.align(slow, exchange, "kokoro:v")
    assert [name for _, name in found.words] == ["say", "two"]
    assert [start for start, _ in found.words] == pytest.approx([0.0, 0.5], abs=0.04)
    assert found.end_s == pytest.approx(0.8, abs=0.04)


def test_a_tract_moves_formants_and_keeps_pitch_and_length() -> None:
    chance = np.random.default_rng(1)
    pulses = np.zeros(RATE, np.float32)
    pulses[::160] = 1.0  # a pitch of 100 Hz
    spectrum = np.fft.rfft(pulses)
    at = np.fft.rfftfreq(RATE, 1 / RATE)
    spectrum *= np.exp(-np.square((at - 1000.0) / 300.0)) + 1e-3
    voice = np.fft.irfft(spectrum).astype(np.float32)
    assert np.abs(with_tract(voice, 1.0) - voice).max() < 1e-3
    moved = with_tract(voice, 1.3)
    assert len(moved) == len(voice)
    found = np.abs(np.fft.rfft(moved))
    centre = float((at * found).sum() / found.sum())
    before = np.abs(spectrum)
    assert centre > 1.15 * float((at * before).sum() / before.sum())
    power = np.square(found)
    assert power[::100].sum() > 0.8 * power.sum()  # harmonics are where they were
    faster = VoiceChange(speed=1.25).apply(voice)
    assert len(faster) == pytest.approx(RATE / 1.25, abs=2)
    lined = send(voice[:4001], Changes(telephone=1.0), chance)
    assert lined.shape == (4001,)
    assert np.abs(lined).max() <= 1.0
    assert draw_voice_change(Changes(moved=0.0), chance) == VoiceChange()


@pytest.mark.parametrize("factor", [0.7, 1.0, 2.3])
def test_a_longer_word_keeps_its_pitch_and_loudness(factor: float) -> None:
    word = tones([(150.0, 0.2), (1500.0, 0.3)])
    made = with_length(word, factor)
    assert len(made) == int(len(word) * factor)
    change = int(0.2 * factor * RATE)
    for hertz, part in ((150.0, made[: change - 500]), (1500.0, made[change + 500 : -500])):
        found = np.abs(np.fft.rfft(part * np.hanning(len(part))))
        assert np.argmax(found) * RATE / len(part) == pytest.approx(hertz, rel=0.06)
        assert np.square(part).mean() == pytest.approx(0.02, rel=0.1)


def test_joined_words_are_as_long_as_words_that_people_speak_alone(clips: Path) -> None:
    bank = WordBank(Corpus(clips))
    longer = Changes(moved=0.0, length=(2.0, 2.0), lengthened=1.0)
    found: dict[str, float] = {}
    for number in range(40):
        made = draw_splice(bank, Random(number), longer)
        ends = [start for start, name in made.phonemes if not name][1:]
        for (start, word), end in zip(made.words, ends, strict=True):
            found[word] = end - start
    assert found["say"] == pytest.approx(2 * WORD_S, abs=0.1)
    assert found["seven"] == pytest.approx(2**0.5 * 0.25, abs=0.1)


def test_clips_are_those_of_training(clips: Path, folders: tuple[Path, Path]) -> None:
    corpus = Corpus(clips)
    people = {name for name in corpus.speakers if name.startswith(PERSON)}
    judging = recordings_of(folders[1], "judging").digits
    trained = recordings_of(folders[1], "training").digits
    assert people == {CROWD} | {f"{PERSON}{name}" for name in trained}
    assert judging
    assert not people & {f"{PERSON}{name}" for name in judging}
    crowd = [n for n, name in enumerate(corpus.speakers) if name == CROWD]
    assert [corpus.exchange(n).question for n in crowd] == sorted(CROWD_WORDS)
    assert len(mixture.phrases_of(clips)) == len(QUESTIONS)


def test_missing_list_of_phrases_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the stage speak has not ended"):
        record_clips(tmp_path / "clips", tmp_path, None)


def test_joined_words_are_no_question_that_only_judges(clips: Path) -> None:
    bank = WordBank(Corpus(clips))
    refused = unclear = bare = 0
    for number in range(120):
        made = draw_splice(bank, Random(number), Changes())
        assert [word for _, word in made.words] == made.exchange.question.split()
        assert not is_held_out(made.exchange)
        starts = [start for start, _ in made.words]
        assert starts == sorted(starts)
        assert starts[-1] < made.end_s <= len(made.samples) / RATE
        refused += made.exchange.answer == UNKNOWN
        unclear += UNCLEAR in made.exchange.question
        assert UNCLEAR not in made.exchange.question or made.exchange.answer == UNKNOWN
        is_bare = (
            made.exchange.question.split()[0] in DIGITS and "plus" not in made.exchange.question
        )
        assert not is_bare or made.exchange.answer == UNKNOWN
        bare += is_bare
    assert 10 < refused < 80
    assert unclear
    assert bare


def test_recorded_words_alone_are_refused_or_stop_an_answer(clips: Path) -> None:
    bank = WordBank(Corpus(clips))
    found: dict[str, set[str]] = {}
    for number in range(400):
        made = draw_splice(bank, Random(number), Changes()).exchange
        if len(made.question.split()) == 1:
            found.setdefault(made.question, set()).add(made.answer)
    assert found["stop"] == {""}
    others = [found[word] for word in ("cat", *DIGITS) if word in found]
    assert others
    assert all(answers == {UNKNOWN} for answers in others)


def test_mixture_has_changed_phrases_and_joined_words(
    clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = MixturePlan(rules=1, copies=2, splices=3)
    asked: list[int] = []

    def draw(index: int, _: object) -> Recorded:
        asked.append(index)
        return modelled(Exchange("stop", "stop", ""), Speaker("espeak", "x"))

    monkeypatch.setattr(mixture, "draw_recording", draw)
    count = plan.rules + plan.copies * len(QUESTIONS) + plan.splices
    made = [draw_utterance(index, clips, plan) for index in range(count)]
    assert asked == [0]
    copies = made[1 : 1 + 2 * len(QUESTIONS)]
    assert [one.exchange.question for one in copies] == [*QUESTIONS, *QUESTIONS]
    assert not np.array_equal(copies[0].samples, copies[len(QUESTIONS)].samples)
    assert {one.speaker for one in made[-3:]} == {"spliced"}


def test_questions_to_refuse_lack_the_words_that_judge() -> None:
    chance = Random(1)
    trained = {word for _ in range(400) for word in draw_near(chance).question.split()}
    judged = [draw_near(chance, held_out=True) for _ in range(400)]
    things = {one.question.split()[-1] for one in judged if "colour" in one.question}
    assert things
    assert not things & {*trained, *TRAINED_WORDS}
    assert {one.answer for one in judged} == {UNKNOWN}
    for one in judged:
        words = one.question.removeprefix("what is ").split()
        assert not (words[0] in DIGITS[1:] and words[1:2] == ["plus"] and words[2] in DIGITS[1:])


def test_echo_of_a_distant_talker_is_louder_and_decays_later() -> None:
    click = np.zeros(RATE, np.float32)
    click[0] = 1.0
    for seed in range(20):
        near = reverberate(click, np.random.default_rng(seed))
        far = reverberate(click, np.random.default_rng(seed), is_distant=True)
        assert np.square(near[1:]).sum() < 0.4
        assert np.square(far[1:]).sum() > 0.5
        assert np.square(far[RATE // 20 :]).sum() > 5 * np.square(near[RATE // 20 :]).sum()


def test_noises_are_of_rooms_that_training_may_use(clips: Path) -> None:
    assert not set(TRAINED_ROOMS) & set(HELD_OUT_ROOMS)
    assert set(ROOMS) == {*TRAINED_ROOMS, *HELD_OUT_ROOMS}
    made = record_noises([tones([(500.0, 1.0)])], Corpus(clips), seed=1, count=1)
    assert len(made) == 2
    assert [float(np.square(one).mean()) for one in made] == pytest.approx([1.0, 1.0], rel=1e-3)


def test_crowds_have_people_who_say_recorded_sentences(clips: Path) -> None:
    sentence = tones([(5500.0, 1.0)])
    corpus = Corpus(clips)
    at = np.fft.rfftfreq(16_000 * NOISE_SECONDS, 1 / RATE)
    is_high = at > 4600.0

    def share(sentences: list[FloatArray]) -> float:
        (made,) = record_noises([], corpus, seed=1, count=1, sentences=sentences)
        power = np.square(np.abs(np.fft.rfft(made)))
        return float(power[is_high].sum() / power.sum())

    assert share([sentence]) > 10 * share([])
