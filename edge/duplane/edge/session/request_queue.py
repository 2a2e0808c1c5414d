"""The queue of messages from one session to the worker: settings, units, requests. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from duplane.edge.dialects.actions import NO_TAG, NOTHING_DROPPED, Append, Dropped, Tag
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.unit_assembler import UnitAssembler
from duplane.fabric.v1 import session_pb2


class SentUnit(NamedTuple):
    """A unit that has no outcome yet.

    `request` is kept only if the unit may have to be sent again.
    """

    tag: Tag
    ordinal: int
    request: session_pb2.ConverseRequest | None = None


_UNKNOWN = SentUnit(NO_TAG, -1)


class RequestQueue:
    """A bounded queue of units and requests. A full queue drops its oldest unit.

    Units wait only until the conversation is open, and while the connection to the worker is full.
    If a dropped unit was forced to listen, the next unit is forced to listen. A unit gets its
    sequence number when it is taken from the queue, so the worker sees no gap in the numbers. The
    tag of a unit is kept until the unit has its outcome.

    After `move`, the units without an outcome are taken again, for another worker, with the same
    numbers. Then only one unit at a time is sent, until no unit waits: a worker would drop units
    that come faster than it can run them.
    """

    # The first bound limits the sent units that are remembered with their tags; older ones are
    # forgotten. The second bound limits those that are kept whole; older ones cannot be sent again.
    _MAX_SENT = 1024
    _MAX_KEPT = 32

    def __init__(self, limit: int, frame_count: int) -> None:
        self.limit = limit
        self.opening: session_pb2.ConverseRequest | None = None  # sent before units and requests
        self.is_open = False  # whether units and requests may be taken
        # Sent units are kept until they have an outcome, to send them again if necessary.
        self.keeps_units = False
        self.is_catching_up = False  # one unit is sent at a time
        self.has_dropped = False  # whether units were dropped since the last `take_dropped`
        # Units added so far; a unit's ordinal is its number in this count, from 0.
        self.unit_count = 0
        self.late_count = 0  # outcomes of units that already had an outcome
        self.total_dropped_count = 0  # units dropped so far before they were sent
        self.on_dropped: Callable[[Receipt], None] = lambda _: None
        self._assembler = UnitAssembler(frame_count)
        # Units, each with the times at which its last append was received, read and parsed.
        self._waiting: deque[tuple[Append, Receipt]] = deque()
        self._first_ordinal = 0  # ordinal of the first unit that waits
        self._requests: deque[tuple[int, session_pb2.ConverseRequest]] = deque()
        self._sent: dict[int, SentUnit] = {}
        # Units that were sent to a lost worker.
        self._returned: deque[tuple[int, SentUnit]] = deque()
        # The pause that is in effect at the worker.
        self._pause: session_pb2.ConverseRequest | None = None
        # The receipt of the unit that the last `take` returned; None if it returned no new unit.
        self.taken_receipt: Receipt | None = None
        self._next_sequence = 0
        self._dropped_count = 0
        self._force_listen = False  # a dropped unit was forced to listen

    def add(self, append: Append, receipt: Receipt) -> None:
        """Add audio and pictures."""
        for unit in self._assembler.add(append):
            self._waiting.append((unit, receipt))
            self.unit_count += 1
            if len(self._waiting) > self.limit:
                dropped, its_receipt = self._waiting.popleft()
                self.on_dropped(its_receipt)
                self._force_listen |= dropped.force_listen
                self._first_ordinal += 1
                self._dropped_count += 1
                self.total_dropped_count += 1
        self.has_dropped = bool(self._dropped_count or self._assembler.dropped_frame_count)

    def add_request(self, request: session_pb2.ConverseRequest) -> None:
        """Add a request, which is taken after the units that wait now.

        If no unit separates several requests, only the last of them is kept. So the queue never has
        more requests than units.
        """
        requests = self._requests
        while requests and max(requests[-1][0], self._first_ordinal) == self.unit_count:
            requests.pop()
        while len(requests) > 1 and requests[1][0] <= self._first_ordinal:
            requests.popleft()
        requests.append((self.unit_count, request))

    def take(self) -> session_pb2.ConverseRequest | None:
        """Remove and return the next message for the worker; None if there is none yet."""
        self.taken_receipt = None
        if self.opening is not None:
            opening, self.opening = self.opening, None
            return opening
        if not self.is_open or (self.is_catching_up and self._sent):
            return None
        if self._returned:
            sequence, sent = self._returned.popleft()
            self._sent[sequence] = sent
            return sent.request
        if self._requests and self._requests[0][0] <= self._first_ordinal:
            request = self._requests.popleft()[1]
            self._pause = request if request.HasField("pause") else None
            return request
        if not self._waiting:
            self.is_catching_up = False
            return None
        appended, receipt = self._waiting.popleft()
        request = session_pb2.ConverseRequest()
        unit = request.unit  # filled in place, so that the audio is copied once
        unit.sequence = self._next_sequence
        unit.audio = appended.audio
        if appended.force_listen or self._force_listen:
            unit.force_listen = True
        if appended.frames:
            unit.video_frames.extend(appended.frames)
        if appended.max_slice_count is not None:
            unit.max_slice_count = appended.max_slice_count
        received = unit.receive_time
        received.seconds, received.nanos = divmod(receipt.received_ns, 1_000_000_000)
        self.taken_receipt = receipt
        self._force_listen = False
        kept = request if self.keeps_units else None
        self._sent[self._next_sequence] = SentUnit(appended.tag, self._first_ordinal, kept)
        self._next_sequence += 1
        self._first_ordinal += 1
        if len(self._sent) > self._MAX_KEPT:
            self._bound_sent()
        return request

    def _bound_sent(self) -> None:
        """Forget the oldest sent units, or only their audio."""
        if len(self._sent) > self._MAX_SENT:
            del self._sent[next(iter(self._sent))]
        sequence = self._next_sequence - 1 - self._MAX_KEPT
        if sent := self._sent.get(sequence):
            self._sent[sequence] = sent._replace(request=None)

    def finish(self, sequence: int) -> SentUnit:
        """Return the unit with this number, which has its outcome now. Forget it and older units.

        If the unit already had an outcome, its ordinal is -1.
        """
        sent = self._sent.get(sequence, _UNKNOWN)
        if sent is _UNKNOWN:
            self.late_count += 1
            return sent
        while self._sent and (oldest := next(iter(self._sent))) <= sequence:
            del self._sent[oldest]
        return sent

    @property
    def oldest_sent(self) -> int | None:
        """The sequence number of the oldest unit that the present worker has not answered yet."""
        return next((sequence for sequence, sent in self._sent.items() if sent.request), None)

    @property
    def has_unanswered(self) -> bool:
        """Whether the present worker has a unit that has no outcome."""
        return bool(self._sent)

    def move(self) -> None:
        """Close the queue until another worker is ready, which then gets the unanswered units.

        Unanswered units that cannot be sent again are reported by `take_dropped`.
        `total_dropped_count` does not include them, because it counts only units that were never
        sent.
        """
        self.opening = None
        self.is_open, self.is_catching_up = False, True
        kept = [(sequence, sent) for sequence, sent in self._sent.items() if sent.request]
        self._dropped_count += len(self._sent) - len(kept)
        self.has_dropped |= bool(self._dropped_count)
        self._returned.extendleft(reversed(kept))
        self._sent.clear()
        if self._pause is not None:
            self._requests.appendleft((self._first_ordinal, self._pause))
            self._pause = None

    def skip(self) -> None:
        """After `move`, do not send the oldest unanswered unit again.

        `finish` can still return it.
        """
        sequence, sent = self._returned.popleft()
        self._sent[sequence] = sent

    def take_dropped(self, worker_unit_count: int) -> Dropped:
        """Return the counts of units and pictures dropped since the last call.

        They include `worker_unit_count`, the units that the worker has dropped.
        """
        if not (self.has_dropped or worker_unit_count):
            return NOTHING_DROPPED
        frame_count = self._assembler.dropped_frame_count
        dropped = Dropped(self._dropped_count + worker_unit_count, frame_count)
        self._dropped_count = self._assembler.dropped_frame_count = 0
        self.has_dropped = False
        return dropped

    def close(self) -> None:
        """Close the queue: `take` returns nothing more."""
        self.opening = None
        self.is_open = False
