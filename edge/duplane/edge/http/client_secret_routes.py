"""POST /v1/realtime/client_secrets: makes an ephemeral token for a browser.

The request and the answer have the form that clients of OpenAI's API know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from aiohttp import web

from duplane.edge.access import Caller, Level, caller_of
from duplane.edge.credentials.ephemeral import DEFAULT_S, MAX_S, MIN_S
from duplane.edge.credentials.ephemeral_login import EphemeralLogin
from duplane.edge.http.http_route import HttpRoute
from duplane.edge.http.messages import Json, json_answer, read_body, read_object
from duplane.edge.routing import ENDPOINTS
from duplane.edge.transport.origins import parse_origin

PATH = "/v1/realtime/client_secrets"
_MAX_BYTES = 64 * 1024
_MAX_SUBJECT_CHARACTERS = 128
_FIELDS = {"expires_after", "session", "origin", "subject", "record"}
_MODES = sorted({mode for _, mode in ENDPOINTS})


class ClientSecretRoutes:
    """Makes tokens with which a browser opens one session, so that it needs no API key."""

    def __init__(
        self, tokens: EphemeralLogin, *, are_tenants_required: bool, body_s: float
    ) -> None:
        self._tokens = tokens
        self._are_tenants_required = are_tenants_required
        self._body_s = body_s

    def routes(self) -> list[HttpRoute]:
        """Return the routes."""
        return [HttpRoute("POST", PATH, self._make, Level.CLIENT)]

    async def _make(self, request: web.Request) -> web.Response:
        """Answer a new token of the caller. The token has no rights that the caller lacks."""
        caller = caller_of(request)
        if self._are_tenants_required and not caller.tenant:
            raise web.HTTPForbidden(text="only a tenant can ask for an ephemeral token")
        body = await read_body(request, _MAX_BYTES, self._body_s)
        fields = read_object(body) if body.strip() else {}
        if unknown := sorted(fields.keys() - _FIELDS):
            raise _invalid(unknown[0], f"is unknown, must be one of {', '.join(sorted(_FIELDS))}")
        session = _object(fields, "session")
        value, expires_at = self._tokens.grant(
            caller,
            seconds=_seconds(fields),
            mode=_mode(session),
            origin=_origin(fields),
            subject=_subject(fields, caller),
            may_record=_record(fields, caller),
        )
        return json_answer({"value": value, "expires_at": expires_at, "session": session})


def _invalid(field: str, problem: str) -> web.HTTPUnprocessableEntity:
    return web.HTTPUnprocessableEntity(text=f"{field} {problem}")


def _object(fields: Json, name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _invalid(name, "must be an object")
    return cast("dict[str, Any]", value)


def _seconds(fields: Json) -> int:
    after = _object(fields, "expires_after")
    if unknown := sorted(after.keys() - {"anchor", "seconds"}):
        raise _invalid(f"expires_after.{unknown[0]}", "is unknown, must be anchor or seconds")
    if after.get("anchor", "created_at") != "created_at":
        raise _invalid("expires_after.anchor", "must be created_at")
    seconds: object = after.get("seconds", DEFAULT_S)
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not MIN_S <= seconds <= MAX_S:
        raise _invalid("expires_after.seconds", f"must be a whole number from {MIN_S} to {MAX_S}")
    return seconds


def _mode(session: Mapping[str, Any]) -> str:
    """Return the mode to which the session is bound; empty if the session may have any."""
    mode: object = session.get("mode", "")
    if not isinstance(mode, str) or (mode and mode not in _MODES):
        raise _invalid("session.mode", f"must be one of {', '.join(_MODES)}")
    return mode


def _origin(fields: Json) -> str:
    """Return the origin of the only pages that can use the token; empty for all."""
    origin = fields.get("origin", "")
    if not isinstance(origin, str) or (origin and parse_origin(origin) is None):
        raise _invalid("origin", "must be https://HOST[:PORT] or http://HOST[:PORT]")
    return origin


def _subject(fields: Json, caller: Caller) -> str:
    subject = fields.get("subject", caller.subject)
    if (
        not isinstance(subject, str)
        or not subject.isprintable()
        or len(subject) > _MAX_SUBJECT_CHARACTERS
    ):
        raise _invalid("subject", f"must have at most {_MAX_SUBJECT_CHARACTERS} printable letters")
    if caller.subject and subject != caller.subject:
        raise _invalid("subject", "must be the subject of the caller's token")
    return subject


def _record(fields: Json, caller: Caller) -> bool | None:
    """Return whether the session must be recorded or must not; None leaves it to the settings."""
    record = fields.get("record")
    if record is not None and not isinstance(record, bool):
        raise _invalid("record", "must be true or false")
    if caller.may_record is not None and record not in (None, caller.may_record):
        raise _invalid("record", "contradicts the caller's token")
    return caller.may_record if record is None else record
