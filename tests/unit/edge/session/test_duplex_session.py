"""The duplex session without sockets: bounds on pending messages, and the audio to record."""

from __future__ import annotations

import orjson
import pytest
from support.protocols.transcripts import json_of, pcm

from duplane.edge.client_errors import ClientError
from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.identity import Identity
from duplane.edge.payload.fields import parse
from duplane.edge.routing import ENDPOINTS, AnySession, Route
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

NOW = Moment(36_077.123, 1_714_200_000_000_000_000)
LIMITS = Limits(pending_unit_count=4)
OPENED = session_pb2.ConverseResponse(opened=session_pb2.Opened())


@pytest.fixture
def prepared() -> DuplexSession:
    """Return an open session of dialect C."""
    endpoint = ENDPOINTS[Route.DUPLEX, "audio"]
    session = endpoint.new_session(Identity("sess_0", "rt_0"), LIMITS, NOW)
    assert isinstance(session, DuplexSession)
    session.granted(60.0, NOW)
    say(session, '{"type":"prepare"}')
    assert [request.WhichOneof("message") for request in taken(session)] == ["open"]
    session.responded(OPENED, NOW)
    return session


def after(seconds: float) -> Moment:
    """Return the time `seconds` after NOW."""
    return Moment(NOW.monotonic_s + seconds, NOW.wall_ns + int(seconds * 1e9))


def opening() -> DuplexSession:
    """Return a session of dialect C that is configured and waits for a slot."""
    endpoint = ENDPOINTS[Route.DUPLEX, "audio"]
    session = endpoint.new_session(Identity("sess_0", "rt_0"), LIMITS, NOW)
    assert isinstance(session, DuplexSession)
    say(session, '{"type":"prepare"}')
    return session


def say(session: AnySession, text: str) -> list[str]:
    """Send a message of the client and return the types of the answers."""
    told = session.receive(orjson.dumps(json_of(text)), NOW)
    return [orjson.loads(event)["type"] for event in told]


def taken(session: DuplexSession) -> list[session_pb2.ConverseRequest]:
    return [outgoing.request for outgoing in iter(lambda: session.take(NOW), None)]


CHUNK = '{"type":"audio_chunk","audio_base64":"@pcm:16000"}'
PAUSE, RESUME = '{"type":"pause"}', '{"type":"resume"}'


def test_pauses_that_no_worker_takes_are_not_kept_but_for_the_last(prepared: DuplexSession) -> None:
    for timeout_s in range(500):
        assert say(prepared, f'{{"type":"pause","timeout":{timeout_s}}}') == ["paused"]
    (request,) = taken(prepared)
    assert request.pause.timeout.seconds == 499


def test_pauses_between_units_are_no_more_than_the_units(prepared: DuplexSession) -> None:
    for _ in range(100):
        say(prepared, CHUNK)
        say(prepared, PAUSE)
        say(prepared, RESUME)
    kinds = [request.WhichOneof("message") for request in taken(prepared)]
    assert kinds == ["resume", *["unit", "resume"] * LIMITS.pending_unit_count]


def test_pause_comes_after_the_units_before_it(prepared: DuplexSession) -> None:
    for text in (CHUNK, CHUNK, PAUSE, RESUME, CHUNK, PAUSE):
        say(prepared, text)
    kinds = [request.WhichOneof("message") for request in taken(prepared)]
    assert kinds == ["unit", "unit", "resume", "unit", "pause"]


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0", b'{"a":0}'])
def test_message_of_too_many_values_is_refused_unparsed(value: bytes) -> None:
    message = b"[" + (value + b",") * 250_000 + b"0]"
    with pytest.raises(ClientError, match="message: must be at most 100000 values"):
        parse(b'{"type":"session.update","session":' + message + b" " * 512 * 1024 + b"}")


def test_long_message_of_few_values_is_parsed() -> None:
    text = "A, [b] {c} " * 30_000
    assert parse(orjson.dumps({"text": text})).get("text", str) == text


def test_chunks_that_wait_for_a_slot_are_owed_no_more_answers_than_the_bound() -> None:
    session, short = opening(), '{"type":"audio_chunk","audio_base64":"@pcm:1"}'
    for _ in range(1024):
        assert say(session, short) == []
    for _ in range(3):
        assert say(session, short) == ["error"]
    session.granted(60.0, NOW)
    taken(session)
    told = [orjson.loads(event)["type"] for event in session.responded(OPENED, NOW)]
    assert told == ["prepared", *["result"] * 1024]
    assert say(session, short) == ["result"]


def test_session_without_audio_ends_idle_s_after_its_last_audio(prepared: DuplexSession) -> None:
    heard_s = LIMITS.idle_s - 1
    prepared.receive(orjson.dumps(json_of(CHUNK)), after(heard_s))
    assert prepared.expire(after(LIMITS.idle_s)) == []
    assert prepared.time_limits.next_deadline == NOW.monotonic_s + heard_s + LIMITS.idle_s
    assert prepared.closed is None
    prepared.expire(after(heard_s + LIMITS.idle_s))
    assert prepared.closed
    assert prepared.closed.reason is CloseReason.TIMEOUT


# --- the user's side of a recording ---


def recorded(route: Route, mode: str) -> AnySession:
    return ENDPOINTS[route, mode].new_session(Identity("sess_0", "rt_0", "sess_0"), LIMITS, NOW)


def test_what_is_heard_of_a_chat_is_new_in_it() -> None:
    session = recorded(Route.CHAT, "chat")
    parts = [
        '{"role":"system","content":[{"type":"audio","data":"@pcm:9"}]}',
        '{"role":"user","content":[{"type":"audio","data":"@pcm:99"}]}',
        '{"role":"assistant","content":[{"type":"audio","data":"@pcm:999"}]}',
        '{"role":"user","content":[{"type":"audio","data":"@pcm:16000"},'
        '{"type":"text","text":"?"},{"type":"audio","data":"@wav:8000"}]}',
        '{"role":"user","content":[{"type":"audio","data":"@pcm:4000","sample_rate":32000}]}',
    ]
    assert not say(session, f'{{"messages":[{",".join(parts)}]}}')
    heard = session.take_recorded_audio()
    assert heard[: 24_000 * 4] == pcm(16_000) + pcm(8000)
    assert len(heard) == (16_000 + 8000 + 2000) * 4
    assert not session.take_recorded_audio()


@pytest.mark.parametrize("content", ['"Hi"', '[{"type":"image","data":"AAAA"}]', "3"])
def test_nothing_is_heard_of_a_chat_without_sound(content: str) -> None:
    session = recorded(Route.CHAT, "chat")
    say(session, f'{{"messages":[{{"role":"user","content":{content}}}]}}')
    assert not session.take_recorded_audio()


def test_nothing_is_heard_of_what_is_refused_or_not_recorded(prepared: DuplexSession) -> None:
    assert not say(prepared, CHUNK)
    assert not prepared.take_recorded_audio()
    session = recorded(Route.DUPLEX, "audio")
    assert say(session, CHUNK) == ["error"]
    assert not session.take_recorded_audio()
    session.granted(60.0, NOW)
    say(session, '{"type":"prepare"}')
    say(session, CHUNK)
    assert session.take_recorded_audio() == pcm(16_000)
    assert say(session, CHUNK.replace("16000", "0")) == ["error"]
    assert not session.take_recorded_audio()
