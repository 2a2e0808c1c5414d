"""Close reasons: every way in which a session can end, its close code, and its error event."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from duplane.edge.client_errors import ErrorCode
from duplane.fabric.v1 import session_pb2


class CloseReason(StrEnum):
    """Why a session ends."""

    CLIENT = "client"  # the client asked for it
    TIMEOUT = "timeout"  # a time limit of the session has passed
    CONTEXT_FULL = "context_full"
    SHUTDOWN = "shutdown"  # the edge or the worker shuts down
    FAILED = "failed"  # the worker is lost or cannot continue
    SERVICE_UNAVAILABLE = "service_unavailable"  # this reason and the next six refuse a session
    MODEL_NOT_SERVED = "model_not_served"  # several models are served, but not the one asked for
    QUEUE_FULL = "queue_full"
    QUOTA = "quota"  # a limit of the client's tenant is exhausted
    WORKER_BUSY = "worker_busy"
    WORKER_CONNECT_FAILED = "worker_connect_failed"
    MODE_REFUSED = "mode_refused"
    REQUEST_REFUSED = "request_refused"  # the only request of a connection is invalid
    ANSWERED = "answered"  # the only request of a connection is answered
    UNREADABLE = "unreadable"  # a frame that is not JSON text
    CREDENTIAL_ENDED = "credential_ended"  # its credential is revoked, disabled or expired
    TOO_BIG = "too_big"  # a message above the bound
    TOO_SLOW = "too_slow"  # the client does not read its events
    GONE = "gone"  # the connection is lost
    RETURNED = "returned"  # the client has returned to another session
    REPLACED = "replaced"  # another socket has the session
    RESUME_REFUSED = "resume_refused"  # the client cannot return to the session that it names
    RESUME_BUSY = "resume_busy"  # the client cannot return to its session yet


CLOSE_CODES: Mapping[CloseReason, int] = {
    CloseReason.CLIENT: 1000,
    CloseReason.TIMEOUT: 1000,
    CloseReason.CONTEXT_FULL: 1000,
    CloseReason.SHUTDOWN: 1001,
    CloseReason.FAILED: 1011,
    CloseReason.SERVICE_UNAVAILABLE: 1013,
    CloseReason.MODEL_NOT_SERVED: 1013,
    CloseReason.QUEUE_FULL: 1013,
    CloseReason.QUOTA: 1013,
    CloseReason.WORKER_BUSY: 1013,
    CloseReason.WORKER_CONNECT_FAILED: 1013,
    CloseReason.MODE_REFUSED: 1008,
    CloseReason.REQUEST_REFUSED: 1000,
    CloseReason.ANSWERED: 1000,
    CloseReason.UNREADABLE: 1003,
    CloseReason.CREDENTIAL_ENDED: 1008,
    CloseReason.TOO_BIG: 1009,
    CloseReason.TOO_SLOW: 1008,
    CloseReason.GONE: 1000,
    CloseReason.RETURNED: 1000,
    CloseReason.REPLACED: 1000,
    CloseReason.RESUME_REFUSED: 1008,
    CloseReason.RESUME_BUSY: 1013,
}

# Ends of sessions and sockets of clients that return. The client gets an event or an error that
# says so, and not the dialect's events for the end of a session.
RETURNS = frozenset(
    {
        CloseReason.RETURNED,
        CloseReason.REPLACED,
        CloseReason.RESUME_REFUSED,
        CloseReason.RESUME_BUSY,
    }
)

# For these reasons the client gets an `error` event; for all others `session.closed` or no event.
# A dialect may have other codes: see `Dialect.refusals`.
REFUSALS: Mapping[CloseReason, ErrorCode] = {
    CloseReason.SERVICE_UNAVAILABLE: ErrorCode.SERVICE_UNAVAILABLE,
    CloseReason.MODEL_NOT_SERVED: ErrorCode.SERVICE_UNAVAILABLE,
    CloseReason.QUEUE_FULL: ErrorCode.QUEUE_FULL,
    CloseReason.QUOTA: ErrorCode.QUEUE_FULL,  # the published schema has no code of its own
    CloseReason.WORKER_BUSY: ErrorCode.WORKER_BUSY,
    CloseReason.WORKER_CONNECT_FAILED: ErrorCode.WORKER_CONNECT_FAILED,
    CloseReason.MODE_REFUSED: ErrorCode.SERVICE_UNAVAILABLE,
    CloseReason.CREDENTIAL_ENDED: ErrorCode.SERVICE_UNAVAILABLE,
}

# After a close for one of these reasons the client reads nothing more, so the edge does not send
# the events that wait.
NOT_READ = frozenset({CloseReason.GONE, CloseReason.TOO_BIG, CloseReason.TOO_SLOW})

# The message of a close for one of these reasons can quote what the client has sent, so it is never
# logged.
QUOTING = frozenset(
    {
        CloseReason.SERVICE_UNAVAILABLE,
        CloseReason.MODEL_NOT_SERVED,
        CloseReason.MODE_REFUSED,
        CloseReason.REQUEST_REFUSED,
        CloseReason.UNREADABLE,
    }
)

# A session that ends for one of these reasons ends while its client is still sending. A client that
# sends to a closed socket gets an error instead of the last events. So the connection stays open
# for a while (it lingers), and the client can close it itself.
LINGERING = frozenset({CloseReason.TIMEOUT, CloseReason.CONTEXT_FULL})


@dataclass(frozen=True, slots=True)
class Close:
    """The end of one session: the reason, a message for people, and the client's reason if any.

    `code` says what is wrong with the only request of a connection, if that ends the session. A
    client that is refused for now may ask again after `retry_s`; for most reasons nobody knows when
    another session ends. If `is_wanted`, the client has closed its connection itself, so it will
    not return.
    """

    reason: CloseReason
    message: str = ""
    client_reason: str = ""
    code: ErrorCode | None = None
    retry_s: float = 10.0
    is_wanted: bool = False

    @property
    def may_return(self) -> bool:
        """Whether only the socket is lost, so that the client of a resumable session may return."""
        return self.reason in (CloseReason.GONE, CloseReason.TOO_SLOW) and not self.is_wanted

    @property
    def retry_after(self) -> str:
        """The value of the header `Retry-After`."""
        return str(math.ceil(self.retry_s))

    @property
    def text(self) -> str:
        """The text of the WebSocket close frame."""
        return self.message or self.reason.value

    @property
    def logged_text(self) -> str:
        """The text for the log, which quotes nothing of the client."""
        return self.reason.value if self.reason in QUOTING else self.text


GONE = Close(CloseReason.GONE)
TOO_SLOW = Close(CloseReason.TOO_SLOW, "events are not read")
SESSION_OVER = Close(CloseReason.TIMEOUT, "session time limit")
"""The end of a session that has lasted as long as it may. Some clients are told this apart."""

# The worker's close reason -> the close reason for the client.
WORKER_CLOSED: Mapping[int, CloseReason] = {
    session_pb2.CLOSE_REASON_UNSPECIFIED: CloseReason.FAILED,
    session_pb2.CLOSE_REASON_CLIENT: CloseReason.CLIENT,
    session_pb2.CLOSE_REASON_CONTEXT_FULL: CloseReason.CONTEXT_FULL,
    session_pb2.CLOSE_REASON_PAUSE_TIMEOUT: CloseReason.TIMEOUT,
    session_pb2.CLOSE_REASON_IDLE_TIMEOUT: CloseReason.TIMEOUT,
    session_pb2.CLOSE_REASON_SHUTDOWN: CloseReason.SHUTDOWN,
    session_pb2.CLOSE_REASON_REVOKED: CloseReason.FAILED,
    session_pb2.CLOSE_REASON_ENGINE_FAILED: CloseReason.FAILED,
    session_pb2.CLOSE_REASON_OPERATOR: CloseReason.SHUTDOWN,
}
