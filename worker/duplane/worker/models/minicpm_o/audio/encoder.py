"""The streaming audio encoder: maps the live audio of many slots to embeddings for the LLM.

Its parts are the mel spectrogram, Whisper's encoder with a cache for each slot, and the projector,
which ends with average pooling.
Source: `MiniCPMO45/modeling_minicpmo_unified.py` of OpenBMB/MiniCPM-o-Demo@28b60cf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from duplane.worker.models.minicpm_o.audio.clip import (
    ClipSegment,
    batches,
    clip_buckets,
    encode_batch,
    split_clips,
    warm_up_batches,
)
from duplane.worker.models.minicpm_o.audio.mel import (
    CONTEXT_FRAMES,
    FIRST_UNIT_FILL,
    FIRST_UNIT_SAMPLES,
    UNIT_FRAMES,
    UNIT_SAMPLES,
    MelStream,
)
from duplane.worker.models.minicpm_o.audio.whisper import (
    UNIT_POSITIONS,
    AudioConfig,
    AudioProjector,
    LayerHistory,
    WhisperEncoder,
)
from duplane.worker.models.minicpm_o.batch_sizes import (
    padded_length,
    padded_size,
    padded_sizes,
)
from duplane.worker.models.minicpm_o.blocks.block import Block, Numbers
from duplane.worker.models.minicpm_o.layers import allocate
from duplane.worker.models.minicpm_o.transfer import upload

_CONTEXT_POSITIONS = CONTEXT_FRAMES // 2
RUN_UNITS = 32
"""Batches of `encode_run` with more units may have a size that `warm_up` has not run."""
LAUNCH_UNITS = (1, 2, 8)
"""The sizes of a launch of units of different slots, on a GPU. More units need several launches."""


@dataclass(frozen=True)
class UnitForm:
    """The form of a launch of one unit of each of `rows` slots.

    `span` is the number of columns of the caches that are read. `first_slot` is the first slot if
    the slots are neighbours; then the caches are read in place. Without `is_masked`, all these
    columns of all slots belong to their units.
    """

    rows: int
    span: int
    first_slot: int | None = None
    is_masked: bool = True


class AudioEncoder(nn.Module):
    """Encodes the live audio of each slot unit by unit, and whole clips.

    `mel` buffers the live audio. The weights of `apm` and `audio_projection_layer` are loaded from
    the tensors of the checkpoint whose names begin with these names. The state of the slots is
    allocated once and reset, never freed.
    """

    cache: Tensor
    columns: Tensor

    def __init__(
        self,
        config: AudioConfig,
        slot_count: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.apm = WhisperEncoder(config)
            self.audio_projection_layer = AudioProjector(config)
        allocate(self.apm, device, dtype)
        self.apm.pack()
        allocate(self.audio_projection_layer, device, dtype)
        self.mel = MelStream(config.mel_bins, slot_count, device)
        head_dim = config.width // config.head_count
        cache = torch.zeros(
            (config.layer_count, 2, slot_count, config.head_count, config.position_count, head_dim),
            device=device,
            dtype=dtype,
        )
        self.register_buffer("cache", cache, persistent=False)
        columns = torch.arange(config.position_count, device=device)
        self.register_buffer("columns", columns, persistent=False)
        self._lengths = [0] * slot_count
        self.has_buckets = torch.device(device).type == "cuda"
        """Whether batches of units and of segments are padded to few sizes; see `batch_sizes`."""
        self._block = Block[UnitForm](self._compute, torch.device(device))

    @property
    def unit_rows(self) -> int:
        """The number of embeddings of one unit."""
        return UNIT_POSITIONS // self.config.pool

    def cache_length(self, slot: int) -> int:
        """Return how many positions the slot's attention cache holds."""
        return self._lengths[slot]

    @torch.inference_mode()
    def encode(self, slots: Sequence[int]) -> Tensor:
        """Return embeddings [n, unit_rows, hidden] of the unit that `mel` last consumed per slot.

        The slots must be different; no result depends on another slot. After an exception the call
        can be repeated for the same units, with the same result.
        """
        most = LAUNCH_UNITS[-1] if self.has_buckets else len(slots)
        parts = [slots[start : start + most] for start in range(0, len(slots), most)]
        # The result of a captured form is overwritten by its next launch.
        found = [self.launch(part).clone() for part in parts]
        for slot in slots:
            self._lengths[slot] = self._begin(slot) + UNIT_POSITIONS
        return found[0] if len(found) == 1 else torch.cat(found)

    def launch(self, slots: Sequence[int]) -> Tensor:
        """Encode the units of one launch, without counting them; see `encode`."""
        return self._block.stage(*self._plan(slots)).run()[: len(slots)]

    def _plan(self, slots: Sequence[int]) -> tuple[UnitForm, Numbers]:
        """Return the form of a launch, and its numbers: the begin of each unit, and those of mel.

        If the form has more rows than there are slots, the others repeat the first row.
        """
        begins = [self._begin(slot) for slot in slots]
        form = self._padded_form(len(slots))
        if not self.has_buckets:
            span = max(begins) + UNIT_POSITIONS
            first = (
                slots[0] if list(slots) == list(range(slots[0], slots[0] + len(slots))) else None
            )
            form = UnitForm(len(slots), span, first, is_masked=min(begins) < max(begins))
        width = FIRST_UNIT_SAMPLES if self.has_buckets else None
        numbers = np.c_[begins, self.mel.numbers(slots, width)]
        return form, numbers[[*range(len(slots)), *[0] * (form.rows - len(slots))]]

    def _padded_form(self, count: int) -> UnitForm:
        """Return the form of a launch of `count` units on a GPU, which reads whole caches."""
        return UnitForm(padded_length(count, LAUNCH_UNITS), self.config.position_count)

    def _compute(self, form: UnitForm, numbers: Tensor) -> Tensor:
        """Encode units: map the numbers of `_plan` to embeddings [rows, unit_rows, hidden]."""
        starts, rows = numbers[:, :1], numbers[:, 1:2]
        features, is_first = self.mel.compute(numbers[:, 1:])
        hidden = _unit_positions(self.apm.convolve(features, is_first))
        columns = starts + self.columns[:UNIT_POSITIONS]
        hidden = hidden + self.apm.embed_positions(columns)
        slots: slice | Tensor = rows[:, 0]
        if form.first_slot is not None:
            slots = slice(form.first_slot, form.first_slot + form.rows)
        mask = None
        if form.is_masked:
            mask = (self.columns[: form.span] < starts + UNIT_POSITIONS)[:, None, None]
        for layer, cache in zip(self.apm.layers, self.cache, strict=True):
            hidden = layer(hidden, mask, LayerHistory(cache, slots, rows, columns, form.span))
        return self.audio_projection_layer(self.apm.layer_norm(hidden))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the launches of units as CUDA graphs. All slots must be clean."""
        trials = [
            (self._padded_form(count), self._trial(count)) for count in reversed(LAUNCH_UNITS)
        ]
        self._block.capture("the audio encoder", trials, self._clear)

    def _trial(self, count: int) -> list[Numbers]:
        """Return the numbers of two launches; the second one continues the first one."""
        slots = range(min(count, len(self._lengths)))
        found: list[Numbers] = []
        for size in (FIRST_UNIT_FILL, UNIT_SAMPLES):
            for slot in slots:
                noise = np.random.default_rng([size, slot]).standard_normal(size)
                self.mel.push(slot, 0.1 * noise.astype(np.float32))
                self.mel.take(slot)
            found.append(self._plan(slots)[1])
            for slot in slots:
                self._lengths[slot] = self._begin(slot) + UNIT_POSITIONS
        self._clear()
        return found

    def _clear(self) -> None:
        for slot in range(min(LAUNCH_UNITS[-1], len(self._lengths))):
            self.reset(slot)

    def _convolve(self, features: Tensor, is_first: list[bool]) -> Tensor:
        """Map the features of units [n, frames, mel_bins] to positions [n, positions, width]."""
        count = len(features)
        firsts = is_first
        if self.has_buckets:
            padding = padded_size(count) - count
            features = torch.cat((features, features[:1].expand(padding, -1, -1)))
            firsts = is_first + is_first[:1] * padding
        hidden = self.apm.convolve(features, upload(firsts, features.device))
        return _unit_positions(hidden)[:count]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run units, convolutions of runs, and clips once for each padded size.

        All slots must be clean, and are clean afterwards.
        """
        weight = self.apm.conv1.weight
        for count in LAUNCH_UNITS:
            for numbers in self._trial(count):
                self._block.stage(self._padded_form(count), numbers).run()
            self._clear()
        for size in padded_sizes(RUN_UNITS):
            features = torch.zeros((size, UNIT_FRAMES, self.config.mel_bins), device=weight.device)
            self._convolve(features, [False] * size)
        for batch in warm_up_batches(self.config):
            self.encode_segments(batch)

    @property
    def _last_begin(self) -> int:
        """The first column at which a unit may not begin, because its end would not fit.

        As in the reference, the unit needs room for its context frames, too.
        """
        return self.config.position_count - UNIT_FRAMES // 2

    @property
    def period_units(self) -> int:
        """The number of units that the cache holds before it begins anew."""
        return max(1, -(-self._last_begin // UNIT_POSITIONS))

    def _begin(self, slot: int) -> int:
        """Return the column where the slot's next unit begins: 0 if no unit fits after the last."""
        length = self._lengths[slot]
        return length if length < self._last_begin else 0

    @torch.inference_mode()
    def encode_run(self, slot: int, units: Sequence[tuple[Tensor, list[bool]]]) -> Tensor:
        """Return embeddings [units, unit_rows, hidden] of consecutive units of one slot.

        `units` are the results of `mel.features` for the slot, unit by unit. The result is as if
        `encode` had run for each unit, but units are encoded in one pass until the cache is full.
        """
        features = torch.cat([rows for rows, _ in units])
        is_first = [first for _, firsts in units for first in firsts]
        hidden = self._convolve(features, is_first)
        found: list[Tensor] = []
        while len(hidden):
            room = self._last_begin - self._begin(slot)
            count = max(1, -(-room // UNIT_POSITIONS))
            found.append(self._encode_together(slot, hidden[:count]))
            hidden = hidden[count:]
        return torch.cat(found)

    def _encode_together(self, slot: int, hidden: Tensor) -> Tensor:
        """Encode units [units, positions, width], all of which fit into the slot's cache.

        A unit attends to itself and to the units before it.
        """
        begin = self._begin(slot)
        device = hidden.device
        units = torch.arange(len(hidden), device=device).repeat_interleave(UNIT_POSITIONS)
        ends = begin + (units + 1) * UNIT_POSITIONS
        span = begin + len(units)
        mask = torch.arange(span, device=device) < ends[:, None]
        rows = upload([[slot]], device)
        columns = torch.arange(begin, span, device=device)[None]
        states = hidden.flatten(0, 1)[None] + self.apm.embed_positions(columns)
        for layer, cache in zip(self.apm.layers, self.cache, strict=True):
            history = LayerHistory(cache, slice(slot, slot + 1), rows, columns, span)
            states = layer(states, mask, history)
        states = self.apm.layer_norm(states)[0].unflatten(0, (-1, UNIT_POSITIONS))
        self._lengths[slot] = span
        return self.audio_projection_layer(states)

    def encode_clip(self, samples: np.ndarray) -> Tensor:
        """Encode a whole 16 kHz clip [n] to embeddings [rows, hidden], without a slot."""
        (segments,) = split_clips(self.config, [samples])
        weight = self.apm.conv1.weight
        none = torch.zeros((0, self.config.hidden), device=weight.device, dtype=weight.dtype)
        found = (rows for batch in self.batches(segments) for rows in self.encode_segments(batch))
        return torch.cat([none, *found])

    def batches(self, segments: Sequence[ClipSegment]) -> Iterator[Sequence[ClipSegment]]:
        """Group segments of clips, in order, into batches for `encode_segments`."""
        return batches(segments, self._clip_buckets)

    @property
    def _clip_buckets(self) -> Sequence[int]:
        return clip_buckets(self.config) if self.has_buckets else ()

    @torch.inference_mode()
    def encode_segments(
        self, segments: Sequence[ClipSegment], *, is_blockwise: bool = True
    ) -> list[Tensor]:
        """Encode segments of clips in one batch; see `clip.encode_batch`."""
        return encode_batch(
            self.apm,
            self.audio_projection_layer,
            self.mel.log_mel,
            segments,
            self._clip_buckets,
            is_blockwise=is_blockwise,
        )

    def reset(self, slot: int) -> None:
        """Zero all state of the slot."""
        self.mel.reset(slot)
        self.cache[:, :, slot].zero_()
        self._lengths[slot] = 0

    def is_clean(self, slot: int) -> bool:
        """True if all state of the slot is zero."""
        if self._lengths[slot]:
            return False
        return not bool(self.cache[:, :, slot].any()) and self.mel.is_clean(slot)


def _unit_positions(hidden: Tensor) -> Tensor:
    """Return the positions of units [n, positions, width], without those of their context."""
    return hidden[:, _CONTEXT_POSITIONS : _CONTEXT_POSITIONS + UNIT_POSITIONS]
