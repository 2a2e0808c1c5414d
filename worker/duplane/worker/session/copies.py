"""The copies of sessions that a worker keeps, so that another edge can continue them. Pure.

A copy has the settings of a session, its past units, and the deltas of the last seconds.
It exists only in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from duplane.fabric.bounds import MAX_KEEP_S, MAX_NOTE_BYTES, WINDOW_COUNT
from duplane.fabric.durations import to_duration, to_seconds
from duplane.fabric.errors import FabricError, Reason
from duplane.fabric.journal import Journal, JournalSpace, LossReason
from duplane.fabric.token_secrets import DIGEST_BYTES, is_secret_of
from duplane.fabric.v1 import session_pb2
from duplane.worker.session.fields import invalid

Response = TypeVar("Response", session_pb2.ConverseResponse, session_pb2.TakeOverResponse)

REPLAY_S = 30  # of which the deltas are kept, at most _REPLAY_BYTES of deltas
_REPLAY_BYTES = 4 * 1024 * 1024
# Approximate memory of a delta without its audio, its ids and its state.
_ENTRY_BYTES = 512
_ID_BYTES = 4
# Of past units in one message, unless it has only one: the event loop waits while it is made. The
# memory of larger messages comes from the system each time, so they take longer per byte.
_PART_BYTES = 128 * 1024


class SessionCopy:
    """The copy of one session.

    - `is_ready`: units can follow, because the conversation is not being rebuilt.
    - `is_detached`: no stream has the session, since the time `broken_s`.
    - `is_taken`: an edge has the session, which is to continue in a slot of another worker.
    - `is_deleted`: the copy is deleted or given up, and has no content.
    """

    def __init__(
        self, session_id: str, keep: session_pb2.Keep, space: JournalSpace, replay_count: int
    ) -> None:
        self.session_id = session_id
        self.hold_s = to_seconds(keep.hold)
        self.within_s = to_seconds(keep.within)
        self.granted = keep.granted
        self.attach_number = 0
        self.is_ready = True
        self.is_detached = False
        self.broken_s = 0.0
        self.is_taken = False
        self.is_deleted = False
        self.is_paused = False
        self.received_sequence = -1
        self.last_sequence = -1
        self.journal = Journal(space, keep.window_count)
        self._token_sha256 = keep.token_sha256
        self._client_sha256 = keep.client_sha256
        self._space = space
        self._pending: dict[int, session_pb2.ConverseRequest] = {}  # units without an outcome
        self._deltas = deque[session_pb2.Delta]()
        self._delta_bytes = 0
        self._replay_count = replay_count
        self._note = keep.edge_note
        self._note_sequence = -1  # see Unit.edge_note_sequence

    @property
    def is_settled(self) -> bool:
        """Whether every unit that the worker received has its outcome."""
        return not self._pending

    @property
    def byte_count(self) -> int:
        """The memory of the content."""
        return self.journal.byte_count + self._delta_bytes

    def accepts(self, secret: str) -> bool:
        """Return whether a caller may continue the session."""
        return is_secret_of(self._token_sha256, secret)

    def is_of(self, client_sha256: bytes) -> bool:
        """Return whether the session is this client's. Edges of older releases name no client."""
        own = self._client_sha256
        return not (own and client_sha256) or own == client_sha256

    def is_former_of(self, copy: SessionCopy) -> bool:
        """Whether this is a copy of the same session, which has gone on as `copy`."""
        is_same = self.session_id == copy.session_id and self._token_sha256 == copy._token_sha256
        return is_same and self is not copy and self.is_detached

    def receive(self, request: session_pb2.ConverseRequest) -> None:
        """Note a unit that is put into the inbox."""
        unit = request.unit
        self.received_sequence = unit.sequence
        self._pending[unit.sequence] = request
        if unit.edge_note:
            self._note = unit.edge_note
            has_sequence = unit.HasField("edge_note_sequence")
            self._note_sequence = unit.edge_note_sequence if has_sequence else -1

    def size_of_unit(self, sequence: int) -> int:
        """Return the bytes of a unit that has no outcome."""
        request = self._pending.get(sequence)
        return request.ByteSize() if request else 0

    def answer(self, outcome: session_pb2.Delta | session_pb2.Failed) -> None:
        """Keep a unit with its outcome. Units before it that have none were dropped."""
        request = self._pending.get(outcome.sequence)
        while self._pending and (oldest := next(iter(self._pending))) <= outcome.sequence:
            del self._pending[oldest]
        if self.is_deleted or isinstance(outcome, session_pb2.Failed):
            return
        self.last_sequence = outcome.sequence
        self.journal.append(request, outcome)
        if self.journal.is_whole:
            self._deltas.append(outcome)
            self._count(_size_of(outcome))
            while len(self._deltas) > self._replay_count or self._delta_bytes > _REPLAY_BYTES:
                self._count(-_size_of(self._deltas.popleft()))

    def rebuild(self, rebuild: session_pb2.Rebuild) -> None:
        """Keep past units that this worker has rebuilt."""
        self.journal.extend(rebuild.units)
        if rebuild.units:
            self.last_sequence = self.received_sequence = rebuild.units[-1].sequence

    def deltas_for(self, attach: session_pb2.Attach) -> Sequence[session_pb2.Delta]:
        """Return the deltas that an edge needs to render what its client lacks, oldest first."""
        first = min(after_sequence(attach), self._note_sequence)
        return [delta for delta in self._deltas if delta.sequence >= first]

    def attached(
        self, detached_s: float, deltas: Sequence[session_pb2.Delta]
    ) -> session_pb2.Attached:
        """Return the session as it is now, which has had no call for some seconds.

        `deltas` follow.
        """
        message = session_pb2.Attached(
            open=self.journal.opening,
            opened=self.journal.opened,
            edge_note=self._note,
            granted=self.granted,
            last_sequence=self.last_sequence,
            received_sequence=self.received_sequence,
            attach_number=self.attach_number,
            is_paused=self.is_paused,
        )
        if detached_s:
            message.detached_duration.CopyFrom(to_duration(detached_s))
        if deltas:
            message.first_sequence = deltas[0].sequence
        return message

    def kept(self, make: type[Response]) -> Generator[Response]:
        """Return the present past units in messages; the last one is empty.

        The journal drops nothing until all are sent, or the generator is closed. The last ones do
        not come if the copy is given up meanwhile.
        """
        return self._parts(make, self.journal.unit_count)

    def _parts(self, make: type[Response], end: int) -> Generator[Response]:
        begin, sender = 0, object()
        self.journal.pin(sender)
        try:
            while begin < end and not self.is_deleted:
                response = make()
                units = response.kept.units
                self.journal.fill(units, begin, end, most_bytes=_PART_BYTES)
                begin += len(units)
                yield response
            if not self.is_deleted:
                yield make(kept=session_pb2.Kept(is_last=True))
        finally:
            self.journal.unpin(sender)

    def _count(self, byte_count: int) -> None:
        self._delta_bytes += byte_count
        self._space.used_bytes += byte_count

    def drop(self) -> None:
        """Delete the content."""
        self.is_deleted = True
        self.journal.drop()
        self._count(-self._delta_bytes)
        self._deltas.clear()
        self._note = b""
        self._pending.clear()


