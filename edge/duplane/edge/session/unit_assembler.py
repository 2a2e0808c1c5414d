"""Assembles units of one second from audio of any length, and pictures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from duplane.edge.dialects.actions import Append, Tag
from duplane.fabric.audio import INPUT_RATE_HERTZ

UNIT_BYTES = INPUT_RATE_HERTZ * 4


class UnitAssembler:
    """Cuts and joins appends. Holds the audio of an incomplete unit until more audio arrives.

    If one append of a unit has `force_listen`, the model must listen to the whole unit. A unit has
    the tag of its last append. Pictures belong to the unit with the last sample of their append;
    the largest slice bound of a unit applies to all its pictures. Of the pictures that wait with
    incomplete audio, the newest `frame_count` are kept.
    """

    def __init__(self, frame_count: int) -> None:
        self._frame_count = frame_count
        self.dropped_frame_count = 0  # pictures above the bound
        self._pieces: list[memoryview] = []
        self._held_bytes = 0
        self._force_listen = False
        self._frames: tuple[bytes, ...] = ()
        self._max_slice_count: int | None = None

    def add(self, append: Append) -> Sequence[Append]:
        """Return the units that `append` completes. An append of exactly one unit is not copied.

        An append with only pictures is a unit by itself; incomplete audio continues to wait.
        """
        if not append.audio or (not self._pieces and len(append.audio) == UNIT_BYTES):
            return (append,)
        units: list[Append] = []
        rest = memoryview(append.audio)
        while rest:
            piece = rest[: UNIT_BYTES - self._held_bytes]
            rest = rest[len(piece) :]
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            self._force_listen |= append.force_listen
            if not rest:
                self._hold_frames(append)
            if self._held_bytes == UNIT_BYTES:
                units.append(self._release(append.tag))
        return units

    def _hold_frames(self, append: Append) -> None:
        frames = (*self._frames, *append.frames)
        self._frames = frames[-self._frame_count :]
        self.dropped_frame_count += len(frames) - len(self._frames)
        if append.max_slice_count is not None:
            self._max_slice_count = max(self._max_slice_count or 1, append.max_slice_count)

    def _release(self, tag: Tag) -> Append:
        audio = b"".join(self._pieces)
        unit = Append(audio, self._force_listen, tag, self._frames, self._max_slice_count)
        self._pieces.clear()
        self._held_bytes = 0
        self._force_listen = False
        self._frames = ()
        self._max_slice_count = None
        return unit
