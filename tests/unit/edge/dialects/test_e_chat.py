"""Dialect E with turns of chat: what the model reads, and events that a thread decodes."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import orjson
import pybase64

from duplane.edge.clock import Moment
from duplane.edge.dialects.e_chat import DialectEChat
from duplane.edge.identity import Identity
from duplane.edge.modes import REALTIME_CHAT_MODE
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

NOW = Moment(1000.0, 1_714_200_000_000_000_000)
SOUND = pybase64.b64encode_as_string(bytes(48_000))  # one second
SOUND_BYTES = 64_000  # of that second as the edge keeps it


def new_session(limits: Limits) -> ChatSession:
    identity = Identity("sess_0123456789ab", "rt_0", model="m")
    return ChatSession(DialectEChat(identity, limits, REALTIME_CHAT_MODE), limits, NOW)


def tell(session: ChatSession, event: Mapping[str, object]) -> list[dict[str, object]]:
    return [orjson.loads(answer) for answer in session.receive(orjson.dumps(event), NOW)]


def add(session: ChatSession, item_id: str, part: Mapping[str, str]) -> None:
    item = {"type": "message", "role": "user", "id": item_id, "content": [part]}
    answers = tell(session, {"type": "conversation.item.create", "item": item})
    assert answers[-1]["type"] == "conversation.item.done"


def next_turn(session: ChatSession) -> session_pb2.ChatRequest:
    assert session.granted(60.0, NOW) == []
    turn = session.next_turn(NOW)
    assert turn
    return turn


def test_an_item_that_replaces_one_without_its_sound_is_read() -> None:
    session = new_session(Limits(chat_media_bytes=SOUND_BYTES * 3 // 2))
    for item_id in ("a", "b"):
        add(session, item_id, {"type": "input_audio", "audio": SOUND})
    add(session, "a", {"type": "input_text", "text": "hello"})
    tell(session, {"type": "response.create"})
    _, sound, text = next_turn(session).messages
    assert len(sound.parts[0].audio) == SOUND_BYTES
    assert text.parts[0].text == "hello"


def test_a_request_is_not_kept_after_its_turn() -> None:
    session = new_session(Limits())
    add(session, "a", {"type": "input_audio", "audio": SOUND})
    tell(session, {"type": "response.create"})
    request = next_turn(session)
    counts = [sys.getrefcount(request)]
    done = session_pb2.Done(reason=session_pb2.FINISH_REASON_STOP)
    session.responded(session_pb2.ChatResponse(done=done), NOW)
    counts.append(sys.getrefcount(request))
    assert counts == [3, 2]  # two are of this function and of the call


def test_no_media_are_kept_once_the_sound_flows_to_a_duplex_model() -> None:
    session = new_session(Limits())
    add(session, "a", {"type": "input_audio", "audio": SOUND})
    detection: dict[str, object] = {"audio": {"input": {"turn_detection": None}}}
    tell(session, {"type": "session.update", "session": detection})
    append = {"type": "input_audio_buffer.append", "audio": SOUND}
    tell(session, append)
    dialect = session.dialect
    assert isinstance(dialect, DialectEChat)
    assert dialect.held_bytes == 2 * SOUND_BYTES
    detection["audio"] = {"input": {"turn_detection": {"type": "semantic_vad"}}}
    tell(session, {"type": "session.update", "session": detection})
    tell(session, append)
    assert session.successor
    assert dialect.held_bytes == 0


def test_a_second_response_is_refused_also_if_the_first_ends_while_a_thread_decodes_it() -> None:
    session = new_session(Limits())
    add(session, "a", {"type": "input_text", "text": "hello"})
    assert tell(session, {"type": "response.create"})[0]["type"] == "response.created"
    next_turn(session)
    decoded = session.decode(b'{"type":"response.create"}')
    done = session_pb2.Done(reason=session_pb2.FINISH_REASON_STOP)
    session.responded(session_pb2.ChatResponse(done=done), NOW)
    (answer,) = (orjson.loads(event) for event in session.receive(decoded, NOW))
    assert answer["error"]["code"] == "conversation_already_has_active_response"
