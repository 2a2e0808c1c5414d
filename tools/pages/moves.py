"""The section of the protocol page about moves, from the table of the edge's state machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from duplane.edge.session.move_table import TRANSITIONS, MoveEvent, MovePhase

_HEAD = """\
## How a session moves to another worker

A duplex session is in one of these phases. In dialects B and C, its client sees one note
(`session.moving` or `moving`) when the worker is lost after the conversation was ready; the
next answer comes from another worker. The present worker gets the units; the next worker is
the one to which the session moves.
"""
PHASES: Mapping[MovePhase, str] = {
    MovePhase.START: "the edge has not sent the settings to the first worker yet",
    MovePhase.OPENING: "the first worker opens the conversation",
    MovePhase.SETTLED: "the conversation is at one worker",
    MovePhase.FIXED: "the same, but without a journal: the session ends with its worker",
    MovePhase.ACQUIRING: "the edge acquires a slot of another worker",
    MovePhase.WAITING: "the edge has this slot, and waits for a permit to rebuild the conversation",
    MovePhase.STARTING: "the next worker opens the conversation",
    MovePhase.CATCHING_UP: "the next worker rebuilds past units, the present one answers new ones",
    MovePhase.HOLDING: "units wait until the present worker has answered those that it has",
    MovePhase.CHANGING: "the next worker rebuilds the last past units; units wait",
    MovePhase.OVERTAKING: (
        "the next worker rebuilds the last past units, and the present one gets new ones: the"
        " session takes whichever is ready first"
    ),
    MovePhase.LOST_EARLY: (
        "the worker is lost before it has opened the conversation, and the edge acquires another"
        " slot"
    ),
    MovePhase.LOST_ACQUIRING: "the present worker is lost, and the edge acquires another slot",
    MovePhase.LOST_STARTING: "the present worker is lost, and the next one opens the conversation",
    MovePhase.LOST_CATCHING_UP: "the present worker is lost, and the next one rebuilds past units",
    MovePhase.LOST_CHANGING: (
        "the present worker is lost, and the next one rebuilds the last past units"
    ),
    MovePhase.PARKED: "the client is away, and the session has given its slot back",
    MovePhase.CLOSED: "the session has ended",
}
EVENTS: Mapping[MoveEvent, str] = {
    MoveEvent.OPEN_SENT: "the settings are sent to the first worker",
    MoveEvent.OPENED: "the first worker has opened the conversation",
    MoveEvent.GIVEN_UP: "the journal is given up, or there is none",
    MoveEvent.DRAINS: "the present worker drains",
    MoveEvent.UNDRAINED: "the drain of the present worker was taken back, so the session stays",
    MoveEvent.LATE: "the present worker owes an answer for too long, or its device is stuck",
    MoveEvent.LOST: "the present worker is lost",
    MoveEvent.ANSWERED: "the present worker has answered in time, so the session stays",
    MoveEvent.CLAIMED: "the slot is claimed",
    MoveEvent.PERMITTED: "there is a permit: the conversation may be rebuilt",
    MoveEvent.NEXT_OPENED: "the next worker has opened the conversation",
    MoveEvent.HELD: "only few past units are left, so units wait from now on",
    MoveEvent.LAST_SENT: "the last past units are sent to the next worker",
    MoveEvent.REBUILT: "the next worker has rebuilt them: now it is the present worker",
    MoveEvent.NEXT_LOST: "the next worker cannot be used, or there is no slot",
    MoveEvent.EXPIRED: "the next worker has not rebuilt the last past units in time",
    MoveEvent.PARKED: "the client is away for too long",
    MoveEvent.RETURNED: "the client is back",
    MoveEvent.CLOSED: "the session has ended",
}


def move_section() -> Iterator[str]:
    """Yield the lines of the section."""
    yield _HEAD
    yield from ("| phase | | event and next phase |", "| --- | --- | --- |")
    for phase, text in PHASES.items():
        rows = [
            f"{event.name} **{after.name}**"
            for (before, event), after in TRANSITIONS.items()
            if before is phase
        ]
        yield f"| {phase.name} | {text} | {', '.join(rows)} |"
    yield from ("", "| event | |", "| --- | --- |")
    yield from (f"| {event.name} | {text} |" for event, text in EVENTS.items())
    yield ""
