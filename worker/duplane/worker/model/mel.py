"""Whisper log-mel of a live stream and of a clip, in float32 whatever the model runs in.

Decides which samples make up a unit and how its mel is normalised; knows nothing of encoders.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from duplane.worker.model.transfer import upload

SAMPLE_RATE = 16000
FFT_SIZE = 400
HOP = 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP

UNIT_SAMPLES = SAMPLE_RATE
FIRST_UNIT_SAMPLES = 16480
"""What the first unit consumes: 1035 ms cut to whole hops."""
FIRST_UNIT_FILL = 16560
"""A first unit shorter than 1035 ms gets silence in front, so 80 samples stay behind for good."""

CORE_FRAMES = UNIT_SAMPLES // HOP
CONTEXT_FRAMES = 2
"""Frames that a unit's mel repeats from its neighbours on each side, for the convolutions."""
UNIT_FRAMES = CORE_FRAMES + 2 * CONTEXT_FRAMES

HISTORY_SAMPLES = 30 * SAMPLE_RATE
"""A history that reaches this length drops its oldest DROPPED_SAMPLES."""
DROPPED_SAMPLES = 10 * SAMPLE_RATE
FIXED_FLOOR_SAMPLES = 5 * SAMPLE_RATE
"""A shorter history is not normalised by its own maximum."""
BACKLOG_SAMPLES = 30 * SAMPLE_RATE
"""Bound of the samples a slot may hold that no unit has consumed yet."""

POWER_FLOOR = 1e-10
DYNAMIC_RANGE = 8.0

_WINDOW_FRAMES = UNIT_FRAMES + 1
_WINDOW_SAMPLES = (_WINDOW_FRAMES - 1) * HOP + FFT_SIZE
_HALF = FFT_SIZE // 2


