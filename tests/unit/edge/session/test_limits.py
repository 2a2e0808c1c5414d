"""For every bound of a session, the largest allowed value is accepted and the next one is refused.

Tests in `tests/fabric/edge` check the bounds of sockets, processes and rates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import orjson
import pybase64
import pytest
from support.protocols.transcripts import jpeg, pcm, wav

from duplane.edge.clock import Moment
from duplane.edge.close import CloseReason
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.identity import Identity
from duplane.edge.modes import CHAT_MODE, MODES
from duplane.edge.routing import AnySession
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

ELSEWHERE = {
    *(
        "message_bytes",
        "openai_message_bytes",
        "chat_message_bytes",
        "json_depth",
        "json_value_count",
    ),
    *("units_per_s", "read_share", "client_s", "close_s", "outbox_bytes"),
    *("connection_count", "client_connection_count", "session_count", "client_session_count"),
    "client_requests_per_s",
    *("drain_s", "hold_s", "resume_s", "go_away_s"),
    "openai_queue_s",  # of dialect L: `tests/unit/edge/dialects/test_l.py`
    # Bounds of journals and moves, tested in `test_journal.py` and `test_moving*.py`.
    *("journal_bytes", "journal_total_bytes", "journal_windows", "failover_s", "overdue_s"),
    "rebuild_count",
    # Bounds of uploads, tested in `tests/fabric/edge/http/test_voices.py`.
    *("ref_audio_bytes", "ref_audio_s", "ref_audio_count", "ref_audio_total_bytes"),
}
START = Moment(36_077.123, 1_714_200_000_000_000_000)


def after(seconds: float) -> Moment:
    return Moment(START.monotonic_s + seconds, START.wall_ns)


def base64(data: bytes) -> str:
    return pybase64.b64encode_as_string(data)


# --- sizes ---


def update(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": {"instructions": "x", **session}}


def append(sample_count: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "input_audio_buffer.append", "audio": base64(pcm(sample_count)), **more}


def ask(*parts: Any, message_count: int = 1, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": list(parts) or "x"}
    return {"messages": [message] * message_count, **more}


def text(size: int) -> dict[str, Any]:
    return {"type": "text", "text": "x" * size}


def audio(sample_count: int, rate: int = 16_000) -> dict[str, Any]:
    return {"type": "audio", "data": base64(pcm(sample_count)), "sample_rate": rate}


def file(sample_count: int, told_rate: int | None = None) -> dict[str, Any]:
    return {"type": "audio", "data": base64(wav(sample_count)), "sample_rate": told_rate}


def video(size: int) -> dict[str, Any]:
    return {"type": "video", "data": base64(b"x" * size)}


def sized_picture(size: int) -> str:
    return base64(jpeg(4, 4).ljust(size, b"\0"))


def picture(width: int) -> str:
    return base64(jpeg(width, 10))


@dataclass(frozen=True, slots=True)
class Size:
    """A bound, and a function that makes an event of a given size."""

    name: str
    bound: float
    event: Callable[[int], dict[str, Any]]
    at: int  # the largest size that is accepted
    dialect: type = DialectA
    answer: str = ""


SIZES = [
    Size("instructions_bytes", 10, lambda n: update(instructions="x" * n), 10),
    Size("instructions_bytes", 10, lambda n: update(instructions="é" * n), 5),
    Size("voice_s", 0.5, lambda n: update(ref_audio=base64(pcm(n))), 8000),
    Size("voice_s", 0.5, lambda n: update(tts_ref_audio=base64(pcm(n))), 8000),
    Size("append_s", 0.5, append, 8000),
    Size("frame_count", 2, lambda n: append(video_frames=[picture(4)] * n), 2),
    Size("picture_bytes", 500, lambda n: append(video_frames=[sized_picture(n)]), 500),
    Size("picture_pixels", 100, lambda n: append(video_frames=[picture(n)]), 10),
    Size("text_bytes", 4, lambda n: ask(input_id="x" * n), 4, DialectD),
    Size("chat_message_count", 3, lambda n: ask(message_count=n), 3, DialectD),
    Size("chat_part_count", 3, lambda n: ask(*[text(1)] * n), 3, DialectD),
    Size("chat_part_count", 6, lambda n: ask(text(1), text(1), message_count=n), 3, DialectD),
    Size("chat_text_bytes", 10, lambda n: ask(text(n)), 10, DialectD),
    Size("chat_text_bytes", 10, lambda n: ask(text(n), message_count=2), 5, DialectD),
    Size("chat_media_bytes", 64_000, lambda n: ask(audio(n), audio(n)), 8000, DialectD),
    Size("chat_media_bytes", 64_000, lambda n: ask(audio(8000), file(n)), 8000, DialectD),
    Size("chat_media_bytes", 60, lambda n: ask(video(20), video(n)), 40, DialectD),
    Size("chat_audio_s", 0.5, lambda n: ask(audio(n)), 8000, DialectD),
    Size("chat_audio_s", 0.5, lambda n: ask(file(n, 48_000)), 8000, DialectD),
    Size("chat_audio_s", 0.5, lambda n: ask(audio(n, 8000)), 4000, DialectD),
    Size("chat_video_bytes", 30, lambda n: ask(video(n)), 30, DialectD),
    Size(
        "chat_token_count",
        20,
        lambda n: ask(generation={"max_new_tokens": n}),
        20,
        DialectD,
    ),
    Size("pause_s", 60, lambda n: {"type": "pause", "timeout": n}, 60, DialectC),
]


def begun(limits: Limits, dialect: type, event: dict[str, Any]) -> AnySession:
    """Return a session in which the event is legal."""
    identity = Identity("sess_0", "rt_0")
    if issubclass(dialect, DialectD):
        return ChatSession(dialect(identity, limits, CHAT_MODE), limits, START)
    session = DuplexSession(dialect(identity, limits, MODES["video"]), limits, START)
    session.granted(0, START)
    if event["type"] == "session.update":
        return session
    first = {"type": "prepare"} if dialect is DialectC else update()
    session.receive(orjson.dumps(first), START)
    assert session.take(START)
    opened = session_pb2.Opened(prompt_token_count=7, context_token_limit=8192)
    session.responded(session_pb2.ConverseResponse(opened=opened), START)
    return session


@pytest.mark.parametrize("size", SIZES, ids=lambda size: size.name)
def test_what_is_as_large_as_may_be_passes_and_one_more_is_refused_by_name(size: Size) -> None:
    limits = replace(Limits(), **{size.name: size.bound})
    for n, is_refused in ((size.at, False), (size.at + 1, True)):
        event = size.event(n)
        session = begun(limits, size.dialect, event)
        told = b"".join(session.receive(orjson.dumps(event), START))
        assert (b'"error"' in told) is is_refused, (n, told)
        if is_refused and size.dialect is DialectD:
            assert session.closed
            assert session.closed.reason is CloseReason.REQUEST_REFUSED
        elif is_refused:
            assert b"invalid_payload" in told or size.dialect is DialectC
            assert session.closed is None


# --- counts ---


@pytest.mark.parametrize("is_early", [True, False])
def test_of_units_that_wait_the_newest_win(is_early: bool) -> None:
    name = "early_unit_count" if is_early else "pending_unit_count"
    limits = replace(Limits(), **{name: 3})
    session = DuplexSession(DialectB(Identity("s", "r"), limits, MODES["audio"]), limits, START)
    session.granted(0, START)
    opened = session_pb2.ConverseResponse(opened=session_pb2.Opened())
    session.receive(orjson.dumps({"type": "session.init", "payload": {}}), START)
    assert session.take(START)
    if not is_early:
        session.responded(opened, START)
    units = [np.full(16_000, number / 10, "<f4").tobytes() for number in range(5)]
    for unit in units:
        event = {"type": "input.append", "input": {"audio": base64(unit)}}
        session.receive(orjson.dumps(event), START)
    if is_early:
        session.responded(opened, START)
    waiting = iter(lambda: session.take(START), None)
    assert [outgoing.request.unit.audio for outgoing in waiting] == units[2:]


def test_a_turn_above_those_that_may_wait_is_refused_and_the_chat_goes_on() -> None:
    limits = replace(Limits(), pending_turn_count=2)
    session = ChatSession(DialectBChat(Identity("s", "r"), limits, CHAT_MODE), limits, START)
    session.receive(orjson.dumps({"type": "session.init", "payload": {}}), START)
    turn = orjson.dumps({"type": "input.append", "input": ask()})
    for _ in range(2):
        assert b"error" not in b"".join(session.receive(turn, START))
    assert b"not_ready" in b"".join(session.receive(turn, START))
    assert session.closed is None


def test_a_turn_is_tried_on_so_many_slots_and_then_given_up() -> None:
    limits = replace(Limits(), turn_attempt_count=3)
    session = ChatSession(DialectD(Identity("s", "r"), limits, CHAT_MODE), limits, START)
    session.receive(orjson.dumps(ask()), START)
    lost = FabricError(Reason.UNAVAILABLE, "gone")
    for _ in range(3):
        assert session.closed is None
        assert session.needs_slot
        session.granted(3.0, START)
        assert session.next_turn(START)
        session.failed(lost, START)
    assert session.closed
    assert session.closed.reason is CloseReason.FAILED


def test_an_answer_that_is_told_whole_is_as_long_as_may_be_and_the_chat_goes_on() -> None:
    limits = replace(Limits(), answer_bytes=10)
    session = ChatSession(DialectBChat(Identity("s", "r"), limits, CHAT_MODE), limits, START)
    turn = {"type": "input.append", "input": ask(streaming=False, input_id="i")}
    for pieces, is_refused in ((["12345", "67890"], False), (["12345", "678901"], True)):
        session.receive(orjson.dumps(turn), START)
        session.granted(3.0, START)
        assert session.next_turn(START)
        told = b""
        for piece in pieces:
            delta = session_pb2.ChatDelta(text=piece)
            told += b"".join(session.responded(session_pb2.ChatResponse(delta=delta), START))
        assert (b'"inference_error"' in told) is is_refused
        assert session.is_running is not is_refused
        session.responded(session_pb2.ChatResponse(done=session_pb2.Done()), START)
    assert session.closed is None


def test_the_context_that_a_worker_is_asked_for_is_the_bound() -> None:
    limits = replace(Limits(), context_token_count=99)
    session = DuplexSession(DialectA(Identity("s", "r"), limits, MODES["audio"]), limits, START)
    session.granted(0, START)
    session.receive(orjson.dumps(update()), START)
    outgoing = session.take(START)
    assert outgoing
    assert outgoing.request.open.context_token_limit == 99


# --- waits ---

Begin = Callable[[Limits], AnySession]


def new(limits: Limits) -> DuplexSession:
    return DuplexSession(DialectA(Identity("s", "r"), limits, MODES["audio"]), limits, START)


def queued(limits: Limits) -> DuplexSession:
    session = new(limits)
    session.queued(lease_pb2.Queued(ticket_id="t", position=1, queue_length=1), START)
    return session


def granted(limits: Limits) -> DuplexSession:
    session = new(limits)
    session.granted(0, START)
    return session


def opening(limits: Limits) -> DuplexSession:
    session = granted(limits)
    session.receive(orjson.dumps(update()), START)
    return session


def active(limits: Limits) -> DuplexSession:
    session = opening(limits)
    assert session.take(START)
    session.responded(session_pb2.ConverseResponse(opened=session_pb2.Opened()), START)
    return session


def turning(limits: Limits) -> ChatSession:
    session = ChatSession(DialectD(Identity("s", "r"), limits, CHAT_MODE), limits, START)
    session.receive(orjson.dumps(ask()), START)
    session.granted(3.0, START)
    assert session.next_turn(START)
    return session


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("scheduler_s", new, CloseReason.SERVICE_UNAVAILABLE),
        ("queue_s", queued, CloseReason.WORKER_BUSY),
        ("init_s", granted, CloseReason.TIMEOUT),
        ("open_s", opening, CloseReason.WORKER_CONNECT_FAILED),
        ("idle_s", active, CloseReason.TIMEOUT),
        ("session_s", active, CloseReason.TIMEOUT),
        ("turn_s", turning, CloseReason.FAILED),
    ],
)
def test_a_wait_ends_when_it_is_over_and_not_before(
    name: str, begin: Begin, end: CloseReason
) -> None:
    session = begin(replace(Limits(), **{name: 5.0}))
    assert session.time_limits.next_deadline == after(5.0).monotonic_s
    assert session.expire(after(4.999)) == []
    assert session.closed is None
    session.expire(after(5.0))
    assert session.closed
    assert session.closed.reason is end


def test_every_bound_is_tested_at_its_edge() -> None:
    tested = {size.name for size in SIZES}
    tested |= {"early_unit_count", "pending_unit_count", "pending_turn_count", "answer_bytes"}
    tested |= {"turn_attempt_count", "context_token_count"}
    tested |= {"scheduler_s", "queue_s", "init_s", "open_s", "idle_s", "session_s", "turn_s"}
    assert {bound.name for bound in fields(Limits)} == tested | ELSEWHERE
