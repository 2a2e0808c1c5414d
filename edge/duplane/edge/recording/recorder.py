"""Records sessions. Sessions queue events without waiting; threads write them to disk."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Iterable
from pathlib import Path

from duplane.edge.clock import Clock, Moment, Timer
from duplane.edge.payload.sound_format import INPUT_SOUND, OUTPUT_SOUND, SoundFormat
from duplane.edge.recording.events import without_token
from duplane.edge.recording.mix import mix, mix_bytes
from duplane.edge.recording.retention import recover, sweep, total_bytes
from duplane.edge.recording.serial_executor import Job, SerialExecutor
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import Meta, safe_name
from duplane.edge.recording.writer import Direction, RecordingWriter

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0  # for the queued jobs when the process ends, or before something is erased
_MAX_PATH = 256  # characters
_EVENT_BYTES = 256  # memory of a queued event besides its bytes
# Bytes on disk per submitted byte, at most, if the client sends as much sound as it gets: besides
# the sound as it was sent, PCM16 is stored twice. G.711 has the most bytes on disk.
_DISK_RATIO = 1.5
# Old recordings are deleted when less than this share of `max_total_bytes` is free.
_SWEEP_SHARE = 0.05


class Recording:
    """The recording of one session. All methods return without waiting."""

    def __init__(self, recorder: Recorder, writer: RecordingWriter, begun: Moment) -> None:
        self.worker: str | None = None
        self._recorder = recorder
        self._writer = writer
        self._begun = begun
        self._lost_event_count = 0

    def up(self, frame: bytes, audio: bytes, now: Moment, sound: SoundFormat = INPUT_SOUND) -> None:
        """Record an event of the client, with the PCM that the session decoded from it.

        `sound` is the format of sound in the event; the PCM has its rate.
        """
        self._write(Direction.UP, frame, now, sound, audio)

    def down(self, events: Iterable[bytes], now: Moment, sound: SoundFormat = OUTPUT_SOUND) -> None:
        """Record events that are sent to the client. `sound` is the format of their sound."""
        for event in events:
            self._write(Direction.DOWN, event, now, sound)

    def end(self, dialect: str, reason: str, now: Moment) -> None:
        """Record the end of the session. No event may follow."""
        duration_s = self._offset_s(now)

        def update(meta: Meta) -> None:
            meta.dialect = dialect
            meta.worker = self.worker
            meta.ended_at = meta.created_at + duration_s
            meta.duration_s = duration_s
            meta.close_reason = reason
            meta.lost_event_count = self._lost_event_count

        self._recorder.finish(self._writer, functools.partial(self._writer.end, update))

    def discard(self) -> None:
        """Delete the recording: its client has returned to another session."""
        self._recorder.submit(self._writer.discard, 0)

    def _write(
        self,
        direction: Direction,
        frame: bytes,
        now: Moment,
        sound: SoundFormat,
        audio: bytes = b"",
    ) -> None:
        at_s = self._offset_s(now)
        frame = without_token(frame)
        job = functools.partial(self._writer.write, direction, frame, at_s, sound, audio)
        if not self._recorder.submit(job, len(frame) + len(audio) + _EVENT_BYTES):
            self._lost_event_count += 1

    def _offset_s(self, now: Moment) -> float:
        return now.monotonic_s - self._begun.monotonic_s


class Recorder:
    """All recordings of one process. One thread writes; another mixes, deletes and recovers.

    Call its methods only on the event loop's thread.
    """

    def __init__(self, settings: RecordingSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self.stopped_count = 0  # recordings that an error of the disk ended
        self._writing = SerialExecutor("recording-writer")
        self._upkeep = SerialExecutor("recording-upkeep")
        # Bytes submitted by the loop's thread, and bytes finished by the writing thread. The
        # difference is the size of the queue.
        self._submitted_bytes = 0
        self._written_bytes = 0
        # If `_submitted_bytes` reaches this value, `max_total_bytes` is used up. Deleting old
        # recordings (a sweep) raises this value.
        self._limit_bytes = math.inf
        self._sweep_at_bytes = -1  # value of `_submitted_bytes` when a sweep was last requested
        if settings.max_total_bytes is not None:
            self._limit_bytes = settings.max_total_bytes * _SWEEP_SHARE
        self._timer: Timer | None = None

        self._upkeep.submit(functools.partial(recover, settings))
        self._sweep()

    def close(self) -> None:
        """Write all queued events; take at most `_CLOSE_S` per thread.

        Later events are not recorded.
        """
        if self._timer:
            self._timer.cancel()
        self._writing.close(_CLOSE_S)
        self._upkeep.close(_CLOSE_S)

    async def written(self) -> None:
        """Wait until everything queued so far is on disk. Raises TimeoutError after `_CLOSE_S`."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        self.submit(notify, 0)
        async with asyncio.timeout(_CLOSE_S):
            await done.wait()

    def begin(
        self, session_id: str, url_path: str, mode: str, identity: dict[str, str], now: Moment
    ) -> Recording:
        """Begin to record a session.

        The recording's name is the session id, which the server chooses.
        """
        name = safe_name(session_id)
        path = url_path.partition("?")[0][:_MAX_PATH]
        meta = Meta(name, path, mode, created_at=now.wall_s, identity=identity)
        directory = self._settings.directory / name
        writer = RecordingWriter(directory, meta, self._settings.session_bytes, self._count_stopped)
        self.submit(writer.open, 0)
        return Recording(self, writer, now)

    def _count_stopped(self) -> None:
        self.stopped_count += 1  # only the thread that writes calls this

    def finish(self, writer: RecordingWriter, end: Job) -> None:
        """Queue the end of a recording, and after that its mix."""
        self.submit(end, 0)
        now_s = self._clock.now().wall_s
        self.submit(
            lambda: self._upkeep.submit(functools.partial(self._mix, writer.directory, now_s)), 0
        )

    def submit(self, job: Job, byte_count: int) -> bool:
        """Queue a job that holds `byte_count` bytes of memory; return False if the queue is full.

        A job of 0 bytes (the beginning or end of a recording) is always queued. Other jobs are also
        refused if the running recordings alone use up `max_total_bytes`.
        """
        queued_bytes = self._submitted_bytes - self._written_bytes
        if byte_count and queued_bytes + byte_count > self._settings.queue_bytes:
            return False
        room_bytes = self._limit_bytes - self._submitted_bytes
        if room_bytes < (self._settings.max_total_bytes or 0) * _SWEEP_SHARE:
            self._request_sweep()
        if byte_count > room_bytes:
            return False
        self._submitted_bytes += byte_count
        self._writing.submit(functools.partial(self._write, job, byte_count))
        return True

    def _write(self, job: Job, byte_count: int) -> None:
        try:
            job()
        finally:
            self._written_bytes += byte_count

    def _mix(self, directory: Path, now_s: float) -> None:
        max_bytes = self._settings.replay_bytes
        try:
            size_bytes = mix_bytes(directory)
            if size_bytes <= max_bytes and self._make_room(now_s, size_bytes, directory) >= 0:
                mix(directory, max_bytes)
        except OSError as error:
            _log.warning("recording %s cannot be mixed: %s", directory.name, error)

    def _make_room(self, now_s: float, size_bytes: int, directory: Path) -> float:
        """Delete old recordings to make room for a mix; return the bytes that stay free."""
        if self._settings.max_total_bytes is None:
            return math.inf
        return self._delete_old(now_s, size_bytes, directory)

    def _delete_old(self, now_s: float, reserved_bytes: int = 0, kept: Path | None = None) -> float:
        """Delete old recordings except `kept`; return the free bytes minus `reserved_bytes`."""
        written_bytes = self._written_bytes
        max_total = self._settings.max_total_bytes
        headroom = int((max_total or 0) * 2 * _SWEEP_SHARE)
        sweep(self._settings, now_s, reserved_bytes + headroom, kept)
        if max_total is None:
            return math.inf
        room_bytes = max_total - total_bytes(self._settings.directory) - reserved_bytes
        self._limit_bytes = written_bytes + room_bytes / _DISK_RATIO
        return room_bytes

    def _request_sweep(self) -> None:
        if self._submitted_bytes > self._sweep_at_bytes:  # new bytes since then
            self._sweep_at_bytes = self._submitted_bytes
            now_s = self._clock.now().wall_s
            self._upkeep.submit(functools.partial(self._delete_old, now_s))

    def _sweep(self) -> None:
        now = self._clock.now()
        self._upkeep.submit(functools.partial(self._delete_old, now.wall_s))
        due_s = now.monotonic_s + self._settings.sweep_interval_s
        self._timer = self._clock.call_at(due_s, self._sweep)