class LogMel(nn.Module):
    """Mel power of frames and Whisper's scaling of its logarithm. Holds window and filters only."""

    window: Tensor
    filters: Tensor

    def __init__(self, mel_bins: int, device: str | torch.device = "cpu") -> None:
        super().__init__()
        filters = mel_filter_bank(
            num_frequency_bins=FFT_SIZE // 2 + 1,
            num_mel_filters=mel_bins,
            min_frequency=0.0,
            max_frequency=SAMPLE_RATE / 2,
            sampling_rate=SAMPLE_RATE,
            norm="slaney",
            mel_scale="slaney",
        )
        window = torch.hann_window(FFT_SIZE, device=device)
        table = torch.tensor(filters, dtype=torch.float32, device=device)
        self.register_buffer("window", window, persistent=False)
        self.register_buffer("filters", table, persistent=False)

    def power(self, samples: Tensor) -> Tensor:
        """Mel power [n, frames, mel_bins] of padded samples [n, (frames - 1) * HOP + FFT_SIZE]."""
        spectrum = torch.stft(
            samples, FFT_SIZE, HOP, window=self.window, center=False, return_complex=True
        )
        return spectrum.abs().square().transpose(1, 2) @ self.filters

    def scale(self, power: Tensor, floor: Tensor | float) -> Tensor:
        """Whisper's input features: log10 of the power, not below `floor`, brought near [-1, 1]."""
        logarithm = power.clamp(min=POWER_FLOOR).log10()
        floor = torch.as_tensor(floor, dtype=logarithm.dtype, device=logarithm.device)
        return (torch.maximum(logarithm, floor) + 4.0) / 4.0

    def clip(self, samples: np.ndarray) -> Tensor:
        """Features [ceil(n / HOP), mel_bins] of one clip of at most 30 s, normalised as a whole.

        The clip is padded with silence to 30 s first, as the encoder was trained.
        """
        device = self.window.device
        padded = torch.zeros(1, HISTORY_SAMPLES, device=device)
        padded[0, : len(samples)] = upload(samples, device, torch.float32)
        padded = nn.functional.pad(padded, (_HALF, _HALF), mode="reflect")
        power = self.power(padded)[0, :-1]  # Whisper drops the last frame
        frames = -(-len(samples) // HOP)
        return self.scale(power[:frames], dynamic_floor(power.amax()))


def dynamic_floor(peak: Tensor) -> Tensor:
    """The floor of a log-mel whose largest power is `peak`."""
    return peak.clamp(min=POWER_FLOOR).log10() - DYNAMIC_RANGE


class AudioBacklogError(ValueError):
    """A slot was sent far more audio than its units consume; nothing of the push was taken."""


class MelStream(nn.Module):
    """The mel of each slot's live audio, one unit at a time.

    A unit's features are those that the mel of the slot's whole history (up to 30 s) has at the
    unit's frames, so their floor follows the loudest frame of all that history. Only the unit's
    own frames are computed; of earlier ones the peak is remembered, which gives the same maximum:
    a frame changes later only where it touches an end of the history, and those are redone.
    """

    samples: Tensor
    peaks: Tensor

    def __init__(self, mel_bins: int, slot_count: int, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.log_mel = LogMel(mel_bins, device)
        self._backlog = np.zeros((slot_count, BACKLOG_SAMPLES), np.float32)
        self._backlog_lengths = [0] * slot_count
        self._units = np.zeros((slot_count, FIRST_UNIT_SAMPLES), np.float32)
        self._taken = [0] * slot_count
        self._lengths = [0] * slot_count
        capacity = HISTORY_SAMPLES + FIRST_UNIT_SAMPLES
        # Column j of `peaks` belongs to frame j - CONTEXT_FRAMES; 0 where there is none.
        columns = capacity // HOP + CONTEXT_FRAMES
        samples = torch.zeros(slot_count, capacity, device=device)
        self.register_buffer("samples", samples, persistent=False)
        self.register_buffer(
            "peaks", torch.zeros(slot_count, columns, device=device), persistent=False
        )

    def push(self, slot: int, samples: np.ndarray) -> bool:
        """Append 16 kHz samples [n]; True if a unit's worth is there.

        Raises ValueError for samples that are not one finite row, AudioBacklogError for more
        than the slot may hold; the slot is unchanged then.
        """
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise ValueError("audio: expected one row of finite samples")
        held = self._backlog_lengths[slot]
        fill = 0
        if self._lengths[slot] == 0 and len(samples):
            fill = max(0, FIRST_UNIT_FILL - held - len(samples))
        total = held + fill + len(samples)
        if total > BACKLOG_SAMPLES:
            raise AudioBacklogError(
                f"audio: {total / SAMPLE_RATE:.1f} s are waiting, "
                f"at most {BACKLOG_SAMPLES // SAMPLE_RATE} s are kept"
            )
        row = self._backlog[slot]
        row[fill : fill + held] = row[:held].copy()
        row[:fill] = 0.0
        row[fill + held : total] = samples
        self._backlog_lengths[slot] = total
        return self.is_ready(slot)

    def is_ready(self, slot: int) -> bool:
        """Whether `emit` may be called for the slot."""
        return self._backlog_lengths[slot] >= self._unit_samples(slot)

    def buffered(self, slot: int) -> int:
        """Samples that no unit has consumed yet."""
        return self._backlog_lengths[slot]

    def take(self, slot: int) -> None:
        """Consume one unit of the slot, for `features`. ValueError where there is none."""
        if not self.is_ready(slot):
            raise ValueError(f"slot {slot} has no whole unit of audio")
        taken, held = self._unit_samples(slot), self.buffered(slot)
        if self._lengths[slot] + taken >= HISTORY_SAMPLES:
            self._drop_oldest(slot)
        row = self._backlog[slot]
        self._units[slot, :taken], self._units[slot, taken:] = row[:taken], 0.0
        row[: held - taken] = row[taken:held].copy()
        self._backlog_lengths[slot] = held - taken
        self._lengths[slot] += taken
        self._taken[slot] = taken

    def emit(self, slots: Sequence[int]) -> tuple[Tensor, list[bool]]:
        """Consume one unit of each slot and return its `features`."""
        for slot in slots:
            self.take(slot)
        return self.features(slots)

    def features(self, slots: Sequence[int]) -> tuple[Tensor, list[bool]]:
        """The features [n, UNIT_FRAMES, mel_bins] of the unit that each slot has taken last.

        The second value tells which are first units: those have no left context, and their
        first CONTEXT_FRAMES rows are zero. Until the next unit is taken it can be called again.
        """
        device = self.samples.device
        numbers = [(slot, self._lengths[slot], self._taken[slot]) for slot in slots]
        rows, lengths, taken = upload(numbers, device).unbind(1)
        is_first = [count == FIRST_UNIT_SAMPLES for _, _, count in numbers]
        first = taken == FIRST_UNIT_SAMPLES
        self._store(slots, rows, lengths - taken)

        starts = lengths // HOP - (FIRST_UNIT_SAMPLES // HOP) - CONTEXT_FRAMES
        power = self.log_mel.power(self._window(rows, starts, lengths, _WINDOW_SAMPLES))
        power[:, :CONTEXT_FRAMES].masked_fill_(first[:, None, None], 0.0)

        # The last frame sees the reflected end of the history: it counts for now, is never kept.
        frame_peaks = power.amax(-1)
        columns = starts[:, None] + CONTEXT_FRAMES + torch.arange(UNIT_FRAMES, device=device)
        self.peaks[rows[:, None], columns] = frame_peaks[:, :-1]
        peak = torch.maximum(self.peaks[rows].amax(-1), frame_peaks[:, -1])
        floor = dynamic_floor(peak).masked_fill(lengths < FIXED_FLOOR_SAMPLES, -torch.inf)
        features = self.log_mel.scale(power[:, :-1], floor[:, None, None])
        features[:, :CONTEXT_FRAMES].masked_fill_(first[:, None, None], 0.0)
        return features, is_first

    def _store(self, slots: Sequence[int], rows: Tensor, starts: Tensor) -> None:
        """Put the units taken behind the histories, in one transfer.

        What a shorter unit leaves of the width is silence, where the next one goes.
        """
        units = upload(self._units[list(slots)], rows.device)
        width = max(self._taken[slot] for slot in slots)
        columns = starts[:, None] + torch.arange(width, device=rows.device)
        self.samples[rows[:, None], columns] = units[:, :width]

    def reset(self, slot: int) -> None:
        """Forget everything of the slot."""
        self._backlog[slot] = 0.0
        self._units[slot] = 0.0
        self._backlog_lengths[slot] = self._taken[slot] = self._lengths[slot] = 0
        self.samples[slot].zero_()
        self.peaks[slot].zero_()

    def is_clean(self, slot: int) -> bool:
        """Whether nothing of a conversation is left in the slot."""
        lengths = self._backlog_lengths[slot] + self._taken[slot] + self._lengths[slot]
        on_host = self._backlog[slot].any() or self._units[slot].any()
        held = on_host or self.samples[slot].any() or self.peaks[slot].any()
        return lengths == 0 and not bool(held)

    def _unit_samples(self, slot: int) -> int:
        return UNIT_SAMPLES if self._lengths[slot] else FIRST_UNIT_SAMPLES

    def _drop_oldest(self, slot: int) -> None:
        """Make room for one more unit."""
        samples, peaks = self.samples[slot], self.peaks[slot]
        frames = DROPPED_SAMPLES // HOP
        samples[:-DROPPED_SAMPLES] = samples[DROPPED_SAMPLES:].clone()
        samples[-DROPPED_SAMPLES:] = 0.0
        peaks[:-frames] = peaks[frames:].clone()
        peaks[-frames:] = 0.0
        self._lengths[slot] -= DROPPED_SAMPLES

        # The frames at the new start now see its reflection, and none lie before it.
        rows = upload([slot], samples.device)
        start = torch.zeros_like(rows)
        length = torch.full_like(rows, self._lengths[slot])
        power = self.log_mel.power(self._window(rows, start, length, FFT_SIZE + HOP))
        peaks[:CONTEXT_FRAMES] = 0.0
        peaks[CONTEXT_FRAMES : CONTEXT_FRAMES + 2] = power[0].amax(-1)

    def _window(self, rows: Tensor, starts: Tensor, lengths: Tensor, count: int) -> Tensor:
        """`count` samples from half a window before frame `starts`, history ends reflected."""
        offsets = torch.arange(count, device=rows.device) - _HALF
        positions = (starts[:, None] * HOP + offsets).abs()
        last = lengths[:, None] - 1
        positions = torch.where(positions > last, 2 * last - positions, positions)
        return self.samples[rows[:, None], positions]
