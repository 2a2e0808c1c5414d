"""Dialect O without sockets: how a stream ends."""

from __future__ import annotations

import orjson
import pytest
from support.edge.live_edge import HandSetClock

from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.o import DialectO
from duplane.edge.identity import Identity
from duplane.edge.modes import CHAT_MODE
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
NOW = HandSetClock().now()


def running() -> ChatSession:
    """Return a session whose stream is being answered."""
    limits = Limits()
    dialect = DialectO(Identity("sess_0123456789ab", "rt_0"), limits, CHAT_MODE)
    session = ChatSession(dialect, limits, NOW)
    assert session.receive(orjson.dumps(ASK), NOW) == []
    session.granted(None, NOW)
    assert session.next_turn(NOW)
    return session


def says(session: ChatSession, text: str) -> list[bytes]:
    delta = session_pb2.ChatDelta(text=text)
    return session.responded(session_pb2.ChatResponse(delta=delta), NOW)


@pytest.mark.parametrize(
    ("reason", "kind", "code"),
    [
        (CloseReason.SHUTDOWN, "server_error", "server_shutdown"),
        (CloseReason.CREDENTIAL_ENDED, "invalid_request_error", "invalid_api_key"),
        (CloseReason.FAILED, "server_error", "server_error"),
    ],
)
def test_stream_that_is_cut_says_why(reason: CloseReason, kind: str, code: str) -> None:
    session = running()
    assert len(says(session, "Hello")) == 2
    (told,) = session.end(Close(reason, "why"), NOW)
    error = {"message": "why", "type": kind, "param": None, "code": code}
    assert orjson.loads(told) == {"error": error}


def test_before_its_first_chunk_the_status_says_why() -> None:
    assert running().end(Close(CloseReason.SHUTDOWN), NOW) == []


def test_delta_without_text_begins_the_stream_only() -> None:
    (chunk,) = says(running(), "")
    assert orjson.loads(chunk)["choices"][0]["delta"]["role"] == "assistant"
