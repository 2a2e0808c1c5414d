"""The choice of the work of a round."""

from __future__ import annotations

import numpy as np
import pytest

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.round import Launch, choose
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.chat import ChatRequest
from duplane.worker.models.interface import Continue, Item, Open, Part, Rebuild, StartChat
from duplane.worker.models.scripted.model import ScriptedChat, ScriptedConversation
from duplane.worker.models.types import ConversationOptions, Unit

AUDIO_ROWS, PICTURE_ROWS = 11, 66
ROWS_PER_ROUND = 1024
SECOND_OF_SOUND = np.zeros(16_000, np.float32)


def channel(slot: int, *entries: UnitRecord | FailedUnit) -> SlotChannel:
    made = SlotChannel(slot, Inbox(), lambda event: None)
    made.is_ready = True
    for entry in entries:
        made.inbox.put(entry)
    return made


def unit(slot: int, pictures: int = 0, received_s: float = 0.0) -> UnitRecord:
    rows = AUDIO_ROWS + PICTURE_ROWS * pictures
    made = Unit(slot, SECOND_OF_SOUND, frames=(b"picture",) * pictures, rows=rows)
    return UnitRecord(made, received_s)


def launches(*channels: SlotChannel) -> list[Launch]:
    return list(choose(channels, ROWS_PER_ROUND).launches)


def units(*channels: SlotChannel) -> list[UnitRecord]:
    """Choose a round with at most one launch, which runs units; return their records."""
    chosen = launches(*channels)
    assert len(chosen) <= 1
    assert not any(launch.feeds_ahead for launch in chosen)
    return [record for launch in chosen for record in launch.records.values()]


def answered(own: SlotChannel) -> None:
    """Note, as the model runner does, that the unit of a slot has its result."""
    own.next = None
    own.begun = None


def test_each_ready_slot_runs_its_oldest_unit() -> None:
    first, second = unit(0), unit(0)
    waiting, closed = channel(0, first, second), channel(1, unit(1))
    closed.is_ready = False
    assert units(waiting, closed) == [first]
    assert units(waiting, closed) == [second]
    assert units(waiting, closed) == []


def test_a_muted_slot_does_no_work() -> None:
    waiting = channel(0, unit(0))
    waiting.is_muted = True
    assert units(waiting) == []
    waiting.next = Continue(0, Part.PROMPT, 5)
    assert launches(waiting) == []


def test_a_conversation_that_awaits_its_voice_does_not_run() -> None:
    heard, seen, other = unit(0), unit(1, pictures=1), unit(2)
    waiting = [channel(0, heard), channel(1, seen), channel(2, other)]
    for number, own in enumerate(waiting[:2]):
        own.next = Continue(own.slot, Part.VOICE, 1)
        own.since = 2 - number
    running, voice = launches(*waiting)
    assert list(running.records.values()) == [other]
    assert voice.items == {1: waiting[1].next}, "it waits longer"
    for own in waiting[:2]:
        answered(own)
    assert units(*waiting) == [heard, seen]


def test_answers_to_refused_units_keep_their_order() -> None:
    failed, good = FailedUnit(0, "INVALID_FIELD", "bad"), unit(0)
    waiting = channel(0, failed, good, failed)
    chosen = choose([waiting], ROWS_PER_ROUND)
    assert chosen.answers == [(0, failed)]
    assert [list(launch.records.values()) for launch in chosen.launches] == [[good]]
    assert choose([waiting], ROWS_PER_ROUND).answers == [(0, failed)]


def test_a_chat_runs_while_it_has_credit() -> None:
    chat = channel(3)
    chat.is_ready = False
    chat.next = Continue(3, Part.CHAT, 9)
    assert launches(chat) == []
    chat.credit = 1
    assert [launch.items for launch in launches(chat)] == [{3: chat.next}]


def test_one_slot_opens_in_a_round_and_one_prompt_is_fed() -> None:
    channels = [channel(slot) for slot in range(4)]
    items: dict[int, Item] = {}
    for own, since in zip(channels, (9, 3, 5, 4), strict=True):
        own.since = since
        own.next = Open(own.slot, ScriptedConversation(ConversationOptions()))
        items[own.slot] = own.next
    assert [launch.items for launch in launches(*channels)] == [{1: items[1]}]
    assert launches(*channels)[0].row_budget == ROWS_PER_ROUND
    channels[1].next = Continue(1, Part.PROMPT, 5000)
    (prompt,) = launches(*channels)
    assert (prompt.items, prompt.row_budget) == ({1: channels[1].next}, ROWS_PER_ROUND)
    answered(channels[1])
    assert [launch.items for launch in launches(*channels)] == [{3: items[3]}]


