"""The next piece of work of a slot."""

from __future__ import annotations

import numpy as np
import pytest

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.inbox import Inbox
from duplane.worker.engine.schedule import (
    BACKGROUND_DEADLINE_S,
    CHAT_DEADLINE_S,
    CHAT_PERIOD_S,
    UNIT_DEADLINE_S,
    Kind,
    Work,
)
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.chat import ChatOutput, ChatRequest, Finish
from duplane.worker.models.interface import (
    Continue,
    Open,
    Part,
    Rebuild,
    RunUnit,
    StartChat,
    Unfinished,
)
from duplane.worker.models.scripted.model import ScriptedChat, ScriptedConversation
from duplane.worker.models.types import ConversationOptions, PastUnit, Unit

OPEN = Open(0, ScriptedConversation(ConversationOptions()))
CHAT = StartChat(0, ScriptedChat(ChatRequest(()), 9))
REFUSED = FailedUnit(0, "INVALID_FIELD", "bad")


def channel(*entries: UnitRecord | FailedUnit, is_ready: bool = True) -> SlotChannel:
    made = SlotChannel(0, Inbox(), lambda event: None)
    made.is_ready = is_ready
    for entry in entries:
        made.inbox.put(entry)
    return made


def unit(received_s: float = 0.0) -> UnitRecord:
    return UnitRecord(Unit(0, np.zeros(16, np.float32), rows=11), received_s)


def past() -> list[PastUnit]:
    return [PastUnit(unit().unit, (), b"", 0)]


def take(own: SlotChannel) -> Work:
    """Return the work of a slot, and run it."""
    work = own.work()
    assert work
    own.run(work.item, 1, 0.0)
    return work


def test_units_begin_in_their_order_and_are_due_after_their_arrival() -> None:
    first, second = unit(3.0), unit(4.0)
    own = channel(first, second)
    work = take(own)
    assert work == Work(RunUnit(first.unit), Kind.UNIT, 3.0 + UNIT_DEADLINE_S, size=11)
    assert own.work() is None, "it runs"
    own.leave(Unfinished(0, Part.FEED, 5), 3.1)
    own.end_run(3.0, 3.1)
    rest = take(own)
    assert rest == Work(Continue(0, Part.FEED, 5), Kind.UNIT, 3.0 + UNIT_DEADLINE_S, size=11)
    own.begun = None
    own.end_run(3.2, 3.3)
    assert take(own).item == RunUnit(second.unit)
    assert own.begun is second


def test_no_unit_begins_before_the_conversation_is_open_settled_and_rebuilt() -> None:
    own = channel(unit(), is_ready=False)
    assert own.work() is None
    own.is_ready = True
    own.rebuild(past(), 7.0, has_more=False)
    work = own.work()
    assert work
    assert isinstance(work.item, Rebuild)
    assert (work.kind, work.deadline_s) == (Kind.BACKGROUND, 7.0 + BACKGROUND_DEADLINE_S)
    for part in (Part.SETTLE, Part.VOICE):
        own.leave(Unfinished(0, part), 8.0)
        own.end_run(7.5, 8.5)
        work = own.work()
        assert work == Work(
            Continue(0, part, 1), Kind.BACKGROUND, 8.5 + BACKGROUND_DEADLINE_S, since_s=8.0
        )
    own.next = own.past_units = None
    assert isinstance(take(own).item, RunUnit)


def test_an_opening_and_its_prompt_began_when_the_client_asked() -> None:
    own = channel(is_ready=False)
    own.begin(OPEN, 0, 5.0)
    assert take(own) == Work(OPEN, Kind.BACKGROUND, 5.0 + BACKGROUND_DEADLINE_S, since_s=5.0)
    own.leave(Unfinished(0, Part.FEED, 90), 6.0)
    own.end_run(5.5, 6.0)
    rest = Continue(0, Part.FEED, 90)
    assert own.work() == Work(rest, Kind.BACKGROUND, 6.0 + BACKGROUND_DEADLINE_S, since_s=5.0)


