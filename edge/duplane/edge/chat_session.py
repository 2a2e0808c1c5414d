"""One client's chat as the edge decides it: turns, one after another, each on a slot of its own.

Pure, as `session.py` is: the shell acquires a slot when one is wanted, runs the turn it is given
on it, and gives the slot back.
"""

from __future__ import annotations

import math
from collections import deque

import orjson

from duplane.edge.dialects.chat import ChatDialect
from duplane.edge.dialects.dialect import Action, Configure, Identity, Moment, Phase, Turn
from duplane.edge.ends import End, Ending
from duplane.edge.faults import ClientError, ErrorCode, name_fault
from duplane.edge.modes import Mode
from duplane.edge.session import Session, Wait
from duplane.edge.settings import Limits
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2

# A turn that fails so before its first answer has not begun: it is tried on another slot.
_SLOT_LOST = frozenset(
    {
        Reason.UNAVAILABLE,
        Reason.DRAINING,
        Reason.SLOT_OCCUPIED,
        Reason.LEASE_STALE,
        Reason.LEASE_EXPIRED,
        Reason.WRONG_EPOCH,
        Reason.WRONG_WORKER,
    }
)


class ChatSession(Session):
    """A session of turns. `dialect` is known from the URL."""

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        mode: Mode,
        now: Moment,
        dialect: type[ChatDialect],
    ) -> None:
        super().__init__(identity, limits, mode, now, dialect)
        self.chat = dialect(identity, limits, mode)
        self.dialect = self.chat
        self._turns: deque[Turn] = deque()
        self._running: Turn | None = None
        self._has_begun = False  # the running turn has an answer, be it a part of one
        self._attempt_count = 0
        self._was_granted = False
        self._is_draining = False
        if dialect.asks_first:
            self._waits.clear()
            self._wait(Wait.SETTINGS, limits.init_s, now)

    @property
    def wants_slot(self) -> bool:
        """Whether the shell is to acquire a slot: for a turn, or for the first place in line."""
        if self.farewell or self.has_slot or self._running:
            return False
        return bool(self._turns) or not (self._was_granted or self.chat.asks_first)

    @property
    def is_running(self) -> bool:
        """Whether a turn is being answered."""
        return self._running is not None

    @property
    def is_retrying(self) -> bool:
        """Whether the next slot is for a turn whose slot was lost: its place in line is kept."""
        return self._attempt_count > 0

    def drain(self, now: Moment) -> list[bytes]:
        """Take that the edge shuts down: the turn that runs is the last."""
        self._is_draining = True
        return super().drain(now)

    def _refuse(self, fault: ClientError, now: Moment) -> list[bytes]:
        """Tell of an event that cannot be used; it ends a connection that has only one."""
        if not self.chat.asks_first:
            return super()._refuse(fault, now)
        if self.chat.phase is not Phase.START:
            return []
        return self.end(Ending(End.REQUEST_REFUSED, fault.message), now)

    def _act(self, action: Action, now: Moment) -> list[bytes]:
        if isinstance(action, Configure):
            return self._configured(now)
        return super()._act(action, now)

    def _configured(self, now: Moment) -> list[bytes]:
        self._waits.pop(Wait.SETTINGS, None)
        return self._open(now) if self._was_granted else []

    def _open(self, now: Moment) -> list[bytes]:
        self._wait(Wait.AUDIO, self._limits.idle_s, now)
        return self.chat.opened(session_pb2.Opened(), now)

    def _take_turn(self, turn: Turn, now: Moment) -> list[bytes]:
        if fault := self._turn_fault():
            return [self.chat.error(ErrorCode.NOT_READY, fault, now, turn.input_id)]
        is_opening = self.chat.phase is Phase.OPENING and not self._turns
        told = self._configured(now) if is_opening or self.chat.asks_first else []
        self._turns.append(turn)
        self._hear(_spoken_now(turn.request))
        self._waits.pop(Wait.AUDIO, None)
        if not self.has_slot and self._running is None and Wait.SLOT not in self._waits:
            self._await_slot(now)
        return told

    def _turn_fault(self) -> str:
        """Return why one more turn cannot be taken now, empty when it can."""
        if self._is_draining:
            return "the server is shutting down"
        limit = self._limits.pending_turn_count
        return f"more than {limit} turns wait already" if len(self._turns) >= limit else ""

    def _await_slot(self, now: Moment) -> None:
        self._queued = None
        self._wait(Wait.SCHEDULER, self._limits.scheduler_s, now)
        self._wait(Wait.SLOT, self._limits.queue_s, now)

    def granted(self, open_s: float, now: Moment) -> list[bytes]:
        """Take the slot, which is kept `open_s` for a turn to begin; 0 leaves it to the worker."""
        if self.farewell:
            return []
        for wait in (Wait.SCHEDULER, Wait.SLOT, Wait.QUEUE_UPDATE):
            self._waits.pop(wait, None)
        self.has_slot = True
        if open_s:
            self._wait(Wait.CLAIM, open_s, now)
        is_first, self._was_granted = not self._was_granted, True
        told: list[bytes] = []
        if self._queued is not None or (is_first and not self.chat.asks_first):
            told.append(orjson.dumps({"type": f"{self.chat.queue_prefix}queue_done"}))
        if self.chat.phase is Phase.OPENING:
            return told + self._open(now)
        if self.chat.phase is Phase.START and not self._turns:
            self._wait(Wait.SETTINGS, self._limits.init_s, now)
        return told

    def next_turn(self, now: Moment) -> session_pb2.ChatRequest | None:
        """Return the turn to run on the slot that was granted; the slot is used up by it."""
        is_ready = self.has_slot and self.chat.takes_turns and self._running is None
        if self.farewell or not is_ready or not self._turns:
            return None
        self.has_slot = False
        self._waits.pop(Wait.CLAIM, None)
        self._wait(Wait.CONVERSATION, self._limits.turn_s, now)
        self._running = self._turns.popleft()
        self._has_begun = False
        self.chat.begin(self._running)
        return self._running.request

    def told(self, response: session_pb2.ChatResponse, now: Moment) -> list[bytes]:
        """Take what the worker said of the turn that runs."""
        if self.farewell or self._running is None:
            return []
        self._has_begun = True
        self._wait(Wait.CONVERSATION, self._limits.turn_s, now)
        match response.WhichOneof("event"):
            case "prefilled":
                return self.chat.prefilled(response.prefilled, now)
            case "delta":
                told = self.chat.piece(response.delta, now)
                return self.lost(self._too_long(), now) if self.chat.is_too_long else told
            case "done":
                return self.chat.done(response.done, now) + self._turn_over(now)
            case _:
                return []

    def _too_long(self) -> FabricError:
        limit = self._limits.answer_bytes
        return FabricError(
            Reason.UNKNOWN, f"the answer is more than {limit} bytes: ask for it as a stream"
        )

    def _turn_over(self, now: Moment) -> list[bytes]:
        self._running = None
        self._attempt_count = 0
        self._waits.pop(Wait.CONVERSATION, None)
        if self.chat.asks_first:
            return self.end(Ending(End.ANSWERED), now)
        if self._is_draining:
            return self.end(Ending(End.SHUTDOWN), now)
        if self._turns:
            self._await_slot(now)
        else:
            self._wait(Wait.AUDIO, self._limits.idle_s, now)
        return []

    def lost(self, error: FabricError, now: Moment) -> list[bytes]:
        """Take the failure of the fabric: of the wish for a slot, or of the turn that runs."""
        if self.farewell:
            return []
        if self._running is None:
            return super().lost(error, now)
        self._attempt_count += 1
        is_lost = error.reason in _SLOT_LOST and not self._has_begun
        if is_lost and self._attempt_count < self._limits.turn_attempt_count:
            self._turns.appendleft(self._running)
            self._running = None
            self._waits.pop(Wait.CONVERSATION, None)
            self._await_slot(now)
            return []
        is_ours = error.reason is not Reason.INVALID_FIELD
        code = ErrorCode.INFERENCE_ERROR if is_ours else ErrorCode.INVALID_PAYLOAD
        told = "the worker was lost" if error.is_foreign else error.message
        message = name_fault(error.field, told)
        if error.field.startswith("messages"):  # as clients call it
            message = self.chat.request_path + message.replace(".parts[", ".content[")
        if self.chat.asks_first:
            return self.end(Ending(End.FAILED if is_ours else End.REQUEST_REFUSED, message), now)
        return self.chat.refused(code, message, now) + self._turn_over(now)

    def cut_off(self, now: Moment) -> list[bytes]:
        """Take the end of a call that never said `done`."""
        is_running = self._running is not None
        error = FabricError(Reason.UNKNOWN, "the worker ended the turn early")
        return self.lost(error, now) if is_running else []

    def expire(self, now: Moment) -> list[bytes]:
        """End waits that are over. A slot that was not used goes back, and nobody is told."""
        if self._waits.get(Wait.CLAIM, math.inf) <= now.monotonic_s:
            del self._waits[Wait.CLAIM]
            self.has_slot = False
            if self._turns:
                self._await_slot(now)
        if self._waits.get(Wait.CONVERSATION, math.inf) <= now.monotonic_s:
            return self.end(Ending(End.FAILED, "the worker is silent"), now)
        if self.chat.asks_first and self._waits.get(Wait.SETTINGS, math.inf) <= now.monotonic_s:
            return self.end(Ending(End.TIMEOUT, "no request in time"), now)
        return super().expire(now)


def _spoken_now(request: session_pb2.ChatRequest) -> bytes:
    """Return what the user says in a turn: each brings the whole history, to its last answer."""
    spoken: list[bytes] = []
    for message in reversed(request.messages):
        if message.role == session_pb2.CHAT_ROLE_ASSISTANT:
            break
        if message.role == session_pb2.CHAT_ROLE_USER:
            spoken += [part.audio for part in reversed(message.parts) if part.audio]
    return b"".join(reversed(spoken))