def test_a_chat_starts_beside_a_prompt_and_has_a_step_in_the_same_round() -> None:
    prompt, new, chat = (channel(slot) for slot in range(3))
    prompt.next = Continue(0, Part.PROMPT, 5000)
    new.next = Open(1, ScriptedConversation(ConversationOptions()))
    chat.next = StartChat(2, ScriptedChat(ChatRequest(()), 9))
    prompt.since, new.since, chat.since, chat.credit = 1, 2, 3, 1
    chosen = choose([prompt, new, chat], ROWS_PER_ROUND).launches
    assert next(chosen).items == {0: prompt.next}
    answered(prompt)
    assert next(chosen).items == {2: chat.next}, "the rows of one prompt are fed in a round"
    chat.next = Continue(2, Part.CHAT, 9)
    assert next(chosen).items == {2: chat.next}
    assert list(chosen) == []


def test_units_run_before_all_other_work() -> None:
    running, rebuilt, chat, new, turn = (channel(slot) for slot in range(5))
    running.inbox.put(unit(0))
    rebuilt.past_units = []
    chat.next, chat.credit = Continue(2, Part.CHAT, 9), 1
    new.next = Open(3, ScriptedConversation(ConversationOptions()))
    turn.next = Continue(4, Part.VOICE, 1)
    chosen = launches(turn, new, chat, rebuilt, running)
    assert [list(launch.items) for launch in chosen] == [[0], [3], [2], [1], [4]]
    assert all(launch.row_budget == ROWS_PER_ROUND for launch in chosen)


def test_the_voice_of_a_turn_that_ends_in_a_round_is_computed_in_this_round() -> None:
    running = channel(0, unit(0))
    chosen = choose([running], ROWS_PER_ROUND).launches
    assert next(chosen).records
    running.next = Continue(0, Part.VOICE, 1)
    assert [launch.items for launch in chosen] == [{0: running.next}]


@pytest.mark.parametrize("work", ["rebuild", "voice", "prompt", "chat"])
def test_a_session_that_ends_during_a_round_has_no_further_work(work: str) -> None:
    running, ended = channel(0, unit(0)), channel(1)
    match work:
        case "rebuild":
            ended.past_units = []
        case "voice":
            ended.next = Continue(1, Part.VOICE, 1)
        case "prompt":
            ended.next = Continue(1, Part.PROMPT, 1)
        case _:
            ended.next, ended.credit = Continue(1, Part.CHAT, 1), 1
    chosen = choose([running, ended], ROWS_PER_ROUND).launches
    assert next(chosen).records
    ended.is_muted = True
    assert list(chosen) == []


def test_units_with_pictures_share_the_rows_of_a_round_oldest_first() -> None:
    old, young, small = unit(0, 12, 1.0), unit(1, 12, 2.0), unit(2, 2, 3.0)
    sound = unit(3, 0, 4.0)
    channels = [channel(entry.slot, entry) for entry in (young, sound, small, old)]
    assert units(*channels) == [sound, old, small]
    assert units(*channels) == [young]


def test_a_unit_larger_than_a_round_is_begun_and_runs_when_its_rest_fits() -> None:
    begun, following, young = unit(0, 40), unit(0), unit(1, 1, 9.0)
    large, small = channel(0, begun), channel(1, young)
    for rows_left in (AUDIO_ROWS + 30 * PICTURE_ROWS, AUDIO_ROWS + 15 * PICTURE_ROWS):
        (ahead,) = launches(large, small)
        assert ahead.feeds_ahead
        assert ahead.records == {0: begun}
        assert large.begun is begun
        large.next = Continue(0, Part.PICTURES, rows_left)
    large.inbox.put(following)
    large.next = Continue(0, Part.PICTURES, ROWS_PER_ROUND - AUDIO_ROWS - PICTURE_ROWS)
    assert units(large, small) == [begun, young]
    answered(large)
    assert units(large, small) == [following]


def test_a_large_unit_waits_for_an_older_one() -> None:
    old, late = unit(0, 2, 1.0), unit(1, 40, 2.0)
    older, large = channel(0, old), channel(1, late)
    assert units(older, large) == [old]
    (ahead,) = launches(older, large)
    assert ahead.feeds_ahead
    assert ahead.records == {1: late}


def test_the_rebuild_that_began_first_goes_on_until_it_has_no_units() -> None:
    channels = [channel(slot) for slot in range(3)]
    for waiting, number in zip(channels, (7, 5, None), strict=True):
        waiting.past_units, waiting.rebuild_since = (None if number is None else []), number

    def rebuilding() -> list[int]:
        chosen = launches(*channels)
        return [slot for launch in chosen for slot in launch.items]

    assert rebuilding() == [1]
    assert rebuilding() == [1]
    channels[1].past_units = None
    assert rebuilding() == [0]
    channels[1].past_units = []  # of its next message
    assert rebuilding() == [1]
    channels[1].is_ready = False
    assert rebuilding() == [0]
    assert isinstance(launches(*channels)[0].items[0], Rebuild)
    channels[0].past_units = None
    assert launches(*channels) == []
