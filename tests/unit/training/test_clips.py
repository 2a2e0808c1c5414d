"""Clips: reading, trimming and joining recordings, and the sound of a telephone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile  # pyright: ignore[reportMissingTypeStubs]  it ships none

from duplane.tools.command import UsageError
from duplane.worker.models.types import FloatArray
from training.corpus.clips import joined, kept_clip, narrowed, read_clip, telephoned, trimmed

RATE = 16_000


def tone(hertz: float, duration_s: float = 0.5, level: float = 0.3) -> FloatArray:
    at = np.arange(int(duration_s * RATE)) / RATE
    return (level * np.sin(2 * np.pi * hertz * at)).astype(np.float32)


def rms(samples: FloatArray) -> float:
    return float(np.sqrt(np.square(samples).mean()))


def test_files_are_read_as_one_channel_at_16_khz(tmp_path: Path) -> None:
    wide = np.stack([tone(440.0), np.zeros(RATE // 2, np.float32)], 1)
    soundfile.write(tmp_path / "stereo.wav", np.repeat(wide, 2, 0), 2 * RATE)
    assert len(read_clip(tmp_path / "stereo.wav")) == RATE // 2
    assert rms(read_clip(tmp_path / "stereo.wav")) == pytest.approx(0.15 / 2**0.5, rel=0.1)
    (tone(440.0) * 32768).astype("<i2").tofile(tmp_path / "speech.raw")
    assert np.allclose(read_clip(tmp_path / "speech.raw"), tone(440.0), atol=1e-3)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("words", encoding="utf-8")
    for name in ("text.wav", "missing.wav"):
        with pytest.raises(UsageError, match=f"{name}: is no sound file"):
            read_clip(tmp_path / name)


def test_silence_around_speech_is_cut() -> None:
    silence = np.zeros(RATE, np.float32)
    cut = trimmed(np.concatenate((silence, tone(440.0), silence)))
    assert len(cut) == pytest.approx(RATE * 0.56, abs=RATE * 0.02)
    assert len(trimmed(silence)) == len(silence)


def test_joined_clips_have_one_level_and_their_gaps() -> None:
    found = joined([tone(440.0, level=0.01), tone(440.0, level=0.5)], [0.25])
    assert len(found) == int(1.25 * RATE)
    half = RATE // 2
    assert rms(found[:half]) == pytest.approx(0.1, rel=0.01)
    assert not found[half : half + RATE // 4].any()
    assert rms(found[-half:]) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(("hertz", "passes"), [(150.0, False), (1000.0, True), (5000.0, False)])
def test_a_telephone_passes_only_its_band(hertz: float, *, passes: bool) -> None:
    kept = rms(telephoned(tone(hertz))) / rms(tone(hertz))
    assert (kept > 0.9) if passes else (kept < 0.1)
    assert (rms(narrowed(tone(hertz))) > 0.2) == (hertz < 4000)


def test_slow_speech_is_made_once(tmp_path: Path) -> None:
    made: list[FloatArray] = []

    def make() -> FloatArray:
        made.append(tone(440.0))
        return made[-1]

    first = kept_clip(tmp_path / "kept", "voice text", make)
    assert np.array_equal(first, kept_clip(tmp_path / "kept", "voice text", make))
    assert len(made) == 1
    assert np.allclose(first, tone(440.0), atol=1e-4)
    kept_clip(tmp_path / "kept", "voice other", make)
    assert len(made) == 2
