"""The first event of a client that returns to its session on a new socket."""

from __future__ import annotations

import re

import orjson

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.dialects.actions import NOT_RESUMABLE, Resumption, Return
from duplane.edge.payload.fields import Fields, missing
from duplane.edge.settings import Limits
from duplane.fabric.bounds import MAX_QUEUE_TOKEN_LENGTH

FIELD = "resumable"  # of the settings: the client may return
_MAX_NUMBER = 2**53
_MAX_TOKEN_BYTES = 256
_SESSION_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_PLACE = "queue_token"  # of the settings: the place in the queue that the client had elsewhere


def reads_return(event: Fields, return_event: str, limits: Limits) -> bool:
    """Return whether the first event of a client asks for its session.

    `return_event` is the type of this event in the client's dialect; empty if there is none. In
    dialect C, an event with another meaning has the same type, so the token decides.
    """
    if not (return_event and limits.resume_s and event.whole.get("type") == return_event):
        return False
    return return_event != "resume" or "token" in event.whole


def read_return(event: Fields) -> Return:
    """Decode the event. Raises ClientError.

    A token of another form than those of edges names no session. No part of it is logged.
    """
    token = event.required_text("token", _MAX_TOKEN_BYTES)
    session_id, _, secret = token.partition(".")
    if not (secret and _SESSION_ID.fullmatch(session_id)):
        session_id = secret = ""
    unit = event.integer("unit", 0, _MAX_NUMBER)
    part = event.integer("part", 0, _MAX_NUMBER)
    if (unit is None) is not (part is None):
        raise missing("part" if part is None else "unit")
    from_sample = event.integer("from_sample", 0, _MAX_NUMBER)
    if unit is None or part is None:
        return Return(session_id, secret, from_sample=from_sample)
    return Return(session_id, secret, unit, part, from_sample)


def read_resumption(settings: Fields, limits: Limits) -> Resumption:
    """Return whether the client wants to be able to return, and its place. Raises ClientError.

    If the edge does not allow it, neither field is read and both count as fields without effect.
    So does the place of a client that does not want to return.
    """
    if not (limits.resume_s and settings.get(FIELD, bool)):
        return NOT_RESUMABLE
    return Resumption(True, settings.text(_PLACE, MAX_QUEUE_TOKEN_LENGTH) or "")


def with_queue_token(event: bytes, token: str) -> bytes:
    """Add a client's place to an event of the queue, so that it can show it at another edge."""
    return b"".join((event[:-1], b',"', _PLACE.encode(), b'":', orjson.dumps(token), b"}"))


def refuse_resumable(settings: Fields) -> None:
    """Refuse the field where a session cannot be resumed. Raises ClientError."""
    if settings.whole.get(FIELD) is True:
        fault = "only duplex sessions can be resumed"
        raise ClientError(ErrorCode.INVALID_PAYLOAD, f"{settings.path(FIELD)}: {fault}")
