"""Chooses the work of the next round of the device thread. Pure.

A round is a sequence of launches. A launch is one call of `Model.advance`: first the units, then
an opening, the chats, a rebuild and a voice. Each kind is chosen when its turn comes. So a chat has
its first step in the round that starts it, a voice is computed in the round that first needs it,
and a session that has ended meanwhile has no work. A row is one embedding of the model's input.
With these bounds

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

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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

    There is no answer and no launch if there is no work. `launches` reads the channels again for
    each launch, so the caller holds the lock of the device thread for each `next`.
    """

    answers: list[tuple[int, FailedUnit]]
    launches: Iterator[Launch]


_ItemT = TypeVar("_ItemT", bound=Item)
_Waiting = tuple[SlotChannel, UnitRecord, RunUnit | Continue]


def choose(channels: Collection[SlotChannel], rows_per_round: int) -> Round:
    """Choose the units of a round and take them from the inboxes; `launches` chooses the rest.

    Of the conversations and chats that open, of those that await a voice, and of those that are
    rebuilt, only the one that began first continues. If they alternated, all of them would finish
    late, and running conversations would wait for several of them. A conversation opens when no
    earlier prompt is unfinished; a chat starts beside a prompt. The caller holds the lock of the
    device thread.
    """
    answers: list[tuple[int, FailedUnit]] = []
    waiting = [found for channel in _ready(channels) if (found := _next_unit(channel, answers))]
    waiting += [
        (channel, channel.begun, item)
        for channel, item in _unfinished(channels, Part.PICTURES)
        if channel.begun is not None
    ]
    units = _unit_launches(waiting, rows_per_round)
    return Round(answers, _launches(channels, units, rows_per_round))


def _launches(
    channels: Collection[SlotChannel], units: Iterable[Launch], rows_per_round: int
) -> Iterator[Launch]:
    """Yield the launches of units, then choose each further launch when it is asked for."""
    yield from units
    yield from _opening_launches(channels, rows_per_round)
    chats = {own.slot: item for own, item in _unfinished(channels, Part.CHAT) if own.credit}
    if chats:
        yield Launch(dict(chats), rows_per_round)
    rebuilt = [channel for channel in _ready(channels) if channel.past_units is not None]
    oldest = min(rebuilt, key=lambda channel: channel.rebuild_since or 0, default=None)
    if oldest is not None:
        item = Rebuild(oldest.slot, oldest.past_units or ())
        yield Launch({oldest.slot: item}, rows_per_round)
    if voice := _oldest(_unfinished(channels, Part.VOICE)):
        yield Launch({voice.slot: voice}, rows_per_round)


def _opening_launches(channels: Collection[SlotChannel], rows_per_round: int) -> Iterator[Launch]:
    """Yield the launches of one slot that opens and of one prompt, which may be the same."""
    prompt = _oldest(_unfinished(channels, Part.PROMPT))
    # Both are chosen here. Otherwise a conversation would open behind a prompt that ends now, and
    # the round would feed the rows of two prompts.
    kinds = Open | StartChat if prompt is None else StartChat
    new = [(own, own.next) for own in _active(channels) if isinstance(own.next, kinds)]
    if prompt is not None:
        yield Launch({prompt.slot: prompt}, rows_per_round)
    if first := _oldest((own, item) for own, item in new if not own.is_muted):
        yield Launch({first.slot: first}, rows_per_round)


def _active(channels: Collection[SlotChannel]) -> list[SlotChannel]:
    """Return the channels of sessions that have not ended."""
    return [channel for channel in channels if not channel.is_muted]


def _ready(channels: Collection[SlotChannel]) -> list[SlotChannel]:
    """Return the channels of open conversations without unfinished work."""
    return [own for own in _active(channels) if own.next is None and own.is_ready]


def _unfinished(
    channels: Collection[SlotChannel], part: Part
) -> list[tuple[SlotChannel, Continue]]:
    """Return the channels whose unfinished work is `part`, and its next item."""
    return [
        (channel, item)
        for channel in _active(channels)
        if isinstance(item := channel.next, Continue) and item.part is part
    ]


def _oldest(waiting: Iterable[tuple[SlotChannel, _ItemT]]) -> _ItemT | None:
    """Return the item of the work that began first; None if there is none."""
    oldest = min(waiting, key=lambda own: own[0].since, default=None)
    return None if oldest is None else oldest[1]


def _next_unit(channel: SlotChannel, answers: list[tuple[int, FailedUnit]]) -> _Waiting | None:
    """Return the oldest unit of the inbox, and take the answers before it from the inbox."""
    entries = channel.inbox.entries
    while entries:
        entry = entries[0]
        if isinstance(entry, UnitRecord):
            return channel, entry, RunUnit(entry.unit)
        answers.append((channel.slot, entry))
        channel.inbox.take()
    return None


def _unit_launches(waiting: Sequence[_Waiting], rows_per_round: int) -> list[Launch]:
    """Return a launch with all units without pictures, and with those with pictures that fit.

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
    launches: list[Launch] = []
    if fitting:
        launches.append(_unit_launch(fitting, rows_per_round))
    if ahead:
        launches.append(_unit_launch(ahead, rows_per_round, feeds_ahead=True))
    return launches


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