def test_a_rebuild_keeps_its_place_from_its_first_message_on() -> None:
    own = channel()
    own.rebuild(past(), 7.0, has_more=True)
    own.past_units = None
    own.rebuild(past(), 9.0, has_more=False)
    work = own.work()
    assert work
    assert (work.since_s, work.deadline_s) == (7.0, 9.0 + BACKGROUND_DEADLINE_S)


@pytest.mark.parametrize("part", [Part.HEAR, Part.SEE, Part.FEED])
def test_the_prompt_of_a_chat_is_background_work(part: Part) -> None:
    own = channel(is_ready=False)
    own.begin(CHAT, 1, 5.0)
    assert take(own).item is CHAT
    own.leave(Unfinished(0, part, 9), 6.0)
    own.end_run(5.0, 6.0)
    rest = Continue(0, part, 9)
    assert own.work() == Work(rest, Kind.BACKGROUND, 6.0 + BACKGROUND_DEADLINE_S, since_s=5.0)


@pytest.mark.parametrize(
    ("part", "due_s"),
    [(Part.DECODE, 6.0 + CHAT_PERIOD_S), (Part.TALK, 0.0), (Part.VOCODE, 0.0)],
)
def test_an_answer_waits_for_credit_and_each_of_its_texts_for_the_period(
    part: Part, due_s: float
) -> None:
    own = channel(is_ready=False)
    own.begin(CHAT, 0, 5.0)
    own.next, own.piece_s = Continue(0, part, 1), 6.0
    assert own.work() is None
    own.credit = 1
    assert own.work() == Work(own.next, Kind.CHAT, 6.0 + CHAT_DEADLINE_S, due_s)


def test_the_period_counts_from_one_text_to_the_next() -> None:
    own = channel(is_ready=False)
    own.begin(CHAT, 4, 5.0)
    due_s: list[float] = []
    sound = np.ones(9, np.float32)
    for now_s, output in (
        (6.0, ChatOutput(0, 9)),
        (7.0, ChatOutput(0, 9, text="one", token_ids=(1,))),
        (8.0, ChatOutput(0, 9, audio=sound)),
    ):
        own.note_output(output, now_s)
        own.next = Continue(0, Part.DECODE, 1)
        work = own.work()
        assert work
        due_s.append(work.due_s)
    assert due_s == [6.0, 7.0 + CHAT_PERIOD_S, 7.0 + CHAT_PERIOD_S]
    own.note_output(ChatOutput(0, 9, finish=Finish.STOP), 9.0)
    assert own.work() is None
    assert own.credit == 0


def test_a_muted_slot_has_no_work() -> None:
    own = channel(unit())
    own.is_muted = True
    assert own.work() is None
    own.next = OPEN
    assert own.work() is None


def test_answers_to_refused_units_keep_their_place() -> None:
    own = channel(REFUSED, unit(), REFUSED, is_ready=False)
    assert list(own.answers()) == []
    own.is_ready = True
    assert list(own.answers()) == [REFUSED]
    take(own)
    assert list(own.answers()) == [], "the unit runs"
    own.leave(Unfinished(0, Part.DECODE), 1.0)
    own.end_run(0.0, 1.0)
    assert list(own.answers()) == [], "the unit has no answer yet"
    own.next = own.begun = None
    assert list(own.answers()) == [REFUSED]


def test_a_unit_waits_between_its_launches_and_then_its_conversation_settles() -> None:
    own, record = channel(unit()), None
    for begin_s in (1.0, 5.0):
        record = record or own.inbox.entries[0]
        take(own)
        own.leave(Unfinished(0, Part.FEED, 1), begin_s + 1)
        own.end_run(begin_s, begin_s + 1)
    assert isinstance(record, UnitRecord)
    record.started_s, record.finished_s = 1.0, 6.0
    assert (record.busy_s, record.waited_s) == (2.0, 3.0)
    take(own)
    own.begun, own.settle_s = None, (7.0, 7.0)
    own.leave(Unfinished(0, Part.SETTLE), 7.0)
    own.end_run(6.5, 7.0)
    assert own.settle_s == (7.0, 7.0)
    take(own)
    own.end_run(8.0, 9.0)
    assert own.settle_s == (7.0, 9.0)
