"""Forms the batch of the next round: chooses the units and the chats that run in it.

A row is one embedding of the model's input. Units without pictures have few rows, so all of them
run in the next round. Units with pictures may have thousands of rows. Of these, the oldest unit
always runs in the next round. Further units run with it, oldest first, if all of them together have
at most `rows_per_round` rows. So a unit without pictures waits only until the running round ends. A
unit with pictures may wait one more round for each older unit with pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.model.types import Unit


@dataclass(slots=True)
class Batch:
    """The work of one round: at most one unit per slot, and the slots whose chats run one step.

    `failed` are the answers to refused units that were queued before the units of this round.
    `rebuilding` is the slot whose past units are rebuilt in this round, if any. There is at most
    one, so that the units of other slots do not wait for several rebuilds.
    """

    units: list[Unit] = field(default_factory=list[Unit])
    failed: list[tuple[SlotChannel, FailedUnit]] = field(
        default_factory=list[tuple[SlotChannel, FailedUnit]]
    )
    chat_slots: list[int] = field(default_factory=list[int])
    rebuilding: SlotChannel | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the round has no work."""
        return not (self.units or self.failed or self.chat_slots or self.rebuilding)


def form_batch(
    channels: Iterable[SlotChannel], row_count: Callable[[Unit], int], rows_per_round: int
) -> Batch:
    """Take the oldest unit of each ready slot, within the limit of rows.

    Of the slots with past units to rebuild, only the one whose rebuild began first continues. If
    these slots took turns, all of them would finish late, perhaps after the edges have given up.
    The caller holds the lock of the device thread.
    """
    batch = Batch()
    seeing: list[tuple[float, SlotChannel, Unit]] = []
    rebuilding: list[SlotChannel] = []
    for channel in channels:
        if not channel.is_ready:
            continue
        if channel.credit:
            batch.chat_slots.append(channel.slot)
        if channel.past_units is not None:
            rebuilding.append(channel)
        while channel.inbox.entries:
            entry = channel.inbox.entries[0]
            if isinstance(entry, FailedUnit):
                batch.failed.append((channel, entry))
                channel.inbox.take()
                continue
            if entry.frames:
                seeing.append((entry.received_s, channel, entry))
            else:
                batch.units.append(entry)
                channel.inbox.take()
            break
    rows = 0
    for _, channel, unit in sorted(seeing, key=lambda waiting: waiting[0]):
        unit_rows = row_count(unit)
        if rows and rows + unit_rows > rows_per_round:
            continue
        rows += unit_rows
        batch.units.append(unit)
        channel.inbox.take()
    batch.rebuilding = min(rebuilding, key=lambda channel: channel.rebuild_number, default=None)
    return batch
