"""Assembles the units of a model from audio of any length, and pictures. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from duplane.edge.dialects.actions import NO_TAG, Append, Tag
from duplane.fabric.audio import SAMPLE_BYTES
from duplane.fabric.model import DEFAULT_FORMAT, ModelFormat
from duplane.fabric.resampler import Resampler, resampler


class UnitAssembler:
    """Cuts and joins appends. Holds the audio of an incomplete unit until more audio arrives.

    The audio of all appends is one stream. If its rate is not that of the model, it is resampled: a
    unit is then complete with the same append as otherwise, but its sound is 6 to 25 ms late. While
    the model is not known (None), units have the default duration and the rate of the appends. The
    audio of a unit is resampled at once, because each call of the resampler takes as much time as
    100 ms of audio.

    If one append of a unit has `force_listen`, the model must listen to the whole unit. A unit has
    the tag of its last append. Pictures belong to the unit with the last sample of their append;
    the largest slice bound of a unit applies to all its pictures. Of the pictures that wait with
    incomplete audio, the newest `frame_count` are kept.
    """

    def __init__(self, frame_count: int, model: ModelFormat | None = None) -> None:
        self._frame_count = frame_count
        self.dropped_frame_count = 0  # pictures above the bound
        self.model = model
        self.format = model or DEFAULT_FORMAT
        self._rate_hertz = 0  # of the appends; 0 before the first one with audio
        self._unit_rate_hertz = model.input_rate_hertz if model else 0
        self._unit_bytes = 0
        self._resampler: Resampler | None = None  # None if the rates are equal
        self._unsampled: list[bytes] = []  # audio that waits to be resampled
        self._unsampled_count = 0  # its samples
        self._pieces: list[memoryview] = []
        self._held_bytes = 0
        self._force_listen = False
        self._frames: tuple[bytes, ...] = ()
        self._max_slice_count: int | None = None

    @property
    def held(self) -> tuple[int, int]:
        """The bytes of audio and the number of pictures that wait for the rest of their unit."""
        return self._bytes_with_unsampled, len(self._frames)

    @property
    def _bytes_with_unsampled(self) -> int:
        if not self._resampler:
            return self._held_bytes
        return self._held_bytes + SAMPLE_BYTES * self._resampler.count_with(self._unsampled_count)

    def for_model(self, model: ModelFormat) -> UnitAssembler:
        """Return an assembler of this model's units that replaces this one; it holds no audio."""
        other = UnitAssembler(self._frame_count, model)
        other.dropped_frame_count = self.dropped_frame_count
        return other

    def add(self, append: Append) -> Sequence[Append]:
        """Return the units that `append` completes.

        If nothing is resampled, an append of exactly one unit is not copied. An append with only
        pictures is a unit by itself; incomplete audio continues to wait.
        """
        if not append.audio:
            return (append,)
        if append.rate_hertz != self._rate_hertz:
            self._use_rate(append.rate_hertz)
        audio = append.audio
        if self._resampler:
            self._unsampled.append(audio)
            self._unsampled_count += len(audio) // SAMPLE_BYTES
            if self._bytes_with_unsampled < self._unit_bytes:
                self._force_listen |= append.force_listen
                self._hold_frames(append)
                return ()
            audio = self._take_resampled(self._resampler)
        elif not self._pieces and len(audio) == self._unit_bytes:
            return (append,)
        units: list[Append] = []
        rest, is_held = memoryview(audio), False
        while not is_held:
            piece = rest[: self._unit_bytes - self._held_bytes]
            rest = rest[len(piece) :]
            is_held = not rest
            self._pieces.append(piece)
            self._held_bytes += len(piece)
            self._force_listen |= append.force_listen
            if is_held:
                self._hold_frames(append)
            if self._held_bytes == self._unit_bytes:
                units.append(self._release(append.tag))
        return units

    def take_rest(self) -> Append | None:
        """Remove and return the incomplete unit; None if no audio waits."""
        self._resample_held()
        return self._release(NO_TAG) if self._held_bytes else None

    def _take_resampled(self, stream: Resampler) -> bytes:
        audio = stream.add(b"".join(self._unsampled))
        self._unsampled.clear()
        self._unsampled_count = 0
        return audio

    def _resample_held(self) -> None:
        """Resample the audio of the incomplete unit."""
        if self._resampler and self._unsampled:
            self._pieces.append(memoryview(self._take_resampled(self._resampler)))
            self._held_bytes += len(self._pieces[-1])

    def _use_rate(self, rate_hertz: int) -> None:
        """Begin the stream with appends of this rate, or continue it with them."""
        self._resample_held()
        self._rate_hertz = rate_hertz
        self._unit_rate_hertz = self._unit_rate_hertz or rate_hertz
        self._unit_bytes = SAMPLE_BYTES * self.format.samples_of_unit(self._unit_rate_hertz)
        self._resampler = resampler(rate_hertz, self._unit_rate_hertz, is_prompt=True)

    def _hold_frames(self, append: Append) -> None:
        frames = (*self._frames, *append.frames)
        self._frames = frames[-self._frame_count :]
        self.dropped_frame_count += len(frames) - len(self._frames)
        if append.max_slice_count is not None:
            self._max_slice_count = max(self._max_slice_count or 1, append.max_slice_count)

    def _release(self, tag: Tag) -> Append:
        unit = Append(
            b"".join(self._pieces),
            self._force_listen,
            tag,
            self._frames,
            self._max_slice_count,
            rate_hertz=self._unit_rate_hertz,
        )
        self._pieces.clear()
        self._held_bytes = 0
        self._force_listen = False
        self._frames = ()
        self._max_slice_count = None
        return unit
