"""Errors in the form of OpenAI's protocols: the type and the code of each error of the edge."""

from __future__ import annotations

import re
from collections.abc import Mapping

from duplane.edge.client_errors import ErrorCode

_CLIENT = "invalid_request_error"
_SERVER = "server_error"

SERVER_ERROR = (_SERVER, "server_error")
CONTEXT_FULL = (_SERVER, "context_full")

ERRORS: Mapping[ErrorCode, tuple[str, str]] = {
    ErrorCode.NOT_READY: (_CLIENT, "not_ready"),
    ErrorCode.UNKNOWN_EVENT: (_CLIENT, "unknown_event"),
    ErrorCode.MISSING_FIELD: (_CLIENT, "missing_required_parameter"),
    ErrorCode.INVALID_PAYLOAD: (_CLIENT, "invalid_value"),
    ErrorCode.UNSUPPORTED: (_CLIENT, "unsupported"),
    ErrorCode.SERVICE_UNAVAILABLE: (_SERVER, "server_busy"),
    ErrorCode.QUEUE_FULL: (_SERVER, "server_busy"),
    ErrorCode.WORKER_BUSY: (_SERVER, "server_busy"),
    ErrorCode.WORKER_CONNECT_FAILED: SERVER_ERROR,
    ErrorCode.INFERENCE_ERROR: (_SERVER, "inference_error"),
}

# A message about a field begins with the path of the field.
_PATH = re.compile(r"([\w.\[\]]+)(?:: | base64 )")


def error_fields(code: ErrorCode, message: str) -> dict[str, object]:
    """Return `type`, `code` and `message`.

    If a field of the client's event is invalid, also return its path (`param`).
    """
    kind, name = ERRORS[code]
    fields: dict[str, object] = {"type": kind, "code": name, "message": message}
    if kind == _CLIENT and (path := _PATH.match(message)):
        fields["param"] = path[1]
    return fields
