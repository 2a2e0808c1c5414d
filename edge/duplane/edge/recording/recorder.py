"""Recording as sessions see it: they hand over events and never wait."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from pathlib import Path

from duplane.edge.clock import Alarm, Clock
from duplane.edge.dialects.dialect import Moment
from duplane.edge.recording.lane import Job, Lane
from duplane.edge.recording.mix import mix
from duplane.edge.recording.retention import recover, sweep
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.shelf import Meta, safe_name
from duplane.edge.recording.tape import Direction, Tape

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0  # for what is queued when the process ends
_MAX_PATH = 256  # characters
_EVENT_BYTES = 256  # what holding an event costs beside its bytes


class Recording:
    """One session's recording. All methods return at once."""

    def __init__(self, recorder: Recorder, tape: Tape, begun: Moment) -> None:
        self.worker: str | None = None
        self._recorder = recorder
        self._tape = tape
        self._begun = begun
        self._lost_event_count = 0

    def up(self, frame: bytes, heard: bytes, now: Moment) -> None:
        """Take what the client sent, and what the session heard in it: PCM at 16 kHz."""
        self._write(Direction.UP, frame, now, heard)

    def down(self, events: Iterable[bytes], now: Moment) -> None:
        """Take what the client is told."""
        for event in events:
            self._write(Direction.DOWN, event, now)

    def end(self, dialect: str, reason: str, now: Moment) -> None:
        """Take the end of the session; afterwards nothing may follow."""
        duration_s = self._offset_s(now)

        def changes(meta: Meta) -> None:
            meta.dialect = dialect
            meta.worker = self.worker
            meta.ended_at = meta.created_at + duration_s
            meta.duration_s = duration_s
            meta.close_reason = reason
            meta.lost_event_count = self._lost_event_count

        self._recorder.finish(self._tape, functools.partial(self._tape.end, changes))

    def _write(self, direction: Direction, frame: bytes, now: Moment, heard: bytes = b"") -> None:
        job = functools.partial(self._tape.write, direction, frame, self._offset_s(now), heard)
        if not self._recorder.put(job, len(frame) + len(heard) + _EVENT_BYTES):
            self._lost_event_count += 1

    def _offset_s(self, now: Moment) -> float:
        return now.monotonic_s - self._begun.monotonic_s


class Recorder:
    """All recordings of one process: one thread writes, another mixes, sweeps and recovers.

    Its own methods are called on the event loop's thread only.
    """

    def __init__(self, settings: RecordingSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._writer = Lane("recording-writer")
        self._upkeep = Lane("recording-upkeep")
        # Each side counts for itself; the difference is what is held.
        self._put_bytes = 0
        self._written_bytes = 0
        self._alarm: Alarm | None = None

        self._upkeep.put(functools.partial(recover, settings))
        self._sweep()

    def close(self) -> None:
        """Wait until all is written, not for ever. Blocks; nothing may be recorded afterwards."""
        if self._alarm:
            self._alarm.cancel()
        self._writer.close(_CLOSE_S)
        self._upkeep.close(_CLOSE_S)

    def begin(
        self, session_id: str, url_path: str, mode: str, identity: dict[str, str], now: Moment
    ) -> Recording:
        """Begin to record a session. Its id, drawn by the server, names the recording."""
        name = safe_name(session_id)
        path = url_path.partition("?")[0][:_MAX_PATH]
        meta = Meta(name, path, mode, created_at=now.wall_s, identity=identity)
        tape = Tape(self._settings.directory / name, meta, self._settings.session_bytes)
        self.put(tape.open, 0)
        return Recording(self, tape, now)

    def finish(self, tape: Tape, end: Job) -> None:
        """Queue the end of a recording, and its mix after it."""
        self.put(end, 0)
        self.put(lambda: self._upkeep.put(functools.partial(self._mix, tape.directory)), 0)

    def put(self, job: Job, byte_count: int) -> bool:
        """Queue a job that holds so many bytes; False, and not queued, when there is no room.

        What begins and ends recordings holds none and always finds room.
        """
        held = self._put_bytes - self._written_bytes
        if byte_count and held + byte_count > self._settings.queue_bytes:
            return False
        self._put_bytes += byte_count
        self._writer.put(functools.partial(self._do, job, byte_count))
        return True

    def _do(self, job: Job, byte_count: int) -> None:
        try:
            job()
        finally:
            self._written_bytes += byte_count

    def _mix(self, directory: Path) -> None:
        try:
            mix(directory, self._settings.replay_bytes)
        except OSError as error:
            _log.warning("recording %s cannot be mixed: %s", directory.name, error)

    def _sweep(self) -> None:
        now = self._clock.now()
        self._upkeep.put(functools.partial(sweep, self._settings, now.wall_s))
        due_s = now.monotonic_s + self._settings.sweep_interval_s
        self._alarm = self._clock.call_at(due_s, self._sweep)
