"""The queue of what one session sends to the worker: its settings, units and requests. Pure."""

from __future__ import annotations

from collections import deque

from duplane.edge.dialects.actions import NO_TAG, NOTHING_DROPPED, Append, Dropped, Tag
from duplane.edge.session.unit_assembler import UnitAssembler
from duplane.fabric.v1 import session_pb2


class RequestQueue:
    """A bounded queue of units, which drops the oldest, and the tags of units without an outcome.

    Units wait only before the conversation is open, or while the worker's host takes nothing.
    If a dropped unit had to listen, the next unit must listen. Units get their sequence number
    when they are taken, so that the worker sees no gap.
    """

    # Most units sent without an outcome. Above it the oldest tags are deleted.
    _MAX_SENT = 1024

    def __init__(self, limit: int, frame_count: int) -> None:
        self.limit = limit
        self.opening: session_pb2.ConverseRequest | None = None  # taken before anything else
        self.is_open = False  # units and requests may be taken
        self.has_dropped = False  # since the last call of `take_dropped`
        self.unit_count = 0  # units so far; each has its ordinal, from 0
        self.total_dropped_count = 0  # units so far that were dropped here
        self._assembler = UnitAssembler(frame_count)
        self._waiting: deque[tuple[Append, int]] = deque()  # with the wall time of its last audio
        self._first_ordinal = 0  # of the first waiting unit; all before were taken or dropped
        self._requests: deque[tuple[int, session_pb2.ConverseRequest]] = deque()
        self._sent: dict[int, tuple[Tag, int]] = {}
        self._next_sequence = 0
        self._dropped_count = 0
        self._force_listen = False  # a dropped unit had to listen, so the next one has to

    def add(self, append: Append, receive_wall_ns: int) -> None:
        """Add audio and pictures."""
        for unit in self._assembler.add(append):
            self._waiting.append((unit, receive_wall_ns))
            self.unit_count += 1
            if len(self._waiting) > self.limit:
                self._force_listen |= self._waiting.popleft()[0].force_listen
                self._first_ordinal += 1
                self._dropped_count += 1
                self.total_dropped_count += 1
        self.has_dropped = bool(self._dropped_count or self._assembler.dropped_frame_count)

    def add_request(self, request: session_pb2.ConverseRequest) -> None:
        """Add a request that is taken after the units that wait now.

        Of several requests without a unit between them only the last is kept, so that there are
        never more requests than units.
        """
        requests = self._requests
        while requests and max(requests[-1][0], self._first_ordinal) == self.unit_count:
            requests.pop()
        while len(requests) > 1 and requests[1][0] <= self._first_ordinal:
            requests.popleft()
        requests.append((self.unit_count, request))

    def take(self) -> session_pb2.ConverseRequest | None:
        """Remove and return the next message for the worker, None if there is none yet."""
        if self.opening is not None:
            opening, self.opening = self.opening, None
            return opening
        if not self.is_open:
            return None
        if self._requests and self._requests[0][0] <= self._first_ordinal:
            return self._requests.popleft()[1]
        if not self._waiting:
            return None
        appended, receive_wall_ns = self._waiting.popleft()
        request = session_pb2.ConverseRequest()
        unit = request.unit  # filled in place, so that the audio is copied once
        unit.sequence = self._next_sequence
        unit.audio = appended.audio
        unit.force_listen = appended.force_listen or self._force_listen
        unit.video_frames.extend(appended.frames)
        if appended.max_slice_count is not None:
            unit.max_slice_count = appended.max_slice_count
        unit.receive_time.FromNanoseconds(receive_wall_ns)
        self._force_listen = False
        self._sent[self._next_sequence] = (appended.tag, self._first_ordinal)
        self._next_sequence += 1
        self._first_ordinal += 1
        if len(self._sent) > self._MAX_SENT:
            del self._sent[next(iter(self._sent))]
        return request

    def finish(self, sequence: int) -> tuple[Tag, int]:
        """Return tag and ordinal of a unit that has its outcome; delete it and all before it."""
        sent = self._sent.get(sequence, (NO_TAG, -1))
        while self._sent and (oldest := next(iter(self._sent))) <= sequence:
            del self._sent[oldest]
        return sent

    def take_dropped(self, worker_unit_count: int) -> Dropped:
        """Return what was dropped since the last call: here, and by the worker."""
        if not (self.has_dropped or worker_unit_count):
            return NOTHING_DROPPED
        frame_count = self._assembler.dropped_frame_count
        dropped = Dropped(self._dropped_count + worker_unit_count, frame_count)
        self._dropped_count = self._assembler.dropped_frame_count = 0
        self.has_dropped = False
        return dropped

    def close(self) -> None:
        """Let nothing more be taken."""
        self.opening = None
        self.is_open = False
