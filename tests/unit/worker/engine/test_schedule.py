"""The rules of the schedule, one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from duplane.worker.engine.schedule import (
    Kind,
    Launch,
    Limits,
    Work,
    next_due_s,
    next_llm,
    next_single,
    next_speech,
)
from duplane.worker.models.interface import Continue, Open, Part, Rebuild, RunUnit
from duplane.worker.models.scripted.model import ScriptedConversation
from duplane.worker.models.types import ConversationOptions, Unit

LIMITS = Limits(hear=2, pieces=3, many_pieces=6, rows=20, many_rows=50, background=8, vocode=2)
SOUND = np.zeros(16, np.float32)


def unit(slot: int, part: Part, deadline_s: float = 1.0, rows: int = 1, size: int = 0) -> Work:
    return Work(Continue(slot, part, rows), Kind.UNIT, deadline_s, size=size)


def arrived(slot: int, deadline_s: float = 1.0) -> Work:
    return Work(RunUnit(Unit(slot, SOUND)), Kind.UNIT, deadline_s)


def chat(slot: int, part: Part, deadline_s: float = 1.0, due_s: float = 0.0) -> Work:
    return Work(Continue(slot, part, 1), Kind.CHAT, deadline_s, due_s)


def late(
    slot: int, part: Part, deadline_s: float = 1.0, since_s: float = 0.0, rows: int = 1
) -> Work:
    return Work(Continue(slot, part, rows), Kind.BACKGROUND, deadline_s, since_s=since_s)


def opening(slot: int, deadline_s: float = 1.0, since_s: float = 0.0) -> Work:
    item = Open(slot, ScriptedConversation(ConversationOptions()))
    return Work(item, Kind.BACKGROUND, deadline_s, since_s=since_s)


def rebuild(slot: int, deadline_s: float = 1.0, since_s: float = 0.0) -> Work:
    return Work(Rebuild(slot, ()), Kind.BACKGROUND, deadline_s, since_s=since_s)


def heard(
    *waiting: Work, now_s: float = 0.0, is_shared: bool = True, has_seen: bool = False
) -> str:
    launch = next_llm(waiting, LIMITS, now_s, is_shared=is_shared, has_seen=has_seen)
    return shown(launch)


def spoken(*waiting: Work, now_s: float = 0.0, is_shared: bool = True) -> str:
    return shown(next_speech(waiting, LIMITS, now_s, is_shared=is_shared))


def single(*waiting: Work, has_seen: bool = False) -> str:
    launch = next_single(waiting, LIMITS, 0.0, is_shared=True, has_seen=has_seen)
    return shown(launch)


def shown(launch: Launch | None) -> str:
    """Return the block of a launch, and the slot and the rows of each item."""
    if launch is None:
        return "nothing"
    items = (f"{item.slot}:{item.rows}" for item in launch.items)
    return f"{launch.block.value} {' '.join(items)}"


def test_without_work_there_is_no_launch() -> None:
    assert heard() == spoken() == single() == "nothing"
    assert heard(unit(0, Part.TALK)) == spoken(unit(0, Part.HEAR)) == "nothing"


def test_all_units_that_have_arrived_begin_first() -> None:
    works = unit(2, Part.HEAR, 0.1), arrived(0, 3.0), arrived(1, 2.0), opening(3, 0.0)
    assert heard(*works) == "begin 1:0 0:0"
    assert single(*works, unit(4, Part.VOCODE, 0.0)) == "begin 1:0 0:0"


def test_the_earliest_units_are_heard_before_any_pass() -> None:
    works = [unit(slot, Part.HEAR, 3.0 - slot) for slot in range(3)]
    assert heard(*works, unit(3, Part.DECODE, 0.0)) == "hear 2:1 1:1"


def test_the_sound_of_a_chat_waits_for_earlier_units_and_is_heard_alone() -> None:
    sound = late(1, Part.HEAR, 2.0)
    assert heard(sound, unit(0, Part.HEAR, 5.0)) == "hear 0:1"
    assert heard(sound, unit(0, Part.DECODE, 1.0)) == "pass 0:1"
    assert heard(sound, unit(0, Part.DECODE, 3.0)) == "hear 1:1"
    assert heard(sound, late(2, Part.HEAR, 1.0, since_s=9.0)) == "hear 1:1"


@pytest.mark.parametrize("works", [(opening(1, 2.0), "open 1:7"), (rebuild(1, 2.0), "rebuild 1:0")])
def test_an_opening_or_a_rebuild_runs_when_its_deadline_is_the_earliest(
    works: tuple[Work, str],
) -> None:
    alone, launched = works
    assert heard(alone) == launched
    assert heard(alone, unit(0, Part.DECODE, 1.0)) == "pass 0:1"
    assert heard(alone, unit(0, Part.DECODE, 3.0)) == launched
    assert heard(alone, unit(0, Part.TALK, 1.0)) == launched, "the unit is in the other lane"
    assert single(alone, unit(0, Part.TALK, 1.0)) == "talk 0:1"
    assert heard(alone, chat(0, Part.DECODE, 1.0)) == "pass 0:1", "no chat waits for a rebuild"


def test_a_settle_runs_alone() -> None:
    settles = [late(slot, Part.SETTLE, slot) for slot in range(2)]
    assert heard(*settles) == "settle 0:1"
    assert heard(*settles, unit(2, Part.DECODE, -1.0)) == "pass 2:1"


def test_of_two_rebuilds_the_one_that_began_first_continues() -> None:
    assert heard(rebuild(0, 1.0, since_s=5.0), rebuild(1, 9.0, since_s=4.0)) == "rebuild 1:0"
    assert heard(rebuild(0, 1.0, since_s=5.0), opening(1, 9.0, since_s=4.0)) == "rebuild 0:0"


def test_pieces_of_pictures_are_shared_by_deadline() -> None:
    works = unit(0, Part.SEE, 2.0, rows=5), unit(1, Part.SEE, 1.0, rows=2)
    assert heard(*works) == "see 1:2 0:1"
    assert heard(unit(0, Part.SEE, rows=9, size=LIMITS.large_unit)) == "see 0:6"


def test_pictures_are_not_seen_twice_in_a_row_while_rows_wait() -> None:
    see, rows = unit(0, Part.SEE, rows=5), unit(1, Part.DECODE)
    assert heard(see, rows) == "see 0:3"
    assert heard(see, rows, has_seen=True) == single(see, rows, has_seen=True) == "pass 1:1"
    assert heard(see, has_seen=True) == "see 0:3"
    assert heard(see, chat(1, Part.DECODE, due_s=1.0), has_seen=True) == "see 0:3", "not due"


def test_units_and_chats_do_not_see_together() -> None:
    assert heard(unit(0, Part.SEE, 5.0), late(1, Part.SEE, 1.0)) == "see 0:1"
    assert heard(late(1, Part.SEE, 1.0), late(2, Part.SEE, 1.0)) == "see 1:1 2:1"


def test_a_pass_has_next_ids_of_units_then_of_chats_then_input_then_prompts() -> None:
    works = (
        late(3, Part.FEED, rows=30),
        unit(2, Part.FEED, 1.0, rows=5),
        chat(1, Part.DECODE, 0.5),
        unit(0, Part.DECODE, 9.0),
    )
    assert heard(*works) == "pass 0:1 1:1 2:5 3:8"


def test_a_pass_is_bounded_and_units_with_a_late_deadline_get_what_is_left() -> None:
    works = [unit(slot, Part.FEED, slot, rows=9) for slot in range(3)]
    assert heard(*works, unit(3, Part.DECODE), late(4, Part.FEED, rows=5)) == "pass 3:1 0:9 1:9 2:1"
    steps = [unit(slot, Part.DECODE) for slot in range(30)]
    assert heard(*steps) == f"pass {' '.join(f'{slot}:1' for slot in range(20))}"


def test_prompts_are_fed_in_the_order_of_their_beginning() -> None:
    works = late(0, Part.FEED, 1.0, since_s=2.0, rows=5), late(1, Part.FEED, 5.0, 1.0, rows=6)
    assert heard(*works, unit(2, Part.DECODE)) == "pass 2:1 1:6 0:2"


def test_prompts_have_wide_passes_while_no_unit_has_rows() -> None:
    works = late(0, Part.FEED, rows=90), late(1, Part.FEED, 5.0, rows=6), chat(2, Part.DECODE, 0.5)
    assert heard(*works) == "pass 2:1 0:49"
    assert heard(*works, unit(3, Part.DECODE)) == "pass 3:1 2:1 0:8"


def test_a_wide_pass_takes_the_rest_of_one_large_unit_after_the_others() -> None:
    limits = Limits(rows=20, many_rows=50, large_unit=100, large_rest=30)
    large = unit(0, Part.FEED, 0.0, rows=90, size=100)
    works = large, unit(1, Part.FEED, rows=5), unit(2, Part.FEED, 3.0, rows=90, size=100)
    launch = next_llm(works, limits, 0.0, is_shared=True, has_seen=False)
    assert shown(launch) == "pass 1:5 2:15 0:30"
    launch = next_llm(works[:2], limits, 0.0, is_shared=True, has_seen=False)
    assert shown(launch) == "pass 1:5 0:45"
    small = replace(large, item=Continue(0, Part.FEED, 29))
    launch = next_llm((small,), limits, 0.0, is_shared=True, has_seen=False)
    assert shown(launch) == "pass 0:20"


def test_a_chat_keeps_its_period_only_in_company() -> None:
    for part, lane in ((Part.DECODE, heard), (Part.TALK, spoken), (Part.VOCODE, spoken)):
        waits = chat(0, part, due_s=2.0)
        assert lane(waits, now_s=1.0) == "nothing"
        assert lane(waits, now_s=2.0) != "nothing"
        assert lane(waits, now_s=1.0, is_shared=False) != "nothing"
    chats = chat(0, Part.DECODE, due_s=2.0), chat(1, Part.TALK, due_s=3.0)
    assert [next_due_s(chats, now_s) for now_s in (1.0, 2.0, 3.0)] == [2.0, 3.0, math.inf]
    assert next_due_s([unit(0, Part.DECODE)], 0.0) == math.inf


def test_chunks_go_by_deadline_before_all_tokens_and_units_before_chats() -> None:
    talks = [unit(slot, Part.TALK, 0.1) for slot in range(3, 5)]
    chunks = [unit(slot, Part.VOCODE, 5.0 - slot) for slot in range(3)]
    chats = chat(5, Part.VOCODE, 0.0), chat(6, Part.TALK, 0.0)
    assert spoken(*talks, *chunks, *chats) == "vocode 2:1 1:1"
    assert spoken(*talks, *chats) == "talk 3:1 4:1"
    assert spoken(*chats) == "vocode 5:1"
    assert spoken(chats[1]) == "talk 6:1"


def test_a_voice_waits_until_its_deadline_is_the_earliest() -> None:
    voices = late(0, Part.VOICE, 2.0, since_s=2.0), late(1, Part.VOICE, 2.0, since_s=1.0)
    assert spoken(*voices) == "voice 1:1"
    assert spoken(*voices, unit(2, Part.TALK, 1.0)) == "talk 2:1"
    assert spoken(*voices, unit(2, Part.TALK, 3.0)) == "voice 1:1"


def test_one_lane_runs_the_launch_with_the_earlier_deadline() -> None:
    rows, chunk = unit(0, Part.DECODE, 2.0), unit(1, Part.VOCODE, 1.0)
    assert single(rows, chunk) == "vocode 1:1"
    assert single(rows, replace(chunk, deadline_s=3.0)) == "pass 0:1"
    assert single(chunk) == "vocode 1:1"
    urgent = chat(2, Part.DECODE, 0.0)
    assert single(rows, urgent, chunk) == "vocode 1:1", "the deadline is that of the unit"
