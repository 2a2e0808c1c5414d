"""Mixes both directions of a recording into one stereo file: user left, model right."""

# soundfile has no type stubs.
from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.edge.payload.rates import OUTPUT_RATE_HERTZ
from duplane.edge.recording.storage import MODEL, REPLAY, USER, create_file, is_locked, lock
from duplane.fabric.audio import Samples

_FRAME_BYTES = 4  # two channels of PCM16


def mix(directory: Path, max_bytes: int) -> bool:
    """Write the mix of a recording that has ended, one second at a time.

    Returns False, and writes nothing, if there is no audio or the mix would exceed `max_bytes`.
    Raises OSError.
    """
    # At its start, an edge deletes the unfinished mixes of killed processes. The lock, and the
    # process id in the name, show that this process is alive.
    part = directory / f"{REPLAY}.{os.getpid()}.part"
    try:
        with contextlib.ExitStack() as files:
            user = _open(directory / USER, files)
            model = _open(directory / MODEL, files)
            if not 0 < _size_bytes(user, model) <= max_bytes:
                return False
            file = files.enter_context(create_file(part))
            lock(file.fileno())
            _mix_into(file.fileno(), user, model)
            part.replace(directory / REPLAY)
    except soundfile.LibsndfileError as error:
        raise OSError(error.error_string) from None
    finally:
        part.unlink(missing_ok=True)
    return True


def mix_bytes(directory: Path) -> int:
    """Return the future size of the mix of a recording; 0 if there is no audio."""
    try:
        with contextlib.ExitStack() as files:
            return _size_bytes(_open(directory / USER, files), _open(directory / MODEL, files))
    except soundfile.LibsndfileError as error:
        raise OSError(error.error_string) from None


def remove_unfinished(directory: Path) -> None:
    """Delete the unfinished mixes of killed processes. Raises OSError."""
    for part in directory.glob(f"{REPLAY}.*.part"):
        if not is_locked(part):
            part.unlink(missing_ok=True)


def _size_bytes(user: soundfile.SoundFile | None, model: soundfile.SoundFile | None) -> int:
    """Return the size of the mix; 0 if there is no audio."""
    lengths_s = [wav.frames / wav.samplerate for wav in (user, model) if wav]
    return math.ceil(max(lengths_s, default=0.0) * _rate_hertz(model)) * _FRAME_BYTES


def _rate_hertz(model: soundfile.SoundFile | None) -> int:
    """Return the sample rate of the mix: that of the model's side."""
    # Without speech, the mix has the rate at which the client would have got it.
    return model.samplerate if model else OUTPUT_RATE_HERTZ


def _mix_into(
    file: int, user: soundfile.SoundFile | None, model: soundfile.SoundFile | None
) -> None:
    rate_hertz = _rate_hertz(model)
    with soundfile.SoundFile(
        file, "w", rate_hertz, 2, "PCM_16", format="WAV", closefd=False
    ) as stereo:
        for left in _resampled_seconds(user, rate_hertz) if user else ():
            _write(stereo, left, _read(model, left.size))
        while (right := _read(model, rate_hertz)).size:
            _write(stereo, right[:0], right)


def _resampled_seconds(wav: soundfile.SoundFile, rate_hertz: int) -> Iterator[Samples]:
    """Yield a file at another rate, about one second at a time."""
    resampler = soxr.ResampleStream(wav.samplerate, rate_hertz, 1, dtype="float32")
    is_at_end = False
    while not is_at_end:
        second = _read(wav, wav.samplerate)
        is_at_end = second.size < wav.samplerate
        yield np.asarray(resampler.resample_chunk(second, last=is_at_end), np.float32)


def _open(path: Path, files: contextlib.ExitStack) -> soundfile.SoundFile | None:
    return files.enter_context(soundfile.SoundFile(path)) if path.exists() else None


def _read(wav: soundfile.SoundFile | None, count: int) -> Samples:
    if wav is None or count == 0:
        return np.zeros(0, np.float32)
    return np.asarray(wav.read(count, dtype="float32"), np.float32)


def _write(stereo: soundfile.SoundFile, left: Samples, right: Samples) -> None:
    both = np.zeros((max(left.size, right.size), 2), np.float32)
    both[: left.size, 0] = left
    both[: right.size, 1] = right
    stereo.write(both)
