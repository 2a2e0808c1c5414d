"""Short recordings and synthesised phrases at 16 kHz: reading, trimming, joining, telephones."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none
import soxr  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.tools.command import UsageError
from duplane.worker.models.minicpm_o.types import INPUT_SAMPLE_RATE
from duplane.worker.models.types import FloatArray

TELEPHONE_RATE = 8_000
TELEPHONE_BAND = (300.0, 3_400.0)
_MU = 255.0
_FRAME_S, _KEPT_S = 0.01, 0.03
_SPEECH_SHARE = 0.04
"""A frame contains speech if its level is at least this share of the loudest frame's."""


def read_clip(path: Path) -> FloatArray:
    """Read a sound file as one channel at 16 kHz; `.raw` is 16-bit PCM at this rate.

    Raises UsageError naming the file.
    """
    try:
        if path.suffix == ".raw":
            return np.fromfile(path, "<i2").astype(np.float32) / 32768.0
        samples, rate = cast("Any", soundfile).read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.LibsndfileError) as error:
        raise UsageError(f"{path}: is no sound file: {error}") from None
    return resample(samples.mean(1), rate, INPUT_SAMPLE_RATE)


def resample(samples: FloatArray, rate: float, wanted: float) -> FloatArray:
    """Change the sampling rate."""
    return np.asarray(cast("Any", soxr).resample(samples, rate, wanted), np.float32)


def trimmed(samples: FloatArray) -> FloatArray:
    """Cut off the silence before and after the speech, except 30 ms."""
    size = int(_FRAME_S * INPUT_SAMPLE_RATE)
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    levels = np.sqrt(np.square(frames).mean(1))
    spoken = np.flatnonzero(levels > _SPEECH_SHARE * levels.max(initial=1e-6))
    if not len(spoken):
        return samples
    kept = int(_KEPT_S * INPUT_SAMPLE_RATE)
    return samples[max(0, spoken[0] * size - kept) : (spoken[-1] + 1) * size + kept]


def joined(clips: Sequence[FloatArray], gaps_s: Sequence[float], rms: float = 0.1) -> FloatArray:
    """Join clips of different levels, with a gap after each clip but the last."""
    parts: list[FloatArray] = []
    for clip, gap_s in zip(clips, (*gaps_s, 0.0), strict=True):
        level = float(np.sqrt(np.square(clip).mean()))
        parts.append(clip * np.float32(rms / max(level, 1e-6)))
        parts.append(np.zeros(int(gap_s * INPUT_SAMPLE_RATE), np.float32))
    return np.concatenate(parts)


def narrowed(samples: FloatArray) -> FloatArray:
    """Remove what a sampling rate of 8 kHz cannot carry."""
    low = resample(samples, INPUT_SAMPLE_RATE, TELEPHONE_RATE)
    return resample(low, TELEPHONE_RATE, INPUT_SAMPLE_RATE)


def telephoned(samples: FloatArray) -> FloatArray:
    """Return the sound after a telephone line: 300 to 3,400 Hz in eight bits of mu-law."""
    low = resample(samples, INPUT_SAMPLE_RATE, TELEPHONE_RATE)
    spectrum = np.fft.rfft(low)
    at = np.fft.rfftfreq(len(low), 1 / TELEPHONE_RATE)
    spectrum[(at < TELEPHONE_BAND[0]) | (at > TELEPHONE_BAND[1])] = 0.0
    line: FloatArray = np.clip(np.fft.irfft(spectrum, len(low)), -1.0, 1.0).astype(np.float32)
    loudness = np.rint(np.log1p(_MU * np.abs(line)) / np.log1p(_MU) * 127) / 127
    decoded = np.sign(line) * np.expm1(loudness * np.log1p(_MU)) / _MU
    return resample(decoded.astype(np.float32), TELEPHONE_RATE, INPUT_SAMPLE_RATE)


def kept_clip(folder: Path, name: str, make: Callable[[], FloatArray]) -> FloatArray:
    """Return the clip that `make` makes; the folder keeps it for the next time."""
    path = folder / f"{hashlib.sha256(name.encode()).hexdigest()[:24]}.wav"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_clip(path, make())
    return read_clip(path)


def write_clip(path: Path, samples: FloatArray) -> None:
    """Write sound at 16 kHz as a WAV file, which has its name only when it is complete.

    Several processes may write the same file at once.
    """
    part = path.with_suffix(f".{os.getpid()}.part")
    soundfile.write(part, samples, INPUT_SAMPLE_RATE, subtype="PCM_16", format="WAV")
    part.rename(path)
