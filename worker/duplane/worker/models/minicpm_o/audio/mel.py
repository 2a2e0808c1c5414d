"""Whisper's log-mel features of live audio and of clips, always in float32.

Sources: Whisper (https://arxiv.org/abs/2212.04356), and the class `StreamingMelProcessorExact` of
`MiniCPMO45/processing_minicpmo.py` in OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from duplane.worker.models.minicpm_o.blocks.block import Numbers
from duplane.worker.models.minicpm_o.transfer import upload

SAMPLE_RATE = 16000
FFT_SIZE = 400
HOP = 160
FRAMES_PER_SECOND = SAMPLE_RATE // HOP

UNIT_SAMPLES = SAMPLE_RATE
FIRST_UNIT_SAMPLES = 16480
"""Samples that the first unit consumes: 1035 ms, rounded down to whole hops."""
FIRST_UNIT_FILL = 16560
"""Least number of samples in the input at the first unit: 1035 ms. A shorter input gets silence in
front. The first unit consumes 80 samples less, so 80 samples stay in the input for the whole
session."""

CORE_FRAMES = UNIT_SAMPLES // HOP
CONTEXT_FRAMES = 2
"""Frames of the neighbouring units that a unit's mel has on each side, for the convolutions."""
UNIT_FRAMES = CORE_FRAMES + 2 * CONTEXT_FRAMES

HISTORY_SAMPLES = 30 * SAMPLE_RATE
"""Length at which a slot's history of samples drops its oldest DROPPED_SAMPLES."""
DROPPED_SAMPLES = 10 * SAMPLE_RATE
FIXED_FLOOR_SAMPLES = 5 * SAMPLE_RATE
"""A history shorter than this has a fixed floor of its log-mel. In a longer one, the floor depends
on the maximum."""
BACKLOG_SAMPLES = 30 * SAMPLE_RATE
"""Maximum number of samples of a slot that no unit has consumed yet."""

POWER_FLOOR = 1e-10
DYNAMIC_RANGE = 8.0

_WINDOW_FRAMES = UNIT_FRAMES + 1
_WINDOW_SAMPLES = (_WINDOW_FRAMES - 1) * HOP + FFT_SIZE
_HALF = FFT_SIZE // 2


