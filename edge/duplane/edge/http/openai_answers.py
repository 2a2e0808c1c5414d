"""Refusals in the form of OpenAI's HTTP API, which its clients turn into exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from duplane.edge.dialects.openai_errors import CLIENT_ERROR, SERVER_ERROR, error_object
from duplane.edge.http.messages import Json

OPENAI_PREFIXES = ("/v1/", "/openai/", "/realtime")
"""The paths at which clients of OpenAI's API expect its form."""

# Status -> `type` and `code` of the error. Other statuses have no code.
_KINDS: Mapping[int, tuple[str, str]] = {
    HTTPStatus.UNAUTHORIZED: (CLIENT_ERROR, "invalid_api_key"),
    HTTPStatus.FORBIDDEN: (CLIENT_ERROR, "permission_denied"),
    HTTPStatus.NOT_FOUND: (CLIENT_ERROR, "unknown_url"),
    HTTPStatus.METHOD_NOT_ALLOWED: (CLIENT_ERROR, "method_not_supported"),
    HTTPStatus.REQUEST_TIMEOUT: (CLIENT_ERROR, "request_timeout"),
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: (CLIENT_ERROR, "request_too_large"),
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: (CLIENT_ERROR, "unsupported_content_type"),
    HTTPStatus.UNPROCESSABLE_ENTITY: (CLIENT_ERROR, "invalid_value"),
    HTTPStatus.TOO_MANY_REQUESTS: ("requests", "rate_limit_exceeded"),
    HTTPStatus.INTERNAL_SERVER_ERROR: SERVER_ERROR,
    HTTPStatus.SERVICE_UNAVAILABLE: ("server_error", "server_busy"),
}


def refusal_body(status: int, message: str, *, code: str = "", param: str | None = None) -> Json:
    """Return the body of a refusal: `error` for clients of OpenAI's API, `detail` for all others.

    Without `code` the status decides it.
    """
    kind, name = _KINDS.get(status, (CLIENT_ERROR, None))
    error = error_object(message, kind, code or name, param)
    return {"error": error, "detail": message}
