"""What every dialect of chat is: turns in; what a worker says of a turn out, as JSON events."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from duplane.edge.dialects.dialect import Dialect, Moment, Phase, Tag, Turn
from duplane.edge.faults import ErrorCode
from duplane.fabric.v1 import session_pb2


class ChatDialect(Dialect):
    """One client that chats. One turn runs at a time; what it has said so far is kept here."""

    # Whether the client's first event comes before its place in the queue.
    asks_first: ClassVar[bool] = False

    request_path: ClassVar[str] = ""  # where a turn is in the event that brings it

    _turn = Turn(session_pb2.ChatRequest())
    _prompt_token_count = 0
    _held_bytes = 0  # of an answer that is not streamed

    def begin(self, turn: Turn) -> None:
        """Begin to answer a turn, or begin again."""
        self._turn = turn
        self._prompt_token_count = 0
        self._text: list[str] = []
        self._audio: list[bytes] = []
        self._held_bytes = 0

    def prefilled(self, prefilled: session_pb2.Prefilled, now: Moment) -> list[bytes]:
        """Render that the prompt is in the context."""
        del now
        self._prompt_token_count = prefilled.prompt_token_count
        return []

    def piece(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]:
        """Render a piece of the answer; of one that is not streamed it is only kept."""
        self._text.append(delta.text)
        if self._turn.is_streaming:
            return self._piece_events(delta, now)
        self._audio.append(delta.audio)
        self._held_bytes += len(delta.text.encode()) + len(delta.audio)
        return []

    @property
    def is_too_long(self) -> bool:
        """Whether an answer that is told whole has become more than is held for a client."""
        return self._held_bytes > self.limits.answer_bytes

    @abstractmethod
    def _piece_events(self, delta: session_pb2.ChatDelta, now: Moment) -> list[bytes]: ...

    @abstractmethod
    def done(self, done: session_pb2.Done, now: Moment) -> list[bytes]:
        """Render the end of the answer."""

    def refused(self, code: ErrorCode, message: str, now: Moment) -> list[bytes]:
        """Render a turn that could not be answered."""
        return [self.error(code, message, now)]

    def delta(
        self, delta: session_pb2.Delta, tag: Tag, dropped_count: int, now: Moment
    ) -> list[bytes]:
        """Render nothing: a chat has no units."""
        del delta, tag, dropped_count, now
        return []

    @property
    def takes_turns(self) -> bool:
        """Whether a turn may begin now."""
        return self.phase is Phase.ACTIVE
