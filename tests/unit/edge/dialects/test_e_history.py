"""The messages that turns of chat read in dialect E, and the bounds of what the edge keeps."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from duplane.edge.dialects.e_history import History
from duplane.edge.dialects.e_items import Item, ItemTable, Part
from duplane.edge.settings import Limits
from duplane.fabric.v1 import session_pb2

USER, ASSISTANT = session_pb2.CHAT_ROLE_USER, session_pb2.CHAT_ROLE_ASSISTANT
SYSTEM = session_pb2.CHAT_ROLE_SYSTEM


def said(history: History) -> list[tuple[int, list[str | bytes]]]:
    """Return the role and the contents of each message after the instructions."""
    first, *messages = history.messages("Be brief.")
    assert (first.role, [part.text for part in first.parts]) == (SYSTEM, ["Be brief."])
    return [
        (each.role, [part.text or part.audio or part.image for part in each.parts])
        for each in messages
    ]


def text(item_id: str, role: str, content: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return Item(item_id, role=role, parts=(Part(kind, content),))


def sound(item_id: str) -> Item:
    return Item(item_id, role="user", parts=(Part("input_audio"),))


def test_messages_have_texts_sounds_and_pictures_in_their_order() -> None:
    items = ItemTable()
    history = History(items, Limits())
    parts = (Part("input_text", "see"), Part("input_image"), Part("input_audio"))
    items.add(Item("a", role="user", parts=parts))
    history.keep("a", (b"picture", b"sound"))
    items.add(text("b", "assistant", "I see."))
    items.add(Item("c", "function_call", call={"name": "f", "arguments": "{}"}))
    items.add(text("d", "system", "Be polite."), "root")
    messages = history.messages("Be brief.")
    assert messages[2].parts[1].image == b"picture"
    assert messages[2].parts[2].audio == b"sound"
    assert said(history) == [
        (SYSTEM, ["Be polite."]),
        (USER, ["see", b"picture", b"sound"]),
        (ASSISTANT, ["I see."]),
    ]


def test_transcript_stands_for_a_sound_that_the_edge_does_not_have() -> None:
    items = ItemTable()
    history = History(items, Limits())
    items.add(Item("a", role="user", parts=(Part("input_audio", "hello"), Part("input_audio"))))
    items.add(Item("b", role="assistant", parts=(Part("output_audio", "hi"),)))
    assert said(history) == [(USER, ["hello"]), (ASSISTANT, ["hi"])]


def test_text_that_was_cut_is_read_as_it_was_cut() -> None:
    items = ItemTable()
    history = History(items, Limits())
    items.add(Item("a", role="assistant", parts=(Part("output_audio", "hello you"),), sound_ms=900))
    item = items.get("a")
    assert item
    items.replace(item.cut(500))
    assert said(history) == [(ASSISTANT, ["hello"])]


def test_oldest_media_are_dropped_with_their_messages_and_the_answers_to_them() -> None:
    items = ItemTable()
    history = History(items, replace(Limits(), chat_media_bytes=10))
    for number in range(3):
        items.add(sound(f"q{number}"))
        history.keep(f"q{number}", (bytes([number]) * 4,))
        items.add(text(f"a{number}", "assistant", f"answer {number}"))
    assert history.media_bytes == 8
    assert said(history) == [
        (USER, [b"\1" * 4]),
        (ASSISTANT, ["answer 1"]),
        (USER, [b"\2" * 4]),
        (ASSISTANT, ["answer 2"]),
    ]


def test_oldest_messages_are_left_out_above_the_bounds_of_a_request() -> None:
    for limits in (
        replace(Limits(), chat_text_bytes=9 + 12),
        replace(Limits(), chat_part_count=4),
        replace(Limits(), chat_message_count=4),
    ):
        items = ItemTable()
        history = History(items, limits)
        for number in range(3):
            items.add(text(f"q{number}", "user", f"ask{number}"))
            items.add(text(f"a{number}", "assistant", f"say{number}"))
        assert said(history) == [(USER, ["ask2"]), (ASSISTANT, ["say2"])]


def test_older_half_is_dropped_if_the_context_is_full() -> None:
    items = ItemTable()
    history = History(items, Limits())
    for number in range(4):
        items.add(sound(f"q{number}"))
        history.keep(f"q{number}", (bytes([number]) * 4,))
        items.add(text(f"a{number}", "assistant", f"answer {number}"))
    history.halve()
    assert said(history) == [
        (USER, [b"\2" * 4]),
        (ASSISTANT, ["answer 2"]),
        (USER, [b"\3" * 4]),
        (ASSISTANT, ["answer 3"]),
    ]
    assert history.media_bytes == 8
    history.halve()
    assert said(history) == [(USER, [b"\3" * 4]), (ASSISTANT, ["answer 3"])]
    for _ in range(3):
        history.halve()
    assert said(history) == []
    items.add(text("q4", "user", "again"))
    assert said(history) == [(USER, ["again"])]


def test_deleted_item_is_forgotten_with_its_media() -> None:
    items = ItemTable()
    history = History(items, Limits())
    items.add(sound("a"))
    history.keep("a", (b"sound",))
    items.remove("a")
    history.forget("a")
    assert history.media_bytes == 0
    assert said(history) == []


def test_given_items_are_read_instead_of_those_in_the_table() -> None:
    items = ItemTable()
    history = History(items, Limits())
    items.add(text("a", "user", "no"))
    given = [(text("", "user", "yes"), ()), (Item("", "function_call"), ()), (sound(""), (b"x",))]
    messages = history.chosen("Be brief.", given)
    assert [[part.text or part.audio for part in each.parts] for each in messages] == [
        ["Be brief."],
        ["yes"],
        [b"x"],
    ]


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from(["user", "assistant", "delete", "halve"]),
            st.integers(0, 12),
            st.sampled_from([None, "root", "0", "3"]),
        ),
        max_size=40,
    )
)
def test_bounds_hold_after_any_steps(steps: list[tuple[int, str, int, str | None]]) -> None:
    limits = replace(Limits(), chat_media_bytes=20, chat_part_count=6, chat_text_bytes=60)
    items = ItemTable()
    history = History(items, limits)
    for number, role, size, after in steps:
        item_id = str(number)
        if role == "delete":
            items.remove(item_id)
            history.forget(item_id)
        elif role == "halve":
            history.halve()
        elif role == "user":
            items.add(sound(item_id), after)
            history.keep(item_id, (bytes(size),))
        else:
            items.add(text(item_id, role, "x" * size), after)
        messages = history.messages("Be brief.")
        parts = [part for each in messages for part in each.parts]
        assert history.media_bytes <= limits.chat_media_bytes
        assert len(parts) <= limits.chat_part_count
        assert sum(len(part.text) for part in parts) <= limits.chat_text_bytes
        assert sum(len(part.audio) for part in parts) <= limits.chat_media_bytes
