"""Both directions of a recording as one stereo file: the user left, the model right."""

# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import soundfile
import soxr

from duplane.edge.recording.shelf import MODEL, REPLAY, USER
from duplane.fabric.audio import INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, Samples


def mix(directory: Path) -> bool:
    """Write the replay of a recording that has ended, a second at a time.

    Returns whether there was anything to hear. Raises OSError.
    """
    # Named by process: another that starts now may take this recording for a lost one.
    part = directory / f"{REPLAY}.{os.getpid()}.part"
    try:
        if not _mix_into(part, directory):
            return False
    except soundfile.LibsndfileError as error:
        raise OSError(error.error_string) from None
    part.replace(directory / REPLAY)
    return True


def _mix_into(part: Path, directory: Path) -> bool:
    with contextlib.ExitStack() as files:
        user = _open(directory / USER, files)
        model = _open(directory / MODEL, files)
        if user is None and model is None:
            return False
        stereo = files.enter_context(
            soundfile.SoundFile(part, "w", OUTPUT_RATE_HERTZ, 2, "PCM_16", format="WAV")
        )
        resampler = soxr.ResampleStream(INPUT_RATE_HERTZ, OUTPUT_RATE_HERTZ, 1, dtype="float32")
        is_over = user is None
        while not is_over:
            heard = _read(user, INPUT_RATE_HERTZ)
            is_over = heard.size < INPUT_RATE_HERTZ
            left = np.asarray(resampler.resample_chunk(heard, last=is_over), np.float32)
            _write(stereo, left, _read(model, left.size))
        while (right := _read(model, OUTPUT_RATE_HERTZ)).size:
            _write(stereo, right[:0], right)
    return True


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
