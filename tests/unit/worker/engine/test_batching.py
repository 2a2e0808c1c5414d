"""Batch formation: the units of a round, and the longest wait of a unit by a simulated clock."""

from __future__ import annotations

import random

import numpy as np
import pytest

from duplane.worker.engine.batching import Batch, form_batch
from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.model.types import Unit

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


def form(*channels: SlotChannel) -> Batch:
    return form_batch(channels, rows_of, ROWS_PER_ROUND)


def test_each_ready_slot_runs_its_oldest_unit() -> None:
    first, second = unit(0), unit(0)
    waiting, closed = channel(0, first, second), channel(1, unit(1))
    closed.is_ready = False
    assert form(waiting, closed).units == [first]
    assert form(waiting, closed).units == [second]
    assert form(waiting, closed).units == []


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


def test_the_oldest_unit_runs_even_if_it_is_larger_than_a_round() -> None:
    large = unit(0, 100)
    assert form(channel(0, large), channel(1, unit(1, 1, 9.0))).units == [large]


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


@pytest.mark.parametrize("seed", range(5))
def test_no_unit_waits_longer_than_the_stated_bound(seed: int) -> None:
    """Simulate 64 slots for a minute; eight of them send 16 pictures every second.

    The duration of a round is proportional to its rows. A unit without pictures waits for at most
    one round of the largest size. A unit with pictures waits for at most two such rounds, and one
    more for each older unit with pictures.
    """
    second_per_row = 1e-4
    pictures = [16 if slot < 8 else 0 for slot in range(64)]
    draw = random.Random(seed)
    arrivals = sorted((second + draw.random(), slot) for slot in range(64) for second in range(60))
    longest_s = (ROWS_PER_ROUND + 64 * AUDIO_ROWS + rows_of(unit(0, 16))) * second_per_row
    channels = [channel(slot) for slot in range(64)]
    now_s, ran = 0.0, 0
    older: dict[int, int] = {}
    while ran < len(arrivals):
        while arrivals_left := [item for item in arrivals[len(older) :] if item[0] <= now_s]:
            at_s, slot = arrivals_left[0]
            arrived = unit(slot, pictures[slot], at_s)
            arrived.sequence = len(older)
            older[arrived.sequence] = sum(
                1 for other in channels[:8] if other.inbox.entries and other.slot != slot
            )
            channels[slot].inbox.put(arrived)
        batch = form(*channels)
        for taken in batch.units:
            rounds = 1 + (older[taken.sequence] + 1 if taken.frames else 0)
            assert now_s - taken.received_s <= rounds * longest_s
        ran += len(batch.units)
        rows = sum(rows_of(taken) for taken in batch.units)
        seeing = sum(rows_of(taken) for taken in batch.units if taken.frames)
        assert seeing <= max(ROWS_PER_ROUND, rows_of(unit(0, 16)))
        next_s = arrivals[len(older)][0] if len(older) < len(arrivals) else now_s
        now_s = now_s + rows * second_per_row if rows else max(now_s, next_s)
    assert not any(waiting.inbox.entries for waiting in channels)
    assert not any(waiting.inbox.dropped_count for waiting in channels)
