"""The items of dialect E: reading, the bounded table, and the cut of what was not heard."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.client_errors import ClientError
from duplane.edge.dialects.e_items import ROOT, Item, ItemTable, Part, read_item
from duplane.edge.payload.fields import Fields
from duplane.edge.settings import Limits


def message(item_id: str, text: str = "", role: str = "user") -> Item:
    return Item(item_id, role=role, parts=(Part("input_text", text),))


def read(item: dict[str, Any]) -> Item:
    return read_item(Fields(item, "item"), Limits())


def ids(table: ItemTable) -> list[str]:
    return [item.id for item in table]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_audio"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_audio", "transcript": "b"}],
        },
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ],
)
def test_an_item_is_told_as_it_was_given(item: dict[str, Any]) -> None:
    told = read({**item, "id": "mine"}).to_json()
    assert told == {"id": "mine", "object": "realtime.item", "status": "completed", **item}


def test_sound_and_pictures_are_not_kept() -> None:
    content = [
        {"type": "input_audio", "audio": "AAAA", "transcript": "hi"},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    ]
    told = read({"type": "message", "role": "user", "content": content}).to_json()
    assert told["content"] == [
        {"type": "input_audio", "transcript": "hi"},
        {"type": "input_image"},
    ]


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ({}, "item.type: required"),
        ({"type": "mcp_call"}, "item.type: must be one of message"),
        ({"type": "message"}, "item.role: required"),
        ({"type": "message", "role": "tool"}, "item.role: must be one of system"),
        ({"type": "message", "role": "user"}, "item.content: required"),
        ({"type": "message", "role": "user", "content": [7]}, "item.content[0]: must be an object"),
        (
            {"type": "message", "role": "user", "content": [{"type": "output_text", "text": ""}]},
            "item.content[0].type: must be one of input_text",
        ),
        (
            {"type": "message", "role": "user", "content": [{"type": "input_text"}]},
            "item.content[0].text: required",
        ),
        ({"type": "function_call", "name": "f"}, "item.arguments: required"),
        ({"type": "function_call_output", "output": "o"}, "item.call_id: required"),
        ({"type": "message", "role": "user", "id": "x" * 999}, "item.id: must be at most"),
    ],
)
def test_an_invalid_item_is_refused_by_the_name_of_its_field(
    item: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ClientError) as refusal:
        read(item)
    assert refusal.value.message.startswith(fault)


def test_texts_of_an_item_have_one_bound() -> None:
    part = {"type": "input_text", "text": "x" * 600}
    item = {"type": "message", "role": "user", "content": [part, part]}
    with pytest.raises(ClientError, match=r"item.content: must have at most 1000 bytes of text"):
        read_item(Fields(item, "item"), Limits(instructions_bytes=1000))


def test_items_have_the_places_that_the_client_names() -> None:
    table = ItemTable()
    assert table.add(message("a")) is None
    assert table.add(message("c")) == "a"
    assert table.add(message("b"), "a") == "a"
    assert table.add(message("first"), ROOT) is None
    assert table.add(message("last"), "unknown") == "c"
    assert ids(table) == ["first", "a", "b", "c", "last"]
    assert (table.last_id, table.previous_id("b"), table.previous_id("first")) == (
        "last",
        "a",
        None,
    )


def test_an_item_with_an_id_in_use_replaces_the_other() -> None:
    table = ItemTable()
    table.add(message("a", "old"))
    table.add(message("b"))
    table.add(message("a", "new"))
    assert [(item.id, item.text) for item in table] == [("b", ""), ("a", "new")]


def test_a_full_table_drops_its_oldest_items() -> None:
    table = ItemTable()
    for number in range(ItemTable.MAX_ITEMS + 2):
        table.add(message(f"i{number}"))
    assert (len(table), ids(table)[0]) == (ItemTable.MAX_ITEMS, "i2")
    table.add(message("long", "x" * (ItemTable.MAX_BYTES - 10)))
    table.add(message("more", "x" * 20))
    assert ids(table) == ["more"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "replace"]),
            st.sampled_from("abcd"),
            st.text(max_size=9),
        )
    )
)
def test_the_bytes_of_a_table_are_those_of_its_items(steps: list[tuple[str, str, str]]) -> None:
    table = ItemTable()
    for kind, item_id, text in steps:
        match kind:
            case "add":
                table.add(message(item_id, text))
            case "remove":
                table.remove(item_id)
            case _:
                table.replace(message(item_id, text))
    assert table.byte_count == sum(item.byte_count for item in table)
    assert len(ids(table)) == len(set(ids(table)))


@pytest.mark.parametrize(
    ("end_ms", "text"), [(0, ""), (500, "hello"), (1000, "hello you."), (9, "")]
)
def test_the_text_of_an_item_is_cut_like_its_sound(end_ms: int, text: str) -> None:
    item = Item("a", role="assistant", parts=(Part("output_audio", "hello you."),), sound_ms=1000)
    assert item.cut(end_ms).text == text
