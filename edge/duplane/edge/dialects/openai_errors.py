"""Errors in the form of OpenAI's protocols: the type and the code of each error of the edge."""

from __future__ import annotations

import re
from collections.abc import Mapping

from duplane.edge.client_errors import ErrorCode

CLIENT_ERROR = "invalid_request_error"
_SERVER = "server_error"

SERVER_ERROR = (_SERVER, "server_error")
SERVER_SHUTDOWN = (_SERVER, "server_shutdown")
CONTEXT_FULL = (_SERVER, "context_full")
# Of dialect E:
CONTEXT_TOO_LONG = (CLIENT_ERROR, "context_length_exceeded")
SESSION_EXPIRED = (CLIENT_ERROR, "session_expired")
RESPONSE_ACTIVE = (CLIENT_ERROR, "conversation_already_has_active_response")
RESPONSE_NOT_ACTIVE = (CLIENT_ERROR, "response_cancel_not_active")
COMMIT_EMPTY = (CLIENT_ERROR, "input_audio_buffer_commit_empty")
UNKNOWN_ITEM = (CLIENT_ERROR, "item_retrieve_invalid_item_id")

ERRORS: Mapping[ErrorCode, tuple[str, str]] = {
    ErrorCode.NOT_READY: (CLIENT_ERROR, "not_ready"),
    ErrorCode.UNKNOWN_EVENT: (CLIENT_ERROR, "unknown_event"),
    ErrorCode.MISSING_FIELD: (CLIENT_ERROR, "missing_required_parameter"),
    ErrorCode.INVALID_PAYLOAD: (CLIENT_ERROR, "invalid_value"),
    ErrorCode.UNSUPPORTED: (CLIENT_ERROR, "unsupported"),
    ErrorCode.CREDENTIAL_ENDED: (CLIENT_ERROR, "invalid_api_key"),
    ErrorCode.SERVICE_UNAVAILABLE: (_SERVER, "server_busy"),
    ErrorCode.QUEUE_FULL: (_SERVER, "server_busy"),
    ErrorCode.WORKER_BUSY: (_SERVER, "server_busy"),
    ErrorCode.WORKER_CONNECT_FAILED: SERVER_ERROR,
    ErrorCode.INFERENCE_ERROR: (_SERVER, "inference_error"),
}

# A message about a field begins with the path of the field.
_PATH = re.compile(r"([\w.\[\]]+)(?:: | base64 )")


def named_error(error: tuple[str, str], message: str) -> dict[str, object]:
    """Return `type`, `code` and `message` of one of the errors above."""
    kind, code = error
    return {"type": kind, "code": code, "message": message}


def error_fields(code: ErrorCode, message: str) -> dict[str, object]:
    """Return `type`, `code` and `message`.

    If a field of the client's event is invalid, also return its path (`param`).
    """
    kind, name = ERRORS[code]
    fields: dict[str, object] = {"type": kind, "code": name, "message": message}
    if kind == CLIENT_ERROR and (path := _PATH.match(message)):
        fields["param"] = path[1]
    return fields


def error_object(
    message: str, kind: str, code: str | None, param: str | None = None
) -> dict[str, object]:
    """Return the `error` of an HTTP answer. All four fields are always there."""
    return {"message": message, "type": kind, "param": param, "code": code}
