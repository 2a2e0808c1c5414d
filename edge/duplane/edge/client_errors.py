"""Errors in client events, and their codes."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The `code` of an `error` event in A and B, whose published schema allows no other values.

    Other dialects have codes of their own for the same errors. A and B never send UNSUPPORTED
    and CREDENTIAL_ENDED.
    """

    NOT_READY = "not_ready"
    UNKNOWN_EVENT = "unknown_event"
    MISSING_FIELD = "missing_field"
    INVALID_PAYLOAD = "invalid_payload"
    SERVICE_UNAVAILABLE = "service_unavailable"
    QUEUE_FULL = "queue_full"
    WORKER_BUSY = "worker_busy"
    WORKER_CONNECT_FAILED = "worker_connect_failed"
    INFERENCE_ERROR = "inference_error"
    UNSUPPORTED = "unsupported"
    CREDENTIAL_ENDED = "credential_ended"
    RESUME_REFUSED = "resume_refused"
    RESUME_EXPIRED = "resume_expired"
    RESUME_LOST = "resume_lost"
    RESUME_STALE = "resume_stale"
    RESUME_BUSY = "resume_busy"

    @property
    def fault(self) -> str:
        """The `type` of an `error` event: whether the client or the server is at fault."""
        return "client_error" if self in _CLIENT_ERRORS else "server_error"


_CLIENT_ERRORS = frozenset(
    {
        ErrorCode.NOT_READY,
        ErrorCode.UNKNOWN_EVENT,
        ErrorCode.MISSING_FIELD,
        ErrorCode.INVALID_PAYLOAD,
        ErrorCode.UNSUPPORTED,
        ErrorCode.CREDENTIAL_ENDED,
        ErrorCode.RESUME_REFUSED,
        ErrorCode.RESUME_EXPIRED,
    }
)


RESUME_PREFIX = "resume_"
RESUME_CODES = frozenset(code for code in ErrorCode if code.startswith(RESUME_PREFIX))
"""Why a client does not get the session to which it returns."""


class ClientError(Exception):
    """A client's event is invalid. The client gets an error; the session does not change.

    `input_id` is the client's own id of the event, if its dialect has such ids.
    """

    def __init__(self, code: ErrorCode, message: str, input_id: str | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.input_id = input_id


def name_fault(field: str, message: str) -> str:
    """Return a worker's message about a field, changed so that the message begins with `path`.

    The worker's message may begin with the whole path of the field, with the last part of this
    path, or with neither.
    """
    for name in (field, field.rpartition(".")[2]):
        rest = message.removeprefix(name)
        if field and rest != message and not rest[:1].isidentifier():
            return field + rest
    return f"{field}: {message}" if field else message


class UnreadableError(Exception):
    """A frame that is not an event. The connection must be closed."""
