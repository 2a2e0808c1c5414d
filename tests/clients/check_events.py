"""Checks events of L by the types of OpenAI's package, in a process of its own.

Reads one event per line, and writes the types of the events, and the types of all client events. A
process of its own is needed because messages about settings change once pydantic is imported.
"""

from __future__ import annotations

import sys
from typing import Any

import orjson
from openai.types.live import ConnectServerEvent
from openai.types.live.client_event import ClientEvent
from pydantic import TypeAdapter


def is_event(schema: Any) -> bool:
    fields = schema.get("properties", {})
    return "event_id" in fields and "const" in fields.get("type", {})


def main() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(ConnectServerEvent)
    lines = sys.stdin.buffer.read().splitlines()
    told = {adapter.validate_json(line, strict=True).type for line in lines}
    schemas = TypeAdapter[Any](ClientEvent).json_schema()["$defs"].values()
    known = {each["properties"]["type"]["const"] for each in schemas if is_event(each)}
    sys.stdout.buffer.write(orjson.dumps({"server": sorted(told), "client": sorted(known)}))


main()
