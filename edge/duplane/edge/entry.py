"""What a client says of itself before its first event: the path, the query and the headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from urllib.parse import parse_qs, unquote

from duplane.edge.modes import DEFAULT_MODE

_MAX_MODE_CHARACTERS = 32
_MAX_CLIENT_ID_CHARACTERS = 128
_MAX_CLOSE_REASON_BYTES = 123  # RFC 6455, 5.5

ASKED = "/api/chat"  # where one turn of chat is asked for without a WebSocket
_DUPLEX_PREFIX = "/ws/duplex/"
_AUDIO_PREFIX = "adx_"  # of a session id that wants no video


class Route(Enum):
    """Where the WebSockets are."""

    REALTIME = "/v1/realtime"
    DUPLEX = "/ws/duplex/{session_id}"
    CHAT = "/ws/chat"


@dataclass(frozen=True, slots=True)
class Entry:
    """Taken at its word and no further: `client_id` is shown to operators, never trusted."""

    mode: str
    client_id: str
    route: Route = Route.REALTIME


def route_of(path: str) -> Route | None:
    """Return where `path` leads, None when there is no WebSocket there."""
    place = path.partition("?")[0]
    for route in (Route.REALTIME, Route.CHAT):
        if place == route.value:
            return route
    return Route.DUPLEX if _duplex_id(place) else None


def is_chat(path: str) -> bool:
    """Tell whether whole histories are sent there, which may be long."""
    return route_of(path) is not None and read_entry(path, {}).mode == "chat"


def _duplex_id(place: str) -> str:
    """Return the session id of /ws/duplex/{session_id}, made harmless; empty when it has none."""
    name = place.removeprefix(_DUPLEX_PREFIX)
    if name == place or "/" in name:
        return ""
    return re.sub(r"[^A-Za-z0-9_-]", "_", unquote(name))


def read_entry(path: str, headers: Mapping[str, str]) -> Entry:
    """Read `path` with its query, and the headers, by lower-case name."""
    place, _, query_text = path.partition("?")
    query = parse_qs(query_text)
    client_id = query.get("client_id", [headers.get("x-client-id", "")])[0]
    if place in (Route.CHAT.value, ASKED):
        return Entry("chat", client_id[:_MAX_CLIENT_ID_CHARACTERS], Route.CHAT)
    if session_id := _duplex_id(place):
        mode = "audio" if session_id.startswith(_AUDIO_PREFIX) else "video"
        name = (client_id or session_id)[:_MAX_CLIENT_ID_CHARACTERS]
        return Entry(mode, name, Route.DUPLEX)
    mode = query.get("mode", [DEFAULT_MODE])[0]
    return Entry(mode[:_MAX_MODE_CHARACTERS], client_id[:_MAX_CLIENT_ID_CHARACTERS])


def close_reason(text: str) -> str:
    """Cut text to what a closing frame can hold."""
    return text.encode()[:_MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