class LogMel(nn.Module):
    """Computes the mel power of frames, and scales the logarithm of this power as Whisper does."""

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
        """Map padded samples [n, (frames - 1) * HOP + FFT_SIZE] to power [n, frames, mel_bins]."""
        spectrum = torch.stft(
            samples, FFT_SIZE, HOP, window=self.window, center=False, return_complex=True
        )
        return spectrum.abs().square().transpose(1, 2) @ self.filters

    def scale(self, power: Tensor, floor: Tensor | float) -> Tensor:
        """Map power to Whisper's features: log10, not below `floor`, scaled to about [-1, 1]."""
        logarithm = power.clamp(min=POWER_FLOOR).log10()
        floor = torch.as_tensor(floor, dtype=logarithm.dtype, device=logarithm.device)
        return (torch.maximum(logarithm, floor) + 4.0) / 4.0

    def clip(self, samples: np.ndarray) -> Tensor:
        """Compute features [ceil(n / HOP), mel_bins] of a clip [n] of at most 30 s.

        The clip is padded with silence to 30 s first, as in the training of the encoder.
        """
        device = self.window.device
        padded = torch.zeros(1, HISTORY_SAMPLES, device=device)
        padded[0, : len(samples)] = upload(samples, device, torch.float32)
        padded = nn.functional.pad(padded, (_HALF, _HALF), mode="reflect")
        power = self.power(padded)[0, :-1]  # Whisper drops the last frame
        frames = -(-len(samples) // HOP)
        return self.scale(power[:frames], dynamic_floor(power.amax()))


def dynamic_floor(peak: Tensor) -> Tensor:
    """Compute the floor of a log-mel whose largest power is `peak`."""
    return peak.clamp(min=POWER_FLOOR).log10() - DYNAMIC_RANGE


class AudioBacklogError(ValueError):
    """The pushed audio is more than the slot may hold. The slot is unchanged."""


class MelStream(nn.Module):
    """The mel of each slot's live audio, unit by unit.

    In the reference, a unit's features are cut from the mel of the slot's whole history (up to
    30 s). The floor of this mel depends on its loudest frame. Here only the frames of the unit are
    computed, and only the peak of each earlier frame is kept. The loudest peak is the same: later
    input changes only frames at the ends of the history, and their peaks are computed again.
    """

    samples: Tensor
    peaks: Tensor

    def __init__(self, mel_bins: int, slot_count: int, device: str | torch.device = "cpu") -> None:
        super().__init__()
        self.log_mel = LogMel(mel_bins, device)
        # The samples of each slot are in one row. The last consumed unit ends at
        # `_begins[slot]`. The samples that are not consumed yet follow, up to `_ends[slot]`.
        self._input = np.zeros((slot_count, FIRST_UNIT_SAMPLES + BACKLOG_SAMPLES), np.float32)
        self._begins = [0] * slot_count
        self._ends = [0] * slot_count
        self._taken = [0] * slot_count
        self._lengths = [0] * slot_count
        capacity = HISTORY_SAMPLES + FIRST_UNIT_SAMPLES
        # Column j of `peaks` belongs to frame j - CONTEXT_FRAMES. Columns without a frame are 0.
        columns = capacity // HOP + CONTEXT_FRAMES
        samples = torch.zeros(slot_count, capacity, device=device)
        self.register_buffer("samples", samples, persistent=False)
        self.register_buffer(
            "peaks", torch.zeros(slot_count, columns, device=device), persistent=False
        )

    def push(self, slot: int, samples: np.ndarray) -> bool:
        """Append 16 kHz samples [n]. Return True if a whole unit is buffered.

        Raises ValueError for samples that are not one-dimensional or not finite, and
        `AudioBacklogError` for more samples than the slot may hold. In both cases the slot is
        unchanged.
        """
        if samples.ndim != 1 or not np.isfinite(samples).all():
            raise ValueError("audio: expected one row of finite samples")
        held = self.buffered(slot)
        fill = 0
        if self._lengths[slot] == 0 and len(samples):
            fill = max(0, FIRST_UNIT_FILL - held - len(samples))
        total = held + fill + len(samples)
        if total > BACKLOG_SAMPLES:
            raise AudioBacklogError(
                f"audio: {total / SAMPLE_RATE:.1f} s are waiting, "
                f"at most {BACKLOG_SAMPLES // SAMPLE_RATE} s are kept"
            )
        row = self._input[slot]
        begin = self._begins[slot]
        if fill:  # nothing has been consumed yet
            row[fill : fill + held] = row[:held].copy()
            row[:fill] = 0.0
        elif begin + total > len(row):
            kept = self._taken[slot] + held
            row[:kept] = row[begin - self._taken[slot] : begin + held].copy()
            begin = self._begins[slot] = self._taken[slot]
        row[begin + fill + held : begin + total] = samples
        self._ends[slot] = begin + total
        return total >= self._unit_samples(slot)

    def buffered(self, slot: int) -> int:
        """Return the number of samples that no unit has consumed yet."""
        return self._ends[slot] - self._begins[slot]

    def take(self, slot: int) -> None:
        """Consume one unit of the slot, for `features`. Raises ValueError without a whole unit."""
        taken = self._unit_samples(slot)
        if self.buffered(slot) < taken:
            raise ValueError(f"slot {slot} has no whole unit of audio")
        if self._lengths[slot] + taken >= HISTORY_SAMPLES:
            self._drop_oldest(slot)
        self._begins[slot] += taken
        self._lengths[slot] += taken
        self._taken[slot] = taken

    def numbers(self, slots: Sequence[int], width: int | None = None) -> Numbers:
        """Return the input of `compute` for the unit that each slot consumed last, [n, numbers].

        A row has the slot, the length of its history with the unit, the number of samples of the
        unit, and these samples, two in each number. The samples of all units are padded to `width`,
        or to those of the longest unit, with silence, which the next unit of a slot overwrites.
        """
        width = width or max(self._taken[slot] for slot in slots)
        samples = np.zeros((len(slots), width), np.float32)
        for unit, slot in zip(samples, slots, strict=True):
            taken, begin = self._taken[slot], self._begins[slot]
            unit[:taken] = self._input[slot, begin - taken : begin]
        counts = [(slot, self._lengths[slot], self._taken[slot]) for slot in slots]
        return np.concatenate((np.array(counts, np.int64), samples.view(np.int64)), 1)

    def compute(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return features [n, UNIT_FRAMES, mel_bins] of units, whose `numbers` are on the device.

        Also returns, for each slot, whether this is the slot's first unit. A first unit has no left
        context: its first CONTEXT_FRAMES rows are zero. The call can be repeated until the next
        unit is consumed, and can be captured as a CUDA graph.
        """
        (rows, lengths, taken), samples = numbers[:, :3].unbind(1), numbers[:, 3:]
        first = taken == FIRST_UNIT_SAMPLES
        begins = lengths - taken
        columns = begins[:, None] + torch.arange(2 * samples.shape[1], device=rows.device)
        self.samples[rows[:, None], columns] = samples.view(torch.float32)

        starts = lengths // HOP - (FIRST_UNIT_SAMPLES // HOP) - CONTEXT_FRAMES
        power = self.log_mel.power(self._window(rows, starts, lengths, _WINDOW_SAMPLES))
        power[:, :CONTEXT_FRAMES].masked_fill_(first[:, None, None], 0.0)

        # The last frame contains the reflected end of the history. So its peak counts only for
        # this unit and is not kept.
        frame_peaks = power.amax(-1)
        columns = starts[:, None] + CONTEXT_FRAMES + torch.arange(UNIT_FRAMES, device=rows.device)
        self.peaks[rows[:, None], columns] = frame_peaks[:, :-1]
        peak = torch.maximum(self.peaks[rows].amax(-1), frame_peaks[:, -1])
        floor = dynamic_floor(peak).masked_fill(lengths < FIXED_FLOOR_SAMPLES, -torch.inf)
        features = self.log_mel.scale(power[:, :-1], floor[:, None, None])
        features[:, :CONTEXT_FRAMES].masked_fill_(first[:, None, None], 0.0)
        return features, first

    def features(self, slots: Sequence[int]) -> tuple[Tensor, list[bool]]:
        """Return what `compute` returns for the unit that each slot consumed last."""
        features, _ = self.compute(upload(self.numbers(slots), self.samples.device))
        return features, [self._taken[slot] == FIRST_UNIT_SAMPLES for slot in slots]

    def reset(self, slot: int) -> None:
        """Zero all state of the slot."""
        self._input[slot] = 0.0
        self._begins[slot] = self._ends[slot] = 0
        self._taken[slot] = self._lengths[slot] = 0
        self.samples[slot].zero_()
        self.peaks[slot].zero_()

    def is_clean(self, slot: int) -> bool:
        """True if all state of the slot is zero."""
        lengths = self._ends[slot] + self._taken[slot] + self._lengths[slot]
        held = self._input[slot].any() or self.samples[slot].any() or self.peaks[slot].any()
        return lengths == 0 and not bool(held)

    def _unit_samples(self, slot: int) -> int:
        return UNIT_SAMPLES if self._lengths[slot] else FIRST_UNIT_SAMPLES

    def _drop_oldest(self, slot: int) -> None:
        """Drop the oldest samples of the slot's history, to make room for a unit."""
        samples, peaks = self.samples[slot], self.peaks[slot]
        frames = DROPPED_SAMPLES // HOP
        samples[:-DROPPED_SAMPLES] = samples[DROPPED_SAMPLES:].clone()
        samples[-DROPPED_SAMPLES:] = 0.0
        peaks[:-frames] = peaks[frames:].clone()
        peaks[-frames:] = 0.0
        self._lengths[slot] -= DROPPED_SAMPLES

        # The first frames now contain the reflected start of the history, so their peaks change.
        rows = upload([slot], samples.device)
        start = torch.zeros_like(rows)
        length = torch.full_like(rows, self._lengths[slot])
        power = self.log_mel.power(self._window(rows, start, length, FFT_SIZE + HOP))
        peaks[:CONTEXT_FRAMES] = 0.0
        peaks[CONTEXT_FRAMES : CONTEXT_FRAMES + 2] = power[0].amax(-1)

    def _window(self, rows: Tensor, starts: Tensor, lengths: Tensor, count: int) -> Tensor:
        """Return `count` samples of each row, from half a window before the centre of a frame.

        `starts` has the number of this frame for each row. The history of a slot is reflected at
        its start and at its end.
        """
        offsets = torch.arange(count, device=rows.device) - _HALF
        positions = (starts[:, None] * HOP + offsets).abs()
        last = lengths[:, None] - 1
        positions = torch.where(positions > last, 2 * last - positions, positions)
        return self.samples[rows[:, None], positions]
