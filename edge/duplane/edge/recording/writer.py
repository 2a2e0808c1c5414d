"""Writes the files of one recording while its session runs. Use it on one thread only."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import numpy as np
import orjson

from duplane.edge.payload.sound_format import SoundFormat
from duplane.edge.recording.events import WAV_SUFFIX, Blob, event_type, payload_trace, split
from duplane.edge.recording.storage import (
    BLOBS,
    MODEL,
    STREAM,
    USER,
    Meta,
    create_file,
    delete_recording,
    lock,
    write_meta,
)
from duplane.edge.recording.wav_writer import WavWriter, wav_file
from duplane.fabric.audio import AudioError, Samples, read_client_wav, samples_from_pcm

_log = logging.getLogger(__name__)

# Types of events that repeat the audio of earlier events.
_WHOLE_REPLIES = ("response.done", "done")


class Direction(StrEnum):
    """The direction of an event in the timeline: `up` is from the client to the server."""

    UP = "up"
    DOWN = "down"


_OPPOSITE = {Direction.UP: Direction.DOWN, Direction.DOWN: Direction.UP}


class RecordingFullError(OSError):
    """The recording has reached its largest size."""


class RecordingDeletedError(OSError):
    """Somebody has deleted the recording while its session runs."""


class RecordingWriter:
    """Appends events and audio. A disk error ends the recording, but not the session."""

    def __init__(
        self,
        directory: Path,
        meta: Meta,
        limit_bytes: int,
        on_disk_error: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._on_disk_error = on_disk_error
        self._meta = meta
        self._free_bytes = limit_bytes
        self._stream = -1
        self._wavs: dict[Direction, WavWriter] = {}
        self._event_count = 0
        self._blob_count = 0
        self._is_chat = meta.mode == "chat"
        self._has_spoken = False  # whether the model has spoken since the user last spoke

    def open(self) -> None:
        """Create the directory, the file of the timeline and a preliminary meta."""
        self._guard(self._open)

    def write(
        self,
        direction: Direction,
        frame: bytes,
        at_s: float,
        sound: SoundFormat,
        audio: bytes = b"",
    ) -> None:
        """Append one event that was received or sent `at_s` seconds after the recording began.

        `audio` is the PCM (float32) that the session has decoded from a client's event. The audio
        of a server's event is decoded here. Both sides are recorded as the client has sent and got
        them, in the format `sound` of their direction, so the rates of the model do not count.
        """
        if self._meta.error is None:
            self._guard(lambda: self._write(direction, frame, at_s, sound, audio))

    def end(self, update: Callable[[Meta], None]) -> None:
        """Let `update` complete the meta, write the meta, and close all files."""
        update(self._meta)
        self._meta.is_incomplete = bool(self._meta.error or self._meta.lost_event_count)
        with contextlib.suppress(OSError):  # the error that ended the recording is in the log
            write_meta(self.directory, self._meta)
        self._close_files()

    def discard(self) -> None:
        """Close all files and delete them: nothing of the session is kept."""
        self._close_files()
        with contextlib.suppress(OSError):
            delete_recording(self.directory)

    def _close_files(self) -> None:
        for wav in self._wavs.values():
            wav.close()
        self._wavs.clear()
        if self._stream >= 0:
            os.close(self._stream)
            self._stream = -1

    def _guard(self, step: Callable[[], None]) -> None:
        """Run `step`; end the recording if it raises OSError."""
        try:
            step()
        except OSError as error:
            self._meta.error = error.strerror or str(error)
            self._meta.is_incomplete = True
            _log.warning("recording %s stops: %s", self._meta.session_id, self._meta.error)
            if not isinstance(error, RecordingFullError | RecordingDeletedError):
                self._on_disk_error()
            if not self.directory.exists():
                self._close_files()  # it was deleted: the disk must keep nothing of it
                return
            with contextlib.suppress(OSError):
                write_meta(self.directory, self._meta)

    def _open(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True)
        (self.directory / BLOBS).mkdir(mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND
        part = self.directory / f"{STREAM}.part"
        self._stream = os.open(part, flags, 0o600)
        lock(self._stream)
        # `is_incomplete` is true until the recording is complete: once the disk is full, it can no
        # longer be set to true.
        self._meta.is_incomplete = True
        write_meta(self.directory, self._meta)
        part.rename(self.directory / STREAM)  # from now on it is listed as running

    def _write(
        self, direction: Direction, frame: bytes, at_s: float, sound: SoundFormat, audio: bytes
    ) -> None:
        if os.fstat(self._stream).st_nlink == 0:
            raise RecordingDeletedError("the recording was deleted")
        event, blobs = split(frame, self._blob_count, sound)
        for blob in blobs:
            self._write_blob(blob.name, blob.content)
            if blob.is_audio:
                samples = np.frombuffer(sound.decode(_whole(blob.content, sound)), "<f4")
                self._write_blob(blob.wav_name, wav_file(samples, sound.rate_hertz))
        self._blob_count += len(blobs)
        entry = {
            "seq": self._event_count,
            "ts": self._meta.created_at + at_s,
            "dir": direction,
            "frame": event,
        }
        if not self._is_chat and (trace := payload_trace(blobs)):
            entry["payload_trace"] = trace
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        self._count(len(line))
        os.write(self._stream, line)
        self._event_count += 1
        if direction is Direction.UP:
            self._write_audio(direction, samples_from_pcm(audio), at_s, sound)
            return
        for samples in self._new_speech(event, blobs, sound):
            self._write_audio(direction, samples, at_s, sound)

    def _write_blob(self, name: str, content: bytes) -> None:
        self._count(len(content))
        with create_file(self.directory / name) as file:
            file.write(content)

    def _count(self, byte_count: int) -> None:
        self._free_bytes -= byte_count
        if self._free_bytes < 0:
            raise RecordingFullError("the recording has reached its largest size")

    def _write_audio(
        self, direction: Direction, samples: Samples, at_s: float, sound: SoundFormat
    ) -> None:
        """Write the audio of an event that was received or sent at `at_s`.

        The user's audio ends at the time when it was received; the model's audio begins at the time
        when it was sent. In a chat, turns follow one another and never overlap.
        """
        is_user = direction is Direction.UP
        if is_user and (self._is_chat or samples.size):
            self._has_spoken = False
        if not samples.size:
            return
        if self._is_chat:
            other = self._wavs.get(_OPPOSITE[direction])
            begin_s = max(at_s, other.end_s if other else 0.0)
        elif is_user:
            begin_s = max(0.0, at_s - samples.size / sound.rate_hertz)
        else:
            begin_s = at_s
        self._has_spoken = not is_user
        self._count(self._wav(direction, sound).append(samples, begin_s))

    def _new_speech(
        self, event: object, blobs: list[Blob], sound: SoundFormat
    ) -> Iterator[Samples]:
        """Yield the model's audio in an event, unless the event only repeats earlier audio."""
        if self._has_spoken and event_type(event) in _WHOLE_REPLIES:
            return
        for blob in blobs:
            if blob.is_audio:
                yield _samples(blob)
            elif self._is_chat and blob.name.endswith(WAV_SUFFIX):
                yield _file_samples(blob, sound)

    def _wav(self, direction: Direction, sound: SoundFormat) -> WavWriter:
        wav = self._wavs.get(direction)
        if wav is None:
            name = USER if direction is Direction.UP else MODEL
            wav = WavWriter(self.directory / name, sound.rate_hertz)
            self._wavs[direction] = wav
        return wav


def _whole(content: bytes, sound: SoundFormat) -> bytes:
    """Return whole samples: the client may send the rest of the last one with the next event."""
    return content[: len(content) // sound.sample_bytes * sound.sample_bytes]


def _file_samples(blob: Blob, sound: SoundFormat) -> Samples:
    """Return the sound of a WAV file, which is a whole answer."""
    try:
        return read_client_wav(blob.content, rate_hertz=sound.rate_hertz)
    except AudioError:
        return np.zeros(0, np.float32)  # the blob itself is still recorded


def _samples(blob: Blob) -> Samples:
    try:
        return samples_from_pcm(blob.sound.decode(blob.content) if blob.sound else b"")
    except AudioError:
        return np.zeros(0, np.float32)  # the blob itself is still recorded
