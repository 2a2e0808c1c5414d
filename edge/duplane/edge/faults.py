"""What a client can do wrong, and the codes both dialects tell it with."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """The `code` of an `error` event; the closed list of the published schema."""

    NOT_READY = "not_ready"
    UNKNOWN_EVENT = "unknown_event"
    MISSING_FIELD = "missing_field"
    INVALID_PAYLOAD = "invalid_payload"
    SERVICE_UNAVAILABLE = "service_unavailable"
    QUEUE_FULL = "queue_full"
    WORKER_BUSY = "worker_busy"
    WORKER_CONNECT_FAILED = "worker_connect_failed"
    INFERENCE_ERROR = "inference_error"

    @property
    def fault(self) -> str:
        """Whose fault it is: the `type` of an `error` event."""
        return "client_error" if self in _CLIENT_ERRORS else "server_error"


_CLIENT_ERRORS = frozenset(
    {
        ErrorCode.NOT_READY,
        ErrorCode.UNKNOWN_EVENT,
        ErrorCode.MISSING_FIELD,
        ErrorCode.INVALID_PAYLOAD,
    }
)


class ClientError(Exception):
    """An event that cannot be used. The client is told; the session goes on as it was.

    `input_id` is what the client calls the event, where its dialect has such names.
    """

    input_id: str | None = None

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def name_fault(field: str, message: str) -> str:
    """Return what a peer says of a field, with the field named once and by its whole path.

    Peers put its name, or the last part of it, into the message or leave it out.
    """
    for name in (field, field.rpartition(".")[2]):
        rest = message.removeprefix(name)
        if field and rest != message and not rest[:1].isidentifier():
            return field + rest
    return f"{field}: {message}" if field else message


class UnreadableError(Exception):
    """A frame that is no event at all; the connection cannot go on."""
