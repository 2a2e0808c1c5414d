"""The state machine of moves: its table, and random events against its invariants.

`Machine` plays the runner: it executes the effects, and causes no event that a runner could not.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.protocols.transcripts import pcm

from duplane.edge.clock import Moment
from duplane.edge.dialects.actions import Append
from duplane.edge.session.continuity import Continuity, RebuildPermits
from duplane.edge.session.effects import (
    Acquire,
    Cancel,
    Effect,
    EndMove,
    RequestPermit,
    ReturnPermit,
    Use,
)
from duplane.edge.session.move_table import (
    CLAIMED_PHASES,
    FLOWING,
    LAST_SENT_PHASES,
    LOST_PHASES,
    MOVING,
    PREPARING,
    TRANSITIONS,
    IllegalEventError,
    MoveCause,
    MoveEvent,
    MovePhase,
    after,
)
from duplane.edge.session.moves import GivenUp, Moves
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.slot import Slot
from duplane.fabric.errors import FabricError
from duplane.fabric.journal import Journal, JournalSpace
from duplane.fabric.v1 import lease_pb2, session_pb2

AUDIO = pcm(16_000)
JOURNAL_BYTES = 1_000_000
OPENED = session_pb2.Opened(model_digest="m")


@pytest.mark.parametrize("phase", MovePhase)
@pytest.mark.parametrize("event", MoveEvent)
def test_pair_that_is_not_in_the_table_is_a_fault(phase: MovePhase, event: MoveEvent) -> None:
    if (phase, event) in TRANSITIONS:
        assert after(phase, event) is TRANSITIONS[phase, event]
    else:
        with pytest.raises(IllegalEventError, match=f"{event.name} in phase {phase.name}"):
            after(phase, event)


def test_every_phase_can_be_reached_and_closed() -> None:
    reached = {MovePhase.START}
    while more := {to for (at, _), to in TRANSITIONS.items() if at in reached} - reached:
        reached |= more
    assert reached == set(MovePhase)
    for phase in reached - {MovePhase.CLOSED}:
        assert after(phase, MoveEvent.CLOSED) is MovePhase.CLOSED
    assert not [event for at, event in TRANSITIONS if at is MovePhase.CLOSED]


def test_methods_refuse_what_the_table_does_not_allow() -> None:
    machine = Machine()
    with pytest.raises(IllegalEventError):
        machine.moves.opened(OPENED, machine.now)
    with pytest.raises(IllegalEventError):
        machine.moves.rebuilt(machine.now)
    with pytest.raises(IllegalEventError):
        machine.moves.fail(machine.now)
    with pytest.raises(IllegalEventError):
        machine.moves.claimed(Slot(), lease_pb2.Granted(worker_id="w"), machine.now)
    machine.close()
    with pytest.raises(IllegalEventError):
        machine.moves.close(machine.now)


def test_worker_that_needs_all_units_whole_is_not_used_after_some_were_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine()
    machine.begin()
    new = session_pb2.Opened(model_digest="m", accepts_row_count=True)
    assert machine.moves.next_opened(OPENED)
    monkeypatch.setattr(Journal, "is_trimmed", True)
    assert not machine.moves.next_opened(OPENED)
    assert machine.moves.next_opened(new)


class Machine:
    """The moves of one conversation, with the slots that the session holds.

    Like a real worker, the worker of each slot has only the units that it got: `heard` has those in
    its context, `inbox` those without an outcome.
    """

    def __init__(self, permit_count: int = 1, journal_bytes: int = JOURNAL_BYTES) -> None:
        self.now = Moment(1000.0, 0)
        self.permits = RebuildPermits(permit_count)
        self.permit_count = permit_count
        self.space = JournalSpace(journal_bytes, journal_bytes)
        self.effects: deque[Effect] = deque()
        self.moves = Moves(4, self.effects, Continuity(self.space, self.permits, lambda: 7))
        self.used: list[Slot] = []  # slots that got the units, in order
        self.acquiring: set[Slot] = set()
        self.held: set[Slot] = set()  # claimed slots that are neither left nor given back
        self.began_count = 0
        self.ended_count = 0
        self.outcomes: list[int] = []  # sequences, in the order of their outcomes
        self.known: list[int] = []  # units in the context of the conversation
        self.heard: defaultdict[Slot, list[int]] = defaultdict(list)
        self.inbox: defaultdict[Slot, deque[int]] = defaultdict(deque)
        self.sent_count = 0
        self.number = 0

    # --- the runner ---

    def execute(self) -> None:
        while self.effects:
            effect = self.effects.popleft()
            match effect:
                case Acquire():
                    self.began_count += 1
                    self.acquiring.add(effect.slot)
                case Use(slot):
                    self.held -= set(self.used)
                    self.used.append(slot)
                    self.held.add(slot)
                    assert self.heard[slot] == self.known
                case Cancel(slot):
                    self.acquiring.discard(slot)
                    self.held.discard(slot)
                case RequestPermit(permits, slot):
                    permits.request(slot, lambda slot=slot: self.moves.permitted(slot))
                case ReturnPermit(permits, slot):
                    permits.give_back(slot)
                case EndMove():
                    self.ended_count += 1
                case _:
                    pass
        self.check()

    def check(self) -> None:
        """Check what must hold after every event."""
        moves = self.moves
        is_moving = moves.phase in MOVING
        assert self.began_count - self.ended_count == is_moving
        assert len(self.acquiring) <= is_moving
        assert len(self.held) <= 1 + is_moving, "at most one slot beside the present one is held"
        assert (moves.attempt.slot in self.held) >= (moves.phase in CLAIMED_PHASES)
        given_count = self.permit_count - self.permits.free_count
        assert given_count <= (moves.phase in CLAIMED_PHASES)
        if moves.phase in (MovePhase.STARTING, MovePhase.CATCHING_UP, MovePhase.HOLDING):
            assert given_count == 1
        assert self.space.used_bytes <= self.space.total_bytes
        assert self.space.used_bytes == moves.journal.byte_count
        assert self.outcomes == sorted(set(self.outcomes)), "one outcome for each unit, in order"

    # --- events ---

    def begin(self, losses: Sequence[Callable[[Machine], None]] = ()) -> None:
        """Open the conversation. `losses` happen before, each to another worker."""
        self.claim_slot(self.moves.present)
        for lose in losses:
            if self.moves.can_leave(MoveCause.WORKER_LOST, self.now):
                lose(self)
                self.claim()
        if self.moves.phase is MovePhase.START:
            self.moves.open(session_pb2.Open())
            assert self.moves.take(self.moves.present, self.now)
        self.moves.opened(OPENED, self.now)
        self.execute()

    def lose_claimed(self) -> None:
        """Lose the first worker before it has the settings."""
        self.lose()

    def lose_opening(self) -> None:
        """Lose the first worker while it has the settings, and then the request for a slot."""
        self.moves.open(session_pb2.Open())
        assert self.moves.take(self.moves.present, self.now)
        if self.moves.can_leave(MoveCause.WORKER_LOST, self.now):
            self.lose()
            self.fail_next()

    def claim_slot(self, slot: Slot) -> None:
        self.number += 1
        self.acquiring.discard(slot)
        granted = lease_pb2.Granted(worker_id=f"w{self.number}")
        self.moves.check_grant(slot, granted)
        self.moves.claimed(slot, granted, self.now)
        self.held.add(slot)
        self.execute()

    def claim(self) -> None:
        if self.acquiring:
            self.claim_slot(next(iter(self.acquiring)))

    def claim_same(self) -> None:
        """Claim another slot of the worker to leave."""
        if self.moves.phase is MovePhase.ACQUIRING:
            with pytest.raises(FabricError):
                self.moves.check_grant(self.moves.attempt.slot, self.moves.present.granted)
            self.fail_next()

    def permit(self) -> None:
        """Let another session give its permit back."""
        if not self.permits.free_count:
            return
        other = Slot()
        self.permits.request(other, lambda: None)
        self.permits.give_back(other)
        self.execute()

    def add(self) -> None:
        self.moves.queue.add(Append(AUDIO), Receipt.at(self.now), limit=1000)

    def send_several(self) -> None:
        for _ in range(4):
            self.add()
            self.send()

    def progress(self) -> None:
        """Let the next worker do all that it can without the present one."""
        self.claim()
        for _ in range(4):
            self.hear_next()
            self.advance()

    def pause(self) -> None:
        pause = session_pb2.ConverseRequest(pause=session_pb2.Pause())
        self.moves.queue.add_request(pause)

    def send(self) -> None:
        """Send a message to the present worker."""
        moves = self.moves
        outgoing = moves.take(moves.present, self.now)
        if outgoing:
            assert moves.phase in FLOWING
            if outgoing.request.HasField("unit"):
                sequence = outgoing.request.unit.sequence
                slot = moves.present
                assert all(sequence > other for other in (*self.heard[slot], *self.inbox[slot]))
                self.inbox[slot].append(sequence)
            self.sent_count += outgoing.receipt is not None
        self.execute()

    def answer(self, *, fails: bool = False) -> None:
        """Let the present worker answer its oldest unit."""
        moves = self.moves
        if moves.phase in LOST_PHASES or not self.inbox[moves.present]:
            return
        sequence = self.inbox[moves.present].popleft()
        failed = session_pb2.Failed(sequence=sequence)
        change = session_pb2.StateChange()
        delta = session_pb2.Delta(sequence=sequence, state_change=change)
        assert moves.answered(failed if fails else delta, self.now).ordinal >= 0
        self.outcomes.append(sequence)
        if not fails:
            self.known.append(sequence)
            self.heard[moves.present].append(sequence)
        self.execute()

    def fail_unit(self) -> None:
        self.answer(fails=True)

    def advance(self) -> None:
        """Let the next worker read and answer one message."""
        moves = self.moves
        if moves.phase not in CLAIMED_PHASES:
            return
        slot = moves.attempt.slot
        self.send_next()
        if slot.owed_s is not None:
            assert moves.take(slot, self.now) is None, "the worker owes an answer"
            self.hear_next()

    def send_next(self) -> None:
        """Send a message to the next worker, which does not answer it yet."""
        if self.moves.phase in CLAIMED_PHASES:
            slot = self.moves.attempt.slot
            if outgoing := self.moves.take(slot, self.now):
                past = outgoing.request.rebuild.units
                self.heard[slot] += [unit.sequence for unit in past]
            self.execute()

    def hear_next(self) -> None:
        """Let the next worker answer the last message to it."""
        moves = self.moves
        slot = moves.attempt.slot
        if moves.phase not in CLAIMED_PHASES or slot.owed_s is None:
            return
        moves.next_heard("opened")
        if moves.phase in LAST_SENT_PHASES:
            self.give_up(moves.rebuilt(self.now))
        elif moves.phase in (MovePhase.STARTING, MovePhase.LOST_STARTING):
            assert moves.next_opened(OPENED)
        self.execute()

    def give_up(self, given_up: GivenUp | None) -> None:
        if given_up:
            self.outcomes.append(given_up.failed.sequence)

    def lose(self) -> None:
        moves = self.moves
        self.wait()
        if moves.can_leave(MoveCause.WORKER_LOST, self.now):
            if moves.phase not in LOST_PHASES:
                self.held.discard(moves.present)
            self.give_up(moves.lose(MoveCause.WORKER_LOST, self.now))
            self.execute()

    def fail_next(self) -> None:
        """Lose the next worker, or the request for its slot."""
        if self.moves.phase in PREPARING:
            self.moves.fail(self.now)
            self.execute()
        elif self.moves.phase in LOST_PHASES:
            self.lose()

    def drain(self) -> None:
        if self.moves.phase not in LOST_PHASES:
            self.moves.drains()
            self.execute()

    def drain_next(self) -> None:
        if self.moves.phase in CLAIMED_PHASES:
            self.moves.next_leaves(is_stuck=False, now=self.now)
            self.execute()

    def undrain(self) -> None:
        moves = self.moves
        if moves.phase not in LOST_PHASES:
            moves.undrained(self.now)
            self.execute()
            assert moves.phase not in PREPARING or moves.attempt.cause is not MoveCause.DRAIN

    def undrain_next(self) -> None:
        if self.moves.phase in CLAIMED_PHASES:
            self.moves.next_undrained()

    def stick_next(self) -> None:
        if self.moves.phase in CLAIMED_PHASES:
            self.moves.next_leaves(is_stuck=True, now=self.now)
            self.execute()

    def be_late(self) -> None:
        self.moves.late(self.now)
        self.execute()

    def be_stuck(self) -> None:
        if self.moves.phase not in LOST_PHASES:
            self.moves.stuck(self.now)
            self.execute()

    def expire(self) -> None:
        if self.moves.phase not in LOST_PHASES:
            self.moves.expire(self.now)
            self.execute()

    def wait(self) -> None:
        self.now = Moment(self.now.monotonic_s + 15.0, 0)

    def close(self) -> None:
        self.moves.close(self.now)
        self.held.discard(self.moves.present)
        self.execute()


ACTS: tuple[Callable[[Machine], None], ...] = (
    *(Machine.add, Machine.add, Machine.send, Machine.send, Machine.answer, Machine.answer),
    *(Machine.claim, Machine.claim, Machine.advance, Machine.advance, Machine.advance),
    *(Machine.send_several, Machine.progress, Machine.progress, Machine.be_late, Machine.lose),
    *(Machine.pause, Machine.fail_unit, Machine.claim_same, Machine.permit, Machine.send_next),
    *(Machine.hear_next, Machine.lose, Machine.fail_next, Machine.drain, Machine.drain_next),
    *(Machine.stick_next, Machine.be_late, Machine.be_stuck, Machine.expire, Machine.wait),
    *(Machine.undrain, Machine.undrain_next),
)
_ACT = st.sampled_from(ACTS)
_LOSSES = st.lists(st.sampled_from([Machine.lose_claimed, Machine.lose_opening]), max_size=2)


@settings(max_examples=400, deadline=None)
@given(st.lists(_ACT, max_size=80), _LOSSES, st.sampled_from([JOURNAL_BYTES, 200_000]))
def test_random_events_break_no_rule(
    acts: list[Callable[[Machine], None]],
    losses: list[Callable[[Machine], None]],
    journal_bytes: int,
) -> None:
    machine = Machine(journal_bytes=journal_bytes)
    machine.begin(losses)
    for act in acts:
        act(machine)
    machine.close()
    assert machine.moves.phase is MovePhase.CLOSED
    assert not machine.held
    assert not machine.acquiring
    assert machine.permits.free_count == machine.permit_count
    assert machine.space.used_bytes == 0
    assert machine.moves.take(machine.moves.present, machine.now) is None
    assert not machine.moves.overdue_slots(0.0, machine.now)


@settings(max_examples=200, deadline=None)
@given(st.lists(_ACT, max_size=60))
def test_every_unit_has_one_outcome_when_all_workers_answer(
    acts: list[Callable[[Machine], None]],
) -> None:
    machine = Machine()
    machine.begin()
    for act in acts:
        act(machine)
    moves = machine.moves
    for _ in range(5 * (len(acts) + 10)):
        machine.claim()
        machine.hear_next()
        machine.advance()
        machine.send()
        machine.answer()
    assert moves.queue.take() is None
    assert machine.outcomes == list(range(machine.sent_count))
    assert machine.sent_count == moves.queue.unit_count
