"""Random sessions: the desired speech, its time, and the ids that train the LLM."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from support.training import fake_answers, fake_corpus

from training.domain import Exchange
from training.listener.noises import NoiseBank
from training.listener.sequences import (
    AUDIO,
    IGNORED,
    LISTEN_WEIGHT,
    START_WEIGHT,
    Batch,
    chat_sequence,
    session_sequence,
)
from training.listener.sessions import (
    HEARD_S,
    LAG_S,
    NOTICED_S,
    PAUSE_S,
    WORD_DELAY_S,
    Session,
    SessionBuilder,
    SessionRules,
)
from training.listener.training import USUAL
from training.vision.questions import QUESTIONS
from training.vocabulary import Vocabulary


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> SessionBuilder:
    corpus = fake_corpus(tmp_path_factory.mktemp("corpus"))
    return SessionBuilder(corpus, fake_answers(), NoiseBank(1, count=2), SessionRules())


@pytest.fixture(scope="module")
def sessions(builder: SessionBuilder) -> list[Session]:
    return [builder.draw((1, number)) for number in range(60)]


def test_seed_determines_the_session(builder: SessionBuilder) -> None:
    first, again, other = (builder.draw((1, number)) for number in (5, 5, 6))
    assert np.array_equal(first.samples, again.samples)
    assert first.decisions == again.decisions
    assert not np.array_equal(first.samples, other.samples)


def test_assistant_answers_after_a_pause(sessions: list[Session]) -> None:
    answered = [one for session in sessions for one in session.asked if one.first_unit >= 0]
    assert answered
    for one in answered:
        heard_until = one.first_unit + 1 - LAG_S
        assert heard_until >= one.end_s + PAUSE_S - 1e-6


def test_turn_has_one_start_and_one_end(sessions: list[Session]) -> None:
    for session in sessions:
        is_open = False
        for decision in session.decisions:
            assert decision.speaks or not is_open
            assert decision.is_start != is_open or not decision.speaks
            is_open = decision.speaks and not decision.ends_turn


def test_interrupted_turn_ends_without_words(sessions: list[Session]) -> None:
    cut = [
        (session, one)
        for session in sessions
        for one in session.asked
        if 0 <= one.interrupted_unit < len(session.decisions)
    ]
    assert cut
    for session, one in cut:
        decision = session.decisions[one.interrupted_unit]
        assert decision.speaks
        assert decision.ends_turn
        assert not decision.words


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> list[Session]:
    """Return sessions in which users often say two things at once, or ask for silence."""
    corpus = fake_corpus(tmp_path_factory.mktemp("busy"), count=300)
    rules = replace(USUAL, breath=0.5, interrupted=0.9, told_to_stop=0.5, noisy=0.0)
    builder = SessionBuilder(corpus, fake_answers(), NoiseBank(1, count=1), rules)
    return [builder.draw((2, number)) for number in range(80)]


def test_both_questions_of_one_breath_are_answered_after_the_second(busy: list[Session]) -> None:
    pairs = 0
    for session in busy:
        for first, second in pairwise(session.asked):
            heard_s = first.first_unit + 1 - LAG_S
            if not first.answer or second.start_s >= first.end_s + PAUSE_S:
                continue
            if heard_s <= second.start_s + HEARD_S:  # the answer begins before
                continue
            pairs += 1
            assert heard_s >= second.end_s + PAUSE_S - 1e-6
            if second.answer and second.first_unit < len(session.decisions):
                assert second.first_unit > first.first_unit
    assert pairs > 20


def test_answer_ends_early_only_after_an_interruption_that_is_heard(busy: list[Session]) -> None:
    cut = 0
    for session in busy:
        for number, one in enumerate(session.asked):
            if one.interrupted_unit < 0:
                continue
            cut += 1
            heard_s = one.interrupted_unit + 1 - LAG_S
            assert session.asked[number + 1].start_s + NOTICED_S <= heard_s + 1e-6
            assert session.asked[number + 1].start_s >= one.end_s
    assert cut > 20


def test_question_that_cuts_no_answer_begins_after_it(tmp_path: Path) -> None:
    rules = SessionRules(interrupted=1.0)
    answers = fake_answers()
    builder = SessionBuilder(fake_corpus(tmp_path), answers, NoiseBank(1, count=1), rules)
    following = [
        (first, second)
        for number in range(80)
        for first, second in pairwise(builder.draw((7, number)).asked)
        if first.answer
    ]
    whole = [pair for pair in following if pair[0].interrupted_unit < 0]
    assert 20 < len(whole) < len(following)
    for first, second in whole:
        assert second.start_s > first.first_unit + len(answers[first.answer].units)


def test_question_with_a_request_for_silence_in_its_breath_is_not_answered(
    tmp_path: Path,
) -> None:
    rules = SessionRules(breath=1.0, noisy=0.0, echoing=0.0)
    corpus = fake_corpus(tmp_path, count=300)
    builder = SessionBuilder(corpus, fake_answers(), NoiseBank(1, count=1), rules)
    pairs = [
        (first, second)
        for number in range(300)
        for first, second in pairwise(builder.draw((8, number)).asked)
        if not second.answer and second.start_s < first.end_s + PAUSE_S
    ]
    assert len(pairs) > 5
    for first, second in pairs:
        heard_s = first.first_unit + 1 - LAG_S
        assert first.first_unit < 0 or heard_s <= second.start_s + HEARD_S


def test_interruptions_often_ask_for_silence(busy: list[Session]) -> None:
    following = [
        second.answer
        for session in busy
        for first, second in pairwise(session.asked)
        if first.interrupted_unit >= 0
    ]
    assert len(following) > 20
    assert 0.3 < following.count("") / len(following) < 0.8


def test_muted_microphones_occur_only_without_questions(tmp_path: Path) -> None:
    corpus = fake_corpus(tmp_path)
    rules = replace(USUAL, muted=1.0, noise_only=0.5, noisy=1.0)
    other = SessionBuilder(corpus, fake_answers(), NoiseBank(1, count=1), rules)
    drawn = [other.draw((3, number)) for number in range(20)]
    silent = [not session.samples.all() for session in drawn]
    alone = [not session.asked for session in drawn]
    assert silent == alone
    assert any(alone)
    assert not all(alone)


def test_noise_behind_questions_may_begin_late_and_end_early(tmp_path: Path) -> None:
    rules = replace(USUAL, noise_only=0.0, noisy=1.0, echoing=0.0)
    quiet: list[int] = []
    for broken in (0.0, 1.0):
        builder = SessionBuilder(
            fake_corpus(tmp_path / str(broken)),
            fake_answers(),
            NoiseBank(1, count=1),
            replace(rules, broken=broken),
        )
        drawn = [builder.draw((3, number)) for number in range(30)]
        assert all(session.asked for session in drawn)
        loudness = [np.abs(one.samples.reshape(-1, 1600)).max(1) for one in drawn]
        quiet.append(sum(one.min() < 0.1 * np.median(one) for one in loudness))
    assert quiet[0] == 0
    assert 15 < quiet[1] < 30


def test_after_some_answers_nobody_asks_for_a_long_time(tmp_path: Path) -> None:
    longest: list[float] = []
    for rested in (0.0, 0.5):
        builder = SessionBuilder(
            fake_corpus(tmp_path / str(rested)),
            fake_answers(),
            NoiseBank(1, count=1),
            SessionRules(longest_pause_s=1.0, interrupted=0.0, rested=rested),
        )
        pauses = [
            second.start_s - (first.first_unit + 1)
            for number in range(40)
            for first, second in pairwise(builder.draw((6, number)).asked)
            if len(first.answer.split()) == 1
        ]
        assert pauses
        longest.append(max(pauses))
    assert longest[0] < 2.0
    assert longest[1] > 4.0


def test_a_share_of_the_questions_is_about_pictures(tmp_path: Path) -> None:
    corpus = fake_corpus(tmp_path)
    shares: list[float] = []
    for share in (0.0, 1.0):
        rules = SessionRules(about_pictures=share)
        other = SessionBuilder(corpus, fake_answers(), NoiseBank(1, count=1), rules)
        asked = [one for n in range(20) for one in other.draw((4, n)).asked]
        seen = [one for one in asked if one.utterance.exchange.kind in QUESTIONS]
        shares.append(len(seen) / len(asked))
    assert 0 < shares[0] < 0.6
    assert shares[1] == 1.0


def test_recorded_noises_are_used_too() -> None:
    recorded = [np.full(50, 3.0, np.float32)]
    bank = NoiseBank(1, 1, recorded)
    chance = np.random.default_rng(4)
    drawn = [bank.draw(80, chance, is_alone=True) for _ in range(40)]
    assert 10 < sum(bool((one == 3.0).all()) for one in drawn) < 40


def test_sound_is_labelled_where_it_is(sessions: list[Session]) -> None:
    labelled = [session for session in sessions if session.asked]
    assert labelled
    for session in labelled:
        assert len(session.phonemes) == 50 * len(session.decisions)
        assert len(session.words) == 10 * len(session.decisions)
        assert session.words.any()
        starts = [mark for one in session.asked for mark in one.start_s + one.utterance.words[:, 0]]
        end_s = len(session.decisions) - LAG_S - WORD_DELAY_S
        assert session.begins.sum() == sum(start <= end_s for start in starts)
        changed = np.flatnonzero(np.diff(session.words)) + 1
        named = changed[session.words[changed] != 0]
        assert session.begins[named].all()
    assert any(not session.asked for session in sessions)


def test_sequence_has_each_unit_as_the_worker_feeds_it(
    sessions: list[Session], vocabulary: Vocabulary
) -> None:
    session = next(one for one in sessions if any(d.words for d in one.decisions))
    row = session_sequence(session, vocabulary, Random(0), voice_rows=2)
    assert row.ids.count(vocabulary.unit) == len(session.decisions) - row.first_unit
    assert row.ids.count(AUDIO) == 10 * row.ids.count(vocabulary.unit)
    chosen = [
        (token, target)
        for token, target in zip(row.ids[1:], row.targets, strict=False)
        if target != IGNORED
    ]
    assert all(token == target for token, target in chosen)
    pairs = list(zip(row.targets, row.weights, strict=True))
    decisions = session.decisions[row.first_unit :]
    listens = [weight for target, weight in pairs if target == vocabulary.listen]
    speaks = [weight for target, weight in pairs if target == vocabulary.speak]
    assert listens == [LISTEN_WEIGHT] * len(listens)
    assert speaks == [START_WEIGHT if one.is_start else 1.0 for one in decisions if one.speaks]
    assert vocabulary.unit_end not in {target for _, target in chosen}


def test_chat_ends_with_the_end_of_speech(vocabulary: Vocabulary) -> None:
    row = chat_sequence([Exchange("name", "who", "my name is duplane")], vocabulary, Random(0))
    chosen = [target for target in row.targets if target != IGNORED]
    assert vocabulary.tokenizer.decode(chosen) == "my name is duplane"
    assert chosen[-1] == vocabulary.tts_eos


def test_batch_pads_without_targets(vocabulary: Vocabulary) -> None:
    chance = Random(0)
    rows = [
        chat_sequence([Exchange("name", "who", answer)], vocabulary, chance)
        for answer in ("goodbye", "my name is duplane")
    ]
    batch = Batch.of(rows)
    assert batch.ids.shape == (2, max(len(row.ids) for row in rows))
    assert int((batch.targets != IGNORED).sum()) == 2 + 5
