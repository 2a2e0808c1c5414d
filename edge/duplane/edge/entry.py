"""What a client says of itself before its first event: the query and the headers it came with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from duplane.edge.modes import DEFAULT_MODE

_MAX_MODE_CHARACTERS = 32
_MAX_CLIENT_ID_CHARACTERS = 128
_MAX_CLOSE_REASON_BYTES = 123  # RFC 6455, 5.5


@dataclass(frozen=True, slots=True)
class Entry:
    """Taken at its word and no further: `client_id` is shown to operators, never trusted."""

    mode: str
    client_id: str


def read_entry(path: str, headers: Mapping[str, str]) -> Entry:
    """Read the query of `path` and the headers, by lower-case name."""
    query = parse_qs(path.partition("?")[2])
    mode = query.get("mode", [DEFAULT_MODE])[0]
    client_id = query.get("client_id", [headers.get("x-client-id", "")])[0]
    return Entry(mode[:_MAX_MODE_CHARACTERS], client_id[:_MAX_CLIENT_ID_CHARACTERS])


def close_reason(text: str) -> str:
    """Cut text to what a closing frame can hold."""
    return text.encode()[:_MAX_CLOSE_REASON_BYTES].decode(errors="ignore")
