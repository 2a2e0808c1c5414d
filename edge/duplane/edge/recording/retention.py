"""Deletes old recordings by age and total size; completes the recordings of a killed process."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from duplane.edge.recording.mix import mix, remove_unfinished
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.storage import (
    REPLAY,
    STREAM,
    delete_leftovers,
    delete_recording,
    is_running,
    read_meta,
    recordings,
    size_bytes,
    write_meta,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredRecording:
    """The properties of one recording that decide its deletion; `begun_s` is Unix time."""

    directory: Path
    begun_s: float
    size_bytes: int
    is_running: bool


def expired(
    stored: Iterable[StoredRecording],
    now_s: float,
    max_age_s: float | None,
    max_total_bytes: int | None,
) -> list[StoredRecording]:
    """Return the recordings to delete, oldest first. Running recordings are never deleted. Pure."""
    oldest_first = sorted(stored, key=lambda recording: recording.begun_s)
    total = sum(recording.size_bytes for recording in oldest_first)
    deleted: list[StoredRecording] = []
    for recording in oldest_first:
        is_old = max_age_s is not None and now_s - recording.begun_s > max_age_s
        is_too_much = max_total_bytes is not None and total > max_total_bytes
        if not recording.is_running and (is_old or is_too_much):
            deleted.append(recording)
            total -= recording.size_bytes
    return deleted


def total_bytes(root: Path) -> int:
    """Return the size of all recordings."""
    return sum(size_bytes(directory) for directory in recordings(root))


def sweep(
    settings: RecordingSettings,
    now_s: float,
    reserved_bytes: int = 0,
    kept: Path | None = None,
) -> list[str]:
    """Delete the expired recordings and return their names. Disk errors are logged.

    `reserved_bytes` of `max_total_bytes` stay free. The recording `kept` is not deleted.
    """
    root = settings.directory
    delete_leftovers(root)
    if settings.max_age_s is None and settings.max_total_bytes is None:
        return []
    stored = [_stored(directory, now_s) for directory in recordings(root)]
    max_bytes = settings.max_total_bytes
    if max_bytes is not None:
        max_bytes = max(0, max_bytes - reserved_bytes)
    deleted = expired(stored, now_s, settings.max_age_s, max_bytes)
    for recording in deleted:
        if recording.directory == kept:
            continue
        try:
            delete_recording(recording.directory)
        except OSError as error:
            _log.warning("recording %s cannot be deleted: %s", recording.directory.name, error)
    return [recording.directory.name for recording in deleted]


def _stored(directory: Path, now_s: float) -> StoredRecording:
    meta = read_meta(directory)
    begun_s = meta.created_at if meta else _modified_s(directory, now_s)
    return StoredRecording(directory, begun_s, size_bytes(directory), is_running(directory))


def _modified_s(directory: Path, default_s: float) -> float:
    try:
        return (directory / STREAM).stat().st_mtime
    except OSError:
        return default_s


def recover(settings: RecordingSettings) -> list[str]:
    """Complete the recordings of killed processes; return their names.

    Each of these recordings gets an end in its meta, and a mix if it has none.
    """
    recovered: list[str] = []
    for directory in recordings(settings.directory):
        if is_running(directory):
            continue
        try:
            was_lost = _end_lost(directory)
            remove_unfinished(directory)
            is_mixed = (directory / REPLAY).exists()
            was_mixed = not is_mixed and mix(directory, settings.replay_bytes)
        except OSError as error:
            _log.warning("recording %s cannot be recovered: %s", directory.name, error)
            continue
        if was_lost or was_mixed:
            recovered.append(directory.name)
    return recovered


def _end_lost(directory: Path) -> bool:
    meta = read_meta(directory)
    if meta is None or meta.ended_at is not None:
        return False
    meta.ended_at = max(meta.created_at, _modified_s(directory, meta.created_at))
    meta.duration_s = meta.ended_at - meta.created_at
    meta.close_reason = "lost"
    meta.is_incomplete = True
    write_meta(directory, meta)
    return True
