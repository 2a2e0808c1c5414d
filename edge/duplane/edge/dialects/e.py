"""Dialect E, OpenAI's Realtime protocol: items and responses, on a conversation without turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import Append, Command, Dropped, Tag
from duplane.edge.dialects.dialect import (
    ALIVE,
    Phase,
    Replies,
    ServerEvents,
    Transitions,
)
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.edge.dialects.e_commands import (
    APPEND,
    CREATE_ITEM,
    DELETE,
    UPDATE,
    Cancel,
    CreateResponse,
    Update,
)
from duplane.edge.dialects.e_realtime import ANSWERS, COMMANDS, ITEM_ADDED, SPEECH, RealtimeDialect
from duplane.edge.dialects.e_response import (
    CLIENT_CANCELLED,
    COMPLETED,
    TURN_DETECTED,
)
from duplane.edge.dialects.e_settings import (
    FIXED_BY_OPENING,
    FIXED_BY_SOUND,
    MANUAL,
    SERVER_VAD,
    TurnDetection,
)
from duplane.edge.dialects.e_turns import TurnDetector, TurnEdge
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.v1 import session_pb2

TURN = (
    "input_audio_buffer.speech_started",
    "input_audio_buffer.speech_stopped",
    "input_audio_buffer.committed",
)
_PHASES = (Phase.START, Phase.OPENING, Phase.ACTIVE)
_SPEAKING = frozenset({Phase.ACTIVE})


class DialectE(RealtimeDialect, DuplexDialect):
    """One client that speaks E, from its first sound on. A response is one turn of the model."""

    lost_while_opening: ClassVar[CloseReason] = CloseReason.WORKER_CONNECT_FAILED
    # Clients send their settings and the items of an earlier session in several events.
    grace_s: ClassVar[float] = 0.25
    settling: ClassVar[frozenset[str]] = frozenset({UPDATE, CREATE_ITEM, DELETE})
    transitions: ClassVar[Transitions] = {
        (Phase.START, APPEND): Phase.OPENING,
        (Phase.OPENING, APPEND): Phase.OPENING,  # the audio waits until the conversation is ready
        (Phase.ACTIVE, APPEND): Phase.ACTIVE,
        **{(phase, command): phase for command in COMMANDS for phase in _PHASES},
    }
    replies: ClassVar[Replies] = {
        APPEND: (*TURN, "response.created", *SPEECH, "response.done"),
        **ANSWERS,
    }
    server_events: ClassVar[ServerEvents] = {
        "session.created": frozenset({Phase.START}),
        "session.updated": ALIVE,
        "input_audio_buffer.speech_started": ALIVE,
        "input_audio_buffer.speech_stopped": ALIVE,
        "input_audio_buffer.committed": ALIVE,
        "input_audio_buffer.cleared": ALIVE,
        "conversation.item.added": ALIVE,
        "conversation.item.done": ALIVE,
        "conversation.item.retrieved": ALIVE,
        "conversation.item.deleted": ALIVE,
        "conversation.item.truncated": ALIVE,
        "response.created": ALIVE,
        **dict.fromkeys((kind for kind in SPEECH if kind not in ITEM_ADDED), _SPEAKING),
        "response.done": ALIVE,
        "error": ALIVE,
    }

    _detector: TurnDetector | None = None  # only if the edge tells when the user speaks
    _detection = TurnDetection()  # of the detector
    _turn_id = ""  # of the item of the user's turn
    _heard_count = 0  # samples of the client so far
    _is_muted = False  # what the model says is dropped until its turn ends
    _fixed = FIXED_BY_SOUND  # the settings that the first append fixes

    # --- client events ---

    def appended(self, append: Append) -> list[bytes]:
        """Keep the bytes of a sample that is not complete, and render the turns of the user."""
        events = super().appended(append)
        if not append.audio:
            return events
        detection = self._conversation.settings.turn_detection
        if self._detector and detection != self._detection:
            events += self._cut_turn()
            self._detector = None
        if self._detector is None and detection.kind == SERVER_VAD:
            begin_ms = self._heard_count * 1000 // append.rate_hertz
            self._detection = detection
            self._detector = TurnDetector(detection, append.rate_hertz, begin_ms, self.new_scorer)
        self._heard_count += len(append.audio) // SAMPLE_BYTES
        return events + (self._follow(self._detector.hear(append.audio)) if self._detector else [])

    def _cut_turn(self) -> list[bytes]:
        """End the turn of the user, if one is open."""
        return self._follow(self._detector.cut()) if self._detector else []

    def _follow(self, edges: Sequence[TurnEdge]) -> list[bytes]:
        """Render the begin and the end of turns of the user, who ends a response by speaking."""
        conversation = self._conversation
        events: list[bytes] = []
        for edge in edges:
            if not edge.is_begin:
                events += conversation.speech_stopped(self._turn_id, edge.at_ms)
                continue
            self._turn_id, event = conversation.speech_started(edge.at_ms)
            events.append(event)
            if conversation.response and self._detection.is_interrupting:
                self._is_muted = self.must_listen = True
                events += conversation.end_response(TURN_DETECTED)
        return events

    def open_settings(self) -> session_pb2.Open:
        """Return the settings of the conversation, with the items so far in its prompt."""
        self._fixed = FIXED_BY_OPENING
        conversation = self._conversation
        return conversation.settings.to_open(tuple(conversation.items), self.limits)

    def setting_path(self, field: str) -> str:
        """Return the path of a settings field in the client's event."""
        return "session.instructions" if field == "system_prompt" else super().setting_path(field)

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Apply a command, and render its answer."""
        conversation = self._conversation
        match command:
            case CreateResponse():
                if conversation.response:
                    return [conversation.already_active(command.input_id)]
                return conversation.empty_response(command.request)
            case Cancel():
                return self._cancel(command)
            case _:
                return super().answer(command, now)

    def _update(self, command: Update, now: Moment) -> bytes:
        change = command.change
        if change.turn_detection == MANUAL:  # the model hears all sound, and decides about turns
            command = replace(command, change=replace(change, turn_detection=None))
        return super()._update(command, now)

    def _cancel(self, command: Cancel) -> list[bytes]:
        """End the open response now: drop its rest, and make the model listen."""
        conversation = self._conversation
        response = conversation.response
        if response is None or command.response_id not in (None, response.id):
            return [conversation.not_active(command.input_id)]
        self._is_muted = self.must_listen = True
        return conversation.end_response(CLIENT_CANCELLED)

    # --- server events ---

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped: Dropped, now: Moment
    ) -> list[bytes]:
        """Render a unit: the text and the sound of a response, and its end; nothing if none is."""
        del tag, dropped, now
        conversation = self._conversation
        conversation.usage.add(delta.token_counts)
        is_speech = delta.HasField("speech")
        audio = self._speech_audio(delta)
        if self._is_muted:
            self._is_muted = is_speech and not delta.end_of_turn
            return []
        events: list[bytes] = []
        text = delta.speech.text
        if is_speech and (text or audio):
            if conversation.response is None:
                events += [*self._cut_turn(), *conversation.begin_response()]
            if response := conversation.response:
                events += response.add(text, self.output_sound.encode(audio) if audio else b"")
        if delta.end_of_turn and not delta.interrupted_turn:
            events += conversation.end_response(COMPLETED)
        elif not is_speech:
            events += conversation.end_response(TURN_DETECTED)
        return events

    def ended(self, close: Close, now: Moment) -> list[bytes]:
        """Render the end of the session. It hears nothing more."""
        self._detector = None  # soxr reports its streams that a process has at its end
        return super().ended(close, now)

    def failed(
        self, failed: session_pb2.Failed, now: Moment, input_id: str | None = None
    ) -> list[bytes]:
        """Treat a unit that failed as one in which the model listened: an error ends clients.

        The model itself has not listened, so the rest of an ended response still follows. If the
        unit had to listen, the next one must.
        """
        del failed, now, input_id
        self.must_listen |= self._is_muted
        return self._conversation.end_response(TURN_DETECTED)
