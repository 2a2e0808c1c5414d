"""Writes the server events of dialect E, and draws the ids in them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import orjson

from duplane.edge.dialects.dialect import with_audio

_SESSION_PREFIX = "sess_"


class EventWriter:
    """Renders the events of one session. Each event has an `event_id`: clients drop events without.

    The ids of items and responses contain the session's id: a client that connects again sends the
    items of its earlier session, so an id must not occur in two sessions.
    """

    def __init__(self, session_id: str) -> None:
        self._session = session_id.removeprefix(_SESSION_PREFIX)
        self._counts: Counter[str] = Counter()

    def new_id(self, prefix: str) -> str:
        """Return a new id, for example of an item. It has at most 32 characters."""
        self._counts[prefix] += 1
        return f"{prefix}_{self._session}_{self._counts[prefix]}"

    def event(self, kind: str, fields: Mapping[str, object]) -> bytes:
        """Render an event."""
        return orjson.dumps({"type": kind, "event_id": self._event_id(), **fields})

    def sound(self, kind: str, fields: Mapping[str, object], sound: bytes) -> bytes:
        """Render an event with sound in its field `delta`."""
        event = {"type": kind, "event_id": self._event_id(), **fields}
        return with_audio(event, sound, "delta")

    def error(
        self, error: Mapping[str, object], param: str | None = None, input_id: str | None = None
    ) -> bytes:
        """Render an `error`. `input_id` is the client's id of the event that caused it."""
        whole = {**error, "param": error.get("param", param), "event_id": input_id}
        return self.event("error", {"error": whole})

    def _event_id(self) -> str:
        self._counts["event"] += 1
        return f"event_{self._counts['event']}"
