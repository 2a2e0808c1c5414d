"""Checks events by the types of OpenAI's package. Argument: `live` or `realtime`.

Reads one event per line, and writes the types of the events, and the types of all client events.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai.types.live import ConnectServerEvent
from openai.types.live.client_event import ClientEvent
from openai.types.realtime import RealtimeClientEvent, RealtimeServerEvent
from pydantic import TypeAdapter

EVENTS: dict[str, tuple[Any, Any]] = {
    "live": (ConnectServerEvent, ClientEvent),
    "realtime": (RealtimeServerEvent, RealtimeClientEvent),
}


def is_event(schema: Any) -> bool:
    fields = schema.get("properties", {})
    return "event_id" in fields and "const" in fields.get("type", {})


def main(protocol: str) -> None:
    of_server, of_client = EVENTS[protocol]
    adapter: TypeAdapter[Any] = TypeAdapter(of_server)
    lines = sys.stdin.buffer.read().splitlines()
    told = {adapter.validate_json(line, strict=True).type for line in lines}
    schemas = TypeAdapter[Any](of_client).json_schema()["$defs"].values()
    known = {each["properties"]["type"]["const"] for each in schemas if is_event(each)}
    json.dump({"server": sorted(told), "client": sorted(known)}, sys.stdout)


main(*sys.argv[1:])
