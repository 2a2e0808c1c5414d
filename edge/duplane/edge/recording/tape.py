"""The files of one recording while it runs; used on the writer's thread only."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import cast

import numpy as np
import orjson

from duplane.edge.recording.events import Blob, split
from duplane.edge.recording.shelf import BLOBS, MODEL, STREAM, USER, Meta, lock, write_meta
from duplane.edge.recording.track import Track
from duplane.fabric.audio import (
    INPUT_RATE_HERTZ,
    OUTPUT_RATE_HERTZ,
    AudioError,
    Samples,
    samples_from_pcm,
)

_log = logging.getLogger(__name__)

# Events that hold once more what deltas have said before them.
_WHOLE_REPLIES = ("response.done", "done")


class Direction(StrEnum):
    """Which way an event went, as the timeline has it."""

    UP = "up"
    DOWN = "down"


_OTHERS = {Direction.UP: Direction.DOWN, Direction.DOWN: Direction.UP}


class TapeFullError(OSError):
    """A recording has reached its bound."""


class Tape:
    """Grows by appending only. A fault of the disk ends the recording, and nothing else."""

    def __init__(self, directory: Path, meta: Meta, limit_bytes: int) -> None:
        self.directory = directory
        self._meta = meta
        self._room_bytes = limit_bytes
        self._stream = -1
        self._tracks: dict[Direction, Track] = {}
        self._event_count = 0
        self._blob_count = 0
        self._is_chat = meta.mode == "chat"
        self._has_spoken = False  # the model, since the user did

    def open(self) -> None:
        """Make the directory and say what is known."""
        self._guarded(self._open)

    def write(self, direction: Direction, frame: bytes, at_s: float, heard: bytes = b"") -> None:
        """Add one event, `at_s` after the recording began.

        Of the client's events nothing is decoded here: `heard` is what the session took of them.
        """
        if self._meta.error is None:
            self._guarded(lambda: self._write(direction, frame, at_s, heard))

    def end(self, changes: Callable[[Meta], None]) -> None:
        """Say how it ended, and let go of all files."""
        changes(self._meta)
        if self._meta.error or self._meta.lost_event_count:
            self._meta.is_incomplete = True
        with contextlib.suppress(OSError):  # the disk's fault has been logged, or will be soon
            write_meta(self.directory, self._meta)
        for track in self._tracks.values():
            track.close()
        if self._stream >= 0:
            os.close(self._stream)

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self._meta.error = error.strerror or str(error)
            self._meta.is_incomplete = True
            _log.warning("recording %s stops: %s", self._meta.session_id, self._meta.error)
            with contextlib.suppress(OSError):
                write_meta(self.directory, self._meta)

    def _open(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True)
        (self.directory / BLOBS).mkdir(mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        part = self.directory / f"{STREAM}.part"
        self._stream = os.open(part, flags, 0o600)
        lock(self._stream)
        write_meta(self.directory, self._meta)
        part.rename(self.directory / STREAM)  # seen from now on, and seen to run

    def _write(self, direction: Direction, frame: bytes, at_s: float, heard: bytes) -> None:
        event, blobs = split(frame, self._blob_count)
        for blob in blobs:
            self._take(len(blob.content))
            (self.directory / blob.name).write_bytes(blob.content)
        self._blob_count += len(blobs)
        line = orjson.dumps(
            {
                "seq": self._event_count,
                "ts": self._meta.created_at + at_s,
                "dir": direction,
                "frame": event,
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )
        self._take(len(line))
        os.write(self._stream, line)
        self._event_count += 1
        if direction is Direction.UP:
            self._sound(direction, samples_from_pcm(heard), at_s)
            return
        for samples in self._said(event, blobs):
            self._sound(direction, samples, at_s)

    def _take(self, byte_count: int) -> None:
        self._room_bytes -= byte_count
        if self._room_bytes < 0:
            raise TapeFullError("the recording is as large as one may be")

    def _sound(self, direction: Direction, samples: Samples, at_s: float) -> None:
        """Put what can be heard on the time line: the user's audio ends when it arrives, the
        model's begins when it leaves. Where people take turns, nobody speaks into another's."""
        is_user = direction is Direction.UP
        if is_user and (self._is_chat or samples.size):
            self._has_spoken = False
        if not samples.size:
            return
        if self._is_chat:
            other = self._tracks.get(_OTHERS[direction])
            begin_s = max(at_s, other.end_s if other else 0.0)
        elif is_user:
            begin_s = max(0.0, at_s - samples.size / INPUT_RATE_HERTZ)
        else:
            begin_s = at_s
        self._has_spoken = not is_user
        self._take(self._track(direction).append(samples, begin_s))

    def _said(self, event: object, blobs: list[Blob]) -> Iterator[Samples]:
        """Yield what the model says in an event, and says for the first time."""
        if not (self._has_spoken and _kind(event) in _WHOLE_REPLIES):
            yield from (_samples(blob) for blob in blobs if blob.is_audio)

    def _track(self, direction: Direction) -> Track:
        track = self._tracks.get(direction)
        if track is None:
            is_user = direction is Direction.UP
            rate_hertz = INPUT_RATE_HERTZ if is_user else OUTPUT_RATE_HERTZ
            track = Track(self.directory / (USER if is_user else MODEL), rate_hertz)
            self._tracks[direction] = track
        return track


def _kind(event: object) -> str:
    if not isinstance(event, dict):
        return ""
    return str(cast("dict[str, object]", event).get("type", ""))


def _samples(blob: Blob) -> Samples:
    try:
        return samples_from_pcm(blob.content)
    except AudioError:
        return np.zeros(0, np.float32)  # the timeline has the bytes
