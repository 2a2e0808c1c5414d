"""Whisper's log-mel of a live stream, compared with the log-mel of its whole history."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from duplane.worker.models.minicpm_o.audio.mel import (
    BACKLOG_SAMPLES,
    CONTEXT_FRAMES,
    FFT_SIZE,
    FIRST_UNIT_FILL,
    HOP,
    AudioBacklogError,
    LogMel,
    MelStream,
)

BINS = 80


def speech(seed: int, seconds: int) -> np.ndarray:
    """Return bursts of very different loudness, so that the peak of the history changes."""
    random = np.random.default_rng(seed)
    loudness = 10 ** random.uniform(-4, 0, seconds * 10).repeat(1600)
    return (random.standard_normal(seconds * 16000) * 0.3 * loudness).astype(np.float32)


def emit(stream: MelStream, slots: Sequence[int]) -> tuple[torch.Tensor, list[bool]]:
    """Consume one unit of each slot and return its features."""
    for slot in slots:
        stream.take(slot)
    return stream.features(slots)


def whole_history_units(samples: np.ndarray, units: int) -> list[torch.Tensor]:
    """Compute the mel of the whole history for every unit, as the reference does."""
    log_mel = LogMel(BINS)
    fed = np.concatenate([np.zeros(560, np.float32), samples])
    history = np.zeros(0, np.float32)
    outputs: list[torch.Tensor] = []
    dropped = 0
    for unit in range(units):
        start, end = (0, 16480) if unit == 0 else (480 + unit * 16000, 16480 + unit * 16000)
        history = np.concatenate([history, fed[start:end]])
        if len(history) >= 30 * 16000:
            history = history[160000:]
            dropped += 1000
        spectrum = torch.stft(
            torch.from_numpy(history),
            FFT_SIZE,
            HOP,
            window=torch.hann_window(FFT_SIZE),
            return_complex=True,
        )
        power = spectrum[:, :-1].abs().square().T @ log_mel.filters
        mel = power.clamp(min=1e-10).log10()
        floor = mel.max() - 8 if len(history) >= 5 * 16000 else torch.tensor(-10.0)
        mel = (torch.maximum(mel, floor) + 4) / 4
        core = 100 * unit - dropped
        outputs.append(mel[max(0, core - 2) : core + 102])
    return outputs


def test_the_mel_of_a_unit_equals_that_of_the_whole_history() -> None:
    samples = speech(1, 55)
    stream = MelStream(BINS, slot_count=2)
    for unit, expected in enumerate(whole_history_units(samples, 55)):
        assert stream.push(1, samples[unit * 16000 : (unit + 1) * 16000])
        features, is_first = emit(stream, [1])
        assert is_first == [unit == 0]
        got = features[0, CONTEXT_FRAMES if unit == 0 else 0 :]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_the_mel_does_not_depend_on_the_other_slots() -> None:
    signals = [speech(seed, 40) for seed in range(3)]
    alone: list[list[torch.Tensor]] = []
    for signal in signals:
        stream = MelStream(BINS, slot_count=1)
        rows: list[torch.Tensor] = []
        for unit in range(40):
            stream.push(0, signal[unit * 16000 : (unit + 1) * 16000])
            rows.append(emit(stream, [0])[0][0])
        alone.append(rows)

    together = MelStream(BINS, slot_count=3)
    delays = [0, 7, 31]
    for tick in range(40):
        slots = [slot for slot in (2, 0, 1) if tick >= delays[slot]]
        for slot in slots:
            unit = tick - delays[slot]
            together.push(slot, signals[slot][unit * 16000 : (unit + 1) * 16000])
        features, _ = emit(together, slots)
        for slot, row in zip(slots, features, strict=True):
            expected = alone[slot][tick - delays[slot]]
            torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


def test_only_the_first_unit_is_padded_with_silence() -> None:
    stream = MelStream(BINS, slot_count=1)
    assert stream.push(0, np.ones(4000, np.float32))
    assert stream.buffered(0) == FIRST_UNIT_FILL
    emit(stream, [0])
    assert stream.buffered(0) == 80
    assert not stream.push(0, np.ones(4000, np.float32))
    assert stream.buffered(0) == 4080
    assert stream.push(0, np.ones(20000, np.float32))
    emit(stream, [0])
    assert stream.buffered(0) == 8080


def test_a_long_first_unit_is_not_padded() -> None:
    stream = MelStream(BINS, slot_count=1)
    assert stream.push(0, np.ones(20000, np.float32))
    assert stream.buffered(0) == 20000


def test_an_empty_push_completes_no_unit() -> None:
    assert not MelStream(BINS, slot_count=1).push(0, np.zeros(0, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused_and_change_nothing(bad: float) -> None:
    stream = MelStream(BINS, slot_count=1)
    samples = np.zeros(16000, np.float32)
    samples[7] = bad
    with pytest.raises(ValueError, match="audio: expected one row of finite samples"):
        stream.push(0, samples)
    assert stream.is_clean(0)


def test_a_backlog_beyond_its_bound_is_refused_and_changes_nothing() -> None:
    stream = MelStream(BINS, slot_count=1)
    stream.push(0, np.ones(BACKLOG_SAMPLES - 100, np.float32))
    with pytest.raises(AudioBacklogError, match="at most 30 s"):
        stream.push(0, np.ones(101, np.float32))
    assert stream.buffered(0) == BACKLOG_SAMPLES - 100


def test_consuming_an_incomplete_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 0 has no whole unit"):
        emit(MelStream(BINS, slot_count=1), [0])


def test_a_reset_slot_repeats_its_results() -> None:
    stream = MelStream(BINS, slot_count=2)
    samples = speech(3, 1)
    stream.push(0, samples)
    first, _ = emit(stream, [0])
    for _ in range(8):
        stream.push(0, samples * 3)
        emit(stream, [0])
    assert not stream.is_clean(0)
    stream.reset(0)
    assert stream.is_clean(0)
    stream.push(0, samples)
    again, is_first = emit(stream, [0])
    assert is_first == [True]
    assert torch.equal(first, again)


def test_a_clip_is_normalised_by_its_own_peak() -> None:
    mel = LogMel(BINS).clip(speech(4, 2)[:20001])
    assert mel.shape == (126, BINS)
    assert mel.max() - mel.min() <= 2.0 + 1e-6
