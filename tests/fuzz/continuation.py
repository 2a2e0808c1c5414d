"""Checks a session that is still open after a case: it must answer, and close on request."""

from __future__ import annotations

from typing import Any

import pybase64
from fuzz.cases import Line
from fuzz.event_rules import IllegalError
from fuzz.messages import Message
from fuzz.session_run import SessionRun

from duplane.edge.close import CloseReason
from duplane.edge.dialects.dialect import Phase
from duplane.edge.dialects.e import DialectE

_MESSAGES = [{"role": "user", "content": "Hi"}]
SETTINGS: dict[str, Any] = {
    "A": {"type": "session.update", "session": {"instructions": "Be brief."}},
    "B": {"type": "session.init", "payload": {}},
    "B chat": {"type": "session.init", "payload": {}},
    "C": {"type": "prepare"},
    "E": {"type": "session.update", "session": {"type": "realtime"}},
    "H": {"type": "prepare"},
    "L": {"type": "session.start", "session": {"model": "m"}},
}
UNIT: dict[str, Any] = {
    "A": {"type": "input_audio_buffer.append", "audio": "@pcm:16000"},
    "B": {"type": "input.append", "input": {"audio": "@pcm:16000"}},
    "B chat": {"type": "input.append", "input": {"messages": _MESSAGES}},
    "C": {"type": "audio_chunk", "audio_base64": "@pcm:16000"},
    "D": {"messages": _MESSAGES},
    "E": {"type": "input_audio_buffer.append", "audio": "@int16:24000"},
    "H": {"type": "audio_chunk", "audio_base64": "@questions:5000:8000"},
    "L": {"type": "session.input_audio.append", "audio": "@int16:24000"},
}
LEAVE: dict[str, Any] = {
    "A": {"type": "session.close"},
    "B": {"type": "session.close"},
    "B chat": {"type": "session.close"},
    "C": {"type": "stop"},
    "H": {"type": "stop"},
    "L": {"type": "session.close"},
}
_ANSWERS = {
    "A": ("response.listen",),
    "B": ("response.output.delta",),
    "C": ("result",),
    "E": ("response.done",),
    "L": ("session.usage.updated",),
    "B chat": ("response.done",),
    "D": ("done",),
    "H": ("turn_done",),
}
_UNIT_MESSAGE_BYTES = 100_000  # some transcripts set a lower limit
_LONG_INIT_S = 60.0  # some transcripts set a lower limit, which is over while E awaits settings
_DELTA = Line("worker", "delta", '{"listen":{}}')
_TURN = Line("worker", "delta", '{"speech":{"text":"x"},"end_of_turn":true}')


def check_continuation(run: SessionRun) -> None:
    """Send a unit or a turn, check that it is answered, then end the session."""
    if run.is_over or run.message_bytes < _UNIT_MESSAGE_BYTES:
        return
    if run.case.limits.init_s < _LONG_INIT_S:
        return
    if run.chat and run.dialect == "E":
        _continue_turns_of_e(run)
    if run.chat:
        _continue_chat(run)
    elif not run.is_lost:
        _continue_duplex(run)
    if run.is_over:
        if (
            run.dialect == "D"
            and run.session.closed
            and run.session.closed.reason is CloseReason.ANSWERED
        ):
            return
        raise IllegalError(f"is over where it should go on: {run.session.closed}")
    if run.dialect not in LEAVE:  # a client of E leaves by closing the connection
        return
    _take(run, LEAVE[run.dialect])
    if not run.session.closed or run.session.closed.reason is not CloseReason.CLIENT:
        raise IllegalError("cannot be left")


def _take(run: SessionRun, value: Any) -> None:
    """Send a message that the session must accept."""
    events = run.client(Message(value))
    if any(event["type"] == "error" for event in events):
        raise IllegalError(f"refused after all: {value['type']}: {events}")
    run.take_requests()


def _continue_turns_of_e(run: SessionRun) -> None:
    """Check that a turn of chat is answered, and let the sound of the client flow to the model."""
    _answer_turns(run)
    before = run.answers["response.done"]
    _take(run, {"type": "response.create", "response": {"instructions": "Greet."}})
    _answer_turns(run)
    if run.answers["response.done"] == before:
        raise IllegalError("a turn is not answered")
    detection = {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}
    _take(run, {"type": "session.update", "session": detection})
    _take(run, _second(run))


def _continue_duplex(run: SessionRun) -> None:
    session = run.session
    if session.dialect.phase is Phase.START:
        _take(run, SETTINGS[run.dialect])
    if not session.has_slot:
        run.grant()
    run.take_requests()
    if run.dialect == "E":
        _open_e(run)
    if session.dialect.phase is Phase.OPENING:
        run.step(Line("worker", "opened", '{"prompt_token_count":7}'))
    if session.dialect.phase is Phase.PAUSED:
        _take(run, {"type": "resume"})
    run.take_requests()
    before = run.answers.copy()
    _take(run, _second(run) if run.dialect in ("E", "L") else UNIT[run.dialect])
    while run.unanswered:
        run.step(_TURN if run.dialect == "E" else _DELTA)
        run.take_requests()
    if not any(run.answers[kind] > before[kind] for kind in _ANSWERS[run.dialect]):
        raise IllegalError("a unit is not answered")
    if run.dialect == "C" and run.answered_chunks != run.taken_chunks:
        raise IllegalError(f"{run.answered_chunks} answers to {run.taken_chunks} chunks")


def _open_e(run: SessionRun) -> None:
    """Let a session of E open its conversation, which it does after its first append."""
    if run.session.dialect.phase is Phase.START:
        _take(run, _second(run))
    run.wait(DialectE.grace_s)
    run.take_requests()


def _second(run: SessionRun) -> Any:
    """Return an append of a second in the format that the session has chosen."""
    sound = run.session.dialect.input_sound
    audio = pybase64.b64encode_as_string(sound.encode(bytes(4 * sound.rate_hertz)))
    return {**UNIT[run.dialect], "audio": audio}


def _continue_chat(run: SessionRun) -> None:
    if run.session.dialect.phase is Phase.START and run.dialect != "D":
        _take(run, SETTINGS[run.dialect])
    _answer_turns(run)
    if run.is_over:
        return
    if run.dialect == "H":
        _take(run, SETTINGS["H"])  # those of the case may take nothing for speech
        run.wait(0.5)  # before this time nothing is heard
    before = run.answers.copy()
    if run.dialect == "D":
        run.client(Message(UNIT["D"]))
    else:
        _take(run, UNIT[run.dialect])
    _answer_turns(run)
    if not any(run.answers[kind] > before[kind] for kind in _ANSWERS[run.dialect]):
        raise IllegalError("a turn is not answered")
    if run.dialect == "B chat" and run.answered_turns != run.taken_turns:
        raise IllegalError(f"{run.answered_turns} answers to {run.taken_turns} turns")


def _answer_turns(run: SessionRun) -> None:
    """Grant slots and answer turns until no turn is left."""
    chat = run.chat
    assert chat
    for _ in range(200):
        run.take_requests()
        if run.is_over:
            return
        if chat.is_running:
            for what in ("prefilled", "piece", "done"):
                run.step(Line("worker", what, '{"text":"x"}' if what == "piece" else "{}"))
        elif chat.needs_slot:
            run.grant()
        else:
            return
    raise IllegalError("a chat never comes to rest")
