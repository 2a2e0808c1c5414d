"""How long recordings stay: by age and by total size, oldest first, never those that run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from duplane.edge.recording.mix import mix, remove_unfinished
from duplane.edge.recording.settings import RecordingSettings
from duplane.edge.recording.shelf import (
    REPLAY,
    STREAM,
    is_running,
    read_meta,
    recordings,
    size_bytes,
    write_meta,
)

_log = logging.getLogger(__name__)
_DOOMED = ".deleted-"  # names no recording can have


@dataclass(frozen=True, slots=True)
class Kept:
    """One recording, as far as keeping it goes; `age_from_s` is Unix time."""

    directory: Path
    age_from_s: float
    size_bytes: int
    is_running: bool


def expired(
    kept: Iterable[Kept], now_s: float, max_age_s: float | None, max_total_bytes: int | None
) -> list[Kept]:
    """Return what has to go, oldest first. Pure."""
    oldest_first = sorted(kept, key=lambda each: each.age_from_s)
    total = sum(each.size_bytes for each in oldest_first)
    gone: list[Kept] = []
    for each in oldest_first:
        is_old = max_age_s is not None and now_s - each.age_from_s > max_age_s
        is_too_much = max_total_bytes is not None and total > max_total_bytes
        if not each.is_running and (is_old or is_too_much):
            gone.append(each)
            total -= each.size_bytes
    return gone


def sweep(settings: RecordingSettings, now_s: float) -> list[str]:
    """Delete what has to go and return its names. A fault of the disk is logged and left."""
    root = settings.directory
    for doomed in root.glob(f"{_DOOMED}*"):
        shutil.rmtree(doomed, ignore_errors=True)
    if settings.max_age_s is None and settings.max_total_bytes is None:
        return []
    kept = [_kept(directory, now_s) for directory in recordings(root)]
    gone = expired(kept, now_s, settings.max_age_s, settings.max_total_bytes)
    for each in gone:
        # Renamed first: nobody sees half a recording.
        doomed = root / f"{_DOOMED}{each.directory.name}"
        try:
            each.directory.rename(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            _log.warning("recording %s cannot be deleted: %s", each.directory.name, error)
    return [each.directory.name for each in gone]


def _kept(directory: Path, now_s: float) -> Kept:
    meta = read_meta(directory)
    begun_s = meta.created_at if meta else _written_s(directory, now_s)
    return Kept(directory, begun_s, size_bytes(directory), is_running(directory))


def _written_s(directory: Path, otherwise: float) -> float:
    try:
        return (directory / STREAM).stat().st_mtime
    except OSError:
        return otherwise


def recover(settings: RecordingSettings) -> list[str]:
    """End the recordings whose process has died, mix what was not mixed; return their names."""
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
    meta.ended_at = max(meta.created_at, _written_s(directory, meta.created_at))
    meta.duration_s = meta.ended_at - meta.created_at
    meta.close_reason = "lost"
    meta.is_incomplete = True
    write_meta(directory, meta)
    return True
