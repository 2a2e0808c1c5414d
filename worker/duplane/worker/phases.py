"""Which message of a session may come when, and how long silence may last. Pure.

A message out of place is the client breaking the protocol and ends the call; a bad unit is not,
and is no business of this file.
"""

from __future__ import annotations

from enum import Enum
from typing import assert_never

from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.v1 import session_pb2
from duplane.worker.settings import SessionLimits


class Phase(Enum):
    """How far a session has come."""

    UNCLAIMED = "unclaimed"
    CLAIMED = "claimed"
    RUNNING = "running"
    PAUSED = "paused"


_LEGAL: dict[Phase, dict[str, Phase]] = {
    Phase.UNCLAIMED: {"claim": Phase.CLAIMED},
    Phase.CLAIMED: {"open": Phase.RUNNING, "close": Phase.CLAIMED},
    Phase.RUNNING: {
        "unit": Phase.RUNNING,
        "pause": Phase.PAUSED,
        "resume": Phase.RUNNING,
        "close": Phase.RUNNING,
    },
    Phase.PAUSED: {
        "unit": Phase.PAUSED,
        "pause": Phase.PAUSED,
        "resume": Phase.RUNNING,
        "close": Phase.PAUSED,
    },
}


class Phases:
    """The phase of one session, and the moment at which silence ends it (`deadline_s`).

    Times are monotonic seconds, passed in.
    """

    def __init__(self, limits: SessionLimits, now: float) -> None:
        self._limits = limits
        self.phase = Phase.UNCLAIMED
        self.deadline_s = now + limits.claim_timeout_s

    def receive(self, request: session_pb2.ConverseRequest, now: float) -> None:
        """Take note of a message, or raise OUT_OF_ORDER and change nothing."""
        message = request.WhichOneof("message") or "nothing"
        phase = _LEGAL[self.phase].get(message)
        if phase is None:
            raise FabricError(
                Reason.OUT_OF_ORDER, f"{message} cannot come while {self.phase.value}"
            )
        match phase:
            case Phase.CLAIMED | Phase.UNCLAIMED:
                self.deadline_s = now + self._limits.open_timeout_s
            case Phase.RUNNING:
                self.deadline_s = now + self._limits.idle_timeout_s
            case Phase.PAUSED:
                if message == "pause":
                    self.deadline_s = now + self._pause_s(request.pause)
            case _:
                assert_never(phase)
        self.phase = phase

    def _pause_s(self, pause: session_pb2.Pause) -> float:
        if not pause.HasField("timeout"):
            return self._limits.pause_timeout_s
        wanted_s = pause.timeout.seconds + pause.timeout.nanos / 1e9
        return min(max(wanted_s, 0.0), self._limits.max_pause_s)

    def expire(self) -> session_pb2.Closed:
        """Say how a session ends whose deadline has passed; raise OPEN_TIMEOUT before `open`."""
        match self.phase:
            case Phase.UNCLAIMED:
                raise FabricError(Reason.OPEN_TIMEOUT, "no claim came in time")
            case Phase.CLAIMED:
                raise FabricError(Reason.OPEN_TIMEOUT, "no open came in time")
            case Phase.RUNNING:
                return session_pb2.Closed(reason=session_pb2.CLOSE_REASON_IDLE_TIMEOUT)
            case Phase.PAUSED:
                return session_pb2.Closed(reason=session_pb2.CLOSE_REASON_PAUSE_TIMEOUT)
            case _:
                assert_never(self.phase)
