"""Every way a session can end, as data: what led to it, how it is closed, how it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from duplane.edge.faults import ErrorCode
from duplane.fabric.v1 import session_pb2


class End(StrEnum):
    """Why a session ends."""

    CLIENT = "client"  # the client asked for it
    TIMEOUT = "timeout"  # one of the session's own time limits
    CONTEXT_FULL = "context_full"
    SHUTDOWN = "shutdown"  # of the edge or the worker
    FAILED = "failed"  # the worker is lost or cannot go on
    SERVICE_UNAVAILABLE = "service_unavailable"  # refusals, before anything has begun
    QUEUE_FULL = "queue_full"
    WORKER_BUSY = "worker_busy"
    WORKER_CONNECT_FAILED = "worker_connect_failed"
    MODE_REFUSED = "mode_refused"
    REQUEST_REFUSED = "request_refused"  # the only request of a connection cannot be used
    ANSWERED = "answered"  # the only request of a connection is answered
    UNREADABLE = "unreadable"  # a frame that is no JSON text
    TOO_BIG = "too_big"  # a message above the bound
    TOO_SLOW = "too_slow"  # the client does not read what it is sent
    GONE = "gone"  # the client has vanished


CLOSE_CODES: Mapping[End, int] = {
    End.CLIENT: 1000,
    End.TIMEOUT: 1000,
    End.CONTEXT_FULL: 1000,
    End.SHUTDOWN: 1001,
    End.FAILED: 1011,
    End.SERVICE_UNAVAILABLE: 1013,
    End.QUEUE_FULL: 1013,
    End.WORKER_BUSY: 1013,
    End.WORKER_CONNECT_FAILED: 1013,
    End.MODE_REFUSED: 1008,
    End.REQUEST_REFUSED: 1000,
    End.ANSWERED: 1000,
    End.UNREADABLE: 1003,
    End.TOO_BIG: 1009,
    End.TOO_SLOW: 1008,
    End.GONE: 1000,
}

# The ends that are told by an `error` event; the rest by `session.closed`, or by nothing.
REFUSALS: Mapping[End, ErrorCode] = {
    End.SERVICE_UNAVAILABLE: ErrorCode.SERVICE_UNAVAILABLE,
    End.QUEUE_FULL: ErrorCode.QUEUE_FULL,
    End.WORKER_BUSY: ErrorCode.WORKER_BUSY,
    End.WORKER_CONNECT_FAILED: ErrorCode.WORKER_CONNECT_FAILED,
    End.MODE_REFUSED: ErrorCode.SERVICE_UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """One session's end: why, what there is to say about it, and what the client itself said."""

    end: End
    message: str = ""
    client_reason: str = ""


@dataclass(frozen=True, slots=True)
class Farewell:
    """How a connection is closed; `reason` is for people."""

    end: End
    code: int
    reason: str


# Why a worker closed a conversation, as clients know it.
WORKER_CLOSED: Mapping[int, End] = {
    session_pb2.CLOSE_REASON_UNSPECIFIED: End.FAILED,
    session_pb2.CLOSE_REASON_CLIENT: End.CLIENT,
    session_pb2.CLOSE_REASON_CONTEXT_FULL: End.CONTEXT_FULL,
    session_pb2.CLOSE_REASON_PAUSE_TIMEOUT: End.TIMEOUT,
    session_pb2.CLOSE_REASON_IDLE_TIMEOUT: End.TIMEOUT,
    session_pb2.CLOSE_REASON_SHUTDOWN: End.SHUTDOWN,
    session_pb2.CLOSE_REASON_REVOKED: End.FAILED,
    session_pb2.CLOSE_REASON_ENGINE_FAILED: End.FAILED,
}
