"""The states of a Converse call. Pure.

In each state, some messages of the client are legal, and one of them must come within a time limit.
An illegal message ends the call. An invalid unit does not: the module `unit_check` answers it.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from duplane.fabric.durations import to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.settings import SessionLimits


class CallState(Enum):
    """The state of a Converse call."""

    UNCLAIMED = "unclaimed"
    CLAIMED = "claimed"
    OPENED = "opened"  # `open` has come, but no unit yet
    REBUILDING = "rebuilding"  # past units come
    RUNNING = "running"
    PAUSED = "paused"


_LEGAL: dict[CallState, dict[str, CallState]] = {
    CallState.UNCLAIMED: {"claim": CallState.CLAIMED, "attach": CallState.CLAIMED},
    CallState.CLAIMED: {"open": CallState.OPENED, "close": CallState.CLAIMED},
    CallState.OPENED: {
        "keep": CallState.OPENED,
        "rebuild": CallState.REBUILDING,
        "unit": CallState.RUNNING,
        "pause": CallState.PAUSED,
        "resume": CallState.RUNNING,
        "close": CallState.OPENED,
    },
    CallState.REBUILDING: {"rebuild": CallState.REBUILDING, "close": CallState.REBUILDING},
    CallState.RUNNING: {
        "unit": CallState.RUNNING,
        "pause": CallState.PAUSED,
        "resume": CallState.RUNNING,
        "close": CallState.RUNNING,
    },
    CallState.PAUSED: {
        "unit": CallState.PAUSED,
        "pause": CallState.PAUSED,
        "resume": CallState.RUNNING,
        "close": CallState.PAUSED,
    },
}


class CallStateMachine:
    """The state of one call. The call ends at `deadline_s` if no message comes until then.

    Times are monotonic seconds; callers pass the present time.
    """

    def __init__(self, limits: SessionLimits, now: float) -> None:
        self._limits = limits
        self.state = CallState.UNCLAIMED
        self.deadline_s = now + limits.claim_timeout_s

    def left_s(self, now: float) -> float:
        """Return the seconds until the deadline.

        A time limit must be set from these seconds, because the clock of the event loop may differ
        from the monotonic clock: on macOS, only uvloop's clock runs while the machine sleeps.
        """
        return self.deadline_s - now

    def receive(self, request: session_pb2.ConverseRequest, now: float) -> str:
        """Make the transition for a message and return the message's name.

        For an illegal message, raises OUT_OF_ORDER and changes nothing.
        """
        message = request.WhichOneof("message") or "nothing"
        state = _LEGAL[self.state].get(message)
        if state is None:
            raise FabricError(
                Reason.OUT_OF_ORDER, f"{message} cannot come while {self.state.value}"
            )
        match state:
            case CallState.CLAIMED | CallState.UNCLAIMED:
                self.deadline_s = now + self._limits.open_timeout_s
            case CallState.OPENED | CallState.REBUILDING | CallState.RUNNING:
                self.deadline_s = now + self._limits.idle_timeout_s
            case CallState.PAUSED:
                if message == "pause":
                    self.deadline_s = now + self._pause_s(request.pause)
            case _:
                assert_never(state)
        self.state = state
        return message

    def attached(self, now: float) -> None:
        """Record that a new stream of the client continues the call."""
        self.deadline_s = max(self.deadline_s, now + self._limits.idle_timeout_s)

    def rebuilt(self, now: float, *, is_last: bool) -> None:
        """Record that the model has rebuilt the units of a `rebuild` message."""
        self.deadline_s = now + self._limits.idle_timeout_s
        if is_last:
            self.state = CallState.RUNNING

    def _pause_s(self, pause: session_pb2.Pause) -> float:
        if not pause.HasField("timeout"):
            return self._limits.pause_timeout_s
        return min(max(to_seconds(pause.timeout), 0.0), self._limits.max_pause_s)

    def expire(self) -> session_pb2.Closed:
        """End the call after its deadline: return the message `closed`.

        Raises OPEN_TIMEOUT if no `open` has come.
        """
        match self.state:
            case CallState.UNCLAIMED:
                raise FabricError(Reason.OPEN_TIMEOUT, "no claim came in time")
            case CallState.CLAIMED:
                raise FabricError(Reason.OPEN_TIMEOUT, "no open came in time")
            case CallState.OPENED | CallState.REBUILDING | CallState.RUNNING:
                return session_pb2.Closed(reason=session_pb2.CLOSE_REASON_IDLE_TIMEOUT)
            case CallState.PAUSED:
                return session_pb2.Closed(reason=session_pb2.CLOSE_REASON_PAUSE_TIMEOUT)
            case _:
                assert_never(self.state)