class Copies:
    """All copies of a worker. They have a bound each, and one together.

    If all copies together exceed their bound, the copy that is detached for the longest time is
    given up, and without such a copy the one that grows. `on_change` is called when a copy is made,
    taken or deleted, and `on_given_up` after one is given up.
    """

    def __init__(
        self, copy_bytes: int, total_bytes: int, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.space = JournalSpace(copy_bytes, total_bytes)
        self.on_given_up: Callable[[SessionCopy, LossReason], None] = _ignore
        self._on_change = on_change
        self._copies: dict[SessionCopy, None] = {}  # the detached ones in the order of their breaks

    @property
    def is_enabled(self) -> bool:
        """Whether this worker keeps copies."""
        return min(self.space.call_bytes, self.space.total_bytes) > 0

    @property
    def count(self) -> int:
        """The number of copies."""
        return len(self._copies)

    @property
    def are_needed(self) -> bool:
        """Whether there are sessions that only this worker has."""
        return any(not copy.is_taken for copy in self._copies)

    def keep(
        self,
        session_id: str,
        keep: session_pb2.Keep,
        opening: session_pb2.Open,
        opened: session_pb2.Opened,
        *,
        replay_count: int,
    ) -> SessionCopy:
        """Begin the copy of a session. Raises FabricError INVALID_FIELD."""
        _check(keep)
        if not session_id:
            raise invalid("keep", "needs a lease with a session id")
        copy = SessionCopy(session_id, keep, self.space, replay_count)
        self._copies[copy] = None
        copy.journal.open(opening, opened)
        self._bound(copy)
        self._on_change()
        return copy

    def find(self, attach: session_pb2.Attach) -> SessionCopy:
        """Return the copy of a session that is ready and has the most units. Raises FabricError."""
        copies = [copy for copy in self._copies if copy.session_id == attach.session_id]
        if not copies:
            raise FabricError(Reason.UNKNOWN_SESSION, "this worker has no copy of the session")
        allowed = [copy for copy in copies if copy.accepts(attach.token_secret)]
        if not allowed:
            raise FabricError(Reason.NOT_ALLOWED, "the secret is wrong", field="token_secret")
        allowed = [copy for copy in allowed if copy.is_of(attach.client_sha256)]
        if not allowed:
            message = "the session belongs to another client"
            raise FabricError(Reason.NOT_ALLOWED, message, field="client_sha256")
        ready = [copy for copy in allowed if copy.is_ready and not copy.is_taken]
        if not ready:
            raise FabricError(Reason.NOT_READY, "the session continues now, here or elsewhere")
        copy = max(reversed(ready), key=lambda one: one.last_sequence)  # of equal ones the newest
        if after_sequence(attach) > copy.received_sequence:
            message = f"the copy ends with unit {copy.received_sequence}, the client has more"
            raise FabricError(Reason.COPY_STALE, message, field="after_sequence")
        return copy

    def answer(self, copy: SessionCopy, outcome: session_pb2.Delta | session_pb2.Failed) -> None:
        """Keep a unit with its outcome."""
        if isinstance(outcome, session_pb2.Delta) and not copy.is_deleted:
            self._make_room(copy, copy.size_of_unit(outcome.sequence) + _size_of(outcome))
        copy.answer(outcome)
        self._bound(copy)

    def rebuild(self, copy: SessionCopy, rebuild: session_pb2.Rebuild) -> None:
        """Keep past units that this worker has rebuilt."""
        self._make_room(copy, rebuild.ByteSize())
        copy.rebuild(rebuild)
        self._bound(copy)
        if rebuild.is_last:
            for former in [one for one in self._copies if one.is_former_of(copy)]:
                self.delete(former)

    def _make_room(self, copy: SessionCopy, byte_count: int) -> None:
        """Give up the copies that are detached for the longest time until new bytes have room."""
        most = self.space.total_bytes - byte_count
        while self.space.used_bytes > most:
            others = (one for one in self._copies if one.is_detached and one is not copy)
            if (oldest := next(others, None)) is None:
                return
            self._give_up(oldest, LossReason.TOTAL_BOUND)

    def _bound(self, copy: SessionCopy) -> None:
        if not copy.journal.is_whole and not copy.is_deleted:
            loss = copy.journal.loss
            self._give_up(copy, loss.reason if loss else LossReason.NO_STATE)

    def _give_up(self, copy: SessionCopy, reason: LossReason) -> None:
        self.delete(copy)
        self.on_given_up(copy, reason)

    def detach(self, copy: SessionCopy, now_s: float) -> None:
        """Note that no stream has the session any more."""
        copy.is_detached = True
        copy.broken_s = now_s
        if copy in self._copies:  # move it to the end
            del self._copies[copy]
            self._copies[copy] = None

    def take(self, copy: SessionCopy) -> None:
        """Note that an edge has the session, which is to continue in a slot of another worker."""
        copy.is_taken = True
        self._on_change()

    def give_back(self, copy: SessionCopy, now_s: float) -> None:
        """Note that this edge is lost. The time of the copy begins anew."""
        copy.is_taken = False
        self.detach(copy, now_s)
        self._on_change()

    def delete(self, copy: SessionCopy) -> None:
        """Delete a copy. Does nothing if it is deleted already."""
        if not copy.is_deleted:
            del self._copies[copy]
            copy.drop()
            self._on_change()

    def clear(self) -> None:
        """Delete all copies, because the process ends."""
        for copy in tuple(self._copies):
            self.delete(copy)


def after_sequence(attach: session_pb2.Attach) -> int:
    """Return the last unit that the client has; -1 if it has none."""
    return attach.after_sequence if attach.HasField("after_sequence") else -1


def _check(keep: session_pb2.Keep) -> None:
    if (size := len(keep.token_sha256)) != DIGEST_BYTES:
        raise invalid("keep.token_sha256", f"is {size} bytes, must be {DIGEST_BYTES}")
    if (size := len(keep.client_sha256)) not in (0, DIGEST_BYTES):
        raise invalid("keep.client_sha256", f"is {size} bytes, must be {DIGEST_BYTES}, or absent")
    lowest, highest = WINDOW_COUNT
    if keep.window_count and not lowest <= keep.window_count <= highest:
        fault = f"is {keep.window_count}, must be {lowest} to {highest}, or absent"
        raise invalid("keep.window_count", fault)
    within_s, hold_s = to_seconds(keep.within), to_seconds(keep.hold)
    if not 0 < within_s <= MAX_KEEP_S:
        raise invalid("keep.within", f"is {within_s:g} s, must be above 0, at most {MAX_KEEP_S:g}")
    if not 0 <= hold_s <= within_s:
        raise invalid("keep.hold", f"is {hold_s:g} s, must be 0 to `within`")
    if (size := len(keep.edge_note)) > MAX_NOTE_BYTES:
        raise invalid("keep.edge_note", f"is {size} bytes, more than {MAX_NOTE_BYTES}")


def _size_of(delta: session_pb2.Delta) -> int:
    content = len(delta.speech.audio) + len(delta.rebuild_state) + _ID_BYTES * len(delta.token_ids)
    return content + _ENTRY_BYTES


def _ignore(copy: SessionCopy, reason: LossReason) -> None:
    """Do nothing with a copy that was given up."""


def superseded() -> FabricError:
    """Return the error of a call whose session another call has."""
    return FabricError(Reason.SUPERSEDED, "another edge has the session")


def attach_responses(
    copy: SessionCopy, attach: session_pb2.Attach, detached_s: float, make: type[Response]
) -> Iterator[Response]:
    """Yield what an edge needs of a session that has had no call for some seconds."""
    deltas = copy.deltas_for(attach)
    yield make(attached=copy.attached(detached_s, deltas))
    for delta in deltas:
        yield make(delta=delta)
