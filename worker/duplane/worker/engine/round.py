"""Chooses the work of the next round of the device thread. Pure.

A round is a list of launches, and a launch is one call of `Model.advance`. A row is one embedding
of the model's input. With these bounds

- S: slots; u: rows of a unit without pictures; R: `rows_per_round`;
- C: rows of one step of the chats; B: rows of one share of a rebuild;
- r: the time of a row; V: the time to compute the prompt of a voice,

a round and its units take at most

    units = r (S u + R)
    round = units + r (C + B + R) + 3 V

because it has a unit without pictures of each slot, R rows of units with pictures, one step of the
chats, one share of one rebuild with the voice of its turn, R rows of one prompt, the voice of one
conversation or chat that opens, and one voice of a next turn. If a conversation has no earlier unit
without an answer, its unit is answered within

    (n + v) round + units

where v is the number of conversations that await a voice, its own included, and n is 1 for a unit
without pictures, and 1 + 2 ⌈p / R⌉ for a unit with pictures, if this unit and the older ones have p
rows of units with pictures. A single picture that has more than R rows is fed whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.interface import Continue, Item, Open, Part, Rebuild, RunUnit, StartChat


@dataclass(slots=True)
class Launch:
    """One call of `Model.advance`: its items by slot, and the most rows of one item.

    `records` are the records of the units among the items, by slot. With `feeds_ahead`, the launch
    feeds only some pictures of its unit.
    """

    items: dict[int, Item]
    row_budget: int
    records: dict[int, UnitRecord] = field(default_factory=dict[int, UnitRecord])
    feeds_ahead: bool = False


@dataclass(slots=True)
class Round:
    """The launches of a round, and the answers to refused units that were queued before its units.

    There is no answer and no launch if there is no work.
    """

    answers: list[tuple[int, FailedUnit]] = field(default_factory=list[tuple[int, FailedUnit]])
    launches: list[Launch] = field(default_factory=list[Launch])


_Waiting = tuple[SlotChannel, UnitRecord, RunUnit | Continue]


def choose(channels: Iterable[SlotChannel], rows_per_round: int) -> Round:
    """Choose the work of a round, and take its units from the inboxes.

    Of the conversations and chats that open, of those that await a voice, and of those that are
    rebuilt, only the one that began first continues. If they alternated, all of them would finish
    late, and running conversations would wait for several of them. The caller holds the lock of the
    device thread.
    """
    chosen = Round()
    active = [channel for channel in channels if not channel.is_muted]
    ready = [channel for channel in active if channel.next is None and channel.is_ready]
    new = [channel for channel in active if isinstance(channel.next, Open | StartChat)]
    begun = [(channel, channel.next) for channel in active if isinstance(channel.next, Continue)]
    parts = {part: [own for own in begun if own[1].part is part] for part in Part}
    prompts = [channel for channel, _ in parts[Part.PROMPT]]
    _add_oldest(chosen, new, 0 if prompts else rows_per_round)
    waiting = [found for channel in ready if (found := _next_unit(channel, chosen))]
    waiting += [
        (channel, channel.begun, item)
        for channel, item in parts[Part.PICTURES]
        if channel.begun is not None
    ]
    _add_units(chosen, waiting, rows_per_round)
    chats = {channel.slot: item for channel, item in parts[Part.CHAT] if channel.credit}
    if chats:
        chosen.launches.append(Launch(dict(chats), rows_per_round))
    rebuilt = [channel for channel in ready if channel.past_units is not None]
    oldest = min(rebuilt, key=lambda channel: channel.rebuild_since or 0, default=None)
    if oldest is not None:
        item = Rebuild(oldest.slot, oldest.past_units or ())
        chosen.launches.append(Launch({oldest.slot: item}, rows_per_round))
    _add_oldest(chosen, prompts, rows_per_round)
    _add_oldest(chosen, [channel for channel, _ in parts[Part.VOICE]], rows_per_round)
    return chosen


def _next_unit(channel: SlotChannel, chosen: Round) -> _Waiting | None:
    """Return the oldest unit of the inbox, and take the answers before it from the inbox."""
    entries = channel.inbox.entries
    while entries:
        entry = entries[0]
        if isinstance(entry, UnitRecord):
            return channel, entry, RunUnit(entry.unit)
        chosen.answers.append((channel.slot, entry))
        channel.inbox.take()
    return None


def _add_oldest(chosen: Round, channels: Sequence[SlotChannel], row_budget: int) -> None:
    """Add a launch with the channel whose work began first, if there is one."""
    oldest = min(channels, key=lambda channel: channel.since, default=None)
    if oldest is not None and oldest.next is not None:
        chosen.launches.append(Launch({oldest.slot: oldest.next}, row_budget))


def _add_units(chosen: Round, waiting: Sequence[_Waiting], rows_per_round: int) -> None:
    """Add a launch with all units without pictures, and with those with pictures that fit.

    Units with pictures are taken oldest first. If the oldest has more rows than a round, another
    launch feeds a part of it.
    """
    fitting = [own for own in waiting if not own[1].unit.frames]
    seeing = [own for own in waiting if own[1].unit.frames]
    ahead: list[_Waiting] = []
    rows_left = rows_per_round
    for own in sorted(seeing, key=lambda own: own[1].received_s):
        rows = own[2].rows
        if rows <= rows_left:
            fitting.append(own)
            rows_left -= rows
        elif rows_left == rows_per_round:
            ahead.append(own)
            break
    if fitting:
        chosen.launches.append(_unit_launch(fitting, rows_per_round))
    if ahead:
        chosen.launches.append(_unit_launch(ahead, rows_per_round, feeds_ahead=True))


def _unit_launch(
    units: Sequence[_Waiting], row_budget: int, *, feeds_ahead: bool = False
) -> Launch:
    """Return a launch with these units, and take those that have not begun from their inboxes."""
    for channel, record, item in units:
        if isinstance(item, RunUnit):
            channel.inbox.take()
            channel.begun = record
    return Launch(
        {channel.slot: item for channel, _, item in units},
        row_budget,
        {channel.slot: record for channel, record, _ in units},
        feeds_ahead,
    )
