"""The past units of a conversation: which sound and pictures a later rebuild still needs. Pure.

A conversation with a context window needs only the latest units whole (`UnitReach`). The older
units keep their ids, with which a worker follows the rules of units.
"""

from __future__ import annotations

from collections.abc import Iterator

from duplane.fabric.unit_audio import pack_audio
from duplane.fabric.v1 import session_pb2

MIN_WINDOWS = 2
"""Minimum number of contexts before the present one whose units are kept whole."""
# Approximate memory of a past unit without its audio, its pictures, its ids and its state.
_ENTRY_BYTES = 256
_ID_BYTES = 4


def past_unit(unit: session_pb2.Unit, delta: session_pb2.Delta) -> session_pb2.PastUnit:
    """Return a unit with its delta as a past unit.

    Both forms of the state are copied and not read, so the conversation can also be rebuilt by a
    worker of the former release.
    """
    past = session_pb2.PastUnit(
        sequence=unit.sequence,
        audio=unit.audio,
        audio_int16=unit.audio_int16,
        audio_exponent=unit.audio_exponent,
        video_frames=unit.video_frames,
        token_ids=delta.token_ids,
        rebuild_state=delta.rebuild_state,
        context_token_count=delta.context_token_count,
    )
    if unit.HasField("max_slice_count"):
        past.max_slice_count = unit.max_slice_count
    if delta.HasField("state_change"):
        past.state_change.CopyFrom(delta.state_change)
    if delta.HasField("reach"):
        past.reach.CopyFrom(delta.reach)
    pack_audio(past)
    return past


class PastUnits:
    """The past units of one conversation, oldest first.

    The units before `fed_from` are not fed in a rebuild, and those before `heard_from` are not
    heard either. `byte_count` is their memory.
    """

    def __init__(self) -> None:
        self.units: list[session_pb2.PastUnit] = []
        self.byte_count = 0
        self.fed_from = 0
        self.heard_from = 0
        self._unknown: int | None = None  # the first unit without a reach

    def append(self, past: session_pb2.PastUnit) -> None:
        """Add a unit, whole or as another process has kept it."""
        number = len(self.units)
        self.units.append(past)
        if past.row_count:
            self.fed_from = number + 1
            if past.had_sound and not (past.audio or past.audio_int16):
                self.heard_from = number + 1
        elif self._unknown is None and not past.HasField("reach"):
            self._unknown = number
        fixed = _ENTRY_BYTES + _ID_BYTES * len(past.token_ids) + len(past.rebuild_state)
        self.byte_count += fixed + past.state_change.ByteSize() + _input_bytes(past)

    def clear(self) -> None:
        """Delete all units."""
        self.units.clear()
        self.byte_count = self.fed_from = self.heard_from = 0
        self._unknown = None

    def begins(self, window_count: int) -> Iterator[int]:
        """Yield the units at which a rebuild may begin to feed, from exact to approximate.

        The first one keeps `window_count` contexts before the one in which the open turn of the
        speech began, because the speech also depends on the states of the units of this turn. Then
        come fewer contexts, then those before the present one, without regard to the turn.
        """
        if not self.units:
            return
        fewest = min(MIN_WINDOWS, window_count)
        counts = range(window_count, fewest - 1, -1)
        last = len(self.units) - 1
        turn = max(0, min(last, len(self.units) - self.units[-1].reach.turn_unit_count))
        for latest in (turn, last):
            yield from (self._begin_of(latest, count) for count in counts)

    def drop_before(self, begin: int) -> None:
        """Drop the sound and the pictures that a rebuild that feeds from `begin` on does not need.

        What was dropped before stays dropped.
        """
        if begin <= self.fed_from:
            return
        heard_from = begin - self.units[begin].reach.sound_unit_count
        for number in range(self.heard_from, begin):
            past = self.units[number]
            self.byte_count -= _input_bytes(past)
            if number >= self.fed_from:
                past.row_count = past.reach.row_count
                past.had_sound = bool(past.audio or past.audio_int16)
                past.ClearField("video_frames")
                past.ClearField("max_slice_count")
            if number < heard_from:
                for field in ("audio", "audio_int16", "audio_exponent"):
                    past.ClearField(field)
            self.byte_count += _input_bytes(past)
        self.fed_from = begin
        self.heard_from = max(self.heard_from, heard_from)

    def _begin_of(self, latest: int, window_count: int) -> int:
        """Return the oldest unit of the context `window_count` contexts before that of `latest`."""
        begin = latest
        for _ in range(window_count + 1):
            if self._unknown is not None and begin >= self._unknown:
                return min(self.fed_from, self._unknown)
            begin = max(0, begin - self.units[begin].reach.context_unit_count + 1)
        return begin


def _input_bytes(past: session_pb2.PastUnit) -> int:
    """Return the number of bytes of the unit's sound and pictures."""
    return len(past.audio) + len(past.audio_int16) + sum(map(len, past.video_frames))
