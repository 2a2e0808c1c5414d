"""Requests to speak of conversations that move: each text is spoken once, without gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.edge.moved_play import Play

from duplane.edge.dialects.actions import Speak
from duplane.edge.session.speech_requests import SpeechRequests
from duplane.fabric.bounds import MAX_SPEECH_REQUESTS
from duplane.fabric.v1 import session_pb2

ASK = '{"type":"speech.request","text":"one two three","input_id":"x"}'


@pytest.fixture
def play() -> Play:
    """Return a client of dialect C whose conversation is open."""
    new = Play()
    new.begin()
    return new


def texts(play: Play) -> list[str]:
    return [event["text"] for event in play.events if event.get("text")]


def done(play: Play) -> list[str]:
    return [event["status"] for event in play.events if event["type"] == "speech.done"]


@pytest.mark.parametrize("spoken", [0, 1, 2])
def test_the_next_worker_speaks_the_rest(play: Play, spoken: int) -> None:
    play.say(ASK)
    for _ in range(spoken):
        play.chunk()
        play.settle()
    play.chunk()
    play.pump()  # this unit has no answer when the worker is lost
    play.lose()
    play.claim()
    play.settle()
    for _ in range(3):
        play.chunk()
        play.settle()
    assert texts(play) == ["one", "two", "three"]
    assert done(play) == ["spoken"]


def test_a_worker_that_cannot_speak_the_rest_is_left(play: Play) -> None:
    play.say(ASK)
    play.chunk()
    play.settle()
    play.lose()
    play.claim(is_former=True)
    play.pump()
    assert play.is_moving
    play.claim()
    play.settle()
    for _ in range(2):
        play.chunk()
        play.settle()
    assert texts(play) == ["one", "two", "three"]


def test_a_session_whose_texts_are_spoken_moves_to_a_former_worker(play: Play) -> None:
    play.say(ASK)
    for _ in range(3):
        play.chunk()
        play.settle()
    play.lose()
    play.claim(is_former=True)
    play.settle()
    assert not play.is_moving
    play.say(ASK)
    assert play.events[-1]["type"] == "error"
    assert "the model cannot speak given texts" in play.events[-1]["error"]
    play.chunk()
    play.settle()
    assert play.events[-1]["is_listen"]


def test_a_text_whose_unit_is_given_up_is_refused(play: Play) -> None:
    play.say(ASK)
    play.chunk()
    for _ in range(2):
        play.pump()
        play.lose()
        play.claim()
    play.settle()
    assert done(play) == ["refused"]


def test_requests_are_bounded_and_one_that_ends_makes_room(play: Play) -> None:
    for _ in range(MAX_SPEECH_REQUESTS + 1):
        play.say('{"type":"speech.request","text":"one"}')
    assert play.kinds() == ["error"]
    assert play.events[0]["error"] == f"type: {MAX_SPEECH_REQUESTS} texts wait to be spoken already"
    play.chunk()
    play.settle()
    play.say('{"type":"speech.request","text":"two"}')
    assert play.kinds()[1:] == ["result", "speech.done"]


def do(play: Play, step: str, asked: int) -> int:
    """Do a step; return how many texts the client has requested then."""
    match step:
        case "ask" if not play.moves.queue.speech.is_full:
            play.say(f'{{"type":"speech.request","text":"a{asked} b{asked}"}}')
            return asked + 1
        case "chunk":
            play.chunk()
        case "read":
            play.pump(1)
        case "answer":
            play.answer()
        case "lose" if play.can_move:
            play.lose()
            play.claim()
            play.settle()
        case "interrupt":
            play.say('{"type":"interrupt"}')
        case _:
            pass
    return asked


STEPS = st.sampled_from(["ask", "chunk", "read", "answer", "lose", "interrupt"])


@given(st.lists(STEPS, max_size=40))
def test_any_course_speaks_each_text_once_and_in_order(course: list[str]) -> None:
    play = Play()
    play.begin()
    asked = 0
    for step in course:
        asked = do(play, step, asked)
    play.settle()
    for _ in range(2 * MAX_SPEECH_REQUESTS + 1):
        play.chunk()
        play.settle()
    said, endings = texts(play), done(play)
    assert len(endings) == asked
    if "interrupt" in course:
        assert said == sorted(set(said), key=lambda word: (int(word[1:]), word[0]))
    else:
        assert said == [f"{part}{number}" for number in range(asked) for part in "ab"]
        assert endings == ["spoken"] * asked


def test_an_outcome_of_a_later_unit_shows_that_a_request_was_passed_on() -> None:
    requests = SpeechRequests()
    speak = Speak("one", input_id="mine")
    requests.add(speak)
    requests.attach(session_pb2.Unit(sequence=4))
    assert requests.answered(session_pb2.Delta(sequence=3)) == ([], [])
    assert requests.answered(session_pb2.Delta(sequence=5)).added == [speak]
    assert requests.answered(session_pb2.Delta(sequence=6)) == ([], [])
    assert len(requests.unfinished) == 1


def test_a_refused_request_was_not_added() -> None:
    requests = SpeechRequests()
    requests.add(Speak("one"))
    requests.attach(session_pb2.Unit(sequence=0))
    refused = session_pb2.SpeechResult(outcome=session_pb2.SPEECH_OUTCOME_REFUSED)
    news = requests.answered(session_pb2.Delta(speech_results=[refused]))
    assert not news.added
    assert [end.result for end in news.ended] == [refused]
    assert not requests.unfinished


def test_a_failed_unit_ends_the_requests_that_it_reports_and_its_own() -> None:
    requests = SpeechRequests()
    for sequence in range(3):
        requests.add(Speak(str(sequence)))
        requests.attach(session_pb2.Unit(sequence=sequence))
    refused = session_pb2.SpeechResult(number=0, outcome=session_pb2.SPEECH_OUTCOME_REFUSED)
    failed = session_pb2.Failed(sequence=1, reason="X", message="x", speech_results=[refused])
    news = requests.answered(failed)
    assert not news.added
    assert [end.speak.text for end in news.ended] == ["0", "1"]
    assert [end.result.reason for end in news.ended] == ["", "X"]
    assert list(requests.unfinished) == [2]
    assert not requests.answered(failed).ended
