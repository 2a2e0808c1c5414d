"""Sessions follow the tables of their dialect, for any steps of clients, workers and clocks."""

from __future__ import annotations

from typing import Any

import orjson
import pybase64
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.edge.edge_tables import is_legal, may_answer, may_say, reachable
from support.protocols.transcripts import pcm, spoken

from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.d import REQUEST
from duplane.edge.identity import Identity
from duplane.edge.routing import ENDPOINTS, parse_target
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import lease_pb2, session_pb2

AUDIO = pybase64.b64encode(pcm(16_000)).decode()
TURN: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
REALTIME: list[dict[str, Any]] = [
    {"type": "session.update", "session": {"instructions": "x"}},
    {"type": "input_audio_buffer.append", "audio": AUDIO},
    {"type": "session.init", "payload": {}},
    {"type": "input.append", "input": {"audio": AUDIO, **TURN}},
    {"type": "session.close"},
]
DUPLEX: list[dict[str, Any]] = [
    {"type": "audio_chunk", "audio_base64": AUDIO},
    *({"type": kind} for kind in ("prepare", "pause", "resume", "interrupt", "stop")),
    {"type": "client_diagnostic"},
]
LIVE: list[dict[str, Any]] = [
    {"type": "session.start", "session": {"model": "m"}},
    {"type": "session.input_audio.append", "audio": AUDIO},
    *({"type": f"session.input_audio.{kind}"} for kind in ("mute", "unmute")),
    *({"type": f"session.{kind}"} for kind in ("update", "close", "commentary.append")),
]
ITEM = {"id": "i", "type": "message", "role": "user", "content": []}
OPENAI_REALTIME: list[dict[str, Any]] = [
    {"type": "input_audio_buffer.append", "audio": AUDIO},
    {"type": "session.update", "session": {"instructions": "x"}},
    {"type": "conversation.item.create", "item": ITEM},
    *({"type": f"conversation.item.{kind}", "item_id": "i"} for kind in ("retrieve", "delete")),
    {
        "type": "conversation.item.truncate",
        "item_id": "i",
        "content_index": 0,
        "audio_end_ms": 1,
    },
    *({"type": f"response.{kind}"} for kind in ("create", "cancel")),
    *({"type": f"input_audio_buffer.{kind}"} for kind in ("commit", "clear")),
    {"type": "output_audio_buffer.clear"},
]
SPOKEN = pybase64.b64encode(spoken("5200", "7600")).decode()
HALF_DUPLEX: list[dict[str, Any]] = [
    {"type": "audio_chunk", "audio_base64": SPOKEN},
    *({"type": kind} for kind in ("prepare", "stop")),
]
CLIENTS = {
    "/v1/realtime?mode=audio": REALTIME,
    "/v1/realtime?mode=chat": REALTIME,
    "/ws/duplex/adx_1": DUPLEX,
    "/ws/chat": [TURN],
    "/ws/half_duplex/hd_1": HALF_DUPLEX,
    "/v1/live/sessions": LIVE,
    "/openai/v1/realtime": OPENAI_REALTIME,
}
WORKERS: list[session_pb2.ConverseResponse | session_pb2.ChatResponse] = [
    session_pb2.ConverseResponse(opened=session_pb2.Opened()),
    session_pb2.ConverseResponse(delta=session_pb2.Delta(listen=session_pb2.Listen())),
    session_pb2.ConverseResponse(delta=session_pb2.Delta(speech=session_pb2.Speech(text="x"))),
    session_pb2.ConverseResponse(failed=session_pb2.Failed(reason="ENGINE_FAILED")),
    *(
        session_pb2.ConverseResponse(closed=session_pb2.Closed(reason=reason))
        for reason in (
            session_pb2.CLOSE_REASON_CONTEXT_FULL,
            session_pb2.CLOSE_REASON_PAUSE_TIMEOUT,
            session_pb2.CLOSE_REASON_ENGINE_FAILED,
        )
    ),
    session_pb2.ChatResponse(prefilled=session_pb2.Prefilled()),
    session_pb2.ChatResponse(delta=session_pb2.ChatDelta(text="x")),
    session_pb2.ChatResponse(done=session_pb2.Done()),
]
# Steps of workers, the scheduler, the edge and the clock. A worker that has a session may send any
# message at any time.
OTHERS = st.one_of(
    st.sampled_from(WORKERS),
    st.just(lease_pb2.Queued(ticket_id="t", position=1)),
    st.sampled_from(list(Reason)),
    st.sampled_from([CloseReason.SHUTDOWN, CloseReason.GONE, CloseReason.UNREADABLE]),
    st.sampled_from([0.5, 5.0, 100.0]),
    st.none(),  # the grant of a slot
)


class Watched:
    """Runs one session; `move` checks each step against the tables of the dialect."""

    def __init__(self, path: str) -> None:
        self.now = Moment(36_077.123, 0)
        entry = parse_target(path, {})
        endpoint = ENDPOINTS[entry.route, entry.mode]
        self.session = endpoint.new_session(Identity("sess_0", "rt_0"), Limits(), self.now)

    def move(self, step: object) -> None:
        before = self.session.dialect.phase
        told = [orjson.loads(event)["type"] for event in self._take(step)]
        dialect, after = type(self.session.dialect), self.session.dialect.phase
        kind: str | None = None
        if isinstance(step, dict):
            kind = REQUEST if dialect.name == "D" else step["type"]
        assert after in reachable(dialect, before, kind)
        for event in told:
            assert may_say(dialect, before, kind, event), event
            assert kind is None or may_answer(dialect, kind, event), event
        if kind is not None and not is_legal(dialect, before, kind):
            assert after is before
            assert told == ["error"] or self.session.closed

    def _take(self, step: object) -> list[bytes]:
        told: list[bytes] = []
        match step:
            case dict():
                told = self.session.receive(orjson.dumps(step), self.now)
            case Reason():
                told = self.session.failed(FabricError(step, "x"), self.now)
            case CloseReason():
                told = self.session.end(Close(step), self.now)
            case float():
                self.now = Moment(self.now.monotonic_s + step, 0)
                told = self.session.expire(self.now)
            case session_pb2.ConverseResponse() if isinstance(self.session, DuplexSession):
                told = self.session.responded(step, self.now) if self.session.has_slot else []
            case session_pb2.ChatResponse() if isinstance(self.session, ChatSession):
                told = self.session.responded(step, self.now)
            case lease_pb2.Queued() if self.needs_slot:
                told = self.session.queued(step, self.now)
            case None if self.needs_slot:
                told = self.session.granted(60.0, self.now)
            case _:
                pass
        self._pass_on()
        return told

    def _pass_on(self) -> None:
        """Take the session's requests to the worker out of the queue, as the runner does."""
        if isinstance(self.session, ChatSession):
            self.session.next_turn(self.now)
            return
        while self.session.take(self.now):
            pass

    @property
    def needs_slot(self) -> bool:
        if isinstance(self.session, ChatSession):
            return self.session.needs_slot
        return not self.session.has_slot


@pytest.mark.parametrize("path", CLIENTS)
@settings(max_examples=200)
@given(data=st.data())
def test_no_session_ever_leaves_the_tables_of_its_dialect(path: str, data: st.DataObject) -> None:
    unknown = {"type": "unheard.of"}
    clients = st.sampled_from([*CLIENTS[path], unknown] if path != "/ws/chat" else CLIENTS[path])
    watched = Watched(path)
    for step in data.draw(st.lists(clients | OTHERS, max_size=20)):
        watched.move(step)
