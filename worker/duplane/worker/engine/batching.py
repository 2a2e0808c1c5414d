"""Batch formation: which units and which chats run in the next round.

Units without pictures are small, so all of them run in the next round. Units with pictures may have
thousands of rows. They are taken by age until they have `rows_per_round` rows together; the oldest
one is taken even if it has more. So a round has at most `max(rows_per_round, largest unit)` rows of
such units. A unit without pictures waits until the running round ends; a unit with pictures may
wait one more round for each older unit with pictures.
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
    """

    units: list[Unit] = field(default_factory=list[Unit])
    failed: list[tuple[SlotChannel, FailedUnit]] = field(
        default_factory=list[tuple[SlotChannel, FailedUnit]]
    )
    chat_slots: list[int] = field(default_factory=list[int])


def form_batch(
    channels: Iterable[SlotChannel], row_count: Callable[[Unit], int], rows_per_round: int
) -> Batch:
    """Take the oldest unit of each ready slot, within the row limit. The caller holds the lock."""
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
