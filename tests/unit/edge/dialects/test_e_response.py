"""The events of one response of dialect E, in the order that its clients accept."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from duplane.edge.dialects.e_events import EventWriter
from duplane.edge.dialects.e_items import Item, ItemTable
from duplane.edge.dialects.e_response import (
    CLIENT_CANCELLED,
    COMPLETED,
    End,
    Response,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from duplane.edge.dialects.e_settings import AUDIO, TEXT, SessionSettings
from duplane.fabric.v1 import session_pb2

HALF_SECOND = bytes(24_000)


def response(
    items: ItemTable, request: ResponseRequest | None = None, modalities: tuple[str, ...] = AUDIO
) -> Response:
    settings = SessionSettings("m", modalities=modalities)
    return Response(EventWriter("sess_0123456789ab"), items, settings, "conv_1", request)


def whole(one: Response, end: End = COMPLETED, *pieces: tuple[str, bytes]) -> list[dict[str, Any]]:
    events = one.begin()
    for text, sound in pieces:
        events += one.add(text, sound)
    events += one.close(end, ResponseUsage().take())
    return [orjson.loads(event) for event in events]


def test_spoken_response() -> None:
    items = ItemTable()
    items.add(Item("before", role="user"))
    events = whole(response(items), COMPLETED, ("hello ", HALF_SECOND), ("you", b""), ("", b""))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_audio_transcript.delta",
        "response.output_audio.delta",
        "response.output_audio_transcript.delta",
        "response.output_audio.done",
        "response.output_audio_transcript.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]
    assert [event["event_id"] for event in events] == [f"event_{n + 1}" for n in range(13)]
    assert {event["previous_item_id"] for event in events if "previous_item_id" in event} == {
        "before"
    }
    done = events[-1]["response"]
    content = [{"type": "output_audio", "transcript": "hello you"}]
    assert (done["status"], done["status_details"]) == ("completed", None)
    assert [item["content"] for item in done["output"]] == [content]
    assert done["output"][0]["id"] == items.last_id
    item = items.get(items.last_id or "")
    assert item
    assert (item.status, item.sound_ms, item.text) == ("completed", 500, "hello you")
    assert len(item.id) <= 32


def test_written_response_has_no_sound() -> None:
    events = whole(response(ItemTable(), modalities=TEXT), COMPLETED, ("a", HALF_SECOND))
    assert [event["type"] for event in events[3:8]] == [
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
    ]
    assert events[5]["text"] == events[6]["part"]["text"] == "a"
    assert events[-1]["response"]["output"][0]["content"] == [{"type": "output_text", "text": "a"}]


def test_response_without_output_echoes_what_was_asked() -> None:
    request = ResponseRequest(TEXT, 5, {"k": "v"}, is_apart=True)
    created, done = whole(response(ItemTable(), request))
    assert created["response"]["status"] == "in_progress"
    assert created["response"]["usage"] is None
    assert done["response"]["output"] == []
    assert done["response"]["metadata"] == {"k": "v"}
    assert done["response"]["max_output_tokens"] == 5
    assert done["response"]["output_modalities"] == ["text"]
    assert done["response"]["conversation_id"] is None


def test_response_outside_of_the_conversation_adds_no_item() -> None:
    items = ItemTable()
    events = whole(response(items, ResponseRequest(is_apart=True)), COMPLETED, ("a", b""))
    assert not [event for event in events if event["type"].startswith("conversation.")]
    assert not len(items)


@pytest.mark.parametrize(
    ("end", "details"),
    [
        (CLIENT_CANCELLED, {"type": "cancelled", "reason": "client_cancelled"}),
        (
            End(Status.FAILED, error={"code": "x", "type": "y", "message": "z"}),
            {"type": "failed", "error": {"code": "x", "type": "y", "message": "z"}},
        ),
    ],
)
def test_cut_response_has_an_incomplete_item(end: End, details: dict[str, Any]) -> None:
    events = whole(response(ItemTable()), end, ("a", HALF_SECOND))
    done = events[-1]["response"]
    assert (done["status"], done["status_details"]) == (end.status, details)
    assert done["output"][0]["status"] == "incomplete"


def test_usage_is_counted_since_the_last_response() -> None:
    usage = ResponseUsage()
    usage.add(session_pb2.TokenCounts(input_audio_token_count=10, output_text_token_count=2))
    usage.add(session_pb2.TokenCounts(input_text_token_count=1, output_audio_token_count=25))
    told = usage.take()
    assert (told["input_tokens"], told["output_tokens"], told["total_tokens"]) == (11, 27, 38)
    assert usage.take()["total_tokens"] == 0


def test_the_last_events_repeat_a_bounded_text() -> None:
    one = response(ItemTable())
    one.begin()
    for _ in range(100):
        one.add("x" * 1000)
    events = [orjson.loads(event) for event in one.close(COMPLETED, {})]
    assert 60_000 < len(events[1]["transcript"]) <= 65_536
