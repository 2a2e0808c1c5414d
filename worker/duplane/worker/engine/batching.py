"""Forms the batch of the next round: chooses the units and the chats that run in it.

A row is one embedding of the model's input. Units without pictures have few rows, so all of them
run in the next round. Units with pictures may have thousands of rows. They run oldest first, with
at most `rows_per_round` rows together in one round. If the oldest of them alone has more rows, each
round feeds some of its pictures, until at most `rows_per_round` of its rows are left.

So one round has at most: a unit without pictures in each slot; `rows_per_round` rows of units with
pictures; one step of the chats, with at most `PREFILL_ROWS` rows of prompts; a bounded part of one
rebuild; `rows_per_round` rows of one prompt; and the prompts of three voices: of one new
conversation, of the rebuild, and of one conversation whose turn has ended and whose voice is no
longer cached. When the earlier units of its conversation have their results, a unit without
pictures waits for the running round, and the next round gives its result. A unit with pictures
waits longer: one more round for every `rows_per_round` rows of this unit and of older ones, and
another round if these rows do not fill the rounds. If the conversation awaits its voice, the unit
waits one more round for this voice, and for each voice that was awaited before. A single picture
that has more rows than `rows_per_round` is fed whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.models.minicpm_o.types import Unit


@dataclass(slots=True)
class Batch:
    """The work of one round: at most one unit per slot, and the slots whose chats run one step.

    `failed` are the answers to refused units that were queued before the units of this round.
    `ahead` is the slot with a unit of which this round feeds only some pictures, if any.
    `rebuilding` is the slot whose past units are rebuilt in this round, if any. There is at most
    one, so that the units of other slots do not wait for several rebuilds.
    """

    units: list[Unit] = field(default_factory=list[Unit])
    failed: list[tuple[SlotChannel, FailedUnit]] = field(
        default_factory=list[tuple[SlotChannel, FailedUnit]]
    )
    ahead: SlotChannel | None = None
    chat_slots: list[int] = field(default_factory=list[int])
    rebuilding: SlotChannel | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the round has no work."""
        units = self.units or self.failed or self.ahead
        return not (units or self.chat_slots or self.rebuilding)


def form_batch(
    channels: Iterable[SlotChannel],
    awaiting_voice: Collection[int],
    row_count: Callable[[Unit], int],
    rows_per_round: int,
) -> Batch:
    """Take the oldest unit of each ready slot, within the limit of rows.

    A slot in `awaiting_voice` has no unit in the batch, because the unit may need the voice.
    Of the slots with past units to rebuild, only the one whose rebuild began first continues. If
    these slots alternated, all of them would finish late, perhaps after the edges have given up.
    The caller holds the lock of the device thread.
    """
    batch = Batch()
    seeing: list[tuple[SlotChannel, Unit]] = []
    rebuilding: list[SlotChannel] = []
    for channel in channels:
        if not channel.is_ready or channel.slot in awaiting_voice:
            continue
        if channel.credit:
            batch.chat_slots.append(channel.slot)
        if channel.past_units is not None:
            rebuilding.append(channel)
        unit, entries = channel.begun, channel.inbox.entries
        while unit is None and entries:
            entry = entries[0]
            if isinstance(entry, FailedUnit):
                batch.failed.append((channel, entry))
                entries.popleft()
            else:
                unit = entry
        if unit is not None and unit.frames:
            seeing.append((channel, unit))
        elif unit is not None:
            batch.units.append(unit)
            entries.popleft()
    if seeing:
        seeing.sort(key=lambda waiting: waiting[1].received_s)
        _take_seeing(batch, seeing, row_count, rows_per_round)
    batch.rebuilding = min(rebuilding, key=lambda channel: channel.rebuild_number, default=None)
    return batch


def _take_seeing(
    batch: Batch,
    seeing: Sequence[tuple[SlotChannel, Unit]],
    row_count: Callable[[Unit], int],
    rows_per_round: int,
) -> None:
    """Take units with pictures, oldest first, within the limit of rows."""
    rows_left = rows_per_round
    for channel, unit in seeing:
        rows = channel.begun_rows if channel.begun else row_count(unit)
        if rows > rows_left and rows_left < rows_per_round:
            continue
        if not channel.begun:
            channel.inbox.entries.popleft()
        if rows > rows_left:
            channel.begun, channel.begun_rows, batch.ahead = unit, rows, channel
            return
        rows_left -= rows
        batch.units.append(unit)
        channel.begun = None
