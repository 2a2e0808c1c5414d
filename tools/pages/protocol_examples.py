"""One example of every event, from sessions that run the dialects with a scripted worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast

import numpy as np
import orjson
import pybase64

from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.a import DialectA
from duplane.edge.dialects.b import DialectB
from duplane.edge.dialects.b_chat import DialectBChat
from duplane.edge.dialects.c import DialectC
from duplane.edge.dialects.d import DialectD
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.e import DialectE
from duplane.edge.dialects.e_conversation import Conversation
from duplane.edge.dialects.h import DialectH
from duplane.edge.dialects.l import DialectL
from duplane.edge.identity import Identity
from duplane.edge.modes import CHAT_MODE, HALF_DUPLEX_MODE, LIVE_MODE, MODES, REALTIME_MODE
from duplane.edge.session.chat_session import ChatSession
from duplane.edge.session.duplex_session import DuplexSession
from duplane.edge.session.half_duplex_session import HalfDuplexSession
from duplane.edge.settings import Limits
from duplane.edge.speech.speech_detector import Score, Windows
from duplane.fabric.durations import to_duration
from duplane.fabric.v1 import lease_pb2, session_pb2

Json = dict[str, Any]
Examples = Mapping[str, Json]  # event type -> event

_NOW = Moment(0.0, 1_714_200_000_000_000_000)
_LIMITS = Limits()
_IDENTITY = Identity("sess_0123456789ab", "rt_1714200000000")
_SOUND = bytes(64_000)
_AUDIO = pybase64.b64encode(_SOUND).decode()
_MAX_TEXT = 40
_SPEAK = frozenset({"speech.request", "session.commentary.append"})

_MESSAGE = {
    "id": "item_1",
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Hello!"}],
}

CLIENT: Mapping[str, Examples] = {
    "A": {
        "session.update": {"session": {"instructions": "Be brief."}},
        "input_audio_buffer.append": {"audio": _AUDIO},
        "speech.request": {"text": "Good morning.", "input_id": "greeting"},
        "session.close": {"reason": "user_stop"},
    },
    "B": {
        "session.init": {"payload": {"system_prompt": "Be brief."}},
        "input.append": {"input": {"audio": _AUDIO, "input_id": "unit_0"}},
        "speech.request": {"text": "Good morning.", "input_id": "greeting"},
        "session.close": {"reason": "user_stop"},
    },
    "B chat": {
        "session.init": {"payload": {}},
        "input.append": {"input": {"messages": [{"role": "user", "content": "Hello!"}]}},
        "session.close": {"reason": "user_stop"},
    },
    "C": {
        "prepare": {"system_prompt": "Be brief."},
        "audio_chunk": {"audio_base64": _AUDIO},
        "speech.request": {"text": "Good morning.", "input_id": "greeting"},
        "pause": {"timeout": 60},
        "resume": {},
        "interrupt": {},
        "client_diagnostic": {},
        "stop": {},
    },
    "D": {
        "request": {
            "messages": [{"role": "user", "content": "Hello!"}],
            "generation": {"max_new_tokens": 256},
            "tts": {"enabled": True},
        },
    },
    "E": {
        "session.update": {"session": {"type": "realtime", "instructions": "Be brief."}},
        "input_audio_buffer.append": {"audio": _AUDIO},
        "response.create": {"response": {"max_output_tokens": 100}},
        "conversation.item.create": {"item": _MESSAGE},
        "conversation.item.retrieve": {"item_id": "item_1"},
        "conversation.item.truncate": {
            "item_id": "item_1",
            "content_index": 0,
            "audio_end_ms": 1500,
        },
        "conversation.item.delete": {"item_id": "item_1"},
        "input_audio_buffer.commit": {},
        "input_audio_buffer.clear": {},
        "output_audio_buffer.clear": {},
        "response.cancel": {},
    },
    "H": {
        "prepare": {
            "system_content": [{"type": "text", "text": "Be brief."}],
            "config": {"vad": {"min_silence_duration_ms": 800}},
        },
        "audio_chunk": {"audio_base64": _AUDIO},
        "stop": {},
    },
    "L": {
        "session.start": {"session": {"model": "gpt-live-1", "instructions": "Be brief."}},
        "session.input_audio.append": {"audio": _AUDIO},
        "session.input_audio.mute": {"event_id": "mine_1"},
        "session.input_audio.unmute": {},
        "session.update": {"event_id": "mine_2"},
        "session.commentary.append": {"content": "Good morning.", "event_id": "mine_3"},
        "session.close": {},
    },
}


def client_event(dialect: str, kind: str) -> Json:
    """Return an event as a client sends it."""
    fields = CLIENT[dialect][kind]
    return fields if dialect == "D" else {"type": kind, **fields}


@cache
def server_events(dialect: str) -> Examples:
    """Return the first event of each type that a session of this dialect sends."""
    events: dict[str, Json] = {}
    run = {"B chat": _chat, "D": _chat, "H": _half_duplex}.get(dialect, _duplex)
    for rendered in run(dialect):
        event: Json = orjson.loads(rendered)
        # Prefer an event with audio as the example: it has more fields.
        if event["type"] not in events or event.get("kind") == "audio":
            events[event["type"]] = event
    return events


def shortened(value: Any) -> Any:
    """Return an example with long texts shortened."""
    match value:
        case dict():
            fields = cast(Json, value)
            return {key: shortened(item) for key, item in fields.items()}
        case list():
            return [shortened(item) for item in cast("list[Any]", value)]
        case str() if len(value) > _MAX_TEXT:
            return f"{value[:8]}…"
        case _:
            return value


def _queued(position: int) -> lease_pb2.Queued:
    return lease_pb2.Queued(
        ticket_id="q_0123456789ab",
        position=position,
        queue_length=2,
        estimated_wait=to_duration(20.0 * position),
    )


def _duplex(dialect: str) -> Iterable[bytes]:
    identity = _IDENTITY
    mode = MODES["audio"]
    speaks = {
        "A": lambda: DialectA(identity, _LIMITS, mode),
        "B": lambda: DialectB(identity, _LIMITS, mode, new_id=lambda: "0123456789ab"),
        "C": lambda: DialectC(identity, _LIMITS, mode),
        "E": lambda: DialectE(identity, _LIMITS, REALTIME_MODE),
        "L": lambda: DialectL(identity, _LIMITS, LIVE_MODE),
    }[dialect]
    session = DuplexSession(speaks(), _LIMITS, _NOW)
    events = session.connected(_NOW)

    def send(kind: str) -> None:
        message = orjson.dumps(client_event(dialect, kind))
        events.extend(session.receive(message, _NOW))
        while session.take(_NOW):
            pass

    def respond(**message: Any) -> None:
        response = session_pb2.ConverseResponse(**message)
        events.extend(session.responded(response, _NOW))

    settings, append, *others = CLIENT[dialect]
    events += [*session.queued(_queued(2), _NOW), *session.queued(_queued(1), _NOW)]
    events += session.granted(60.0, _NOW)
    events += session.receive(b'{"type":"unknown"}', _NOW)
    send(settings)
    if dialect == "E":
        send(append)
        _open(session, send)
    respond(opened=session_pb2.Opened(prompt_token_count=12, accepts_speech_requests=True))
    send(append)
    listened = session_pb2.Delta(sequence=0, context_token_count=30)
    listened.listen.SetInParent()
    respond(delta=listened)
    send(append)
    speech = session_pb2.Speech(text="Hello!", audio=_SOUND)
    respond(delta=session_pb2.Delta(sequence=1, speech=speech, context_token_count=44))
    events += session.dialect.moving(_LIMITS.failover_s, _NOW)
    for kind in others:
        send(kind)
        if kind in _SPEAK:
            send(append)
            spoken = session_pb2.SpeechResult(outcome=session_pb2.SPEECH_OUTCOME_SPOKEN)
            respond(delta=session_pb2.Delta(sequence=2, speech=speech, speech_results=[spoken]))
    timeout = Close(CloseReason.TIMEOUT, "session time limit")
    again = DuplexSession(speaks(), _LIMITS, _NOW)
    if dialect == "E":
        events += [*_text_of_e(), *_user_of_e()]
    return [*events, *again.end(timeout, _NOW)]


def _open(session: DuplexSession, send: Callable[[str], None]) -> None:
    """Let the conversation of E open, with some items in its prompt."""
    for kind in ("conversation.item.create", "conversation.item.delete"):
        send(kind)
    session.expire(Moment(DialectE.grace_s, _NOW.wall_ns))
    while session.take(_NOW):
        pass


def _user_of_e() -> list[bytes]:
    """Return the events of a turn of the user."""
    conversation = Conversation(_IDENTITY)
    item_id, started = conversation.speech_started(1500)
    return [started, *conversation.speech_stopped(item_id, 2600)]


def _text_of_e() -> list[bytes]:
    """Return the events of a session of E whose responses are text."""
    session = DuplexSession(DialectE(_IDENTITY, _LIMITS, REALTIME_MODE), _LIMITS, _NOW)
    session.granted(60.0, _NOW)
    settings = b'{"type":"session.update","session":{"output_modalities":["text"]}}'
    session.receive(settings, _NOW)
    session.receive(orjson.dumps(client_event("E", "input_audio_buffer.append")), _NOW)
    session.expire(Moment(DialectE.grace_s, _NOW.wall_ns))
    session.take(_NOW)
    session.responded(session_pb2.ConverseResponse(opened=session_pb2.Opened()), _NOW)
    session.take(_NOW)
    speech = session_pb2.Speech(text="Hello!")
    delta = session_pb2.Delta(speech=speech, end_of_turn=True)
    return session.responded(session_pb2.ConverseResponse(delta=delta), _NOW)


def _chat(dialect: str) -> Iterable[bytes]:
    first = (
        DialectD(_IDENTITY, _LIMITS, CHAT_MODE)
        if dialect == "D"
        else DialectBChat(_IDENTITY, _LIMITS, CHAT_MODE, new_id=lambda: "0123456789ab")
    )
    session = ChatSession(first, _LIMITS, _NOW)
    events: list[bytes] = []
    if dialect != "D":
        events += session.receive(b'{"type":"unknown"}', _NOW)
    for kind in CLIENT[dialect]:
        if kind == "session.close":
            continue
        events += session.receive(orjson.dumps(client_event(dialect, kind)), _NOW)
    events += [*session.queued(_queued(2), _NOW), *session.queued(_queued(1), _NOW)]
    events += session.granted(3.0, _NOW)
    session.next_turn(_NOW)
    delta = session_pb2.ChatDelta(text="Hello!", audio=_SOUND, context_token_count=20)
    counts = session_pb2.TokenCounts(input_text_token_count=9, output_text_token_count=3)
    for response in (
        session_pb2.ChatResponse(prefilled=session_pb2.Prefilled(prompt_token_count=9)),
        session_pb2.ChatResponse(delta=delta),
        session_pb2.ChatResponse(done=session_pb2.Done(token_counts=counts)),
    ):
        events += session.responded(response, _NOW)
    events += session.end(Close(CloseReason.CLIENT, client_reason="user_stop"), _NOW)
    if dialect == "D":
        refused = ChatSession(DialectD(_IDENTITY, _LIMITS, CHAT_MODE), _LIMITS, _NOW)
        events += refused.receive(b"{}", _NOW)
    return events


class _Loud:
    """Takes each window for speech in which a sample is not 0."""

    window_samples = 512
    lookback_samples = 0

    def score(self, windows: Windows) -> list[Score]:
        size = self.window_samples
        return [Score(float(np.any(window)), 0, size) for window in windows]

    def reset(self) -> None:
        """Nothing to forget."""


def _half_duplex(dialect: str) -> Iterable[bytes]:
    client = DialectH(replace(_IDENTITY, url_id="hd_1"), _LIMITS, HALF_DUPLEX_MODE)
    session = HalfDuplexSession(client, _LIMITS, _NOW, _Loud)
    prepare, chunk, stop = (orjson.dumps(client_event(dialect, kind)) for kind in CLIENT[dialect])
    spoken = pybase64.b64encode(np.ones(16_000, "<f4").tobytes()).decode()
    speech = orjson.dumps({"type": "audio_chunk", "audio_base64": spoken})
    events = [*session.queued(_queued(2), _NOW), *session.queued(_queued(1), _NOW)]
    events += session.granted(3.0, _NOW)
    events += session.receive(b'{"type":"unknown"}', _NOW)
    events += session.receive(prepare, _NOW)
    later = Moment(_NOW.monotonic_s + 1, _NOW.wall_ns + 1_000_000_000)
    events += session.receive(speech, later)
    events += session.receive(chunk, later)
    session.next_turn(later)
    for response in (
        session_pb2.ChatResponse(delta=session_pb2.ChatDelta(text="Hello!", audio=_SOUND)),
        session_pb2.ChatResponse(done=session_pb2.Done()),
    ):
        events += session.responded(response, later)
    events += session.receive(stop, later)
    again = HalfDuplexSession(client, _LIMITS, _NOW, _Loud)
    client.phase = Phase.ACTIVE
    return [*events, *again.end(Close(CloseReason.TIMEOUT), _NOW)]
