"""Both directions of a recording as one stereo file: the user left, the model right."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import numpy as np
import soundfile
import soxr

from duplane.edge.recording.shelf import MODEL, REPLAY, USER, is_locked, lock
from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, Samples

_FRAME_BYTES = 4  # two channels of PCM16


def mix(directory: Path, max_bytes: int) -> bool:
    """Write the replay of a recording that has ended, a second at a time.

    Returns whether it was made: not where there is nothing to hear, or where it, with the silence
    between, would be larger than `max_bytes`. Raises OSError.
    """
    # Named by process: another that starts now may take this recording for a lost one.
    part = directory / f"{REPLAY}.{os.getpid()}.part"
    try:
        with contextlib.ExitStack() as files:
            user = _open(directory / USER, files)
            model = _open(directory / MODEL, files)
            if not 0 < _size_bytes(user, model) <= max_bytes:
                return False
            file = files.enter_context(part.open("wb"))
            lock(file.fileno())
            _mix_into(file.fileno(), user, model)
            part.replace(directory / REPLAY)
    except soundfile.LibsndfileError as error:
        raise OSError(error.error_string) from None
    finally:
        part.unlink(missing_ok=True)
    return True


def remove_unfinished(directory: Path) -> None:
    """Delete what a process that has died while it mixed has left. Raises OSError."""
    for part in directory.glob(f"{REPLAY}.*.part"):
        if not is_locked(part):
            part.unlink(missing_ok=True)


def _size_bytes(user: soundfile.SoundFile | None, model: soundfile.SoundFile | None) -> int:
    """Return what the replay will take, 0 when there is nothing to hear."""
    lengths_s = [track.frames / track.samplerate for track in (user, model) if track]
    return math.ceil(max(lengths_s, default=0.0) * OUTPUT_RATE_HERTZ) * _FRAME_BYTES


def _mix_into(
    file: int, user: soundfile.SoundFile | None, model: soundfile.SoundFile | None
) -> None:
    with soundfile.SoundFile(
        file, "w", OUTPUT_RATE_HERTZ, 2, "PCM_16", format="WAV", closefd=False
    ) as stereo:
        resampler = soxr.ResampleStream(INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, 1, dtype="float32")
        is_over = user is None
        while not is_over:
            heard = _read(user, INPUT_RATE_HERTZ)
            is_over = heard.size < INPUT_RATE_HERTZ
            left = np.asarray(resampler.resample_chunk(heard, last=is_over), np.float32)
            _write(stereo, left, _read(model, left.size))
        while (right := _read(model, OUTPUT_RATE_HERTZ)).size:
            _write(stereo, right[:0], right)


def _open(path: Path, files: contextlib.ExitStack) -> soundfile.SoundFile | None:
    return files.enter_context(soundfile.SoundFile(path)) if path.exists() else None


def _read(track: soundfile.SoundFile | None, count: int) -> Samples:
    if track is None or count == 0:
        return np.zeros(0, np.float32)
    return np.asarray(track.read(count, dtype="float32"), np.float32)


def _write(stereo: soundfile.SoundFile, left: Samples, right: Samples) -> None:
    both = np.zeros((max(left.size, right.size), 2), np.float32)
    both[: left.size, 0] = left
    both[: right.size, 1] = right
    stereo.write(both)
