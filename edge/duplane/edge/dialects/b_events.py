"""Events of dialect B in duplex and in chat: envelope, `session.created`, errors, closing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from duplane.edge.client_errors import ErrorCode
from duplane.edge.clock import Moment
from duplane.edge.close import Close, CloseReason
from duplane.edge.dialects.actions import Leave
from duplane.edge.dialects.dialect import Phase, Transitions
from duplane.edge.dialects.unit_metrics import Usage
from duplane.edge.identity import Identity
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits

INIT = "session.init"
APPEND = "input.append"
CLOSE = "session.close"

TRANSITIONS: Transitions = {
    (Phase.START, INIT): Phase.OPENING,
    (Phase.START, CLOSE): Phase.CLOSED,
    (Phase.OPENING, APPEND): Phase.OPENING,  # the audio waits until the conversation is ready
    (Phase.OPENING, CLOSE): Phase.CLOSED,
    (Phase.ACTIVE, APPEND): Phase.ACTIVE,
    (Phase.ACTIVE, CLOSE): Phase.CLOSED,
}
CLOSED_REASONS: Mapping[CloseReason, str] = {
    # This value is used only if the client gave no reason. A reason of the client is repeated.
    CloseReason.CLIENT: "client_closed",
    CloseReason.TIMEOUT: "timeout",
    CloseReason.CONTEXT_FULL: "context_full",
    CloseReason.SHUTDOWN: "server_shutdown",
    CloseReason.FAILED: "backend_error",
}


class BEvents:
    """Renders the events that duplex and chat share, and counts the tokens of one session."""

    def __init__(self, identity: Identity, backend_mode: str) -> None:
        self.usage = Usage()
        self._identity = identity
        self._backend_mode = backend_mode

    def envelope(self, kind: str, now: Moment) -> dict[str, object]:
        """Return the fields that every event has."""
        return {
            "type": kind,
            "session_id": self._identity.session_id,
            "server_send_ts": now.wall_s,
        }

    def created(
        self,
        prompt_token_count: int,
        ignored: Sequence[str],
        model: Mapping[str, object],
        now: Moment,
    ) -> list[bytes]:
        """Render `session.created`. `model` has the field with the model's name, if it is known."""
        self.usage.input_text += prompt_token_count
        event = self.envelope("session.created", now)
        event["mode"] = self._backend_mode
        event["prompt_length"] = prompt_token_count
        event["metrics"] = {"kv_cache_length": prompt_token_count}
        event["usage"] = self.usage.to_json()
        event |= {**model, **self._identity.recording_field}
        if self._identity.recording_id:
            event["recording_session_id"] = self._identity.recording_id
        if ignored:
            event["ignored_init_fields"] = ignored
        return [orjson.dumps(event)]

    def closed(self, close: Close, now: Moment) -> list[bytes]:
        """Render `session.closed`, or nothing if the close reason has no such event."""
        reason = CLOSED_REASONS.get(close.reason)
        if reason is None:
            return []
        event = self.envelope("session.closed", now)
        event["reason"] = close.client_reason or reason
        event["usage"] = self.usage.to_json()
        if close.reason is CloseReason.FAILED:
            event["diagnostic"] = {"message": close.message or "the worker was lost"}
        return [orjson.dumps(event)]

    def error(self, code: ErrorCode, message: str, now: Moment, input_id: str | None) -> bytes:
        """Render `error`."""
        event = self.envelope("error", now)
        if input_id is not None:
            event["input_id"] = input_id
        event["error"] = {"code": code, "message": message, "type": code.fault}
        return orjson.dumps(event)


def read_input_id(event: Fields, limits: Limits) -> str | None:
    """Return the `input_id` of an event; None if it is absent. Other fields may be invalid."""
    match event.whole.get("input"):
        case {"input_id": str(input_id)} if len(input_id.encode()) <= limits.text_bytes:
            return input_id
        case _:
            return None


def read_close(event: Fields, limits: Limits) -> Leave:
    """Decode `session.close`."""
    return Leave(event.shortened_text("reason", limits.text_bytes), CLOSE)
