"""The journal of a session: the data with which another worker can rebuild the conversation. Pure.

A journal exists only in memory, and is deleted when its session ends.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from enum import StrEnum
from typing import NamedTuple

from duplane.fabric.bounds import MAX_REBUILD_UNIT_COUNT, MAX_STATE_BYTES
from duplane.fabric.past_units import PastUnits, past_unit
from duplane.fabric.unit_audio import unpack_audio
from duplane.fabric.v1 import session_pb2

# The units of one message have at most this number of bytes, unless the message has only one unit.
_MESSAGE_BYTES = 4 * 1024 * 1024


class LossReason(StrEnum):
    """Why a journal was given up."""

    SESSION_BOUND = "session_bound"  # it exceeded `--journal-bytes`
    TOTAL_BOUND = "total_bound"  # all journals together exceeded `--journal-total-bytes`
    # A state or a digest is missing because the worker cannot rebuild conversations; or a state is
    # larger than workers accept; or a unit was answered so late that it was forgotten.
    NO_STATE = "no_state"
    NO_COPY = "no_copy"  # another edge had the session, and its past units did not come in time


class JournalLoss(NamedTuple):
    """A journal that was given up, and what it contained."""

    reason: LossReason
    byte_count: int
    unit_count: int


class JournalSpace:
    """The memory that one journal, and all journals of the process together, may use.

    If all together are too large, `make_room` drops one that matters less than others; it returns
    False if there is none. `window_count` is the number of contexts before the present one whose
    units a journal keeps whole.
    """

    def __init__(self, call_bytes: int, total_bytes: int, window_count: int = 8) -> None:
        self.call_bytes = call_bytes
        self.total_bytes = total_bytes
        self.window_count = window_count
        self.used_bytes = 0
        self.given_up_count = 0  # journals that exceeded a bound
        self.make_room: Callable[[], bool] = lambda: False

    @property
    def is_exceeded(self) -> bool:
        """Whether all journals together are too large."""
        return self.used_bytes > self.total_bytes


class Journal:
    """The settings of one conversation and its answered units, oldest first.

    A conversation with a context window depends only on its latest units, so the journal drops the
    sound and the pictures of older ones. If it exceeds a bound nevertheless, it keeps fewer
    contexts, and the rebuilt conversation `is_approximate`. If that is not enough, the journal is
    deleted and stays empty. Its session can then no longer move. Without a `space`, the journal is
    empty from the start. `window_count` replaces that of the space; 0 does not.
    """

    def __init__(self, space: JournalSpace | None, window_count: int = 0) -> None:
        self.opening: session_pb2.Open | None = None
        self.opened = session_pb2.Opened()  # of the first worker
        # The journal is complete, so the conversation can be rebuilt.
        self.is_whole = space is not None
        self.loss: JournalLoss | None = None  # set when the journal is given up
        self.byte_count = 0
        # A bound has made the journal drop units on which a rebuild that is exact depends.
        self.is_approximate = False
        # The past units of another process still come, so the conversation cannot be rebuilt yet.
        self.is_partial = False
        self._space = space or JournalSpace(0, 0)
        self._window_count = window_count or self._space.window_count
        self._past = PastUnits()
        self._later = PastUnits()  # answered while the journal is partial
        self._opening_bytes = 0
        self._senders = set[object]()

    def open(self, opening: session_pb2.Open, opened: session_pb2.Opened) -> None:
        """Keep the settings. The journal is given up if the worker has no digest of its model.

        A worker without this digest cannot rebuild a conversation.
        """
        if not self.is_whole:
            return
        self.opening, self.opened = opening, opened
        self._opening_bytes = opening.ByteSize()
        self._count()
        if reason := self._exceeded():
            self._give_up(reason)
        if not opened.model_digest:
            self._give_up(LossReason.NO_STATE)

    def append(
        self,
        request: session_pb2.ConverseRequest | None,
        outcome: session_pb2.Delta | session_pb2.Failed,
    ) -> None:
        """Add a unit with its delta. A unit that failed has changed nothing, so it is left out.

        The journal is given up if the unit's request is missing, or if the delta has no state to
        rebuild the conversation, or a larger one than workers accept.
        """
        if not self.is_whole or isinstance(outcome, session_pb2.Failed):
            return
        state_bytes = len(outcome.rebuild_state), outcome.state_change.ByteSize()
        has_state = outcome.rebuild_state or outcome.HasField("state_change")
        if request is None or not has_state or max(state_bytes) > MAX_STATE_BYTES:
            self._give_up(LossReason.NO_STATE)
            return
        past = past_unit(request.unit, outcome)
        if self.is_partial:
            self._later.append(past)
            self._bound()
            return
        self._past.append(past)
        self._trim()

    def extend(self, units: Sequence[session_pb2.PastUnit]) -> None:
        """Add units that another journal had."""
        for past in units:
            if self.is_whole:
                self._past.append(past)
                self._trim()

    def begin_copy(self) -> None:
        """Wait for the units that another journal had; `extend` adds them, up to `end_copy`."""
        self.is_partial = self.is_whole

    def end_copy(self) -> None:
        """Add the units that were answered meanwhile behind those of the other journal."""
        self.is_partial = False
        later, self._later = self._later.units, PastUnits()
        self.extend(later)

    def lack_copy(self) -> None:
        """Give the journal up, because the units of the other journal do not come."""
        self._give_up(LossReason.NO_COPY)

    def pin(self, sender: object) -> None:
        """Keep the content while `sender` sends it, until `unpin`."""
        self._senders.add(sender)

    def unpin(self, sender: object) -> None:
        """Drop again what a rebuild no longer needs, if nobody else sends the content."""
        self._senders.discard(sender)

    def _trim(self) -> None:
        """Drop what a rebuild no longer needs, and more if a bound is exceeded.

        While the content is sent, nothing is dropped. If older units were dropped before, the units
        that come meanwhile may exceed the bound of the session a little.
        """
        if self._senders:
            self._bound(_MESSAGE_BYTES if self.is_trimmed else 0)
            return
        is_exact, reason = True, None
        for begin in self._past.begins(self._window_count):
            self._past.drop_before(begin)
            self._count()
            if is_exact:
                self.is_approximate = self._past.fed_from > begin
            if (reason := self._exceeded()) is None:
                break
            is_exact = False
        self.is_approximate |= not is_exact
        if reason:
            self._give_up(reason)

    def _bound(self, slack: int = 0) -> None:
        """Count the content without dropping any, and give it up if it exceeds a bound."""
        self._count()
        if reason := self._exceeded(slack):
            self._give_up(reason)

    def _count(self) -> None:
        """Count the bytes of the present content."""
        byte_count = self._opening_bytes + self._past.byte_count + self._later.byte_count
        self._space.used_bytes += byte_count - self.byte_count
        self.byte_count = byte_count

    def _exceeded(self, slack: int = 0) -> LossReason | None:
        """Return the bound that the content exceeds, the session's by more than `slack` bytes."""
        space = self._space
        if self.byte_count > space.call_bytes + slack:
            return LossReason.SESSION_BOUND
        while space.is_exceeded and space.make_room():
            pass
        return LossReason.TOTAL_BOUND if space.is_exceeded else None

    def _give_up(self, reason: LossReason) -> None:
        """Delete the journal's content, because the session can no longer move. Count this once."""
        if not self.is_whole:
            return
        self.is_whole = False
        self.loss = JournalLoss(reason, self.byte_count, self.unit_count)
        self._space.given_up_count += 1
        self.drop()

    def drop(self) -> None:
        """Delete the journal's content at the end of the session."""
        self._space.used_bytes -= self.byte_count
        self.byte_count = self._opening_bytes = 0
        self.opening = None
        self.is_approximate = self.is_partial = False
        self._past.clear()
        self._later.clear()

    @property
    def unit_count(self) -> int:
        """The number of past units."""
        return len(self._past.units)

    @property
    def is_trimmed(self) -> bool:
        """Whether units were dropped, so that only a worker that accepts this can rebuild it."""
        return self._past.fed_from > 0

    def rebuild(self, begin: int, *, accepts_exponent: bool = True) -> session_pb2.ConverseRequest:
        """Return a message with as many past units, from number `begin` on, as fit into it.

        Workers of older releases do not accept `audio_exponent`; they get samples above 1 as float.
        """
        request = session_pb2.ConverseRequest()
        request.rebuild.model_digest = self.opened.model_digest
        self.fill(request.rebuild.units, begin, accepts_exponent=accepts_exponent)
        return request

    def fill(
        self,
        units: MutableSequence[session_pb2.PastUnit],
        begin: int,
        end: int | None = None,
        *,
        accepts_exponent: bool = True,
        most_bytes: int = _MESSAGE_BYTES,
    ) -> None:
        """Append as many past units, from number `begin` to `end`, as fit into one message.

        `units` is the field of the message that is sent: so the sound is copied only once.
        """
        size = 0
        most = begin + MAX_REBUILD_UNIT_COUNT
        for past in self._past.units[begin : most if end is None else min(end, most)]:
            if past.audio_exponent and not accepts_exponent:
                past = _without_exponent(past)
            size += past.ByteSize()
            if units and size > most_bytes:
                break
            units.append(past)


def _without_exponent(past: session_pb2.PastUnit) -> session_pb2.PastUnit:
    """Return a past unit with the same sound as float32."""
    plain = session_pb2.PastUnit()
    plain.CopyFrom(past)
    unpack_audio(plain)
    return plain
