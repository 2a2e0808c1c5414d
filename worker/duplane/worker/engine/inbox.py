"""The inbox: the bounded queue of one conversation's units that wait for the device.

If the inbox is full, the oldest unit is dropped. The order of the units never changes.
Requests to speak are never dropped. The inbox has no lock of its own: the device thread's lock
guards it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from duplane.fabric.bounds import MAX_SPEECH_REQUESTS
from duplane.worker.engine.events import FailedUnit
from duplane.worker.engine.unit_record import UnitRecord
from duplane.worker.models.types import SpeechOutcome, SpeechResult, Unit, too_many

_UNIT_CAPACITY = 4
# The inbox holds at most this many answers to refused units. This bound is separate from that of
# units, so that many invalid units do not push out valid ones.
_FAILED_CAPACITY = 16
_RESULT_CAPACITY = 64  # results of requests to speak that a unit can have before it runs

Entry = UnitRecord | FailedUnit


class Inbox:
    """A queue of units, and of answers to refused units at the positions of those units.

    `entries` holds the waiting entries, oldest first. If a unit with `force_listen` is dropped, the
    next unit gets the flag, so that an interruption is never lost. It also gets the requests to
    speak; each unit has only a few, and so do a few units together.
    """

    def __init__(self, capacity: int = _UNIT_CAPACITY) -> None:
        self._capacity = {UnitRecord: capacity, FailedUnit: _FAILED_CAPACITY}
        self.entries: deque[Entry] = deque()

    def put(self, entry: Entry) -> Entry | None:
        """Append an entry. If there are then too many of its type, drop and return the oldest."""
        self.entries.append(entry)
        entry_type = type(entry)
        alike = [waiting for waiting in self.entries if type(waiting) is entry_type]
        if len(alike) <= self._capacity[entry_type]:
            return None
        dropped, following = alike[:2]
        self.entries.remove(dropped)
        if isinstance(dropped, UnitRecord) and isinstance(following, UnitRecord):
            following.unit = _merged(dropped.unit, following.unit)
        if isinstance(dropped, UnitRecord):
            dropped.drop_input()
        return dropped


def _merged(dropped: Unit, following: Unit) -> Unit:
    """Return the following unit with what must not be lost of the dropped one.

    As in the conversation, a forced listen ends earlier requests, and more than
    `MAX_SPEECH_REQUESTS` are refused. Of more than `_RESULT_CAPACITY` results, the newest are kept.
    """
    results, requests = dropped.speech_results, dropped.speech + following.speech
    if following.force_listen:
        requests = following.speech
        results += tuple(
            SpeechResult(request.number, SpeechOutcome.INTERRUPTED) for request in dropped.speech
        )
    results += following.speech_results
    results += tuple(too_many(request.number) for request in requests[MAX_SPEECH_REQUESTS:])
    return replace(
        following,
        force_listen=dropped.force_listen or following.force_listen,
        speech=requests[:MAX_SPEECH_REQUESTS],
        speech_results=results[-_RESULT_CAPACITY:],
    )
