"""The journal of a session: the data with which another worker can rebuild the conversation. Pure.

A journal exists only in memory, and is deleted when its session ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from duplane.fabric.audio import packed_from_pcm, pcm_from_int16
from duplane.fabric.bounds import MAX_REBUILD_UNIT_COUNT, MAX_STATE_BYTES
from duplane.fabric.v1 import session_pb2

# The units of one message have at most this number of bytes, unless the message has only one unit.
_MESSAGE_BYTES = 4 * 1024 * 1024
# Approximate memory of a past unit without its audio, its pictures, its ids and its state.
_ENTRY_BYTES = 256
_ID_BYTES = 4


class LossReason(StrEnum):
    """Why a journal was given up."""

    SESSION_BOUND = "session_bound"  # it exceeded `--journal-bytes`
    TOTAL_BOUND = "total_bound"  # all journals together exceeded `--journal-total-bytes`
    # A state or a digest is missing because the worker cannot rebuild conversations; or a state is
    # larger than workers accept; or a unit was answered so late that it was forgotten.
    NO_STATE = "no_state"


class JournalLoss(NamedTuple):
    """A journal that was given up, and what it contained."""

    reason: LossReason
    byte_count: int
    unit_count: int


class JournalSpace:
    """The memory that one journal, and all journals of the process together, may use."""

    def __init__(self, call_bytes: int, total_bytes: int) -> None:
        self.call_bytes = call_bytes
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.given_up_count = 0  # journals that exceeded a bound


class Journal:
    """The settings of one conversation and its answered units, oldest first.

    If a journal exceeds a bound, it is deleted and stays empty. Its session can then no longer
    move. Without a `space`, the journal is empty from the start.
    """

    def __init__(self, space: JournalSpace | None) -> None:
        self.opening: session_pb2.Open | None = None
        self.opened = session_pb2.Opened()  # of the first worker
        # The journal is complete, so the conversation can be rebuilt.
        self.is_whole = space is not None
        self.loss: JournalLoss | None = None  # set when the journal is given up
        self.byte_count = 0
        self._space = space or JournalSpace(0, 0)
        self._units: list[session_pb2.PastUnit] = []

    def open(self, opening: session_pb2.Open, opened: session_pb2.Opened) -> None:
        """Keep the settings. The journal is given up if the worker has no digest of its model.

        A worker without this digest cannot rebuild a conversation.
        """
        if not self.is_whole:
            return
        self.opening, self.opened = opening, opened
        self._add(opening.ByteSize())
        if not opened.model_digest:
            self._give_up(LossReason.NO_STATE)

    def append(
        self,
        request: session_pb2.ConverseRequest | None,
        outcome: session_pb2.Delta | session_pb2.Failed,
    ) -> None:
        """Add a unit with its delta. A unit that failed has changed nothing, so it is left out.

        The journal is given up if the unit's request is missing, or if the delta has no state to
        rebuild the conversation, or a larger one than workers accept. Both forms of this state are
        copied and not read, so the session can also move to a worker of the former release.
        """
        if not self.is_whole or isinstance(outcome, session_pb2.Failed):
            return
        state_bytes = len(outcome.rebuild_state), outcome.state_change.ByteSize()
        has_state = outcome.rebuild_state or outcome.HasField("state_change")
        if request is None or not has_state or max(state_bytes) > MAX_STATE_BYTES:
            self._give_up(LossReason.NO_STATE)
            return
        unit = request.unit
        past = session_pb2.PastUnit(
            sequence=unit.sequence,
            token_ids=outcome.token_ids,
            rebuild_state=outcome.rebuild_state,
            context_token_count=outcome.context_token_count,
        )
        if outcome.HasField("state_change"):
            past.state_change.CopyFrom(outcome.state_change)
        frame_bytes = 0
        if unit.video_frames:
            past.video_frames.extend(unit.video_frames)
            frame_bytes = sum(map(len, unit.video_frames))
        if unit.HasField("max_slice_count"):
            past.max_slice_count = unit.max_slice_count
        audio_bytes = len(unit.audio)
        if packed := packed_from_pcm(unit.audio):
            past.audio_int16, past.audio_exponent = packed
            audio_bytes = len(packed[0])
        else:
            past.audio = unit.audio
        id_bytes = _ID_BYTES * len(past.token_ids)
        self._units.append(past)
        self._add(audio_bytes + frame_bytes + id_bytes + sum(state_bytes) + _ENTRY_BYTES)

    def extend(self, units: Sequence[session_pb2.PastUnit]) -> None:
        """Add units that another journal had."""
        for past in units:
            if self.is_whole:
                self._units.append(past)
                self._add(past.ByteSize() + _ENTRY_BYTES)

    def _add(self, byte_count: int) -> None:
        """Count bytes. Give the journal up if a bound is exceeded."""
        space = self._space
        self.byte_count += byte_count
        space.used_bytes += byte_count
        if self.byte_count > space.call_bytes:
            self._give_up(LossReason.SESSION_BOUND)
        elif space.used_bytes > space.total_bytes:
            self._give_up(LossReason.TOTAL_BOUND)

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
        self.byte_count = 0
        self.opening = None
        self._units.clear()

    @property
    def unit_count(self) -> int:
        """The number of past units."""
        return len(self._units)

    def rebuild(self, begin: int, *, accepts_exponent: bool = True) -> session_pb2.ConverseRequest:
        """Return a message with as many past units, from number `begin` on, as fit into it.

        Workers of older releases do not accept `audio_exponent`; they get samples above 1 as float.
        """
        rebuild = session_pb2.Rebuild(model_digest=self.opened.model_digest)
        size = 0
        for past in self._units[begin : begin + MAX_REBUILD_UNIT_COUNT]:
            if past.audio_exponent and not accepts_exponent:
                past = _without_exponent(past)
            size += past.ByteSize()
            if rebuild.units and size > _MESSAGE_BYTES:
                break
            rebuild.units.append(past)
        return session_pb2.ConverseRequest(rebuild=rebuild)


def _without_exponent(past: session_pb2.PastUnit) -> session_pb2.PastUnit:
    """Return a past unit with the same sound as float32."""
    plain = session_pb2.PastUnit()
    plain.CopyFrom(past)
    plain.audio = pcm_from_int16(past.audio_int16, past.audio_exponent)
    plain.ClearField("audio_int16")
    plain.ClearField("audio_exponent")
    return plain
