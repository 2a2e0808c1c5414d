"""The queue of messages from one session to the worker: units and requests. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from duplane.edge.dialects.actions import NO_TAG, NOTHING_DROPPED, Append, Dropped, Tag
from duplane.edge.payload.rates import INPUT_RATE_HERTZ
from duplane.edge.session.receipt import Receipt
from duplane.edge.session.speech_requests import SpeechRequests
from duplane.edge.session.unit_assembler import UnitAssembler
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.model import ModelFormat
from duplane.fabric.v1 import session_pb2


class SentUnit(NamedTuple):
    """A unit that has no outcome yet.

    `request` is kept only if the unit may have to be sent again. A unit is a suspect if the session
    has left a worker at which this unit was the oldest one without an outcome.
    """

    tag: Tag
    ordinal: int
    request: session_pb2.ConverseRequest | None = None
    is_suspect: bool = False


# Stands for a unit that had its outcome before, or that was never sent.
UNKNOWN = SentUnit(NO_TAG, -1)


class Outgoing(NamedTuple):
    """A message for a worker. `receipt` is that of a unit that is sent for the first time."""

    request: session_pb2.ConverseRequest
    receipt: Receipt | None = None


class Recut(NamedTuple):
    """How the units that wait were cut again.

    Where n units were complete, now `counts[n]` are. `dropped` has the receipts of the units that
    the bound of the queue has dropped.
    """

    counts: Sequence[int]
    dropped: Sequence[Receipt]


class Held(NamedTuple):
    """How much data of the client a queue holds, beside a few texts to speak."""

    unit_count: int  # complete units that wait
    request_count: int  # requests that wait
    sent_count: int  # units without an outcome
    rest_bytes: int  # audio of the incomplete unit
    frame_count: int  # pictures of the incomplete unit


class RequestQueue:
    """A bounded queue of units and requests. A full queue drops its oldest unit.

    Units wait only while no worker can get them. If a dropped unit was forced to listen, the next
    unit is forced to listen. A unit gets its sequence number when it is taken from the queue, so
    the worker sees no gap in the numbers. The tag of a unit is kept until the unit has its outcome.

    After `take_back`, the units without an outcome are taken again, for another worker, with the
    same numbers. Then only one unit at a time is sent, until no unit waits: a worker would drop
    units that come faster than it can run them.
    """

    # The first bound limits the sent units that are remembered with their tags; older ones are
    # forgotten. The second bound limits the duration of those that are kept whole; older ones
    # cannot be sent again.
    MAX_SENT = 1024
    _MAX_KEPT_S = 32

    def __init__(self, frame_count: int) -> None:
        self.is_catching_up = False  # one unit is sent at a time
        self.speech = SpeechRequests()  # they are sent with units
        self.sent: dict[int, SentUnit] = {}  # units that the present worker has, by sequence
        self._assembler = UnitAssembler(frame_count)
        # Units, each with the times at which its last append was received, read and parsed.
        self._waiting: deque[tuple[Append, Receipt]] = deque()
        # Ordinal of the first unit that waits; a unit's ordinal is its number among all, from 0.
        self._first_ordinal = 0
        self._requests: deque[tuple[int, session_pb2.ConverseRequest]] = deque()
        # Units that were sent to a worker that the session has left.
        self._returned: deque[tuple[int, SentUnit]] = deque()
        # The pause that is in effect at the worker.
        self._pause: session_pb2.ConverseRequest | None = None
        self._next_sequence = 0
        self.taken_sample_count = 0  # samples of the units that were taken or dropped
        self._dropped_count = 0
        self._force_listen = False  # a dropped unit was forced to listen

    @property
    def unit_count(self) -> int:
        """The number of units that were added so far."""
        return self._first_ordinal + len(self._waiting)

    @property
    def held(self) -> Held:
        """What the queue holds now."""
        waiting = len(self._waiting), len(self._requests), len(self.sent)
        return Held(*waiting, *self._assembler.held)

    def restore(self, next_sequence: int) -> None:
        """Begin with units of another edge before, whose numbers are below `next_sequence`."""
        self._next_sequence = self._first_ordinal = next_sequence

    @property
    def dropped_total(self) -> int:
        """How many units were dropped before they got a sequence number."""
        return self._first_ordinal - self._next_sequence

    @property
    def model(self) -> ModelFormat:
        """The format of the units: the default until `use_model`."""
        return self._assembler.format

    def add(self, append: Append, receipt: Receipt, limit: int) -> Sequence[Receipt]:
        """Add audio and pictures. Return the receipts of the units that `limit` drops."""
        dropped: list[Receipt] = []
        for unit in self._assembler.add(append):
            self._waiting.append((unit, receipt))
            if len(self._waiting) > limit:
                oldest, its_receipt = self._waiting.popleft()
                self._count_samples(oldest)
                dropped.append(its_receipt)
                self._force_listen |= oldest.force_listen
                self._first_ordinal += 1
        self._dropped_count += len(dropped)
        return dropped

    def use_model(self, model: ModelFormat, receipt: Receipt, limit: int) -> Recut:
        """Cut units for this model from now on, and cut again what waits.

        Call this before the first unit is taken or a request is added. Audio of an incomplete unit
        gets `receipt`. Units of the former duration that were dropped count as so many units of the
        model.
        """
        former, units = self._assembler, list(self._waiting)
        if former.model == model:
            return Recut(range(self.unit_count + 1), ())
        self._dropped_count = model.unit_count(self._dropped_count * former.format.unit_s)
        self._assembler = former.for_model(model)
        self._waiting.clear()
        counts = [*range(self._first_ordinal + 1)]  # the units that were dropped keep their numbers
        dropped: list[Receipt] = []
        for unit, its_receipt in units:
            dropped += self.add(unit, its_receipt, limit)
            counts.append(self.unit_count)
        if rest := former.take_rest():
            dropped += self.add(rest, receipt, limit)
            counts[-1] = self.unit_count
        return Recut(counts, dropped)

    def drop_rest(self) -> None:
        """Drop the audio of the incomplete unit. What it demands of the model is demanded later."""
        rest = self._assembler.take_rest()
        if rest is not None:
            self._count_samples(rest)
            self._force_listen |= rest.force_listen

    def paused(self) -> None:
        """Note that the worker is paused: another edge has asked it to."""
        self._pause = session_pb2.ConverseRequest(pause=session_pb2.Pause())

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

    def take(self, *, is_kept: bool = False) -> Outgoing | None:
        """Remove and return the next message for the worker; None if there is none yet.

        With `is_kept`, a unit is kept until it has an outcome, to send it again if necessary.
        """
        if self.is_catching_up and self.sent:
            return None
        if self._returned:
            sequence, sent = self._returned.popleft()
            self.sent[sequence] = sent
            return Outgoing(sent.request) if sent.request else None
        if self._requests and self._requests[0][0] <= self._first_ordinal:
            request = self._requests.popleft()[1]
            self._pause = request if request.HasField("pause") else None
            return Outgoing(request)
        if not self._waiting:
            self.is_catching_up = False
            return None
        return self._take_unit(is_kept=is_kept)

    def _count_samples(self, unit: Append) -> None:
        """Count the samples of a unit that waits no more, at the rate of dialects A to C."""
        count = len(unit.audio) // SAMPLE_BYTES
        self.taken_sample_count += count * INPUT_RATE_HERTZ // unit.rate_hertz

    def _take_unit(self, *, is_kept: bool) -> Outgoing:
        appended, receipt = self._waiting.popleft()
        self._count_samples(appended)
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
        self._force_listen = False
        if self.speech.unfinished:
            self.speech.attach(unit)
        kept = request if is_kept else None
        self.sent[self._next_sequence] = SentUnit(appended.tag, self._first_ordinal, kept)
        self._next_sequence += 1
        self._first_ordinal += 1
        kept_count = min(self.model.unit_count(self._MAX_KEPT_S), self.MAX_SENT)
        if len(self.sent) > kept_count:
            self._bound_sent(kept_count)
        return Outgoing(request, receipt)

    def _bound_sent(self, kept_count: int) -> None:
        """Forget the oldest sent units, or only the audio of those before the last `kept_count`."""
        if len(self.sent) > self.MAX_SENT:
            del self.sent[next(iter(self.sent))]
        sequence = self._next_sequence - 1 - kept_count
        if sent := self.sent.get(sequence):
            self.sent[sequence] = sent._replace(request=None)

    def finish(self, sequence: int) -> SentUnit:
        """Return the unit with this number, which has its outcome now. Forget it and older units.

        The result is UNKNOWN if the unit already had an outcome.
        """
        sent = self.sent.get(sequence, UNKNOWN)
        if sent is not UNKNOWN:
            while self.sent and (oldest := next(iter(self.sent))) <= sequence:
                del self.sent[oldest]
        return sent

    def take_back(self, *, blames_unit: bool = True) -> tuple[int, SentUnit] | None:
        """Take the units without an outcome back from the worker, so that another one gets them.

        If the oldest of them is already a suspect, it is given up: it is removed and returned, with
        its sequence number. Otherwise it becomes a suspect. Without `blames_unit` nothing changes:
        the worker is left for another reason.

        Units that cannot be sent again are reported by `take_dropped`.
        """
        self.is_catching_up = True
        kept = [(sequence, sent) for sequence, sent in self.sent.items() if sent.request]
        self._dropped_count += len(self.sent) - len(kept)
        self.speech.take_back({sequence for sequence, _ in kept})
        self.sent.clear()
        if self._pause is not None:
            self._requests.appendleft((self._first_ordinal, self._pause))
            self._pause = None
        if not kept:
            return None
        if not blames_unit:
            self._returned.extendleft(reversed(kept))
            return None
        (sequence, oldest), *others = kept
        self._returned.extendleft(reversed(others))
        if oldest.is_suspect:
            return sequence, oldest
        self._returned.appendleft((sequence, oldest._replace(is_suspect=True)))
        return None

    def take_dropped(self, worker_unit_count: int) -> Dropped:
        """Return the counts of units and pictures dropped since the last call.

        They include `worker_unit_count`, the units that the worker has dropped.
        """
        frame_count = self._assembler.dropped_frame_count
        if not (self._dropped_count or frame_count or worker_unit_count):
            return NOTHING_DROPPED
        dropped = Dropped(self._dropped_count + worker_unit_count, frame_count)
        self._dropped_count = self._assembler.dropped_frame_count = 0
        return dropped
