"""The first event of a client that returns to its session on a new socket."""

from __future__ import annotations

import re

import orjson

from duplane.edge.client_errors import ClientError, ErrorCode
from duplane.edge.dialects.actions import Return
from duplane.edge.payload.fields import Fields, missing
from duplane.edge.settings import Limits

FIELD = "resumable"  # of the settings: the client may return
_MAX_NUMBER = 2**53
_MAX_TOKEN_BYTES = 256
_SESSION_ID = re.compile(r"[A-Za-z0-9_]{1,64}")
_PLACE = "queue_token"  # of the settings: the place in the queue that the client had elsewhere
MAX_PLACE_BYTES = 512  # schedulers refuse longer ones


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

    A token that no edge has made names no session: what is in it is neither looked for nor logged.
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


def read_resumable(settings: Fields, limits: Limits) -> bool:
    """Return whether the client wants to be able to return. Raises ClientError.

    If the edge does not allow it, the field is not read and counts as one without effect.
    """
    return bool(limits.resume_s and settings.get(FIELD, bool))


def read_queue_token(settings: Fields, *, is_resumable: bool) -> str:
    """Return the place in the queue that a client brings; empty if none. Raises ClientError.

    Without `is_resumable` the field is not read and counts as one without effect.
    """
    return (settings.text(_PLACE, MAX_PLACE_BYTES) or "") if is_resumable else ""


def with_queue_token(event: bytes, token: str) -> bytes:
    """Add a client's place to an event of the queue, so that it can show it at another edge."""
    return b"".join((event[:-1], b',"', _PLACE.encode(), b'":', orjson.dumps(token), b"}"))


def refuse_resumable(settings: Fields) -> None:
    """Refuse the field where a session cannot be resumed. Raises ClientError."""
    if settings.whole.get(FIELD) is True:
        fault = "only duplex sessions can be resumed"
        raise ClientError(ErrorCode.INVALID_PAYLOAD, f"{settings.path(FIELD)}: {fault}")
