"""Batch formation: which units and which chats run in the next round.

Units without pictures are small and run in the next round, all of them. Units with pictures may
have thousands of rows. In each round they share `rows_per_round`, the oldest first, and the oldest
runs even if it is larger. So a round has at most `max(rows_per_round, largest unit)` rows of them:
a unit without pictures waits for the rest of the running round, and one with pictures for at most
one round more per older unit with pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.slot_channel import SlotChannel
from duplane.worker.model.types import Unit


@dataclass(slots=True)
class Batch:
    """The work of one round: at most one unit for each slot, and the slots whose chats step.

    `failed` are the answers to refused units that were queued before the taken units.
    """

    units: list[Unit] = field(default_factory=list[Unit])
    failed: list[tuple[SlotChannel, FailedUnit]] = field(
        default_factory=list[tuple[SlotChannel, FailedUnit]]
    )
    chat_slots: list[int] = field(default_factory=list[int])


def form_batch(
    channels: Iterable[SlotChannel], row_count: Callable[[Unit], int], rows_per_round: int
) -> Batch:
    """Take the oldest unit of each ready slot, within the rows. The caller holds the lock."""
    batch = Batch()
    seeing: list[tuple[float, SlotChannel, Unit]] = []
    for channel in channels:
        if not channel.is_ready:
            continue
        if channel.credit:
            batch.chat_slots.append(channel.slot)
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
    return batch
