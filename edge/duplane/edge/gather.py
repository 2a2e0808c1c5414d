"""Audio of any length, and pictures, into units of one second; knows nothing of sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from duplane.edge.dialects.dialect import NO_TAG, Append, Tag
from duplane.fabric.audio import INPUT_RATE_HERTZ

UNIT_BYTES = INPUT_RATE_HERTZ * 4


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """One second of audio, or pictures alone, or both.

    It must listen if any audio in it must; its tag is its last audio's. Pictures are in the unit
    that holds the last sample of the audio they came with, under the loosest of their bounds.
    """

    audio: bytes
    force_listen: bool
    tag: Tag
    receive_wall_ns: int  # when its last audio came
    frames: tuple[bytes, ...] = ()
    max_slice_count: int | None = None


class Gatherer:
    """Cuts and joins. Holds less than one unit; what is left over waits for more audio.

    Pictures that wait with it are at most `frame_count`: the newest win.
    """

    def __init__(self, frame_count: int) -> None:
        self._frame_count = frame_count
        self._pieces: list[memoryview] = []
        self._held_bytes = 0
        self._force_listen = False
        self._frames: tuple[bytes, ...] = ()
        self._max_slice_count: int | None = None

    def add(self, append: Append, receive_wall_ns: int) -> Iterator[GatheredUnit]:
        """Yield the units that `append` completes. One that is exactly a unit is not copied.

        Pictures without audio are a unit by themselves; audio that waits goes on waiting.
        """
        if not append.audio or (not self._pieces and len(append.audio) == UNIT_BYTES):
            yield GatheredUnit(
                append.audio,
                append.force_listen,
                append.tag,
                receive_wall_ns,
                append.frames,
                append.max_slice_count,
            )
            return
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
                yield self._release(append.tag, receive_wall_ns)

    def _hold_frames(self, append: Append) -> None:
        self._frames = (*self._frames, *append.frames)[-self._frame_count :]
        if append.max_slice_count is not None:
            self._max_slice_count = max(self._max_slice_count or 1, append.max_slice_count)

    def _release(self, tag: Tag, receive_wall_ns: int) -> GatheredUnit:
        unit = GatheredUnit(
            b"".join(self._pieces),
            self._force_listen,
            tag,
            receive_wall_ns,
            self._frames,
            self._max_slice_count,
        )
        self._pieces.clear()
        self._held_bytes = 0
        self._force_listen = False
        self._frames = ()
        self._max_slice_count = None
        return unit


class Uplink:
    """The units of one session on their way to the worker, and what is known of them meanwhile.

    Waiting units are bounded, and the newest win: they wait only before the conversation is
    ready, or while the worker's host takes nothing. After one that was dropped and had to listen,
    the next has to. Units get their sequence number when taken,
    so that the worker sees no gap.
    """

    # Units sent and not answered. Beyond it the oldest are answered without their tag.
    _UNANSWERED = 1024

    def __init__(self, limit: int, frame_count: int) -> None:
        self.limit = limit
        self.gathered_count = 0  # units so far; each has its ordinal, from 0
        self.taken_count = 0  # the ordinal of the next, whether those before were sent or dropped
        self._gatherer = Gatherer(frame_count)
        self._waiting: deque[GatheredUnit] = deque()
        self._sent: dict[int, tuple[Tag, int]] = {}
        self._next_sequence = 0
        self._dropped_count = 0
        self._must_listen = False  # one that was dropped had to; so has the next

    def add(self, append: Append, receive_wall_ns: int) -> None:
        """Take audio and pictures."""
        for unit in self._gatherer.add(append, receive_wall_ns):
            self._waiting.append(unit)
            self.gathered_count += 1
            if len(self._waiting) > self.limit:
                self._must_listen |= self._waiting.popleft().force_listen
                self.taken_count += 1
                self._dropped_count += 1

    def take(self) -> tuple[int, GatheredUnit] | None:
        """Return the next unit and its sequence number."""
        if not self._waiting:
            return None
        unit = self._waiting.popleft()
        if self._must_listen and not unit.force_listen:
            unit = replace(unit, force_listen=True)
        self._must_listen = False
        sequence = self._next_sequence
        self._next_sequence += 1
        self._sent[sequence] = (unit.tag, self.taken_count)
        self.taken_count += 1
        if len(self._sent) > self._UNANSWERED:
            del self._sent[next(iter(self._sent))]
        return sequence, unit

    def answered(self, sequence: int) -> tuple[Tag, int]:
        """Return tag and ordinal of a unit that was answered; forget it and all before it."""
        sent = self._sent.get(sequence, (NO_TAG, -1))
        while self._sent and (oldest := next(iter(self._sent))) <= sequence:
            del self._sent[oldest]
        return sent

    def take_dropped_count(self) -> int:
        """Return how many units were dropped here since the last call."""
        count, self._dropped_count = self._dropped_count, 0
        return count
