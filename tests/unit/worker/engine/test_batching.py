"""Batch formation: the units of a round."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from duplane.worker.engine.batching import Batch, form_batch
from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.minicpm_o.types import Unit

AUDIO_ROWS, PICTURE_ROWS = 11, 66
ROWS_PER_ROUND = 1024
SECOND_OF_SOUND = np.zeros(16_000, np.float32)


def rows_of(unit: Unit) -> int:
    return AUDIO_ROWS + PICTURE_ROWS * len(unit.frames)


def channel(slot: int, *entries: Unit | FailedUnit) -> SlotChannel:
    made = SlotChannel(slot, Inbox(), lambda event: None)
    made.is_ready = True
    for entry in entries:
        made.inbox.put(entry)
    return made


def unit(slot: int, pictures: int = 0, received_s: float = 0.0) -> Unit:
    return Unit(slot, SECOND_OF_SOUND, frames=(b"picture",) * pictures, received_s=received_s)


def form(*channels: SlotChannel, awaiting_voice: Collection[int] = ()) -> Batch:
    return form_batch(channels, awaiting_voice, rows_of, ROWS_PER_ROUND)


def test_each_ready_slot_runs_its_oldest_unit() -> None:
    first, second = unit(0), unit(0)
    waiting, closed = channel(0, first, second), channel(1, unit(1))
    closed.is_ready = False
    assert form(waiting, closed).units == [first]
    assert form(waiting, closed).units == [second]
    assert form(waiting, closed).units == []


def test_a_conversation_that_awaits_its_voice_does_not_run() -> None:
    heard, seen, other = unit(0), unit(1, pictures=1), unit(2)
    waiting = [channel(0, heard), channel(1, seen), channel(2, other)]
    assert form(*waiting, awaiting_voice=[0, 1]).units == [other]
    assert form(*waiting).units == [heard, seen]


def test_answers_to_refused_units_keep_their_order() -> None:
    failed, good = FailedUnit(0, "INVALID_FIELD", "bad"), unit(0)
    waiting = channel(0, failed, good, failed)
    batch = form(waiting)
    assert batch.failed == [(waiting, failed)]
    assert batch.units == [good]
    assert form(waiting).failed == [(waiting, failed)]


def test_a_chat_runs_while_it_has_credit() -> None:
    chat = channel(3)
    assert form(chat).chat_slots == []
    chat.credit = 1
    assert form(chat).chat_slots == [3]


def test_units_with_pictures_share_the_rows_of_a_round_oldest_first() -> None:
    old, young, small = unit(0, 12, 1.0), unit(1, 12, 2.0), unit(2, 2, 3.0)
    sound = unit(3, 0, 4.0)
    channels = [channel(entry.slot, entry) for entry in (young, sound, small, old)]
    assert form(*channels).units == [sound, old, small]
    assert form(*channels).units == [young]


def test_a_unit_larger_than_a_round_is_begun_and_runs_when_its_rest_fits() -> None:
    begun, following, young = unit(0, 40), unit(0), unit(1, 1, 9.0)
    large, small = channel(0, begun), channel(1, young)
    for rows_left in (AUDIO_ROWS + 30 * PICTURE_ROWS, AUDIO_ROWS + 15 * PICTURE_ROWS):
        batch = form(large, small)
        assert (batch.ahead, large.begun, batch.units) == (large, begun, [])
        large.begun_rows = rows_left
    large.inbox.put(following)
    large.begun_rows = ROWS_PER_ROUND - AUDIO_ROWS - PICTURE_ROWS
    batch = form(large, small)
    assert (batch.ahead, large.begun) == (None, None)
    assert batch.units == [begun, young]
    assert form(large, small).units == [following]


def test_a_large_unit_waits_for_an_older_one() -> None:
    old = unit(0, 2, 1.0)
    older, large = channel(0, old), channel(1, unit(1, 40, 2.0))
    batch = form(older, large)
    assert (batch.units, batch.ahead) == ([old], None)
    assert form(older, large).ahead is large


def test_the_rebuild_that_began_first_goes_on_until_it_has_no_units() -> None:
    channels = [channel(slot) for slot in range(3)]
    for waiting, number in zip(channels, (7, 5, 0), strict=True):
        waiting.past_units, waiting.rebuild_number = ([] if number else None), number
    assert form(*channels).rebuilding is channels[1]
    assert form(*channels).rebuilding is channels[1]
    channels[1].past_units = None
    assert form(*channels).rebuilding is channels[0]
    channels[1].past_units = []  # of its next message
    assert form(*channels).rebuilding is channels[1]
    channels[1].is_ready = False
    assert form(*channels).rebuilding is channels[0]
    channels[0].past_units = None
    assert form(*channels).is_empty
