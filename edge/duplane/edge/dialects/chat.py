"""Base class of the chat dialects: decodes turns, renders the answer to one turn at a time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.dialects.actions import Action, Append, CancelTurn, Command, Turn
from duplane.edge.dialects.dialect import Dialect, Phase
from duplane.edge.dialects.duplex import DuplexDialect
from duplane.fabric.v1 import session_pb2


class ChatDialect(Dialect):
    """A dialect for chat. Keeps the text of one answer, and its audio if it is not streamed."""

    # True if a connection has exactly one turn, which the client sends before it gets a slot.
    is_one_shot: ClassVar[bool] = False
    # True if the session acquires a slot before any turn; false if only turns need slots.
    begins_with_slot: ClassVar[bool] = True
    # True if the client sends sound in appends; false if turns hold the client's sound.
    takes_sound: ClassVar[bool] = False
    request_path: ClassVar[str] = ""  # path of the turn within the client's event
    # Kind of media -> the path of its bytes within a part of a message in the client's event.
    media_fields: ClassVar[Mapping[str, str]] = dict.fromkeys(("image", "audio", "video"), "data")

    _turn = Turn(session_pb2.ChatRequest())
    _prompt_token_count = 0
    _held_bytes = 0  # size of the kept text and audio

    @property
    def idle_s(self) -> float:
        """How long the client may say nothing while no turn waits or runs."""
        return self.limits.idle_s

    @property
    def takes_turns(self) -> bool:
        """Whether a turn may begin now."""
        return self.phase is Phase.ACTIVE

    @property
    def is_too_long(self) -> bool:
        """Whether an answer that is not streamed exceeds `Limits.answer_bytes`."""
        return self._held_bytes > self.limits.answer_bytes

    def appended(self, append: Append) -> list[bytes]:
        """Keep the sound of an append for a later turn. Render its effect."""
        raise AssertionError(f"{self.name} has no appends of {len(append.audio)} bytes")

    def continuation(self, append: Append) -> tuple[DuplexDialect, tuple[Action, ...]] | None:
        """Return the dialect of the duplex session that replaces the chat, and its first actions.

        The actions have all sound that the model has not heard, and the sound of `append`. Returns
        None if the append belongs to the chat.
        """
        del append
        return None

    def answer(self, command: Command, now: Moment) -> list[bytes]:
        """Render the answer to an event that was accepted."""
        raise AssertionError(f"{self.name} has no command {command.kind} at {now}")

    def taken(self, turn: Turn, now: Moment) -> list[bytes]:
        """Render the note that a turn will be answered, if the dialect has such a note."""
        del turn, now
        return []

    def cancelled(self, cancel: CancelTurn, now: Moment) -> list[bytes]:
        """Render the end of a turn that the client has cancelled."""
        raise AssertionError(f"{self.name} has no event {cancel.kind} at {now}")

    def begin(self, turn: Turn, now: Moment) -> None:
        """Begin to answer a turn, or begin again on another slot."""
        del now
        # The session has the request as long as the turn runs. It may have many megabytes.
        self._turn = replace(turn, request=session_pb2.ChatRequest())
        self._prompt_token_count = 0
        self._context_token_count = 0
        self._ignored_by_worker: list[str] = []
        self._text: list[str] = []
        self._audio: list[bytes] = []
        self._held_bytes = 0

    def prefilled(self, prefilled: session_pb2.Prefilled, now: Moment) -> list[bytes]:
        """Render the event which reports that the prompt is in the model's context."""
        del now
        self._prompt_token_count = prefilled.prompt_token_count
        self._ignored_by_worker = list(prefilled.ignored_fields)
        return []

    def delta(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        """Render one delta of the answer; keep its audio if the answer is not streamed.

        If the audio is resampled, this changes `delta`.
        """
        if self._resampler:
            delta.audio = self._resampler.add(delta.audio)
        return self._add(delta, now)

    def rest(self, now: Moment) -> list[bytes]:
        """Render the last milliseconds of the speech, before `done`, if the audio is resampled."""
        audio = self._resampler.end() if self._resampler else b""
        return self._add(session_pb2.ChatDelta(audio=audio), now) if audio else []

    def _add(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        self._text.append(delta.text)
        self._context_token_count = max(self._context_token_count, delta.context_token_count)
        if self._turn.is_streaming:
            return self._delta_events(delta, now)
        self._audio.append(delta.audio)
        self._held_bytes += len(delta.text.encode()) + len(delta.audio)
        return []

    def _delta_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        """Render one delta of a streamed answer; nothing in a dialect that never streams."""
        del delta, now
        return []

    @abstractmethod
    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the end of the answer."""

    def _final_token_count(self, done: session_pb2.Done) -> int:
        """Return the number of tokens in the context at the end of the answer.

        This number is never below the number in the last delta.
        """
        answer_count = done.token_counts.output_text_token_count
        return max(self._context_token_count, self._prompt_token_count + answer_count)

    def _without_effect(self) -> list[str]:
        """Return the client's paths of all fields of the turn that have no effect, each once."""
        paths = (self._turn.paths.get(field, field) for field in self._ignored_by_worker)
        return list(dict.fromkeys([*self._turn.ignored, *paths]))

    def refused(self, code: ErrorCode, message: str, now: Moment) -> list[bytes]:
        """Render the error for a turn that could not be answered."""
        return [self.error(code, message, now)]
